// What adapters add: against plain sums in double, and a row's bits alone with its bits among rows of other adapters.
#include <cmath>
#include <cstring>

#include "check.h"
#include "lora.h"

namespace octavo {
namespace test {
namespace {

struct Matrices {
  std::vector<float> down, up;  // as the packed ones hold them
  int first_output, num_outputs, rank;
  float scale;
};

struct Adapter {
  std::vector<Matrices> parts;
  LoraWeight weight;
};

float kept(WeightKind kind, float x) {
  if (kind == WeightKind::float16) return to_float(to_half(x));
  if (kind == WeightKind::bfloat16) return to_float(to_bfloat(x));
  return x;
}

std::vector<char> stored(WeightKind kind, const std::vector<float>& values) {
  const size_t item = kind == WeightKind::float32 ? 4 : 2;
  std::vector<char> bytes(values.size() * item);
  for (size_t i = 0; i < values.size(); ++i) {
    if (kind == WeightKind::float32) {
      std::memcpy(&bytes[i * 4], &values[i], 4);
    } else {
      const uint16_t bits = kind == WeightKind::float16 ? to_half(values[i]).bits : to_bfloat(values[i]).bits;
      std::memcpy(&bytes[i * 2], &bits, 2);
    }
  }
  return bytes;
}

// Parts of these ranks, next to each other with one output left out between them.
void make_adapter(Random& random, WeightKind kind, int num_inputs, const std::vector<int>& ranks, int outputs_each,
                  Adapter& adapter) {
  std::vector<std::vector<char>> bytes;
  std::vector<LoraSource> sources;
  int first = 0;
  for (int rank : ranks) {
    Matrices part{random.normals(static_cast<size_t>(rank) * num_inputs), random.normals(static_cast<size_t>(outputs_each) * rank),
                  first, outputs_each, rank, random.uniform(0.1f, 2.0f)};
    for (float& x : part.down) x = kept(kind, x);
    for (float& x : part.up) x = kept(kind, x);
    bytes.push_back(stored(kind, part.down));
    bytes.push_back(stored(kind, part.up));
    first += outputs_each + 1;
    adapter.parts.push_back(part);
  }
  for (size_t p = 0; p < ranks.size(); ++p) {
    const Matrices& part = adapter.parts[p];
    sources.push_back({part.first_output, part.num_outputs, part.rank, bytes[2 * p].data(), bytes[2 * p + 1].data(), part.scale});
  }
  adapter.weight.kind = kind;
  adapter.weight.num_inputs = num_inputs;
  adapter.weight.num_outputs = first;
  check(pack_lora(sources, adapter.weight), "packs");
}

void test_one(const Kernels& kernels, int num_threads, WeightKind kind, int num_inputs, int outputs_each, uint64_t seed) {
  Random random(seed);
  ThreadPool pool(num_threads);
  Workers workers(pool);
  Adapter adapters[3];
  make_adapter(random, kind, num_inputs, {1, 5}, outputs_each, adapters[0]);
  make_adapter(random, kind, num_inputs, {16, 3}, outputs_each, adapters[1]);
  make_adapter(random, kind, num_inputs, {7, 33}, outputs_each, adapters[2]);
  const int num_outputs = adapters[0].weight.num_outputs, num_rows = 45;
  // Rows 0, 4, 8, ... have none; of the others those of one adapter lie apart.
  std::vector<int32_t> rows, start{0};
  std::vector<int> adapter_of(num_rows, -1);
  for (int a = 0; a < 3; ++a) {
    for (int row = 0; row < num_rows; ++row) {
      if (row % 4 == a + 1) rows.push_back(row), adapter_of[row] = a;
    }
    start.push_back(static_cast<int32_t>(rows.size()));
  }
  const std::vector<float> x = random.normals(static_cast<size_t>(num_rows) * num_inputs);
  const std::vector<float> before = random.normals(static_cast<size_t>(num_rows) * num_outputs);
  const LoraWeight* weights[] = {&adapters[0].weight, &adapters[1].weight, &adapters[2].weight};
  const LoraRows all{3, rows.data(), start.data()};
  std::vector<float> out = before;
  add_lora(workers, kernels, {&all, weights}, x.data(), num_inputs, out.data(), num_outputs, 0, num_rows);

  for (int row = 0; row < num_rows; ++row) {
    const float* const from = &x[static_cast<size_t>(row) * num_inputs];
    const float* const old = &before[static_cast<size_t>(row) * num_outputs];
    const float* const got = &out[static_cast<size_t>(row) * num_outputs];
    if (adapter_of[row] < 0) {
      check(same_bits(got, old, num_outputs), "%s: row %d without adapter is left alone", kernels.name, row);
      continue;
    }
    std::vector<double> expected(old, old + num_outputs), size(num_outputs, 1.0);
    for (const Matrices& part : adapters[adapter_of[row]].parts) {
      for (int j = 0; j < part.rank; ++j) {
        double inner = 0.0, sizes = 0.0;
        for (int k = 0; k < num_inputs; ++k) {
          const double product = static_cast<double>(part.down[static_cast<size_t>(j) * num_inputs + k]) * from[k];
          inner += product;
          sizes += std::fabs(product);
        }
        for (int n = 0; n < part.num_outputs; ++n) {
          const double factor = part.scale * static_cast<double>(part.up[static_cast<size_t>(n) * part.rank + j]);
          expected[part.first_output + n] += factor * inner;
          size[part.first_output + n] += std::fabs(factor) * sizes;
        }
      }
    }
    bool passed = true;
    // One rounding an addition: at most (inputs + ranks) of them, of values up to the sum of the sizes.
    for (int n = 0; n < num_outputs; ++n) passed = passed && is_close(got[n], expected[n], size[n] * (num_inputs + 40) * 6e-8);
    check(passed, "%s: row %d of an adapter, kind %d, %d inputs, %d outputs", kernels.name, row, static_cast<int>(kind),
          num_inputs, outputs_each);

    std::vector<float> alone(old, old + num_outputs);
    const int32_t first_row = 0, one[] = {0, 1};
    const LoraRows single{1, &first_row, one};
    const LoraWeight* weight = weights[adapter_of[row]];
    add_lora(workers, kernels, {&single, &weight}, from, num_inputs, alone.data(), num_outputs, 0, 1);
    check(same_bits(got, alone.data(), num_outputs), "%s: row %d has its bits alone", kernels.name, row);
  }

  // Cut into two calls, as the MLP of a long prompt is.
  std::vector<float> halves = before;
  for (int half = 0; half < 2; ++half) {
    const int begin = half == 0 ? 0 : 19, end = half == 0 ? 19 : num_rows;
    add_lora(workers, kernels, {&all, weights}, &x[static_cast<size_t>(begin) * num_inputs], num_inputs,
             &halves[static_cast<size_t>(begin) * num_outputs], num_outputs, begin, end);
  }
  check(same_bits(out.data(), halves.data(), out.size()), "%s: two calls add what one does", kernels.name);

  // An adapter that leaves this weight alone.
  const LoraWeight* some[] = {nullptr, weights[1], nullptr};
  std::vector<float> fewer = before;
  add_lora(workers, kernels, {&all, some}, x.data(), num_inputs, fewer.data(), num_outputs, 0, num_rows);
  for (int row = 0; row < num_rows; ++row) {
    const size_t at = static_cast<size_t>(row) * num_outputs;
    const std::vector<float>& expected = adapter_of[row] == 1 ? out : before;
    check(same_bits(&fewer[at], &expected[at], num_outputs), "%s: row %d where others add nothing", kernels.name, row);
  }
}

}  // namespace

void test_lora(const Kernels& kernels) {
  uint64_t seed = 1;
  for (WeightKind kind : {WeightKind::float32, WeightKind::float16, WeightKind::bfloat16}) {
    for (int num_threads : {1, 3}) {
      test_one(kernels, num_threads, kind, 96, 64, ++seed);
      test_one(kernels, num_threads, kind, 37, 29, ++seed);
      test_one(kernels, num_threads, kind, 9, 5, ++seed);
      test_one(kernels, num_threads, kind, 576, 192, ++seed);
    }
  }
}

}  // namespace test
}  // namespace octavo
