// One layer's keys and values for every block of the pool.
#pragma once

#include <cstddef>
#include <cstdint>

namespace octavo {

// keys:    [num_blocks][num_kv_heads][head_dim][key_stride]; a block's positions lie side by side, so that a vector of
//          scores needs no sum across lanes. key_stride is block_size rounded up to 16.
// values:  [num_blocks][num_kv_heads][block_size][value_stride]; value_stride is head_dim rounded up to 16, the rest zero.
// Items are half or float. The memory is mapped, not touched: a page costs nothing before its block is written.
struct KvCache {
  int num_blocks;
  int block_size;
  int num_kv_heads;
  int head_dim;
  int key_stride;
  int value_stride;
  bool is_half;
  char* keys = nullptr;
  char* values = nullptr;

  KvCache(int num_blocks, int block_size, int num_kv_heads, int head_dim, bool is_half);
  ~KvCache();
  KvCache(const KvCache&) = delete;
  KvCache& operator=(const KvCache&) = delete;

  bool is_allocated() const { return keys != nullptr && values != nullptr; }
  size_t item_size() const { return is_half ? 2 : 4; }
  size_t key_head_items() const { return static_cast<size_t>(head_dim) * key_stride; }
  size_t value_head_items() const { return static_cast<size_t>(block_size) * value_stride; }
  size_t key_block_bytes() const { return key_head_items() * num_kv_heads * item_size(); }
  size_t value_block_bytes() const { return value_head_items() * num_kv_heads * item_size(); }
  size_t num_bytes() const { return (key_block_bytes() + value_block_bytes()) * num_blocks; }
  void copy_block(int source, int destination);
};

}  // namespace octavo
