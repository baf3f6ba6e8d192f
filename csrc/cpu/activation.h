// The activations of gated MLPs, on vectors: one place, so that every kernel that applies them gives the same bits.
#pragma once

#include "simd.h"

namespace octavo {
namespace OCTAVO_ISA {
namespace {

inline vfloat silu(vfloat x) { return div(x, add(set1(1.0f), exp(sub(zero(), x)))); }

// 0.5 x (1 + tanh(u)) = x / (1 + exp(-2 u)), with u = sqrt(2 / pi) * (x + 0.044715 x^3)
inline vfloat gelu_tanh(vfloat x) {
  const vfloat inner = fma(mul(mul(x, x), x), set1(0.044715f), x);
  return div(x, add(set1(1.0f), exp(mul(inner, set1(-1.5957691216057308f)))));
}

}  // namespace
}  // namespace OCTAVO_ISA
}  // namespace octavo
