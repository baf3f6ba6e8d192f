#include "attention.h"

#include <new>
#include <vector>

namespace octavo {
namespace {

// A decoding sequence's key heads lie side by side in each block. One thread takes them all: what its processor fetches
// beyond one head is then the next it reads, and not another thread's.
constexpr int kMaxRowsOfSharedClaim = 4;

struct AttentionJob {
  const Kernels* kernels;
  AttentionCall call;
  std::vector<AttentionTask> tasks;
  std::vector<int> claims;  // the first task of each, and the number of tasks at the end
  std::vector<AttentionTask> merges;
  char* scratch;
  size_t scratch_bytes;  // a worker's
  int num_threads;
};

void attend_claim(void* context, int index, int worker) {
  const AttentionJob& job = *static_cast<AttentionJob*>(context);
  // Claims are taken from the last down, each thread about every num_threads-th.
  const int next_claim = index - job.num_threads;
  const AttentionTask* beyond = next_claim >= 0 ? &job.tasks[job.claims[next_claim]] : nullptr;
  const int end = job.claims[index + 1];
  for (int task = job.claims[index]; task < end; ++task) {
    const AttentionTask* next = task + 1 < end ? &job.tasks[task + 1] : beyond;
    job.kernels->attend(job.call, job.tasks[task], next, job.scratch + worker * job.scratch_bytes);
  }
}

void merge_one(void* context, int index, int worker) {
  const AttentionJob& job = *static_cast<AttentionJob*>(context);
  job.kernels->merge_splits(job.call, job.merges[index], job.scratch + worker * job.scratch_bytes);
}

// Few rows over a long context give few tasks: then each split is a task of its own.
void plan_sequence(AttentionJob& job, const AttentionSizes& sizes, int sequence, bool cut_context, bool share_claims,
                   size_t& partials) {
  const AttentionCall& call = job.call;
  const KvCache& cache = *call.cache;
  const int group = call.num_heads / cache.num_kv_heads;
  const int num_rows = call.query_start[sequence + 1] - call.query_start[sequence];
  const int first_position = call.context_lens[sequence] - num_rows;
  for (int begin = 0; begin < num_rows; begin += sizes.rows_per_task) {
    const int end = begin + sizes.rows_per_task < num_rows ? begin + sizes.rows_per_task : num_rows;
    const int first_row_position = first_position + begin;
    const int first_seen =
        call.window > 0 && first_row_position - call.window + 1 > 0 ? first_row_position - call.window + 1 : 0;
    const int first_split = first_seen / sizes.positions_per_split;
    const int num_splits = (first_position + end - 1) / sizes.positions_per_split + 1 - first_split;
    const bool is_shared = share_claims && !cut_context && end - begin <= kMaxRowsOfSharedClaim;
    const auto add = [&](const AttentionTask& task) {
      if (!is_shared || task.kv_head == 0) job.claims.push_back(static_cast<int>(job.tasks.size()));
      job.tasks.push_back(task);
    };
    const int step = is_shared && end - begin <= sizes.rows_of_all_heads ? cache.num_kv_heads : 1;
    for (int kv_head = 0; kv_head < cache.num_kv_heads; kv_head += step) {
      AttentionTask task{sequence, kv_head, begin, end, -1, 0, num_splits, step};
      if (!cut_context || num_splits == 1) {
        add(task);
        continue;
      }
      task.partial = partials;
      job.merges.push_back(task);
      for (int split = 0; split < num_splits; ++split) {
        task.split = first_split + split;
        task.partial = partials;
        add(task);
        partials += static_cast<size_t>(end - begin) * group * sizes.partial_floats;
      }
    }
  }
}

}  // namespace

bool paged_attention(Workers& workers, const Kernels& kernels, AttentionCall call, int num_seqs) {
  const AttentionSizes sizes = kernels.attention_sizes(call);
  const int num_threads = workers.pool.num_threads();
  const Workers::Lock lock(workers.busy);
  AttentionJob job{&kernels, call, {}, {}, {}, nullptr, (sizes.scratch_bytes + 4095) / 4096 * 4096 + 64, num_threads};
  size_t partials = 0;
  int num_tasks = 0;
  double cost = 0.0;  // products, roughly
  for (int sequence = 0; sequence < num_seqs; ++sequence) {
    const int num_rows = call.query_start[sequence + 1] - call.query_start[sequence];
    num_tasks += (num_rows + sizes.rows_per_task - 1) / sizes.rows_per_task * call.cache->num_kv_heads;
    cost += static_cast<double>(num_rows) * call.context_lens[sequence];
  }
  cost *= 2.0 * call.num_heads * call.cache->head_dim;
  const bool cut_context = num_threads > 1 && num_tasks < 4 * num_threads;
  const bool share_claims = num_tasks >= 4 * num_threads * call.cache->num_kv_heads;
  try {
    // The last tasks are claimed first, and later rows of a prompt see more: the long ones do not come last.
    for (int sequence = 0; sequence < num_seqs; ++sequence) {
      plan_sequence(job, sizes, sequence, cut_context, share_claims, partials);
    }
    job.claims.push_back(static_cast<int>(job.tasks.size()));
  } catch (const std::bad_alloc&) {
    return false;
  }
  const int num_claims = static_cast<int>(job.claims.size()) - 1;
  job.scratch = static_cast<char*>(workers.worker_scratch.get(job.scratch_bytes * num_threads));
  if (job.scratch == nullptr) return false;
  if (partials > 0) {
    job.call.partials = static_cast<float*>(workers.scratch.get(partials * sizeof(float)));
    if (job.call.partials == nullptr) return false;
  }
  if (cost < 100e3) {
    for (int claim = 0; claim < num_claims; ++claim) attend_claim(&job, claim, 0);
  } else {
    workers.pool.run(num_claims, attend_claim, &job);
  }
  for (size_t i = 0; i < job.merges.size(); ++i) merge_one(&job, static_cast<int>(i), 0);
  return true;
}

}  // namespace octavo
