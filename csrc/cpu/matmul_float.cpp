// x [M, K] times float32, float16 or bfloat16 weights. Lanes are output channels and every output is one chain of
// multiply-adds over k = 0, 1, 2, ..., whatever the tile: the bits do not depend on the number of rows.
// Compiled once an instruction set.
#include "kernels.h"
#include "simd.h"

namespace octavo {
namespace OCTAVO_ISA {
namespace {

constexpr int kVectorsPerPanel = kPanelWidth / kLanes;
constexpr int kMaxRows = kLanes == 16 ? 8 : 6;        // of a register tile
constexpr int kMaxPanels = kLanes == 16 ? 2 : 1;

// Rows [row, row + R) and P panels from `panel`.
template <class T, int R, int P>
void tile(const MatmulTask& task, int row, int panel) {
  constexpr int V = P * kVectorsPerPanel;
  const PackedMatrix& matrix = *task.matrix;
  const int num_columns = matrix.num_columns;
  const size_t panel_items = static_cast<size_t>(num_columns) * kPanelWidth;
  const T* const weights = matrix.values.as<T>() + panel * panel_items;
  const float* const x = task.x + row * task.x_stride;
  vfloat total[R][V];
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) total[r][v] = zero();
  }
  for (int k = 0; k < num_columns; ++k) {
    vfloat w[V];
    for (int v = 0; v < V; ++v) {
      w[v] = load(weights + (v / kVectorsPerPanel) * panel_items + static_cast<size_t>(k) * kPanelWidth +
                  (v % kVectorsPerPanel) * kLanes);
    }
    for (int r = 0; r < R; ++r) {
      const vfloat xk = set1(x[r * task.x_stride + k]);
      for (int v = 0; v < V; ++v) total[r][v] = fma(w[v], xk, total[r][v]);
    }
  }
  for (int v = 0; v < V; ++v) {
    const int channel = panel * kPanelWidth + v * kLanes;
    const int count = min_int(kLanes, matrix.num_rows - channel);
    if (count <= 0) break;
    const vfloat bias = task.bias == nullptr ? zero() : load_first(task.bias + channel, count);
    for (int r = 0; r < R; ++r) {
      vfloat result = task.bias == nullptr ? total[r][v] : add(total[r][v], bias);
      float* out = task.out + (row + r) * task.out_stride + channel;
      if (task.is_added) result = add(load_first(out, count), result);
      if (count == kLanes) {
        store(out, result);
      } else {
        store_first(out, result, count);
      }
    }
  }
}

template <class T, int P>
void rows_of_panels(const MatmulTask& task, int panel) {
  int row = task.row_begin;
  for (; row + kMaxRows <= task.row_end; row += kMaxRows) tile<T, kMaxRows, P>(task, row, panel);
  switch (task.row_end - row) {
    case 7: tile<T, 7, P>(task, row, panel); break;
    case 6: tile<T, 6, P>(task, row, panel); break;
    case 5: tile<T, 5, P>(task, row, panel); break;
    case 4: tile<T, 4, P>(task, row, panel); break;
    case 3: tile<T, 3, P>(task, row, panel); break;
    case 2: tile<T, 2, P>(task, row, panel); break;
    case 1: tile<T, 1, P>(task, row, panel); break;
    default: break;
  }
}

template <class T>
void matmul(const MatmulTask& task) {
  int panel = task.panel_begin;
  for (; panel + kMaxPanels <= task.panel_end; panel += kMaxPanels) rows_of_panels<T, kMaxPanels>(task, panel);
  for (; panel < task.panel_end; ++panel) rows_of_panels<T, 1>(task, panel);
}

}  // namespace

void matmul_float(const MatmulTask& task) {
  switch (task.matrix->kind) {
    case WeightKind::float16: matmul<half>(task); break;
    case WeightKind::bfloat16: matmul<bfloat>(task); break;
    default: matmul<float>(task); break;
  }
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
