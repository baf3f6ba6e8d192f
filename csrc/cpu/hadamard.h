// The Hadamard transform that keys and queries meet in where the cache holds 8-bit codes. Keys have a few channels far
// larger than the rest, which would leave the others few codes; their sums and differences are all about as large. It
// changes no product of query and key but by the number of channels, as H q . H k = size * (q . k).
#pragma once

#include <cstddef>

#ifndef OCTAVO_ISA
#error "OCTAVO_ISA names the namespace of this instruction set's kernels"
#endif

namespace octavo {
namespace OCTAVO_ISA {
namespace {

// step: a compile-time number where it is small, so that the compiler finds vectors in it
inline __attribute__((always_inline)) void mix(float* x, int num_floats, int step) {
  for (int begin = 0; begin < num_floats; begin += 2 * step) {
    float* const first = x + begin;
    float* const second = first + step;
    for (int i = 0; i < step; ++i) {
      const float a = first[i], b = second[i];
      first[i] = a + b;
      second[i] = a - b;
    }
  }
}

// In place, each `size` (a power of two) of the numbers by themselves; near neighbours are mixed first.
inline void transform_hadamard(float* x, int num_floats, int size) {
  if (size > 1) mix(x, num_floats, 1);
  if (size > 2) mix(x, num_floats, 2);
  if (size > 4) mix(x, num_floats, 4);
  if (size > 8) mix(x, num_floats, 8);
  for (int step = 16; step < size; step *= 2) mix(x, num_floats, step);
}

}  // namespace
}  // namespace OCTAVO_ISA
}  // namespace octavo
