// Every task runs once, by one worker at a time, however short the jobs are.
#include <atomic>
#include <memory>

#include "check.h"
#include "threads.h"

namespace octavo {
namespace test {
namespace {

struct Counts {
  std::unique_ptr<std::atomic<int>[]> runs;
  std::atomic<bool> is_busy[8];
  std::atomic<int> num_clashes{0};
  int num_threads;
};

void count_one(void* context, int index, int worker) {
  Counts& counts = *static_cast<Counts*>(context);
  if (worker < 0 || worker >= counts.num_threads || counts.is_busy[worker].exchange(true))
    counts.num_clashes.fetch_add(1);
  counts.runs[index].fetch_add(1);
  counts.is_busy[worker].store(false);
}

// Workers of several nodes, of which one may have no tasks of its own.
void test_nodes() {
  for (const std::vector<int>& node_of : {std::vector<int>{0, 1}, {0, 0, 1}, {0, 1, 2}, {0, 0, 0, 1, 1}}) {
    Placement placement{{}, node_of};
    for (int id = 0; id <= node_of.back(); ++id) placement.nodes.push_back({id, {}, 1});
    ThreadPool pool(placement);
    for (int num_tasks : {1, 2, 3, 50}) {
      Counts counts;
      counts.runs.reset(new std::atomic<int>[num_tasks]());
      for (std::atomic<bool>& busy : counts.is_busy) busy.store(false);
      counts.num_threads = pool.num_threads();
      constexpr int kJobs = 50;
      for (int job = 0; job < kJobs; ++job) pool.run(num_tasks, count_one, &counts);
      bool each_once = counts.num_clashes.load() == 0;
      for (int i = 0; i < num_tasks; ++i) each_once = each_once && counts.runs[i].load() == kJobs;
      check(each_once, "%d tasks on %d threads of %zu nodes run once a job", num_tasks, pool.num_threads(),
            placement.nodes.size());
    }
  }
}

}  // namespace

void test_threads() {
  test_nodes();
  for (int num_threads : {1, 2, 3}) {
    ThreadPool pool(num_threads);
    for (int num_tasks : {0, 1, 2, 7, 100}) {
      Counts counts;
      counts.runs.reset(new std::atomic<int>[num_tasks + 1]());
      for (std::atomic<bool>& busy : counts.is_busy) busy.store(false);
      counts.num_threads = num_threads;
      constexpr int kJobs = 50;
      for (int job = 0; job < kJobs; ++job) pool.run(num_tasks, count_one, &counts);
      bool each_once = counts.num_clashes.load() == 0;
      for (int i = 0; i < num_tasks; ++i) each_once = each_once && counts.runs[i].load() == kJobs;
      check(each_once, "%d tasks on %d threads run once a job", num_tasks, num_threads);
    }
  }
  Scratch scratch;
  char* const small = static_cast<char*>(scratch.get(100));
  small[99] = 1;
  char* const large = static_cast<char*>(scratch.get(100000));
  large[99999] = 1;
  check(reinterpret_cast<uintptr_t>(large) % 64 == 0, "scratch memory is aligned to 64 bytes");
  scratch.trim(200000);
  check(large[99999] == 1, "scratch memory below the limit is kept");
  scratch.trim(10);
  static_cast<char*>(scratch.get(100))[99] = 1;
}

}  // namespace test
}  // namespace octavo
