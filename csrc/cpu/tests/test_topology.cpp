// Nodes and cores read from made-up /sys trees, and where threads are placed on them.
#include <cstdio>
#include <cstdlib>
#include <string>

#include <sys/stat.h>
#include <unistd.h>

#include "check.h"
#include "threads.h"
#include "topology.h"

namespace octavo {
namespace test {
namespace {

// A folder that goes away with its owner.
class FakeSystem {
 public:
  FakeSystem() {
    char name[] = "/tmp/octavo-topology-XXXXXX";
    root_ = mkdtemp(name) == nullptr ? "" : name;
  }
  ~FakeSystem() {
    for (size_t i = files_.size(); i-- > 0;) std::remove(files_[i].c_str());
    std::remove(root_.c_str());
  }

  void write(const std::string& path, const std::string& text) {
    for (size_t at = path.find('/'); at != std::string::npos; at = path.find('/', at + 1)) {
      const std::string folder = root_ + "/" + path.substr(0, at);
      if (mkdir(folder.c_str(), 0700) == 0) files_.push_back(folder);
    }
    files_.push_back(root_ + "/" + path);
    std::FILE* file = std::fopen(files_.back().c_str(), "w");
    if (file == nullptr) return;
    std::fputs(text.c_str(), file);
    std::fclose(file);
  }
  const std::string& root() const { return root_; }

 private:
  std::string root_;
  std::vector<std::string> files_;
};

void test_lists() {
  using List = std::vector<int>;
  check(parse_cpu_list("0-3,8,10-11\n") == List({0, 1, 2, 3, 8, 10, 11}), "a list of ranges");
  check(parse_cpu_list("5") == List({5}), "a list of one");
  check(parse_cpu_list("").empty() && parse_cpu_list("\n").empty() && parse_cpu_list("x").empty(), "an empty list");
  check(parse_cpu_list("2-1").empty() && parse_cpu_list("1,") == List({1}), "a broken list");
  check(parse_cpu_list("0-99999999999").size() <= 65536, "a list without an end");
}

// Two nodes of 4 cores with 2 threads each, numbered as machines do: 0-3 and 8-11, 4-7 and 12-15. Node 2 has memory only.
void make_two_nodes(FakeSystem& system) {
  system.write("node/online", "0-2\n");
  system.write("node/node0/cpulist", "0-3,8-11\n");
  system.write("node/node1/cpulist", "4-7,12-15\n");
  system.write("node/node2/cpulist", "\n");
  for (int cpu = 0; cpu < 16; ++cpu) {
    system.write("cpu/cpu" + std::to_string(cpu) + "/topology/thread_siblings_list",
                 std::to_string(cpu % 8) + "," + std::to_string(cpu % 8 + 8) + "\n");
  }
}

std::vector<int> range(int begin, int end) {
  std::vector<int> numbers;
  for (int i = begin; i < end; ++i) numbers.push_back(i);
  return numbers;
}

void test_reading() {
  FakeSystem system;
  check(!system.root().empty(), "a temporary folder");
  make_two_nodes(system);
  const std::vector<Node> all = read_nodes(system.root(), range(0, 16));
  check(all.size() == 2 && all[0].id == 0 && all[1].id == 1, "two nodes, the one without processors left out");
  check(all[1].cpus == std::vector<int>({4, 5, 6, 7, 12, 13, 14, 15}) && all[1].num_cores == 4, "node 1 has 4 cores");

  // A container's share of the machine.
  const std::vector<Node> some = read_nodes(system.root(), {1, 2, 5, 13});
  check(some.size() == 2 && some[0].cpus == std::vector<int>({1, 2}) && some[0].num_cores == 2, "allowed ones of node 0");
  check(some.size() == 2 && some[1].cpus == std::vector<int>({5, 13}) && some[1].num_cores == 1,
        "two threads of one core");
  const std::vector<Node> one = read_nodes(system.root(), {4, 6});
  check(one.size() == 1 && one[0].id == 1 && one[0].num_cores == 2, "a share on one node");

  // Processors in no node: then nodes say nothing.
  const std::vector<Node> more = read_nodes(system.root(), range(0, 20));
  check(more.size() == 1 && more[0].cpus.size() == 20 && more[0].num_cores == 12, "a tree that is not whole");
  const FakeSystem empty;
  const std::vector<Node> none = read_nodes(empty.root(), {0, 1, 2});
  check(none.size() == 1 && none[0].num_cores == 3 && none[0].cpus.size() == 3, "no tree at all");
  check(read_nodes(empty.root(), {}).size() == 1, "no tree and no processors");
}

void test_placing() {
  const std::vector<Node> two = {{0, range(0, 4), 4}, {1, range(4, 8), 4}};
  const auto node_ids = [](const Placement& placement) {
    std::vector<int> ids;
    for (int node : placement.node_of) ids.push_back(placement.nodes[node].id);
    return ids;
  };
  const std::vector<int> zeros(4, 0), ones(3, 1);
  check(node_ids(place_threads(two, 4, 0)) == zeros, "four threads stay on the caller's node");
  check(node_ids(place_threads(two, 3, 1)) == ones, "three on the other one");
  check(!place_threads(two, 3, 1).is_spread() && place_threads(two, 3, 1).nodes[0].cpus == range(4, 8),
        "they are bound to that node");
  check(node_ids(place_threads(two, 8, 1)) == std::vector<int>({1, 1, 1, 1, 0, 0, 0, 0}), "eight on both");
  check(node_ids(place_threads(two, 5, -1)) == std::vector<int>({0, 0, 1, 1, 1}), "five are shared out");
  check(place_threads(two, 32, 0).node_of.size() == 32, "more threads than cores");

  const std::vector<Node> uneven = {{0, {0}, 1}, {3, range(1, 7), 6}, {7, {7, 8}, 2}};
  check(node_ids(place_threads(uneven, 2, 0)) == std::vector<int>({3, 3}), "too many for the caller's: the largest");
  check(node_ids(place_threads(uneven, 8, 7)) == std::vector<int>({7, 7, 3, 3, 3, 3, 3, 3}), "in proportion");
  check(place_threads(uneven, 9, 7).nodes.size() == 3, "all nodes");

  const Placement single = place_threads({{0, range(0, 8), 8}}, 4, 0);
  check(single.nodes.size() == 1 && single.nodes[0].cpus.empty() && single.node_of.size() == 4,
        "on a machine of one node nothing is bound");

  const Placement spread = place_threads(two, 6, 0);
  check(spread.begin_of(0, 100) == 0 && spread.begin_of(1, 100) == 50 && spread.begin_of(2, 100) == 100,
        "half of everything is a node's");
}

// A node that does not exist, and processors that do not: only wishes.
void test_wishes() {
  ThreadPool pool(Placement{{{0, {0}, 1}, {900, {65535}, 1}}, {0, 0, 1, 1}});
  Workers workers(pool);
  Weight weight;
  weight.num_columns = 512;
  Random random(1);
  const std::vector<float> values = random.normals(2048 * 512);
  weight.matrices.emplace_back();
  check(pack_same_kind(workers, {{WeightKind::float32, 2048, values.data(), nullptr, nullptr}}, 512,
                       weight.matrices.back()),
        "packs");
  weight.num_rows = 2048;
  spread_weight(weight, pool.placement());
  std::vector<float> row(512);
  bool is_same = true;
  for (int r = 0; r < 2048; r += 17) {
    read_row(weight.matrices[0], r, 1.0f, row.data());
    is_same = is_same && same_bits(row.data(), values.data() + r * 512, 512);
  }
  check(is_same, "a spread weight reads as before");
}

}  // namespace

void test_topology() {
  test_lists();
  test_reading();
  test_placing();
  test_wishes();
}

}  // namespace test
}  // namespace octavo
