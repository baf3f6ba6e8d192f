// The products of attention on AMX, over a cache of bfloat16 in blocks of 16 positions: a block's keys are head_dim / 32
// tiles, and its values head_dim / 16 tiles of half the height. Of the amx variant only.
//
// A tile's sum begins at zero and is added to what is there, so a row's additions depend on its own block table only: not
// on the other rows, nor on how many there are.
#pragma once

#include "amx_tiles.h"
#include "attention_task.h"
#include "numbers.h"
#include "simd.h"

namespace octavo {
namespace OCTAVO_ISA {
namespace {

constexpr int kBlockPositions = 16;

// Tiles 0 to 3 are sums; 4 and 6 the factors of scores, 5 and 7 those of weighted values.
void configure_attention(int num_rows) {
  const int rows = num_rows < kTileRows ? num_rows : kTileRows;
  TileConfig config;
  for (int tile = 0; tile < 5; ++tile) config.set(tile, rows);
  config.set(5, rows, kBlockPositions * 2);
  config.set(6, kTileRows);
  config.set(7, kBlockPositions / 2);
  load_config(config);
}

// While it lives the tiles are configured; nothing where num_rows is 0.
struct TileUse {
  explicit TileUse(int num_rows) : is_on(num_rows > 0) {
    if (is_on) configure_attention(num_rows);
  }
  ~TileUse() {
    if (is_on) _tile_release();
  }
  TileUse(const TileUse&) = delete;
  TileUse& operator=(const TileUse&) = delete;

  const bool is_on;
};

// What comes next, fetched a few lines at a time between products. Lines are taken from all streams in turn: their blocks lie
// anywhere, and one block after the other takes half as long again.
struct Ahead {
  static constexpr int kMaxStreams = 2 * 64 / kBlockPositions;

  const char* streams[kMaxStreams];  // keys and values of blocks
  int num_streams = 0;
  int num_lines = 0;  // of each stream
  int at_once = 0;    // lines of a call of `fetch`
  int stream = 0, line = 0;

  void fetch() {
    if (num_streams == 0 || line >= num_lines) return;
    for (int i = 0; i < at_once; ++i) {
      __builtin_prefetch(streams[stream] + line * 64);
      if (++stream < num_streams) continue;
      stream = 0;
      if (++line == num_lines) return;
    }
  }
};

// B blocks at once.
template <int B>
void score_blocks(const Strip* blocks, int head_dim, const bfloat* query, float* scores, ptrdiff_t score_bytes) {
  _tile_zero(0);
  if (B > 1) _tile_zero(1);
  if (B > 2) _tile_zero(2);
  if (B > 3) _tile_zero(3);
  for (int d = 0; d < head_dim; d += 32) {
    const ptrdiff_t at = static_cast<ptrdiff_t>(d) * kBlockPositions * 2;
    OCTAVO_LOAD_TILE(4, query + d, head_dim * 2);
    OCTAVO_LOAD_TILE(6, blocks[0].keys + at, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (B > 1) {
      OCTAVO_LOAD_TILE(6, blocks[1].keys + at, 64);
      _tile_dpbf16ps(1, 4, 6);
    }
    if (B > 2) {
      OCTAVO_LOAD_TILE(6, blocks[2].keys + at, 64);
      _tile_dpbf16ps(2, 4, 6);
    }
    if (B > 3) {
      OCTAVO_LOAD_TILE(6, blocks[3].keys + at, 64);
      _tile_dpbf16ps(3, 4, 6);
    }
  }
  OCTAVO_STORE_TILE(0, scores, score_bytes);
  if (B > 1) OCTAVO_STORE_TILE(1, scores + kBlockPositions, score_bytes);
  if (B > 2) OCTAVO_STORE_TILE(2, scores + 2 * kBlockPositions, score_bytes);
  if (B > 3) OCTAVO_STORE_TILE(3, scores + 3 * kBlockPositions, score_bytes);
}

// scores[r][16 b + i] = query r times key i of block b. Rows are computed 16 at a time, those beyond the last included.
void score_rows_of_blocks(const Strip* blocks, int num_blocks, int head_dim, const bfloat* query, int num_rows, float* scores,
                          ptrdiff_t score_stride) {
  const ptrdiff_t bytes = score_stride * static_cast<ptrdiff_t>(sizeof(float));
  for (int row = 0; row < num_rows; row += kTileRows) {
    const bfloat* q = query + static_cast<ptrdiff_t>(row) * head_dim;
    float* out = scores + row * score_stride;
    int b = 0;
    for (; b + 4 <= num_blocks; b += 4) score_blocks<4>(blocks + b, head_dim, q, out + b * kBlockPositions, bytes);
    if (num_blocks - b == 3) score_blocks<3>(blocks + b, head_dim, q, out + b * kBlockPositions, bytes);
    if (num_blocks - b == 2) score_blocks<2>(blocks + b, head_dim, q, out + b * kBlockPositions, bytes);
    if (num_blocks - b == 1) score_blocks<1>(blocks + b, head_dim, q, out + b * kBlockPositions, bytes);
  }
}

// One block's keys, head after head, each with `rows_of_head` query rows of its own, 16 at most.
void score_heads_of_block(const Strip& block, int num_heads, int head_dim, const bfloat* query, int rows_of_head, float* scores,
                          ptrdiff_t score_stride, Ahead& ahead) {
  const ptrdiff_t bytes = score_stride * static_cast<ptrdiff_t>(sizeof(float));
  const char* keys = block.keys;
  for (int head = 0; head < num_heads; ++head) {
    const bfloat* q = query + static_cast<ptrdiff_t>(head) * rows_of_head * head_dim;
    float* out = scores + head * rows_of_head * score_stride;
    const auto multiply = [&](auto zero, auto product, auto store_sums) {
      zero();
      for (int d = 0; d < head_dim; d += 32, keys += 1024) {
        ahead.fetch();
        OCTAVO_LOAD_TILE(4, q + d, head_dim * 2);
        OCTAVO_LOAD_TILE(6, keys, 64);
        product();
      }
      store_sums();
    };
    // Two sums in turn: one is stored while the next grows.
    if (head % 2 == 0) {
      multiply([] { _tile_zero(0); }, [] { _tile_dpbf16ps(0, 4, 6); }, [&] { OCTAVO_STORE_TILE(0, out, bytes); });
    } else {
      multiply([] { _tile_zero(1); }, [] { _tile_dpbf16ps(1, 4, 6); }, [&] { OCTAVO_STORE_TILE(1, out, bytes); });
    }
  }
}

// D times 16 columns of weighted values.
template <int D>
void value_blocks(const char* const* values, int num_blocks, ptrdiff_t value_bytes, ptrdiff_t column, const bfloat* weights,
                  ptrdiff_t weight_bytes, float* total, ptrdiff_t total_bytes) {
  OCTAVO_LOAD_TILE(0, total, total_bytes);
  if (D > 1) OCTAVO_LOAD_TILE(1, total + 16, total_bytes);
  if (D > 2) OCTAVO_LOAD_TILE(2, total + 32, total_bytes);
  if (D > 3) OCTAVO_LOAD_TILE(3, total + 48, total_bytes);
  for (int b = 0; b < num_blocks; ++b) {
    const char* from = values[b] + column;
    OCTAVO_LOAD_TILE(5, weights + b * kBlockPositions, weight_bytes);
    OCTAVO_LOAD_TILE(7, from, value_bytes);
    _tile_dpbf16ps(0, 5, 7);
    if (D > 1) {
      OCTAVO_LOAD_TILE(7, from + 64, value_bytes);
      _tile_dpbf16ps(1, 5, 7);
    }
    if (D > 2) {
      OCTAVO_LOAD_TILE(7, from + 128, value_bytes);
      _tile_dpbf16ps(2, 5, 7);
    }
    if (D > 3) {
      OCTAVO_LOAD_TILE(7, from + 192, value_bytes);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  OCTAVO_STORE_TILE(0, total, total_bytes);
  if (D > 1) OCTAVO_STORE_TILE(1, total + 16, total_bytes);
  if (D > 2) OCTAVO_STORE_TILE(2, total + 32, total_bytes);
  if (D > 3) OCTAVO_STORE_TILE(3, total + 48, total_bytes);
}

// total[r][d] += sum over blocks b and positions i of weights[r][16 b + i] * values[b][i][d]; rows as above.
void value_rows_of_blocks(const char* const* values, int num_blocks, int value_stride, const bfloat* weights,
                          ptrdiff_t weight_stride, int num_rows, float* total, ptrdiff_t total_stride) {
  const ptrdiff_t value_bytes = static_cast<ptrdiff_t>(value_stride) * 4;
  const ptrdiff_t weight_bytes = weight_stride * 2, total_bytes = total_stride * 4;
  for (int row = 0; row < num_rows; row += kTileRows) {
    const bfloat* w = weights + row * weight_stride;
    float* out = total + row * total_stride;
    int d = 0;
    for (; d + 64 <= value_stride; d += 64) {
      value_blocks<4>(values, num_blocks, value_bytes, d * 4, w, weight_bytes, out + d, total_bytes);
    }
    for (; d < value_stride; d += 16) {
      value_blocks<1>(values, num_blocks, value_bytes, d * 4, w, weight_bytes, out + d, total_bytes);
    }
  }
}

// 2^x within 2^-13 of itself, an eighth of what bfloat16 rounds by; 0 from -126 down, without ever computing a number so
// small that the processor needs a hundred cycles for it. A NaN stays a NaN.
inline __m512 exp2_roughly(__m512 x) {
  const __mmask16 is_normal = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_NLE_UQ);
  x = _mm512_max_ps(_mm512_set1_ps(-126.0f), x);
  const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 r = _mm512_sub_ps(x, n);
  __m512 p = _mm512_fmadd_ps(r, _mm512_set1_ps(5.5171669e-2f), _mm512_set1_ps(2.4261115e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.9326973e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.99992834f));
  return _mm512_maskz_scalef_ps(is_normal, p, n);
}

// V vectors of a row's scores, from the tile's lane `lane` on, to weights; the row's state follows. Weights are rounded to
// bfloat16, and their sum is taken of what they are then.
template <bool is_whole, int V>
inline void soften_lanes(const float* scores, bfloat* weights, const Sight& sight, int lane, float soft_cap, float* state,
                         int value_stride) {
  constexpr float kLog2OfE = 1.44269504f;
  float& largest = state[value_stride];
  float& total = state[value_stride + 1];
  vfloat s[V];
  vfloat best = set1(largest);
  for (int v = 0; v < V; ++v) {
    s[v] = load(scores + v * kLanes);
    if (soft_cap != 0.0f) {
      const vfloat e = exp(mul(s[v], set1(2.0f / soft_cap)));
      s[v] = mul(set1(soft_cap), sub(set1(1.0f), div(set1(2.0f), add(e, set1(1.0f)))));
    }
    if (!is_whole) {
      const __m512i position = _mm512_add_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                                                _mm512_set1_epi32(lane + v * kLanes));
      const vmask is_seen = both(_mm512_cmpge_epi32_mask(position, _mm512_set1_epi32(sight.first)),
                                 _mm512_cmplt_epi32_mask(position, _mm512_set1_epi32(sight.end)));
      s[v] = select(is_seen, s[v], set1(kMinusInfinity));
    }
    best = max(s[v], best);
  }
  const float new_largest = max_lane(best);
  const float base = new_largest == kMinusInfinity ? 0.0f : new_largest;
  const vfloat minus = set1(base * kLog2OfE);
  vfloat sum = zero();
  for (int v = 0; v < V; ++v) {
    const __m256bh rounded = _mm512_cvtneps_pbh(exp2_roughly(_mm512_fmsub_ps(s[v], set1(kLog2OfE), minus)));
    const __m256i bits = reinterpret_cast<const __m256i&>(rounded);
    _mm256_store_si256(reinterpret_cast<__m256i*>(weights + v * kLanes), bits);
    sum = add(sum, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16)));
  }
  if (__builtin_expect(new_largest != largest, false)) {
    const vfloat shrink = set1(exp_one(largest - base));
    for (int d = 0; d < value_stride; d += kLanes) store(state + d, mul(load(state + d), shrink));
    float lanes[kLanes];
    store(lanes, mul(set1(total), shrink));
    total = lanes[0];
    largest = new_largest;
  }
  total += sum_lanes(sum);
}

template <int V>
void soften_rows(const float* scores, bfloat* weights, int stride, const Sight* sights, int num_rows, int lane, float soft_cap,
                 float* state, int state_floats, int value_stride) {
  const bool is_capped = soft_cap != 0.0f;
  for (int r = 0; r < num_rows; ++r, scores += stride, weights += stride, state += state_floats) {
    const bool is_whole = sights[r].first <= lane && sights[r].end >= lane + V * kLanes;
    if (is_whole && !is_capped) {
      soften_lanes<true, V>(scores, weights, sights[r], lane, 0.0f, state, value_stride);
    } else {
      soften_lanes<false, V>(scores, weights, sights[r], lane, soft_cap, state, value_stride);
    }
  }
}

// A block's values with zeros at the positions outside of [begin, end): a weight of 0 does not hide a NaN.
void cut_values(const char* values, int begin, int end, const KvCache& cache, char* out) {
  const size_t pair_bytes = static_cast<size_t>(cache.value_stride) * 4;
  for (int i = 0; i < cache.block_size; i += 2) {
    const uint32_t mask = (i >= begin && i < end ? 0x0000ffffu : 0u) | (i + 1 >= begin && i + 1 < end ? 0xffff0000u : 0u);
    for (size_t at = 0; at < pair_bytes; at += 64) {
      const __m512i pairs = _mm512_loadu_si512(values + i / 2 * pair_bytes + at);
      _mm512_store_si512(out + i / 2 * pair_bytes + at, _mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(mask))));
    }
  }
}

// attend_split for tiles. Of a task with several key heads (no more than 16 query rows each) query rows go head by head, and
// the cache is read in the order of its addresses: a block's heads lie side by side.
void attend_split_tiled(const AttentionCall& call, const AttentionTask& task, const Shape& shape, const Memory& memory,
                        int split, const AttentionTask* next, float* state) {
  const KvCache& cache = *call.cache;
  const int rows_of_head = (task.row_end - task.row_begin) * shape.group, num_heads = task.num_kv_heads;
  const int num_rows = rows_of_head * num_heads;
  const bool is_small = rows_of_head <= kTileRows;  // bound by memory, not by arithmetic
  for (int r = 0; r < num_rows; ++r) clear_state(state + r * shape.state_floats, cache.value_stride);

  const Range range(call, task, shape, split);
  for (int tile = range.begin; tile < range.end; tile += shape.tile_positions) {
    const int low = max_int(range.first_seen - tile, 0);
    const int high = min_int(range.end - tile, shape.tile_positions);
    const int first_block = low / kBlockPositions, end_block = (high - 1) / kBlockPositions + 1;
    const int num_blocks = end_block - first_block, lane = first_block * kBlockPositions;
    locate_strips<bfloat>(call, task, tile + lane, num_blocks, memory.strips);
    const AttentionTask* then = tile + shape.tile_positions < range.end ? &task : next;
    int num_ahead = 0;
    if (then != nullptr) {
      const int from = then == &task ? tile + shape.tile_positions : Range(call, *then, shape, then->split).begin;
      const int upto = min_int(Range(call, *then, shape, then == &task ? split : then->split).end, from + shape.tile_positions);
      num_ahead = (upto - from + 15) / 16;
      locate_strips<bfloat>(call, *then, from, num_ahead, memory.ahead);
    }
    Ahead ahead;
    if (is_small) {
      for (int block = 0; block < num_ahead; ++block) {
        ahead.streams[ahead.num_streams++] = memory.ahead[block].keys;
        ahead.streams[ahead.num_streams++] = memory.ahead[block].values;
      }
      ahead.num_lines = static_cast<int>(cache.key_head_bytes() * num_heads / 64);
      const int num_calls = num_blocks * num_heads * (cache.head_dim / 32 + 1) + num_rows;
      ahead.at_once = (ahead.num_lines * ahead.num_streams + num_calls - 1) / num_calls;
    }
    float* const scores = memory.scores + lane;
    if (!is_small) {
      score_rows_of_blocks(memory.strips, num_blocks, cache.head_dim, memory.short_query, num_rows, scores, shape.tile_lanes);
    } else {
      for (int block = 0; block < num_blocks; ++block) {
        score_heads_of_block(memory.strips[block], num_heads, cache.head_dim, memory.short_query, rows_of_head,
                             scores + block * kBlockPositions, shape.tile_lanes, ahead);
      }
    }
    Sight* const sights = memory.sights;
    for (int head = 0, r = 0; head < num_heads; ++head) {
      for (int position = range.first_position - tile, row = task.row_begin; row < task.row_end; ++row, ++position) {
        const Sight sight{call.window > 0 ? position - call.window + 1 : 0, min_int(position + 1, high)};
        for (int i = 0; i < shape.group; ++i) sights[r++] = sight;
      }
    }
    const auto soften = [&](auto rows) {
      if (!is_small) {
        rows(memory.scores + lane, memory.weights + lane, shape.tile_lanes, sights, num_rows, lane, call.soft_cap, state,
             shape.state_floats, cache.value_stride);
        return;
      }
      for (int r = 0; r < num_rows; ++r) {
        ahead.fetch();
        rows(memory.scores + lane + r * shape.tile_lanes, memory.weights + lane + r * shape.tile_lanes, shape.tile_lanes,
             sights + r, 1, lane, call.soft_cap, state + r * shape.state_floats, shape.state_floats, cache.value_stride);
      }
    };
    switch (num_blocks) {
      case 1: soften(soften_rows<1>); break;
      case 2: soften(soften_rows<2>); break;
      case 3: soften(soften_rows<3>); break;
      default: soften(soften_rows<4>); break;
    }
    const char** values = reinterpret_cast<const char**>(memory.value_rows);
    for (int block = 0; block < num_blocks; ++block) {
      values[block] = memory.strips[block].values;
      const int start = (first_block + block) * kBlockPositions;
      if (start < low || start + kBlockPositions > high) {
        char* edge = memory.edges + (start < low ? 0 : cache.value_head_bytes() * num_heads);
        for (int head = 0; head < num_heads; ++head) {
          const size_t at = head * cache.value_head_bytes();
          cut_values(values[block] + at, low - start, high - start, cache, edge + at);
        }
        values[block] = edge;
      }
    }
    const bfloat* const weights = memory.weights + lane;
    if (!is_small) {
      value_rows_of_blocks(values, num_blocks, cache.value_stride, weights, shape.tile_lanes, num_rows, state, shape.state_floats);
    } else {
      for (int block = 0; block < num_blocks; ++block) {
        for (int head = 0; head < num_heads; ++head) {
          ahead.fetch();
          const char* const of_head = values[block] + head * cache.value_head_bytes();
          const int row = head * rows_of_head;
          value_rows_of_blocks(&of_head, 1, cache.value_stride, weights + row * shape.tile_lanes + block * kBlockPositions,
                               shape.tile_lanes, rows_of_head, state + row * shape.state_floats, shape.state_floats);
        }
      }
    }
  }
}

// The queries of a task, rounded.
void round_queries(const AttentionTask& task, const Shape& shape, const Memory& memory, int head_dim) {
  const int num_rows = (task.row_end - task.row_begin) * shape.group * task.num_kv_heads;
  for (int r = 0; r < num_rows; ++r) {
    const float* from = memory.query + r * shape.query_floats;
    bfloat* to = memory.short_query + static_cast<ptrdiff_t>(r) * head_dim;
    for (int d = 0; d < head_dim; d += 32) {
      const __m512bh pair = _mm512_cvtne2ps_pbh(load(from + d + 16), load(from + d));
      _mm512_store_si512(to + d, reinterpret_cast<const __m512i&>(pair));
    }
  }
}

}  // namespace
}  // namespace OCTAVO_ISA
}  // namespace octavo
