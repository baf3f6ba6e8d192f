// What LoRA adapters add to the outputs of a weight, for the rows that have one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "isa.h"

namespace octavo {

// What one adapter adds to a weight [num_outputs, num_inputs]. Every matrix starts at a multiple of 64 bytes of `memory`.
struct LoraWeight {
  WeightKind kind;  // float32, float16 or bfloat16
  int num_outputs = 0, num_inputs = 0;
  std::vector<LoraPart> parts;
  Buffer memory;

  size_t num_bytes() const { return memory.size(); }
};

struct LoraSource {
  int first_output, num_outputs, rank;
  const void* down;  // [rank, num_inputs]
  const void* up;    // [num_outputs, rank]
  float scale;
};

// Returns false when there is no memory. weight's kind, num_outputs and num_inputs are set.
bool pack_lora(const std::vector<LoraSource>& sources, LoraWeight& weight);

// The rows of a step that have an adapter: those of group g are rows[start[g]] to rows[start[g + 1] - 1], ascending.
struct LoraRows {
  int num_groups;
  const int32_t* rows;
  const int32_t* start;
};

// What the groups' adapters add to one weight; nullptr: nothing.
struct LoraCall {
  const LoraRows* rows;
  const LoraWeight* const* weights;  // one a group
};

// Whether any row of [row_begin, row_end) has an adapter.
bool has_rows(const LoraRows& rows, int row_begin, int row_end);

// out [rows, N] += what the adapters make of x [rows, K]; x and out begin with row `row_begin` of the step.
void add_lora(Workers& workers, const Kernels& kernels, const LoraCall& call, const float* x, ptrdiff_t x_stride,
              float* out, ptrdiff_t out_stride, int row_begin, int row_end);

}  // namespace octavo
