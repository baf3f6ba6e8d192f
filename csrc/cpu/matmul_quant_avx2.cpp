// The quantized matmul with AVX2: four rows by one panel of 16 channels (two registers of 8) at a time. The arithmetic
// is that of matmul_quant_scalar.cpp, with fused multiply-adds.
#include "kernels.h"
#include "numbers.h"

#include <immintrin.h>

namespace octavo {
namespace OCTAVO_ISA {
namespace {

inline __m256i load_codes(const uint8_t* p) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(p)); }

inline __m256i quad(const int8_t* p) {
  int32_t four;
  __builtin_memcpy(&four, p, 4);
  return _mm256_set1_epi32(four);
}

inline __m256 load_eight(const Buffer& from, bool is_half, size_t at) {
  if (!is_half) return _mm256_load_ps(from.as<float>() + at);
  return _mm256_cvtph_ps(_mm_load_si128(reinterpret_cast<const __m128i*>(from.as<half>() + at)));
}

inline __m256 load_code_sums(const Buffer& from, size_t at) {
  const __m128i sums = _mm_load_si128(reinterpret_cast<const __m128i*>(from.as<int16_t>() + at));
  return _mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(sums));
}

// Sums of one group for R rows, in 16 channels: 8 32-bit lanes in dot[r][0] and 8 in dot[r][1].
template <int R>
inline void dot_q4(const uint8_t* w, const int8_t* x, ptrdiff_t x_stride, __m256i dot[R][2]) {
  const __m256i low_half = _mm256_set1_epi8(15);
  __m256i sum[R][2];
  for (int j = 0; j < 4; ++j) {
    const __m256i w0 = load_codes(w + j * 64), w1 = load_codes(w + j * 64 + 32);
    const __m256i low0 = _mm256_and_si256(w0, low_half), low1 = _mm256_and_si256(w1, low_half);
    const __m256i high0 = _mm256_and_si256(_mm256_srli_epi16(w0, 4), low_half);
    const __m256i high1 = _mm256_and_si256(_mm256_srli_epi16(w1, 4), low_half);
    for (int r = 0; r < R; ++r) {
      // 16 bits hold the whole group: 8 quads times two products of at most 15 * 127 is 30,480.
      const __m256i a = quad(x + r * x_stride + j * 4), b = quad(x + r * x_stride + 16 + j * 4);
      const __m256i s0 = _mm256_add_epi16(_mm256_maddubs_epi16(low0, a), _mm256_maddubs_epi16(high0, b));
      const __m256i s1 = _mm256_add_epi16(_mm256_maddubs_epi16(low1, a), _mm256_maddubs_epi16(high1, b));
      sum[r][0] = j == 0 ? s0 : _mm256_add_epi16(sum[r][0], s0);
      sum[r][1] = j == 0 ? s1 : _mm256_add_epi16(sum[r][1], s1);
    }
  }
  const __m256i ones = _mm256_set1_epi16(1);
  for (int r = 0; r < R; ++r) {
    dot[r][0] = _mm256_madd_epi16(sum[r][0], ones);
    dot[r][1] = _mm256_madd_epi16(sum[r][1], ones);
  }
}

template <int R>
inline void dot_q8(const uint8_t* w, const int8_t* x, ptrdiff_t x_stride, __m256i dot[R][2]) {
  const __m256i ones = _mm256_set1_epi16(1), raised = _mm256_set1_epi8(-128);
  for (int r = 0; r < R; ++r) dot[r][0] = dot[r][1] = _mm256_setzero_si256();
  for (int j = 0; j < 8; ++j) {
    const __m256i w0 = _mm256_xor_si256(load_codes(w + j * 64), raised);
    const __m256i w1 = _mm256_xor_si256(load_codes(w + j * 64 + 32), raised);
    const __m256i size0 = _mm256_abs_epi8(w0), size1 = _mm256_abs_epi8(w1);
    for (int r = 0; r < R; ++r) {
      // |w| times x with the sign of w: at most 2 * 128 * 127 = 32,512, so the 16-bit sum of two does not saturate.
      const __m256i a = quad(x + r * x_stride + j * 4);
      const __m256i s0 = _mm256_maddubs_epi16(size0, _mm256_sign_epi8(a, w0));
      const __m256i s1 = _mm256_maddubs_epi16(size1, _mm256_sign_epi8(a, w1));
      dot[r][0] = _mm256_add_epi32(dot[r][0], _mm256_madd_epi16(s0, ones));
      dot[r][1] = _mm256_add_epi32(dot[r][1], _mm256_madd_epi16(s1, ones));
    }
  }
}

template <bool is_q4, int R>
void tile(const MatmulTask& task, int row, int panel) {
  constexpr size_t group_bytes = is_q4 ? 256 : 512;
  const PackedMatrix& matrix = *task.matrix;
  const int num_groups = matrix.num_groups();
  const bool is_half = matrix.has_half_scales;
  const bool has_minimum = matrix.minimum.size() > 0;
  const uint8_t* codes = matrix.values.as<uint8_t>() + static_cast<size_t>(panel) * num_groups * group_bytes;
  const size_t first = static_cast<size_t>(row) * num_groups;
  const int8_t* x = task.quantized.codes + first * kGroupSize;
  const float* x_scale = task.quantized.scale + first;
  const float* x_middle = task.quantized.middle + first;
  const float* x_sum = task.quantized.sum + first;
  size_t w_at = static_cast<size_t>(panel) * num_groups * kPanelWidth;

  __m256 total[R][2];
  for (int r = 0; r < R; ++r) total[r][0] = total[r][1] = _mm256_setzero_ps();
  for (int group = 0; group < num_groups; ++group, w_at += kPanelWidth) {
    __m256i dot[R][2];
    if (is_q4) {
      dot_q4<R>(codes + group * group_bytes, x + group * kGroupSize, matrix.num_columns, dot);
    } else {
      dot_q8<R>(codes + group * group_bytes, x + group * kGroupSize, matrix.num_columns, dot);
    }
    const __m256 scale0 = load_eight(matrix.scale, is_half, w_at), scale1 = load_eight(matrix.scale, is_half, w_at + 8);
    const __m256 codes0 = load_code_sums(matrix.code_sum, w_at), codes1 = load_code_sums(matrix.code_sum, w_at + 8);
    for (int r = 0; r < R; ++r) {
      const __m256 sa = _mm256_set1_ps(x_scale[r * num_groups + group]);
      const __m256 middle = _mm256_set1_ps(x_middle[r * num_groups + group]);
      const __m256 p0 = _mm256_fmadd_ps(codes0, middle, _mm256_mul_ps(_mm256_cvtepi32_ps(dot[r][0]), sa));
      const __m256 p1 = _mm256_fmadd_ps(codes1, middle, _mm256_mul_ps(_mm256_cvtepi32_ps(dot[r][1]), sa));
      total[r][0] = _mm256_fmadd_ps(scale0, p0, total[r][0]);
      total[r][1] = _mm256_fmadd_ps(scale1, p1, total[r][1]);
    }
    if (has_minimum) {
      const __m256 min0 = load_eight(matrix.minimum, is_half, w_at);
      const __m256 min1 = load_eight(matrix.minimum, is_half, w_at + 8);
      for (int r = 0; r < R; ++r) {
        const __m256 sum = _mm256_set1_ps(x_sum[r * num_groups + group]);
        total[r][0] = _mm256_fmadd_ps(min0, sum, total[r][0]);
        total[r][1] = _mm256_fmadd_ps(min1, sum, total[r][1]);
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    alignas(32) float lanes[kPanelWidth];
    _mm256_store_ps(lanes, total[r][0]);
    _mm256_store_ps(lanes + 8, total[r][1]);
    const int channel = panel * kPanelWidth;
    const int count = matrix.num_rows - channel < kPanelWidth ? matrix.num_rows - channel : kPanelWidth;
    float* out = task.out + (row + r) * task.out_stride + channel;
    for (int c = 0; c < count; ++c) {
      const float result = task.bias == nullptr ? lanes[c] : lanes[c] + task.bias[channel + c];
      out[c] = task.is_added ? out[c] + result : result;
    }
  }
}

template <bool is_q4>
void matmul(const MatmulTask& task) {
  for (int panel = task.panel_begin; panel < task.panel_end; ++panel) {
    int row = task.row_begin;
    for (; row + 4 <= task.row_end; row += 4) tile<is_q4, 4>(task, row, panel);
    switch (task.row_end - row) {
      case 3: tile<is_q4, 3>(task, row, panel); break;
      case 2: tile<is_q4, 2>(task, row, panel); break;
      case 1: tile<is_q4, 1>(task, row, panel); break;
      default: break;
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
