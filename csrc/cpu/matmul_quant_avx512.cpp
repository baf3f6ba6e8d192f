// The quantized matmul with AVX-512 VNNI: one instruction multiplies and adds four inputs of 16 channels. The arithmetic
// is that of matmul_quant_scalar.cpp, with fused multiply-adds.
#include "kernels.h"
#include "numbers.h"

#include <immintrin.h>

namespace octavo {
namespace OCTAVO_ISA {
namespace {

constexpr int kMaxRows = 6;
constexpr int kMaxPanels = 2;

inline __m512i quad(const int8_t* p) {
  int32_t four;
  __builtin_memcpy(&four, p, 4);
  return _mm512_set1_epi32(four);
}

inline __m512 load_panel(const Buffer& from, bool is_half, size_t at) {
  if (!is_half) return _mm512_load_ps(from.as<float>() + at);
  return _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(from.as<half>() + at)));
}

inline __m512 load_code_sums(const Buffer& from, size_t at) {
  const __m256i sums = _mm256_load_si256(reinterpret_cast<const __m256i*>(from.as<int16_t>() + at));
  return _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(sums));
}

template <bool is_q4, int R, int P>
void tile(const MatmulTask& task, int row, int panel) {
  constexpr size_t group_bytes = is_q4 ? 256 : 512;
  const PackedMatrix& matrix = *task.matrix;
  const int num_groups = matrix.num_groups();
  const bool is_half = matrix.has_half_scales;
  const bool has_minimum = matrix.minimum.size() > 0;
  const size_t panel_bytes = num_groups * group_bytes;
  const size_t panel_floats = static_cast<size_t>(num_groups) * kPanelWidth;
  const uint8_t* codes = matrix.values.as<uint8_t>() + panel * panel_bytes;
  const ptrdiff_t x_stride = matrix.num_columns;
  const size_t first = static_cast<size_t>(row) * num_groups;
  const int8_t* x = task.quantized.codes + first * kGroupSize;
  const float* x_scale = task.quantized.scale + first;
  const float* x_middle = task.quantized.middle + first;
  const float* x_sum = task.quantized.sum + first;
  const int32_t* x_offset = task.quantized.offset + first;
  size_t w_at = panel * panel_floats;
  const __m512i low_half = _mm512_set1_epi8(15);

  __m512 total[R][P];
  for (int r = 0; r < R; ++r) {
    for (int p = 0; p < P; ++p) total[r][p] = _mm512_setzero_ps();
  }
  for (int group = 0; group < num_groups; ++group, codes += group_bytes, x += kGroupSize, w_at += kPanelWidth) {
    __m512i dot[R][P];
    for (int r = 0; r < R; ++r) {
      // q8 codes are stored raised by 128; the sum of x times 128 is taken back first.
      const __m512i start = is_q4 ? _mm512_setzero_si512() : _mm512_set1_epi32(x_offset[r * num_groups + group]);
      for (int p = 0; p < P; ++p) dot[r][p] = start;
    }
    for (int j = 0; j < (is_q4 ? 4 : 8); ++j) {
      __m512i w[P];
      for (int p = 0; p < P; ++p) w[p] = _mm512_load_si512(codes + p * panel_bytes + j * 64);
      if (is_q4) {
        __m512i low[P], high[P];
        for (int p = 0; p < P; ++p) {
          low[p] = _mm512_and_si512(w[p], low_half);
          high[p] = _mm512_and_si512(_mm512_srli_epi16(w[p], 4), low_half);
        }
        for (int r = 0; r < R; ++r) {
          const __m512i a = quad(x + r * x_stride + j * 4);
          for (int p = 0; p < P; ++p) dot[r][p] = _mm512_dpbusd_epi32(dot[r][p], low[p], a);
        }
        for (int r = 0; r < R; ++r) {
          const __m512i a = quad(x + r * x_stride + 16 + j * 4);
          for (int p = 0; p < P; ++p) dot[r][p] = _mm512_dpbusd_epi32(dot[r][p], high[p], a);
        }
      } else {
        for (int r = 0; r < R; ++r) {
          const __m512i a = quad(x + r * x_stride + j * 4);
          for (int p = 0; p < P; ++p) dot[r][p] = _mm512_dpbusd_epi32(dot[r][p], w[p], a);
        }
      }
    }
    __m512 scale[P], code_sum[P];
    for (int p = 0; p < P; ++p) {
      scale[p] = load_panel(matrix.scale, is_half, w_at + p * panel_floats);
      code_sum[p] = load_code_sums(matrix.code_sum, w_at + p * panel_floats);
    }
    for (int r = 0; r < R; ++r) {
      const __m512 sa = _mm512_set1_ps(x_scale[r * num_groups + group]);
      const __m512 middle = _mm512_set1_ps(x_middle[r * num_groups + group]);
      for (int p = 0; p < P; ++p) {
        const __m512 product = _mm512_fmadd_ps(code_sum[p], middle, _mm512_mul_ps(_mm512_cvtepi32_ps(dot[r][p]), sa));
        total[r][p] = _mm512_fmadd_ps(scale[p], product, total[r][p]);
      }
    }
    if (has_minimum) {
      __m512 minimum[P];
      for (int p = 0; p < P; ++p) minimum[p] = load_panel(matrix.minimum, is_half, w_at + p * panel_floats);
      for (int r = 0; r < R; ++r) {
        const __m512 sum = _mm512_set1_ps(x_sum[r * num_groups + group]);
        for (int p = 0; p < P; ++p) total[r][p] = _mm512_fmadd_ps(minimum[p], sum, total[r][p]);
      }
    }
  }
  for (int p = 0; p < P; ++p) {
    const int channel = (panel + p) * kPanelWidth;
    const int left = matrix.num_rows - channel;
    const __mmask16 mask = static_cast<__mmask16>(left >= 16 ? 0xffff : (1u << left) - 1);
    const __m512 bias = task.bias == nullptr ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(mask, task.bias + channel);
    for (int r = 0; r < R; ++r) {
      __m512 result = task.bias == nullptr ? total[r][p] : _mm512_add_ps(total[r][p], bias);
      float* out = task.out + (row + r) * task.out_stride + channel;
      if (task.is_added) result = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, out), result);
      _mm512_mask_storeu_ps(out, mask, result);
    }
  }
}

template <bool is_q4, int P>
void rows_of_panels(const MatmulTask& task, int panel) {
  int row = task.row_begin;
  for (; row + kMaxRows <= task.row_end; row += kMaxRows) tile<is_q4, kMaxRows, P>(task, row, panel);
  switch (task.row_end - row) {
    case 5: tile<is_q4, 5, P>(task, row, panel); break;
    case 4: tile<is_q4, 4, P>(task, row, panel); break;
    case 3: tile<is_q4, 3, P>(task, row, panel); break;
    case 2: tile<is_q4, 2, P>(task, row, panel); break;
    case 1: tile<is_q4, 1, P>(task, row, panel); break;
    default: break;
  }
}

template <bool is_q4>
void matmul(const MatmulTask& task) {
  int panel = task.panel_begin;
  for (; panel + kMaxPanels <= task.panel_end; panel += kMaxPanels) rows_of_panels<is_q4, kMaxPanels>(task, panel);
  for (; panel < task.panel_end; ++panel) rows_of_panels<is_q4, 1>(task, panel);
}

}  // namespace

const int kMatmulRowTile = kMaxRows;
const bool kMatmulCanGate = false;

void matmul_q4(const MatmulTask& task) { matmul<true>(task); }
void matmul_q8(const MatmulTask& task) { matmul<false>(task); }

}  // namespace OCTAVO_ISA
}  // namespace octavo
