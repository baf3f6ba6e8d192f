// A weight matrix as the matmul kernels read it: panels of 16 output channels, one after the other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "numbers.h"
#include "threads.h"

namespace octavo {

constexpr int kPanelWidth = 16;  // output channels side by side
constexpr int kGroupSize = 32;   // inputs that share a scale

enum class WeightKind { q4, q8, float32, float16, bfloat16 };

// 64-byte aligned memory, zero, freed with its owner. Large ones are mapped and not touched, so that a page comes to lie
// on the memory node of the thread that fills it.
class Buffer {
 public:
  Buffer() = default;
  ~Buffer();
  Buffer(Buffer&& other) noexcept : data_(other.data_), size_(other.size_), is_mapped_(other.is_mapped_) {
    other.data_ = nullptr;
    other.size_ = 0;
  }
  Buffer& operator=(Buffer&&) = delete;
  Buffer(const Buffer&) = delete;

  bool allocate(size_t num_bytes);  // false when there is no memory
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  size_t size() const { return size_; }

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
  bool is_mapped_ = false;
};

// [N, K] of one kind. Channels beyond N in the last panel are zero.
//
// float32, float16, bfloat16:  values  [num_panels][K][16]
// q8:  codes [num_panels][K / 32][8 quads][16 channels][4 inputs] uint8, the code + 128
// q4:  codes [num_panels][K / 32][4][16 channels][4 inputs] uint8: of the 8 quads of inputs of a group, quad j is the
//      low half of byte row j and quad j + 4 its high half
// scale, minimum:  [num_panels][K / 32][16], half when every one of them is exactly a half, else float
// code_sum:  [num_panels][K / 32][16] int16, the sum of the 32 codes (of q8: before the 128 is added)
//
// A row of 64 bytes (16 channels x 4 inputs) is one operand of a dot-product instruction with 16 lanes, two of AVX2's,
// and a row of an AMX tile.
struct PackedMatrix {
  WeightKind kind;
  int num_rows;     // N
  int num_columns;  // K
  int num_panels;
  bool has_half_scales = false;
  Buffer values;   // or codes
  Buffer scale;    // q4 and q8
  Buffer minimum;  // may be empty: zero
  Buffer code_sum;  // q4 and q8

  int num_groups() const { return num_columns / kGroupSize; }
  size_t num_bytes() const { return values.size() + scale.size() + minimum.size() + code_sum.size(); }
};

// One matrix of a checkpoint, row-major. Exactly one of the pointers of its kind is set.
struct WeightSource {
  WeightKind kind;
  int num_rows;
  const void* values;    // float, half, bfloat [N, K]; or codes: uint8 (q4), int8 (q8)
  const float* scale;    // [N, K / 32]
  const float* minimum;  // [N, K / 32] or nullptr
};

// Packs sources of one kind, their rows one after the other. Returns false when there is no memory.
bool pack_same_kind(Workers& workers, const std::vector<WeightSource>& sources, int num_columns, PackedMatrix& out);

// Packs sources of any kinds as `kind`, one of the three float kinds.
bool pack_as_float(Workers& workers, const std::vector<WeightSource>& sources, int num_columns, WeightKind kind,
                   PackedMatrix& out);

// Writes row `row` times `factor` to out [K], exactly as NumPy would dequantize it.
void read_row(const PackedMatrix& matrix, int row, float factor, float* out);

// A weight as models see it: matrices whose outputs lie side by side.
struct Weight {
  std::vector<PackedMatrix> matrices;
  int num_rows = 0;
  int num_columns = 0;

  Weight() = default;
  Weight(const Weight&) = delete;
  Weight& operator=(const Weight&) = delete;

  size_t num_bytes() const {
    size_t total = 0;
    for (const PackedMatrix& matrix : matrices) total += matrix.num_bytes();
    return total;
  }
};

// On several memory nodes: lets the part of a weight that a node's threads read first lie on that node.
void spread_weight(const Weight& weight, const Placement& placement);

}  // namespace octavo
