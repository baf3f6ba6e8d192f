// One step's attention: cut into tasks, run, merge.
#pragma once

#include "isa.h"

namespace octavo {

// call.partials is filled in here. Returns false when there is no memory.
bool paged_attention(Workers& workers, const Kernels& kernels, AttentionCall call, int num_seqs);

}  // namespace octavo
