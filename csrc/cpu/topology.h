// Which processors belong to which memory node, and where a pool's threads go. Read from /sys; no library.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace octavo {

// A memory node, as far as this process may use it.
struct Node {
  int id;
  std::vector<int> cpus;  // allowed ones, hyper-threads too
  int num_cores;          // physical ones among them
};

// "0-3,8" to 0, 1, 2, 3, 8; what is not a list of numbers ends it.
std::vector<int> parse_cpu_list(const std::string& text);

// The processors this thread may run on; empty where the system does not tell.
std::vector<int> allowed_cpus();

// The nodes that have any of `allowed`, in order of id; `system_root` is /sys/devices/system. A system without nodes, or
// with processors in none, gives a single one with all of them.
std::vector<Node> read_nodes(const std::string& system_root, const std::vector<int>& allowed);

// Where the threads of a pool belong.
//
// nodes:   those that have a thread, the caller's first
// node_of: for each worker, an index of `nodes`; rising
struct Placement {
  std::vector<Node> nodes;
  std::vector<int> node_of;

  // A pool of its own accord: one node, nothing bound.
  static Placement anywhere(int num_threads) { return {{{0, {}, num_threads}}, std::vector<int>(num_threads, 0)}; }

  bool is_spread() const { return nodes.size() > 1; }
  // Where the part of node `index` begins, of `size` things that lie in the order of the nodes.
  size_t begin_of(size_t index, size_t size) const;
};

// All on one node if its cores suffice: the caller's, else the largest. Otherwise on as few nodes as have the cores, in
// proportion to them. With one node in all nothing is to be bound, and its list of processors is left empty.
Placement place_threads(const std::vector<Node>& nodes, int num_threads, int caller_node);

// The node that the calling thread runs on just now; -1 where the system does not tell.
int current_node();

// Lets this thread run on these processors only; it is free to move among them. Nothing happens where that fails.
void bind_to_cpus(const std::vector<int>& cpus);

// Asks for the whole pages of this memory to lie on the node, moving those that lie elsewhere. A wish: nothing depends on
// it.
void move_to_node(void* memory, size_t num_bytes, int node_id);

}  // namespace octavo
