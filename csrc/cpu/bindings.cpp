// octavo._cpu: the border between Python and the kernels. Every shape, dtype and index is checked here, before any work,
// and refused with ShapeError; behind it nothing throws.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <new>
#include <string>
#include <vector>

#include "array_view.h"
#include "attention.h"
#include "bound_sublayers.h"
#include "isa.h"
#include "linear.h"

namespace nb = nanobind;

namespace octavo {

PyObject* shape_error = nullptr;

void register_machine_peak(nb::module_& module);  // machine_peak.cpp

namespace {

PyObject* numpy_empty = nullptr;
PyObject* numpy_float32 = nullptr;
PyObject* numpy_int32 = nullptr;

nb::object new_array(std::initializer_list<int> shape, PyObject* dtype) {
  nb::object dims = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(shape.size())));
  Py_ssize_t axis = 0;
  for (int size : shape) PyTuple_SET_ITEM(dims.ptr(), axis++, PyLong_FromLong(size));
  PyObject* args[] = {dims.ptr(), dtype};
  nb::object array = nb::steal(PyObject_Vectorcall(numpy_empty, args, 2, nullptr));
  if (!array.is_valid()) throw nb::python_error();
  return array;
}

nb::object new_float_array(std::initializer_list<int> shape) { return new_array(shape, numpy_float32); }

// `run_rows`, other Python threads running meanwhile where it is worth it.
template <class Function>
void for_rows(Workers& workers, int num_rows, int min_rows, const Function& function) {
  if (num_rows <= 2 * min_rows) {
    function(0, num_rows);
    return;
  }
  nb::gil_scoped_release released;
  run_rows(workers, num_rows, min_rows, function);
}

const char* name_of(WeightKind kind) {
  switch (kind) {
    case WeightKind::q4: return "q4";
    case WeightKind::q8: return "q8";
    case WeightKind::float16: return "float16";
    case WeightKind::bfloat16: return "bfloat16";
    default: return "float32";
  }
}

class Engine {
 public:
  Engine(const std::string& isa, int num_threads)
      : pool_(place_threads(read_nodes("/sys/devices/system", allowed_cpus()), num_threads, current_node())),
        workers_(pool_) {
    for (const Kernels* const* each = compiled_kernels(); *each != nullptr; ++each) {
      if (isa == (*each)->name && can_run(**each)) kernels_ = *each;
    }
    if (kernels_ == nullptr) throw nb::value_error(("no such kernels on this machine: " + isa).c_str());
  }

  std::string isa() const { return kernels_->name; }
  int num_threads() const { return pool_.num_threads(); }
  std::vector<int> thread_nodes() const {
    std::vector<int> ids;
    for (int node : pool_.placement().node_of) ids.push_back(pool_.placement().nodes[node].id);
    return ids;
  }

  // parts: (kind, values, scale or None, minimum or None) each; kind "" keeps what they are
  std::unique_ptr<Weight> pack_weight(const std::vector<nb::tuple>& parts, const std::string& dtype) {
    auto weight = std::make_unique<Weight>();
    std::vector<std::unique_ptr<View>> views;
    std::vector<WeightSource> sources;
    for (const nb::tuple& part : parts) {
      const std::string kind = nb::cast<std::string>(part[0]);
      WeightSource source{WeightKind::float32, 0, nullptr, nullptr, nullptr};
      Type type = Type::float32;
      if (kind == "q4") source.kind = WeightKind::q4, type = Type::uint8;
      if (kind == "q8") source.kind = WeightKind::q8, type = Type::int8;
      if (kind == "float16") source.kind = WeightKind::float16, type = Type::float16;
      if (kind == "bfloat16") source.kind = WeightKind::bfloat16, type = Type::uint16;
      views.emplace_back(new View(part[1], "a weight", type, 2, 2));
      const View& values = *views.back();
      source.num_rows = values.shape(0);
      source.values = values.as<void>();
      if (weight->num_columns == 0) weight->num_columns = values.shape(1);
      values.expect(1, weight->num_columns);
      if (type == Type::uint8 || type == Type::int8) {
        if (weight->num_columns % kGroupSize != 0) refuse("a quantized weight has K = %d, not a multiple of 32", weight->num_columns);
        for (int i = 2; i < 4; ++i) {
          if (part[i].is_none()) continue;
          views.emplace_back(new View(part[i], i == 2 ? "scale" : "minimum", Type::float32, 2, 2));
          views.back()->expect(0, source.num_rows);
          views.back()->expect(1, weight->num_columns / kGroupSize);
          (i == 2 ? source.scale : source.minimum) = views.back()->as<float>();
        }
        if (source.scale == nullptr) refuse("a quantized weight needs a scale");
      }
      weight->num_rows += source.num_rows;
      sources.push_back(source);
    }
    if (weight->num_rows == 0 || weight->num_columns == 0) refuse("a weight is empty");
    bool has_memory = true;
    {
      nb::gil_scoped_release released;
      if (dtype != "auto") {
        const WeightKind kind = dtype == "float16"    ? WeightKind::float16
                                : dtype == "bfloat16" ? WeightKind::bfloat16
                                                      : WeightKind::float32;
        weight->matrices.emplace_back();
        has_memory = pack_as_float(workers_, sources, weight->num_columns, kind, weight->matrices.back());
      } else {
        // Neighbours of one kind become one matrix.
        for (size_t begin = 0; begin < sources.size() && has_memory;) {
          size_t end = begin;
          while (end < sources.size() && sources[end].kind == sources[begin].kind) ++end;
          weight->matrices.emplace_back();
          has_memory = pack_same_kind(workers_, {sources.begin() + begin, sources.begin() + end}, weight->num_columns,
                                      weight->matrices.back());
          begin = end;
        }
      }
      if (has_memory) spread_weight(*weight, pool_.placement());
    }
    require_memory(has_memory);
    return weight;
  }

  nb::object embedding(const Weight& weight, nb::handle token_ids, float scale) {
    const View ids(token_ids, "token_ids", Type::int32, 1, 1);
    const int num_rows = ids.shape(0);
    check_indices(ids.as<int32_t>(), num_rows, weight.num_rows, "token_ids");
    nb::object array = new_float_array({num_rows, weight.num_columns});
    const View out(array, "out", Type::float32, 2, 2, true);
    for_rows(workers_, num_rows, rows_worth_a_task(weight.num_columns), [&](int begin, int end) {
      for (int i = begin; i < end; ++i) {
        int row = ids.as<int32_t>()[i];
        const PackedMatrix* matrix = weight.matrices.data();
        while (row >= matrix->num_rows) row -= (matrix++)->num_rows;
        read_row(*matrix, row, scale, out.as<float>() + static_cast<ptrdiff_t>(i) * weight.num_columns);
      }
    });
    return array;
  }

  nb::object linear(nb::handle x, const Weight& weight, nb::handle bias) {
    const View rows(x, "x", Type::float32, 2, 1);
    rows.expect(1, weight.num_columns);
    const OptionalView added(bias, "bias", Type::float32, 1, 1);
    if (added.view) added.view->expect(0, weight.num_rows);
    const float* bias_data = added.view ? added.view->as<float>() : nullptr;
    nb::object array = new_float_array({rows.shape(0), weight.num_rows});
    const View out(array, "out", Type::float32, 2, 2, true);
    bool has_memory;
    {
      nb::gil_scoped_release released;
      has_memory = octavo::linear(workers_, *kernels_, rows.as<float>(), rows.stride(0), rows.shape(0), weight, bias_data,
                                  out.as<float>());
    }
    require_memory(has_memory);
    return array;
  }

  // x [rows, width]; residual None, or contiguous; weight None only adds
  void rms_norm(nb::handle x, nb::handle residual, nb::handle weight, float eps, nb::handle out) {
    const View rows(x, "x", Type::float32, 2, 1);
    const int width = rows.shape(1);
    NormTask task{rows.as<float>(), rows.stride(0), nullptr, nullptr, eps, nullptr, width};
    std::unique_ptr<View> residual_view, weight_view, out_view;
    if (!residual.is_none()) {
      residual_view.reset(new View(residual, "residual", Type::float32, 2, 2, true));
      residual_view->expect(0, rows.shape(0));
      residual_view->expect(1, width);
      task.residual = residual_view->as<float>();
    }
    if (!weight.is_none()) {
      weight_view.reset(new View(weight, "weight", Type::float32, 1, 1));
      weight_view->expect(0, width);
      task.weight = weight_view->as<float>();
      out_view.reset(new View(out, "out", Type::float32, 2, 2, true));
      out_view->expect(0, rows.shape(0));
      out_view->expect(1, width);
      task.out = out_view->as<float>();
    }
    for_rows(workers_, rows.shape(0), rows_worth_a_task(width),
             [&](int begin, int end) { kernels_->rms_norm(task, begin, end); });
  }

  void rotary(nb::handle query, nb::handle key, nb::handle positions, nb::handle cos_sin) {
    const View q(query, "query", Type::float32, 3, 2, true), k(key, "key", Type::float32, 3, 2, true);
    const View where(positions, "positions", Type::int32, 1, 1), table(cos_sin, "cos_sin", Type::float32, 2, 2);
    const int num_rows = q.shape(0);
    k.expect(0, num_rows);
    where.expect(0, num_rows);
    const int rotary_dim = table.shape(1);
    if (rotary_dim % 2 != 0 || rotary_dim > q.shape(2) || rotary_dim > k.shape(2)) {
      refuse("cos_sin has %d columns, the heads %d and %d dimensions", rotary_dim, q.shape(2), k.shape(2));
    }
    check_indices(where.as<int32_t>(), num_rows, table.shape(0), "positions");
    const auto task = [&](const View& view) {
      return RotaryTask{view.as<float>(),      view.stride(0),     view.shape(1), view.shape(2),
                        where.as<int32_t>(), table.as<float>(), rotary_dim};
    };
    const RotaryTask q_task = task(q), k_task = task(k);
    for_rows(workers_, num_rows, rows_worth_a_task((q.shape(1) + k.shape(1)) * rotary_dim), [&](int begin, int end) {
      kernels_->rotary(q_task, begin, end);
      kernels_->rotary(k_task, begin, end);
    });
  }

  nb::object gated(nb::handle gate_up, bool is_silu) {
    const View rows(gate_up, "gate_up", Type::float32, 2, 1);
    if (rows.shape(1) % 2 != 0) refuse("gate_up has %d columns, an odd number", rows.shape(1));
    const int width = rows.shape(1) / 2;
    nb::object array = new_float_array({rows.shape(0), width});
    const View out(array, "out", Type::float32, 2, 2, true);
    const GatedTask task{rows.as<float>(), rows.stride(0), out.as<float>(), width};
    const auto kernel = is_silu ? kernels_->silu_and_mul : kernels_->gelu_and_mul;
    for_rows(workers_, rows.shape(0), rows_worth_a_task(2 * width), [&](int begin, int end) { kernel(task, begin, end); });
    return array;
  }
  nb::object silu_and_mul(nb::handle gate_up) { return gated(gate_up, true); }
  nb::object gelu_and_mul(nb::handle gate_up) { return gated(gate_up, false); }

  void write_kv(nb::handle key, nb::handle value, KvCache& cache, nb::handle slot_mapping) {
    const View k(key, "key", Type::float32, 3, 2), v(value, "value", Type::float32, 3, 2);
    const View slots(slot_mapping, "slot_mapping", Type::int64, 1, 1);
    const int num_rows = k.shape(0);
    v.expect(0, num_rows);
    slots.expect(0, num_rows);
    for (const View* view : {&k, &v}) {
      view->expect(1, cache.num_kv_heads);
      view->expect(2, cache.head_dim);
    }
    const int64_t num_slots = static_cast<int64_t>(cache.num_blocks) * cache.block_size;
    for (int i = 0; i < num_rows; ++i) {
      const int64_t slot = slots.as<int64_t>()[i];
      if (slot < -1 || slot >= num_slots) {
        refuse("slot_mapping has %lld, the cache %lld slots", static_cast<long long>(slot), static_cast<long long>(num_slots));
      }
    }
    const WriteKvTask task{k.as<float>(), k.stride(0), v.as<float>(), v.stride(0), slots.as<int64_t>(), &cache};
    for_rows(workers_, num_rows, rows_worth_a_task(4 * cache.num_kv_heads * cache.head_dim),
             [&](int begin, int end) { kernels_->write_kv(task, begin, end); });
  }

  nb::object paged_attention(nb::handle query, const KvCache& cache, nb::handle query_start, nb::handle context_lens,
                             nb::handle block_tables, float scale, int window, float soft_cap) {
    const View q(query, "query", Type::float32, 3, 2);
    const View starts(query_start, "query_start", Type::int32, 1, 1), lens(context_lens, "context_lens", Type::int32, 1, 1);
    const View tables(block_tables, "block_tables", Type::int32, 2, 2);
    const int num_seqs = lens.shape(0);
    starts.expect(0, num_seqs + 1);
    tables.expect(0, num_seqs);
    q.expect(2, cache.head_dim);
    if (q.shape(1) == 0 || q.shape(1) % cache.num_kv_heads != 0) {
      refuse("query has %d heads, not a multiple of the cache's %d", q.shape(1), cache.num_kv_heads);
    }
    const int32_t* start = starts.as<int32_t>();
    if (start[0] != 0 || start[num_seqs] != q.shape(0)) {
      refuse("query_start runs from %d to %d, the query has %d rows", start[0], start[num_seqs], q.shape(0));
    }
    for (int s = 0; s < num_seqs; ++s) {
      const int num_rows = start[s + 1] - start[s], context_len = lens.as<int32_t>()[s];
      if (num_rows < 0 || context_len < num_rows) refuse("sequence %d has %d rows and a context of %d", s, num_rows, context_len);
      if (num_rows == 0) continue;
      const int first_row = context_len - num_rows;
      const int first = window > 0 && first_row - window + 1 > 0 ? (first_row - window + 1) / cache.block_size : 0;
      const int end = (context_len - 1) / cache.block_size + 1;
      if (end > tables.shape(1)) refuse("sequence %d has %d tokens in %d blocks", s, context_len, tables.shape(1));
      const int32_t* table = tables.as<int32_t>() + static_cast<ptrdiff_t>(s) * tables.shape(1);
      for (int block = first; block < end; ++block) {
        if (table[block] < 0 || table[block] >= cache.num_blocks) {
          refuse("block %d of sequence %d is %d, the cache has %d", block, s, table[block], cache.num_blocks);
        }
      }
    }
    nb::object array = new_float_array({q.shape(0), q.shape(1), q.shape(2)});
    const View out(array, "out", Type::float32, 3, 3, true);
    AttentionCall call{q.as<float>(), q.stride(0), out.as<float>(), q.shape(1),  &cache, start,   lens.as<int32_t>(),
                       tables.as<int32_t>(), tables.shape(1), scale,  window, soft_cap, nullptr};
    bool has_memory;
    {
      nb::gil_scoped_release released;
      has_memory = octavo::paged_attention(workers_, *kernels_, call, num_seqs);
    }
    require_memory(has_memory);
    return array;
  }

  void lora_delta(nb::handle x, nb::handle out, const BoundLoraRows& rows, const BoundLoraWeights& weights) {
    const View inputs(x, "x", Type::float32, 2, 1), outputs(out, "out", Type::float32, 2, 1, true);
    outputs.expect(0, inputs.shape(0));
    rows.check(inputs.shape(0));
    const LoraCall call = weights.call(rows.rows(), outputs.shape(1), inputs.shape(1));
    nb::gil_scoped_release released;
    add_lora(workers_, *kernels_, call, inputs.as<float>(), inputs.stride(0), outputs.as<float>(), outputs.stride(0), 0,
             inputs.shape(0));
  }

  void attention_sublayer(const BoundAttention& sublayer, nb::handle residual, BoundStepRows& rows, KvCache& cache,
                          const BoundLoraRows* lora_rows, const BoundLoraPair* lora) {
    sublayer.run(workers_, *kernels_, residual, rows, cache, lora_rows, lora);
  }
  void mlp_sublayer(const BoundMlp& sublayer, nb::handle residual, const BoundLoraRows* lora_rows,
                    const BoundLoraPair* lora) {
    sublayer.run(workers_, *kernels_, residual, lora_rows, lora);
  }

  nb::object logits(nb::handle residual, nb::handle rows, nb::handle norm, float eps, const Weight& weight) {
    const View x(residual, "residual", Type::float32, 2, 1), which(rows, "rows", Type::int32, 1, 1);
    const View factors(norm, "norm", Type::float32, 1, 1);
    x.expect(1, weight.num_columns);
    factors.expect(0, weight.num_columns);
    check_indices(which.as<int32_t>(), which.shape(0), x.shape(0), "rows");
    nb::object array = new_float_array({which.shape(0), weight.num_rows});
    const View out(array, "out", Type::float32, 2, 2, true);
    bool has_memory;
    {
      nb::gil_scoped_release released;
      has_memory = run_logits(workers_, *kernels_, x.as<float>(), x.stride(0), which.as<int32_t>(), which.shape(0),
                              factors.as<float>(), eps, weight, out.as<float>());
    }
    require_memory(has_memory);
    return array;
  }

  nb::object take_rows(nb::handle x, nb::handle rows) {
    const View from(x, "x", Type::float32, 2, 1), which(rows, "rows", Type::int32, 1, 1);
    check_indices(which.as<int32_t>(), which.shape(0), from.shape(0), "rows");
    const int width = from.shape(1);
    nb::object array = new_float_array({which.shape(0), width});
    const View out(array, "out", Type::float32, 2, 2, true);
    for (int i = 0; i < which.shape(0); ++i) {
      std::memcpy(out.as<float>() + static_cast<ptrdiff_t>(i) * width,
                  from.as<float>() + which.as<int32_t>()[i] * from.stride(0), sizeof(float) * width);
    }
    return array;
  }

  // penalties: None or 7 arrays in the order of PenaltyRows; banned, allowed: None or 2 arrays; bias: None or 3.
  // Returns the 4 arrays of SampledRows.
  nb::tuple sample(nb::handle logits, nb::handle temperature, nb::handle top_k, nb::handle top_p, nb::handle min_p,
                   nb::handle random, nb::handle num_logprobs, nb::handle penalties, nb::handle banned,
                   nb::handle allowed, nb::handle bias) {
    const View x(logits, "logits", Type::float32, 2, 1, true);
    const int num_rows = x.shape(0), vocab_size = x.shape(1);
    const View a(temperature, "temperature", Type::float32, 1, 1), b(top_k, "top_k", Type::int32, 1, 1);
    const View c(top_p, "top_p", Type::float32, 1, 1), d(min_p, "min_p", Type::float32, 1, 1);
    const View e(random, "random", Type::float64, 1, 1), f(num_logprobs, "num_logprobs", Type::int32, 1, 1);
    for (const View* view : {&a, &b, &c, &d, &e, &f}) view->expect(0, num_rows);
    if (vocab_size == 0) refuse("logits have no columns");
    int width = 0;
    for (int row = 0; row < num_rows; ++row) {
      if (f.as<int32_t>()[row] > width) width = f.as<int32_t>()[row];
    }
    const nb::object token_ids = new_array({num_rows}, numpy_int32), logprobs = new_float_array({num_rows});
    const nb::object top_ids = new_array({num_rows, width}, numpy_int32), top_logprobs = new_float_array({num_rows, width});
    const View ids(token_ids, "token_ids", Type::int32, 1, 1, true), lps(logprobs, "logprobs", Type::float32, 1, 1, true);
    const View best(top_ids, "top_ids", Type::int32, 2, 2, true);
    const View best_lps(top_logprobs, "top_logprobs", Type::float32, 2, 2, true);

    SampleCall call{};
    call.logits = x.as<float>();
    call.logits_stride = x.stride(0);
    call.vocab_size = vocab_size;
    call.temperature = a.as<float>();
    call.top_k = b.as<int32_t>();
    call.top_p = c.as<float>();
    call.min_p = d.as<float>();
    call.random = e.as<double>();
    call.num_logprobs = f.as<int32_t>();
    call.token_ids = ids.as<int32_t>();
    call.logprobs = lps.as<float>();
    call.top_ids = best.as<int32_t>();
    call.top_logprobs = best_lps.as<float>();
    call.top_width = best.shape(1);

    std::vector<std::unique_ptr<View>> views;
    const auto take = [&](const nb::tuple& arrays, int index, const char* name, Type type, int size) -> const View& {
      views.emplace_back(new View(arrays[index], name, type, 1, 1));
      if (size >= 0) views.back()->expect(0, size);
      return *views.back();
    };
    if (!penalties.is_none()) {
      const nb::tuple arrays = nb::cast<nb::tuple>(penalties);
      const View& rows = take(arrays, 0, "penalties.rows", Type::int32, -1);
      const int count = rows.shape(0);
      call.num_penalty_rows = count;
      call.penalty_rows = rows.as<int32_t>();
      check_indices(call.penalty_rows, count, num_rows, "penalties.rows");
      call.penalty_start = take(arrays, 1, "penalties.start", Type::int32, count + 1).as<int32_t>();
      const View& tokens = take(arrays, 2, "penalties.token_ids", Type::int32, -1);
      call.penalty_tokens = tokens.as<int32_t>();
      check_indices(call.penalty_tokens, tokens.shape(0), vocab_size, "penalties.token_ids");
      call.penalty_counts = take(arrays, 3, "penalties.output_counts", Type::int32, tokens.shape(0)).as<int32_t>();
      call.presence = take(arrays, 4, "penalties.presence", Type::float32, count).as<float>();
      call.frequency = take(arrays, 5, "penalties.frequency", Type::float32, count).as<float>();
      call.repetition = take(arrays, 6, "penalties.repetition", Type::float32, count).as<float>();
      for (int i = 0; i <= count; ++i) {
        const int at = call.penalty_start[i], before = i == 0 ? 0 : call.penalty_start[i - 1];
        if (at < before || at > tokens.shape(0)) refuse("penalties.start has %d after %d", at, before);
      }
    }
    if (!banned.is_none()) {
      const nb::tuple arrays = nb::cast<nb::tuple>(banned);
      const View& rows = take(arrays, 0, "banned rows", Type::int32, -1);
      call.num_banned = rows.shape(0);
      call.banned_rows = rows.as<int32_t>();
      call.banned_tokens = take(arrays, 1, "banned token_ids", Type::int32, call.num_banned).as<int32_t>();
      check_indices(call.banned_rows, call.num_banned, num_rows, "banned rows");
      check_indices(call.banned_tokens, call.num_banned, vocab_size, "banned token_ids");
    }
    if (!allowed.is_none()) {
      const nb::tuple arrays = nb::cast<nb::tuple>(allowed);
      const View& rows = take(arrays, 0, "allowed rows", Type::int32, -1);
      call.num_allowed = rows.shape(0);
      call.allowed_rows = rows.as<int32_t>();
      check_indices(call.allowed_rows, call.num_allowed, num_rows, "allowed rows");
      views.emplace_back(new View(arrays[1], "allowed masks", Type::int32, 2, 2));
      views.back()->expect(0, call.num_allowed);
      views.back()->expect(1, (vocab_size + 31) / 32);
      call.allowed = views.back()->as<uint32_t>();
    }
    if (!bias.is_none()) {
      const nb::tuple arrays = nb::cast<nb::tuple>(bias);
      const View& rows = take(arrays, 0, "bias rows", Type::int32, -1);
      call.num_bias = rows.shape(0);
      call.bias_rows = rows.as<int32_t>();
      call.bias_tokens = take(arrays, 1, "bias token_ids", Type::int32, call.num_bias).as<int32_t>();
      call.bias = take(arrays, 2, "bias values", Type::float32, call.num_bias).as<float>();
      check_indices(call.bias_rows, call.num_bias, num_rows, "bias rows");
      check_indices(call.bias_tokens, call.num_bias, vocab_size, "bias token_ids");
    }
    struct Job {
      const Kernels* kernels;
      const SampleCall* call;
      char* scratch;
      size_t scratch_bytes;
    } job{kernels_, &call, nullptr, (sample_scratch_bytes(vocab_size) + 4095) / 4096 * 4096 + 64};
    bool has_memory;
    {
      nb::gil_scoped_release released;
      const Workers::Lock lock(workers_.busy);
      job.scratch = static_cast<char*>(workers_.worker_scratch.get(job.scratch_bytes * pool_.num_threads()));
      has_memory = job.scratch != nullptr;
      if (has_memory) {
        pool_.run(
            num_rows,
            [](void* context, int row, int worker) {
              const Job& some = *static_cast<Job*>(context);
              some.kernels->sample_row(*some.call, row, some.scratch + worker * some.scratch_bytes);
            },
            &job);
      }
    }
    require_memory(has_memory);
    return nb::make_tuple(token_ids, logprobs, top_ids, top_logprobs);
  }

 private:
  ThreadPool pool_;
  Workers workers_;
  const Kernels* kernels_ = nullptr;
};

std::vector<std::string> runnable_isas() {
  std::vector<std::string> names;
  for (const Kernels* const* each = compiled_kernels(); *each != nullptr; ++each) {
    if (can_run(**each)) names.push_back((*each)->name);
  }
  return names;
}

std::string dtype_of(const Weight& weight) {
  for (const PackedMatrix& matrix : weight.matrices) {
    if (matrix.kind != weight.matrices[0].kind) return "mixed";
  }
  return name_of(weight.matrices[0].kind);
}

std::unique_ptr<KvCache> make_cache(int num_blocks, int block_size, int num_kv_heads, int head_dim,
                                    const std::string& dtype) {
  if (num_blocks < 0 || block_size < 1 || num_kv_heads < 1 || head_dim < 1) {
    refuse("a cache of %d blocks of %d tokens with %d heads of %d dimensions cannot be", num_blocks, block_size,
           num_kv_heads, head_dim);
  }
  const bool is_known = dtype == "float32" || dtype == "float16" || dtype == "bfloat16" || dtype == "int8";
  if (!is_known) refuse("a cache cannot be of %s", dtype.c_str());
  if (dtype == "int8" && head_dim > KvCache::kMaxCodedHeadDim) {
    refuse("a cache of int8 has heads of at most %d dimensions, not %d", KvCache::kMaxCodedHeadDim, head_dim);
  }
  const KvType type = dtype == "float32"    ? KvType::float32
                      : dtype == "float16"  ? KvType::float16
                      : dtype == "bfloat16" ? KvType::bfloat16
                                            : KvType::int8;
  auto cache = std::make_unique<KvCache>(num_blocks, block_size, num_kv_heads, head_dim, type);
  require_memory(cache->is_allocated());
  return cache;
}


}  // namespace
}  // namespace octavo

NB_MODULE(_cpu, module) {
  using namespace octavo;
  nb::set_leak_warnings(false);  // an engine may live until the interpreter ends
  shape_error = nb::object(nb::module_::import_("octavo.errors").attr("ShapeError")).release().ptr();
  const nb::module_ numpy = nb::module_::import_("numpy");
  numpy_empty = nb::object(numpy.attr("empty")).release().ptr();
  numpy_float32 = nb::object(numpy.attr("dtype")("float32")).release().ptr();
  numpy_int32 = nb::object(numpy.attr("dtype")("int32")).release().ptr();

  module.def("runnable_isas", &runnable_isas);
  register_machine_peak(module);
  register_lora(module);
  register_sublayers(module);

  nb::class_<Weight>(module, "Weight")
      .def_prop_ro("shape", [](const Weight& weight) { return nb::make_tuple(weight.num_rows, weight.num_columns); })
      .def_prop_ro("num_bytes", &Weight::num_bytes)
      .def_prop_ro("dtype", &dtype_of);

  nb::class_<KvCache>(module, "LayerCache")
      .def_ro("num_blocks", &KvCache::num_blocks)
      .def_ro("block_size", &KvCache::block_size)
      .def_prop_ro("num_bytes", &KvCache::num_bytes)
      .def("copy_blocks", [](KvCache& cache, nb::handle pairs) {
        for (nb::handle pair : pairs) {
          const int source = nb::cast<int>(pair[0]), destination = nb::cast<int>(pair[1]);
          if (source < 0 || source >= cache.num_blocks || destination < 0 || destination >= cache.num_blocks) {
            refuse("cannot copy block %d to %d, the cache has %d", source, destination, cache.num_blocks);
          }
          cache.copy_block(source, destination);
        }
      });
  module.def("make_cache", &make_cache);

  nb::class_<Engine>(module, "Engine")
      .def(nb::init<const std::string&, int>())
      .def_prop_ro("isa", &Engine::isa)
      .def_prop_ro("num_threads", &Engine::num_threads)
      .def_prop_ro("thread_nodes", &Engine::thread_nodes)
      .def("pack_weight", &Engine::pack_weight)
      .def("embedding", &Engine::embedding)
      .def("linear", &Engine::linear, nb::arg("x"), nb::arg("weight"), nb::arg("bias").none())
      .def("rms_norm", &Engine::rms_norm, nb::arg("x"), nb::arg("residual").none(), nb::arg("weight").none(),
           nb::arg("eps"), nb::arg("out").none())
      .def("rotary", &Engine::rotary)
      .def("silu_and_mul", &Engine::silu_and_mul)
      .def("gelu_and_mul", &Engine::gelu_and_mul)
      .def("write_kv", &Engine::write_kv)
      .def("paged_attention", &Engine::paged_attention)
      .def("lora_delta", &Engine::lora_delta)
      .def("attention_sublayer", &Engine::attention_sublayer, nb::arg("sublayer"), nb::arg("residual"), nb::arg("rows"),
           nb::arg("cache"), nb::arg("lora_rows").none() = nb::none(), nb::arg("lora").none() = nb::none())
      .def("mlp_sublayer", &Engine::mlp_sublayer, nb::arg("sublayer"), nb::arg("residual"),
           nb::arg("lora_rows").none() = nb::none(), nb::arg("lora").none() = nb::none())
      .def("logits", &Engine::logits)
      .def("take_rows", &Engine::take_rows)
      .def("sample", &Engine::sample, nb::arg("logits"), nb::arg("temperature"), nb::arg("top_k"), nb::arg("top_p"),
           nb::arg("min_p"), nb::arg("random"), nb::arg("num_logprobs"), nb::arg("penalties").none(),
           nb::arg("banned").none(), nb::arg("allowed").none(), nb::arg("bias").none());
}
