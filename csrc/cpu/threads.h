// Our thread pool: one caller and its helpers share numbered tasks.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "topology.h"

namespace octavo {

// task(context, index, worker): worker is below num_threads() and no two running tasks have the same.
using Task = void (*)(void* context, int index, int worker);

// Tasks are claimed one at a time, never dealt out in halves, so a helper whose core was taken away delays at most the
// one task it holds. A helper without work spins for microseconds, then yields, then sleeps: an idle pool uses no CPU.
//
// No thread is ever bound to one core: whoever else wants that core would then halve the pool. On several memory nodes a
// helper is bound to all cores of its node; a job's tasks are divided among the nodes in order, and a worker takes from
// its own node's part first and from the others' when that is empty. Who runs a task changes no result.
class ThreadPool {
 public:
  explicit ThreadPool(int num_threads) : ThreadPool(Placement::anywhere(num_threads < 1 ? 1 : num_threads)) {}
  explicit ThreadPool(Placement placement);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return num_threads_; }
  const Placement& placement() const { return placement_; }

  // Runs task(context, i, worker) for every i in [0, num_tasks) and returns when all have ended. One caller at a time.
  // In a forked child, where there are no helpers, the caller runs them all.
  void run(int num_tasks, Task task, void* context);

 private:
  void work(int worker);
  bool take_and_run(int worker);
  bool take_and_run(int worker, size_t node);
  bool has_tasks() const;

  bool is_forked() const;

  // Where helpers sleep. Apart, because a forked child must leave it behind: destroying a condition variable waits for
  // the sleepers, and the helpers do not exist in the child.
  struct Bed {
    std::mutex mutex;
    std::condition_variable wake;
    std::vector<std::thread> helpers;
  };

  // A node's part of the open job: generation (high 32 bits), tasks left to claim (low 32 bits). A claim is one
  // compare-and-swap of the whole word, so a helper that is late never takes a task of a job it has not seen.
  struct alignas(64) Part {
    std::atomic<uint64_t> ticket{0};
    int first_task = 0;
  };

  const Placement placement_;
  const int num_threads_;
  const int num_forks_;  // of this process, when the pool was made
  const size_t num_parts_;
  const std::unique_ptr<Part[]> parts_;
  uint64_t generation_ = 0;
  alignas(64) std::atomic<int> num_unfinished_{0};
  alignas(64) std::atomic<int> num_sleeping_{0};
  Task task_ = nullptr;
  void* context_ = nullptr;
  std::atomic<bool> is_stopping_{false};
  Bed* bed_;
};

// Memory that is kept from call to call and only grows; 64-byte aligned, not initialized.
class Scratch {
 public:
  ~Scratch() { std::free(memory_); }
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  // Returns at least `num_bytes`, or nullptr when there is no memory; what an earlier call returned is gone.
  void* get(size_t num_bytes);
  // Gives the memory back when there is more of it than that.
  void trim(size_t max_bytes);

 private:
  void* memory_ = nullptr;
  size_t size_ = 0;
};

// What every kernel may use: the threads, and the memory it needs for one call.
struct Workers {
  ThreadPool& pool;
  Scratch scratch;         // of one op
  Scratch worker_scratch;  // of one op, cut into a part a worker
  Scratch activations;     // between the ops of a sublayer
  std::recursive_mutex busy;  // held by the call that runs; a sublayer holds it while its ops take it again
  using Lock = std::lock_guard<std::recursive_mutex>;

  explicit Workers(ThreadPool& threads) : pool(threads) {}
};

// Calls function(begin, end) for ranges that cover [0, num_rows), of at least `min_rows` each; all by the caller when
// there is too little to share.
template <class Function>
void run_rows(Workers& workers, int num_rows, int min_rows, const Function& function) {
  if (num_rows <= 2 * min_rows) {
    function(0, num_rows);
    return;
  }
  struct Job {
    const Function* function;
    int num_rows, rows_per_task;
  };
  const int fair_share = num_rows / (workers.pool.num_threads() * 4);
  Job job{&function, num_rows, fair_share < min_rows ? min_rows : fair_share};
  const Workers::Lock lock(workers.busy);
  workers.pool.run(
      (num_rows + job.rows_per_task - 1) / job.rows_per_task,
      [](void* context, int index, int) {
        const Job& some = *static_cast<Job*>(context);
        const int begin = index * some.rows_per_task;
        const int end = begin + some.rows_per_task;
        (*some.function)(begin, end < some.num_rows ? end : some.num_rows);
      },
      &job);
}

// Elementwise work that is worth a task of its own takes about 8,192 elements.
inline int rows_worth_a_task(int elements_per_row) { return 8192 / (elements_per_row > 0 ? elements_per_row : 1) + 1; }

}  // namespace octavo
