#include "threads.h"

#include <chrono>
#include <utility>

#include <pthread.h>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace octavo {
namespace {

// The gaps between the ops of one step are a few microseconds: spinning that long keeps a helper at hand. Beyond it,
// another process may want the core.
constexpr auto kSpin = std::chrono::microseconds(30);
constexpr auto kYield = std::chrono::microseconds(200);

std::atomic<int> num_forks_so_far{0};

int count_forks() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { num_forks_so_far.fetch_add(1); });
  (void)registered;
  return num_forks_so_far.load();
}

void relax() {
#if defined(__x86_64__) || defined(__i386__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Calls is_done() until it is true (returns true) or spin and yield time are used up (returns false).
template <class Condition>
bool wait_awake(Condition is_done) {
  const auto start = std::chrono::steady_clock::now();
  for (;;) {
    for (int i = 0; i < 32; ++i) {
      if (is_done()) return true;
      relax();
    }
    const auto waited = std::chrono::steady_clock::now() - start;
    if (waited > kSpin) {
      if (waited > kYield) return false;
      std::this_thread::yield();
    }
  }
}

}  // namespace

ThreadPool::ThreadPool(Placement placement)
    : placement_(std::move(placement)),
      num_threads_(static_cast<int>(placement_.node_of.size())),
      num_forks_(count_forks()),
      num_parts_(placement_.nodes.size()),
      parts_(new Part[num_parts_]),
      bed_(new Bed) {
  for (int worker = 1; worker < num_threads_; ++worker) bed_->helpers.emplace_back([this, worker] { work(worker); });
}

ThreadPool::~ThreadPool() {
  if (is_forked()) return;
  {
    std::lock_guard<std::mutex> lock(bed_->mutex);
    is_stopping_.store(true);
  }
  bed_->wake.notify_all();
  for (std::thread& helper : bed_->helpers) helper.join();
  delete bed_;
}

bool ThreadPool::is_forked() const { return num_forks_so_far.load(std::memory_order_relaxed) != num_forks_; }

void ThreadPool::run(int num_tasks, Task task, void* context) {
  if (num_tasks <= 0) return;
  if (num_tasks == 1 || num_threads_ == 1 || is_forked()) {
    for (int index = 0; index < num_tasks; ++index) task(context, index, 0);
    return;
  }
  task_ = task;
  context_ = context;
  num_unfinished_.store(num_tasks, std::memory_order_relaxed);
  ++generation_;
  for (size_t node = 0; node < num_parts_; ++node) {
    Part& part = parts_[node];
    part.first_task = static_cast<int>(placement_.begin_of(node, num_tasks));
    const int end = static_cast<int>(placement_.begin_of(node + 1, num_tasks));
    // Also publishes task_, context_ and first_task.
    part.ticket.store(generation_ << 32 | static_cast<uint32_t>(end - part.first_task));
  }
  if (num_sleeping_.load() > 0) {
    // Taking the lock once makes sure a helper that saw no work is truly asleep before the call.
    { std::lock_guard<std::mutex> lock(bed_->mutex); }
    if (num_tasks - 1 >= num_threads_ - 1) {
      bed_->wake.notify_all();
    } else {
      for (int i = 1; i < num_tasks; ++i) bed_->wake.notify_one();
    }
  }
  while (take_and_run(0)) {
  }
  while (!wait_awake([this] { return num_unfinished_.load(std::memory_order_acquire) == 0; })) {
    // A helper holds the last task and lost its core, or the task is long: leave the core to it.
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

bool ThreadPool::take_and_run(int worker) {
  const size_t home = static_cast<size_t>(placement_.node_of[worker]);
  for (size_t i = 0; i < num_parts_; ++i) {
    if (take_and_run(worker, home + i < num_parts_ ? home + i : home + i - num_parts_)) return true;
  }
  return false;
}

bool ThreadPool::take_and_run(int worker, size_t node) {
  Part& part = parts_[node];
  uint64_t ticket = part.ticket.load(std::memory_order_acquire);
  do {
    if (static_cast<uint32_t>(ticket) == 0) return false;
  } while (!part.ticket.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel, std::memory_order_acquire));
  // The job cannot end before this task has, so task_, context_ and first_task stay what they are.
  task_(context_, part.first_task + static_cast<int>(static_cast<uint32_t>(ticket)) - 1, worker);
  num_unfinished_.fetch_sub(1, std::memory_order_release);
  return true;
}

bool ThreadPool::has_tasks() const {
  for (size_t node = 0; node < num_parts_; ++node) {
    if (static_cast<uint32_t>(parts_[node].ticket.load()) != 0) return true;
  }
  return false;
}

void ThreadPool::work(int worker) {
  bind_to_cpus(placement_.nodes[placement_.node_of[worker]].cpus);
  const auto has_work = [this] { return has_tasks() || is_stopping_.load(std::memory_order_relaxed); };
  for (;;) {
    while (take_and_run(worker)) {
    }
    if (!wait_awake(has_work)) {
      std::unique_lock<std::mutex> lock(bed_->mutex);
      num_sleeping_.fetch_add(1);
      bed_->wake.wait(lock, has_work);
      num_sleeping_.fetch_sub(1);
    }
    if (is_stopping_.load()) return;
  }
}

void* Scratch::get(size_t num_bytes) {
  if (num_bytes > size_) {
    std::free(memory_);
    size_ = (num_bytes + num_bytes / 4 + 4095) / 4096 * 4096;
    memory_ = std::aligned_alloc(4096, size_);
    if (memory_ == nullptr) size_ = 0;
  }
  return memory_;
}

void Scratch::trim(size_t max_bytes) {
  if (size_ <= max_bytes) return;
  std::free(memory_);
  memory_ = nullptr;
  size_ = 0;
}

}  // namespace octavo
