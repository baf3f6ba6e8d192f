// Half a layer in one call: the bits of its ops one by one, of a row alone, and of one thread.
#include <cmath>
#include <cstdio>

#include "attention.h"
#include "check.h"
#include "linear.h"
#include "sublayer.h"

namespace octavo {
namespace test {
namespace {

constexpr int kHidden = 96, kHeads = 6, kKvHeads = 2, kHeadDim = 32, kInner = 160;
constexpr int kQkv = (kHeads + 2 * kKvHeads) * kHeadDim;
constexpr int kBlockSize = 16, kNumBlocks = 24, kMaxPositions = 64;
constexpr float kEps = 1e-5f;

// A weight of two matrices: 4-bit codes with minimums, then what `second` says.
void pack(Workers& workers, Random& random, int num_rows, int num_columns, WeightKind second, Weight& weight) {
  const int half = num_rows / 2;
  const size_t count = static_cast<size_t>(half) * num_columns;
  std::vector<uint8_t> codes(count), other(count);
  std::vector<float> scale(count / kGroupSize), minimum(scale.size());
  for (size_t i = 0; i < count; ++i) {
    codes[i] = static_cast<uint8_t>(random.below(16));
    other[i] = static_cast<uint8_t>(random.below(256));
  }
  for (float& s : scale) s = random.uniform(0.002f, 0.02f);
  for (float& m : minimum) m = random.uniform(-0.2f, 0.0f);
  const std::vector<float> floats = random.normals(count, 0.1f);
  weight.num_rows = 2 * half;
  weight.num_columns = num_columns;
  weight.matrices.emplace_back();
  check(pack_same_kind(workers, {{WeightKind::q4, half, codes.data(), scale.data(), minimum.data()}}, num_columns,
                       weight.matrices.back()),
        "packs");
  weight.matrices.emplace_back();
  const WeightSource source = second == WeightKind::q8
                                  ? WeightSource{second, half, other.data(), scale.data(), nullptr}
                                  : WeightSource{WeightKind::float32, half, floats.data(), nullptr, nullptr};
  check(pack_same_kind(workers, {source}, num_columns, weight.matrices.back()), "packs");
}

struct Model {
  Weight qkv, output, gate_up, down;
  std::vector<float> norm, head_norm, output_norm, bias, table;
  AttentionSublayer attention{};
  MlpSublayer mlp{};

  Model(Workers& workers, Random& random, WeightKind second, bool has_options) {
    pack(workers, random, kQkv, kHidden, second, qkv);
    pack(workers, random, kHidden, kHeads * kHeadDim, second, output);
    pack(workers, random, 2 * kInner, kHidden, second, gate_up);
    pack(workers, random, kHidden, kInner, second, down);
    norm = random.normals(kHidden, 0.2f);
    head_norm = random.normals(kHeadDim);
    output_norm = random.normals(kHidden);
    bias = random.normals(kQkv > 2 * kInner ? kQkv : 2 * kInner);
    for (int p = 0; p < kMaxPositions; ++p) {
      for (int i = 0; i < kHeadDim; ++i) {
        const double angle = p * std::pow(1000.0, -2.0 * (i % (kHeadDim / 2)) / kHeadDim);
        table.push_back(static_cast<float>(i < kHeadDim / 2 ? std::cos(angle) : std::sin(angle)));
      }
    }
    const auto optional = [&](const std::vector<float>& values) { return has_options ? values.data() : nullptr; };
    attention.norm = norm.data();
    attention.eps = kEps;
    attention.qkv = &qkv;
    attention.qkv_bias = optional(bias);
    attention.query_norm = attention.key_norm = optional(head_norm);
    attention.cos_sin = table.data();
    attention.rotary_dim = kHeadDim;
    attention.num_heads = kHeads;
    attention.num_kv_heads = kKvHeads;
    attention.head_dim = kHeadDim;
    attention.scale = 0.2f;
    attention.window = has_options ? 9 : 0;
    attention.output = &output;
    attention.output_bias = optional(bias);
    attention.output_norm = optional(output_norm);
    mlp = {norm.data(), kEps, &gate_up, optional(bias), has_options, &down, optional(bias), optional(output_norm)};
  }
};

// Sequences of rows and what lies before them in the cache.
struct Step {
  std::vector<int32_t> positions, starts{0}, lens, tables;
  std::vector<int64_t> slots;
  StepRows rows{};

  // blocks: of each sequence, in order
  Step(const std::vector<std::vector<int>>& counts_and_lens, const std::vector<std::vector<int32_t>>& blocks) {
    const int max_blocks = 4;
    for (size_t s = 0; s < counts_and_lens.size(); ++s) {
      const int count = counts_and_lens[s][0], len = counts_and_lens[s][1];
      for (int p = len - count; p < len; ++p) {
        positions.push_back(p);
        slots.push_back(static_cast<int64_t>(blocks[s][p / kBlockSize]) * kBlockSize + p % kBlockSize);
      }
      starts.push_back(starts.back() + count);
      lens.push_back(len);
      for (int b = 0; b < max_blocks; ++b) {
        tables.push_back(b < static_cast<int>(blocks[s].size()) ? blocks[s][b] : -1);
      }
    }
    rows = {starts.back(), static_cast<int>(lens.size()), positions.data(), starts.data(), lens.data(), tables.data(),
            max_blocks,    slots.data()};
  }
};

void add_normed(const Kernels& kernels, std::vector<float>& product, const float* norm, int num_rows, float* residual) {
  if (norm != nullptr) {
    kernels.rms_norm({product.data(), kHidden, nullptr, norm, kEps, product.data(), kHidden}, 0, num_rows);
  }
  kernels.rms_norm({product.data(), kHidden, residual, nullptr, 0.0f, nullptr, kHidden}, 0, num_rows);
}

// The ops one by one, as the models would call them.
void attend_by_ops(Workers& workers, const Kernels& kernels, const Model& model, const StepRows& rows, KvCache& cache,
                   float* residual) {
  const AttentionSublayer& sublayer = model.attention;
  const int num_rows = rows.num_rows;
  std::vector<float> x(num_rows * kHidden), qkv(num_rows * kQkv), mixed(num_rows * kHeads * kHeadDim), product(x);
  kernels.rms_norm({residual, kHidden, nullptr, sublayer.norm, kEps, x.data(), kHidden}, 0, num_rows);
  linear(workers, kernels, x.data(), kHidden, num_rows, *sublayer.qkv, sublayer.qkv_bias, qkv.data());
  float* const keys = qkv.data() + kHeads * kHeadDim;
  float* const values = keys + kKvHeads * kHeadDim;
  for (int row = 0; sublayer.query_norm != nullptr && row < num_rows; ++row) {
    float* heads = qkv.data() + row * kQkv;
    kernels.rms_norm({heads, kHeadDim, nullptr, sublayer.query_norm, kEps, heads, kHeadDim}, 0, kHeads);
    heads = keys + row * kQkv;
    kernels.rms_norm({heads, kHeadDim, nullptr, sublayer.key_norm, kEps, heads, kHeadDim}, 0, kKvHeads);
  }
  kernels.rotary({qkv.data(), kQkv, kHeads, kHeadDim, rows.positions, sublayer.cos_sin, kHeadDim}, 0, num_rows);
  kernels.rotary({keys, kQkv, kKvHeads, kHeadDim, rows.positions, sublayer.cos_sin, kHeadDim}, 0, num_rows);
  kernels.write_kv({keys, kQkv, values, kQkv, rows.slots, &cache}, 0, num_rows);
  AttentionCall call{};
  call.query = qkv.data();
  call.query_stride = kQkv;
  call.out = mixed.data();
  call.num_heads = kHeads;
  call.cache = &cache;
  call.query_start = rows.query_start;
  call.context_lens = rows.context_lens;
  call.block_tables = rows.block_tables;
  call.max_blocks = rows.max_blocks;
  call.scale = sublayer.scale;
  call.window = sublayer.window;
  paged_attention(workers, kernels, call, rows.num_seqs);
  linear(workers, kernels, mixed.data(), kHeads * kHeadDim, num_rows, *sublayer.output, sublayer.output_bias,
         product.data());
  add_normed(kernels, product, sublayer.output_norm, num_rows, residual);
}

void mlp_by_ops(Workers& workers, const Kernels& kernels, const Model& model, float* residual, int num_rows) {
  const MlpSublayer& sublayer = model.mlp;
  std::vector<float> x(num_rows * kHidden), gate_up(num_rows * 2 * kInner), gated(num_rows * kInner), product(x);
  kernels.rms_norm({residual, kHidden, nullptr, sublayer.norm, kEps, x.data(), kHidden}, 0, num_rows);
  linear(workers, kernels, x.data(), kHidden, num_rows, *sublayer.gate_up, sublayer.gate_up_bias, gate_up.data());
  (sublayer.is_gelu ? kernels.gelu_and_mul : kernels.silu_and_mul)({gate_up.data(), 2 * kInner, gated.data(), kInner},
                                                                   0, num_rows);
  linear(workers, kernels, gated.data(), kInner, num_rows, *sublayer.down, sublayer.down_bias, product.data());
  add_normed(kernels, product, sublayer.output_norm, num_rows, residual);
}

void test_attention_sublayer(const Kernels& kernels, const Model& model, Workers& alone, Workers& together,
                             const char* name) {
  const Step step({{1, 1}, {20, 20}, {1, 40}, {9, 33}}, {{5}, {7, 2}, {0, 9, 1}, {12, 3, 20}});
  const int num_rows = step.rows.num_rows;
  Random random(11);
  const std::vector<float> before = random.normals(num_rows * kHidden);
  std::vector<float> expected = before, once = before, threaded = before;
  const auto run = [&](auto&& function) {
    KvCache cache(kNumBlocks, kBlockSize, kKvHeads, kHeadDim, KvType::float16);
    // What earlier steps have written.
    Random past(12);
    const std::vector<float> key = past.normals(kNumBlocks * kBlockSize * kKvHeads * kHeadDim);
    std::vector<int64_t> slots(kNumBlocks * kBlockSize);
    for (size_t i = 0; i < slots.size(); ++i) slots[i] = static_cast<int64_t>(i);
    kernels.write_kv({key.data(), kKvHeads * kHeadDim, key.data(), kKvHeads * kHeadDim, slots.data(), &cache}, 0,
                     static_cast<int>(slots.size()));
    function(cache);
  };
  run([&](KvCache& cache) { attend_by_ops(alone, kernels, model, step.rows, cache, expected.data()); });
  run([&](KvCache& cache) {
    check(run_attention_sublayer(alone, kernels, model.attention, step.rows, cache, once.data()), "%s runs", name);
  });
  run([&](KvCache& cache) {
    check(run_attention_sublayer(together, kernels, model.attention, step.rows, cache, threaded.data()), "%s", name);
  });
  check(same_bits(once.data(), expected.data(), once.size()), "%s has the bits of its ops", name);
  check(same_bits(once.data(), threaded.data(), once.size()), "%s: three threads have the bits of one", name);
  bool is_changed = false;
  for (size_t i = 0; i < once.size(); ++i) is_changed = is_changed || once[i] != before[i];
  check(is_changed && std::isfinite(once[0]), "%s adds", name);

  // One sequence in chunks, alone.
  const int len = 33;
  const std::vector<float> prompt = random.normals(len * kHidden);
  std::vector<float> whole = prompt, chunked = prompt;
  run([&](KvCache& cache) {
    const Step all({{len, len}}, {{4, 8, 6}});
    run_attention_sublayer(together, kernels, model.attention, all.rows, cache, whole.data());
  });
  run([&](KvCache& cache) {
    int done = 0;
    for (int size : {1, 16, 3, 13}) {
      done += size;
      const Step some({{size, done}}, {{4, 8, 6}});
      run_attention_sublayer(alone, kernels, model.attention, some.rows, cache,
                             chunked.data() + (done - size) * kHidden);
    }
  });
  check(same_bits(whole.data(), chunked.data(), whole.size()), "%s: chunks have the bits of the whole", name);
}

void test_mlp_sublayer(const Kernels& kernels, const Model& model, Workers& alone, Workers& together,
                       const char* name) {
  for (int num_rows : {1, 5, 64, 700}) {
    Random random(num_rows);
    std::vector<float> expected = random.normals(num_rows * kHidden);
    std::vector<float> once = expected, threaded = expected, single(expected.begin(), expected.begin() + kHidden);
    mlp_by_ops(alone, kernels, model, expected.data(), num_rows);
    check(run_mlp_sublayer(alone, kernels, model.mlp, once.data(), num_rows), "%s runs", name);
    check(run_mlp_sublayer(together, kernels, model.mlp, threaded.data(), num_rows), "%s runs", name);
    run_mlp_sublayer(together, kernels, model.mlp, single.data(), 1);
    check(same_bits(once.data(), expected.data(), once.size()), "%s of %d rows has the bits of its ops", name, num_rows);
    check(same_bits(once.data(), threaded.data(), once.size()), "%s of %d rows: three threads have the bits of one",
          name, num_rows);
    check(same_bits(once.data(), single.data(), single.size()), "%s of %d rows: a row alone", name, num_rows);
  }
  check(run_mlp_sublayer(alone, kernels, model.mlp, nullptr, 0), "%s of no rows", name);
}

void test_logits(const Kernels& kernels, const Model& model, Workers& together) {
  Random random(31);
  const ptrdiff_t stride = kHidden + 1;
  const std::vector<float> x = random.normals(50 * stride);
  const std::vector<int32_t> rows = {49, 0, 7, 7, 12, 3};
  const int count = static_cast<int>(rows.size());
  std::vector<float> normed(count * kHidden), expected(count * kQkv), got(count * kQkv);
  for (int i = 0; i < count; ++i) {
    kernels.rms_norm({x.data() + rows[i] * stride, stride, nullptr, model.norm.data(), kEps, normed.data() + i * kHidden,
                      kHidden},
                     0, 1);
  }
  linear(together, kernels, normed.data(), kHidden, count, model.qkv, nullptr, expected.data());
  check(run_logits(together, kernels, x.data(), stride, rows.data(), count, model.norm.data(), kEps, model.qkv,
                   got.data()),
        "%s logits", kernels.name);
  check(same_bits(got.data(), expected.data(), got.size()), "%s logits have the bits of their ops", kernels.name);
}

}  // namespace

void test_sublayer(const Kernels& kernels) {
  ThreadPool one(1), three(3);
  Workers alone(one), together(three);
  for (WeightKind second : {WeightKind::q8, WeightKind::float32}) {
    for (bool has_options : {false, true}) {
      Random random(has_options ? 21 : 22);
      const Model model(alone, random, second, has_options);
      char name[100];
      std::snprintf(name, sizeof name, "%s attention sublayer%s%s", kernels.name,
                    second == WeightKind::q8 ? "" : " with floats", has_options ? " with options" : "");
      test_attention_sublayer(kernels, model, alone, together, name);
      std::snprintf(name, sizeof name, "%s mlp sublayer%s%s", kernels.name,
                    second == WeightKind::q8 ? "" : " with floats", has_options ? " with options" : "");
      test_mlp_sublayer(kernels, model, alone, together, name);
      test_logits(kernels, model, together);
    }
  }
}

}  // namespace test
}  // namespace octavo
