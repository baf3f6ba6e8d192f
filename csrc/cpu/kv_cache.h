// One layer's keys and values for every block of the pool.
#pragma once

#include <cstddef>
#include <cstdint>

namespace octavo {

enum class KvType { float32, float16, bfloat16, int8 };

// keys:    [num_blocks][num_kv_heads] of [head_dim][key_stride] items; a block's positions lie side by side, so that a
//          vector of scores needs no sum across lanes. key_stride is block_size rounded up to 16.
// values:  [num_blocks][num_kv_heads] of [block_size][value_stride] items; value_stride is head_dim rounded up to 16, the
//          rest zero.
// bfloat16 lies in pairs, as tiles of AMX want the second factor of a product: keys as [head_dim / 2][key_stride][2 dims], values
// as [block_size / 2][value_stride][2 positions], the halves rounded up.
// Items of int8 are codes, -127 to 127, and [key_stride] float scales follow a block's and head's items, keys as values:
// one a position, x = scale * code, where x is a value, or a key after hadamard.h. Whatever copies a block's bytes copies
// its scales too.
// The memory is mapped, not touched: a page costs nothing before its block is written.
struct KvCache {
  static constexpr int kMaxCodedHeadDim = 1024;  // where items are codes: a key is transformed on the stack

  int num_blocks;
  int block_size;
  int num_kv_heads;
  int head_dim;
  int key_stride;
  int value_stride;
  KvType type;
  char* keys = nullptr;
  char* values = nullptr;

  KvCache(int num_blocks, int block_size, int num_kv_heads, int head_dim, KvType type);
  ~KvCache();
  KvCache(const KvCache&) = delete;
  KvCache& operator=(const KvCache&) = delete;

  bool is_allocated() const { return keys != nullptr && values != nullptr; }
  bool has_scales() const { return type == KvType::int8; }
  bool has_pairs() const { return type == KvType::bfloat16; }
  // Of the Hadamard transform: the largest power of two that divides head_dim; 1 for none.
  int hadamard_size() const { return has_scales() ? head_dim & -head_dim : 1; }
  size_t item_size() const { return type == KvType::float32 ? 4 : type == KvType::int8 ? 1 : 2; }
  size_t scale_bytes() const { return has_scales() ? sizeof(float) * key_stride : 0; }
  size_t key_items_bytes() const { return static_cast<size_t>(whole_pairs(head_dim)) * key_stride * item_size(); }
  size_t value_items_bytes() const { return static_cast<size_t>(whole_pairs(block_size)) * value_stride * item_size(); }
  int whole_pairs(int count) const { return has_pairs() ? (count + 1) / 2 * 2 : count; }
  // One block and head, its scales included.
  size_t key_head_bytes() const { return key_items_bytes() + scale_bytes(); }
  size_t value_head_bytes() const { return value_items_bytes() + scale_bytes(); }
  size_t key_block_bytes() const { return key_head_bytes() * num_kv_heads; }
  size_t value_block_bytes() const { return value_head_bytes() * num_kv_heads; }
  size_t num_bytes() const { return (key_block_bytes() + value_block_bytes()) * num_blocks; }
  void copy_block(int source, int destination);
};

}  // namespace octavo
