#include "lora.h"

#include <algorithm>
#include <cstring>

namespace octavo {
namespace {

size_t item_bytes(WeightKind kind) { return kind == WeightKind::float32 ? 4 : 2; }
size_t round_up(size_t count, size_t multiple) { return (count + multiple - 1) / multiple * multiple; }

// Matrices of [rank, padded inputs] and [panels][rank][16].
size_t down_bytes(const LoraSource& source, const LoraWeight& weight) {
  return source.rank * round_up(weight.num_inputs, kPanelWidth) * item_bytes(weight.kind);
}
size_t up_bytes(const LoraSource& source, const LoraWeight& weight) {
  return source.rank * round_up(source.num_outputs, kPanelWidth) * item_bytes(weight.kind);
}

// Rows of one adapter that a task takes: few enough that all threads have work, enough that the matrices, which come
// from memory for the first of them, are used often.
constexpr int kMinRowsPerTask = 4;
constexpr int kMaxRowsPerTask = 32;
// Below so many multiplications, of which few come without a number from memory, the caller does them all.
constexpr double kMinThreadedProducts = 3e4;

struct Job {
  const Kernels* kernels;
  const LoraCall* call;
  const float* x;
  ptrdiff_t x_stride;
  float* out;
  ptrdiff_t out_stride;
  int row_begin, row_end;
  int rows_per_task;
  bool are_parts_apart;  // a task takes one part of a weight: their outputs are not the same ones
};

struct Span {
  const int32_t *begin, *end;
};

Span rows_of_group(const LoraRows& rows, int group, int row_begin, int row_end) {
  const int32_t* const begin = rows.rows + rows.start[group];
  const int32_t* const end = rows.rows + rows.start[group + 1];
  return {std::lower_bound(begin, end, row_begin), std::lower_bound(begin, end, row_end)};
}

int num_tasks_of(const Job& job, int group) {
  if (job.call->weights[group] == nullptr) return 0;
  const Span rows = rows_of_group(*job.call->rows, group, job.row_begin, job.row_end);
  const int num_chunks = static_cast<int>(rows.end - rows.begin + job.rows_per_task - 1) / job.rows_per_task;
  return num_chunks * (job.are_parts_apart ? static_cast<int>(job.call->weights[group]->parts.size()) : 1);
}

void run_task(void* context, int index, int) {
  const Job& job = *static_cast<Job*>(context);
  int group = 0;
  for (;; ++group) {
    const int count = num_tasks_of(job, group);
    if (index < count) break;
    index -= count;
  }
  const Span rows = rows_of_group(*job.call->rows, group, job.row_begin, job.row_end);
  const LoraWeight& weight = *job.call->weights[group];
  const int num_parts = static_cast<int>(weight.parts.size());
  const int part = job.are_parts_apart ? index % num_parts : 0;
  if (job.are_parts_apart) index /= num_parts;
  LoraTask task{};
  task.x = job.x;
  task.x_stride = job.x_stride;
  task.out = job.out;
  task.out_stride = job.out_stride;
  task.rows = rows.begin + static_cast<ptrdiff_t>(index) * job.rows_per_task;
  task.num_rows = static_cast<int>(std::min<ptrdiff_t>(job.rows_per_task, rows.end - task.rows));
  task.first_row = job.row_begin;
  task.kind = weight.kind;
  task.num_inputs = weight.num_inputs;
  task.parts = weight.parts.data() + part;
  task.num_parts = job.are_parts_apart ? 1 : num_parts;
  job.kernels->lora_delta(task);
}

}  // namespace

bool pack_lora(const std::vector<LoraSource>& sources, LoraWeight& weight) {
  size_t size = 0;
  for (const LoraSource& source : sources) {
    size += round_up(down_bytes(source, weight), 64) + round_up(up_bytes(source, weight), 64);
  }
  if (!weight.memory.allocate(size)) return false;
  const size_t item = item_bytes(weight.kind), width = round_up(weight.num_inputs, kPanelWidth);
  char* at = weight.memory.as<char>();
  for (const LoraSource& source : sources) {
    char* const down = at;
    char* const up = down + round_up(down_bytes(source, weight), 64);
    at = up + round_up(up_bytes(source, weight), 64);
    for (int r = 0; r < source.rank; ++r) {
      std::memcpy(down + r * width * item, static_cast<const char*>(source.down) + r * weight.num_inputs * item,
                  weight.num_inputs * item);
    }
    for (int n = 0; n < source.num_outputs; ++n) {
      char* const panel = up + static_cast<size_t>(n / kPanelWidth) * source.rank * kPanelWidth * item;
      for (int r = 0; r < source.rank; ++r) {
        std::memcpy(panel + (static_cast<size_t>(r) * kPanelWidth + n % kPanelWidth) * item,
                    static_cast<const char*>(source.up) + (static_cast<size_t>(n) * source.rank + r) * item, item);
      }
    }
    weight.parts.push_back({source.first_output, source.num_outputs, source.rank, source.scale, down, up});
  }
  return true;
}

bool has_rows(const LoraRows& rows, int row_begin, int row_end) {
  for (int group = 0; group < rows.num_groups; ++group) {
    const Span span = rows_of_group(rows, group, row_begin, row_end);
    if (span.begin != span.end) return true;
  }
  return false;
}

void add_lora(Workers& workers, const Kernels& kernels, const LoraCall& call, const float* x, ptrdiff_t x_stride,
              float* out, ptrdiff_t out_stride, int row_begin, int row_end) {
  Job job{&kernels, &call, x, x_stride, out, out_stride, row_begin, row_end, kMinRowsPerTask, false};
  int num_rows = 0;
  double num_products = 0.0;
  for (int group = 0; group < call.rows->num_groups; ++group) {
    const LoraWeight* const weight = call.weights[group];
    if (weight == nullptr) continue;
    const Span rows = rows_of_group(*call.rows, group, row_begin, row_end);
    const int count = static_cast<int>(rows.end - rows.begin);
    num_rows += count;
    for (const LoraPart& part : weight->parts) {
      num_products += static_cast<double>(count) * part.rank * (weight->num_inputs + part.num_outputs);
    }
  }
  if (num_rows == 0) return;
  const int fair_share = num_rows / (2 * workers.pool.num_threads());
  job.rows_per_task = std::min(std::max(fair_share, kMinRowsPerTask), kMaxRowsPerTask);
  const auto count_tasks = [&] {
    int count = 0;
    for (int group = 0; group < call.rows->num_groups; ++group) count += num_tasks_of(job, group);
    return count;
  };
  int num_tasks = count_tasks();
  if (num_tasks < 2 * workers.pool.num_threads()) {
    job.are_parts_apart = true;
    num_tasks = count_tasks();
  }
  const Workers::Lock lock(workers.busy);
  if (num_products < kMinThreadedProducts || num_tasks == 1) {
    for (int index = 0; index < num_tasks; ++index) run_task(&job, index, 0);
  } else {
    workers.pool.run(num_tasks, run_task, &job);
  }
}

}  // namespace octavo
