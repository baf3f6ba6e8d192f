// Half a layer in one call: norm, projections, what lies between them, and the result added to the residual. Its ops are
// those of the single calls, in their order, so its bits are theirs; what is saved is passes over memory and calls.
#pragma once

#include "isa.h"
#include "lora.h"

namespace octavo {

// Everything a pointer of which is nullptr is left out.
struct AttentionSublayer {
  const float* norm;  // [H]
  float eps;
  const Weight* qkv;  // [(num_heads + 2 * num_kv_heads) * head_dim, H]
  const float* qkv_bias;
  const float* query_norm;  // [head_dim]
  const float* key_norm;
  const float* cos_sin;  // [max_positions, rotary_dim]
  int rotary_dim;
  int num_heads, num_kv_heads, head_dim;
  float scale;
  int window;      // 0: none
  float soft_cap;  // 0: none
  const Weight* output;  // [H, num_heads * head_dim]
  const float* output_bias;
  const float* output_norm;  // [H], of what is added to the residual
};

struct MlpSublayer {
  const float* norm;
  float eps;
  const Weight* gate_up;  // [2 * I, H]
  const float* gate_up_bias;
  bool is_gelu;
  const Weight* down;  // [H, I]
  const float* down_bias;
  const float* output_norm;
};

// Where the rows of a step belong; the indexes have been checked.
struct StepRows {
  int num_rows, num_seqs;
  const int32_t* positions;
  const int32_t* query_start;
  const int32_t* context_lens;
  const int32_t* block_tables;  // [num_seqs, max_blocks]
  int max_blocks;
  const int64_t* slots;
};

// What the step's adapters add to a sublayer's two projections.
struct SublayerLora {
  LoraCall first;   // qkv or gate_up
  LoraCall second;  // output or down
};

// residual [num_rows, H] contiguous, changed. lora: nullptr when no row has an adapter; what it adds to the second
// projection is added to the residual after the projection's own result, or to that before its norm where there is one.
// Both return false when there is no memory: the residual is then useless.
bool run_attention_sublayer(Workers& workers, const Kernels& kernels, const AttentionSublayer& sublayer,
                            const StepRows& rows, KvCache& cache, float* residual,
                            const SublayerLora* lora = nullptr);
bool run_mlp_sublayer(Workers& workers, const Kernels& kernels, const MlpSublayer& sublayer, float* residual,
                      int num_rows, const SublayerLora* lora = nullptr);

// out [num_rows, N] = the weight applied to the norms of rows [indexes] of x. Returns false when there is no memory.
bool run_logits(Workers& workers, const Kernels& kernels, const float* x, ptrdiff_t x_stride, const int32_t* indexes,
                int num_rows, const float* norm, float eps, const Weight& weight, float* out);

}  // namespace octavo
