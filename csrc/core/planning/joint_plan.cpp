#include "core/planning/joint_plan.h"

#include <algorithm>
#include <limits>
#include <map>
#include <stdexcept>
#include <utility>

#include "core/planning/block_plans.h"

namespace torchoffload {

namespace {

// The sizes of windows that are tried, as multiples of the largest record that may move.
constexpr uint64_t kWindowSizes[] = {0, 1, 2, 4, 8, 16, 32};
// The number of smaller sizes that are tried: each such window has room for the largest record and one of that size.
constexpr size_t kSmallerSizes = 2;
constexpr uint64_t kWithSmaller = 3;  // the number under which the best plan with such windows is kept; no multiple
// The size of windows that is tried if room is not left for them everywhere.
constexpr uint64_t kWithoutRoom = 32;
// The number of tried counts of calls, of one kind, that go on to the next way.
constexpr size_t kCounts = 8;
// If nothing moves, amounts of kept bytes are told apart by this part of the room.
constexpr size_t kAmounts = 4096;
// The most changes that make the best plan with windows of each size better, step by step. The more calls there are,
// the longer it takes to look at one change.
constexpr size_t kChanges = 2000;
constexpr size_t kChangedCalls = 300'000;
constexpr double kWindowChanges[] = {0, 0.5, 0.67, 0.75, 0.9, 1.1, 1.25, 1.5, 2};
constexpr double kNoGainS = 1e-9;
// Copies slow down the kernels that run beside them a little, which no simulation includes. So if the times of plans
// differ by no more than this part, the plan that moves less is better.
constexpr double kNoDifference = 1e-3;
// The part by which a plan may take longer if it leaves the allocator room.
constexpr double kForRoom = 0.03;
// Memory that the windows of blocks leave free is tried in parts of the plan's memory.
constexpr uint64_t kSpareParts = 32;
constexpr uint64_t kUnlimited = std::numeric_limits<uint64_t>::max();

// A kind goes from one way to the next one.
struct Transition {
  uint32_t kind = 0;
  uint32_t to = 0;
  double saved_s_a_byte = 0;
};

std::vector<Transition> transitions_of(const StepOfBlocks& step) {
  std::vector<Transition> transitions;
  for (uint32_t number = 0; number < step.kinds.size(); ++number) {
    const BlockKind& kind = step.kinds[number];
    for (uint32_t to = 1; to < kind.ways.size(); ++to) {
      const BlockWay &before = kind.ways[to - 1], &after = kind.ways[to];
      const double nbytes =
          static_cast<double>(kept_bytes(kind, after)) - static_cast<double>(kept_bytes(kind, before));
      transitions.push_back({number, to, (before.recompute_s - after.recompute_s) / std::max(nbytes, 1.0)});
    }
  }
  // Within a kind the order is that of its ways, which a hull lists from the steepest on: a stable sort keeps it.
  std::ranges::stable_sort(
      transitions, [](const Transition& a, const Transition& b) { return a.saved_s_a_byte > b.saved_s_a_byte; });
  return transitions;
}

// The ways that take the least time if nothing moves. The search goes through the calls in the order of forward, and
// for each amount of bytes kept so far it remembers the best way to reach it. Empty: nothing fits.
std::vector<uint32_t> best_still(const StepOfBlocks& step, uint64_t memory_bytes) {
  struct State {
    uint64_t kept = 0;
    double recompute_s = 0;
    size_t from = 0;  // the state before
    uint32_t way = 0;
  };
  const size_t count = step.calls.size();
  const auto memory = static_cast<int64_t>(std::min(memory_bytes, kUnlimited / 4));
  // The most that may be kept before the first call, and behind each.
  std::vector<int64_t> most(count + 1, memory - static_cast<int64_t>(step.loss_bytes));
  for (size_t call = count; call-- > 0;) {
    most[call + 1] = std::min(most[call + 1], memory - static_cast<int64_t>(step.calls[call].forward_bytes));
    most[call] = std::min(most[call + 1], memory - static_cast<int64_t>(step.calls[call].backward_bytes));
  }
  if (most[0] < 0) return {};
  const uint64_t amount = static_cast<uint64_t>(most[count]) / kAmounts + 1;
  std::vector<std::vector<State>> states{{State{}}};
  for (size_t call = 0; call < count; ++call) {
    const BlockKind& kind = step.kinds[step.calls[call].kind];
    std::vector<uint64_t> nbytes;  // by way
    nbytes.reserve(kind.ways.size());
    for (const BlockWay& way : kind.ways) nbytes.push_back(kept_bytes(kind, way));
    std::vector<State> next;
    next.reserve(states.back().size() * nbytes.size());
    for (size_t from = 0; from < states.back().size(); ++from) {
      for (uint32_t way = 0; way < kind.ways.size(); ++way) {
        const State& before = states.back()[from];
        const uint64_t kept = before.kept + nbytes[way];
        if (static_cast<int64_t>(kept) > most[call + 1]) continue;
        next.push_back({kept, before.recompute_s + kind.ways[way].recompute_s, from, way});
      }
    }
    std::ranges::sort(next, [](const State& a, const State& b) {
      return a.kept != b.kept ? a.kept < b.kept : a.recompute_s < b.recompute_s;
    });
    std::vector<State> kept;
    for (const State& state : next) {
      if (!kept.empty() && kept.back().recompute_s <= state.recompute_s) continue;
      // Among nearly equal amounts the first and the best stay.
      if (kept.size() > 1 && state.kept / amount == kept[kept.size() - 2].kept / amount) kept.pop_back();
      kept.push_back(state);
    }
    if (kept.empty()) return {};
    states.push_back(std::move(kept));
  }
  std::vector<uint32_t> ways(count);
  size_t at = states.back().size() - 1;  // the most is kept, and so the least computed again
  for (size_t call = count; call-- > 0;) {
    ways[call] = states[call + 1][at].way;
    at = states[call + 1][at].from;
  }
  return ways;
}

class Search {
 public:
  Search(const StepOfBlocks& step, uint64_t memory_bytes)
      : step_(step), memory_bytes_(memory_bytes), plans_(step), calls_of_(step.kinds.size()) {
    for (size_t call = 0; call < step.calls.size(); ++call) calls_of_[step.calls[call].kind].push_back(call);
  }

  std::optional<JointPlan> best() {
    if (const std::vector<uint32_t> still = best_still(step_, memory_bytes_); still.size() == step_.calls.size())
      try_plan(still, std::nullopt);
    const bool is_stock = !best_.empty() && best_.begin()->second.recompute_s == 0;
    if (step_.may_move && !is_stock) {
      sweep();
      improve();
    }
    if (best_.empty()) return std::nullopt;
    double least_s = std::numeric_limits<double>::infinity();
    for (const auto& [windows, plan] : best_) least_s = std::min(least_s, plan.step_s);
    const double most_s = least_s * (1 + (step_.leaves_room ? kForRoom : kNoDifference));
    JointPlan* found = nullptr;
    for (auto& [windows, plan] : best_) {
      if (plan.step_s > most_s) continue;
      if (step_.leaves_room) {
        if (found != nullptr && least_blocks_bytes(plan) >= cost_of(*found)) continue;
        leave_room(plan, most_s);
      }
      if (found == nullptr || cost_of(plan) < cost_of(*found)) found = &plan;
    }
    if (!step_.leaves_room) leave_room(*found, most_s);
    return std::move(*found);
  }

 private:
  // The measure that chooses among plans that take nearly as long.
  uint64_t cost_of(const JointPlan& plan) const { return step_.leaves_room ? plan.blocks_bytes : plan.moved_bytes; }

  // The most on the device while a block runs, without any windows.
  uint64_t least_blocks_bytes(JointPlan plan) const {
    plan.window_bytes = 0;
    plans_.sum_up(plan, memory_bytes_);
    return plan.blocks_bytes;
  }

  // Makes the windows of blocks smaller, as far as the step takes no more than this time.
  void leave_room(JointPlan& plan, double most_s) const {
    if (plan.moved_bytes == 0) return;
    for (uint64_t JointPlan::* spare : {&JointPlan::forward_spare_bytes, &JointPlan::backward_spare_bytes}) {
      for (uint64_t part = kSpareParts; part > 0; --part) {
        JointPlan other = plan;
        other.*spare = plan.peak_bytes / kSpareParts * part;
        if (!plans_.sum_up(other, memory_bytes_)) continue;
        if (!plans_.time(other, most_s) || other.step_s > most_s) continue;
        plan = std::move(other);
        break;
      }
    }
  }

  // All kinds go from their ways of least bytes to those of least time, by the time that a byte saves.
  void sweep() {
    std::vector<uint32_t> ways(step_.calls.size(), 0);
    consider(ways);
    for (const Transition& transition : transitions_of(step_)) {
      const std::vector<size_t>& calls = calls_of_[transition.kind];
      if (calls.empty()) continue;
      const size_t count_step = std::max<size_t>(1, calls.size() / kCounts);
      for (size_t count = count_step; count < calls.size(); count += count_step) {
        for (const bool from_the_end : {false, true}) {
          std::vector<uint32_t> mixed = ways;
          for (size_t i = 0; i < count; ++i) mixed[calls[from_the_end ? calls.size() - 1 - i : i]] = transition.to;
          consider(mixed);
        }
      }
      for (const size_t call : calls) ways[call] = transition.to;
      consider(ways);
    }
  }

  void consider(const std::vector<uint32_t>& ways) {
    least_s_ = plans_.least_s(ways, memory_bytes_);
    // First with all kept values on the device: then a window is of no use.
    if (try_plan(ways, std::nullopt)) return;
    const std::vector<uint64_t> sizes = plans_.movable_sizes(ways);
    const uint64_t largest_bytes = sizes.empty() ? 0 : sizes.back();
    for (const uint64_t size : kWindowSizes) {
      if (size > 1 && size * largest_bytes > memory_bytes_ / 2) break;
      try_plan(ways, size * largest_bytes, size);
    }
    for (const auto keeps : {BlockPlans::Keeps::AllThatFits, BlockPlans::Keeps::Nothing})
      try_plan(ways, std::min(kWithoutRoom * largest_bytes, memory_bytes_ / 2), kWithoutRoom, keeps);
    // The largest record, and one of the next smaller sizes beside it.
    for (size_t place = sizes.size() - std::min(sizes.size(), kSmallerSizes + 1); place + 1 < sizes.size(); ++place)
      try_plan(ways, largest_bytes + sizes[place], kWithSmaller);
  }

  // `size`: of the window, as a multiple of the largest record.
  bool try_plan(const std::vector<uint32_t>& ways, std::optional<uint64_t> window_bytes, uint64_t size = 0,
                BlockPlans::Keeps keeps = BlockPlans::Keeps::LeavingRoom) {
    // Among plans that take as long, the one that came first stays.
    const auto known = best_.find({keeps, size});
    const double most_s =
        known == best_.end() ? std::numeric_limits<double>::infinity() : known->second.step_s - kNoGainS;
    if (window_bytes && least_s_ > most_s) return false;
    std::optional<JointPlan> plan = plans_.placed(ways, memory_bytes_, window_bytes, keeps);
    if (!plan) return false;
    if (!plans_.time(*plan, most_s) || plan->step_s >= most_s) return true;
    best_.insert_or_assign({keeps, size}, *std::move(plan));
    return true;
  }

  // Makes plans better, by changes of the windows and of single calls.
  void improve() {
    const size_t most = std::min(kChanges, kChangedCalls / ((best_.size() + 1) * (step_.calls.size() + 1)));
    for (auto& [windows, plan] : best_) {
      changes_left_ = most;
      changed_ = plan;
      while (change_windows(plan) | change_calls(plan) | swap_calls(plan)) {
      }
    }
  }

  // Takes the changed plan in the place of this one if it fits and takes less time, or as long and moves less.
  bool take_changed(JointPlan& plan) {
    if (changes_left_ == 0) return false;
    --changes_left_;
    if (!plans_.sum_up(changed_, memory_bytes_)) return false;
    const bool moves_less = changed_.moved_bytes < plan.moved_bytes;
    if (!plans_.time(changed_, moves_less ? plan.step_s : plan.step_s - kNoGainS)) return false;
    if (changed_.step_s >= plan.step_s - kNoGainS && !(moves_less && changed_.step_s <= plan.step_s)) return false;
    plan = changed_;
    return true;
  }

  bool change_windows(JointPlan& plan) {
    if (changes_left_ == 0) return false;
    bool is_better = false;
    const std::vector<uint64_t> sizes = plans_.moving_sizes(plan);
    const auto with = [&](double window_bytes) {
      changed_.window_bytes = static_cast<uint64_t>(window_bytes);
      is_better |= take_changed(plan);
    };
    for (const double change : kWindowChanges) with(static_cast<double>(plan.window_bytes) * change);
    for (const uint64_t size : sizes) with(static_cast<double>(size));
    if (sizes.size() > 1) with(static_cast<double>(sizes.back() + sizes[sizes.size() - 2]));
    return is_better;
  }

  bool change_calls(JointPlan& plan) {
    bool is_better = false;
    for (size_t call = 0; call < plan.calls.size(); ++call) {
      if (changes_left_ == 0) return is_better;
      for (CallPlan& option : options_of(call, plan.calls[call])) {
        changed_.window_bytes = plan.window_bytes;
        std::swap(changed_.calls[call], option);
        if (take_changed(plan)) {
          is_better = true;
        } else {
          std::swap(changed_.calls[call], option);
        }
      }
    }
    return is_better;
  }

  // The other plans of a call: to stay whole, or to move more or less, in the same way, in those beside it, or in those
  // that keep the least and the most.
  std::vector<CallPlan> options_of(size_t call, const CallPlan& now) const {
    std::vector<CallPlan> options;
    const std::vector<BlockWay>& ways = plans_.kind_of(call).ways;
    for (uint32_t way = 0; way < ways.size(); ++way) {
      if (way > 0 && way + 1 < now.way) continue;
      if (way > now.way + 1 && way + 1 < ways.size()) continue;
      if (way != now.way || now.moves) options.push_back({way, {}, false});
      for (const size_t moved : {size_t{0}, now.moved.size(), now.moved.size() + 1, ways[way].kept.size()}) {
        const std::optional<CallPlan> option = plans_.moving(call, way, moved);
        if (option && (way != now.way || !now.moves || option->moved != now.moved)) options.push_back(*option);
      }
    }
    if (!now.moves || ways[now.way].is_plain) return options;
    for (const uint32_t output : plans_.moving(call, now.way, ways[now.way].kept.size()).value_or(now).moved) {
      CallPlan other = now;
      if (std::erase(other.moved, output) == 0) other.moved.push_back(output);
      std::ranges::sort(other.moved);
      options.push_back(std::move(other));
    }
    return options;
  }

  // Exchanges the plans of two neighbouring calls of a kind, if these plans differ.
  bool swap_calls(JointPlan& plan) {
    bool is_better = false;
    for (const std::vector<size_t>& calls : calls_of_) {
      for (size_t i = 0; i + 1 < calls.size(); ++i) {
        if (changes_left_ == 0) return is_better;
        const CallPlan &one = plan.calls[calls[i]], &next = plan.calls[calls[i + 1]];
        if (one == next) continue;
        changed_.window_bytes = plan.window_bytes;
        std::swap(changed_.calls[calls[i]], changed_.calls[calls[i + 1]]);
        if (take_changed(plan)) {
          is_better = true;
        } else {
          std::swap(changed_.calls[calls[i]], changed_.calls[calls[i + 1]]);
        }
      }
    }
    return is_better;
  }

  const StepOfBlocks& step_;
  const uint64_t memory_bytes_;
  const BlockPlans plans_;
  std::vector<std::vector<size_t>> calls_of_;  // by kind
  // By the kind of room that is left for windows, and by their size.
  std::map<std::pair<BlockPlans::Keeps, uint64_t>, JointPlan> best_;
  double least_s_ = 0;  // of all plans with the ways that are considered
  JointPlan changed_;   // while a plan is made better: the same one with a change
  size_t changes_left_ = 0;
};

}  // namespace

StepOfBlocks with_times(StepOfBlocks step, const TimeFactors& factors) {
  const auto& [pace, again, rate] = factors;
  for (BlockKind& kind : step.kinds) {
    kind.forward_s *= pace;
    kind.backward_s *= pace;
    for (BlockOutput& output : kind.outputs) output.ready_s *= pace;
    for (BlockWay& way : kind.ways) way.recompute_s = way.recompute_s * pace * again;
  }
  step.head_s *= pace;
  step.loss_s *= pace;
  step.end_s *= pace;
  step.link.out_bytes_per_s *= rate;
  step.link.in_bytes_per_s *= rate;
  return step;
}

std::optional<JointPlan> plan_step(const StepOfBlocks& step, uint64_t memory_bytes) {
  return Search(step, memory_bytes).best();
}

void time_plan(const StepOfBlocks& step, JointPlan& plan) {
  const BlockPlans plans(step);
  if (plan.calls.size() != step.calls.size() || plan.windows.size() != step.calls.size())
    throw std::invalid_argument("the plan is for another number of calls");
  for (size_t call = 0; call < plan.calls.size(); ++call) {
    const BlockKind& kind = plans.kind_of(call);
    if (plan.calls[call].way >= kind.ways.size())
      throw std::invalid_argument("the plan names a way that does not exist");
    for (const uint32_t output : plan.calls[call].moved)
      if (output >= kind.outputs.size()) throw std::invalid_argument("the plan names an output that does not exist");
  }
  plans.time(plan);
}

JointPlan least_plan(const StepOfBlocks& step, uint64_t window_bytes) {
  const BlockPlans plans(step);
  const std::vector<uint32_t> ways(step.calls.size(), 0);
  std::optional<JointPlan> plan = plans.placed(ways, kUnlimited, std::nullopt, BlockPlans::Keeps::AllThatFits);
  if (step.may_move) {
    std::optional<JointPlan> moved = plans.placed(ways, kUnlimited, window_bytes, BlockPlans::Keeps::Nothing);
    // If both plans have the same peak, outside of the blocks, the one that moves still leaves more memory free inside of
    // them, and memory that is nearly full is fragmented.
    if (moved && (!plan || moved->peak_bytes <= plan->peak_bytes)) plan = std::move(moved);
  }
  JointPlan least = plan.value_or(JointPlan{});
  plans.time(least);
  return least;
}

}  // namespace torchoffload
