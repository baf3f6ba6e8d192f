// RMS norm, rotary embedding and the gated activations: one pass over rows each.
// Compiled once an instruction set.
#include "activation.h"
#include "kernels.h"
#include "simd.h"

#include <cmath>

namespace octavo {
namespace OCTAVO_ISA {
namespace {

// Elements at `i` up to `end`, of which the last vector may be partial.
inline vfloat load_up_to(const float* p, int i, int end) {
  return i + kLanes <= end ? load(p + i) : load_first(p + i, end - i);
}
inline void store_up_to(float* p, int i, int end, vfloat v) {
  if (i + kLanes <= end) {
    store(p + i, v);
  } else {
    store_first(p + i, v, end - i);
  }
}

void rotate_head(float* x, const float* cos, const float* sin, int half) {
  for (int i = 0; i < half; i += kLanes) {
    const vfloat c = load_up_to(cos, i, half), s = load_up_to(sin, i, half);
    const vfloat first = load_up_to(x, i, half), second = load_up_to(x + half, i, half);
    store_up_to(x, i, half, sub(mul(first, c), mul(second, s)));
    store_up_to(x + half, i, half, add(mul(second, c), mul(first, s)));
  }
}

}  // namespace

void rms_norm(const NormTask& task, int row_begin, int row_end) {
  const int width = task.width;
  for (int row = row_begin; row < row_end; ++row) {
    const float* x = task.x + row * task.x_stride;
    // Two sums, so that an addition need not wait for the one before.
    vfloat even = zero(), odd = zero();
    if (task.residual != nullptr) {
      float* residual = task.residual + static_cast<ptrdiff_t>(row) * width;
      for (int i = 0; i < width; i += kLanes) {
        const vfloat v = add(load_up_to(residual, i, width), load_up_to(x, i, width));
        store_up_to(residual, i, width, v);
        vfloat& total = (i / kLanes) % 2 == 0 ? even : odd;
        total = fma(v, v, total);
      }
      x = residual;
    } else {
      for (int i = 0; i < width; i += kLanes) {
        const vfloat v = load_up_to(x, i, width);
        vfloat& total = (i / kLanes) % 2 == 0 ? even : odd;
        total = fma(v, v, total);
      }
    }
    if (task.out == nullptr) continue;
    const float mean_square = sum_lanes(add(even, odd)) / static_cast<float>(width);
    const vfloat factor = set1(1.0f / sqrtf(mean_square + task.eps));
    float* out = task.out + static_cast<ptrdiff_t>(row) * width;
    for (int i = 0; i < width; i += kLanes) {
      store_up_to(out, i, width, mul(mul(load_up_to(x, i, width), factor), load_up_to(task.weight, i, width)));
    }
  }
}

void rotary(const RotaryTask& task, int row_begin, int row_end) {
  const int half = task.rotary_dim / 2;
  for (int row = row_begin; row < row_end; ++row) {
    const float* cos = task.cos_sin + static_cast<ptrdiff_t>(task.positions[row]) * task.rotary_dim;
    for (int head = 0; head < task.num_heads; ++head) {
      rotate_head(task.x + row * task.row_stride + head * task.head_dim, cos, cos + half, half);
    }
  }
}

void silu_and_mul(const GatedTask& task, int row_begin, int row_end) {
  for (int row = row_begin; row < row_end; ++row) {
    const float* gate = task.gate_up + row * task.row_stride;
    const float* up = gate + task.width;
    float* out = task.out + static_cast<ptrdiff_t>(row) * task.width;
    for (int i = 0; i < task.width; i += kLanes) {
      const vfloat g = load_up_to(gate, i, task.width);
      store_up_to(out, i, task.width, mul(silu(g), load_up_to(up, i, task.width)));
    }
  }
}

void gelu_and_mul(const GatedTask& task, int row_begin, int row_end) {
  for (int row = row_begin; row < row_end; ++row) {
    const float* gate = task.gate_up + row * task.row_stride;
    const float* up = gate + task.width;
    float* out = task.out + static_cast<ptrdiff_t>(row) * task.width;
    for (int i = 0; i < task.width; i += kLanes) {
      const vfloat g = load_up_to(gate, i, task.width);
      store_up_to(out, i, task.width, mul(gelu_tanh(g), load_up_to(up, i, task.width)));
    }
  }
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
