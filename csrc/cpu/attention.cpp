#include "attention.h"

#include <new>
#include <vector>

namespace octavo {
namespace {

struct AttentionJob {
  const Kernels* kernels;
  AttentionCall call;
  std::vector<AttentionTask> tasks;
  std::vector<AttentionTask> merges;
  char* scratch;
  size_t scratch_bytes;  // a worker's
  int num_threads;
};

void attend_one(void* context, int index, int worker) {
  const AttentionJob& job = *static_cast<AttentionJob*>(context);
  // Tasks are claimed from the last down, each thread about every num_threads-th.
  const int next = index - job.num_threads;
  job.kernels->attend(job.call, job.tasks[index], next >= 0 ? &job.tasks[next] : nullptr,
                      job.scratch + worker * job.scratch_bytes);
}

void merge_one(void* context, int index, int worker) {
  const AttentionJob& job = *static_cast<AttentionJob*>(context);
  job.kernels->merge_splits(job.call, job.merges[index], job.scratch + worker * job.scratch_bytes);
}

// Few rows over a long context give few tasks: then each split is a task of its own.
void plan_sequence(AttentionJob& job, const AttentionSizes& sizes, int sequence, bool cut_context, size_t& partials) {
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
    for (int kv_head = 0; kv_head < cache.num_kv_heads; ++kv_head) {
      AttentionTask task{sequence, kv_head, begin, end, -1, 0, num_splits};
      if (!cut_context || num_splits == 1) {
        job.tasks.push_back(task);
        continue;
      }
      task.partial = partials;
      job.merges.push_back(task);
      for (int split = 0; split < num_splits; ++split) {
        task.split = first_split + split;
        task.partial = partials;
        job.tasks.push_back(task);
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
  AttentionJob job{&kernels, call, {}, {}, nullptr, (sizes.scratch_bytes + 4095) / 4096 * 4096 + 64, num_threads};
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
  try {
    // The last tasks are claimed first, and later rows of a prompt see more: the long ones do not come last.
    for (int sequence = 0; sequence < num_seqs; ++sequence) plan_sequence(job, sizes, sequence, cut_context, partials);
  } catch (const std::bad_alloc&) {
    return false;
  }
  job.scratch = static_cast<char*>(workers.worker_scratch.get(job.scratch_bytes * num_threads));
  if (job.scratch == nullptr) return false;
  if (partials > 0) {
    job.call.partials = static_cast<float*>(workers.scratch.get(partials * sizeof(float)));
    if (job.call.partials == nullptr) return false;
  }
  if (cost < 100e3) {
    for (size_t i = 0; i < job.tasks.size(); ++i) attend_one(&job, static_cast<int>(i), 0);
  } else {
    workers.pool.run(static_cast<int>(job.tasks.size()), attend_one, &job);
  }
  for (size_t i = 0; i < job.merges.size(); ++i) merge_one(&job, static_cast<int>(i), 0);
  return true;
}

}  // namespace octavo
