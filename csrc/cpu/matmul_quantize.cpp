// Activations to 8 bits, for the quantized matmuls: symmetric, a scale for each row and group of 32, rounded to nearest
// even. Compiled once an instruction set.
#include "kernels.h"
#include "simd.h"

namespace octavo {
namespace OCTAVO_ISA {
namespace {

void quantize_group(const float* x, int8_t* codes, float* scale, float* sum, int32_t* offset) {
  // The largest magnitude by its bits: a NaN or an infinity is larger than all numbers, so it cannot get lost.
  uint32_t largest = 0;
  for (int i = 0; i < kGroupSize; ++i) {
    const uint32_t magnitude = bits_of(x[i]) & 0x7fffffff;
    largest = magnitude > largest ? magnitude : largest;
  }
  int32_t code_sum = 0;
  if (largest < 0x00800000 || largest >= 0x7f800000) {
    // All zero (or subnormal, which is as good as zero), or not a number.
    for (int i = 0; i < kGroupSize; ++i) codes[i] = 0;
    *scale = largest >= 0x7f800000 ? float_of(0x7fc00000) : 0.0f;
  } else {
    const float amax = float_of(largest);
    const float inverse = 127.0f / amax;
    if (inverse > 3.0e38f) {  // amax is so small that 127 / amax overflows
      for (int i = 0; i < kGroupSize; ++i) codes[i] = 0;
      *scale = 0.0f;
    } else {
      const vfloat factor = set1(inverse);
      for (int i = 0; i < kGroupSize; i += kLanes) {
        const vfloat rounded = round_to_int(mul(load(x + i), factor));
#if defined(__AVX512F__)
        const __m512i whole = _mm512_cvtps_epi32(rounded);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + i), _mm512_cvtepi32_epi8(whole));
        code_sum += _mm512_reduce_add_epi32(whole);
#else
        float lanes[kLanes];
        store(lanes, rounded);
        for (int lane = 0; lane < kLanes; ++lane) {
          codes[i + lane] = static_cast<int8_t>(lanes[lane]);
          code_sum += codes[i + lane];
        }
#endif
      }
      *scale = amax / 127.0f;
    }
  }
  *sum = *scale * static_cast<float>(code_sum);
  *offset = -128 * code_sum;
}

}  // namespace

void quantize_rows(const float* x, ptrdiff_t x_stride, int row_begin, int row_end, int num_columns,
                   const QuantizedRows& out) {
  const int num_groups = num_columns / kGroupSize;
  for (int row = row_begin; row < row_end; ++row) {
    const size_t at = static_cast<size_t>(row) * num_groups;
    for (int group = 0; group < num_groups; ++group) {
      quantize_group(x + row * x_stride + group * kGroupSize, out.codes + (at + group) * kGroupSize,
                     out.scale + at + group, out.sum + at + group, out.offset + at + group);
    }
  }
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
