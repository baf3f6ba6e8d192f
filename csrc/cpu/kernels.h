// The kernels of one instruction set (namespace OCTAVO_ISA); what each does is said at its place in isa.h.
#pragma once

#include "isa.h"

namespace octavo {
namespace OCTAVO_ISA {

extern const int kMatmulRowTile;
extern const bool kMatmulCanGate;
void quantize_rows(const float* x, ptrdiff_t x_stride, int row_begin, int row_end, int num_columns,
                   const QuantizedRows& out);
void matmul_q4(const MatmulTask& task);
void matmul_q8(const MatmulTask& task);
void matmul_float(const MatmulTask& task);
void lora_delta(const LoraTask& task);
void rms_norm(const NormTask& task, int row_begin, int row_end);
void rotary(const RotaryTask& task, int row_begin, int row_end);
void silu_and_mul(const GatedTask& task, int row_begin, int row_end);
void gelu_and_mul(const GatedTask& task, int row_begin, int row_end);
void write_kv(const WriteKvTask& task, int row_begin, int row_end);
AttentionSizes attention_sizes(const AttentionCall& call);
void attend(const AttentionCall& call, const AttentionTask& task, const AttentionTask* next, void* scratch);
void merge_splits(const AttentionCall& call, const AttentionTask& task, void* scratch);
void sample_row(const SampleCall& call, int row, void* scratch);

}  // namespace OCTAVO_ISA
}  // namespace octavo
