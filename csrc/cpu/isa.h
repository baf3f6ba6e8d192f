// The dispatch table: every kernel that has one variant an instruction set, and what the kernels are given.
//
// A kernel works on a range of rows, panels or tasks and knows nothing of threads; `linear`, `attention` and the
// bindings cut the work and hand the pieces to the pool.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kv_cache.h"
#include "packed_weight.h"

namespace octavo {

// Activations in 8 bits, a scale and a middle for each row and group of 32: x is about middle + scale * code. The middle
// is halfway between the group's smallest and largest: many groups have one outlier, and codes around zero would leave
// the side opposite to it unused.
struct QuantizedRows {
  int8_t* codes;    // [M, K], -127 to 127
  float* scale;     // [M, K / 32]
  float* middle;    // [M, K / 32]; NaN where the group holds a NaN or an infinity
  float* sum;       // [M, K / 32], the group's x as quantized, summed: scale * (sum of codes) + 32 * middle
  int32_t* offset;  // [M, K / 32], -128 * (sum of the group's codes): takes the 128 back that q8 codes were raised by
  bfloat* values;   // in place of all of these where the arithmetic is bfloat16 (amx), [ceil(M / 16), K / 32, 16, 32]
};

// Where activation(gate) * up goes, as the values that the next weight reads: the matrix has the gates' channels, then as
// many of the ups, and panels are those of the gates.
struct GatedResult {
  bfloat* values;  // [ceil(M / 16), width / 32, 16, 32]
  int width;       // N / 2, a multiple of 32
  bool is_gelu;
};

// out[m, n] for rows [row_begin, row_end) and panels [panel_begin, panel_end) of one matrix.
struct MatmulTask {
  const float* x;  // [M, K], rows `x_stride` apart; float weights
  ptrdiff_t x_stride;
  QuantizedRows quantized;  // quantized weights
  const PackedMatrix* matrix;
  const float* bias;  // [N] or nullptr
  float* out;         // [M, N], rows `out_stride` apart
  ptrdiff_t out_stride;
  bool is_added;  // to what `out` holds: a residual
  const GatedResult* gated;  // in place of out and bias, where Kernels::can_gate; else nullptr
  int row_begin, row_end;
  int panel_begin, panel_end;
};

struct NormTask {
  const float* x;  // [rows, width], rows `x_stride` apart
  ptrdiff_t x_stride;
  float* residual;  // [rows, width] contiguous, x is added to it and it is normed; or nullptr
  const float* weight;
  float eps;
  float* out;  // [rows, width] contiguous; nullptr only adds
  int width;
};

struct RotaryTask {
  float* x;  // [rows, num_heads, head_dim], rows `row_stride` apart
  ptrdiff_t row_stride;
  int num_heads, head_dim;
  const int32_t* positions;
  const float* cos_sin;  // [max_positions, rotary_dim]
  int rotary_dim;
};

struct GatedTask {
  const float* gate_up;  // [rows, 2 * width]
  ptrdiff_t row_stride;
  float* out;  // [rows, width]
  int width;
};

struct WriteKvTask {
  const float* key;  // [rows, num_kv_heads, head_dim]
  ptrdiff_t key_stride;
  const float* value;
  ptrdiff_t value_stride;
  const int64_t* slots;
  KvCache* cache;
};

constexpr int kMaxLoraRank = 512;  // as octavo.ops.interface.MAX_LORA_RANK

// What an adapter adds to outputs [first_output, first_output + num_outputs) of a weight: scale * up(down(x)).
struct LoraPart {
  int first_output, num_outputs, rank;
  float scale;
  const void* down;  // [rank][num_inputs, with zeros up to a multiple of 16]
  const void* up;    // [panels of 16 outputs][rank][16], zeros beyond num_outputs
};

// Rows that have the same adapter.
struct LoraTask {
  const float* x;  // [rows of the step from first_row on, num_inputs]
  ptrdiff_t x_stride;
  float* out;  // [the same rows, num_outputs], added to
  ptrdiff_t out_stride;
  const int32_t* rows;
  int num_rows, first_row;
  WeightKind kind;  // of the matrices: float32, float16 or bfloat16
  int num_inputs;
  const LoraPart* parts;
  int num_parts;
};

// Attention of one step over one layer's cache.
struct AttentionCall {
  const float* query;  // [T, num_heads, head_dim], rows `query_stride` apart
  ptrdiff_t query_stride;
  float* out;  // [T, num_heads, head_dim] contiguous
  int num_heads;
  const KvCache* cache;
  const int32_t* query_start;
  const int32_t* context_lens;
  const int32_t* block_tables;  // [num_seqs, max_blocks]
  int max_blocks;
  float scale;
  int window;      // 0: none
  float soft_cap;  // 0: none
  float* partials;  // of the tasks that compute one split each
};

// Rows [row_begin, row_end) of one sequence and the query heads of one key head, or of all of them where
// AttentionSizes::rows_of_all_heads lets it. With split >= 0 only that part of the
// context, its result left in partials; else the whole context, its result written to out.
struct AttentionTask {
  int sequence, kv_head;
  int row_begin, row_end;
  int split;
  size_t partial;  // where in partials: of this split, or for `merge` of split 0, the others following
  int num_splits;
  int num_kv_heads;  // from kv_head on: 1 or all
};

// The context is cut into splits at absolute positions, always, and their results are merged in order: whether they
// were computed by one thread or by many leaves the bits alone.
struct AttentionSizes {
  int positions_per_split;
  size_t partial_floats;  // of one query row and head
  size_t scratch_bytes;   // a worker's
  int rows_per_task;
  int rows_of_all_heads;  // a task may take all key heads of so few rows; 0: never
};

struct SampleCall {
  float* logits;  // [R, vocab_size], rows `logits_stride` apart; changed
  ptrdiff_t logits_stride;
  int vocab_size;
  const float *temperature, *top_p, *min_p;
  const int32_t *top_k, *num_logprobs;
  const double* random;
  // penalties, in compressed rows (octavo.ops.interface.PenaltyRows); num_penalty_rows is 0 without
  int num_penalty_rows;
  const int32_t *penalty_rows, *penalty_start, *penalty_tokens, *penalty_counts;
  const float *presence, *frequency, *repetition;
  int num_banned;
  const int32_t *banned_rows, *banned_tokens;
  int num_allowed;              // rows that have a mask
  const int32_t* allowed_rows;  // [num_allowed]
  const uint32_t* allowed;      // [num_allowed, ceil(vocab_size / 32)], a bit for each token
  int num_bias;
  const int32_t *bias_rows, *bias_tokens;  // [num_bias]
  const float* bias;                       // [num_bias], added to the logits
  // results
  int32_t* token_ids;
  float* logprobs;
  int32_t* top_ids;  // [R, top_width]
  float* top_logprobs;
  int top_width;
};

// Bytes of scratch a worker needs to sample.
inline size_t sample_scratch_bytes(int vocab_size) { return static_cast<size_t>(vocab_size) * 12 + 256; }

struct Kernels {
  const char* name;
  int row_tile;  // rows a quantized matmul handles at a time at best
  bool can_gate;  // its quantized matmuls know GatedResult

  void (*quantize_rows)(const float* x, ptrdiff_t x_stride, int row_begin, int row_end, int num_columns,
                        const QuantizedRows& out);
  void (*matmul_q4)(const MatmulTask& task);
  void (*matmul_q8)(const MatmulTask& task);
  void (*matmul_float)(const MatmulTask& task);
  void (*lora_delta)(const LoraTask& task);
  void (*rms_norm)(const NormTask& task, int row_begin, int row_end);
  void (*rotary)(const RotaryTask& task, int row_begin, int row_end);
  void (*silu_and_mul)(const GatedTask& task, int row_begin, int row_end);
  void (*gelu_and_mul)(const GatedTask& task, int row_begin, int row_end);
  void (*write_kv)(const WriteKvTask& task, int row_begin, int row_end);
  // next: likely the worker's next task, whose memory it may fetch ahead; or nullptr
  AttentionSizes (*attention_sizes)(const AttentionCall& call);
  void (*attend)(const AttentionCall& call, const AttentionTask& task, const AttentionTask* next, void* scratch);
  void (*merge_splits)(const AttentionCall& call, const AttentionTask& task, void* scratch);
  void (*sample_row)(const SampleCall& call, int row, void* scratch);
};

// The variants this build has, best first, ended by nullptr; and whether this machine can run one.
const Kernels* const* compiled_kernels();
bool can_run(const Kernels& kernels);

namespace scalar {
extern const Kernels kKernels;
}
#ifdef OCTAVO_X86
namespace avx2 {
extern const Kernels kKernels;
}
#ifdef OCTAVO_AMX
namespace amx {
extern const Kernels kKernels;
}
#endif
namespace avx512vnni {
extern const Kernels kKernels;
}
#endif
#ifdef OCTAVO_ARM64
namespace neon {
extern const Kernels kKernels;
}
namespace neondot {
extern const Kernels kKernels;
}
#endif

}  // namespace octavo
