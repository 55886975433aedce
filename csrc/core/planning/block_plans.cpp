#include "core/planning/block_plans.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <set>
#include <stdexcept>
#include <utility>

namespace torchoffload {

namespace {

constexpr uint64_t kMostMemory = std::numeric_limits<uint64_t>::max() / 4;

// If records are asked for at the same moment, the one that was made last comes first, as in backward.
constexpr double kBetweenAsksS = 1e-9;

// The part of the offload window at the loss that is still held in a backward. Sources leave the window in the order of
// their copies, or as backward asks for them. So the sources of the last calls, which moved `behind_bytes`, take their
// part of it first.
uint64_t held_in_backward(uint64_t loss_window_bytes, uint64_t behind_bytes) {
  return loss_window_bytes - std::min(loss_window_bytes, behind_bytes);
}

int64_t left(uint64_t memory_bytes, uint64_t taken_bytes, uint64_t window_bytes) {
  const uint64_t memory = std::min(memory_bytes, kMostMemory);
  return static_cast<int64_t>(memory) - static_cast<int64_t>(taken_bytes) - static_cast<int64_t>(window_bytes);
}

}  // namespace

namespace {

void check_times(std::initializer_list<double> times_s) {
  const auto is_time = [](double time_s) { return std::isfinite(time_s) && time_s >= 0; };
  if (!std::ranges::all_of(times_s, is_time))
    throw std::invalid_argument("the times of a step must be finite and not negative");
}

// `most_bytes`: the most that each call may take, so that the sums over all calls do not overflow.
void check_bytes(uint64_t nbytes, uint64_t most_bytes) {
  if (nbytes > most_bytes) throw std::invalid_argument("the bytes of a step are too many to be added up");
}

void check_share(double link_share) {
  if (!(link_share > 0 && link_share <= 1)) throw std::invalid_argument("shares of the link must be in (0, 1]");
}

void check_kind(const BlockKind& kind, uint64_t most_bytes) {
  if (kind.ways.empty()) throw std::invalid_argument("a kind of block has no way to run");
  check_times({kind.forward_s, kind.backward_s});
  check_share(kind.input_link_share);
  for (const BlockOutput& output : kind.outputs) {
    check_times({output.ready_s});
    check_share(output.link_share);
    for (const uint64_t nbytes : output.sizes) check_bytes(nbytes, most_bytes / output.sizes.size());
  }
  for (const BlockWay& way : kind.ways) {
    check_times({way.recompute_s});
    check_bytes(way.input_bytes, most_bytes);
    uint64_t nbytes = way.input_bytes;
    for (const uint32_t output : way.kept) {
      if (output >= kind.outputs.size()) throw std::invalid_argument("there is no such output of a block");
      nbytes += kind.outputs[output].nbytes();
      check_bytes(nbytes, most_bytes);
    }
  }
}

void check(const StepOfBlocks& step) {
  const uint64_t most_bytes = kMostMemory / 4 / (step.calls.size() + 1);
  for (const BlockKind& kind : step.kinds) check_kind(kind, most_bytes);
  for (const BlockCall& call : step.calls) {
    if (call.kind >= step.kinds.size()) throw std::invalid_argument("there is no such kind of block");
    check_bytes(call.forward_bytes, most_bytes);
    check_bytes(call.backward_bytes, most_bytes);
  }
  check_bytes(step.loss_bytes, most_bytes);
  check_times({step.head_s, step.loss_s, step.end_s, step.link.latency_s});
  if (step.may_move && !step.link.is_known()) throw std::invalid_argument("the rates of the link must be above 0");
}

}  // namespace

uint64_t kept_bytes(const BlockKind& kind, const BlockWay& way) {
  uint64_t nbytes = way.input_bytes;
  for (const uint32_t output : way.kept) nbytes += kind.outputs.at(output).nbytes();
  return nbytes;
}

BlockPlans::BlockPlans(const StepOfBlocks& step) : step_(step) { check(step); }

// ---- bytes ----

std::vector<uint32_t> BlockPlans::movable(const BlockKind& kind, const BlockWay& way) const {
  std::vector<uint32_t> outputs;
  for (const uint32_t number : way.kept) {
    const BlockOutput& output = kind.outputs[number];
    if (output.may_move && output.nbytes() > 0 && output.nbytes() >= step_.least_moved_bytes) outputs.push_back(number);
  }
  std::ranges::stable_sort(outputs,
                           [&](uint32_t a, uint32_t b) { return kind.outputs[a].ready_s > kind.outputs[b].ready_s; });
  return outputs;
}

bool BlockPlans::moves_input(const BlockWay& way) const {
  return way.input_bytes > 0 && way.input_bytes >= step_.least_moved_bytes;
}

uint64_t BlockPlans::unmovable_bytes(const BlockKind& kind, const BlockWay& way) const {
  uint64_t nbytes = kept_bytes(kind, way);
  for (const uint32_t output : movable(kind, way)) nbytes -= kind.outputs[output].nbytes();
  return moves_input(way) ? nbytes - way.input_bytes : nbytes;
}

std::optional<JointPlan> BlockPlans::placed(const std::vector<uint32_t>& ways, uint64_t memory_bytes,
                                            std::optional<uint64_t> window, Keeps keeps) const {
  JointPlan plan;
  plan.calls.resize(ways.size());
  const bool may_move = window.has_value();
  const uint64_t window_bytes = keeps == Keeps::LeavingRoom ? window.value_or(0) : 0;  // that room is left for
  uint64_t before_bytes = 0;  // bytes that the earlier calls keep in any case
  for (size_t call = 0; call < ways.size(); ++call) {
    const BlockWay& way = kind_of(call).ways[ways[call]];
    before_bytes += may_move ? unmovable_bytes(kind_of(call), way) : kept_bytes(kind_of(call), way);
  }
  // The bytes that may still be kept, by all moments behind this call; negative: the plan does not fit.
  int64_t room = left(memory_bytes, step_.loss_bytes, window_bytes);
  uint64_t behind_bytes = 0;  // bytes that this call moves, and those behind it
  for (size_t call = ways.size(); call-- > 0;) {
    const BlockWay& way = kind_of(call).ways[ways[call]];
    before_bytes -= may_move ? unmovable_bytes(kind_of(call), way) : kept_bytes(kind_of(call), way);
    room = std::min(room, left(memory_bytes, step_.calls[call].forward_bytes, window_bytes));
    const int64_t own_room = room - static_cast<int64_t>(before_bytes);
    const uint64_t kept = place_call(call, ways[call], may_move, keeps, own_room, plan.calls[call]);
    room -= static_cast<int64_t>(kept);
    behind_bytes += kept_bytes(kind_of(call), way) - kept;
    const uint64_t ahead_bytes = call > 0 ? window_bytes : 0;
    const uint64_t held_bytes = held_in_backward(window_bytes, behind_bytes) + ahead_bytes;
    room = std::min(room, left(memory_bytes, step_.calls[call].backward_bytes, held_bytes));
    if (room < 0) return std::nullopt;
  }
  plan.window_bytes = window.value_or(0);
  return sum_up(plan, memory_bytes) ? std::optional(std::move(plan)) : std::nullopt;
}

uint64_t BlockPlans::place_call(size_t call, uint32_t number, bool may_move, Keeps keeps, int64_t room,
                                CallPlan& placed) const {
  const bool moves_all = keeps == Keeps::Nothing;
  const BlockKind& kind = kind_of(call);
  const BlockWay& way = kind.ways[number];
  placed.way = number;
  const uint64_t all_bytes = kept_bytes(kind, way);
  if (!may_move || (!moves_all && static_cast<int64_t>(all_bytes) <= room)) return all_bytes;
  // The outputs that were made last are kept first: there is the least time to move them.
  uint64_t kept = unmovable_bytes(kind, way);
  for (const uint32_t output : movable(kind, way)) {
    const uint64_t nbytes = kind.outputs[output].nbytes();
    if (!way.is_plain && !moves_all && static_cast<int64_t>(kept + nbytes) <= room) {
      kept += nbytes;
    } else {
      placed.moved.push_back(output);
    }
  }
  placed.moves = moves_input(way) || !placed.moved.empty();
  std::ranges::sort(placed.moved);
  return kept;
}

std::optional<CallPlan> BlockPlans::moving(size_t call, uint32_t number, size_t moved_count) const {
  const BlockKind& kind = kind_of(call);
  const BlockWay& way = kind.ways[number];
  const std::vector<uint32_t> outputs = movable(kind, way);
  const size_t count = way.is_plain ? outputs.size() : std::min(moved_count, outputs.size());
  CallPlan placed{number, {outputs.end() - static_cast<ptrdiff_t>(count), outputs.end()}, true};
  if (placed.moved.empty() && !moves_input(way)) return std::nullopt;
  std::ranges::sort(placed.moved);
  return placed;
}

uint64_t BlockPlans::kept_of(size_t call, const CallPlan& placed) const {
  const BlockKind& kind = kind_of(call);
  const BlockWay& way = kind.ways[placed.way];
  uint64_t nbytes = kept_bytes(kind, way);
  for (const uint32_t output : placed.moved) nbytes -= kind.outputs[output].nbytes();
  return placed.moves && moves_input(way) ? nbytes - way.input_bytes : nbytes;
}

bool BlockPlans::sum_up(JointPlan& plan, uint64_t memory_bytes) const {
  uint64_t kept = 0, all = 0;
  std::vector<uint64_t> before, moved{0};  // bytes that the calls before each one keep and move, and that all do
  for (size_t call = 0; call < plan.calls.size(); ++call) {
    before.push_back(kept);
    kept += kept_of(call, plan.calls[call]);
    all += kept_bytes(kind_of(call), kind_of(call).ways[plan.calls[call].way]);
    moved.push_back(all - kept);
  }
  before.push_back(kept);
  plan.kept_bytes = kept;
  plan.moved_bytes = all - kept;
  if (plan.moved_bytes == 0) plan.window_bytes = 0;
  if (!set_windows(plan, before, moved, memory_bytes) || plan.moved_bytes > step_.tier_bytes) return false;
  plan.loss_bytes = kept + plan.loss_window_bytes;
  plan.blocks_bytes = 0;
  for (size_t call = 0; call < plan.calls.size(); ++call) {
    const BlockCall& taken = step_.calls[call];
    const CallWindows& windows = plan.windows[call];
    const uint64_t in_backward =
        windows.ahead_bytes + held_in_backward(plan.loss_window_bytes, plan.moved_bytes - moved[call]);
    plan.blocks_bytes = std::max({plan.blocks_bytes, taken.forward_bytes + before[call + 1] + windows.offload_bytes,
                                  taken.backward_bytes + before[call] + in_backward});
  }
  plan.peak_bytes = std::max(step_.loss_bytes + plan.loss_bytes, plan.blocks_bytes);
  return true;
}

bool BlockPlans::set_windows(JointPlan& plan, const std::vector<uint64_t>& before, const std::vector<uint64_t>& moved,
                             uint64_t memory_bytes) const {
  const size_t count = plan.calls.size();
  const uint64_t window_bytes = std::min(plan.window_bytes, kMostMemory);
  plan.windows.assign(count, {});
  const auto window_within = [&](uint64_t moved_bytes, int64_t room) {
    return std::min({window_bytes, moved_bytes, static_cast<uint64_t>(room)});
  };
  const auto without = [](int64_t room, uint64_t spare_bytes) {
    return std::max<int64_t>(0, room - static_cast<int64_t>(std::min(spare_bytes, kMostMemory)));
  };
  // At the loss there is also room for the part of the window that is held in the backwards behind it.
  int64_t at_loss = left(memory_bytes, step_.loss_bytes, before[count]);
  for (size_t call = 0; call < count; ++call) {
    const int64_t in_forward = left(memory_bytes, step_.calls[call].forward_bytes, before[call + 1]);
    const int64_t in_backward = left(memory_bytes, step_.calls[call].backward_bytes, before[call]);
    if (in_forward < 0 || in_backward < 0) return false;
    plan.windows[call].offload_bytes = window_within(moved[call + 1], without(in_forward, plan.forward_spare_bytes));
    at_loss = std::min(at_loss, in_backward + static_cast<int64_t>(moved[count] - moved[call]));
  }
  if (at_loss < 0) return false;
  plan.loss_window_bytes = window_within(moved[count], at_loss);
  int64_t most = kMostMemory;  // that leaves room in the backwards that follow
  for (size_t call = 0; call < count; ++call) {
    const uint64_t held_bytes = held_in_backward(plan.loss_window_bytes, moved[count] - moved[call]);
    const int64_t room = without(left(memory_bytes, step_.calls[call].backward_bytes, before[call] + held_bytes),
                                 plan.backward_spare_bytes);
    if (static_cast<int64_t>(moved[call]) > room) most = std::min(most, room);
    // The bytes that the call itself asks for count in the window until they are there, and are part of the measured
    // memory.
    plan.windows[call].reload_bytes = window_within(moved[call + 1], most);
    plan.windows[call].ahead_bytes = window_within(moved[call], most);
  }
  return true;
}

std::vector<uint64_t> BlockPlans::moving_sizes(const JointPlan& plan) const {
  std::set<uint64_t> sizes;
  for (size_t call = 0; call < plan.calls.size(); ++call) {
    const CallPlan& placed = plan.calls[call];
    const BlockWay& way = kind_of(call).ways[placed.way];
    if (placed.moves && moves_input(way)) sizes.insert(way.input_bytes);
    for (const uint32_t output : placed.moved)
      sizes.insert(kind_of(call).outputs[output].sizes.begin(), kind_of(call).outputs[output].sizes.end());
  }
  return {sizes.begin(), sizes.end()};
}

std::vector<uint64_t> BlockPlans::movable_sizes(const std::vector<uint32_t>& ways) const {
  std::set<std::pair<uint32_t, uint32_t>> seen;  // kinds and ways
  std::set<uint64_t> sizes;
  for (size_t call = 0; call < ways.size(); ++call) {
    if (!seen.emplace(step_.calls[call].kind, ways[call]).second) continue;
    const BlockWay& way = kind_of(call).ways[ways[call]];
    if (moves_input(way)) sizes.insert(way.input_bytes);
    for (const uint32_t output : movable(kind_of(call), way)) {
      const std::vector<uint64_t>& records = kind_of(call).outputs[output].sizes;
      sizes.insert(records.begin(), records.end());
    }
  }
  return {sizes.begin(), sizes.end()};
}

// ---- times ----

// The copies of a plan, as a step that simulate() takes.
struct BlockPlans::Copies {
  StepShape shape;
  StepTimes times;
  Plan windows;
  std::vector<size_t> calls;     // by record
  std::vector<double> starts_s;  // by call

  void add(size_t call, const JointPlan& plan, uint64_t nbytes, StepTimes::Record record, Reason why) {
    shape.last_save.push_back(shape.nbytes.size());
    shape.nbytes.push_back(nbytes);
    times.records.push_back(record);
    calls.push_back(call);
    windows.kept.push_back(why);
    windows.offload_bytes.push_back(plan.windows[call].offload_bytes);
    windows.reload_bytes_from.push_back(plan.windows[call].reload_bytes);
  }
  // A window that becomes smaller is waited for. To the simulation that is a record of 0 bytes that stays.
  void change_window(size_t call, const JointPlan& plan, double at_s, uint64_t window_bytes) {
    if (windows.offload_bytes.empty() || windows.offload_bytes.back() <= window_bytes) return;
    add(call, plan, 0, {at_s}, Reason::NeededSoon);
    windows.offload_bytes.back() = window_bytes;
  }
};

BlockPlans::Copies BlockPlans::copies_of(const JointPlan& plan) const {
  Copies copies;
  double clock_s = step_.head_s;
  for (size_t call = 0; call < plan.calls.size(); ++call) {
    const BlockKind& kind = kind_of(call);
    const CallPlan& placed = plan.calls[call];
    const BlockWay& way = kind.ways[placed.way];
    copies.change_window(call, plan, clock_s, plan.windows[call].offload_bytes);
    copies.starts_s.push_back(clock_s);
    if (placed.moves && moves_input(way))
      copies.add(call, plan, way.input_bytes, {clock_s, -1, kind.input_link_share}, Reason::None);
    for (const uint32_t number : placed.moved) {
      const BlockOutput& output = kind.outputs[number];
      for (const uint64_t nbytes : output.sizes)
        copies.add(call, plan, nbytes, {clock_s + output.ready_s, -1, output.link_share}, Reason::None);
    }
    clock_s += kind.forward_s;
  }
  if (!plan.calls.empty()) copies.change_window(plan.calls.size() - 1, plan, clock_s, plan.loss_window_bytes);
  copies.times.compute_s = clock_s + step_.loss_s;  // until backward begins
  return copies;
}

void BlockPlans::time(JointPlan& plan) const {
  const size_t count = plan.calls.size();
  auto [shape, times, windows, calls, starts_s] = copies_of(plan);
  std::vector<double> begins_s(count);
  plan.recompute_s = 0;
  for (size_t call = count; call-- > 0;) {
    begins_s[call] = times.compute_s;
    const double recompute_s = kind_of(call).ways[plan.calls[call].way].recompute_s;
    plan.recompute_s += recompute_s;
    times.compute_s += recompute_s + kind_of(call).backward_s;
  }
  times.compute_s += step_.end_s;
  plan.step_s = times.compute_s;
  if (shape.nbytes.empty()) return;
  for (size_t record = 0; record < shape.count(); ++record) {
    if (windows.kept[record] != Reason::None) continue;
    const size_t call = calls[record];
    const BlockKind& kind = kind_of(call);
    double needed_s = begins_s[call];
    if (kind.ways[plan.calls[call].way].is_plain) {  // backward goes through it as forward did, the other way round
      const double part = kind.forward_s > 0 ? (times.records[record].ready_s - starts_s[call]) / kind.forward_s : 1;
      needed_s += (1 - std::clamp(part, 0.0, 1.0)) * kind.backward_s;
    }
    times.records[record].needed_s = needed_s - kBetweenAsksS * static_cast<double>(record);
  }
  times.link = step_.link;
  windows.reload_bytes = plan.window_bytes;
  plan.step_s = simulate(shape, times, windows).step_s;
}

}  // namespace torchoffload
