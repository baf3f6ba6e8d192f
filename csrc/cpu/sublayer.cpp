#include "sublayer.h"

#include "attention.h"
#include "linear.h"

namespace octavo {
namespace {

// The MLP takes so many rows at a time: enough to make the weights worth reading, few enough for the caches.
constexpr int kMaxMlpRows = 512;
// What is kept of the activations' memory from step to step; what a long prompt needed beyond it is given back.
constexpr size_t kMaxKeptBytes = 8 << 20;

// Memory of one call, cut into arrays that start at multiples of 64 bytes. First without a base, to learn the size.
class Arena {
 public:
  explicit Arena(void* base) : base_(static_cast<char*>(base)) {}
  void* take(size_t num_bytes) {
    char* at = base_ == nullptr ? nullptr : base_ + size_;
    size_ += (num_bytes + 63) / 64 * 64;
    return at;
  }
  float* take_floats(size_t num_rows, size_t num_columns) {
    return static_cast<float*>(take(num_rows * num_columns * sizeof(float)));
  }
  // Contiguous rows for a weight to read, their codes if it wants them.
  LinearInput take_input(int num_rows, const Weight& weight) {
    const int num_columns = weight.num_columns;
    LinearInput input{take_floats(num_rows, num_columns), num_columns, num_rows, num_columns, {}};
    if (reads_codes(weight)) {
      void* codes = take(quantized_bytes(num_rows, num_columns));
      if (codes != nullptr) input.quantized = place_quantized(codes, num_rows, num_columns);
    }
    return input;
  }
  size_t size() const { return size_; }

 private:
  char* base_;
  size_t size_ = 0;
};

float* writable(const LinearInput& input) { return const_cast<float*>(input.x); }

// write(begin, end) fills rows of input.x; they are quantized while they are in the first-level cache.
template <class Write>
void fill_input(Workers& workers, const Kernels& kernels, const LinearInput& input, bool is_quantized,
                const Write& write) {
  run_rows(workers, input.num_rows, rows_worth_a_task(3 * input.num_columns), [&](int begin, int end) {
    for (int row = begin; row < end; ++row) {
      write(row, row + 1);
      if (is_quantized) {
        kernels.quantize_rows(input.x, input.x_stride, row, row + 1, input.num_columns, input.quantized);
      }
    }
  });
}

void norm_into(Workers& workers, const Kernels& kernels, const float* residual, const float* norm, float eps,
               const LinearInput& input, const Weight& weight) {
  const NormTask task{residual, input.num_columns, nullptr, norm, eps, writable(input), input.num_columns};
  fill_input(workers, kernels, input, reads_codes(weight),
             [&](int begin, int end) { kernels.rms_norm(task, begin, end); });
}

// What adapters, if any, add to the product of the input, whose first row is `row_begin` of the step.
void add_adapters(Workers& workers, const Kernels& kernels, const LoraCall* lora, const LinearInput& input, float* out,
                  int width, int row_begin) {
  if (lora == nullptr) return;
  add_lora(workers, kernels, *lora, input.x, input.x_stride, out, width, row_begin, row_begin + input.num_rows);
}

// residual += weight applied to the input, normed first where there is a norm; `product` is only used then.
void add_product(Workers& workers, const Kernels& kernels, const LinearInput& input, const Weight& weight,
                 const float* bias, const float* norm, float eps, float* product, float* residual,
                 const LoraCall* lora, int row_begin) {
  const int width = weight.num_rows;
  if (norm == nullptr) {
    multiply(workers, kernels, input, weight, bias, residual, width, true);
    add_adapters(workers, kernels, lora, input, residual, width, row_begin);
    return;
  }
  multiply(workers, kernels, input, weight, bias, product, width, false);
  add_adapters(workers, kernels, lora, input, product, width, row_begin);
  const NormTask normed{product, width, nullptr, norm, eps, product, width};
  const NormTask added{product, width, residual, nullptr, 0.0f, nullptr, width};
  run_rows(workers, input.num_rows, rows_worth_a_task(2 * width), [&](int begin, int end) {
    for (int row = begin; row < end; ++row) {
      kernels.rms_norm(normed, row, row + 1);
      kernels.rms_norm(added, row, row + 1);
    }
  });
}

struct AttentionMemory {
  LinearInput x;      // the normed residual
  float* qkv;         // [rows][queries | keys | values]
  LinearInput mixed;  // the attention's result
  float* product;
  size_t size;

  AttentionMemory(const AttentionSublayer& sublayer, int num_rows, void* base) {
    Arena arena(base);
    x = arena.take_input(num_rows, *sublayer.qkv);
    qkv = arena.take_floats(num_rows, sublayer.qkv->num_rows);
    mixed = arena.take_input(num_rows, *sublayer.output);
    product = sublayer.output_norm == nullptr ? nullptr : arena.take_floats(num_rows, sublayer.output->num_rows);
    size = arena.size();
  }
};

// Queries and keys normed and rotated in place, keys and values written to the cache: one pass over each row.
void finish_qkv(Workers& workers, const Kernels& kernels, const AttentionSublayer& sublayer, const StepRows& rows,
                KvCache& cache, float* qkv) {
  const int head_dim = sublayer.head_dim;
  const ptrdiff_t stride = sublayer.qkv->num_rows;
  float* const keys = qkv + static_cast<ptrdiff_t>(sublayer.num_heads) * head_dim;
  float* const values = keys + static_cast<ptrdiff_t>(sublayer.num_kv_heads) * head_dim;
  // The heads of queries and keys lie side by side.
  const RotaryTask rotary{qkv, stride, sublayer.num_heads + sublayer.num_kv_heads, head_dim, rows.positions,
                          sublayer.cos_sin, sublayer.rotary_dim};
  const WriteKvTask write{keys, stride, values, stride, rows.slots, &cache};
  const auto norm_heads = [&](float* heads, const float* weight, int num_heads) {
    if (weight == nullptr) return;
    kernels.rms_norm({heads, head_dim, nullptr, weight, sublayer.eps, heads, head_dim}, 0, num_heads);
  };
  run_rows(workers, rows.num_rows, rows_worth_a_task(2 * static_cast<int>(stride)), [&](int begin, int end) {
    for (int row = begin; row < end; ++row) {
      norm_heads(qkv + row * stride, sublayer.query_norm, sublayer.num_heads);
      norm_heads(keys + row * stride, sublayer.key_norm, sublayer.num_kv_heads);
      kernels.rotary(rotary, row, row + 1);
      kernels.write_kv(write, row, row + 1);
    }
  });
}

struct MlpMemory {
  LinearInput x;
  float* gate_up;
  LinearInput gated;
  float* product;
  size_t size;

  MlpMemory(const MlpSublayer& sublayer, int num_rows, void* base) {
    Arena arena(base);
    x = arena.take_input(num_rows, *sublayer.gate_up);
    gate_up = arena.take_floats(num_rows, sublayer.gate_up->num_rows);
    gated = arena.take_input(num_rows, *sublayer.down);
    product = sublayer.output_norm == nullptr ? nullptr : arena.take_floats(num_rows, sublayer.down->num_rows);
    size = arena.size();
  }
};

}  // namespace

bool run_attention_sublayer(Workers& workers, const Kernels& kernels, const AttentionSublayer& sublayer,
                            const StepRows& rows, KvCache& cache, float* residual, const SublayerLora* lora) {
  if (rows.num_rows == 0) return true;
  const Workers::Lock lock(workers.busy);
  void* base = workers.activations.get(AttentionMemory(sublayer, rows.num_rows, nullptr).size);
  if (base == nullptr) return false;
  const AttentionMemory memory(sublayer, rows.num_rows, base);
  const ptrdiff_t stride = sublayer.qkv->num_rows;

  norm_into(workers, kernels, residual, sublayer.norm, sublayer.eps, memory.x, *sublayer.qkv);
  multiply(workers, kernels, memory.x, *sublayer.qkv, sublayer.qkv_bias, memory.qkv, stride, false);
  add_adapters(workers, kernels, lora == nullptr ? nullptr : &lora->first, memory.x, memory.qkv,
               sublayer.qkv->num_rows, 0);
  finish_qkv(workers, kernels, sublayer, rows, cache, memory.qkv);
  AttentionCall call{};
  call.query = memory.qkv;
  call.query_stride = stride;
  call.out = writable(memory.mixed);
  call.num_heads = sublayer.num_heads;
  call.cache = &cache;
  call.query_start = rows.query_start;
  call.context_lens = rows.context_lens;
  call.block_tables = rows.block_tables;
  call.max_blocks = rows.max_blocks;
  call.scale = sublayer.scale;
  call.window = sublayer.window;
  call.soft_cap = sublayer.soft_cap;
  if (!paged_attention(workers, kernels, call, rows.num_seqs)) return false;
  if (reads_codes(*sublayer.output)) quantize(workers, kernels, memory.mixed);
  add_product(workers, kernels, memory.mixed, *sublayer.output, sublayer.output_bias, sublayer.output_norm,
              sublayer.eps, memory.product, residual, lora == nullptr ? nullptr : &lora->second, 0);
  return true;
}

bool run_mlp_sublayer(Workers& workers, const Kernels& kernels, const MlpSublayer& sublayer, float* residual,
                      int num_rows, const SublayerLora* lora) {
  const Workers::Lock lock(workers.busy);
  const int hidden = sublayer.down->num_rows, width = sublayer.down->num_columns;
  const bool is_fused = sublayer.gate_up_bias == nullptr && can_gate(kernels, *sublayer.gate_up, *sublayer.down);
  const auto gate = sublayer.is_gelu ? kernels.gelu_and_mul : kernels.silu_and_mul;
  for (int begin = 0; begin < num_rows; begin += kMaxMlpRows) {
    const int count = num_rows - begin < kMaxMlpRows ? num_rows - begin : kMaxMlpRows;
    void* base = workers.activations.get(MlpMemory(sublayer, count, nullptr).size);
    if (base == nullptr) return false;
    const MlpMemory memory(sublayer, count, base);
    float* const rows = residual + static_cast<ptrdiff_t>(begin) * hidden;
    norm_into(workers, kernels, rows, sublayer.norm, sublayer.eps, memory.x, *sublayer.gate_up);
    const bool has_lora = lora != nullptr && has_rows(*lora->first.rows, begin, begin + count);
    // Adapters need gate, up and their product as floats, which the fused way leaves out; its bits are the same.
    if (is_fused && !has_lora) {
      multiply_gated(workers, kernels, memory.x, *sublayer.gate_up, sublayer.is_gelu, memory.gated);
    } else {
      multiply(workers, kernels, memory.x, *sublayer.gate_up, sublayer.gate_up_bias, memory.gate_up, 2 * width, false);
      add_adapters(workers, kernels, has_lora ? &lora->first : nullptr, memory.x, memory.gate_up, 2 * width, begin);
      const GatedTask gated{memory.gate_up, 2 * width, writable(memory.gated), width};
      fill_input(workers, kernels, memory.gated, reads_codes(*sublayer.down),
                 [&](int row, int end) { gate(gated, row, end); });
    }
    add_product(workers, kernels, memory.gated, *sublayer.down, sublayer.down_bias, sublayer.output_norm, sublayer.eps,
                memory.product, rows, has_lora ? &lora->second : nullptr, begin);
  }
  return true;
}

bool run_logits(Workers& workers, const Kernels& kernels, const float* x, ptrdiff_t x_stride, const int32_t* indexes,
                int num_rows, const float* norm, float eps, const Weight& weight, float* out) {
  if (num_rows == 0) return true;
  const Workers::Lock lock(workers.busy);
  Arena size(nullptr);
  size.take_input(num_rows, weight);
  void* base = workers.activations.get(size.size());
  if (base == nullptr) return false;
  Arena arena(base);
  const LinearInput input = arena.take_input(num_rows, weight);
  const int width = weight.num_columns;
  fill_input(workers, kernels, input, reads_codes(weight), [&](int row, int) {
    const NormTask task{x + indexes[row] * x_stride, x_stride, nullptr, norm, eps,
                        writable(input) + static_cast<ptrdiff_t>(row) * width, width};
    kernels.rms_norm(task, 0, 1);
  });
  multiply(workers, kernels, input, weight, nullptr, out, weight.num_rows, false);
  workers.activations.trim(kMaxKeptBytes);  // a step ends with its logits
  return true;
}

}  // namespace octavo
