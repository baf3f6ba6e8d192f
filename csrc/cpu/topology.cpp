#include "topology.h"

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <cstdio>
#include <set>

#ifdef __linux__
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace octavo {
namespace {

// Beyond it a list is a mistake, not a machine.
constexpr int kMaxCpus = 1 << 16;

std::string read_line(const std::string& path) {
  std::FILE* file = std::fopen(path.c_str(), "r");
  if (file == nullptr) return "";
  std::string line;
  for (int c = std::fgetc(file); c != EOF && c != '\n'; c = std::fgetc(file)) line.push_back(static_cast<char>(c));
  std::fclose(file);
  return line;
}

int count_cores(const std::string& system_root, const std::vector<int>& cpus) {
  std::set<std::string> cores;
  for (int cpu : cpus) {
    const std::string name = std::to_string(cpu);
    const std::string siblings = read_line(system_root + "/cpu/cpu" + name + "/topology/thread_siblings_list");
    cores.insert(siblings.empty() ? name : siblings);
  }
  return static_cast<int>(cores.size());
}

}  // namespace

std::vector<int> parse_cpu_list(const std::string& text) {
  std::vector<int> cpus;
  size_t at = 0;
  const auto number = [&] {
    if (at >= text.size() || !std::isdigit(static_cast<unsigned char>(text[at]))) return -1;
    int value = 0;
    for (; at < text.size() && std::isdigit(static_cast<unsigned char>(text[at])); ++at) {
      value = std::min(value * 10 + (text[at] - '0'), kMaxCpus);
    }
    return value;
  };
  for (;;) {
    const int first = number();
    if (first < 0) return cpus;
    int last = first;
    if (at < text.size() && text[at] == '-') {
      ++at;
      last = number();
    }
    for (int cpu = first; cpu <= last && cpu < kMaxCpus; ++cpu) cpus.push_back(cpu);
    if (at >= text.size() || text[at] != ',') return cpus;
    ++at;
  }
}

std::vector<int> allowed_cpus() {
  std::vector<int> cpus;
#ifdef __linux__
  // A machine may have more processors than cpu_set_t has bits.
  for (int size = CPU_SETSIZE; size <= kMaxCpus; size *= 4) {
    cpu_set_t* set = CPU_ALLOC(size);
    if (set == nullptr) return cpus;
    const bool is_known = sched_getaffinity(0, CPU_ALLOC_SIZE(size), set) == 0;
    for (int cpu = 0; is_known && cpu < size; ++cpu) {
      if (CPU_ISSET_S(cpu, CPU_ALLOC_SIZE(size), set)) cpus.push_back(cpu);
    }
    CPU_FREE(set);
    if (is_known) break;
  }
#endif
  return cpus;
}

std::vector<Node> read_nodes(const std::string& system_root, const std::vector<int>& allowed) {
  std::vector<Node> nodes;
  size_t num_found = 0;
  for (int id : parse_cpu_list(read_line(system_root + "/node/online"))) {
    Node node{id, {}, 0};
    for (int cpu : parse_cpu_list(read_line(system_root + "/node/node" + std::to_string(id) + "/cpulist"))) {
      if (std::find(allowed.begin(), allowed.end(), cpu) != allowed.end()) node.cpus.push_back(cpu);
    }
    if (node.cpus.empty()) continue;  // memory only, or not ours
    node.num_cores = count_cores(system_root, node.cpus);
    num_found += node.cpus.size();
    nodes.push_back(node);
  }
  if (nodes.empty() || num_found != allowed.size()) return {{0, allowed, count_cores(system_root, allowed)}};
  return nodes;
}

size_t Placement::begin_of(size_t index, size_t size) const {
  size_t num_before = 0;
  for (int node : node_of) num_before += static_cast<size_t>(node) < index ? 1 : 0;
  return size * num_before / node_of.size();
}

Placement place_threads(const std::vector<Node>& nodes, int num_threads, int caller_node) {
  if (nodes.size() <= 1) return Placement::anywhere(num_threads);
  std::vector<Node> order = nodes;
  // The caller's first, then those with the most cores.
  std::stable_sort(order.begin(), order.end(), [&](const Node& a, const Node& b) {
    if ((a.id == caller_node) != (b.id == caller_node)) return a.id == caller_node;
    return a.num_cores > b.num_cores;
  });
  for (size_t i = 1; i < order.size() && order[0].num_cores < num_threads; ++i) {
    if (order[i].num_cores >= num_threads) std::swap(order[0], order[i]);
  }
  size_t num_used = 0;
  int num_cores = 0;
  while (num_used < order.size() && num_cores < num_threads) num_cores += order[num_used++].num_cores;
  order.resize(num_used);

  Placement placement;
  placement.nodes = order;
  int num_before = 0, num_placed = 0;
  for (size_t i = 0; i < order.size(); ++i) {
    num_before += order[i].num_cores;
    const int end = static_cast<int>(static_cast<int64_t>(num_threads) * num_before / num_cores);
    for (; num_placed < end; ++num_placed) placement.node_of.push_back(static_cast<int>(i));
  }
  return placement;
}

int current_node() {
#if defined(__linux__) && defined(SYS_getcpu)
  unsigned cpu = 0, node = 0;
  if (syscall(SYS_getcpu, &cpu, &node, nullptr) == 0) return static_cast<int>(node);
#endif
  return -1;
}

void bind_to_cpus(const std::vector<int>& cpus) {
#ifdef __linux__
  if (cpus.empty()) return;
  const int size = *std::max_element(cpus.begin(), cpus.end()) + 1;
  cpu_set_t* set = CPU_ALLOC(size);
  if (set == nullptr) return;
  CPU_ZERO_S(CPU_ALLOC_SIZE(size), set);
  for (int cpu : cpus) CPU_SET_S(cpu, CPU_ALLOC_SIZE(size), set);
  (void)sched_setaffinity(0, CPU_ALLOC_SIZE(size), set);  // the calling thread's, not the process's
  CPU_FREE(set);
#else
  (void)cpus;
#endif
}

void move_to_node(void* memory, size_t num_bytes, int node_id) {
#if defined(__linux__) && defined(SYS_mbind)
  // linux/mempolicy.h
  constexpr int kPreferred = 1, kMove = 2;
  constexpr size_t kMaskBits = 1024, kWordBits = 8 * sizeof(unsigned long);
  if (node_id < 0 || static_cast<size_t>(node_id) >= kMaskBits) return;
  const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(memory) + page - 1) / page * page;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + num_bytes) / page * page;
  if (begin >= end) return;
  unsigned long mask[kMaskBits / kWordBits] = {};
  mask[static_cast<size_t>(node_id) / kWordBits] = 1ul << (static_cast<size_t>(node_id) % kWordBits);
  (void)syscall(SYS_mbind, begin, end - begin, kPreferred, mask, kMaskBits + 1, kMove);
#else
  (void)memory;
  (void)num_bytes;
  (void)node_id;
#endif
}

}  // namespace octavo
