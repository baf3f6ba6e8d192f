// A weight applied to rows of activations: quantize once, cut into tasks, run.
#pragma once

#include "isa.h"

namespace octavo {

// out [M, N] = x [M, K] times weight^T, plus bias [N] unless nullptr. Returns false when there is no memory.
bool linear(Workers& workers, const Kernels& kernels, const float* x, ptrdiff_t x_stride, int num_rows,
            const Weight& weight, const float* bias, float* out);

}  // namespace octavo
