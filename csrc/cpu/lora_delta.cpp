// out += scale * up(down(x)) for the rows of one adapter. A number of down(x) is one chain of multiply-adds a lane over
// the inputs and the sum of the lanes; an output is one chain over the ranks: the bits do not depend on the tile.
// Compiled once an instruction set.
#include "kernels.h"
#include "simd.h"

namespace octavo {
namespace OCTAVO_ISA {
namespace {

constexpr int kMaxRows = 4;   // of a tile
constexpr int kMaxRanks = 4;  // of a tile of down
constexpr int kVectorsPerPanel = kPanelWidth / kLanes;
// Panels of a tile of up: about as many sums as there are registers for.
constexpr int kMaxPanels = kLanes == 16 ? 4 : kLanes == 8 ? 2 : 1;

// The matrices of a weight lie behind each other in the order in which they are read, and mostly come from memory: what
// a tile reads is fetched one tile ahead, into what follows where the tile is the last. Once for each 64 bytes.
template <class T>
inline void fetch(const T* p, int item) {
  constexpr int kItemsPerLine = 64 / static_cast<int>(sizeof(T));
  if (item % kItemsPerLine == 0) __builtin_prefetch(p);
}

// inner[row][rank] for R rows and J ranks.
template <class T, int R, int J>
void down_tile(const LoraTask& task, const float* const* x, const T* down, size_t width, float scale, float* inner,
               int inner_stride) {
  vfloat total[R][J];
  for (int r = 0; r < R; ++r) {
    for (int j = 0; j < J; ++j) total[r][j] = zero();
  }
  const int whole = task.num_inputs / kLanes * kLanes;
  for (int k = 0; k < whole; k += kLanes) {
    vfloat values[R];
    for (int r = 0; r < R; ++r) values[r] = load(x[r] + k);
    for (int j = 0; j < J; ++j) {
      const T* const place = down + j * width + k;
      fetch(place + J * width, k);
      const vfloat w = load(place);
      for (int r = 0; r < R; ++r) total[r][j] = fma(w, values[r], total[r][j]);
    }
  }
  if (whole < task.num_inputs) {  // the matrix is padded with zeros
    for (int j = 0; j < J; ++j) {
      const vfloat w = load(down + j * width + whole);
      for (int r = 0; r < R; ++r) {
        total[r][j] = fma(w, load_first(x[r] + whole, task.num_inputs - whole), total[r][j]);
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int j = 0; j < J; ++j) inner[r * inner_stride + j] = scale * sum_lanes(total[r][j]);
  }
}

// R rows' outputs of P panels.
template <class T, int R, int P>
void up_tile(const LoraPart& part, const T* up, const float* inner, int inner_stride, float* const* out, int panel) {
  constexpr int V = P * kVectorsPerPanel;
  const size_t panel_items = static_cast<size_t>(part.rank) * kPanelWidth;
  const T* const weights = up + panel * panel_items;
  vfloat total[R][V];
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) total[r][v] = zero();
  }
  for (int j = 0; j < part.rank; ++j) {
    vfloat factor[R];
    for (int r = 0; r < R; ++r) factor[r] = set1(inner[r * inner_stride + j]);
    for (int v = 0; v < V; ++v) {
      const T* const place = weights + (v / kVectorsPerPanel) * panel_items + static_cast<size_t>(j) * kPanelWidth +
                             (v % kVectorsPerPanel) * kLanes;
      fetch(place + P * panel_items, j * kPanelWidth + v % kVectorsPerPanel * kLanes);
      const vfloat w = load(place);
      for (int r = 0; r < R; ++r) total[r][v] = fma(w, factor[r], total[r][v]);
    }
  }
  for (int v = 0; v < V; ++v) {
    const int output = panel * kPanelWidth + v * kLanes;
    const int count = min_int(kLanes, part.num_outputs - output);
    if (count <= 0) break;
    for (int r = 0; r < R; ++r) {
      float* const place = out[r] + output;
      if (count == kLanes) {
        store(place, add(load(place), total[r][v]));
      } else {
        store_first(place, add(load_first(place, count), total[r][v]), count);
      }
    }
  }
}

template <class T, int R>
void add_part(const LoraTask& task, const LoraPart& part, const int32_t* rows) {
  const size_t width = (static_cast<size_t>(task.num_inputs) + kPanelWidth - 1) / kPanelWidth * kPanelWidth;
  float inner[R * kMaxLoraRank];
  const float* x[R];
  float* out[R];
  for (int r = 0; r < R; ++r) {
    const ptrdiff_t row = rows[r] - task.first_row;
    x[r] = task.x + row * task.x_stride;
    out[r] = task.out + row * task.out_stride + part.first_output;
  }
  const T* const down = static_cast<const T*>(part.down);
  int rank = 0;
  for (; rank + kMaxRanks <= part.rank; rank += kMaxRanks) {
    down_tile<T, R, kMaxRanks>(task, x, down + rank * width, width, part.scale, inner + rank, part.rank);
  }
  for (; rank < part.rank; ++rank) {
    down_tile<T, R, 1>(task, x, down + rank * width, width, part.scale, inner + rank, part.rank);
  }
  const T* const up = static_cast<const T*>(part.up);
  const int num_panels = (part.num_outputs + kPanelWidth - 1) / kPanelWidth;
  int panel = 0;
  for (; panel + kMaxPanels <= num_panels; panel += kMaxPanels) {
    up_tile<T, R, kMaxPanels>(part, up, inner, part.rank, out, panel);
  }
  for (; panel < num_panels; ++panel) up_tile<T, R, 1>(part, up, inner, part.rank, out, panel);
}

template <class T>
void add_parts(const LoraTask& task) {
  for (int p = 0; p < task.num_parts; ++p) {
    const LoraPart& part = task.parts[p];
    int row = 0;
    for (; row + kMaxRows <= task.num_rows; row += kMaxRows) add_part<T, kMaxRows>(task, part, task.rows + row);
    switch (task.num_rows - row) {
      case 3: add_part<T, 3>(task, part, task.rows + row); break;
      case 2: add_part<T, 2>(task, part, task.rows + row); break;
      case 1: add_part<T, 1>(task, part, task.rows + row); break;
      default: break;
    }
  }
}

}  // namespace

void lora_delta(const LoraTask& task) {
  switch (task.kind) {
    case WeightKind::float16: add_parts<half>(task); break;
    case WeightKind::bfloat16: add_parts<bfloat>(task); break;
    default: add_parts<float>(task); break;
  }
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
