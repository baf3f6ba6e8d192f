// What the kernel tests share: counting, random inputs, comparing floats. Plain C++ and nothing else, so that the
// program can be built for any processor and run under an emulator.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "isa.h"

namespace octavo {
namespace test {

// Counts one check; prints what it was about when it failed.
void check(bool passed, const char* format, ...) __attribute__((format(printf, 2, 3)));

int num_passed();
int num_failed();

// The same numbers on every machine.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15ull + 1) {}
  uint32_t next();
  int below(int end) { return static_cast<int>(next() % static_cast<uint32_t>(end)); }
  float uniform(float low, float high);
  float normal();  // about: a sum of uniforms
  std::vector<float> normals(size_t count, float size = 1.0f);

 private:
  uint64_t state_;
};

// A NaN's sign and payload do not count: an instruction may keep either operand's.
bool same_bits(const float* a, const float* b, size_t count);

// |actual - expected| <= tolerance, or both a NaN.
bool is_close(float actual, double expected, double tolerance);

// One count of rows for every way a tile may end, and some beyond the largest tile.
extern const std::vector<int> kRowCounts;

void test_threads();
void test_topology();
void test_matmul(const Kernels& kernels);
void test_row_ops(const Kernels& kernels);
void test_attention(const Kernels& kernels);
void test_sublayer(const Kernels& kernels);
void test_lora(const Kernels& kernels);
void test_sampling(const Kernels& kernels);

}  // namespace test
}  // namespace octavo
