// Quantization of activations, the matmuls over every kind of weight, and `linear`, which cuts and joins them.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <string>

#include "check.h"
#include "linear.h"

namespace octavo {
namespace test {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// --- activations ---------------------------------------------------------------------------------------------------

struct Activations {
  std::vector<int8_t> codes;
  std::vector<float> scale, middle, sum;
  std::vector<int32_t> offset;
  std::vector<bfloat> memory;  // of values, which start at a multiple of 64 bytes
  QuantizedRows rows;

  Activations(int num_rows, int num_columns)
      : codes(static_cast<size_t>(num_rows) * num_columns, 99),
        scale(codes.size() / kGroupSize, kNan),
        middle(scale),
        sum(scale),
        offset(scale.size(), 12345),
        memory(static_cast<size_t>(num_rows + 15) / 16 * 16 * num_columns + 32),
        rows{codes.data(), scale.data(), middle.data(), sum.data(), offset.data(), nullptr} {
    const size_t past = reinterpret_cast<uintptr_t>(memory.data()) % 64;
    rows.values = memory.data() + (64 - past) / sizeof(bfloat);
  }

  // Where the bfloat16 of a row and column is, in tiles of 16 rows and 32 columns.
  bfloat value(int row, int column, int num_columns) const {
    const size_t tile = static_cast<size_t>(row / 16) * (num_columns / 32) + column / 32;
    return rows.values[tile * 512 + row % 16 * 32 + column % 32];
  }
};

bool is_bfloat(const Kernels& kernels) { return std::string(kernels.name) == "amx"; }

// One group against its definition.
void check_group(const Kernels& kernels, const float* x, const Activations& got, int group) {
  float low = kInfinity, high = -kInfinity;
  bool is_finite = true;
  for (int i = 0; i < kGroupSize; ++i) {
    is_finite = is_finite && std::isfinite(x[i]);
    low = std::fmin(low, x[i]);
    high = std::fmax(high, x[i]);
  }
  const int8_t* codes = got.codes.data() + static_cast<size_t>(group) * kGroupSize;
  const double scale = got.scale[group], middle = got.middle[group];
  if (!is_finite) {
    check(std::isnan(got.middle[group]) && std::isnan(got.sum[group]), "%s quantize: group %d is a NaN", kernels.name,
          group);
    return;
  }
  const double half_range = 0.5 * high - 0.5 * low;
  bool is_right =
      is_close(got.middle[group], 0.5 * low + 0.5 * high, 1e-6 * std::fmax(std::fabs(low), std::fabs(high)));
  int code_sum = 0;
  for (int i = 0; i < kGroupSize; ++i) {
    // Half a step, and the roundings of the middle, the scale and x - middle.
    const double limit = 0.5 * half_range / 127.0 * 1.001 + 1e-6 * std::fabs(middle) + 1e-37;
    is_right = is_right && std::fabs(middle + scale * codes[i] - x[i]) <= limit && codes[i] >= -127;
    code_sum += codes[i];
  }
  check(is_right, "%s quantize: group %d is within half a step", kernels.name, group);
  const double expected_sum = scale * code_sum + 32.0 * middle;
  check(got.offset[group] == -128 * code_sum &&
            is_close(got.sum[group], expected_sum,
                     1e-6 * (std::fabs(scale * code_sum) + std::fabs(32.0 * middle)) + 1e-37),
        "%s quantize: sums of group %d", kernels.name, group);
}

void test_bfloat_rows(const Kernels& kernels) {
  Random random(1);
  const int num_rows = 35, num_columns = 96;
  const ptrdiff_t stride = num_columns + 5;
  std::vector<float> x = random.normals(num_rows * stride);
  x[0] = 1.00390625f;  // halfway between two, of which 1 is even
  x[1] = 1.01171875f;  // and 1.015625
  x[2] = kInfinity;
  x[3] = kNan;
  Activations all(num_rows, num_columns);
  kernels.quantize_rows(x.data(), stride, 0, 20, num_columns, all.rows);
  kernels.quantize_rows(x.data(), stride, 20, num_rows, num_columns, all.rows);
  bool is_right = true;
  for (int row = 0; row < num_rows; ++row) {
    for (int i = 0; i < num_columns; ++i) {
      const float value = x[row * stride + i], got = to_float(all.value(row, i, num_columns));
      is_right = is_right && (std::isnan(value) ? std::isnan(got) : got == to_float(to_bfloat(value)));
    }
  }
  check(is_right, "%s quantize: bfloat16, rounded to nearest, ties to even", kernels.name);
}

void test_quantize(const Kernels& kernels) {
  Random random(1);
  const int num_columns = 96, num_rows = 9, num_groups = 3;
  const ptrdiff_t stride = num_columns + 5;
  std::vector<float> x = random.normals(num_rows * stride);
  const auto fill = [&](int row, float value) {
    for (int i = 0; i < kGroupSize; ++i) x[row * stride + i] = value;
  };
  fill(1, 0.0f);
  fill(2, 3.25f);
  for (int i = 0; i < kGroupSize; ++i) {
    x[3 * stride + i] *= 1e-40f;                               // below the smallest normal number
    x[4 * stride + i] = random.uniform(-3e38f, 3e38f);         // near the largest
    x[5 * stride + i] = 100.0f + random.uniform(0.0f, 1e-3f);  // nearly the same
  }
  x[6 * stride + 7] = kNan;
  x[6 * stride + num_columns - 1] = kInfinity;
  x[7 * stride + 40] = -kInfinity;
  x[8 * stride + 3] = 1e4f;  // one outlier
  Activations all(num_rows, num_columns);
  kernels.quantize_rows(x.data(), stride, 0, num_rows, num_columns, all.rows);
  for (int row = 0; row < num_rows; ++row) {
    for (int group = 0; group < num_groups; ++group) {
      check_group(kernels, x.data() + row * stride + group * kGroupSize, all, row * num_groups + group);
    }
    Activations alone(num_rows, num_columns);
    kernels.quantize_rows(x.data(), stride, row, row + 1, num_columns, alone.rows);
    const size_t at = static_cast<size_t>(row) * num_groups;
    bool is_same = same_bits(&alone.scale[at], &all.scale[at], num_groups) &&
                   same_bits(&alone.middle[at], &all.middle[at], num_groups) &&
                   same_bits(&alone.sum[at], &all.sum[at], num_groups);
    for (int i = 0; i < num_columns; ++i) {
      is_same = is_same && alone.codes[row * num_columns + i] == all.codes[row * num_columns + i];
    }
    check(is_same, "%s quantize: row %d alone has the bits it has among others", kernels.name, row);
  }
}

// Halfway between two codes the even one is taken, by every variant: a scale of 1 and a middle of 0 make halves exact.
void test_ties(const Kernels& kernels) {
  std::vector<float> x(kGroupSize);
  for (int i = 0; i < kGroupSize; ++i) x[i] = static_cast<float>(i) - 15.5f;
  x[0] = -127.0f;
  x[31] = 127.0f;
  Activations got(1, kGroupSize);
  kernels.quantize_rows(x.data(), kGroupSize, 0, 1, kGroupSize, got.rows);
  bool is_even = got.scale[0] == 1.0f && got.middle[0] == 0.0f;
  for (int i = 1; i < 31; ++i) is_even = is_even && got.codes[i] % 2 == 0 && std::fabs(got.codes[i] - x[i]) == 0.5f;
  check(is_even, "%s quantize: ties go to the even code", kernels.name);
}

// --- weights -------------------------------------------------------------------------------------------------------

enum class Fill { random, lowest, highest };

// A weight as a checkpoint has it, and its exact values.
struct Source {
  std::vector<uint8_t> codes;
  std::vector<uint16_t> halves;
  std::vector<float> floats, scale, minimum, exact, widened;  // widened: to bfloat16, as amx has it
  WeightSource source;

  Source(Random& random, WeightKind kind, int num_rows, int num_columns, bool has_minimum, bool has_half_scales,
         Fill fill) {
    const size_t count = static_cast<size_t>(num_rows) * num_columns;
    exact.resize(count);
    if (kind == WeightKind::q4 || kind == WeightKind::q8) {
      const bool is_q4 = kind == WeightKind::q4;
      codes.resize(count);
      scale.resize(count / kGroupSize);
      for (float& s : scale) s = random.uniform(0.001f, 0.02f);
      if (has_minimum) minimum = random.normals(scale.size(), 0.1f);
      if (has_half_scales) {
        for (float& s : scale) s = to_float(to_half(s));
        for (float& m : minimum) m = to_float(to_half(m));
      }
      for (size_t i = 0; i < count; ++i) {
        int code = is_q4 ? random.below(16) : random.below(256) - 128;
        if (fill != Fill::random) code = fill == Fill::lowest ? (is_q4 ? 0 : -128) : (is_q4 ? 15 : 127);
        codes[i] = static_cast<uint8_t>(code);
        exact[i] = static_cast<float>(static_cast<double>(code) * scale[i / kGroupSize] +
                                      (has_minimum ? minimum[i / kGroupSize] : 0.0f));
        const float grown = 1.0f + 0.693147f / 256.0f;
        const float s = scale[i / kGroupSize] * grown, m = has_minimum ? minimum[i / kGroupSize] * grown : 0.0f;
        const float power = is_q4 && i % kGroupSize < 16 ? 128.0f : 2048.0f, raised = is_q4 ? 0.0f : 128.0f;
        const float start = std::fma(s, -(power + raised), m);
        widened.push_back(cut(std::fma(s, power + raised + static_cast<float>(code), start)));
      }
      source = {kind, num_rows, codes.data(), scale.data(), has_minimum ? minimum.data() : nullptr};
      return;
    }
    floats = random.normals(count, 0.1f);
    halves.resize(count);
    for (size_t i = 0; i < count; ++i) {
      exact[i] = floats[i];
      if (kind == WeightKind::float16) {
        halves[i] = to_half(floats[i]).bits;
        exact[i] = to_float(half{halves[i]});
      } else if (kind == WeightKind::bfloat16) {
        halves[i] = to_bfloat(floats[i]).bits;
        exact[i] = to_float(bfloat{halves[i]});
      }
    }
    const void* values = kind == WeightKind::float32 ? static_cast<const void*>(floats.data()) : halves.data();
    source = {kind, num_rows, values, nullptr, nullptr};
  }
  Source(const Source&) = delete;

 private:
  static float cut(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return to_float(bfloat{static_cast<uint16_t>(bits >> 16)});
  }
};

const char* name_of(WeightKind kind) {
  switch (kind) {
    case WeightKind::q4: return "q4";
    case WeightKind::q8: return "q8";
    case WeightKind::float16: return "float16";
    case WeightKind::bfloat16: return "bfloat16";
    default: return "float32";
  }
}

bool is_quantized(WeightKind kind) { return kind == WeightKind::q4 || kind == WeightKind::q8; }

void multiply(const Kernels& kernels, const MatmulTask& task) {
  switch (task.matrix->kind) {
    case WeightKind::q4: kernels.matmul_q4(task); break;
    case WeightKind::q8: kernels.matmul_q8(task); break;
    default: kernels.matmul_float(task); break;
  }
}

struct MatmulCase {
  WeightKind kind;
  int num_rows, num_columns;  // N, K
  bool has_minimum, has_half_scales, has_bias;
  Fill fill;
};

void test_one(const Kernels& kernels, Workers& workers, const MatmulCase& shape, const std::vector<int>& row_counts) {
  char name[200];
  std::snprintf(name, sizeof name, "%s %s N=%d K=%d%s%s%s", kernels.name, name_of(shape.kind), shape.num_rows,
                shape.num_columns, shape.has_minimum ? " minimum" : "", shape.has_half_scales ? " half" : "",
                shape.fill == Fill::random ? "" : " extreme");
  Random random(static_cast<uint64_t>(shape.num_rows) * 7919 + shape.num_columns);
  const int n = shape.num_rows, k = shape.num_columns;
  const Source source(random, shape.kind, n, k, shape.has_minimum, shape.has_half_scales, shape.fill);
  PackedMatrix matrix;
  check(pack_same_kind(workers, {source.source}, k, matrix), "%s packs", name);

  bool reads_back = true;
  std::vector<float> weight_row(k);
  for (int row = 0; row < n; ++row) {
    read_row(matrix, row, 1.0f, weight_row.data());
    for (int i = 0; i < k; ++i) {
      reads_back = reads_back && is_close(weight_row[i], source.exact[static_cast<size_t>(row) * k + i], 1e-6);
    }
  }
  check(reads_back, "%s: packed rows read back", name);

  const int max_rows = row_counts.back();
  const ptrdiff_t x_stride = k + 3, out_stride = n + 2;
  std::vector<float> x = random.normals(max_rows * x_stride);
  if (shape.fill != Fill::random) {
    for (float& value : x) value = random.below(8) == 0 ? -1.0f : 1.0f;  // codes of -127 and 127
  }
  x[(max_rows - 1) * x_stride] = kNan;  // the last row of the largest batch
  const std::vector<float> bias = random.normals(n);
  Activations activations(max_rows, k);
  if (is_quantized(shape.kind)) kernels.quantize_rows(x.data(), x_stride, 0, max_rows, k, activations.rows);

  MatmulTask task{};
  task.x = x.data();
  task.x_stride = x_stride;
  task.quantized = activations.rows;
  task.matrix = &matrix;
  task.bias = shape.has_bias ? bias.data() : nullptr;
  task.out_stride = out_stride;

  // Every row and panel alone: against the formula, and the bits that all other ways must give.
  std::vector<float> alone(max_rows * out_stride, 777.0f);
  task.out = alone.data();
  for (int row = 0; row < max_rows; ++row) {
    for (int panel = 0; panel < matrix.num_panels; ++panel) {
      task.row_begin = row;
      task.row_end = row + 1;
      task.panel_begin = panel;
      task.panel_end = panel + 1;
      multiply(kernels, task);
    }
  }
  bool is_right = true, is_inside = true, is_near = true;
  for (int row = 0; row < max_rows; ++row) {
    for (int channel = 0; channel < n; ++channel) {
      double sum = shape.has_bias ? bias[channel] : 0.0, size = std::fabs(sum);
      for (int i = 0; i < k; ++i) {
        double value = x[row * x_stride + i];
        const size_t at = static_cast<size_t>(row) * k + i;
        const size_t w_at = static_cast<size_t>(channel) * k + i;
        if (is_quantized(shape.kind) && is_bfloat(kernels)) {
          const double product = to_float(activations.value(row, i, k)) * static_cast<double>(source.widened[w_at]);
          sum += product;
          size += std::fabs(product);
          const double error = std::fabs(source.widened[w_at] - source.exact[w_at]);
          is_near = is_near && error <= std::fabs(source.exact[w_at]) / 128.0 + source.scale[w_at / kGroupSize] / 2000.0;
          continue;
        }
        if (is_quantized(shape.kind)) {
          value = static_cast<double>(activations.middle[at / kGroupSize]) +
                  static_cast<double>(activations.scale[at / kGroupSize]) * activations.codes[at];
        }
        sum += value * source.exact[w_at];
        size += std::fabs(value * source.exact[w_at]);
        if (is_quantized(shape.kind)) {
          // What the terms of the formula sum, which cancel: codes and minimum, code and middle apart.
          const double code =
              shape.kind == WeightKind::q4 ? source.codes[w_at] : static_cast<int8_t>(source.codes[w_at]);
          const double scaled = std::fabs(code * source.scale[w_at / kGroupSize]);
          const double minimum = shape.has_minimum ? std::fabs(source.minimum[w_at / kGroupSize]) : 0.0;
          size += (scaled + minimum) * (std::fabs(value) + 2.0 * std::fabs(activations.middle[at / kGroupSize]));
        }
      }
      const float got = alone[row * out_stride + channel];
      is_right = is_right && is_close(got, sum, size * 6e-8 * (8.0 + 0.25 * std::sqrt(static_cast<double>(k))) + 1e-30);
    }
    is_inside = is_inside && alone[row * out_stride + n] == 777.0f && alone[row * out_stride + n + 1] == 777.0f;
  }
  check(is_right, "%s is the formula's", name);
  check(is_near, "%s: widened weights are the exact ones but for the last bit", name);
  check(is_inside, "%s writes its outputs only", name);
  check(std::isnan(alone[(max_rows - 1) * out_stride]) &&
            (max_rows == 1 || !std::isnan(alone[(max_rows - 2) * out_stride])),
        "%s: a NaN stays in its row", name);

  // Added to what is there.
  std::vector<float> residual = random.normals(alone.size()), expected = residual;
  for (int row = 0; row < max_rows; ++row) {
    for (int channel = 0; channel < n; ++channel) expected[row * out_stride + channel] += alone[row * out_stride + channel];
  }
  task.out = residual.data();
  task.is_added = true;
  task.row_begin = 0;
  task.row_end = max_rows;
  task.panel_begin = 0;
  task.panel_end = matrix.num_panels;
  multiply(kernels, task);
  task.is_added = false;
  check(same_bits(residual.data(), expected.data(), residual.size()), "%s adds to a residual", name);

  for (int count : row_counts) {
    std::vector<float> out(max_rows * out_stride, 777.0f);
    task.out = out.data();
    task.row_begin = max_rows - count;
    task.row_end = max_rows;
    task.panel_begin = 0;
    task.panel_end = matrix.num_panels;
    multiply(kernels, task);
    const size_t from = task.row_begin * out_stride;
    check(same_bits(out.data() + from, alone.data() + from, count * out_stride), "%s: %d rows have the bits of one",
          name, count);
    bool is_untouched = true;
    for (size_t i = 0; i < from; ++i) is_untouched = is_untouched && out[i] == 777.0f;
    check(is_untouched, "%s: %d rows leave others alone", name, count);
  }
}

// --- linear --------------------------------------------------------------------------------------------------------

void test_linear(const Kernels& kernels) {
  Random random(3);
  const int k = 256;
  ThreadPool one(1), three(3);
  Workers alone(one), together(three);
  const WeightKind kinds[] = {WeightKind::q4, WeightKind::q8, WeightKind::float16};
  const int sizes[] = {48, 200, 33};
  Weight weight;
  weight.num_columns = k;
  for (int m = 0; m < 3; ++m) {
    const Source source(random, kinds[m], sizes[m], k, m == 0, true, Fill::random);
    weight.matrices.emplace_back();
    check(pack_same_kind(alone, {source.source}, k, weight.matrices.back()), "%s linear packs", kernels.name);
    weight.num_rows += sizes[m];
  }
  const int num_rows = 301;
  const std::vector<float> x = random.normals(static_cast<size_t>(num_rows) * (k + 1)),
                           bias = random.normals(weight.num_rows);
  const size_t row_size = weight.num_rows;
  std::vector<float> all(num_rows * row_size, kNan), threaded(all), row(row_size);
  check(linear(alone, kernels, x.data(), k + 1, num_rows, weight, bias.data(), all.data()), "%s linear", kernels.name);
  check(linear(together, kernels, x.data(), k + 1, num_rows, weight, bias.data(), threaded.data()), "%s linear",
        kernels.name);
  check(same_bits(all.data(), threaded.data(), all.size()), "%s linear: three threads have the bits of one",
        kernels.name);
  bool is_same = true, is_finite = true;
  for (int r = 0; r < num_rows; r += 30) {
    linear(together, kernels, x.data() + static_cast<size_t>(r) * (k + 1), k + 1, 1, weight, bias.data(), row.data());
    is_same = is_same && same_bits(row.data(), all.data() + r * row_size, row_size);
  }
  for (float value : all) is_finite = is_finite && std::isfinite(value);
  check(is_same && is_finite, "%s linear: a row alone has the bits it has among %d", kernels.name, num_rows);
}

}  // namespace

void test_matmul(const Kernels& kernels) {
  if (is_bfloat(kernels)) {
    test_bfloat_rows(kernels);
  } else {
    test_quantize(kernels);
    test_ties(kernels);
  }
  ThreadPool pool(1);
  Workers workers(pool);
  for (WeightKind kind : {WeightKind::q4, WeightKind::q8}) {
    for (bool has_minimum : {false, true}) {
      for (bool has_half_scales : {false, true}) {
        test_one(kernels, workers, {kind, 50, 96, has_minimum, has_half_scales, has_minimum, Fill::random}, kRowCounts);
      }
    }
    for (int n : {1, 15, 16, 17, 33}) {
      test_one(kernels, workers, {kind, n, 32, true, true, n % 2 == 1, Fill::random}, {1, 4, 7});
    }
    test_one(kernels, workers, {kind, 40, 576, true, true, false, Fill::random}, kRowCounts);
    test_one(kernels, workers, {kind, 17, 64, false, false, false, Fill::lowest}, {1, 2, 5});
    test_one(kernels, workers, {kind, 17, 64, true, true, false, Fill::highest}, {1, 2, 5});
  }
  for (WeightKind kind : {WeightKind::float32, WeightKind::float16, WeightKind::bfloat16}) {
    test_one(kernels, workers, {kind, 50, 96, false, false, true, Fill::random}, kRowCounts);
    for (int k : {1, 7, 33}) test_one(kernels, workers, {kind, 35, k, false, false, false, Fill::random}, {1, 6, 9});
    for (int n : {1, 3, 16, 31}) test_one(kernels, workers, {kind, n, 20, false, false, true, Fill::random}, {1, 5, 8});
  }
  test_linear(kernels);
}

}  // namespace test
}  // namespace octavo
