#include "system/local_world.h"

#include <algorithm>
#include <cstdlib>

#include "system/parse.h"

namespace torchoffload {
namespace {

constexpr uint64_t kMostProcesses = uint64_t{1} << 22;  // Linux has no more; see proc_sys_kernel(5), pid_max

// A count that can be true.
std::optional<uint64_t> parse_count(std::string_view text) {
  const auto count = parse_number(strip(text));
  return count && *count >= 1 && *count <= kMostProcesses ? count : std::nullopt;
}

// So many nodes in a row with that many tasks each.
struct Nodes {
  uint64_t task_count = 0;
  uint64_t node_count = 1;
};

// "4" or "4(x2)".
std::optional<Nodes> parse_nodes(std::string_view text) {
  const size_t bracket = text.find("(x");
  const auto tasks = parse_count(text.substr(0, bracket));
  if (!tasks) return std::nullopt;
  if (bracket == std::string_view::npos) return Nodes{*tasks, 1};
  if (text.back() != ')') return std::nullopt;
  const auto nodes = parse_count(text.substr(bracket + 2, text.size() - bracket - 3));
  return nodes ? std::optional(Nodes{*tasks, *nodes}) : std::nullopt;
}

}  // namespace

std::optional<uint64_t> parse_tasks_per_node(std::string_view text, std::optional<uint64_t> node) {
  std::optional<uint64_t> of_the_node;
  uint64_t largest = 0;
  uint64_t nodes_before = 0;
  for (text = strip(text); true;) {
    const size_t comma = text.find(',');
    const auto next = parse_nodes(text.substr(0, comma));
    if (!next) return std::nullopt;
    largest = std::max(largest, next->task_count);
    const bool is_here = node && *node >= nodes_before && *node - nodes_before < next->node_count;
    if (is_here) of_the_node = next->task_count;
    nodes_before += next->node_count;
    if (comma == std::string_view::npos) return of_the_node.value_or(largest);
    text.remove_prefix(comma + 1);
  }
}

uint64_t local_world_size(const Environment& environment) {
  for (const char* const name : {"LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE",
                                 "MV2_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"}) {
    const char* const text = environment(name);
    const auto size = text == nullptr ? std::nullopt : parse_count(text);
    if (size) return *size;
  }
  const char* const tasks = environment("SLURM_STEP_TASKS_PER_NODE");
  if (tasks == nullptr) return 1;
  const char* const node = environment("SLURM_NODEID");
  return parse_tasks_per_node(tasks, node == nullptr ? std::nullopt : parse_number(strip(node))).value_or(1);
}

uint64_t local_world_size() {
  return local_world_size([](const char* name) -> const char* { return std::getenv(name); });
}

}  // namespace torchoffload
