#include "bound_sublayers.h"

namespace octavo {

const View& Holder::hold(nb::handle array, const char* name, Type type, int num_axes) {
  views_.emplace_back(new View(array, name, type, num_axes, num_axes));
  return *views_.back();
}

const float* Holder::hold_vector(nb::handle array, const char* name, int size) {
  if (array.is_none()) return nullptr;
  const View& view = hold(array, name, Type::float32, 1);
  view.expect(0, size);
  return view.as<float>();
}

const Weight* Holder::hold_weight(nb::handle weight) {
  objects_.push_back(nb::borrow(weight));
  return &nb::cast<const Weight&>(weight);
}

// --- the rows of a step --------------------------------------------------------------------------------------------

BoundStepRows::BoundStepRows(nb::handle positions, nb::handle query_start, nb::handle context_lens,
                             nb::handle block_tables, nb::handle slot_mapping) {
  const View& where = holder_.hold(positions, "positions", Type::int32, 1);
  const View& starts = holder_.hold(query_start, "query_start", Type::int32, 1);
  const View& lens = holder_.hold(context_lens, "context_lens", Type::int32, 1);
  const View& tables = holder_.hold(block_tables, "block_tables", Type::int32, 2);
  const View& slots = holder_.hold(slot_mapping, "slot_mapping", Type::int64, 1);
  const int num_rows = where.shape(0), num_seqs = lens.shape(0);
  slots.expect(0, num_rows);
  starts.expect(0, num_seqs + 1);
  tables.expect(0, num_seqs);
  rows_ = {num_rows,
           num_seqs,
           where.as<int32_t>(),
           starts.as<int32_t>(),
           lens.as<int32_t>(),
           tables.as<int32_t>(),
           tables.shape(1),
           slots.as<int64_t>()};
  const int32_t* start = rows_.query_start;
  if (start[0] != 0 || start[num_seqs] != num_rows) {
    refuse("query_start runs from %d to %d, the step has %d rows", start[0], start[num_seqs], num_rows);
  }
  for (int s = 0; s < num_seqs; ++s) {
    const int count = start[s + 1] - start[s];
    if (count < 0 || rows_.context_lens[s] < count) {
      refuse("sequence %d has %d rows and a context of %d", s, count, rows_.context_lens[s]);
    }
  }
  for (int row = 0; row < num_rows; ++row) {
    if (rows_.positions[row] < 0) refuse("positions has %d, outside of [0, ...)", rows_.positions[row]);
    if (rows_.slots[row] < -1) refuse("slot_mapping has %lld", static_cast<long long>(rows_.slots[row]));
    if (rows_.positions[row] > max_position_) max_position_ = rows_.positions[row];
    if (rows_.slots[row] > max_slot_) max_slot_ = rows_.slots[row];
  }
}

void BoundStepRows::check(const KvCache& cache, int window, int max_positions) {
  if (max_position_ >= max_positions) {
    refuse("positions has %d, outside of [0, %d)", max_position_, max_positions);
  }
  if (cache.num_blocks == num_blocks_ && cache.block_size == block_size_ && window == window_) return;
  const int64_t num_slots = static_cast<int64_t>(cache.num_blocks) * cache.block_size;
  if (max_slot_ >= num_slots) {
    refuse("slot_mapping has %lld, the cache %lld slots", static_cast<long long>(max_slot_),
           static_cast<long long>(num_slots));
  }
  check_blocks(cache, window);
  num_blocks_ = cache.num_blocks;
  block_size_ = cache.block_size;
  window_ = window;
}

void BoundStepRows::check_blocks(const KvCache& cache, int window) const {
  for (int s = 0; s < rows_.num_seqs; ++s) {
    const int count = rows_.query_start[s + 1] - rows_.query_start[s], context_len = rows_.context_lens[s];
    if (count == 0) continue;
    const int first_row = context_len - count;
    const int first = window > 0 && first_row - window + 1 > 0 ? (first_row - window + 1) / cache.block_size : 0;
    const int end = (context_len - 1) / cache.block_size + 1;
    if (end > rows_.max_blocks) refuse("sequence %d has %d tokens in %d blocks", s, context_len, rows_.max_blocks);
    const int32_t* table = rows_.block_tables + static_cast<ptrdiff_t>(s) * rows_.max_blocks;
    for (int block = first; block < end; ++block) {
      if (table[block] < 0 || table[block] >= cache.num_blocks) {
        refuse("block %d of sequence %d is %d, the cache has %d", block, s, table[block], cache.num_blocks);
      }
    }
  }
}

namespace {

// Checked against the sublayer and the step.
SublayerLora call_lora(const BoundLoraRows& rows, const BoundLoraPair& pair, int num_rows, const Weight& first,
                       const Weight& second) {
  rows.check(num_rows);
  return {pair.first.call(rows.rows(), first.num_rows, first.num_columns),
          pair.second.call(rows.rows(), second.num_rows, second.num_columns)};
}

}  // namespace

// --- attention -----------------------------------------------------------------------------------------------------

BoundAttention::BoundAttention(nb::handle norm, float eps, nb::handle qkv, nb::handle qkv_bias, nb::handle query_norm,
                               nb::handle key_norm, nb::handle cos_sin, int num_heads, int num_kv_heads, int head_dim,
                               float scale, int window, float soft_cap, nb::handle output, nb::handle output_bias,
                               nb::handle output_norm) {
  if (num_heads < 1 || num_kv_heads < 1 || head_dim < 1 || num_heads % num_kv_heads != 0) {
    refuse("an attention of %d heads, %d key heads and %d dimensions cannot be", num_heads, num_kv_heads, head_dim);
  }
  sublayer_.qkv = holder_.hold_weight(qkv);
  sublayer_.output = holder_.hold_weight(output);
  const int hidden = sublayer_.qkv->num_columns, num_outputs = (num_heads + 2 * num_kv_heads) * head_dim;
  if (sublayer_.qkv->num_rows != num_outputs) {
    refuse("qkv has %d outputs, its heads need %d", sublayer_.qkv->num_rows, num_outputs);
  }
  if (sublayer_.output->num_rows != hidden || sublayer_.output->num_columns != num_heads * head_dim) {
    refuse("the output's weight is [%d, %d], expected [%d, %d]", sublayer_.output->num_rows,
           sublayer_.output->num_columns, hidden, num_heads * head_dim);
  }
  const View& table = holder_.hold(cos_sin, "cos_sin", Type::float32, 2);
  max_positions_ = table.shape(0);
  sublayer_.cos_sin = table.as<float>();
  sublayer_.rotary_dim = table.shape(1);
  if (sublayer_.rotary_dim % 2 != 0 || sublayer_.rotary_dim > head_dim) {
    refuse("cos_sin has %d columns, the heads %d dimensions", sublayer_.rotary_dim, head_dim);
  }
  sublayer_.norm = holder_.hold_vector(norm, "norm", hidden);
  if (sublayer_.norm == nullptr) refuse("an attention sublayer needs a norm");
  sublayer_.eps = eps;
  sublayer_.qkv_bias = holder_.hold_vector(qkv_bias, "qkv_bias", num_outputs);
  sublayer_.query_norm = holder_.hold_vector(query_norm, "query_norm", head_dim);
  sublayer_.key_norm = holder_.hold_vector(key_norm, "key_norm", head_dim);
  sublayer_.num_heads = num_heads;
  sublayer_.num_kv_heads = num_kv_heads;
  sublayer_.head_dim = head_dim;
  sublayer_.scale = scale;
  sublayer_.window = window;
  sublayer_.soft_cap = soft_cap;
  sublayer_.output_bias = holder_.hold_vector(output_bias, "output_bias", hidden);
  sublayer_.output_norm = holder_.hold_vector(output_norm, "output_norm", hidden);
}

void BoundAttention::run(Workers& workers, const Kernels& kernels, nb::handle residual, BoundStepRows& rows,
                         KvCache& cache, const BoundLoraRows* lora_rows, const BoundLoraPair* lora) const {
  const View x(residual, "residual", Type::float32, 2, 2, true);
  x.expect(0, rows.rows().num_rows);
  x.expect(1, sublayer_.qkv->num_columns);
  if (cache.num_kv_heads != sublayer_.num_kv_heads || cache.head_dim != sublayer_.head_dim) {
    refuse("the cache has %d heads of %d dimensions, the attention %d of %d", cache.num_kv_heads, cache.head_dim,
           sublayer_.num_kv_heads, sublayer_.head_dim);
  }
  rows.check(cache, sublayer_.window, max_positions_);
  SublayerLora added{};
  if (lora_rows != nullptr && lora != nullptr) {
    added = call_lora(*lora_rows, *lora, rows.rows().num_rows, *sublayer_.qkv, *sublayer_.output);
  }
  bool has_memory;
  {
    nb::gil_scoped_release released;
    has_memory = run_attention_sublayer(workers, kernels, sublayer_, rows.rows(), cache, x.as<float>(),
                                       added.first.rows == nullptr ? nullptr : &added);
  }
  require_memory(has_memory);
}

// --- MLP -----------------------------------------------------------------------------------------------------------

BoundMlp::BoundMlp(nb::handle norm, float eps, nb::handle gate_up, nb::handle gate_up_bias, bool is_gelu,
                   nb::handle down, nb::handle down_bias, nb::handle output_norm) {
  sublayer_.gate_up = holder_.hold_weight(gate_up);
  sublayer_.down = holder_.hold_weight(down);
  const int hidden = sublayer_.gate_up->num_columns;
  if (sublayer_.down->num_rows != hidden || sublayer_.gate_up->num_rows != 2 * sublayer_.down->num_columns) {
    refuse("gate_up is [%d, %d], down [%d, %d]: they do not fit together", sublayer_.gate_up->num_rows, hidden,
           sublayer_.down->num_rows, sublayer_.down->num_columns);
  }
  sublayer_.norm = holder_.hold_vector(norm, "norm", hidden);
  if (sublayer_.norm == nullptr) refuse("an MLP sublayer needs a norm");
  sublayer_.eps = eps;
  sublayer_.gate_up_bias = holder_.hold_vector(gate_up_bias, "gate_up_bias", sublayer_.gate_up->num_rows);
  sublayer_.is_gelu = is_gelu;
  sublayer_.down_bias = holder_.hold_vector(down_bias, "down_bias", hidden);
  sublayer_.output_norm = holder_.hold_vector(output_norm, "output_norm", hidden);
}

void BoundMlp::run(Workers& workers, const Kernels& kernels, nb::handle residual,
                   const BoundLoraRows* lora_rows, const BoundLoraPair* lora) const {
  const View x(residual, "residual", Type::float32, 2, 2, true);
  x.expect(1, sublayer_.gate_up->num_columns);
  SublayerLora added{};
  if (lora_rows != nullptr && lora != nullptr) {
    added = call_lora(*lora_rows, *lora, x.shape(0), *sublayer_.gate_up, *sublayer_.down);
  }
  bool has_memory;
  {
    nb::gil_scoped_release released;
    has_memory = run_mlp_sublayer(workers, kernels, sublayer_, x.as<float>(), x.shape(0),
                                 added.first.rows == nullptr ? nullptr : &added);
  }
  require_memory(has_memory);
}

void register_sublayers(nb::module_& module) {
  nb::class_<BoundLoraPair>(module, "LoraPair").def(nb::init<nb::handle, nb::handle>());
  nb::class_<BoundStepRows>(module, "StepRows")
      .def(nb::init<nb::handle, nb::handle, nb::handle, nb::handle, nb::handle>());
  nb::class_<BoundAttention>(module, "AttentionSublayer")
      .def(nb::init<nb::handle, float, nb::handle, nb::handle, nb::handle, nb::handle, nb::handle, int, int, int, float,
                    int, float, nb::handle, nb::handle, nb::handle>(),
           nb::arg("norm"), nb::arg("eps"), nb::arg("qkv"), nb::arg("qkv_bias").none(), nb::arg("query_norm").none(),
           nb::arg("key_norm").none(), nb::arg("cos_sin"), nb::arg("num_heads"), nb::arg("num_kv_heads"),
           nb::arg("head_dim"), nb::arg("scale"), nb::arg("window"), nb::arg("soft_cap"), nb::arg("output"),
           nb::arg("output_bias").none(), nb::arg("output_norm").none());
  nb::class_<BoundMlp>(module, "MlpSublayer")
      .def(nb::init<nb::handle, float, nb::handle, nb::handle, bool, nb::handle, nb::handle, nb::handle>(),
           nb::arg("norm"), nb::arg("eps"), nb::arg("gate_up"), nb::arg("gate_up_bias").none(), nb::arg("is_gelu"),
           nb::arg("down"), nb::arg("down_bias").none(), nb::arg("output_norm").none());
}

}  // namespace octavo
