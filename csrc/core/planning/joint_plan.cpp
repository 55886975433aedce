#include "core/planning/joint_plan.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <utility>

namespace torchoffload {

namespace {

// The sizes of windows that are tried, as multiples of the largest record that moves.
constexpr uint64_t kWindowSizes[] = {0, 1, 2, 4, 8, 16, 32};
// Of the calls of a kind that go on to the next way this many different counts are tried.
constexpr size_t kCounts = 16;
constexpr uint64_t kUnlimited = std::numeric_limits<uint64_t>::max();

// A kind goes from one way to the next one.
struct Transition {
  uint32_t kind = 0;
  uint32_t to = 0;
  double saved_s_a_byte = 0;
};

uint64_t kept_bytes(const BlockKind& kind, const BlockWay& way) {
  uint64_t nbytes = way.input_bytes;
  for (const uint32_t output : way.kept) nbytes += kind.outputs.at(output).nbytes();
  return nbytes;
}

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
  // Of one kind the order is that of its ways, which a hull has from the steepest on: a stable sort keeps it.
  std::ranges::stable_sort(
      transitions, [](const Transition& a, const Transition& b) { return a.saved_s_a_byte > b.saved_s_a_byte; });
  return transitions;
}

class Planner {
 public:
  explicit Planner(const StepOfBlocks& step) : step_(step), calls_of_(step.kinds.size()) {
    for (const BlockKind& kind : step.kinds) {
      if (kind.ways.empty()) throw std::invalid_argument("a kind of block has no way to run");
    }
    for (size_t call = 0; call < step.calls.size(); ++call) {
      if (step.calls[call].kind >= step.kinds.size()) throw std::invalid_argument("there is no such kind of block");
      calls_of_[step.calls[call].kind].push_back(call);
    }
    for (const BlockKind& kind : step.kinds) {
      for (const BlockWay& way : kind.ways) kept_bytes(kind, way);  // throws where there is no such output
    }
    double left_s = step.loss_s;
    left_s_.resize(step.calls.size());
    for (size_t call = step.calls.size(); call-- > 0;) {
      left_s_[call] = left_s;
      left_s += step.kinds[step.calls[call].kind].backward_s;
    }
  }

  std::optional<JointPlan> best(uint64_t memory_bytes) {
    std::vector<uint32_t> ways(step_.calls.size(), 0);
    consider(ways, memory_bytes);
    for (const Transition& transition : transitions_of(step_)) {
      const std::vector<size_t>& calls = calls_of_[transition.kind];
      if (calls.empty()) continue;
      const size_t count_step = std::max<size_t>(1, calls.size() / kCounts);
      for (size_t count = count_step; count < calls.size(); count += count_step) {
        for (const bool from_the_end : {false, true}) {
          std::vector<uint32_t> mixed = ways;
          for (size_t i = 0; i < count; ++i) mixed[calls[from_the_end ? calls.size() - 1 - i : i]] = transition.to;
          consider(mixed, memory_bytes);
        }
      }
      for (const size_t call : calls) ways[call] = transition.to;
      consider(ways, memory_bytes);
    }
    return std::move(best_);
  }

  // Everything computed again, and moved or not.
  JointPlan least() {
    const std::vector<uint32_t> ways(step_.calls.size(), 0);
    JointPlan plan;
    place(ways, kUnlimited, std::nullopt, false, plan);
    if (step_.may_move) {
      JointPlan moved;
      place(ways, kUnlimited, 0, true, moved);
      if (moved.peak_bytes < plan.peak_bytes) plan = std::move(moved);
    }
    time(ways, plan);
    return plan;
  }

 private:
  void consider(const std::vector<uint32_t>& ways, uint64_t memory_bytes) {
    // First with all that is kept on the device, where a window is of no use.
    if (try_plan(ways, memory_bytes, std::nullopt) || !step_.may_move) return;
    const uint64_t largest_bytes = largest_of(ways);
    for (const uint64_t size : kWindowSizes) {
      if (size > 1 && size * largest_bytes > memory_bytes / 2) break;
      try_plan(ways, memory_bytes, size * largest_bytes);
    }
  }

  // Without a window nothing moves.
  bool try_plan(const std::vector<uint32_t>& ways, uint64_t memory_bytes, std::optional<uint64_t> window_bytes) {
    JointPlan plan;
    if (!place(ways, memory_bytes, window_bytes, false, plan) || plan.moved_bytes > step_.tier_bytes) return false;
    time(ways, plan);
    // A plan that moves nothing is preferred to one that takes as long.
    if (!best_ || plan.step_s < best_->step_s) best_ = std::move(plan);
    return true;
  }

  // The bytes of the largest record that may move.
  uint64_t largest_of(const std::vector<uint32_t>& ways) const {
    uint64_t largest = 0;
    for (size_t call = 0; call < ways.size(); ++call) {
      const BlockKind& kind = step_.kinds[step_.calls[call].kind];
      const BlockWay& way = kind.ways[ways[call]];
      largest = std::max(largest, way.input_bytes);
      for (const uint32_t output : way.kept) {
        for (const uint64_t nbytes : kind.outputs[output].sizes) largest = std::max(largest, nbytes);
      }
    }
    return largest;
  }

  // Decides what stays on the device and what moves, from the last call to the first. False: it does not fit.
  // `moves_all`: whatever can move does.
  bool place(const std::vector<uint32_t>& ways, uint64_t memory_bytes, std::optional<uint64_t> window, bool moves_all,
             JointPlan& plan) const {
    plan.calls.resize(ways.size());
    const uint64_t window_bytes = window.value_or(0);
    // What may still be kept, by all moments that are behind the call in question; negative: it does not fit.
    int64_t room = left(memory_bytes, step_.loss_bytes, window_bytes);
    for (size_t call = ways.size(); call-- > 0;) {
      room = std::min(room, left(memory_bytes, step_.calls[call].forward_bytes, window_bytes));
      const uint64_t kept = place_call(call, ways[call], window.has_value(), moves_all, room, plan);
      room -= static_cast<int64_t>(kept);
      if (room < 0) return false;
      plan.kept_bytes += kept;
      room = std::min(room, left(memory_bytes, step_.calls[call].backward_bytes, in_backward(call, window_bytes)));
      if (room < 0) return false;
    }
    plan.window_bytes = plan.moved_bytes > 0 ? window_bytes : 0;
    find_peak(plan);
    return true;
  }

  // What windows hold while the backward of a call runs.
  uint64_t in_backward(size_t call, uint64_t window_bytes) const {
    const double out_bytes = left_s_[call] * step_.link.out_bytes_per_s;
    const uint64_t going_out =
        out_bytes < static_cast<double>(window_bytes) ? window_bytes - static_cast<uint64_t>(out_bytes) : 0;
    return going_out + (call > 0 ? window_bytes : 0);
  }

  static int64_t left(uint64_t memory_bytes, uint64_t taken_bytes, uint64_t window_bytes) {
    const uint64_t memory = std::min(memory_bytes, kUnlimited / 4);
    return static_cast<int64_t>(memory) - static_cast<int64_t>(taken_bytes) - static_cast<int64_t>(window_bytes);
  }

  // Returns the bytes of the call that stay on the device.
  uint64_t place_call(size_t call, uint32_t number, bool may_move, bool moves_all, int64_t room,
                      JointPlan& plan) const {
    const BlockKind& kind = step_.kinds[step_.calls[call].kind];
    const BlockWay& way = kind.ways[number];
    CallPlan& placed = plan.calls[call];
    placed.way = number;
    const uint64_t all = kept_bytes(kind, way);
    if (!may_move || (!moves_all && static_cast<int64_t>(all) <= room)) return all;
    uint64_t kept = 0;
    // What was made last is kept first: there is the least time to move it.
    std::vector<uint32_t> latest_first = way.kept;
    std::ranges::stable_sort(latest_first,
                             [&](uint32_t a, uint32_t b) { return kind.outputs[a].ready_s > kind.outputs[b].ready_s; });
    for (const uint32_t output : latest_first) {
      const uint64_t nbytes = kind.outputs[output].nbytes();
      const bool fits = !way.is_plain && !moves_all && static_cast<int64_t>(kept + nbytes) <= room;
      if (nbytes < step_.least_moved_bytes || fits) {
        kept += nbytes;
      } else {
        placed.moved.push_back(output);
        plan.moved_bytes += nbytes;
      }
    }
    if (way.input_bytes < step_.least_moved_bytes) {
      kept += way.input_bytes;
    } else {
      plan.moved_bytes += way.input_bytes;
      placed.moves = true;
    }
    placed.moves = placed.moves || !placed.moved.empty();
    std::ranges::sort(placed.moved);
    return kept;
  }

  uint64_t kept_of(size_t call, const CallPlan& placed) const {
    const BlockKind& kind = step_.kinds[step_.calls[call].kind];
    const BlockWay& way = kind.ways[placed.way];
    uint64_t nbytes = kept_bytes(kind, way);
    for (const uint32_t output : placed.moved) nbytes -= kind.outputs[output].nbytes();
    if (placed.moves && way.input_bytes >= step_.least_moved_bytes) nbytes -= way.input_bytes;
    return nbytes;
  }

  void find_peak(JointPlan& plan) const {
    uint64_t kept = 0;
    for (size_t call = 0; call < step_.calls.size(); ++call) {
      plan.peak_bytes =
          std::max(plan.peak_bytes, step_.calls[call].backward_bytes + kept + in_backward(call, plan.window_bytes));
      kept += kept_of(call, plan.calls[call]);
      plan.peak_bytes = std::max(plan.peak_bytes, step_.calls[call].forward_bytes + kept + plan.window_bytes);
    }
    plan.peak_bytes = std::max(plan.peak_bytes, step_.loss_bytes + kept + plan.window_bytes);
    plan.loss_bytes = kept + std::min(plan.window_bytes, plan.moved_bytes);
  }

  // Adds the times of a plan, by a simulation of what moves.
  void time(const std::vector<uint32_t>& ways, JointPlan& plan) const {
    StepShape shape;
    StepTimes times;
    std::vector<size_t> call_of;  // by record
    double clock_s = step_.head_s;
    for (size_t call = 0; call < ways.size(); ++call) {
      const BlockKind& kind = step_.kinds[step_.calls[call].kind];
      const BlockWay& way = kind.ways[ways[call]];
      const CallPlan& placed = plan.calls[call];
      plan.recompute_s += way.recompute_s;
      if (placed.moves) {
        if (way.input_bytes >= step_.least_moved_bytes && way.input_bytes > 0) {
          shape.nbytes.push_back(way.input_bytes);
          times.records.push_back({clock_s, 0});
          call_of.push_back(call);
        }
        for (const uint32_t output : placed.moved) {
          for (const uint64_t nbytes : kind.outputs[output].sizes) {
            shape.nbytes.push_back(nbytes);
            times.records.push_back({clock_s + kind.outputs[output].ready_s, 0});
            call_of.push_back(call);
          }
        }
      }
      clock_s += kind.forward_s;
    }
    clock_s += step_.loss_s;
    std::vector<double> begins_s(ways.size());
    for (size_t call = ways.size(); call-- > 0;) {
      const BlockKind& kind = step_.kinds[step_.calls[call].kind];
      begins_s[call] = clock_s;
      clock_s += kind.ways[ways[call]].recompute_s + kind.backward_s;
    }
    times.compute_s = clock_s + step_.end_s;
    plan.step_s = times.compute_s;
    if (shape.nbytes.empty()) return;
    for (size_t record = 0; record < shape.count(); ++record) {
      const size_t call = call_of[record];
      const BlockKind& kind = step_.kinds[step_.calls[call].kind];
      double needed_s = begins_s[call];
      if (kind.ways[ways[call]].is_plain) {  // backward goes through the block as forward did, the other way round
        double start_s = step_.head_s;
        for (size_t before = 0; before < call; ++before) start_s += step_.kinds[step_.calls[before].kind].forward_s;
        const double part = kind.forward_s > 0 ? (times.records[record].ready_s - start_s) / kind.forward_s : 1;
        needed_s += (1 - std::clamp(part, 0.0, 1.0)) * kind.backward_s;
      }
      times.records[record].needed_s = needed_s;
      shape.last_save.push_back(record);
    }
    times.link = step_.link;
    Plan windows;
    windows.kept.assign(shape.count(), Reason::None);
    windows.offload_bytes.assign(shape.count(), plan.window_bytes);
    windows.reload_bytes = plan.window_bytes;
    plan.step_s = simulate(shape, times, windows).step_s;
  }

  const StepOfBlocks& step_;
  std::vector<std::vector<size_t>> calls_of_;  // by kind
  std::vector<double> left_s_;                 // by call: at least so long after forward does its backward begin
  std::optional<JointPlan> best_;
};

}  // namespace

std::optional<JointPlan> plan_step(const StepOfBlocks& step, uint64_t memory_bytes) {
  return Planner(step).best(memory_bytes);
}

JointPlan least_plan(const StepOfBlocks& step) { return Planner(step).least(); }

}  // namespace torchoffload
