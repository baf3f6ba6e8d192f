// Norm, rotary embedding, gated activations and the write into the cache: against formulas in double precision.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "check.h"

namespace octavo {
namespace test {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kGuard = 777.0f;

void test_norm(const Kernels& kernels, int width, bool has_residual) {
  Random random(width);
  const int num_rows = 5;
  const ptrdiff_t stride = width + 3;
  const std::vector<float> x = random.normals(num_rows * stride, 2.0f), weight = random.normals(width);
  const std::vector<float> residual_before = random.normals(num_rows * width);
  std::vector<float> residual = residual_before, out(num_rows * width + 1, kGuard);
  NormTask task{x.data(), stride, has_residual ? residual.data() : nullptr, weight.data(), 1e-5f, out.data(), width};
  kernels.rms_norm(task, 0, num_rows);
  bool is_right = true;
  for (int row = 0; row < num_rows; ++row) {
    std::vector<double> input(width);
    double squares = 0.0;
    for (int i = 0; i < width; ++i) {
      input[i] = x[row * stride + i];
      if (has_residual) {
        const float sum = residual_before[row * width + i] + x[row * stride + i];
        is_right = is_right && residual[row * width + i] == sum;
        input[i] = sum;
      }
      squares += input[i] * input[i];
    }
    const double factor = 1.0 / std::sqrt(squares / width + 1e-5);
    for (int i = 0; i < width; ++i) {
      const double expected = input[i] * factor * weight[i];
      is_right = is_right && is_close(out[row * width + i], expected, 2e-6 * std::fabs(expected) + 1e-12);
    }
  }
  check(is_right && out.back() == kGuard, "%s rms_norm width %d%s", kernels.name, width,
        has_residual ? " residual" : "");

  std::vector<float> residual_alone = residual_before, alone(out.size(), kGuard);
  task.residual = has_residual ? residual_alone.data() : nullptr;
  task.out = alone.data();
  for (int row = num_rows - 1; row >= 0; --row) kernels.rms_norm(task, row, row + 1);
  check(same_bits(alone.data(), out.data(), out.size()), "%s rms_norm width %d: a row alone", kernels.name, width);
  if (has_residual) {
    std::vector<float> added = residual_before;
    task.residual = added.data();
    task.out = nullptr;
    kernels.rms_norm(task, 0, num_rows);
    check(same_bits(added.data(), residual.data(), added.size()), "%s rms_norm width %d only adds", kernels.name,
          width);
  }
}

void test_rotary(const Kernels& kernels, int head_dim, int rotary_dim) {
  Random random(head_dim + rotary_dim);
  const int num_rows = 4, num_heads = 3, max_positions = 50, half = rotary_dim / 2;
  const ptrdiff_t stride = num_heads * head_dim + 7;
  std::vector<float> x = random.normals(num_rows * stride), table(max_positions * rotary_dim);
  const std::vector<float> before = x;
  for (int p = 0; p < max_positions; ++p) {
    for (int i = 0; i < half; ++i) {
      const double angle = p * std::pow(10000.0, -2.0 * i / rotary_dim);
      table[p * rotary_dim + i] = static_cast<float>(std::cos(angle));
      table[p * rotary_dim + half + i] = static_cast<float>(std::sin(angle));
    }
  }
  const int32_t positions[num_rows] = {0, 7, 49, 7};
  RotaryTask task{x.data(), stride, num_heads, head_dim, positions, table.data(), rotary_dim};
  kernels.rotary(task, 0, num_rows);
  std::vector<float> expected = before;
  for (int row = 0; row < num_rows; ++row) {
    for (int head = 0; head < num_heads; ++head) {
      for (int i = 0; i < half; ++i) {
        const size_t at = row * stride + head * head_dim + i;
        const double c = table[positions[row] * rotary_dim + i], s = table[positions[row] * rotary_dim + half + i];
        expected[at] = static_cast<float>(before[at] * c - before[at + half] * s);
        expected[at + half] = static_cast<float>(before[at + half] * c + before[at] * s);
      }
    }
  }
  bool is_right = true;
  // Two products and a sum are rounded; what is not rotated stays as it is.
  for (size_t i = 0; i < x.size(); ++i) {
    is_right = is_right && is_close(x[i], expected[i], expected[i] == before[i] ? 0.0 : 2e-6);
  }
  check(is_right, "%s rotary %d of %d", kernels.name, rotary_dim, head_dim);
  std::vector<float> alone = before;
  task.x = alone.data();
  for (int row = 0; row < num_rows; ++row) kernels.rotary(task, row, row + 1);
  check(same_bits(alone.data(), x.data(), x.size()), "%s rotary %d of %d: a row alone", kernels.name, rotary_dim,
        head_dim);
}

void test_gated(const Kernels& kernels, int width, bool is_silu) {
  Random random(width);
  const int num_rows = 3;
  const ptrdiff_t stride = 2 * width + 1;
  std::vector<float> gate_up = random.normals(num_rows * stride, 3.0f);
  const float special[] = {0.0f, -0.0f, 100.0f, -100.0f, 30.0f, -30.0f, 1e-30f, kNan};
  for (int i = 0; i < width && i < 8; ++i) gate_up[stride + i] = special[i];
  std::vector<float> out(num_rows * width + 1, kGuard);
  GatedTask task{gate_up.data(), stride, out.data(), width};
  const auto run = is_silu ? kernels.silu_and_mul : kernels.gelu_and_mul;
  run(task, 0, num_rows);
  bool is_right = out.back() == kGuard;
  for (int row = 0; row < num_rows; ++row) {
    for (int i = 0; i < width; ++i) {
      const double g = gate_up[row * stride + i], up = gate_up[row * stride + width + i];
      const double silu = g / (1.0 + std::exp(-g));
      const double gelu = 0.5 * g * (1.0 + std::tanh(0.7978845608028654 * (g + 0.044715 * g * g * g)));
      const double expected = (is_silu ? silu : gelu) * up;
      // The error of exp(u) grows with |u|, of which u itself has a rounding.
      double tolerance = 2e-6 + 2e-7 * std::fabs(is_silu ? g : 1.6 * (g + 0.044715 * g * g * g));
      tolerance = tolerance * std::fabs(expected) + 1e-15;
      if (std::fabs(g) > 4.0) tolerance += 1e-6 * std::fabs(up);  // the kernel's exp ends at 88, and the tail is tiny
      is_right = is_right && is_close(out[row * width + i], expected, tolerance);
    }
  }
  const char* name = is_silu ? "silu" : "gelu";
  check(is_right, "%s %s_and_mul width %d", kernels.name, name, width);
  std::vector<float> alone(out.size(), kGuard);
  task.out = alone.data();
  for (int row = 0; row < num_rows; ++row) run(task, row, row + 1);
  check(same_bits(alone.data(), out.data(), out.size()), "%s %s_and_mul width %d: a row alone", kernels.name, name,
        width);
}

// Numbers whose 16-bit form is not obvious: ties, the smallest, the largest, none.
std::vector<float> hard_to_round() {
  std::vector<float> values = {0.0f,       -0.0f,         1.0f,       1.00048828125f, 1.0004883f,   1.00146484375f,
                               65504.0f,   65519.996f,    65520.0f,   -65520.0f,      1e30f,        kInfinity,
                               -kInfinity, 6.1035156e-5f, 6.1005e-5f, 5.96e-8f,       2.980232e-8f, 2.9802326e-8f,
                               1e-8f,      -1e-8f,        1e-40f,     8.940697e-8f,   3.0517578e-5f};
  return values;
}

void test_write(const Kernels& kernels, int block_size, int num_heads, int head_dim, KvType type) {
  Random random(block_size * 100 + head_dim);
  const int num_blocks = 5, num_rows = 7;
  KvCache cache(num_blocks, block_size, num_heads, head_dim, type);
  const ptrdiff_t key_stride = num_heads * head_dim + 2, value_stride = num_heads * head_dim + 5;
  std::vector<float> key = random.normals(num_rows * key_stride), value = random.normals(num_rows * value_stride);
  const std::vector<float> hard = hard_to_round();
  for (size_t i = 0; i < hard.size(); ++i) {
    key[(i * 13) % key.size()] = hard[i];
    value[(i * 13) % value.size()] = hard[i];
  }
  std::vector<int64_t> slots;
  for (int row = 0; row < num_rows; ++row) slots.push_back(row == 2 ? -1 : (row * 17 + 3) % (num_blocks * block_size));
  WriteKvTask task{key.data(), key_stride, value.data(), value_stride, slots.data(), &cache};
  kernels.write_kv(task, 0, 3);
  kernels.write_kv(task, 3, num_rows);
  bool is_right = true;
  const auto matches = [&](const char* memory, size_t at, float expected) {
    if (type == KvType::float16) return reinterpret_cast<const half*>(memory)[at].bits == to_half(expected).bits;
    if (type == KvType::bfloat16) return reinterpret_cast<const bfloat*>(memory)[at].bits == to_bfloat(expected).bits;
    return same_bits(reinterpret_cast<const float*>(memory) + at, &expected, 1);
  };
  size_t num_written = 0;
  for (int row = 0; row < num_rows; ++row) {
    if (slots[row] < 0) continue;
    bool is_last = true;  // of the rows of this slot
    for (int later = row + 1; later < num_rows; ++later) is_last = is_last && slots[later] != slots[row];
    if (!is_last) continue;
    ++num_written;
    for (int head = 0; head < num_heads; ++head) {
      for (int d = 0; d < head_dim; ++d) {
        const size_t block_head = static_cast<size_t>(slots[row] / block_size) * num_heads + head;
        const size_t offset = slots[row] % block_size;
        const size_t key_at = cache.has_pairs() ? (d / 2 * cache.key_stride + offset) * 2 + d % 2
                                                : d * cache.key_stride + offset;
        const size_t value_at = cache.has_pairs() ? (offset / 2 * cache.value_stride + d) * 2 + offset % 2
                                                  : offset * cache.value_stride + d;
        is_right = is_right && matches(cache.keys, block_head * (cache.key_head_bytes() / cache.item_size()) + key_at,
                                       key[row * key_stride + head * head_dim + d]);
        is_right = is_right && matches(cache.values, block_head * (cache.value_head_bytes() / cache.item_size()) + value_at,
                                       value[row * value_stride + head * head_dim + d]);
      }
    }
  }
  check(is_right && num_written > 0, "%s write_kv block %d, %d heads of %d, %s", kernels.name, block_size, num_heads,
        head_dim, type == KvType::float16 ? "half" : type == KvType::bfloat16 ? "bfloat" : "float");
  // What no row was written to is as it was mapped: zero.
  size_t num_nonzero = 0;
  const size_t item = cache.item_size(), count = cache.value_block_bytes() / item * num_blocks;
  for (size_t i = 0; i < count; ++i) {
    const char* at = cache.values + i * item;
    bool is_zero = true;
    for (size_t b = 0; b < item; ++b) is_zero = is_zero && at[b] == 0;
    num_nonzero += !is_zero;
  }
  check(num_nonzero <= num_written * num_heads * head_dim, "%s write_kv writes its slots only", kernels.name);
}

// Codes and scales, by the rule in floats: the same in every instruction set, so an other code is an error.
void test_write_codes(const Kernels& kernels, int block_size, int num_heads, int head_dim) {
  Random random(block_size * 10 + head_dim);
  const int num_blocks = 3, num_rows = 3 * block_size;
  KvCache cache(num_blocks, block_size, num_heads, head_dim, KvType::int8);
  const ptrdiff_t stride = num_heads * head_dim + 3;
  std::vector<float> key = random.normals(num_rows * stride), value = random.normals(num_rows * stride);
  // Of row 0 all are zero, of row 1 all tiny; in row 2 the first is not a number.
  for (int i = 0; i < num_heads * head_dim; ++i) {
    key[i] = value[i] = 0.0f;
    if (num_rows > 1) key[stride + i] = value[stride + i] = 1e-38f;
    if (num_rows > 2 && i % head_dim == 0) {
      key[2 * stride + i] = std::numeric_limits<float>::quiet_NaN();
      value[2 * stride + i] = kInfinity;
    }
  }
  std::vector<int64_t> slots;
  for (int row = 0; row < num_rows; ++row) slots.push_back((row * 5 + 1) % num_rows);
  kernels.write_kv({key.data(), stride, value.data(), stride, slots.data(), &cache}, 0, num_rows);
  const int size = cache.hadamard_size();
  const auto find_scale = [](const std::vector<float>& x, float& inverse) {
    float largest = 0.0f;
    bool is_broken = false;
    for (float each : x) {
      largest = std::max(largest, std::fabs(each));
      is_broken = is_broken || !std::isfinite(each);
    }
    inverse = is_broken || largest < 1e-35f ? 0.0f : 127.0f / largest;
    return is_broken ? std::numeric_limits<float>::quiet_NaN() : largest < 1e-35f ? 0.0f : largest / 127.0f;
  };
  bool is_right = true;
  for (int row = 0; row < num_rows; ++row) {
    for (int head = 0; head < num_heads; ++head) {
      std::vector<float> k(key.begin() + row * stride + head * head_dim, key.begin() + row * stride + (head + 1) * head_dim);
      const std::vector<float> v(value.begin() + row * stride + head * head_dim,
                                 value.begin() + row * stride + (head + 1) * head_dim);
      for (int step = 1; step < size; step *= 2) {
        const std::vector<float> before = k;
        for (int d = 0; d < head_dim; ++d) {
          k[d] = (d / step) % 2 == 0 ? before[d] + before[d + step] : before[d - step] - before[d];
        }
      }
      const size_t block_head = static_cast<size_t>(slots[row] / block_size) * num_heads + head;
      const size_t offset = slots[row] % block_size;
      const char* const keys = cache.keys + block_head * cache.key_head_bytes();
      const char* const values = cache.values + block_head * cache.value_head_bytes();
      float key_inverse, value_inverse;
      const float scales[] = {find_scale(k, key_inverse), find_scale(v, value_inverse)};
      const float got[] = {reinterpret_cast<const float*>(keys + cache.key_items_bytes())[offset],
                           reinterpret_cast<const float*>(values + cache.value_items_bytes())[offset]};
      for (int i = 0; i < 2; ++i) {
        is_right = is_right && (std::isnan(scales[i]) ? std::isnan(got[i]) : same_bits(&scales[i], &got[i], 1));
      }
      for (int d = 0; d < head_dim; ++d) {
        const int key_code = key_inverse == 0.0f ? 0 : static_cast<int>(std::nearbyint(k[d] * key_inverse));
        const int value_code = value_inverse == 0.0f ? 0 : static_cast<int>(std::nearbyint(v[d] * value_inverse));
        is_right = is_right && reinterpret_cast<const int8_t*>(keys)[d * cache.key_stride + offset] == key_code;
        is_right = is_right && reinterpret_cast<const int8_t*>(values)[offset * cache.value_stride + d] == value_code;
      }
    }
  }
  check(is_right, "%s write_kv block %d, %d heads of %d, int8", kernels.name, block_size, num_heads, head_dim);

  // Copied with its scales.
  KvCache copied(num_blocks, block_size, num_heads, head_dim, KvType::int8);
  std::memcpy(copied.keys, cache.keys, cache.key_block_bytes() * num_blocks);
  std::memcpy(copied.values, cache.values, cache.value_block_bytes() * num_blocks);
  copied.copy_block(2, 0);
  check(std::memcmp(copied.keys, cache.keys + 2 * cache.key_block_bytes(), cache.key_block_bytes()) == 0 &&
            std::memcmp(copied.values, cache.values + 2 * cache.value_block_bytes(), cache.value_block_bytes()) == 0,
        "%s copy_block of int8", kernels.name);
}

// Each of the 65,536 halves to a float and back, through the cache.
void test_all_halves(const Kernels& kernels) {
  KvCache cache(1, 1, 1, 65536, KvType::float16);
  std::vector<float> all(65536);
  for (int i = 0; i < 65536; ++i) all[i] = to_float(half{static_cast<uint16_t>(i)});
  const int64_t slot = 0;
  WriteKvTask task{all.data(), 65536, all.data(), 65536, &slot, &cache};
  kernels.write_kv(task, 0, 1);
  int num_wrong = 0;
  for (int i = 0; i < 65536; ++i) {
    const bool is_nan = (i & 0x7fff) > 0x7c00;
    const uint16_t expected = static_cast<uint16_t>(is_nan ? i | 0x200 : i);  // a NaN becomes a quiet one
    num_wrong += reinterpret_cast<const half*>(cache.values)[i].bits != expected;
    num_wrong += reinterpret_cast<const half*>(cache.keys)[static_cast<size_t>(i) * cache.key_stride].bits != expected;
  }
  check(num_wrong == 0, "%s: %d halves changed on their way to float and back", kernels.name, num_wrong);
}

}  // namespace

void test_row_ops(const Kernels& kernels) {
  for (int width : {1, 3, 7, 8, 15, 16, 17, 33, 64, 576, 641}) {
    for (bool has_residual : {false, true}) test_norm(kernels, width, has_residual);
    for (bool is_silu : {false, true}) test_gated(kernels, width, is_silu);
  }
  test_rotary(kernels, 64, 64);
  test_rotary(kernels, 128, 128);
  test_rotary(kernels, 80, 20);
  test_rotary(kernels, 6, 6);
  test_rotary(kernels, 40, 38);
  for (KvType type : {KvType::float32, KvType::float16, KvType::bfloat16}) {
    test_write(kernels, 16, 3, 64, type);
    test_write(kernels, 4, 2, 20, type);
    test_write(kernels, 1, 1, 5, type);
    test_write(kernels, 32, 1, 80, type);
  }
  test_write_codes(kernels, 16, 3, 64);
  test_write_codes(kernels, 16, 1, 256);
  test_write_codes(kernels, 4, 2, 20);
  test_write_codes(kernels, 1, 1, 5);
  test_write_codes(kernels, 32, 1, 80);
  test_all_halves(kernels);
}

}  // namespace test
}  // namespace octavo
