#include "kv_cache.h"

#include <cstring>

#include <sys/mman.h>

namespace octavo {
namespace {

constexpr int kAlign = 16;  // items: a vector of the widest kind

int round_up(int x) { return (x + kAlign - 1) / kAlign * kAlign; }

char* map_memory(size_t num_bytes) {
  int flags = MAP_PRIVATE | MAP_ANONYMOUS;
#ifdef MAP_NORESERVE
  flags |= MAP_NORESERVE;
#endif
  void* memory = mmap(nullptr, num_bytes > 0 ? num_bytes : 1, PROT_READ | PROT_WRITE, flags, -1, 0);
  return memory == MAP_FAILED ? nullptr : static_cast<char*>(memory);
}

}  // namespace

KvCache::KvCache(int num_blocks, int block_size, int num_kv_heads, int head_dim, KvType type)
    : num_blocks(num_blocks),
      block_size(block_size),
      num_kv_heads(num_kv_heads),
      head_dim(head_dim),
      key_stride(round_up(block_size)),
      value_stride(round_up(head_dim)),
      type(type) {
  keys = map_memory(key_block_bytes() * num_blocks);
  values = map_memory(value_block_bytes() * num_blocks);
}

KvCache::~KvCache() {
  if (keys != nullptr) munmap(keys, key_block_bytes() * num_blocks + (num_blocks == 0));
  if (values != nullptr) munmap(values, value_block_bytes() * num_blocks + (num_blocks == 0));
}

void KvCache::copy_block(int source, int destination) {
  if (source == destination) return;
  std::memcpy(keys + key_block_bytes() * destination, keys + key_block_bytes() * source, key_block_bytes());
  std::memcpy(values + value_block_bytes() * destination, values + value_block_bytes() * source, value_block_bytes());
}

}  // namespace octavo
