// The write of keys and values into the cache, rounded to its type. Compiled once an instruction set.
#include "hadamard.h"
#include "kernels.h"
#include "simd.h"

namespace octavo {
namespace OCTAVO_ISA {
namespace {

template <class T>
T narrow(float x);
template <>
inline half narrow<half>(float x) {
#if defined(__F16C__)
  return half{static_cast<uint16_t>(_cvtss_sh(x, 0))};
#elif defined(OCTAVO_NEON)
  return half{vget_lane_u16(vreinterpret_u16_f16(vcvt_f16_f32(vdupq_n_f32(x))), 0)};
#else
  return to_half(x);
#endif
}
template <>
inline float narrow<float>(float x) {
  return x;
}

// One position of one head. `column` and `row` are where its key's and its value's first items go.
template <class T>
void write_key(const float* key, int head_dim, ptrdiff_t key_stride, T* column) {
  for (int d = 0; d < head_dim; ++d) column[d * key_stride] = narrow<T>(key[d]);
}

template <class T>
void write_value(const float* value, int head_dim, T* row) {
  int d = 0;
  for (; d + kLanes <= head_dim; d += kLanes) store(row + d, load(value + d));
  for (; d < head_dim; ++d) row[d] = narrow<T>(value[d]);
}

// 16 numbers rounded to bfloat16, to nearest, ties to even; at 16 places side by side.
inline void round_16(const float* x, bfloat* out) {
#if defined(__AVX512F__)
  const __m512i bits = _mm512_loadu_si512(x);
  const __m512i high = _mm512_srli_epi32(bits, 16);
  const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  const __mmask16 nan = is_nan(_mm512_castsi512_ps(bits));
  const __m512i result = _mm512_mask_or_epi32(rounded, nan, high, _mm512_set1_epi32(0x40));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_cvtepi32_epi16(result));
#else
  for (int i = 0; i < 16; ++i) out[i] = to_bfloat(x[i]);
#endif
}

// In pairs: a position's key goes to each pair of dims, and its value is a half of each pair of positions.
void write_pairs(const float* key, const float* value, const KvCache& cache, int offset, bfloat* keys, bfloat* values) {
  struct Pair {
    bfloat low, high;
  };
  const int head_dim = cache.head_dim;
  Pair* column = reinterpret_cast<Pair*>(keys) + offset;
  bfloat* row = values + static_cast<ptrdiff_t>(offset / 2) * cache.value_stride * 2 + offset % 2;
  int d = 0;
  for (; d + 16 <= head_dim; d += 16) {
    bfloat short_key[16], short_value[16];
    round_16(key + d, short_key);
    round_16(value + d, short_value);
    for (int i = 0; i < 16; i += 2, column += cache.key_stride) *column = {short_key[i], short_key[i + 1]};
    for (int i = 0; i < 16; ++i) row[(d + i) * 2] = short_value[i];
  }
  for (; d < head_dim; ++d) {
    (d % 2 == 0 ? column->low : column->high) = to_bfloat(key[d]);
    if (d % 2 == 1) column += cache.key_stride;
    row[d * 2] = to_bfloat(value[d]);
  }
}

// The factor that brings a vector to codes, and its scale. Exactly these roundings, no others: the reference does the
// same, and all instruction sets find the same codes.
struct Scaling {
  float scale;    // NaN where the vector holds a NaN or an infinity: what reads it then fails and is seen to
  float inverse;  // 0 where all codes are

  Scaling(const float* x, int size) {
    const vfloat none = zero();
    vfloat high = none, low = none, broken = none;
    for (int i = 0; i < size; i += kLanes) {
      const vfloat v = i + kLanes <= size ? load(x + i) : load_first(x + i, size - i);
      high = max(v, high);
      low = min(v, low);
      broken = add(broken, mul(v, none));  // 0 times a NaN or an infinity is a NaN
    }
    const float largest = max_lane(max(sub(none, low), high));
    if (sum_lanes(broken) != 0.0f) {
      scale = float_of(0x7fc00000);
      inverse = 0.0f;
    } else if (largest < kSmallest) {
      scale = inverse = 0.0f;
    } else {
      scale = largest / 127.0f;
      inverse = 127.0f / largest;
    }
  }

  static constexpr float kSmallest = 1e-35f;  // below it, 127 / x may be an infinity
};

// Codes of `count` numbers, at most kLanes, to the nearest whole number, ties to even.
inline void encode(const float* x, int count, float inverse, int8_t* codes) {
  store(codes, round_to_int(mul(count == kLanes ? load(x) : load_first(x, count), set1(inverse))));
}

void write_key(const float* key, int head_dim, int hadamard_size, ptrdiff_t key_stride, int8_t* column, float* scale) {
  float mixed[KvCache::kMaxCodedHeadDim];
  __builtin_memcpy(mixed, key, sizeof(float) * head_dim);
  transform_hadamard(mixed, head_dim, hadamard_size);
  const Scaling scaling(mixed, head_dim);
  *scale = scaling.scale;
  for (int d = 0; d < head_dim; d += kLanes) {
    const int count = min_int(kLanes, head_dim - d);
    int8_t codes[kLanes] = {};
    if (scaling.inverse != 0.0f) encode(mixed + d, count, scaling.inverse, codes);
    for (int i = 0; i < count; ++i) column[(d + i) * key_stride] = codes[i];
  }
}

void write_value(const float* value, int head_dim, int8_t* row, float* scale) {
  const Scaling scaling(value, head_dim);
  *scale = scaling.scale;
  for (int d = 0; d < head_dim; d += kLanes) {  // the row is padded to 16 codes, and those beyond head_dim become zero
    const int count = min_int(kLanes, head_dim - d);
    int8_t codes[kLanes] = {};
    if (scaling.inverse != 0.0f) encode(value + d, count, scaling.inverse, codes);
    for (int i = 0; i < kLanes; ++i) row[d + i] = codes[i];
  }
}

template <class T>
void write_position(const float* key, const float* value, const KvCache& cache, int offset, char* keys, char* values) {
  write_key(key, cache.head_dim, cache.key_stride, reinterpret_cast<T*>(keys) + offset);
  write_value(value, cache.head_dim, reinterpret_cast<T*>(values) + static_cast<ptrdiff_t>(offset) * cache.value_stride);
}
template <>
void write_position<bfloat>(const float* key, const float* value, const KvCache& cache, int offset, char* keys,
                            char* values) {
  write_pairs(key, value, cache, offset, reinterpret_cast<bfloat*>(keys), reinterpret_cast<bfloat*>(values));
}
template <>
void write_position<int8_t>(const float* key, const float* value, const KvCache& cache, int offset, char* keys,
                            char* values) {
  write_key(key, cache.head_dim, cache.hadamard_size(), cache.key_stride, reinterpret_cast<int8_t*>(keys) + offset,
            reinterpret_cast<float*>(keys + cache.key_items_bytes()) + offset);
  write_value(value, cache.head_dim,
              reinterpret_cast<int8_t*>(values) + static_cast<ptrdiff_t>(offset) * cache.value_stride,
              reinterpret_cast<float*>(values + cache.value_items_bytes()) + offset);
}

template <class T>
void write_rows(const WriteKvTask& task, int row_begin, int row_end) {
  const KvCache& cache = *task.cache;
  for (int row = row_begin; row < row_end; ++row) {
    if (task.slots[row] < 0) continue;
    const size_t block = static_cast<size_t>(task.slots[row] / cache.block_size);
    const int offset = static_cast<int>(task.slots[row] % cache.block_size);
    for (int head = 0; head < cache.num_kv_heads; ++head) {
      const size_t block_head = block * cache.num_kv_heads + head;
      write_position<T>(task.key + row * task.key_stride + head * cache.head_dim,
                        task.value + row * task.value_stride + head * cache.head_dim, cache, offset,
                        cache.keys + block_head * cache.key_head_bytes(),
                        cache.values + block_head * cache.value_head_bytes());
    }
  }
}

}  // namespace

void write_kv(const WriteKvTask& task, int row_begin, int row_end) {
  switch (task.cache->type) {
    case KvType::float32: write_rows<float>(task, row_begin, row_end); break;
    case KvType::float16: write_rows<half>(task, row_begin, row_end); break;
    case KvType::bfloat16: write_rows<bfloat>(task, row_begin, row_end); break;
    case KvType::int8: write_rows<int8_t>(task, row_begin, row_end); break;
  }
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
