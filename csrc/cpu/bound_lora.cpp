#include "bound_lora.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <string>

namespace octavo {

std::unique_ptr<LoraWeight> bind_lora(const std::vector<nb::tuple>& parts, int num_outputs, int num_inputs,
                                      int max_rank) {
  auto weight = std::make_unique<LoraWeight>();
  weight->num_outputs = num_outputs;
  weight->num_inputs = num_inputs;
  std::vector<std::unique_ptr<View>> views;
  std::vector<LoraSource> sources;
  if (max_rank > kMaxLoraRank) refuse("adapters of rank %d, the kernels are built for %d", max_rank, kMaxLoraRank);
  if (parts.empty()) refuse("an adapter without matrices");
  for (const nb::tuple& part : parts) {
    const std::string kind = nb::cast<std::string>(part[1]);
    const bool is_half = kind == "float16", is_bfloat = kind == "bfloat16";
    if (!is_half && !is_bfloat && kind != "float32") refuse("an adapter cannot be of %s", kind.c_str());
    const WeightKind weight_kind =
        is_half ? WeightKind::float16 : is_bfloat ? WeightKind::bfloat16 : WeightKind::float32;
    if (sources.empty()) weight->kind = weight_kind;
    if (weight->kind != weight_kind) refuse("the parts of an adapter's weight must be of one kind");
    const Type type = is_half ? Type::float16 : is_bfloat ? Type::uint16 : Type::float32;
    views.emplace_back(new View(part[2], "down", type, 2, 2));
    const View& down = *views.back();
    views.emplace_back(new View(part[3], "up", type, 2, 2));
    const View& up = *views.back();
    const int rank = down.shape(0), first = nb::cast<int>(part[0]);
    down.expect(1, num_inputs);
    up.expect(1, rank);
    if (rank < 1 || rank > max_rank) refuse("an adapter of rank %d, from 1 to %d can be", rank, max_rank);
    if (first < 0 || up.shape(0) < 1 || first > num_outputs - up.shape(0)) {
      refuse("an adapter adds to outputs %d to %d of %d", first, first + up.shape(0) - 1, num_outputs);
    }
    for (const LoraSource& other : sources) {
      if (first < other.first_output + other.num_outputs && other.first_output < first + up.shape(0)) {
        refuse("two parts of an adapter add to output %d", first > other.first_output ? first : other.first_output);
      }
    }
    sources.push_back({first, up.shape(0), rank, down.as<void>(), up.as<void>(), nb::cast<float>(part[4])});
  }
  bool has_memory;
  {
    nb::gil_scoped_release released;
    has_memory = pack_lora(sources, *weight);
  }
  require_memory(has_memory);
  return weight;
}

BoundLoraRows::BoundLoraRows(nb::handle rows, nb::handle start)
    : rows_view_(rows, "rows", Type::int32, 1, 1), start_view_(start, "start", Type::int32, 1, 1) {
  if (start_view_.shape(0) < 1) refuse("start is empty");
  const int num_groups = start_view_.shape(0) - 1, num_rows = rows_view_.shape(0);
  rows_ = {num_groups, rows_view_.as<int32_t>(), start_view_.as<int32_t>()};
  if (rows_.start[0] != 0 || rows_.start[num_groups] != num_rows) {
    refuse("start runs from %d to %d, there are %d rows", rows_.start[0], rows_.start[num_groups], num_rows);
  }
  for (int group = 0; group < num_groups; ++group) {
    if (rows_.start[group + 1] < rows_.start[group]) refuse("start must not fall");
    for (int i = rows_.start[group]; i < rows_.start[group + 1]; ++i) {
      if (rows_.rows[i] < 0 || (i > rows_.start[group] && rows_.rows[i] <= rows_.rows[i - 1])) {
        refuse("the rows of a group must ascend from 0 on, and %d does not", rows_.rows[i]);
      }
      if (rows_.rows[i] > max_row_) max_row_ = rows_.rows[i];
    }
  }
}

void BoundLoraRows::check(int num_rows) const {
  if (max_row_ >= num_rows) refuse("an adapter is for row %d of %d", max_row_, num_rows);
}

BoundLoraWeights::BoundLoraWeights(nb::handle weights) {
  for (nb::handle weight : weights) {
    objects_.push_back(nb::borrow(weight));
    weights_.push_back(weight.is_none() ? nullptr : &nb::cast<const LoraWeight&>(weight));
  }
}

LoraCall BoundLoraWeights::call(const LoraRows& rows, int num_outputs, int num_inputs) const {
  if (static_cast<int>(weights_.size()) != rows.num_groups) {
    refuse("%d adapters for %d groups of rows", static_cast<int>(weights_.size()), rows.num_groups);
  }
  for (const LoraWeight* weight : weights_) {
    if (weight != nullptr && (weight->num_outputs != num_outputs || weight->num_inputs != num_inputs)) {
      refuse("an adapter is for a weight [%d, %d], and not for [%d, %d]", weight->num_outputs, weight->num_inputs,
             num_outputs, num_inputs);
    }
  }
  return {&rows, weights_.data()};
}

void register_lora(nb::module_& module) {
  nb::class_<LoraWeight>(module, "LoraWeight").def_prop_ro("num_bytes", &LoraWeight::num_bytes);
  nb::class_<BoundLoraRows>(module, "LoraRows").def(nb::init<nb::handle, nb::handle>());
  nb::class_<BoundLoraWeights>(module, "LoraWeights").def(nb::init<nb::handle>());
  module.def("pack_lora", &bind_lora);
}

}  // namespace octavo
