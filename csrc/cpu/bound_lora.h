// Adapters and the rows that have them as Python objects: checked when they are made.
#pragma once

#include <memory>
#include <vector>

#include "array_view.h"
#include "lora.h"

namespace octavo {

// parts: (first output, kind, down, up, scale) each
std::unique_ptr<LoraWeight> bind_lora(const std::vector<nb::tuple>& parts, int num_outputs, int num_inputs,
                                      int max_rank);

// octavo.ops.interface.LoraRows
class BoundLoraRows {
 public:
  BoundLoraRows(nb::handle rows, nb::handle start);

  const LoraRows& rows() const { return rows_; }
  // Refuses rows beyond a step's.
  void check(int num_rows) const;

 private:
  View rows_view_, start_view_;
  LoraRows rows_{};
  int max_row_ = -1;
};

// One weight or None a group, held.
class BoundLoraWeights {
 public:
  explicit BoundLoraWeights(nb::handle weights);

  // Refuses weights that are not for [num_outputs, num_inputs], or not one a group.
  LoraCall call(const LoraRows& rows, int num_outputs, int num_inputs) const;

 private:
  std::vector<nb::object> objects_;
  std::vector<const LoraWeight*> weights_;
};

void register_lora(nb::module_& module);

}  // namespace octavo
