// Attention over the paged cache, against the softmax in double precision. Sequences are batched, cut into chunks and
// into splits, and computed by one thread or three: the bits may not change.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>

#include "attention.h"
#include "check.h"

namespace octavo {
namespace test {
namespace {

const char* name_of(KvType type) {
  switch (type) {
    case KvType::float32: return "float";
    case KvType::float16: return "half";
    case KvType::bfloat16: return "bfloat";
    case KvType::int8: return "int8";
  }
  return "";
}

struct Shape {
  int num_heads, num_kv_heads, head_dim, block_size;
  KvType type;
  int window;
  float soft_cap;
};

// The new rows of a sequence and its context, these rows included.
struct Rows {
  int num_rows, context_len;
};

// Sequences with their keys and values, written into blocks that lie in no order. Everything else in the cache is NaN.
struct Scene {
  Shape shape;
  std::vector<Rows> sequences;
  KvCache cache;
  int max_blocks;
  std::vector<int32_t> tables;
  std::vector<std::vector<float>> keys, values;  // of each sequence: [context_len][num_kv_heads][head_dim]

  Scene(const Kernels& kernels, const Shape& shape, const std::vector<Rows>& sequences)
      : shape(shape),
        sequences(sequences),
        cache(count_blocks(shape, sequences) + 1, shape.block_size, shape.num_kv_heads, shape.head_dim, shape.type),
        max_blocks(0) {
    Random random(shape.num_heads * 1000 + shape.head_dim);
    fill_with_nan();
    for (const Rows& s : sequences) max_blocks = std::max(max_blocks, blocks_of(s));
    tables.assign(max_blocks * sequences.size(), -1);
    std::vector<int32_t> free_blocks;
    for (int block = 0; block < cache.num_blocks; ++block) free_blocks.push_back(block);
    for (size_t i = free_blocks.size() - 1; i > 0; --i)
      std::swap(free_blocks[i], free_blocks[random.below(static_cast<int>(i) + 1)]);
    const int row_size = shape.num_kv_heads * shape.head_dim;
    for (size_t s = 0; s < sequences.size(); ++s) {
      const int length = sequences[s].context_len;
      for (int block = 0; block < blocks_of(sequences[s]); ++block) {
        tables[s * max_blocks + block] = free_blocks.back();
        free_blocks.pop_back();
      }
      keys.push_back(random.normals(static_cast<size_t>(length) * row_size));
      values.push_back(random.normals(static_cast<size_t>(length) * row_size));
      std::vector<int64_t> slots(length);
      for (int p = 0; p < length; ++p) {
        slots[p] = static_cast<int64_t>(tables[s * max_blocks + p / shape.block_size]) * shape.block_size +
                   p % shape.block_size;
      }
      kernels.write_kv({keys[s].data(), row_size, values[s].data(), row_size, slots.data(), &cache}, 0, length);
      if (shape.type == KvType::float16) {
        for (float& value : keys[s]) value = to_float(to_half(value));
        for (float& value : values[s]) value = to_float(to_half(value));
      }
      if (shape.type == KvType::bfloat16) {
        for (float& value : keys[s]) value = to_float(to_bfloat(value));
        for (float& value : values[s]) value = to_float(to_bfloat(value));
      }
      if (shape.type == KvType::int8) {
        for (int p = 0; p < length; ++p) {
          for (int head = 0; head < shape.num_kv_heads; ++head) {
            const size_t at = (static_cast<size_t>(p) * shape.num_kv_heads + head) * shape.head_dim;
            read_codes(slots[p], head, keys[s].data() + at, values[s].data() + at);
          }
        }
      }
      // Blocks that the window of the first new row has left are let go.
      const int first_seen = shape.window > 0 ? length - sequences[s].num_rows - shape.window + 1 : 0;
      for (int block = 0; (block + 1) * shape.block_size <= first_seen; ++block) tables[s * max_blocks + block] = -1;
    }
  }

  // What the codes of a position mean; whether they are the right ones is test_row_ops' business.
  void read_codes(int64_t slot, int head, float* key, float* value) const {
    const size_t block_head = static_cast<size_t>(slot / shape.block_size) * shape.num_kv_heads + head;
    const ptrdiff_t offset = slot % shape.block_size;
    const int8_t* const key_codes = reinterpret_cast<const int8_t*>(cache.keys + block_head * cache.key_head_bytes());
    const int8_t* const value_codes =
        reinterpret_cast<const int8_t*>(cache.values + block_head * cache.value_head_bytes());
    const float key_scale = reinterpret_cast<const float*>(key_codes + cache.key_items_bytes())[offset];
    const float value_scale = reinterpret_cast<const float*>(value_codes + cache.value_items_bytes())[offset];
    const int size = cache.hadamard_size();
    for (int d = 0; d < shape.head_dim; ++d) {
      double sum = 0.0;  // row d of the transform, which is its own inverse but for a factor of its size
      for (int i = d / size * size; i < d / size * size + size; ++i) {
        const bool is_minus = __builtin_parity(static_cast<unsigned>((d % size) & (i % size))) != 0;
        const double code = key_codes[i * static_cast<ptrdiff_t>(cache.key_stride) + offset];
        sum += is_minus ? -code : code;
      }
      key[d] = static_cast<float>(sum * key_scale / size);
      value[d] = value_scale * value_codes[offset * cache.value_stride + d];
    }
  }

  int blocks_of(const Rows& s) const { return (s.context_len + shape.block_size - 1) / shape.block_size; }

  static int count_blocks(const Shape& shape, const std::vector<Rows>& sequences) {
    int count = 0;
    for (const Rows& s : sequences) count += (s.context_len + shape.block_size - 1) / shape.block_size;
    return count;
  }

  void fill_with_nan() {
    const size_t num_bytes[] = {cache.key_block_bytes() * cache.num_blocks,
                                cache.value_block_bytes() * cache.num_blocks};
    char* const memory[] = {cache.keys, cache.values};
    for (int m = 0; m < 2; ++m) {
      for (size_t i = 0; i < num_bytes[m]; ++i) memory[m][i] = static_cast<char>(0xff);
    }
    // The padding of a value row is zero, as the cache says; nobody relies on it where values lie in pairs.
    if (cache.value_stride == cache.head_dim || cache.has_pairs()) return;
    for (size_t row = 0; row < static_cast<size_t>(cache.num_blocks) * cache.num_kv_heads * cache.block_size; ++row) {
      char* const padding = cache.values + row / cache.block_size * cache.value_head_bytes() +
                            (row % cache.block_size * cache.value_stride + cache.head_dim) * cache.item_size();
      for (size_t i = 0; i < (cache.value_stride - cache.head_dim) * cache.item_size(); ++i) padding[i] = 0;
    }
  }
};

// Attention of some sequences of a scene: `first_rows[i]` new rows of `which[i]`, from context position `starts[i]`.
std::vector<float> attend(Workers& workers, const Kernels& kernels, const Scene& scene,
                          const std::vector<float>& queries, ptrdiff_t query_stride, const std::vector<int>& which,
                          const std::vector<Rows>& rows, bool& has_memory) {
  std::vector<int32_t> start = {0}, context, tables;
  for (size_t i = 0; i < which.size(); ++i) {
    start.push_back(start.back() + rows[i].num_rows);
    context.push_back(rows[i].context_len);
    const auto table = scene.tables.begin() + static_cast<ptrdiff_t>(which[i]) * scene.max_blocks;
    tables.insert(tables.end(), table, table + scene.max_blocks);
  }
  const Shape& shape = scene.shape;
  std::vector<float> out(static_cast<size_t>(start.back()) * shape.num_heads * shape.head_dim, 777.0f);
  AttentionCall call{};
  call.query = queries.data();
  call.query_stride = query_stride;
  call.out = out.data();
  call.num_heads = shape.num_heads;
  call.cache = &scene.cache;
  call.query_start = start.data();
  call.context_lens = context.data();
  call.block_tables = tables.data();
  call.max_blocks = scene.max_blocks;
  call.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(shape.head_dim)));
  call.window = shape.window;
  call.soft_cap = shape.soft_cap;
  has_memory = paged_attention(workers, kernels, call, static_cast<int>(which.size())) && has_memory;
  return out;
}

// Whether AMX multiplies, which rounds queries and weights to bfloat16.
bool is_tiled(const Kernels& kernels, const Shape& shape) {
  return std::strcmp(kernels.name, "amx") == 0 && shape.type == KvType::bfloat16 && shape.block_size == 16 &&
         shape.head_dim % 32 == 0;
}

// One query row and head, by the formula. Returns the largest difference from `got` [head_dim].
double difference(const Scene& scene, int sequence, int position, int head, const float* query, const float* got,
                  bool is_rounded) {
  const Shape& shape = scene.shape;
  const float scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(shape.head_dim)));
  const int kv_head = head / (shape.num_heads / shape.num_kv_heads);
  const int first = shape.window > 0 ? std::max(0, position - shape.window + 1) : 0;
  const float* const keys = scene.keys[sequence].data();
  const float* const values = scene.values[sequence].data();
  std::vector<double> weights, result(shape.head_dim, 0.0);
  double largest = -1e300, total = 0.0;
  for (int p = first; p <= position; ++p) {
    double score = 0.0;
    for (int d = 0; d < shape.head_dim; ++d) {
      score += (is_rounded ? to_float(to_bfloat(query[d] * scale)) : static_cast<double>(query[d]) * scale) *
               keys[(static_cast<size_t>(p) * shape.num_kv_heads + kv_head) * shape.head_dim + d];
    }
    if (shape.soft_cap != 0.0f) score = shape.soft_cap * std::tanh(score / shape.soft_cap);
    weights.push_back(score);
    largest = std::max(largest, score);
  }
  for (int p = first; p <= position; ++p) {
    const double weight = std::exp(weights[p - first] - largest);
    total += weight;
    for (int d = 0; d < shape.head_dim; ++d) {
      result[d] += weight * values[(static_cast<size_t>(p) * shape.num_kv_heads + kv_head) * shape.head_dim + d];
    }
  }
  double worst = 0.0;
  for (int d = 0; d < shape.head_dim; ++d) {
    const double off = std::fabs(got[d] - result[d] / total);
    worst = off >= worst ? off : std::isnan(off) ? 1e300 : worst;
  }
  return worst;
}

void test_scene(const Kernels& kernels, Workers& one, Workers& three, const Shape& shape,
                const std::vector<Rows>& sequences) {
  char name[160];
  std::snprintf(name, sizeof name, "%s attention %d/%d heads of %d, block %d, %s, window %d, cap %g", kernels.name,
                shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.block_size, name_of(shape.type),
                shape.window, static_cast<double>(shape.soft_cap));
  const Scene scene(kernels, shape, sequences);
  Random random(11);
  int num_rows = 0;
  std::vector<int> which, first_row;
  for (size_t s = 0; s < sequences.size(); ++s) {
    which.push_back(static_cast<int>(s));
    first_row.push_back(num_rows);
    num_rows += sequences[s].num_rows;
  }
  const int row_size = shape.num_heads * shape.head_dim;
  const ptrdiff_t stride = row_size + 3;
  const std::vector<float> queries = random.normals(num_rows * stride, 2.0f);
  bool has_memory = true;
  const std::vector<float> batch = attend(one, kernels, scene, queries, stride, which, sequences, has_memory);

  double worst = 0.0;
  for (size_t s = 0; s < sequences.size(); ++s) {
    for (int row = 0; row < sequences[s].num_rows; ++row) {
      for (int head = 0; head < shape.num_heads; ++head) {
        const size_t at = first_row[s] + row;
        worst = std::max(
            worst, difference(scene, static_cast<int>(s), sequences[s].context_len - sequences[s].num_rows + row, head,
                              queries.data() + at * stride + head * shape.head_dim,
                              batch.data() + at * row_size + head * shape.head_dim, is_tiled(kernels, shape)));
      }
    }
  }
  // A rounded weight is off by 2^-9 of itself at most, and so are a row of values, of which few exceed 3, and their sum.
  check(worst < (is_tiled(kernels, shape) ? 0.01 : 1e-5), "%s is off by %g", name, worst);

  const std::vector<float> threaded = attend(three, kernels, scene, queries, stride, which, sequences, has_memory);
  check(same_bits(threaded.data(), batch.data(), batch.size()), "%s: three threads have the bits of one", name);

  for (Workers* workers : {&one, &three}) {
    bool is_same = true;
    for (size_t s = 0; s < sequences.size(); ++s) {
      // Chunks of 1, then 2, then 3 rows ...: as they were scheduled, each sees its past only.
      int row = 0;
      for (int chunk = 1; row < sequences[s].num_rows; row += chunk, ++chunk) {
        const int count = std::min(chunk, sequences[s].num_rows - row);
        const Rows rows{count, sequences[s].context_len - sequences[s].num_rows + row + count};
        const size_t at = first_row[s] + row;
        const std::vector<float> some(queries.begin() + at * stride, queries.begin() + (at + count) * stride);
        const std::vector<float> out =
            attend(*workers, kernels, scene, some, stride, {static_cast<int>(s)}, {rows}, has_memory);
        is_same = is_same && same_bits(out.data(), batch.data() + at * row_size, static_cast<size_t>(count) * row_size);
      }
    }
    check(is_same, "%s: chunks of one sequence have the bits of the batch, %d threads", name,
          workers->pool.num_threads());
  }

  // A NaN stays in its row and head.
  std::vector<float> broken_queries = queries;
  const int broken_row = num_rows / 2, broken_head = shape.num_heads - 1;
  broken_queries[broken_row * stride + broken_head * shape.head_dim] = std::numeric_limits<float>::quiet_NaN();
  std::vector<float> broken = attend(one, kernels, scene, broken_queries, stride, which, sequences, has_memory);
  bool is_nan = true;
  for (int d = 0; d < shape.head_dim; ++d) {
    const size_t at = static_cast<size_t>(broken_row) * row_size + broken_head * shape.head_dim + d;
    is_nan = is_nan && std::isnan(broken[at]);
    broken[at] = batch[at];
  }
  check(is_nan && same_bits(broken.data(), batch.data(), batch.size()), "%s: a NaN stays in its row and head", name);
  check(has_memory, "%s has memory", name);
}

}  // namespace

void test_attention(const Kernels& kernels) {
  ThreadPool pool_of_one(1), pool_of_three(3);
  Workers one(pool_of_one), three(pool_of_three);
  const std::vector<Rows> mixed = {{1, 1}, {1, 17}, {7, 7}, {1, 64}, {20, 33}, {3, 130}};
  const std::vector<Rows> across_splits = {{1, 513}, {2, 1100}, {5, 514}};
  for (KvType type : {KvType::float16, KvType::float32, KvType::bfloat16, KvType::int8}) {
    for (int window : {0, 1, 9, 70}) test_scene(kernels, one, three, {4, 2, 64, 16, type, window, 0.0f}, mixed);
    test_scene(kernels, one, three, {4, 2, 64, 16, type, 0, 5.0f}, mixed);
    test_scene(kernels, one, three, {3, 1, 32, 16, type, 0, 0.0f}, across_splits);
    test_scene(kernels, one, three, {3, 1, 32, 16, type, 600, 0.0f}, across_splits);
  }
  // Heads and sizes that divide badly; blocks of every alignment.
  test_scene(kernels, one, three, {9, 3, 64, 16, KvType::float16, 0, 0.0f}, mixed);
  test_scene(kernels, one, three, {7, 1, 8, 4, KvType::float16, 0, 0.0f}, mixed);
  test_scene(kernels, one, three, {1, 1, 20, 1, KvType::float16, 5, 0.0f}, mixed);
  test_scene(kernels, one, three, {2, 2, 80, 32, KvType::float32, 20, 0.0f}, mixed);
  test_scene(kernels, one, three, {4, 1, 100, 48, KvType::float16, 0, 30.0f}, mixed);
  test_scene(kernels, one, three, {2, 1, 128, 128, KvType::float16, 0, 0.0f}, across_splits);
  test_scene(kernels, one, three, {4, 1, 256, 16, KvType::float16, 40, 0.0f}, {{1, 90}, {70, 100}});
  test_scene(kernels, one, three, {9, 3, 64, 16, KvType::int8, 0, 0.0f}, mixed);
  test_scene(kernels, one, three, {7, 1, 8, 4, KvType::int8, 0, 0.0f}, mixed);
  test_scene(kernels, one, three, {1, 1, 20, 1, KvType::int8, 5, 0.0f}, mixed);
  test_scene(kernels, one, three, {4, 1, 100, 48, KvType::int8, 0, 30.0f}, mixed);
  // bfloat16: as SmolLM2, Llama and Gemma have it, more heads than fit a task, heads and blocks that no tile fits.
  test_scene(kernels, one, three, {9, 3, 64, 16, KvType::bfloat16, 0, 0.0f}, mixed);
  test_scene(kernels, one, three, {9, 3, 64, 16, KvType::bfloat16, 0, 0.0f}, across_splits);
  test_scene(kernels, one, three, {32, 8, 128, 16, KvType::bfloat16, 0, 0.0f}, {{1, 90}, {3, 20}, {1, 17}, {1, 160}, {1, 33}});
  test_scene(kernels, one, three, {18, 1, 32, 16, KvType::bfloat16, 30, 0.0f}, mixed);
  test_scene(kernels, one, three, {4, 1, 256, 16, KvType::bfloat16, 40, 0.0f}, {{1, 90}, {70, 100}});
  test_scene(kernels, one, three, {3, 1, 96, 16, KvType::bfloat16, 600, 0.0f}, {{70, 1100}});
  test_scene(kernels, one, three, {4, 1, 100, 48, KvType::bfloat16, 0, 30.0f}, mixed);
  test_scene(kernels, one, three, {2, 1, 13, 5, KvType::bfloat16, 0, 0.0f}, mixed);
  test_scene(kernels, one, three, {1, 1, 64, 1, KvType::bfloat16, 5, 0.0f}, mixed);
  test_scene(kernels, one, three, {2, 1, 13, 5, KvType::int8, 0, 0.0f}, mixed);
  test_scene(kernels, one, three, {2, 1, 128, 128, KvType::int8, 0, 0.0f}, across_splits);
  test_scene(kernels, one, three, {4, 1, 256, 16, KvType::int8, 40, 0.0f}, {{1, 90}, {70, 100}});
}

}  // namespace test
}  // namespace octavo
