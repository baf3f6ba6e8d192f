// Activations to 8 bits, for the quantized matmuls: a scale and a middle for each row and group of 32, rounded to nearest
// even. Compiled once an instruction set.
#include "kernels.h"
#include "simd.h"

namespace octavo {
namespace OCTAVO_ISA {
namespace {

void quantize_group(const float* x, int8_t* codes, float* scale, float* middle, float* sum, int32_t* offset) {
  vfloat low = load(x), high = low;
  uint32_t nan_lanes = lanes_of(is_nan(low));
  for (int i = kLanes; i < kGroupSize; i += kLanes) {
    const vfloat v = load(x + i);
    nan_lanes |= lanes_of(is_nan(v));
    low = min(v, low);
    high = max(v, high);
  }
  const float smallest = -max_lane(sub(zero(), low)), largest = max_lane(high);
  const float half_range = 0.5f * largest - 0.5f * smallest;
  const float inverse = 127.0f / half_range;
  *middle = 0.5f * largest + 0.5f * smallest;
  *scale = half_range / 127.0f;
  int32_t code_sum = 0;
  const bool is_finite = nan_lanes == 0 && largest < __builtin_inff() && smallest > -__builtin_inff();
  if (!is_finite || !(inverse < 3.0e38f)) {
    // Not numbers; or all so nearly the same that the middle says it all.
    for (int i = 0; i < kGroupSize; ++i) codes[i] = 0;
    *scale = 0.0f;
    if (!is_finite) *middle = float_of(0x7fc00000);
  } else {
    const vfloat factor = set1(inverse), minus = set1(*middle), limit = set1(127.0f);
    for (int i = 0; i < kGroupSize; i += kLanes) {
      const vfloat code = round_to_int(mul(sub(load(x + i), minus), factor));
      const vfloat rounded = max(sub(zero(), limit), min(limit, code));
#if defined(__AVX512F__)
      const __m512i whole = _mm512_cvtps_epi32(rounded);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + i), _mm512_cvtepi32_epi8(whole));
      code_sum += _mm512_reduce_add_epi32(whole);
#elif defined(OCTAVO_NEON)
      const int32x4_t whole = vcvtq_s32_f32(rounded);
      const int16x4_t narrow = vmovn_s32(whole);
      const int32_t four = vget_lane_s32(vreinterpret_s32_s8(vmovn_s16(vcombine_s16(narrow, narrow))), 0);
      __builtin_memcpy(codes + i, &four, 4);
      code_sum += vaddvq_s32(whole);
#else
      float lanes[kLanes];
      store(lanes, rounded);
      for (int lane = 0; lane < kLanes; ++lane) {
        codes[i + lane] = static_cast<int8_t>(lanes[lane]);
        code_sum += codes[i + lane];
      }
#endif
    }
  }
  *sum = *scale * static_cast<float>(code_sum) + 32.0f * *middle;
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
                     out.scale + at + group, out.middle + at + group, out.sum + at + group, out.offset + at + group);
    }
  }
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
