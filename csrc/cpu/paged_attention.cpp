// Causal attention over the blocks of the cache (Kwon et al. 2023) with an online softmax (Milakov and Gimelshein 2018).
// Compiled once an instruction set.
//
// A task is some rows of one sequence and the query heads that share one key head: its "query rows", row-major. The
// context is walked in tiles of whole blocks at absolute positions, at least 64 positions wide, so a row's additions depend
// on its own position only. What a row must not see is -inf in the scores and 0 in the weights, which changes no bit of
// its sums; so the rows of a task may share a tile although each sees another part of it.
//
// Where the cache is bfloat16 and the processor has AMX, attention_tiles.h does it; a row's bits are then the same in a task of
// any size, too. Elsewhere bfloat16 is widened.
//
//   splits   |------- split 0 -------|------- split 1 -------|---      computed apart, merged in order
//   tiles    |-----|-----|-----|-----|-----|-----|-----|-----|---
//   lanes     one a position, `key_stride` a block: a block of 4 positions leaves 12 of its 16 lanes empty
//
// Codes of 8 bits are widened to floats and summed like floats. A position's scales come in once a score and once a weight:
// score = key scale * sum of query * code; and a weight times the value scale is what multiplies the value's codes.
#include "attention_task.h"
#include "hadamard.h"
#include "kernels.h"
#include "simd.h"
#ifdef __AMX_BF16__
#include "attention_tiles.h"
#endif

namespace octavo {
namespace OCTAVO_ISA {
namespace {

constexpr int kMaxRows = kLanes == 16 ? 8 : 6;       // query rows of a register tile of scores
constexpr int kScoreVectors = 16 / kLanes;           // and its vectors of positions
constexpr int kWideStrips = kLanes == 16 ? 4 : kLanes == 8 ? 2 : 1;  // strips scored at once
constexpr int kMaxWideRows = kLanes == 16 ? 4 : 3;                   // by at most so many rows
constexpr int kMaxValueRows = kLanes == 8 ? 3 : 6;   // of a register tile of weighted values
constexpr int kValueVectors = 4;

// scores[r][lane] = sum over d of q[r][d] * keys[d][lane], for R query rows and B strips of 16 lanes. A sum is one chain of
// additions: it takes about a dozen side by side to keep the arithmetic units busy. What comes next (`ahead`)
// is fetched meanwhile, a line or two with every d: blocks lie anywhere, and no hardware guesses where.
template <class T, int R, int B>
void score_tile(const Strip* strips, const Strip* ahead, int num_ahead, ptrdiff_t key_stride, int head_dim, const float* query,
                ptrdiff_t query_stride, float* scores, ptrdiff_t score_stride) {
  constexpr int V = B * kScoreVectors;
  constexpr int step = 16 * sizeof(T);  // bytes of a strip's keys at one d
  vfloat total[R][V];
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) total[r][v] = zero();
  }
  for (int d = 0; d < head_dim; ++d) {
    if (num_ahead > 0 && d * step % 64 == 0) {
      for (int b = 0; b < num_ahead; ++b) {
        __builtin_prefetch(ahead[b].keys + d * key_stride * static_cast<ptrdiff_t>(sizeof(T)));
        __builtin_prefetch(ahead[b].values + d * step);
      }
    }
    const auto load_keys = [&](int v) {
      return load(reinterpret_cast<const T*>(strips[v / kScoreVectors].keys) + d * key_stride + v % kScoreVectors * kLanes);
    };
    // The fewer of the two wait in registers: all of the others beside the sums would not fit.
    if (R <= V) {
      vfloat q[R];
      for (int r = 0; r < R; ++r) q[r] = set1(query[r * query_stride + d]);
      for (int v = 0; v < V; ++v) {
        const vfloat k = load_keys(v);
        for (int r = 0; r < R; ++r) total[r][v] = fma(q[r], k, total[r][v]);
      }
    } else {
      vfloat k[V];
      for (int v = 0; v < V; ++v) k[v] = load_keys(v);
      for (int r = 0; r < R; ++r) {
        const vfloat q = set1(query[r * query_stride + d]);
        for (int v = 0; v < V; ++v) total[r][v] = fma(q, k[v], total[r][v]);
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) store(scores + r * score_stride + v * kLanes, total[r][v]);
  }
}

template <class T, int R>
void score_strips(const Strip* strips, const Strip* ahead, int num_ahead, int num_strips, ptrdiff_t key_stride, int head_dim,
                  const float* query, ptrdiff_t query_stride, float* scores, ptrdiff_t score_stride) {
  constexpr int B = R <= kMaxWideRows ? kWideStrips : kLanes == 16 ? 2 : 1;
  int at = 0;
  const auto score = [&](auto tile, int count) {
    // With the last strips all that is ahead and was not fetched yet.
    const int num_fetched = min_int(at + count < num_strips ? count : num_ahead, num_ahead);
    tile(strips + at, ahead, num_fetched, key_stride, head_dim, query, query_stride, scores + at * 16, score_stride);
    ahead += num_fetched;
    num_ahead -= num_fetched;
    at += count;
  };
  while (at + B <= num_strips) score(score_tile<T, R, B>, B);
  if (B > 3 && num_strips - at == 3) score(score_tile<T, R, (B > 3 ? 3 : 1)>, 3);
  if (B > 2 && num_strips - at == 2) score(score_tile<T, R, (B > 2 ? 2 : 1)>, 2);
  while (at < num_strips) score(score_tile<T, R, 1>, 1);
}

// The scores of neighbouring strips lie side by side.
template <class T>
void score_rows(const Strip* strips, const Strip* ahead, int num_ahead, int num_strips, ptrdiff_t key_stride, int head_dim,
                const float* query, ptrdiff_t query_stride, int num_rows, float* scores, ptrdiff_t score_stride) {
  while (num_rows > 0) {
    const int count = min_int(num_rows, kMaxRows);
    switch (count) {
      case 1: score_strips<T, 1>(strips, ahead, num_ahead, num_strips, key_stride, head_dim, query, query_stride, scores, score_stride); break;
      case 2: score_strips<T, 2>(strips, ahead, num_ahead, num_strips, key_stride, head_dim, query, query_stride, scores, score_stride); break;
      case 3: score_strips<T, 3>(strips, ahead, num_ahead, num_strips, key_stride, head_dim, query, query_stride, scores, score_stride); break;
      case 4: score_strips<T, 4>(strips, ahead, num_ahead, num_strips, key_stride, head_dim, query, query_stride, scores, score_stride); break;
      case 5: score_strips<T, 5>(strips, ahead, num_ahead, num_strips, key_stride, head_dim, query, query_stride, scores, score_stride); break;
      case 6: score_strips<T, 6>(strips, ahead, num_ahead, num_strips, key_stride, head_dim, query, query_stride, scores, score_stride); break;
      case 7: score_strips<T, 7>(strips, ahead, num_ahead, num_strips, key_stride, head_dim, query, query_stride, scores, score_stride); break;
      default: score_strips<T, 8>(strips, ahead, num_ahead, num_strips, key_stride, head_dim, query, query_stride, scores, score_stride); break;
    }
    query += count * query_stride;
    scores += count * score_stride;
    num_rows -= count;
  }
}

// total[r][d] += sum over the positions i in order of weights[r][lanes[i]] * value_rows[i][d], V vectors of d
template <class T, int R, int V>
void value_tile(const T* const* value_rows, const int* lanes, int num_positions, int d, const float* weights,
                ptrdiff_t weight_stride, float* total, ptrdiff_t total_stride) {
  vfloat sum[R][V];
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) sum[r][v] = load(total + r * total_stride + d + v * kLanes);
  }
  for (int i = 0; i < num_positions; ++i) {
    const T* value = value_rows[i] + d;
    const float* weight = weights + lanes[i];
    vfloat w[R];
    for (int r = 0; r < R; ++r) w[r] = set1(weight[r * weight_stride]);
    for (int v = 0; v < V; ++v) {
      const vfloat x = load(value + v * kLanes);
      for (int r = 0; r < R; ++r) sum[r][v] = fma(w[r], x, sum[r][v]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) store(total + r * total_stride + d + v * kLanes, sum[r][v]);
  }
}

template <class T, int R>
void value_columns(const T* const* value_rows, const int* lanes, int num_positions, int num_columns,
                   const float* weights, ptrdiff_t weight_stride, float* total, ptrdiff_t total_stride) {
  int d = 0;
  for (; d + kValueVectors * kLanes <= num_columns; d += kValueVectors * kLanes) {
    value_tile<T, R, kValueVectors>(value_rows, lanes, num_positions, d, weights, weight_stride, total, total_stride);
  }
  for (; d + 2 * kLanes <= num_columns; d += 2 * kLanes) {
    value_tile<T, R, 2>(value_rows, lanes, num_positions, d, weights, weight_stride, total, total_stride);
  }
  for (; d < num_columns; d += kLanes) {
    value_tile<T, R, 1>(value_rows, lanes, num_positions, d, weights, weight_stride, total, total_stride);
  }
}

template <class T>
void value_rows_of(const T* const* values, const int* lanes, int num_positions, int num_columns, int num_rows,
                   const float* weights, ptrdiff_t weight_stride, float* total, ptrdiff_t total_stride) {
  while (num_rows > 0) {
    const int count = min_int(num_rows, kMaxValueRows);
    switch (count) {
      case 1: value_columns<T, 1>(values, lanes, num_positions, num_columns, weights, weight_stride, total, total_stride); break;
      case 2: value_columns<T, 2>(values, lanes, num_positions, num_columns, weights, weight_stride, total, total_stride); break;
      case 3: value_columns<T, 3>(values, lanes, num_positions, num_columns, weights, weight_stride, total, total_stride); break;
      case 4: value_columns<T, 4>(values, lanes, num_positions, num_columns, weights, weight_stride, total, total_stride); break;
      case 5: value_columns<T, 5>(values, lanes, num_positions, num_columns, weights, weight_stride, total, total_stride); break;
      default: value_columns<T, 6>(values, lanes, num_positions, num_columns, weights, weight_stride, total, total_stride); break;
    }
    weights += count * weight_stride;
    total += count * total_stride;
    num_rows -= count;
  }
}

// Scores of one query row and tile to weights, in place; the row's state follows. It sees the positions [first, end) of
// the tile. `num_lanes`: beyond it no row sees anything. What is hidden may have scales of any kind.
template <bool has_scales>
void soften_row(float* scores, const Memory& memory, int num_lanes, int first, int end, float soft_cap, float* state,
                int value_stride) {
  const float* const positions = memory.positions;
  const vfloat below = set1(static_cast<float>(first) - 0.5f), above = set1(static_cast<float>(end) - 0.5f);
  const vfloat hidden = set1(kMinusInfinity);
  float& largest = state[value_stride];
  float& total = state[value_stride + 1];
  vfloat best = set1(largest);
  for (int i = 0; i < num_lanes; i += kLanes) {
    vfloat s = load(scores + i);
    if (has_scales) {
      s = mul(s, load(memory.key_scales + i));
      store(scores + i, s);
    }
    if (soft_cap != 0.0f) {
      // c * tanh(s / c), with tanh(y) = 1 - 2 / (exp(2y) + 1)
      const vfloat e = exp(mul(s, set1(2.0f / soft_cap)));
      s = mul(set1(soft_cap), sub(set1(1.0f), div(set1(2.0f), add(e, set1(1.0f)))));
      store(scores + i, s);
    }
    const vfloat position = load(positions + i);
    best = max(select(both(less(below, position), less(position, above)), s, hidden), best);
  }
  const float new_largest = max_lane(best);
  const float base = new_largest == kMinusInfinity ? 0.0f : new_largest;
  const vfloat minus = set1(base);
  vfloat sum = zero();
  for (int i = 0; i < num_lanes; i += kLanes) {
    const vfloat position = load(positions + i);
    const vmask is_seen = both(less(below, position), less(position, above));
    const vfloat weight = exp(sub(load(scores + i), minus));
    sum = add(sum, select(is_seen, weight, zero()));
    store(scores + i, select(is_seen, has_scales ? mul(weight, load(memory.value_scales + i)) : weight, zero()));
  }
  if (new_largest != largest) {
    const vfloat shrink = set1(exp_one(largest - base));
    for (int d = 0; d < value_stride; d += kLanes) store(state + d, mul(load(state + d), shrink));
    float lanes[kLanes];
    store(lanes, mul(set1(total), shrink));
    total = lanes[0];
    largest = new_largest;
  }
  total += sum_lanes(sum);
}

// kLanes positions of a block's keys from `offset` on, as floats: wide[d * stride + lane]
template <class T>
inline void widen_keys(const T* keys, int offset, const KvCache& cache, float* wide, int stride) {
  for (int d = 0; d < cache.head_dim; ++d) {
    store(wide + static_cast<ptrdiff_t>(d) * stride, load(keys + static_cast<ptrdiff_t>(d) * cache.key_stride + offset));
  }
}
inline void widen_keys(const bfloat* keys, int offset, const KvCache& cache, float* wide, int stride) {
  for (int d = 0; d < cache.head_dim; ++d) {
    const bfloat* from = keys + (static_cast<ptrdiff_t>(d / 2) * cache.key_stride + offset) * 2 + d % 2;
    for (int i = 0; i < kLanes; ++i) wide[static_cast<ptrdiff_t>(d) * stride + i] = to_float(from[i * 2]);
  }
}

// The value of position i of a block, as floats.
template <class T>
inline void widen_value(const T* values, int i, const KvCache& cache, float* wide) {
  const T* value = values + static_cast<ptrdiff_t>(i) * cache.value_stride;
  for (int d = 0; d < cache.value_stride; d += kLanes) store(wide + d, load(value + d));
}
inline void widen_value(const bfloat* values, int i, const KvCache& cache, float* wide) {
  const bfloat* value = values + static_cast<ptrdiff_t>(i / 2) * cache.value_stride * 2 + i % 2;
  for (int d = 0; d < cache.head_dim; ++d) wide[d] = to_float(value[d * 2]);
  for (int d = cache.head_dim; d < cache.value_stride; ++d) wide[d] = 0.0f;
}

// The query rows of one task over one split of the context; state: [query rows][state_floats], cleared here.
// next: the task whose first tile is fetched ahead at the end, or nullptr
template <class T>
void attend_split_of(const AttentionCall& call, const AttentionTask& task, const Shape& shape, const Memory& memory,
                     int split, const AttentionTask* next, float* state) {
  const KvCache& cache = *call.cache;
  const int num_rows = (task.row_end - task.row_begin) * shape.group;
  for (int r = 0; r < num_rows; ++r) clear_state(state + r * shape.state_floats, cache.value_stride);

  const Range range(call, task, shape, split);
  const int first_position = range.first_position, first_seen = range.first_seen, end = range.end;
  const int strips_per_block = cache.key_stride / 16;
  constexpr bool has_scales = sizeof(T) == 1;

  // Many rows read a tile many times: widen it once. Nothing else reads pairs.
  const bool is_widened = num_rows > kMaxRows || cache.has_pairs();

  for (int tile = range.begin; tile < end; tile += shape.tile_positions) {
    const int low = max_int(first_seen - tile, 0);                     // positions [low, high) of the tile are
    const int high = min_int(end - tile, shape.tile_positions);        // seen by some row
    const int first_block = low / cache.block_size, end_block = (high - 1) / cache.block_size + 1;
    const int num_strips = (end_block - first_block) * strips_per_block;
    locate_strips<T>(call, task, tile + first_block * cache.block_size, num_strips, memory.strips);
    int num_ahead = 0;
    if (!is_widened) {
      const AttentionTask* then = tile + shape.tile_positions < end ? &task : next;
      if (then != nullptr) {
        const int from = then == &task ? tile + shape.tile_positions : Range(call, *then, shape, then->split).begin;
        num_ahead = shape.tile_lanes / 16;
        locate_strips<T>(call, *then, from, num_ahead, memory.ahead);
      }
    }
    if (has_scales) {
      for (int strip = 0, lane = first_block * cache.key_stride; strip < num_strips; ++strip, lane += 16) {
        for (int i = 0; i < 16; i += kLanes) {
          store(memory.key_scales + lane + i, load(memory.strips[strip].key_scales + i));
          store(memory.value_scales + lane + i, load(memory.strips[strip].value_scales + i));
        }
      }
    }
    for (int block = first_block; block < end_block; ++block) {
      const Strip* strips = memory.strips + (block - first_block) * strips_per_block;
      const int lane = block * cache.key_stride;
      if (is_widened) {
        for (int offset = 0; offset < cache.key_stride; offset += kLanes) {
          widen_keys(reinterpret_cast<const T*>(strips->keys), offset, cache, memory.keys + lane + offset, shape.tile_lanes);
        }
      }
      const int begin_in_block = max_int(low - block * cache.block_size, 0);
      const int end_in_block = min_int(high - block * cache.block_size, cache.block_size);
      for (int i = begin_in_block; i < end_in_block; ++i) {
        const int at = block * cache.block_size + i - low;
        memory.lanes[at] = lane + i;
        if (is_widened) {
          float* wide = memory.values + static_cast<ptrdiff_t>(at) * cache.value_stride;
          widen_value(reinterpret_cast<const T*>(strips->values), i, cache, wide);
          memory.value_rows[at] = wide;
        } else {
          memory.value_rows[at] = reinterpret_cast<const T*>(strips->values) + static_cast<ptrdiff_t>(i) * cache.value_stride;
        }
      }
    }
    float* scores = memory.scores + first_block * cache.key_stride;
    if (is_widened) {
      for (int strip = 0; strip < num_strips; ++strip) {
        memory.strips[strip].keys = reinterpret_cast<const char*>(memory.keys + first_block * cache.key_stride + strip * 16);
      }
      score_rows<float>(memory.strips, nullptr, 0, num_strips, shape.tile_lanes, cache.head_dim, memory.query,
                        shape.query_floats, num_rows, scores, shape.tile_lanes);
    } else {
      score_rows<T>(memory.strips, memory.ahead, num_ahead, num_strips, cache.key_stride, cache.head_dim, memory.query,
                    shape.query_floats, num_rows, scores, shape.tile_lanes);
    }
    const int num_lanes = end_block * cache.key_stride;
    for (int r = 0; r < num_rows; ++r) {
      const int position = first_position + r / shape.group - tile;
      const int row_first = call.window > 0 ? position - call.window + 1 : 0;
      soften_row<has_scales>(memory.scores + r * shape.tile_lanes, memory, num_lanes, row_first,
                             min_int(position + 1, high), call.soft_cap, state + r * shape.state_floats,
                             cache.value_stride);
    }
    if (is_widened) {
      value_rows_of(reinterpret_cast<const float* const*>(memory.value_rows), memory.lanes, high - low,
                    cache.value_stride, num_rows, memory.scores, shape.tile_lanes, state, shape.state_floats);
    } else {
      value_rows_of(reinterpret_cast<const T* const*>(memory.value_rows), memory.lanes, high - low, cache.value_stride,
                    num_rows, memory.scores, shape.tile_lanes, state, shape.state_floats);
    }
  }
}


template <class T>
inline void attend_split(const AttentionCall& call, const AttentionTask& task, const Shape& shape, const Memory& memory,
                         int split, const AttentionTask* next, float* state) {
#ifdef __AMX_BF16__
  if (shape.is_tiled) return attend_split_tiled(call, task, shape, memory, split, next, state);
#endif
  attend_split_of<T>(call, task, shape, memory, split, next, state);
}

void load_queries(const AttentionCall& call, const AttentionTask& task, const Shape& shape, float* out) {
  const int head_dim = call.cache->head_dim, hadamard_size = call.cache->hadamard_size();
  const float scale = call.scale / static_cast<float>(hadamard_size);
  for (int kv_head = task.kv_head; kv_head < task.kv_head + task.num_kv_heads; ++kv_head) {
    for (int row = task.row_begin; row < task.row_end; ++row) {
      const float* query = call.query + (call.query_start[task.sequence] + row) * call.query_stride +
                           static_cast<ptrdiff_t>(kv_head) * shape.group * head_dim;
      for (int head = 0; head < shape.group; ++head, out += shape.query_floats, query += head_dim) {
        for (int d = 0; d < head_dim; ++d) out[d] = query[d] * scale;
        if (hadamard_size > 1) transform_hadamard(out, head_dim, hadamard_size);
      }
    }
  }
}

float* output_of(const AttentionCall& call, const AttentionTask& task, const Shape& shape, int query_row) {
  const int rows_of_head = (task.row_end - task.row_begin) * shape.group;
  const ptrdiff_t row = call.query_start[task.sequence] + task.row_begin + query_row % rows_of_head / shape.group;
  const ptrdiff_t head = static_cast<ptrdiff_t>(task.kv_head + query_row / rows_of_head) * shape.group + query_row % shape.group;
  return call.out + (row * call.num_heads + head) * call.cache->head_dim;
}

template <class T>
void attend_task(const AttentionCall& call, const AttentionTask& task, const AttentionTask* next, void* scratch) {
  const Shape shape(call);
  const Memory memory(call, shape, scratch);
  const KvCache& cache = *call.cache;
  for (int lane = 0; lane < shape.tile_lanes; ++lane) {
    const int in_block = lane % cache.key_stride;
    memory.positions[lane] =
        in_block < cache.block_size ? static_cast<float>(lane / cache.key_stride * cache.block_size + in_block) : 1e9f;
  }
  load_queries(call, task, shape, memory.query);
#ifdef __AMX_BF16__
  const TileUse tiles(shape.is_tiled ? (task.row_end - task.row_begin) * shape.group : 0);
  if (shape.is_tiled) round_queries(task, shape, memory, cache.head_dim);
#endif
  if (task.split >= 0) {
    float* const partial = call.partials + task.partial;
    // Tiles of more than 16 query rows write whole multiples of 16.
    const int num_query_rows = (task.row_end - task.row_begin) * shape.group;
    const bool is_direct = !shape.is_tiled || num_query_rows <= 16;
    attend_split<T>(call, task, shape, memory, task.split, next, is_direct ? partial : memory.part);
    if (!is_direct) __builtin_memcpy(partial, memory.part, sizeof(float) * num_query_rows * shape.state_floats);
    return;
  }
  const int num_rows = (task.row_end - task.row_begin) * shape.group * task.num_kv_heads;
  const int num_seq_rows = call.query_start[task.sequence + 1] - call.query_start[task.sequence];
  const int first_position = call.context_lens[task.sequence] - num_seq_rows + task.row_begin;
  const int end_position = first_position + (task.row_end - task.row_begin);
  const int first_seen = call.window > 0 ? max_int(0, first_position - call.window + 1) : 0;
  const int first_split = first_seen / shape.split_positions;
  const int end_split = (end_position - 1) / shape.split_positions + 1;
  const float* result = memory.part;
  for (int split = first_split; split < end_split; ++split) {
    if (end_split - first_split == 1) {
      attend_split<T>(call, task, shape, memory, split, next, memory.part);
      break;
    }
    if (split == first_split) {
      attend_split<T>(call, task, shape, memory, split, next, memory.whole);
      result = memory.whole;
      continue;
    }
    attend_split<T>(call, task, shape, memory, split, next, memory.part);
    for (int r = 0; r < num_rows; ++r) {
      merge_state(memory.whole + r * shape.state_floats, memory.part + r * shape.state_floats, cache.value_stride);
    }
  }
  for (int r = 0; r < num_rows; ++r) {
    write_output(result + r * shape.state_floats, cache.value_stride, cache.head_dim, output_of(call, task, shape, r));
  }
}

}  // namespace

AttentionSizes attention_sizes(const AttentionCall& call) {
  const Shape shape(call);
  const Memory memory(call, shape, nullptr);
  return {shape.split_positions, static_cast<size_t>(shape.state_floats), memory.size, shape.rows_per_task, shape.is_tiled ? min_int(16, shape.max_query_rows / call.cache->num_kv_heads) / shape.group : 0};
}

void attend(const AttentionCall& call, const AttentionTask& task, const AttentionTask* next, void* scratch) {
  switch (call.cache->type) {
    case KvType::float32: attend_task<float>(call, task, next, scratch); break;
    case KvType::float16: attend_task<half>(call, task, next, scratch); break;
    case KvType::bfloat16: attend_task<bfloat>(call, task, next, scratch); break;
    case KvType::int8: attend_task<int8_t>(call, task, next, scratch); break;
  }
}

void merge_splits(const AttentionCall& call, const AttentionTask& task, void* scratch) {
  const Shape shape(call);
  const int value_stride = call.cache->value_stride;
  const int num_rows = (task.row_end - task.row_begin) * shape.group;
  float* whole = static_cast<float*>(scratch);
  for (int r = 0; r < num_rows; ++r) {
    const float* part = call.partials + task.partial + static_cast<size_t>(r) * shape.state_floats;
    for (int i = 0; i < value_stride + 2; ++i) whole[i] = part[i];
    for (int split = 1; split < task.num_splits; ++split) {
      part += static_cast<size_t>(num_rows) * shape.state_floats;
      merge_state(whole, part, value_stride);
    }
    write_output(whole, value_stride, call.cache->head_dim, output_of(call, task, shape, r));
  }
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
