// The tiles of AMX: how they are configured, loaded and stored. Of the amx variant only.
#pragma once

#include <cstddef>
#include <cstdint>

#include <immintrin.h>

namespace octavo {
namespace OCTAVO_ISA {
namespace {

// The compiler's own intrinsics do not tell it (g++ 12) that these read or write the memory behind the pointer: it may drop
// or move what we store there.
#define OCTAVO_LOAD_TILE(tile, from, stride) \
  asm volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(from), "r"(static_cast<ptrdiff_t>(stride)) : "memory")
#define OCTAVO_STORE_TILE(tile, to, stride) \
  asm volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(to), "r"(static_cast<ptrdiff_t>(stride)) : "memory")

constexpr int kTileRows = 16;

// Rows and bytes of a row of each tile.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int num_rows, int bytes = 64) {
    row_bytes[tile] = static_cast<uint16_t>(bytes);
    rows[tile] = static_cast<uint8_t>(num_rows);
  }
};

inline void load_config(const TileConfig& config) { asm volatile("ldtilecfg %0" ::"m"(config)); }

}  // namespace
}  // namespace OCTAVO_ISA
}  // namespace octavo
