#include "check.h"

#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstring>

namespace octavo {
namespace test {
namespace {

int passed_count = 0;
int failed_count = 0;
constexpr int kMaxShown = 40;

}  // namespace

const std::vector<int> kRowCounts = {1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 17, 33, 50, 64, 70};

void check(bool passed, const char* format, ...) {
  if (passed) {
    ++passed_count;
    return;
  }
  ++failed_count;
  if (failed_count > kMaxShown) return;
  std::printf("FAILED: ");
  va_list args;
  va_start(args, format);
  std::vprintf(format, args);
  va_end(args);
  std::printf(failed_count == kMaxShown ? "\n(further failures are only counted)\n" : "\n");
}

int num_passed() { return passed_count; }
int num_failed() { return failed_count; }

uint32_t Random::next() {
  state_ ^= state_ << 13;
  state_ ^= state_ >> 7;
  state_ ^= state_ << 17;
  return static_cast<uint32_t>((state_ * 0x2545f4914f6cdd1dull) >> 32);
}

float Random::uniform(float low, float high) {
  return low + (high - low) * (static_cast<float>(next() >> 8) * (1.0f / 16777216.0f));
}

float Random::normal() {
  float sum = 0.0f;
  for (int i = 0; i < 4; ++i) sum += uniform(-1.0f, 1.0f);
  return sum * 0.8660254f;  // four of variance 1/3
}

std::vector<float> Random::normals(size_t count, float size) {
  std::vector<float> values(count);
  for (float& value : values) value = normal() * size;
  return values;
}

bool same_bits(const float* a, const float* b, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    if (std::isnan(a[i]) && std::isnan(b[i])) continue;
    if (std::memcmp(a + i, b + i, 4) != 0) return false;
  }
  return true;
}

bool is_close(float actual, double expected, double tolerance) {
  if (std::isnan(expected)) return std::isnan(actual);
  return std::fabs(static_cast<double>(actual) - expected) <= tolerance;
}

}  // namespace test
}  // namespace octavo
