// A vector of kLanes floats, `vfloat`, for the instruction set this translation unit is compiled for: 16 lanes with
// AVX-512, 8 with AVX2, 4 with NEON, 8 in plain C++ otherwise. Kernels that differ only in the width are written once against it
// and compiled once per instruction set, each in a namespace of its own (OCTAVO_ISA), with no standard-library
// templates inside: the linker may keep any one copy of an inline function, and it could be the AVX-512 one.
//
// Everything here rounds the same way for every lane, so a value's bits do not depend on the lane it sits in.
#pragma once

#include <cstddef>
#include <cstdint>

#include "numbers.h"

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#elif defined(OCTAVO_NEON)  // not __ARM_NEON: the scalar variant stays plain C++ on Arm, too
#include <arm_neon.h>
#else
#include <cmath>
#endif

#ifndef OCTAVO_ISA
#error "OCTAVO_ISA names the namespace of this instruction set's kernels"
#endif

namespace octavo {
namespace OCTAVO_ISA {
namespace {

#if defined(__AVX512F__)

constexpr int kLanes = 16;
using vfloat = __m512;
using vmask = __mmask16;

inline vfloat zero() { return _mm512_setzero_ps(); }
inline vfloat set1(float x) { return _mm512_set1_ps(x); }
inline vfloat iota() { return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
inline vfloat load(const float* p) { return _mm512_loadu_ps(p); }
inline vfloat load(const half* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline vfloat load(const bfloat* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
inline vfloat load(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline void store(float* p, vfloat v) { _mm512_storeu_ps(p, v); }
inline void store(half* p, vfloat v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
// Whole numbers from -128 to 127.
inline void store(int8_t* p, vfloat v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v)));
}
inline vmask first_lanes(int count) { return static_cast<vmask>(count >= 16 ? 0xffff : (1u << count) - 1); }
inline vfloat load_first(const float* p, int count) { return _mm512_maskz_loadu_ps(first_lanes(count), p); }
inline void store_first(float* p, vfloat v, int count) { _mm512_mask_storeu_ps(p, first_lanes(count), v); }
inline vfloat add(vfloat a, vfloat b) { return _mm512_add_ps(a, b); }
inline vfloat sub(vfloat a, vfloat b) { return _mm512_sub_ps(a, b); }
inline vfloat mul(vfloat a, vfloat b) { return _mm512_mul_ps(a, b); }
inline vfloat div(vfloat a, vfloat b) { return _mm512_div_ps(a, b); }
inline vfloat fma(vfloat a, vfloat b, vfloat c) { return _mm512_fmadd_ps(a, b, c); }
// min and max return b when either is a NaN.
inline vfloat min(vfloat a, vfloat b) { return _mm512_min_ps(a, b); }
inline vfloat max(vfloat a, vfloat b) { return _mm512_max_ps(a, b); }
inline vmask less(vfloat a, vfloat b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
inline vmask is_nan(vfloat a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }
inline vmask both(vmask a, vmask b) { return static_cast<vmask>(a & b); }
inline vfloat select(vmask m, vfloat a, vfloat b) { return _mm512_mask_blend_ps(m, b, a); }
inline uint32_t lanes_of(vmask m) { return m; }
inline float sum_lanes(vfloat v) { return _mm512_reduce_add_ps(v); }
inline float max_lane(vfloat v) { return _mm512_reduce_max_ps(v); }
inline vfloat round_to_int(vfloat v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// 2^n for whole n in [-126, 127]
inline vfloat exp2_whole(vfloat n) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}

#elif defined(__AVX2__)

constexpr int kLanes = 8;
using vfloat = __m256;
using vmask = __m256;

inline vfloat zero() { return _mm256_setzero_ps(); }
inline vfloat set1(float x) { return _mm256_set1_ps(x); }
inline vfloat iota() { return _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7); }
inline vfloat load(const float* p) { return _mm256_loadu_ps(p); }
inline vfloat load(const half* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline vfloat load(const bfloat* p) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline vfloat load(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline void store(float* p, vfloat v) { _mm256_storeu_ps(p, v); }
inline void store(half* p, vfloat v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
// Whole numbers from -128 to 127.
inline void store(int8_t* p, vfloat v) {
  const __m256i whole = _mm256_cvtps_epi32(v);
  const __m128i pairs = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(pairs, pairs));
}
inline __m256i first_lanes(int count) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline vfloat load_first(const float* p, int count) { return _mm256_maskload_ps(p, first_lanes(count)); }
inline void store_first(float* p, vfloat v, int count) { _mm256_maskstore_ps(p, first_lanes(count), v); }
inline vfloat add(vfloat a, vfloat b) { return _mm256_add_ps(a, b); }
inline vfloat sub(vfloat a, vfloat b) { return _mm256_sub_ps(a, b); }
inline vfloat mul(vfloat a, vfloat b) { return _mm256_mul_ps(a, b); }
inline vfloat div(vfloat a, vfloat b) { return _mm256_div_ps(a, b); }
inline vfloat fma(vfloat a, vfloat b, vfloat c) { return _mm256_fmadd_ps(a, b, c); }
// min and max return b when either is a NaN.
inline vfloat min(vfloat a, vfloat b) { return _mm256_min_ps(a, b); }
inline vfloat max(vfloat a, vfloat b) { return _mm256_max_ps(a, b); }
inline vmask less(vfloat a, vfloat b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
inline vmask is_nan(vfloat a) { return _mm256_cmp_ps(a, a, _CMP_UNORD_Q); }
inline vmask both(vmask a, vmask b) { return _mm256_and_ps(a, b); }
inline vfloat select(vmask m, vfloat a, vfloat b) { return _mm256_blendv_ps(b, a, m); }
inline uint32_t lanes_of(vmask m) { return static_cast<uint32_t>(_mm256_movemask_ps(m)); }
inline float sum_lanes(vfloat v) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
inline float max_lane(vfloat v) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
inline vfloat round_to_int(vfloat v) { return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// 2^n for whole n in [-126, 127]
inline vfloat exp2_whole(vfloat n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}

#elif defined(OCTAVO_NEON)

// Four lanes, not eight in a pair: the largest register tiles of the kernels (6 rows by 4 vectors and what they are
// multiplied with) then just fit the 32 registers.
constexpr int kLanes = 4;
using vfloat = float32x4_t;
using vmask = uint32x4_t;

inline vfloat zero() { return vdupq_n_f32(0.0f); }
inline vfloat set1(float x) { return vdupq_n_f32(x); }
inline vfloat iota() {
  const float lanes[kLanes] = {0.0f, 1.0f, 2.0f, 3.0f};
  return vld1q_f32(lanes);
}
inline vfloat load(const float* p) { return vld1q_f32(p); }
inline vfloat load(const half* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits))); }
inline vfloat load(const bfloat* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(&p->bits), 16)); }
inline vfloat load(const int8_t* p) {
  int32_t four;
  __builtin_memcpy(&four, p, 4);
  return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four))))));
}
inline void store(float* p, vfloat v) { vst1q_f32(p, v); }
inline void store(half* p, vfloat v) { vst1_u16(&p->bits, vreinterpret_u16_f16(vcvt_f16_f32(v))); }
// Whole numbers from -128 to 127.
inline void store(int8_t* p, vfloat v) {
  const int16x4_t pairs = vmovn_s32(vcvtq_s32_f32(v));
  const int32_t four = vget_lane_s32(vreinterpret_s32_s8(vmovn_s16(vcombine_s16(pairs, pairs))), 0);
  __builtin_memcpy(p, &four, 4);
}
inline vfloat load_first(const float* p, int count) {
  float lanes[kLanes] = {};
  for (int i = 0; i < count && i < kLanes; ++i) lanes[i] = p[i];
  return vld1q_f32(lanes);
}
inline void store_first(float* p, vfloat v, int count) {
  float lanes[kLanes];
  vst1q_f32(lanes, v);
  for (int i = 0; i < count && i < kLanes; ++i) p[i] = lanes[i];
}
inline vfloat add(vfloat a, vfloat b) { return vaddq_f32(a, b); }
inline vfloat sub(vfloat a, vfloat b) { return vsubq_f32(a, b); }
inline vfloat mul(vfloat a, vfloat b) { return vmulq_f32(a, b); }
inline vfloat div(vfloat a, vfloat b) { return vdivq_f32(a, b); }
inline vfloat fma(vfloat a, vfloat b, vfloat c) { return vfmaq_f32(c, a, b); }
inline vmask less(vfloat a, vfloat b) { return vcltq_f32(a, b); }
inline vmask is_nan(vfloat a) { return vmvnq_u32(vceqq_f32(a, a)); }
inline vmask both(vmask a, vmask b) { return vandq_u32(a, b); }
inline vfloat select(vmask m, vfloat a, vfloat b) { return vbslq_f32(m, a, b); }
// min and max return b when either is a NaN; vminq_f32 would return the NaN.
inline vfloat min(vfloat a, vfloat b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
inline vfloat max(vfloat a, vfloat b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
inline uint32_t lanes_of(vmask m) {
  const uint32_t bits[kLanes] = {1, 2, 4, 8};
  return vaddvq_u32(vandq_u32(m, vld1q_u32(bits)));
}
inline float sum_lanes(vfloat v) { return vaddvq_f32(v); }
inline float max_lane(vfloat v) { return vmaxvq_f32(v); }
inline vfloat round_to_int(vfloat v) { return vrndnq_f32(v); }
// 2^n for whole n in [-126, 127]
inline vfloat exp2_whole(vfloat n) {
  return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23));
}

#else

constexpr int kLanes = 8;
struct vfloat {
  float lane[kLanes];
};
struct vmask {
  bool lane[kLanes];
};

#define OCTAVO_LANES for (int i = 0; i < kLanes; ++i)

inline vfloat set1(float x) {
  vfloat r;
  OCTAVO_LANES r.lane[i] = x;
  return r;
}
inline vfloat zero() { return set1(0.0f); }
inline vfloat iota() {
  vfloat r;
  OCTAVO_LANES r.lane[i] = static_cast<float>(i);
  return r;
}
template <class T>
inline vfloat load(const T* p) {
  vfloat r;
  OCTAVO_LANES r.lane[i] = to_float(p[i]);
  return r;
}
inline void store(float* p, vfloat v) { OCTAVO_LANES p[i] = v.lane[i]; }
inline void store(half* p, vfloat v) { OCTAVO_LANES p[i] = to_half(v.lane[i]); }
// Whole numbers from -128 to 127.
inline void store(int8_t* p, vfloat v) { OCTAVO_LANES p[i] = static_cast<int8_t>(v.lane[i]); }
inline vfloat load_first(const float* p, int count) {
  vfloat r;
  OCTAVO_LANES r.lane[i] = i < count ? p[i] : 0.0f;
  return r;
}
inline void store_first(float* p, vfloat v, int count) {
  for (int i = 0; i < count && i < kLanes; ++i) p[i] = v.lane[i];
}
#define OCTAVO_BINARY(name, expression)         \
  inline vfloat name(vfloat a, vfloat b) {      \
    vfloat r;                                   \
    OCTAVO_LANES {                              \
      const float x = a.lane[i], y = b.lane[i]; \
      r.lane[i] = (expression);                 \
    }                                           \
    return r;                                   \
  }
OCTAVO_BINARY(add, x + y)
OCTAVO_BINARY(sub, x - y)
OCTAVO_BINARY(mul, x* y)
OCTAVO_BINARY(div, x / y)
// min and max return b when either is a NaN.
OCTAVO_BINARY(min, x < y ? x : y)
OCTAVO_BINARY(max, x > y ? x : y)
#undef OCTAVO_BINARY
// Two roundings here: without the instruction, a true fused multiply-add is a slow library call.
inline vfloat fma(vfloat a, vfloat b, vfloat c) {
  OCTAVO_LANES c.lane[i] = a.lane[i] * b.lane[i] + c.lane[i];
  return c;
}
inline vmask less(vfloat a, vfloat b) {
  vmask m;
  OCTAVO_LANES m.lane[i] = a.lane[i] < b.lane[i];
  return m;
}
inline vmask is_nan(vfloat a) {
  vmask m;
  OCTAVO_LANES m.lane[i] = a.lane[i] != a.lane[i];
  return m;
}
inline vmask both(vmask a, vmask b) {
  OCTAVO_LANES a.lane[i] = a.lane[i] && b.lane[i];
  return a;
}
inline vfloat select(vmask m, vfloat a, vfloat b) {
  OCTAVO_LANES b.lane[i] = m.lane[i] ? a.lane[i] : b.lane[i];
  return b;
}
inline uint32_t lanes_of(vmask m) {
  uint32_t bits = 0;
  OCTAVO_LANES bits |= static_cast<uint32_t>(m.lane[i]) << i;
  return bits;
}
inline float sum_lanes(vfloat v) {
  const float* l = v.lane;
  return ((l[0] + l[4]) + (l[2] + l[6])) + ((l[1] + l[5]) + (l[3] + l[7]));
}
inline float max_lane(vfloat v) {
  float best = v.lane[0];
  OCTAVO_LANES best = v.lane[i] > best ? v.lane[i] : best;
  return best;
}
inline vfloat round_to_int(vfloat v) {
  // Adding 1.5 * 2^23 leaves no bits after the point; exact for |v| < 2^22, which is all we ask of it.
  OCTAVO_LANES v.lane[i] = (v.lane[i] + 12582912.0f) - 12582912.0f;
  return v;
}
// 2^n for whole n in [-126, 127]; a NaN gives 1 (its row is a NaN already)
inline vfloat exp2_whole(vfloat n) {
  OCTAVO_LANES n.lane[i] = n.lane[i] == n.lane[i] ? float_of(static_cast<uint32_t>(static_cast<int>(n.lane[i]) + 127) << 23) : 1.0f;
  return n;
}
#undef OCTAVO_LANES

#endif

// e^x within 2 units in the last place (Cephes' polynomial); exp(0) is exactly 1; x is held to [-87.3, 88.3], so
// nothing overflows and exp(-inf) is about 1e-38, not 0. A NaN stays a NaN.
inline vfloat exp(vfloat x) {
  x = max(set1(-87.33654f), min(set1(88.37626f), x));
  const vfloat n = round_to_int(mul(x, set1(1.44269504088896341f)));
  vfloat r = fma(n, set1(-0.693359375f), x);
  r = fma(n, set1(2.12194440e-4f), r);
  vfloat p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = add(fma(p, mul(r, r), r), set1(1.0f));
  return mul(p, exp2_whole(n));
}

inline int min_int(int a, int b) { return a < b ? a : b; }
inline int max_int(int a, int b) { return a > b ? a : b; }

}  // namespace
}  // namespace OCTAVO_ISA
}  // namespace octavo
