// Sublayers and the rows of a step as Python objects: checked when they are made, so that a call checks little.
#pragma once

#include <memory>
#include <vector>

#include "array_view.h"
#include "bound_lora.h"
#include "sublayer.h"

namespace octavo {

// The arrays and weights that an object points into, held as long as it lives.
class Holder {
 public:
  Holder() = default;
  Holder(const Holder&) = delete;
  Holder& operator=(const Holder&) = delete;

  // The data of a float32 vector of `size`, nullptr for None.
  const float* hold_vector(nb::handle array, const char* name, int size);
  const View& hold(nb::handle array, const char* name, Type type, int num_axes);
  const Weight* hold_weight(nb::handle weight);

 private:
  std::vector<std::unique_ptr<View>> views_;
  std::vector<nb::object> objects_;
};

// octavo.ops.interface.AttentionBatch, with the positions of its rows.
class BoundStepRows {
 public:
  BoundStepRows(nb::handle positions, nb::handle query_start, nb::handle context_lens, nb::handle block_tables,
                nb::handle slot_mapping);

  const StepRows& rows() const { return rows_; }
  // Refuses what leaves the cache, or the rotary table; what was found good once is not looked at again.
  void check(const KvCache& cache, int window, int max_positions);

 private:
  void check_blocks(const KvCache& cache, int window) const;

  Holder holder_;
  StepRows rows_{};
  int max_position_ = -1;
  int64_t max_slot_ = -1;
  // What was checked last: the layers of a group are all alike.
  int num_blocks_ = -1, block_size_ = -1, window_ = -1;
};

// octavo.ops.interface.SublayerLora without its rows
struct BoundLoraPair {
  BoundLoraWeights first, second;
  BoundLoraPair(nb::handle of_first, nb::handle of_second) : first(of_first), second(of_second) {}
};

class BoundAttention {
 public:
  BoundAttention(nb::handle norm, float eps, nb::handle qkv, nb::handle qkv_bias, nb::handle query_norm,
                 nb::handle key_norm, nb::handle cos_sin, int num_heads, int num_kv_heads, int head_dim, float scale,
                 int window, float soft_cap, nb::handle output, nb::handle output_bias, nb::handle output_norm);

  // lora_rows and lora: nullptr when no row has an adapter; lora: of qkv and output
  void run(Workers& workers, const Kernels& kernels, nb::handle residual, BoundStepRows& rows, KvCache& cache,
           const BoundLoraRows* lora_rows, const BoundLoraPair* lora) const;

 private:
  Holder holder_;
  AttentionSublayer sublayer_{};
  int max_positions_ = 0;
};

class BoundMlp {
 public:
  BoundMlp(nb::handle norm, float eps, nb::handle gate_up, nb::handle gate_up_bias, bool is_gelu, nb::handle down,
           nb::handle down_bias, nb::handle output_norm);

  // lora: of gate_up and down
  void run(Workers& workers, const Kernels& kernels, nb::handle residual, const BoundLoraRows* lora_rows,
           const BoundLoraPair* lora) const;

 private:
  Holder holder_;
  MlpSublayer sublayer_{};
};

void register_sublayers(nb::module_& module);

}  // namespace octavo
