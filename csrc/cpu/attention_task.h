// What the ways to compute attention share: how a task is cut, a worker's memory, where a context's blocks lie, and the state
// of the online softmax. Of one instruction set; paged_attention.cpp says how it all fits together.
#pragma once

#include "isa.h"
#include "simd.h"

namespace octavo {
namespace OCTAVO_ISA {
namespace {

constexpr int kTileLanes = 64;
constexpr int kSplitPositions = 512;
constexpr int kQueryRowsPerTask = 64;
constexpr float kMinusInfinity = -__builtin_inff();

inline float exp_one(float x) {
  float lanes[kLanes];
  store(lanes, exp(set1(x)));
  return lanes[0];
}

struct Shape {
  int blocks_per_tile, tile_lanes, tile_positions, split_positions;
  int group;          // query heads per key head
  int rows_per_task;  // rows, of `group` query rows each
  int max_query_rows;
  int state_floats;   // of one query row: head_dim rounded up, then the largest score and the sum of weights
  int query_floats;
  bool is_tiled;      // AMX multiplies

  explicit Shape(const AttentionCall& call) {
    const KvCache& cache = *call.cache;
    blocks_per_tile = max_int(1, kTileLanes / cache.key_stride);
    tile_lanes = blocks_per_tile * cache.key_stride;
    tile_positions = blocks_per_tile * cache.block_size;
    split_positions = max_int(1, kSplitPositions / tile_positions) * tile_positions;
    group = call.num_heads / cache.num_kv_heads;
    rows_per_task = max_int(1, kQueryRowsPerTask / group);
    max_query_rows = (rows_per_task * group + 15) / 16 * 16;
    state_floats = cache.value_stride + 16;
    query_floats = cache.value_stride;
#ifdef __AMX_BF16__
    is_tiled = cache.has_pairs() && cache.block_size == 16 && cache.head_dim % 32 == 0;
#else
    is_tiled = false;
#endif
  }
};

// 16 lanes of a block: its keys and, since as many bytes of values follow from there, its values; and the scales of both.
struct Strip {
  const char* keys;
  const char* values;
  const float* key_scales;  // where items are codes
  const float* value_scales;
};

// The positions of a tile that a query row sees.
struct Sight {
  int first, end;
};

// One worker's memory, cut into arrays that start at multiples of 64 bytes.
struct Memory {
  float* query;      // [max_query_rows][query_floats], scaled
  float* part;       // [max_query_rows][state_floats]: the split in work
  float* whole;      // the splits so far
  float* scores;     // [max_query_rows][tile_lanes]
  float* positions;  // [tile_lanes], each lane's position in the tile; huge for an empty lane
  float* key_scales;    // [tile_lanes], where items are codes
  float* value_scales;  // likewise
  float* keys;       // [head_dim][tile_lanes], widened
  float* values;     // [tile_lanes][value_stride], widened
  Strip* strips;            // [tile_lanes / 16]
  Strip* ahead;             // likewise, of what comes next
  const void** value_rows;  // [tile_positions]
  int* lanes;               // [tile_positions]
  bfloat* short_query;      // where AMX multiplies: [max_query_rows][head_dim], scaled
  bfloat* weights;          // [max_query_rows][tile_lanes]
  Sight* sights;            // [max_query_rows]
  char* edges;              // the values of the first and the last block where positions of it are hidden from all rows
  size_t size;

  Memory(const AttentionCall& call, const Shape& shape, void* base) {
    size = 0;
    const auto take = [&](size_t bytes) {
      char* at = static_cast<char*>(base) + size;
      size += (bytes + 63) / 64 * 64;
      return at;
    };
    const size_t rows = shape.max_query_rows, tile = shape.tile_lanes;
    query = reinterpret_cast<float*>(take(rows * shape.query_floats * 4));
    part = reinterpret_cast<float*>(take(rows * shape.state_floats * 4));
    whole = reinterpret_cast<float*>(take(rows * shape.state_floats * 4));
    scores = reinterpret_cast<float*>(take(rows * tile * 4));
    positions = reinterpret_cast<float*>(take(tile * 4));
    key_scales = reinterpret_cast<float*>(take(tile * 4));
    value_scales = reinterpret_cast<float*>(take(tile * 4));
    keys = reinterpret_cast<float*>(take(tile * call.cache->head_dim * 4));
    values = reinterpret_cast<float*>(take(tile * call.cache->value_stride * 4));
    strips = reinterpret_cast<Strip*>(take(tile / 16 * sizeof(Strip)));
    ahead = reinterpret_cast<Strip*>(take(tile / 16 * sizeof(Strip)));
    value_rows = reinterpret_cast<const void**>(take(tile * sizeof(void*)));
    lanes = reinterpret_cast<int*>(take(tile * sizeof(int)));
    short_query = reinterpret_cast<bfloat*>(take(shape.is_tiled ? rows * call.cache->head_dim * 2 : 0));
    weights = reinterpret_cast<bfloat*>(take(shape.is_tiled ? rows * tile * 2 : 0));
    sights = reinterpret_cast<Sight*>(take(shape.is_tiled ? rows * sizeof(Sight) : 0));
    edges = take(shape.is_tiled ? 2 * call.cache->value_block_bytes() : 0);
  }
};

void clear_state(float* state, int value_stride) {
  for (int d = 0; d < value_stride; d += kLanes) store(state + d, zero());
  state[value_stride] = kMinusInfinity;
  state[value_stride + 1] = 0.0f;
}

// whole = the softmax over what both have seen. A NaN in `part` is kept.
void merge_state(float* whole, const float* part, int value_stride) {
  if (part[value_stride] == kMinusInfinity && part[value_stride + 1] == 0.0f) return;
  if (whole[value_stride] == kMinusInfinity && whole[value_stride + 1] == 0.0f) {
    for (int i = 0; i < value_stride + 2; ++i) whole[i] = part[i];
    return;
  }
  const float largest = whole[value_stride] > part[value_stride] ? whole[value_stride] : part[value_stride];
  const float base = largest == kMinusInfinity ? 0.0f : largest;
  const float whole_factor = exp_one(whole[value_stride] - base), part_factor = exp_one(part[value_stride] - base);
  const vfloat a = set1(whole_factor), b = set1(part_factor);
  for (int d = 0; d < value_stride; d += kLanes) {
    store(whole + d, fma(load(part + d), b, mul(load(whole + d), a)));
  }
  whole[value_stride] = largest;
  whole[value_stride + 1] = whole[value_stride + 1] * whole_factor + part[value_stride + 1] * part_factor;
}

void write_output(const float* state, int value_stride, int head_dim, float* out) {
  const float inverse = 1.0f / state[value_stride + 1];  // of 0 when all scores were NaN: 0 * inf is a NaN again
  for (int d = 0; d < head_dim; ++d) out[d] = state[d] * inverse;
}

// The positions that a task sees of one split.
struct Range {
  int first_position;  // of the task's first row
  int first_seen;      // of what that row sees
  int begin, end;      // in the split; begin is that of a tile

  Range(const AttentionCall& call, const AttentionTask& task, const Shape& shape, int split) {
    const int num_seq_rows = call.query_start[task.sequence + 1] - call.query_start[task.sequence];
    first_position = call.context_lens[task.sequence] - num_seq_rows + task.row_begin;
    first_seen = call.window > 0 ? max_int(0, first_position - call.window + 1) : 0;
    const int split_begin = max_int(split, first_seen / shape.split_positions) * shape.split_positions;
    begin = max_int(first_seen / shape.tile_positions * shape.tile_positions, split_begin);
    end = min_int(first_position + (task.row_end - task.row_begin), split_begin + shape.split_positions);
  }
};

// Where the strips from a block's first position on lie; beyond the end of what the task may see, the last one's place.
template <class T>
void locate_strips(const AttentionCall& call, const AttentionTask& task, int position, int num_strips, Strip* strips) {
  const KvCache& cache = *call.cache;
  const int32_t* table = call.block_tables + static_cast<ptrdiff_t>(task.sequence) * call.max_blocks;
  const int last_block = (call.context_lens[task.sequence] - 1) / cache.block_size;
  const size_t key_bytes = cache.key_head_bytes(), value_bytes = cache.value_head_bytes();
  for (int strip = 0, offset = 0; strip < num_strips; ++strip) {
    const int block = min_int(position / cache.block_size, last_block);
    const size_t block_head = static_cast<size_t>(table[block]) * cache.num_kv_heads + task.kv_head;
    strips[strip].keys = cache.keys + block_head * key_bytes + offset * (cache.has_pairs() ? 2 : 1) * sizeof(T);
    strips[strip].values = cache.values + block_head * value_bytes;
    if (cache.has_scales()) {
      strips[strip].key_scales =
          reinterpret_cast<const float*>(cache.keys + block_head * key_bytes + cache.key_items_bytes()) + offset;
      strips[strip].value_scales =
          reinterpret_cast<const float*>(strips[strip].values + cache.value_items_bytes()) + offset;
    }
    offset += 16;
    if (offset == cache.key_stride) {
      offset = 0;
      position += cache.block_size;
    }
  }
}

}  // namespace
}  // namespace OCTAVO_ISA
}  // namespace octavo
