// The quantized matmul with NEON. Compiled twice: with the dot product of bytes (SDOT, `neondot`), which multiplies and
// adds four inputs of four channels, and without (`neon`), where products are added up in 16 bits first. The sums are
// exact integers either way, and the arithmetic is that of matmul_quant_scalar.cpp with fused multiply-adds.
#include "kernels.h"
#include "numbers.h"

#include <arm_neon.h>

namespace octavo {
namespace OCTAVO_ISA {
namespace {

constexpr int kMaxRows = 4;

// Four floats from `at`.
inline float32x4_t load_four(const Buffer& from, bool is_half, size_t at) {
  if (!is_half) return vld1q_f32(from.as<float>() + at);
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&from.as<half>()[at].bits)));
}

inline float32x4_t load_code_sums(const Buffer& from, size_t at) {
  return vcvtq_f32_s32(vmovl_s16(vld1_s16(from.as<int16_t>() + at)));
}

#if defined(__ARM_FEATURE_DOTPROD)

// Sums of one group for R rows, in V vectors of four channels. w: of these channels, rows of 64 bytes apart.
template <int R, int V>
inline void dot_q4(const uint8_t* w, const int8_t* x, ptrdiff_t x_stride, int32x4_t dot[R][V]) {
  const uint8x16_t low_half = vdupq_n_u8(15);
  int8x16_t first[R], second[R];  // inputs 0 to 15 and 16 to 31, four a lane
  for (int r = 0; r < R; ++r) {
    first[r] = vld1q_s8(x + r * x_stride);
    second[r] = vld1q_s8(x + r * x_stride + 16);
    for (int v = 0; v < V; ++v) dot[r][v] = vdupq_n_s32(0);
  }
  // The lane is part of the instruction: the four steps are written out.
#define OCTAVO_STEP(j)                                                    \
  for (int v = 0; v < V; ++v) {                                           \
    const uint8x16_t codes = vld1q_u8(w + (j) * 64 + v * 16);             \
    const int8x16_t low = vreinterpretq_s8_u8(vandq_u8(codes, low_half)); \
    const int8x16_t high = vreinterpretq_s8_u8(vshrq_n_u8(codes, 4));     \
    for (int r = 0; r < R; ++r) {                                         \
      dot[r][v] = vdotq_laneq_s32(dot[r][v], low, first[r], j);           \
      dot[r][v] = vdotq_laneq_s32(dot[r][v], high, second[r], j);         \
    }                                                                     \
  }
  OCTAVO_STEP(0)
  OCTAVO_STEP(1)
  OCTAVO_STEP(2)
  OCTAVO_STEP(3)
#undef OCTAVO_STEP
}

template <int R, int V>
inline void dot_q8(const uint8_t* w, const int8_t* x, ptrdiff_t x_stride, int32x4_t dot[R][V]) {
  const uint8x16_t raised = vdupq_n_u8(128);
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) dot[r][v] = vdupq_n_s32(0);
  }
  for (int half = 0; half < 2; ++half, w += 256, x += 16) {
    int8x16_t inputs[R];
    for (int r = 0; r < R; ++r) inputs[r] = vld1q_s8(x + r * x_stride);
#define OCTAVO_STEP(j)                                                                              \
  for (int v = 0; v < V; ++v) {                                                                     \
    const int8x16_t codes = vreinterpretq_s8_u8(veorq_u8(vld1q_u8(w + (j) * 64 + v * 16), raised)); \
    for (int r = 0; r < R; ++r) dot[r][v] = vdotq_laneq_s32(dot[r][v], codes, inputs[r], j);        \
  }
    OCTAVO_STEP(0)
    OCTAVO_STEP(1)
    OCTAVO_STEP(2)
    OCTAVO_STEP(3)
#undef OCTAVO_STEP
  }
}

#else

// Four inputs, repeated for four channels.
inline int8x16_t quad(const int8_t* p) {
  int32_t four;
  __builtin_memcpy(&four, p, 4);
  return vreinterpretq_s8_s32(vdupq_n_s32(four));
}

template <int R, int V>
inline void dot_q4(const uint8_t* w, const int8_t* x, ptrdiff_t x_stride, int32x4_t dot[R][V]) {
  const uint8x16_t low_half = vdupq_n_u8(15);
  // Lanes are the products of one input of two channels each; 16 bits hold the group: 8 * 15 * 127 is 15,240.
  int16x8_t front[R][V], back[R][V];
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) front[r][v] = back[r][v] = vdupq_n_s16(0);
  }
  for (int j = 0; j < 4; ++j) {
    int8x16_t low[V], high[V];
    for (int v = 0; v < V; ++v) {
      const uint8x16_t codes = vld1q_u8(w + j * 64 + v * 16);
      low[v] = vreinterpretq_s8_u8(vandq_u8(codes, low_half));
      high[v] = vreinterpretq_s8_u8(vshrq_n_u8(codes, 4));
    }
    for (int r = 0; r < R; ++r) {
      const int8x16_t a = quad(x + r * x_stride + j * 4), b = quad(x + r * x_stride + 16 + j * 4);
      for (int v = 0; v < V; ++v) {
        front[r][v] = vmlal_s8(front[r][v], vget_low_s8(low[v]), vget_low_s8(a));
        back[r][v] = vmlal_high_s8(back[r][v], low[v], a);
        front[r][v] = vmlal_s8(front[r][v], vget_low_s8(high[v]), vget_low_s8(b));
        back[r][v] = vmlal_high_s8(back[r][v], high[v], b);
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) dot[r][v] = vpaddq_s32(vpaddlq_s16(front[r][v]), vpaddlq_s16(back[r][v]));
  }
}

template <int R, int V>
inline void dot_q8(const uint8_t* w, const int8_t* x, ptrdiff_t x_stride, int32x4_t dot[R][V]) {
  const uint8x16_t raised = vdupq_n_u8(128);
  int32x4_t front[R][V], back[R][V];  // of two channels each
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) front[r][v] = back[r][v] = vdupq_n_s32(0);
  }
  for (int j = 0; j < 8; j += 2) {
    int8x16_t even[V], odd[V];
    for (int v = 0; v < V; ++v) {
      even[v] = vreinterpretq_s8_u8(veorq_u8(vld1q_u8(w + j * 64 + v * 16), raised));
      odd[v] = vreinterpretq_s8_u8(veorq_u8(vld1q_u8(w + j * 64 + 64 + v * 16), raised));
    }
    for (int r = 0; r < R; ++r) {
      // 16 bits hold two products, 2 * 128 * 127 is 32,512, and no third.
      const int8x16_t a = quad(x + r * x_stride + j * 4), b = quad(x + r * x_stride + j * 4 + 4);
      for (int v = 0; v < V; ++v) {
        const int16x8_t two =
            vmlal_s8(vmull_s8(vget_low_s8(even[v]), vget_low_s8(a)), vget_low_s8(odd[v]), vget_low_s8(b));
        front[r][v] = vpadalq_s16(front[r][v], two);
        back[r][v] = vpadalq_s16(back[r][v], vmlal_high_s8(vmull_high_s8(even[v], a), odd[v], b));
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) dot[r][v] = vpaddq_s32(front[r][v], back[r][v]);
  }
}

#endif

// R rows by 4 * V channels from `channel` of the panel.
template <bool is_q4, int R, int V>
void tile(const MatmulTask& task, int row, int panel, int channel) {
  constexpr size_t group_bytes = is_q4 ? 256 : 512;
  const PackedMatrix& matrix = *task.matrix;
  const int num_groups = matrix.num_groups();
  const bool is_half = matrix.has_half_scales;
  const bool has_minimum = matrix.minimum.size() > 0;
  const uint8_t* codes =
      matrix.values.as<uint8_t>() + static_cast<size_t>(panel) * num_groups * group_bytes + channel * 4;
  const size_t first = static_cast<size_t>(row) * num_groups;
  const int8_t* x = task.quantized.codes + first * kGroupSize;
  const float* x_scale = task.quantized.scale + first;
  const float* x_middle = task.quantized.middle + first;
  const float* x_sum = task.quantized.sum + first;
  size_t w_at = static_cast<size_t>(panel) * num_groups * kPanelWidth + channel;

  float32x4_t total[R][V];
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) total[r][v] = vdupq_n_f32(0.0f);
  }
  for (int group = 0; group < num_groups; ++group, codes += group_bytes, x += kGroupSize, w_at += kPanelWidth) {
    int32x4_t dot[R][V];
    if (is_q4) {
      dot_q4<R, V>(codes, x, matrix.num_columns, dot);
    } else {
      dot_q8<R, V>(codes, x, matrix.num_columns, dot);
    }
    for (int v = 0; v < V; ++v) {
      const float32x4_t scale = load_four(matrix.scale, is_half, w_at + v * 4);
      const float32x4_t code_sum = load_code_sums(matrix.code_sum, w_at + v * 4);
      for (int r = 0; r < R; ++r) {
        const float32x4_t scaled = vmulq_n_f32(vcvtq_f32_s32(dot[r][v]), x_scale[r * num_groups + group]);
        const float32x4_t middle = vdupq_n_f32(x_middle[r * num_groups + group]);
        total[r][v] = vfmaq_f32(total[r][v], scale, vfmaq_f32(scaled, code_sum, middle));
      }
    }
    if (has_minimum) {
      for (int v = 0; v < V; ++v) {
        const float32x4_t minimum = load_four(matrix.minimum, is_half, w_at + v * 4);
        for (int r = 0; r < R; ++r) {
          total[r][v] = vfmaq_f32(total[r][v], minimum, vdupq_n_f32(x_sum[r * num_groups + group]));
        }
      }
    }
  }
  const int first_channel = panel * kPanelWidth + channel;
  const int left = matrix.num_rows - first_channel;
  for (int r = 0; r < R; ++r) {
    float lanes[V * 4];
    for (int v = 0; v < V; ++v) vst1q_f32(lanes + v * 4, total[r][v]);
    float* out = task.out + (row + r) * task.out_stride + first_channel;
    for (int c = 0; c < V * 4 && c < left; ++c) {
      const float result = task.bias == nullptr ? lanes[c] : lanes[c] + task.bias[first_channel + c];
      out[c] = task.is_added ? out[c] + result : result;
    }
  }
}

// Few rows read the weights once, in order. Of more, each half of a panel in turn: sums of 16 channels and 4 rows are
// more than the registers hold.
template <bool is_q4, int R>
void rows_of_panel(const MatmulTask& task, int row, int panel) {
  if (R <= 2) {
    tile<is_q4, R, 4>(task, row, panel, 0);
  } else {
    tile<is_q4, R, 2>(task, row, panel, 0);
    tile<is_q4, R, 2>(task, row, panel, 8);
  }
}

template <bool is_q4>
void matmul(const MatmulTask& task) {
  for (int panel = task.panel_begin; panel < task.panel_end; ++panel) {
    int row = task.row_begin;
    for (; row + kMaxRows <= task.row_end; row += kMaxRows) rows_of_panel<is_q4, kMaxRows>(task, row, panel);
    switch (task.row_end - row) {
      case 3: rows_of_panel<is_q4, 3>(task, row, panel); break;
      case 2: rows_of_panel<is_q4, 2>(task, row, panel); break;
      case 1: rows_of_panel<is_q4, 1>(task, row, panel); break;
      default: break;
    }
  }
}

}  // namespace

const int kMatmulRowTile = kMaxRows;
const bool kMatmulCanGate = false;

void matmul_q4(const MatmulTask& task) { matmul<true>(task); }
void matmul_q8(const MatmulTask& task) { matmul<false>(task); }

}  // namespace OCTAVO_ISA
}  // namespace octavo
