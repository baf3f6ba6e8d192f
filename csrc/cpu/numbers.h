// The 16-bit number formats, converted without any special instruction; bit for bit what F16C does (round to
// nearest, ties to even). Used where speed does not matter and by the scalar variant.
#pragma once

#include <cstdint>
#include <cstring>

namespace octavo {

struct half {
  uint16_t bits;
};
struct bfloat {
  uint16_t bits;
};

namespace {

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

inline float to_float(float x) { return x; }

inline float to_float(int8_t x) { return static_cast<float>(x); }

inline float to_float(bfloat x) { return float_of(static_cast<uint32_t>(x.bits) << 16); }

inline float to_float(half x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(x.bits & 0x7fff) << 13;
  const uint32_t exponent = magnitude & 0x0f800000;
  if (exponent == 0x0f800000) return float_of(sign | magnitude | 0x7f800000 | (magnitude & 0x007fffff ? 0x400000 : 0));
  if (exponent == 0) {
    // A subnormal: magnitude counts units of 2^-24.
    const float value = static_cast<float>(magnitude >> 13) * 5.9604644775390625e-8f;
    return float_of(sign | bits_of(value));
  }
  return float_of(sign | (magnitude + 0x38000000));
}

inline half to_half(float x) {
  const uint32_t bits = bits_of(x);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  const uint32_t magnitude = bits & 0x7fffffff;
  uint32_t result;
  if (magnitude > 0x7f800000) {
    result = 0x7e00 | ((magnitude >> 13) & 0x3ff);
  } else if (magnitude >= 0x477ff000) {
    result = 0x7c00;  // rounds beyond 65504
  } else if (magnitude < 0x38800000) {
    // Below the smallest normal number: adding 0.5 rounds to units of 2^-24 in the float's own last bits.
    result = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000;
  } else {
    result = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  }
  return half{static_cast<uint16_t>(sign | result)};
}

inline bfloat to_bfloat(float x) {
  const uint32_t bits = bits_of(x);
  if ((bits & 0x7fffffff) > 0x7f800000) return bfloat{static_cast<uint16_t>((bits >> 16) | 0x40)};
  return bfloat{static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

}  // namespace
}  // namespace octavo
