#include "core/planning/frontier.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <list>
#include <optional>
#include <queue>
#include <stdexcept>
#include <utility>

namespace torchoffload {

namespace {

constexpr uint64_t kPageBytes = 4096;
constexpr int64_t kForbidden = std::numeric_limits<int64_t>::max() / 4;
// The product of all times and all pages is the largest possible cost.
constexpr uint64_t kCostLimit = uint64_t{1} << 58;
constexpr uint64_t kMostBytes = uint64_t{1} << 48;
// The most cuts that are made for a block, times the number of its groups.
constexpr size_t kWork = size_t{1} << 18;

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

  // Cuts source from sink. Returns the cost, or nullopt if only a forbidden edge would do. is_on_source_side() then
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
    int64_t capacity = 0;  // the unused rest of it; the next edge, or the one before, is the way back
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

uint64_t pages(uint64_t nbytes) { return nbytes / kPageBytes + (nbytes % kPageBytes != 0 ? 1 : 0); }

// The prices of the time and of the bytes of a choice.
struct Price {
  int64_t of_tick = 1;
  int64_t of_page = 0;
};

class Frontier {
 public:
  Frontier(const std::vector<OperatorGroup>& groups, const std::vector<uint32_t>& draws)
      : groups_(groups), draws_(draws) {
    if (groups.size() > kMostGroups) throw std::invalid_argument("block_frontier: the block has too many operators");
    check_numbers(draws);
    for (const OperatorGroup& group : groups) {
      check_numbers(group.inputs);
      pages_ += pages(group.nbytes);
      if (group.nbytes > kMostBytes || pages_ > kMostBytes / kPageBytes)
        throw std::invalid_argument("block_frontier: the block makes more bytes than there are addresses");
    }
    while (count_ticks() + 1 > kCostLimit / (pages_ + 1)) ++ticks_shift_;
    ticks_ = count_ticks();
  }

  std::vector<BlockCorner> corners() {
    const std::optional<Corner> least_bytes = solve({1, static_cast<int64_t>(ticks_) + 1});
    const std::optional<Corner> least_time = solve({static_cast<int64_t>(pages_) + 1, 1});
    if (!least_bytes || !least_time) return {};
    std::list<Corner> found{*least_bytes};
    if (least_time->pages != least_bytes->pages) {
      found.push_back(*least_time);
      find_between(found);
    }
    std::vector<BlockCorner> corners;
    corners.reserve(found.size());
    for (Corner& corner : found) corners.push_back(std::move(corner.corner));
    return corners;
  }

 private:
  struct Corner {
    BlockCorner corner;
    int64_t pages = 0;
    int64_t ticks = 0;
  };

  void check_numbers(const std::vector<uint32_t>& numbers) const {
    const auto exists = [&](uint32_t group) { return group < groups_.size(); };
    if (!std::ranges::all_of(numbers, exists))
      throw std::invalid_argument("block_frontier: there is no group of that number");
  }

  uint32_t available(size_t group) const { return static_cast<uint32_t>(group); }
  uint32_t recomputed(size_t group) const { return static_cast<uint32_t>(groups_.size() + group); }

  uint64_t ticks_of(size_t group) const { return groups_[group].duration_ns >> ticks_shift_; }

  // All ticks; too large for any cost if their sum is.
  uint64_t count_ticks() const {
    uint64_t ticks = 0;
    for (size_t group = 0; group < groups_.size() && ticks <= kCostLimit; ++group)
      ticks += std::min(ticks_of(group), kCostLimit + 1);
    return ticks;
  }

  // Adds the corners between the two known ones, in order: first one between these, then one on each side of it, and so
  // on, as long as cuts are left.
  void find_between(std::list<Corner>& found) const {
    std::queue<std::pair<std::list<Corner>::iterator, std::list<Corner>::iterator>> gaps;
    gaps.emplace(found.begin(), std::prev(found.end()));
    for (size_t cuts_left = kWork / groups_.size(); cuts_left > 0 && !gaps.empty(); --cuts_left) {
      const auto [fewer, more] = gaps.front();
      gaps.pop();
      const std::optional<Corner> between = between_corners(*fewer, *more);
      if (!between) continue;
      const auto added = found.insert(more, *between);
      gaps.emplace(fewer, added);
      gaps.emplace(added, more);
    }
  }

  // A corner strictly below the line through two others; nullopt if there is none.
  std::optional<Corner> between_corners(const Corner& fewer, const Corner& more) const {
    const Price slope{more.pages - fewer.pages, fewer.ticks - more.ticks};
    const auto cost = [&](const Corner& corner) { return slope.of_tick * corner.ticks + slope.of_page * corner.pages; };
    std::optional<Corner> between = solve(slope);
    if (between && cost(*between) >= cost(fewer)) between.reset();
    return between;
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
  // ticks less pages, which may be negative. Such a gain is written as a cost of not computing the group again.
  void add_costs(MinimumCut& graph, size_t group, Price price) const {
    const auto source = static_cast<uint32_t>(2 * groups_.size());
    const uint32_t sink = source + 1;
    const int64_t to_keep =
        groups_[group].may_keep ? price.of_page * static_cast<int64_t>(pages(groups_[group].nbytes)) : 0;
    const int64_t to_recompute = price.of_tick * static_cast<int64_t>(ticks_of(group)) - to_keep;
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
        found.ticks += static_cast<int64_t>(ticks_of(group));
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
  uint32_t ticks_shift_ = 0;  // a tick is 2^ticks_shift_ nanoseconds
  uint64_t ticks_ = 0;
  uint64_t pages_ = 0;
};

}  // namespace

std::vector<BlockCorner> block_frontier(const std::vector<OperatorGroup>& groups, const std::vector<uint32_t>& draws) {
  return Frontier(groups, draws).corners();
}

}  // namespace torchoffload
