// Compiled once an instruction set: fills in its dispatch table.
#include "kernels.h"

#define OCTAVO_STRING(x) #x
#define OCTAVO_NAME(x) OCTAVO_STRING(x)

namespace octavo {
namespace OCTAVO_ISA {

extern const Kernels kKernels;
const Kernels kKernels = {
    OCTAVO_NAME(OCTAVO_ISA), kMatmulRowTile, kMatmulCanGate, quantize_rows, matmul_q4,       matmul_q8, matmul_float,
    lora_delta,              rms_norm,       rotary,         silu_and_mul,  gelu_and_mul,    write_kv,
    attention_sizes,         attend,         merge_splits,   sample_row,
};

}  // namespace OCTAVO_ISA
}  // namespace octavo
