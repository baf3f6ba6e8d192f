// The quantized matmul in plain C++: the pattern the other variants follow.
//
// A weight is sw * c + minimum and an activation middle + sa * q, so a group of 32 adds
//     sw * (sa * sum(c * q) + middle * sum(c)) + minimum * sum(middle + sa * q)
// to its output, where sum(c * q) and sum(c) are exact integers. Groups are added in order, these two terms one after the
// other. No variant adds in another order.
#include "kernels.h"
#include "numbers.h"

namespace octavo {
namespace OCTAVO_ISA {
namespace {

float read(const Buffer& from, bool is_half, size_t at) {
  return is_half ? to_float(from.as<half>()[at]) : from.as<float>()[at];
}

// Dot products of one group: codes of x [32] with 16 channels.
void dot_q4(const uint8_t* w, const int8_t* x, int32_t* dot) {
  for (int c = 0; c < kPanelWidth; ++c) dot[c] = 0;
  for (int j = 0; j < 4; ++j) {
    for (int c = 0; c < kPanelWidth; ++c) {
      for (int i = 0; i < 4; ++i) {
        const int byte = w[j * 64 + c * 4 + i];
        dot[c] += (byte & 15) * x[j * 4 + i] + (byte >> 4) * x[16 + j * 4 + i];
      }
    }
  }
}

void dot_q8(const uint8_t* w, const int8_t* x, int32_t* dot) {
  for (int c = 0; c < kPanelWidth; ++c) dot[c] = 0;
  for (int j = 0; j < 8; ++j) {
    for (int c = 0; c < kPanelWidth; ++c) {
      for (int i = 0; i < 4; ++i) dot[c] += (static_cast<int>(w[j * 64 + c * 4 + i]) - 128) * x[j * 4 + i];
    }
  }
}

template <bool is_q4>
void matmul(const MatmulTask& task) {
  constexpr size_t group_bytes = is_q4 ? 256 : 512;
  const PackedMatrix& matrix = *task.matrix;
  const int num_groups = matrix.num_groups();
  const bool is_half = matrix.has_half_scales;
  const bool has_minimum = matrix.minimum.size() > 0;
  for (int panel = task.panel_begin; panel < task.panel_end; ++panel) {
    const uint8_t* codes = matrix.values.as<uint8_t>() + static_cast<size_t>(panel) * num_groups * group_bytes;
    for (int row = task.row_begin; row < task.row_end; ++row) {
      float total[kPanelWidth] = {};
      for (int group = 0; group < num_groups; ++group) {
        const size_t x_at = static_cast<size_t>(row) * num_groups + group;
        const size_t w_at = (static_cast<size_t>(panel) * num_groups + group) * kPanelWidth;
        int32_t dot[kPanelWidth];
        (is_q4 ? dot_q4 : dot_q8)(codes + group * group_bytes, task.quantized.codes + x_at * kGroupSize, dot);
        for (int c = 0; c < kPanelWidth; ++c) {
          const float code_sum = static_cast<float>(matrix.code_sum.as<int16_t>()[w_at + c]);
          const float product =
              static_cast<float>(dot[c]) * task.quantized.scale[x_at] + code_sum * task.quantized.middle[x_at];
          total[c] += read(matrix.scale, is_half, w_at + c) * product;
          if (has_minimum) total[c] += read(matrix.minimum, is_half, w_at + c) * task.quantized.sum[x_at];
        }
      }
      for (int c = 0; c < kPanelWidth && panel * kPanelWidth + c < matrix.num_rows; ++c) {
        const int channel = panel * kPanelWidth + c;
        const float result = task.bias == nullptr ? total[c] : total[c] + task.bias[channel];
        float& out = task.out[row * task.out_stride + channel];
        out = task.is_added ? out + result : result;
      }
    }
  }
}

}  // namespace

const int kMatmulRowTile = 4;
const bool kMatmulCanGate = false;

void matmul_q4(const MatmulTask& task) { matmul<true>(task); }
void matmul_q8(const MatmulTask& task) { matmul<false>(task); }

}  // namespace OCTAVO_ISA
}  // namespace octavo
