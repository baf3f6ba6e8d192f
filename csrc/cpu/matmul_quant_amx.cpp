// The quantized matmul on AMX: 16 rows by 16 channels by 32 inputs an instruction, in bfloat16 with float sums.
//
// Here weights are widened as they are read, scale and minimum included, so that the sums of a group need no work of
// their own: with codes and 8-bit activations that work takes four times as long as the products themselves. Activations
// are bfloat16, too; both roundings together err a fifth of what 8-bit activations do.
//
// TDPBF16PS treats every row alike, so a row's bits do not depend on the others. It flushes numbers below 2^-126.
#include "activation.h"
#include "amx_tiles.h"
#include "kernels.h"
#include "numbers.h"

#include <immintrin.h>

namespace octavo {
namespace OCTAVO_ISA {
namespace {

constexpr int kTileItems = kTileRows * 32;  // of A and B: 16 times 32 bfloat16
constexpr int kMaxTaskRows = 256;
constexpr int kGroupsAhead = 8;   // of codes, fetched while the processor is busy widening and could not look ahead
constexpr int kChunkGroups = 24;  // of two panels widened: 48 KiB, to stay in the first-level cache

// Tiles 0 to 3 are C: block of rows times 2 plus panel. 4 and 5 are A, a block each; 6 and 7 are B, a panel each.
void configure(int first_rows, int second_rows) {
  TileConfig config;
  config.set(0, first_rows);
  config.set(1, first_rows);
  config.set(4, first_rows);
  if (second_rows > 0) {
    config.set(2, second_rows);
    config.set(3, second_rows);
    config.set(5, second_rows);
  }
  config.set(6, kTileRows);
  config.set(7, kTileRows);
  load_config(config);
}

inline __m512 load_panel(const Buffer& from, bool is_half, size_t at) {
  if (!is_half) return _mm512_load_ps(from.as<float>() + at);
  return _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(from.as<half>() + at)));
}

// bfloat16 is the upper half of a float. Cutting the lower half off shrinks numbers by ln 2 / 256 on average; that is put
// on the scale and the minimum beforehand, which leaves 6 % more error than rounding to nearest, for half the work.
constexpr float kGrown = 1.0f + 0.693147f / 256.0f;

inline void store_pair(bfloat* out, __m512 even, __m512 odd) {
  const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(even), 16);
  const __m512i high_half = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  _mm512_store_si512(out, _mm512_ternarylogic_epi32(_mm512_castps_si512(odd), high_half, low, 0xea));
}

// A code at bits `bit` and up of a lane becomes the float `power` + code, where 2^23 / 2^bit is power.
template <int rotation>
inline __m512 place(__m512i codes, __m512i mask, __m512i power) {
  const __m512i turned = rotation == 0 ? codes : _mm512_rol_epi32(codes, rotation);
  return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(turned, mask, power, 0xea));
}

// 32 inputs of the 16 channels of a panel as a tile of B: row p has inputs 2 p and 2 p + 1 of each channel.
template <bool is_q4>
inline void widen(const PackedMatrix& matrix, int panel, int group, bfloat* out) {
  const size_t at = (static_cast<size_t>(panel) * matrix.num_groups() + group) * kPanelWidth;
  const size_t scale_size = matrix.has_half_scales ? sizeof(half) : sizeof(float);
  const size_t scale_ahead = (at + kGroupsAhead * kPanelWidth) * scale_size;
  __builtin_prefetch(matrix.scale.as<char>() + scale_ahead);
  __builtin_prefetch(matrix.minimum.as<char>() + scale_ahead);
  const __m512 grown = _mm512_set1_ps(kGrown);
  const __m512 scale = _mm512_mul_ps(load_panel(matrix.scale, matrix.has_half_scales, at), grown);
  __m512 minimum = _mm512_setzero_ps();
  if (matrix.minimum.size() > 0) {
    minimum = _mm512_mul_ps(load_panel(matrix.minimum, matrix.has_half_scales, at), grown);
  }
  const __m512i power_11 = _mm512_set1_epi32(0x45000000);
  if (is_q4) {
    const uint8_t* codes = matrix.values.as<uint8_t>() + at * 16;
    for (int j = 0; j < 4; ++j) __builtin_prefetch(codes + kGroupsAhead * 256 + j * 64);
    const __m512i power_7 = _mm512_set1_epi32(0x43000000);
    const __m512i low_mask = _mm512_set1_epi32(15 << 16), high_mask = _mm512_set1_epi32(15 << 12);
    const __m512 low_minimum = _mm512_fmadd_ps(scale, _mm512_set1_ps(-128.0f), minimum);
    const __m512 high_minimum = _mm512_fmadd_ps(scale, _mm512_set1_ps(-2048.0f), minimum);
    for (int j = 0; j < 4; ++j) {
      const __m512i v = _mm512_load_si512(codes + j * 64);
      const auto low = [&](__m512 x) { return _mm512_fmadd_ps(scale, x, low_minimum); };
      const auto high = [&](__m512 x) { return _mm512_fmadd_ps(scale, x, high_minimum); };
      bfloat* pairs = out + j * 64;
      store_pair(pairs, low(place<16>(v, low_mask, power_7)), low(place<8>(v, low_mask, power_7)));
      store_pair(pairs + 32, low(place<0>(v, low_mask, power_7)), low(place<24>(v, low_mask, power_7)));
      store_pair(pairs + 256, high(place<8>(v, high_mask, power_11)), high(place<0>(v, high_mask, power_11)));
      store_pair(pairs + 288, high(place<24>(v, high_mask, power_11)), high(place<16>(v, high_mask, power_11)));
    }
  } else {
    const uint8_t* codes = matrix.values.as<uint8_t>() + at * 32;
    for (int j = 0; j < 8; ++j) __builtin_prefetch(codes + kGroupsAhead * 512 + j * 64);
    const __m512i mask = _mm512_set1_epi32(255 << 12);
    minimum = _mm512_fmadd_ps(scale, _mm512_set1_ps(-2048.0f - 128.0f), minimum);
    for (int j = 0; j < 8; ++j) {
      const __m512i v = _mm512_load_si512(codes + j * 64);
      const auto value = [&](__m512 x) { return _mm512_fmadd_ps(scale, x, minimum); };
      store_pair(out + j * 64, value(place<12>(v, mask, power_11)), value(place<4>(v, mask, power_11)));
      store_pair(out + j * 64 + 32, value(place<28>(v, mask, power_11)), value(place<20>(v, mask, power_11)));
    }
  }
}

// Rows from `row` on to the end of its block of 16, as tiles of A.
inline const bfloat* block_of(const MatmulTask& task, int row) {
  return task.quantized.values + static_cast<size_t>(row / kTileRows) * task.matrix->num_groups() * kTileItems +
         row % kTileRows * 32;
}

// The panels of a tile's sums, [rows][32]: two neighbours, one alone, or a gate's and its up's.
struct Panels {
  int first, second;
};

// sums to out
template <int P>
void finish(const MatmulTask& task, int row_begin, int row_end, const Panels& panels, const float* sums) {
  for (int p = 0; p < P; ++p) {
    const int channel = (p == 0 ? panels.first : panels.second) * kPanelWidth;
    const int left = task.matrix->num_rows - channel;
    const __mmask16 mask = static_cast<__mmask16>(left >= 16 ? 0xffff : (1u << left) - 1);
    const __m512 bias = task.bias == nullptr ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(mask, task.bias + channel);
    for (int row = row_begin; row < row_end; ++row) {
      __m512 result = _mm512_load_ps(sums + (row - row_begin) * 32 + p * 16);
      if (task.bias != nullptr) result = _mm512_add_ps(result, bias);
      float* out = task.out + row * task.out_stride + channel;
      if (task.is_added) result = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, out), result);
      _mm512_mask_storeu_ps(out, mask, result);
    }
  }
}

// Gates in the first half of sums and ups in the second: what comes out of them is the next weight's input at once, and
// the sums never leave the first-level cache.
void finish_gated(const GatedResult& gated, int row_begin, int row_end, const Panels& panels, const float* sums) {
  const int channel = panels.first * kPanelWidth;
  bfloat* const column = gated.values + static_cast<size_t>(channel / 32) * kTileItems + channel % 32;
  const size_t block_items = static_cast<size_t>(gated.width / 32) * kTileItems;
  for (int row = row_begin; row < row_end; ++row, sums += 32) {
    const vfloat gate = _mm512_load_ps(sums), up = _mm512_load_ps(sums + 16);
    const __m256bh values = _mm512_cvtneps_pbh(mul(gated.is_gelu ? gelu_tanh(gate) : silu(gate), up));
    bfloat* to = column + row / kTileRows * block_items + row % kTileRows * 32;
    _mm256_store_si256(reinterpret_cast<__m256i*>(to), reinterpret_cast<const __m256i&>(values));
  }
}

// Rows of R blocks: each group is widened and used at once, and widening the next goes on meanwhile.
template <bool is_q4, int R, int P>
void few_rows(const MatmulTask& task, int row_begin, const Panels& panels, float* sums) {
  alignas(64) bfloat b[2][P][kTileItems];
  const PackedMatrix& matrix = *task.matrix;
  const int num_groups = matrix.num_groups();
  const size_t block_items = static_cast<size_t>(num_groups) * kTileItems;
  const bfloat* a = block_of(task, row_begin);
  _tile_zero(0);
  if (P > 1) _tile_zero(1);
  if (R > 1) _tile_zero(2);
  if (R > 1 && P > 1) _tile_zero(3);
  const auto widen_next = [&](int group) {
    widen<is_q4>(matrix, panels.first, group, b[group & 1][0]);
    if (P > 1) widen<is_q4>(matrix, panels.second, group, b[group & 1][P - 1]);
  };
  widen_next(0);
  for (int group = 0; group < num_groups; ++group, a += kTileItems) {
    if (group + 1 < num_groups) widen_next(group + 1);
    OCTAVO_LOAD_TILE(4, a, 64);
    OCTAVO_LOAD_TILE(6, b[group & 1][0], 64);
    _tile_dpbf16ps(0, 4, 6);
    if (P > 1) {
      OCTAVO_LOAD_TILE(7, b[group & 1][P - 1], 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if (R > 1) {
      OCTAVO_LOAD_TILE(5, a + block_items, 64);
      _tile_dpbf16ps(2, 5, 6);
      if (P > 1) _tile_dpbf16ps(3, 5, 7);
    }
  }
  OCTAVO_STORE_TILE(0, sums, 128);
  if (P > 1) OCTAVO_STORE_TILE(1, sums + 16, 128);
  if (R > 1) OCTAVO_STORE_TILE(2, sums + kTileRows * 32, 128);
  if (R > 1 && P > 1) OCTAVO_STORE_TILE(3, sums + kTileRows * 32 + 16, 128);
}

// Rows of three or four blocks, the last one perhaps short, and one panel: each group is widened and used four times at
// once. Here the tiles of C are 0 to R - 1, 4 is A of a whole block and 5 that of the last.
template <bool is_q4, int R>
void some_rows(const MatmulTask& task, int row_begin, int panel, float* sums) {
  alignas(64) bfloat b[2][kTileItems];
  const PackedMatrix& matrix = *task.matrix;
  const int num_groups = matrix.num_groups();
  const size_t block_items = static_cast<size_t>(num_groups) * kTileItems;
  const bfloat* a = block_of(task, row_begin);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  if (R > 3) _tile_zero(3);
  widen<is_q4>(matrix, panel, 0, b[0]);
  for (int group = 0; group < num_groups; ++group, a += kTileItems) {
    if (group + 1 < num_groups) widen<is_q4>(matrix, panel, group + 1, b[(group + 1) & 1]);
    OCTAVO_LOAD_TILE(6, b[group & 1], 64);
    OCTAVO_LOAD_TILE(4, a, 64);
    _tile_dpbf16ps(0, 4, 6);
    OCTAVO_LOAD_TILE(4, a + block_items, 64);
    _tile_dpbf16ps(1, 4, 6);
    if (R > 3) {
      OCTAVO_LOAD_TILE(4, a + 2 * block_items, 64);
      _tile_dpbf16ps(2, 4, 6);
      OCTAVO_LOAD_TILE(5, a + 3 * block_items, 64);
      _tile_dpbf16ps(3, 5, 6);
    } else {
      OCTAVO_LOAD_TILE(5, a + 2 * block_items, 64);
      _tile_dpbf16ps(2, 5, 6);
    }
  }
  OCTAVO_STORE_TILE(0, sums, 128);
  OCTAVO_STORE_TILE(1, sums + kTileRows * 32, 128);
  OCTAVO_STORE_TILE(2, sums + 2 * kTileRows * 32, 128);
  if (R > 3) OCTAVO_STORE_TILE(3, sums + 3 * kTileRows * 32, 128);
}

void configure_some(int num_rows) {
  TileConfig config;
  const int num_blocks = (num_rows + kTileRows - 1) / kTileRows, last = num_rows - (num_blocks - 1) * kTileRows;
  for (int block = 0; block < num_blocks; ++block) config.set(block, block + 1 < num_blocks ? kTileRows : last);
  config.set(4, kTileRows);
  config.set(5, last);
  config.set(6, kTileRows);
  load_config(config);
}

// One or two blocks of rows from `row` on, over one chunk of groups; sums of earlier chunks are taken up.
template <int R, int P>
inline void multiply_blocks(const bfloat* a, size_t block_items, const bfloat* b, size_t panel_items, int num_groups,
                            bool is_first, float* sums) {
  if (is_first) {
    _tile_zero(0);
    if (P > 1) _tile_zero(1);
    if (R > 1) _tile_zero(2);
    if (R > 1 && P > 1) _tile_zero(3);
  } else {
    OCTAVO_LOAD_TILE(0, sums, 128);
    if (P > 1) OCTAVO_LOAD_TILE(1, sums + 16, 128);
    if (R > 1) OCTAVO_LOAD_TILE(2, sums + kTileRows * 32, 128);
    if (R > 1 && P > 1) OCTAVO_LOAD_TILE(3, sums + kTileRows * 32 + 16, 128);
  }
  for (int group = 0; group < num_groups; ++group, a += kTileItems, b += kTileItems) {
    OCTAVO_LOAD_TILE(4, a, 64);
    OCTAVO_LOAD_TILE(6, b, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (P > 1) {
      OCTAVO_LOAD_TILE(7, b + panel_items, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if (R > 1) {
      OCTAVO_LOAD_TILE(5, a + block_items, 64);
      _tile_dpbf16ps(2, 5, 6);
      if (P > 1) _tile_dpbf16ps(3, 5, 7);
    }
  }
  OCTAVO_STORE_TILE(0, sums, 128);
  if (P > 1) OCTAVO_STORE_TILE(1, sums + 16, 128);
  if (R > 1) OCTAVO_STORE_TILE(2, sums + kTileRows * 32, 128);
  if (R > 1 && P > 1) OCTAVO_STORE_TILE(3, sums + kTileRows * 32 + 16, 128);
}

template <bool is_q4, int P>
void many_rows(const MatmulTask& task, int row_begin, int row_end, const Panels& panels, float* sums) {
  alignas(64) bfloat b[P * kChunkGroups * kTileItems];
  const PackedMatrix& matrix = *task.matrix;
  const int num_groups = matrix.num_groups();
  const size_t block_items = static_cast<size_t>(num_groups) * kTileItems;
  for (int chunk = 0; chunk < num_groups; chunk += kChunkGroups) {
    const int count = num_groups - chunk < kChunkGroups ? num_groups - chunk : kChunkGroups;
    for (int p = 0; p < P; ++p) {
      for (int group = 0; group < count; ++group) {
        const int panel = p == 0 ? panels.first : panels.second;
        widen<is_q4>(matrix, panel, chunk + group, b + (p * kChunkGroups + group) * kTileItems);
      }
    }
    int row = row_begin;
    configure(kTileRows, kTileRows);
    for (; row + 2 * kTileRows <= row_end; row += 2 * kTileRows) {
      multiply_blocks<2, P>(block_of(task, row) + chunk * kTileItems, block_items, b, kChunkGroups * kTileItems, count,
                            chunk == 0, sums + (row - row_begin) * 32);
    }
    const int left = row_end - row;
    if (left == 0) continue;
    configure(left < kTileRows ? left : kTileRows, left > kTileRows ? left - kTileRows : 0);
    const bfloat* a = block_of(task, row) + chunk * kTileItems;
    float* last = sums + (row - row_begin) * 32;
    if (left > kTileRows) {
      multiply_blocks<2, P>(a, block_items, b, kChunkGroups * kTileItems, count, chunk == 0, last);
    } else {
      multiply_blocks<1, P>(a, block_items, b, kChunkGroups * kTileItems, count, chunk == 0, last);
    }
  }
}

// The sums of rows [row_begin, row_end), which begin at a block's start or are of one block, and P panels.
template <bool is_q4, int P>
void multiply(const MatmulTask& task, int row_begin, int row_end, const Panels& panels, float* sums) {
  const int num_rows = row_end - row_begin;
  if (num_rows <= kTileRows) {
    few_rows<is_q4, 1, P>(task, row_begin, panels, sums);
  } else if (num_rows <= 2 * kTileRows) {
    few_rows<is_q4, 2, P>(task, row_begin, panels, sums);
  } else if (num_rows <= 3 * kTileRows) {
    some_rows<is_q4, 3>(task, row_begin, panels.first, sums);
    if (P > 1) some_rows<is_q4, 3>(task, row_begin, panels.second, sums + 16);
  } else if (num_rows <= 4 * kTileRows) {
    some_rows<is_q4, 4>(task, row_begin, panels.first, sums);
    if (P > 1) some_rows<is_q4, 4>(task, row_begin, panels.second, sums + 16);
  } else {
    many_rows<is_q4, P>(task, row_begin, row_end, panels, sums);
  }
}

// What `multiply` needs for so many rows; many_rows does it itself, again and again.
void configure_for(int num_rows) {
  if (num_rows <= kTileRows) {
    configure(num_rows, 0);
  } else if (num_rows <= 2 * kTileRows) {
    configure(kTileRows, num_rows - kTileRows);
  } else if (num_rows <= 4 * kTileRows) {
    configure_some(num_rows);
  }
}

template <bool is_q4>
void matmul(const MatmulTask& task) {
  alignas(64) float sums[kMaxTaskRows * 32];
  const GatedResult* const gated = task.gated;
  for (int row = task.row_begin, end = row; row < task.row_end; row = end) {
    // To the end of the block where only a part of it is wanted; else as many whole blocks as there are.
    const int most = row % kTileRows > 0 ? kTileRows - row % kTileRows : kMaxTaskRows;
    end = row + most < task.row_end ? row + most : task.row_end;
    configure_for(end - row);
    if (gated != nullptr) {
      for (int panel = task.panel_begin; panel < task.panel_end; ++panel) {
        const Panels panels{panel, panel + gated->width / kPanelWidth};
        multiply<is_q4, 2>(task, row, end, panels, sums);
        finish_gated(*gated, row, end, panels, sums);
      }
      continue;
    }
    int panel = task.panel_begin;
    for (; panel + 2 <= task.panel_end; panel += 2) {
      const Panels panels{panel, panel + 1};
      multiply<is_q4, 2>(task, row, end, panels, sums);
      finish<2>(task, row, end, panels, sums);
    }
    if (panel < task.panel_end) {
      const Panels panels{panel, panel};
      multiply<is_q4, 1>(task, row, end, panels, sums);
      finish<1>(task, row, end, panels, sums);
    }
  }
  _tile_release();
}

}  // namespace

const int kMatmulRowTile = 2 * kTileRows;
const bool kMatmulCanGate = true;

// Rows as tiles of A: [blocks of 16 rows][K / 32][16][32].
void quantize_rows(const float* x, ptrdiff_t x_stride, int row_begin, int row_end, int num_columns,
                   const QuantizedRows& out) {
  const int num_groups = num_columns / kGroupSize;
  for (int row = row_begin; row < row_end; ++row) {
    bfloat* to = out.values + static_cast<size_t>(row / kTileRows) * num_groups * kTileItems + row % kTileRows * 32;
    const float* from = x + row * x_stride;
    for (int group = 0; group < num_groups; ++group, to += kTileItems, from += kGroupSize) {
      const __m512bh pair = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + 16), _mm512_loadu_ps(from));
      _mm512_store_si512(to, reinterpret_cast<const __m512i&>(pair));
    }
  }
}

void matmul_q4(const MatmulTask& task) { matmul<true>(task); }
void matmul_q8(const MatmulTask& task) { matmul<false>(task); }

}  // namespace OCTAVO_ISA
}  // namespace octavo
