#include "linear.h"

namespace octavo {
namespace {

// Rough costs, for cutting the work only: they never change a bit of the result.
constexpr double kBytesPerMicrosecond = 10e3;    // of weights, from memory
constexpr double kProductsPerMicrosecond = 80e3;
constexpr double kMinTaskMicroseconds = 2.0;
constexpr double kMinThreadedMicroseconds = 8.0;
constexpr int kMaxRowsPerTask = 256;  // their activations stay in the second-level cache
constexpr int kTasksPerThread = 8;

struct MatrixCut {
  const PackedMatrix* matrix;
  int first_channel;
  int num_panels;  // of a gated matrix: the gates'
  int panels_per_task;
  int num_panel_tasks;
  int first_task;
};

constexpr int kMaxMatrices = 16;

struct LinearJob {
  const Kernels* kernels;
  const float* x;
  ptrdiff_t x_stride;
  QuantizedRows quantized;
  const float* bias;
  float* out;
  ptrdiff_t out_stride;
  bool is_added;
  const GatedResult* gated;  // nullptr: out
  int num_rows, num_columns;
  int rows_per_task, num_row_tasks;
  MatrixCut cuts[kMaxMatrices];
  int num_cuts;
};

void multiply_some(void* context, int index, int) {
  const LinearJob& job = *static_cast<LinearJob*>(context);
  int c = job.num_cuts - 1;
  while (index < job.cuts[c].first_task) --c;
  const MatrixCut& cut = job.cuts[c];
  const PackedMatrix& matrix = *cut.matrix;
  index -= cut.first_task;
  MatmulTask task;
  task.x = job.x;
  task.x_stride = job.x_stride;
  task.quantized = job.quantized;
  task.matrix = &matrix;
  task.bias = job.bias == nullptr ? nullptr : job.bias + cut.first_channel;
  task.out = job.out + cut.first_channel;
  task.out_stride = job.out_stride;
  task.is_added = job.is_added;
  task.gated = job.gated;
  task.row_begin = index % job.num_row_tasks * job.rows_per_task;
  task.row_end = task.row_begin + job.rows_per_task < job.num_rows ? task.row_begin + job.rows_per_task : job.num_rows;
  task.panel_begin = index / job.num_row_tasks * cut.panels_per_task;
  task.panel_end = task.panel_begin + cut.panels_per_task;
  if (task.panel_end > cut.num_panels) task.panel_end = cut.num_panels;
  switch (matrix.kind) {
    case WeightKind::q4: job.kernels->matmul_q4(task); break;
    case WeightKind::q8: job.kernels->matmul_q8(task); break;
    default: job.kernels->matmul_float(task); break;
  }
}

bool is_quantized(const PackedMatrix& matrix) {
  return matrix.kind == WeightKind::q4 || matrix.kind == WeightKind::q8;
}

int ceil_div(int a, int b) { return (a + b - 1) / b; }

void run_some_matrices(Workers& workers, LinearJob& job, const Weight& weight, int begin, int end, int first_channel) {
  const int num_threads = workers.pool.num_threads();
  job.num_row_tasks = ceil_div(job.num_rows, kMaxRowsPerTask);
  const int tile = job.kernels->row_tile;
  job.rows_per_task = ceil_div(ceil_div(job.num_rows, job.num_row_tasks), tile) * tile;
  job.num_row_tasks = ceil_div(job.num_rows, job.rows_per_task);
  job.num_cuts = 0;
  int num_tasks = 0;
  double total_cost = 0.0;
  for (int m = begin; m < end; ++m) {
    const PackedMatrix& matrix = weight.matrices[m];
    const double bytes = static_cast<double>(matrix.num_bytes()) / matrix.num_panels;
    const double products = static_cast<double>(job.num_rows < job.rows_per_task ? job.num_rows : job.rows_per_task) *
                            matrix.num_columns * kPanelWidth;
    const double panel_cost = bytes / kBytesPerMicrosecond + products / kProductsPerMicrosecond;
    total_cost += panel_cost * matrix.num_panels * job.num_row_tasks;
    MatrixCut& cut = job.cuts[job.num_cuts++];
    cut.matrix = &matrix;
    cut.first_channel = first_channel;
    cut.num_panels = job.gated == nullptr ? matrix.num_panels : matrix.num_panels / 2;
    int panels = cut.num_panels * job.num_row_tasks / (num_threads * kTasksPerThread);
    const int min_panels = static_cast<int>(kMinTaskMicroseconds / panel_cost) + 1;
    panels = panels < min_panels ? min_panels : panels;
    cut.panels_per_task = (panels + 1) / 2 * 2;  // the widest kernels take two at a time
    cut.num_panel_tasks = ceil_div(cut.num_panels, cut.panels_per_task);
    cut.first_task = num_tasks;
    num_tasks += cut.num_panel_tasks * job.num_row_tasks;
    first_channel += matrix.num_rows;
  }
  if (total_cost < kMinThreadedMicroseconds) {
    for (int index = 0; index < num_tasks; ++index) multiply_some(&job, index, 0);
  } else {
    workers.pool.run(num_tasks, multiply_some, &job);
  }
}

}  // namespace

bool reads_codes(const Weight& weight) {
  for (const PackedMatrix& matrix : weight.matrices) {
    if (is_quantized(matrix)) return true;
  }
  return false;
}

size_t quantized_bytes(int num_rows, int num_columns) {
  const size_t num_codes = static_cast<size_t>(num_rows) * num_columns;
  const size_t as_codes = num_codes + (num_codes / kGroupSize + 15) / 16 * 16 * 4 * sizeof(float);
  const size_t as_values = static_cast<size_t>(ceil_div(num_rows, 16)) * 16 * num_columns * sizeof(bfloat);
  return as_codes > as_values ? as_codes : as_values;
}

QuantizedRows place_quantized(void* memory, int num_rows, int num_columns) {
  const size_t num_scales = (static_cast<size_t>(num_rows) * num_columns / kGroupSize + 15) / 16 * 16;
  QuantizedRows rows;
  rows.scale = static_cast<float*>(memory);
  rows.middle = rows.scale + num_scales;
  rows.sum = rows.middle + num_scales;
  rows.offset = reinterpret_cast<int32_t*>(rows.sum + num_scales);
  rows.codes = reinterpret_cast<int8_t*>(rows.offset + num_scales);
  rows.values = static_cast<bfloat*>(memory);  // either these or those
  return rows;
}

void quantize(Workers& workers, const Kernels& kernels, const LinearInput& input) {
  run_rows(workers, input.num_rows, 16384 / input.num_columns + 1, [&](int begin, int end) {
    kernels.quantize_rows(input.x, input.x_stride, begin, end, input.num_columns, input.quantized);
  });
}

bool can_gate(const Kernels& kernels, const Weight& gate_up, const Weight& next) {
  if (!kernels.can_gate || gate_up.matrices.size() != 1 || !is_quantized(gate_up.matrices[0])) return false;
  for (const PackedMatrix& matrix : next.matrices) {
    if (!is_quantized(matrix)) return false;
  }
  return gate_up.num_rows == 2 * next.num_columns && next.num_columns % 32 == 0;
}

void multiply_gated(Workers& workers, const Kernels& kernels, const LinearInput& input, const Weight& gate_up,
                    bool is_gelu, const LinearInput& gated) {
  const Workers::Lock lock(workers.busy);
  const GatedResult result{gated.quantized.values, gated.num_columns, is_gelu};
  LinearJob job{};
  job.kernels = &kernels;
  job.x = input.x;
  job.x_stride = input.x_stride;
  job.quantized = input.quantized;
  job.gated = &result;
  job.num_rows = input.num_rows;
  job.num_columns = gate_up.num_columns;
  run_some_matrices(workers, job, gate_up, 0, 1, 0);
}

void multiply(Workers& workers, const Kernels& kernels, const LinearInput& input, const Weight& weight,
              const float* bias, float* out, ptrdiff_t out_stride, bool is_added) {
  const Workers::Lock lock(workers.busy);
  LinearJob job{};
  job.kernels = &kernels;
  job.x = input.x;
  job.x_stride = input.x_stride;
  job.quantized = input.quantized;
  job.bias = bias;
  job.out = out;
  job.out_stride = out_stride;
  job.is_added = is_added;
  job.num_rows = input.num_rows;
  job.num_columns = weight.num_columns;
  const int num_matrices = static_cast<int>(weight.matrices.size());
  int first_channel = 0;
  for (int begin = 0; begin < num_matrices; begin += kMaxMatrices) {
    const int end = begin + kMaxMatrices < num_matrices ? begin + kMaxMatrices : num_matrices;
    run_some_matrices(workers, job, weight, begin, end, first_channel);
    for (int m = begin; m < end; ++m) first_channel += weight.matrices[m].num_rows;
  }
}

bool linear(Workers& workers, const Kernels& kernels, const float* x, ptrdiff_t x_stride, int num_rows,
            const Weight& weight, const float* bias, float* out) {
  if (num_rows == 0) return true;
  const Workers::Lock lock(workers.busy);
  LinearInput input{x, x_stride, num_rows, weight.num_columns, {}};
  if (reads_codes(weight)) {
    void* memory = workers.scratch.get(quantized_bytes(num_rows, weight.num_columns));
    if (memory == nullptr) return false;
    input.quantized = place_quantized(memory, num_rows, weight.num_columns);
    quantize(workers, kernels, input);
  }
  multiply(workers, kernels, input, weight, bias, out, weight.num_rows, false);
  return true;
}

}  // namespace octavo
