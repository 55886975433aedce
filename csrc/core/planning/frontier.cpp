#include "core/planning/frontier.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <queue>
#include <stdexcept>
#include <utility>

namespace torchoffload {

namespace {

constexpr uint64_t kPageBytes = 4096;
constexpr int64_t kForbidden = std::numeric_limits<int64_t>::max() / 4;
// The product of all times and all pages is the largest cost there is.
constexpr uint64_t kCostLimit = uint64_t{1} << 58;
constexpr size_t kGroupLimit = size_t{1} << 12;

// A minimum cut by Dinic's algorithm. Costs are integers; kForbidden is never cut.
// Source: E. A. Dinic, Algorithm for solution of a problem of maximum flow in networks with power estimation, 1970.
class MinimumCut {
 public:
  explicit MinimumCut(size_t node_count) : edges_of_(node_count), level_(node_count), next_(node_count) {}

  void add(uint32_t from, uint32_t to, int64_t capacity) {
    edges_of_[from].push_back(static_cast<uint32_t>(edges_.size()));
    edges_.push_back({to, capacity});
    edges_of_[to].push_back(static_cast<uint32_t>(edges_.size()));
    edges_.push_back({from, 0});
  }

  // Cuts source from sink. Returns the cost, or nullopt where only a forbidden edge would do. is_on_source_side() then
  // tells the smallest set of nodes on the source's side.
  std::optional<int64_t> cut(uint32_t source, uint32_t sink) {
    int64_t cost = 0;
    while (find_levels(source, sink)) {
      std::ranges::fill(next_, 0);
      while (const int64_t flow = push(source, sink, kForbidden)) {
        cost += flow;
        if (cost >= kForbidden) return std::nullopt;
      }
    }
    return cost;
  }

  bool is_on_source_side(uint32_t node) const { return level_[node] >= 0; }

 private:
  struct Edge {
    uint32_t to = 0;
    int64_t capacity = 0;  // what is left of it; the next edge, or the one before, is the way back
  };

  bool find_levels(uint32_t source, uint32_t sink) {
    std::ranges::fill(level_, -1);
    level_[source] = 0;
    std::queue<uint32_t> reached({source});
    while (!reached.empty()) {
      const uint32_t from = reached.front();
      reached.pop();
      for (const uint32_t edge : edges_of_[from]) {
        const auto& [to, capacity] = edges_[edge];
        if (capacity == 0 || level_[to] >= 0) continue;
        level_[to] = level_[from] + 1;
        reached.push(to);
      }
    }
    return level_[sink] >= 0;
  }

  // A path to the sink is never longer than there are nodes, so the recursion is as deep as twice the block's groups.
  int64_t push(uint32_t from, uint32_t sink, int64_t limit) {
    if (from == sink) return limit;
    for (; next_[from] < edges_of_[from].size(); ++next_[from]) {
      const uint32_t edge = edges_of_[from][next_[from]];
      const auto [to, capacity] = edges_[edge];
      if (capacity == 0 || level_[to] != level_[from] + 1) continue;
      const int64_t flow = push(to, sink, std::min(limit, capacity));
      if (flow == 0) continue;
      if (capacity < kForbidden) edges_[edge].capacity -= flow;
      if (edges_[edge ^ 1].capacity < kForbidden) edges_[edge ^ 1].capacity += flow;
      return flow;
    }
    return 0;
  }

  std::vector<std::vector<uint32_t>> edges_of_;
  std::vector<Edge> edges_;
  std::vector<int32_t> level_;
  std::vector<size_t> next_;
};

uint64_t pages(uint64_t nbytes) { return (nbytes + kPageBytes - 1) / kPageBytes; }

// What the seconds and the bytes of a choice cost.
struct Price {
  int64_t of_ns = 1;
  int64_t of_page = 0;
};

class Frontier {
 public:
  Frontier(const std::vector<OperatorGroup>& groups, const std::vector<uint32_t>& draws)
      : groups_(groups), draws_(draws) {
    if (groups.size() > kGroupLimit) throw std::invalid_argument("block_frontier: the block has too many operators");
    check_numbers(draws);
    for (const OperatorGroup& group : groups) {
      check_numbers(group.inputs);
      ns_ += group.duration_ns;
      pages_ += pages(group.nbytes);
    }
    if (ns_ + 1 > kCostLimit / (pages_ + 1))
      throw std::invalid_argument("block_frontier: the block's times and bytes are too large");
  }

  std::vector<BlockCorner> corners() {
    const std::optional<Corner> least_bytes = solve({1, static_cast<int64_t>(ns_) + 1});
    const std::optional<Corner> least_time = solve({static_cast<int64_t>(pages_) + 1, 1});
    if (!least_bytes || !least_time) return {};
    found_.push_back(*least_bytes);
    if (least_time->pages != least_bytes->pages) {
      find_between(*least_bytes, *least_time);
      found_.push_back(*least_time);
    }
    std::vector<BlockCorner> corners;
    corners.reserve(found_.size());
    for (Corner& corner : found_) corners.push_back(std::move(corner.corner));
    return corners;
  }

 private:
  struct Corner {
    BlockCorner corner;
    int64_t pages = 0;
    int64_t ns() const { return static_cast<int64_t>(corner.recompute_ns); }
  };

  void check_numbers(const std::vector<uint32_t>& numbers) const {
    const auto exists = [&](uint32_t group) { return group < groups_.size(); };
    if (!std::ranges::all_of(numbers, exists))
      throw std::invalid_argument("block_frontier: there is no group of that number");
  }

  uint32_t available(size_t group) const { return static_cast<uint32_t>(group); }
  uint32_t recomputed(size_t group) const { return static_cast<uint32_t>(groups_.size() + group); }

  // Adds the corners strictly between two that are known, in order.
  void find_between(const Corner& fewer, const Corner& more) {
    const Price slope{more.pages - fewer.pages, fewer.ns() - more.ns()};
    const auto cost = [&](const Corner& corner) { return slope.of_ns * corner.ns() + slope.of_page * corner.pages; };
    const std::optional<Corner> between = solve(slope);
    if (!between || cost(*between) >= cost(fewer)) return;
    find_between(fewer, *between);
    found_.push_back(*between);
    find_between(*between, more);
  }

  // The best choice at a price; nullopt: there is none at any price. See Note [Cuts that price memory].
  std::optional<Corner> solve(Price price) const {
    const auto source = static_cast<uint32_t>(2 * groups_.size());
    const uint32_t sink = source + 1;
    MinimumCut graph(2 * groups_.size() + 2);
    for (size_t group = 0; group < groups_.size(); ++group) {
      const OperatorGroup& of = groups_[group];
      add_costs(graph, group, price);
      graph.add(recomputed(group), available(group), kForbidden);
      if (!of.may_keep) graph.add(available(group), recomputed(group), kForbidden);
      if (!of.may_recompute) graph.add(recomputed(group), sink, kForbidden);
      for (const uint32_t input : of.inputs) graph.add(recomputed(group), available(input), kForbidden);
      if (of.is_needed) graph.add(source, available(group), kForbidden);
    }
    for (size_t draw = 0; draw < draws_.size(); ++draw) {
      graph.add(source, available(draws_[draw]), kForbidden);
      if (draw > 0) graph.add(recomputed(draws_[draw]), recomputed(draws_[draw - 1]), kForbidden);
    }
    if (!graph.cut(source, sink)) return std::nullopt;
    return corner_of(graph);
  }

  // A group that is kept costs its bytes, one that is computed again its time: as costs of a and r, pages and then
  // nanoseconds less pages, which may be negative. Such a gain is written as a cost of not computing the group again.
  void add_costs(MinimumCut& graph, size_t group, Price price) const {
    const auto source = static_cast<uint32_t>(2 * groups_.size());
    const uint32_t sink = source + 1;
    const int64_t to_keep =
        groups_[group].may_keep ? price.of_page * static_cast<int64_t>(pages(groups_[group].nbytes)) : 0;
    const int64_t to_recompute = price.of_ns * static_cast<int64_t>(groups_[group].duration_ns) - to_keep;
    if (to_keep > 0) graph.add(available(group), sink, to_keep);
    if (to_recompute > 0) graph.add(recomputed(group), sink, to_recompute);
    if (to_recompute < 0) graph.add(source, recomputed(group), -to_recompute);
  }

  Corner corner_of(const MinimumCut& graph) const {
    Corner found;
    for (size_t group = 0; group < groups_.size(); ++group) {
      Choice choice = Choice::Skipped;
      if (graph.is_on_source_side(recomputed(group))) {
        choice = Choice::Recomputed;
        found.corner.recompute_ns += groups_[group].duration_ns;
      } else if (graph.is_on_source_side(available(group))) {
        choice = Choice::Kept;
        found.corner.kept_bytes += groups_[group].nbytes;
        found.pages += static_cast<int64_t>(pages(groups_[group].nbytes));
      }
      found.corner.choices.push_back(choice);
    }
    return found;
  }

  const std::vector<OperatorGroup>& groups_;
  const std::vector<uint32_t>& draws_;
  uint64_t ns_ = 0;
  uint64_t pages_ = 0;
  std::vector<Corner> found_;
};

}  // namespace

std::vector<BlockCorner> block_frontier(const std::vector<OperatorGroup>& groups, const std::vector<uint32_t>& draws) {
  return Frontier(groups, draws).corners();
}

}  // namespace torchoffload
