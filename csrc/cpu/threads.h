// Our thread pool: one caller and its helpers share numbered tasks.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <vector>

namespace octavo {

// task(context, index, worker): worker is below num_threads() and no two running tasks have the same.
using Task = void (*)(void* context, int index, int worker);

// Tasks are claimed one at a time, never dealt out in halves, so a helper whose core was taken away delays at most the
// one task it holds. A helper without work spins for microseconds, then yields, then sleeps: an idle pool uses no CPU.
class ThreadPool {
 public:
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return num_threads_; }

  // Runs task(context, i, worker) for every i in [0, num_tasks) and returns when all have ended. One caller at a time.
  // In a forked child, where there are no helpers, the caller runs them all.
  void run(int num_tasks, Task task, void* context);

 private:
  void work(int worker);
  bool take_and_run(int worker);

  bool is_forked() const;

  // Where helpers sleep. Apart, because a forked child must leave it behind: destroying a condition variable waits for
  // the sleepers, and the helpers do not exist in the child.
  struct Bed {
    std::mutex mutex;
    std::condition_variable wake;
    std::vector<std::thread> helpers;
  };

  const int num_threads_;
  const int num_forks_;  // of this process, when the pool was made
  // The open job: generation (high 32 bits), tasks left to claim (low 32 bits). A claim is one compare-and-swap of the
  // whole word, so a helper that is late never takes a task of a job it has not seen.
  alignas(64) std::atomic<uint64_t> ticket_{0};
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

 private:
  void* memory_ = nullptr;
  size_t size_ = 0;
};

// What every kernel may use: the threads, and the memory it needs for one call.
struct Workers {
  ThreadPool& pool;
  Scratch scratch;
  Scratch worker_scratch;
  std::mutex busy;  // held by the call that runs

  explicit Workers(ThreadPool& threads) : pool(threads) {}
};

}  // namespace octavo
