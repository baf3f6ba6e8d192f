// A weight applied to rows of activations: quantize once, cut into tasks, run.
#pragma once

#include "isa.h"

namespace octavo {

// Rows of activations as weights read them: float weights x, quantized ones `quantized`.
struct LinearInput {
  const float* x;  // [num_rows, num_columns], rows `x_stride` apart
  ptrdiff_t x_stride;
  int num_rows, num_columns;
  QuantizedRows quantized;
};

// Whether any of its matrices is quantized, and so are the activations it is applied to.
bool reads_codes(const Weight& weight);

// Where quantized rows lie in `quantized_bytes` of memory that starts at a multiple of 64.
size_t quantized_bytes(int num_rows, int num_columns);
QuantizedRows place_quantized(void* memory, int num_rows, int num_columns);

// input.quantized from input.x
void quantize(Workers& workers, const Kernels& kernels, const LinearInput& input);

// out [M, N], rows `out_stride` apart, = (is_added: +=) the input times weight^T, plus bias [N] unless nullptr.
void multiply(Workers& workers, const Kernels& kernels, const LinearInput& input, const Weight& weight,
              const float* bias, float* out, ptrdiff_t out_stride, bool is_added);

// Whether `multiply_gated` may take their place: the kernels can, and both weights are quantized all through.
bool can_gate(const Kernels& kernels, const Weight& gate_up, const Weight& next);

// gated.quantized = activation(gate) * up of the input times gate_up^T; gated.x is left alone.
void multiply_gated(Workers& workers, const Kernels& kernels, const LinearInput& input, const Weight& gate_up,
                    bool is_gelu, const LinearInput& gated);

// Both: out [M, N] = x [M, K] times weight^T, plus bias [N] unless nullptr. Returns false when there is no memory.
bool linear(Workers& workers, const Kernels& kernels, const float* x, ptrdiff_t x_stride, int num_rows,
            const Weight& weight, const float* bias, float* out);

}  // namespace octavo
