#include "core/planning/block_plans.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <stdexcept>
#include <utility>

namespace torchoffload {

namespace {

constexpr uint64_t kMostMemory = std::numeric_limits<uint64_t>::max() / 4;

// Sums of the same times in another order differ by no more than this part.
constexpr double kRounding = 1e-10;

// If records are asked for at the same moment, the one that was made last comes first, as in backward.
constexpr double kBetweenAsksS = 1e-9;

// The part of the offload window at the loss that is still held in a backward. Sources leave the window in the order of
// their copies, or as backward asks for them. So the sources of the last calls, which moved `behind_bytes`, take their
// part of it first.
uint64_t held_in_backward(uint64_t loss_window_bytes, uint64_t behind_bytes) {
  return loss_window_bytes - std::min(loss_window_bytes, behind_bytes);
}

std::vector<uint64_t> each_once(std::vector<uint64_t> sizes) {
  std::ranges::sort(sizes);
  const auto again = std::ranges::unique(sizes);
  sizes.erase(again.begin(), again.end());
  return sizes;
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

void check_kind(const BlockKind& kind, uint64_t most_bytes) {
  if (kind.ways.empty()) throw std::invalid_argument("a kind of block has no way to run");
  check_times({kind.forward_s, kind.backward_s});
  for (const BlockOutput& output : kind.outputs) {
    check_times({output.ready_s});
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

BlockPlans::BlockPlans(const StepOfBlocks& step) : step_(step) {
  check(step);
  for (uint32_t number = 0; number < step.kinds.size(); ++number) {
    const BlockKind& kind = step.kinds[number];
    output_bytes_.emplace_back();
    for (const BlockOutput& output : kind.outputs) output_bytes_.back().push_back(output.nbytes());
    kept_.emplace_back();
    for (const BlockWay& way : kind.ways) kept_.back().push_back(kept_in(number, way));
  }
  forward_s_ = step.head_s;
  backward_s_ = step.loss_s + step.end_s;
  for (size_t call = 0; call < step.calls.size(); ++call) {
    forward_s_ += kind_of(call).forward_s;
    backward_s_ += kind_of(call).backward_s;
    size_t most_records = 1;
    for (const BlockOutput& output : kind_of(call).outputs) most_records += output.sizes.size();
    between_asks_s_ += kBetweenAsksS * static_cast<double>(most_records);
  }
}

// ---- bytes ----

BlockPlans::Kept BlockPlans::kept_in(uint32_t number, const BlockWay& way) const {
  const BlockKind& kind = step_.kinds[number];
  const std::vector<uint64_t>& nbytes = output_bytes_[number];
  Kept kept{way.input_bytes, 0, {}, way.input_bytes > 0 && way.input_bytes >= step_.least_moved_bytes};
  uint64_t movable_bytes = kept.moves_input ? way.input_bytes : 0;
  for (const uint32_t output : way.kept) {
    kept.nbytes += nbytes[output];
    if (!kind.outputs[output].may_move || nbytes[output] == 0 || nbytes[output] < step_.least_moved_bytes) continue;
    kept.movable.push_back(output);
    movable_bytes += nbytes[output];
  }
  kept.unmovable_bytes = kept.nbytes - movable_bytes;
  std::ranges::stable_sort(kept.movable,
                           [&](uint32_t a, uint32_t b) { return kind.outputs[a].ready_s > kind.outputs[b].ready_s; });
  return kept;
}

std::optional<JointPlan> BlockPlans::placed(const std::vector<uint32_t>& ways, uint64_t memory_bytes,
                                            std::optional<uint64_t> window, Keeps keeps) const {
  JointPlan plan;
  plan.calls.resize(ways.size());
  const bool may_move = window.has_value();
  const uint64_t window_bytes = keeps == Keeps::LeavingRoom ? window.value_or(0) : 0;  // that room is left for
  uint64_t before_bytes = 0;  // bytes that the earlier calls keep in any case
  for (size_t call = 0; call < ways.size(); ++call) {
    const Kept& of = kept(call, ways[call]);
    before_bytes += may_move ? of.unmovable_bytes : of.nbytes;
  }
  // The bytes that may still be kept, by all moments behind this call; negative: the plan does not fit.
  int64_t room = left(memory_bytes, step_.loss_bytes, window_bytes);
  uint64_t behind_bytes = 0;  // bytes that this call moves, and those behind it
  for (size_t call = ways.size(); call-- > 0;) {
    const Kept& of = kept(call, ways[call]);
    before_bytes -= may_move ? of.unmovable_bytes : of.nbytes;
    room = std::min(room, left(memory_bytes, step_.calls[call].forward_bytes, window_bytes));
    const int64_t own_room = room - static_cast<int64_t>(before_bytes);
    const uint64_t stays_bytes = place_call(call, ways[call], may_move, keeps, own_room, plan.calls[call]);
    room -= static_cast<int64_t>(stays_bytes);
    behind_bytes += of.nbytes - stays_bytes;
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
  const Kept& of = kept(call, number);
  placed.way = number;
  if (!may_move || (!moves_all && static_cast<int64_t>(of.nbytes) <= room)) return of.nbytes;
  // The outputs that were made last are kept first: there is the least time to move them.
  uint64_t stays_bytes = of.unmovable_bytes;
  placed.moved.reserve(of.movable.size());
  for (const uint32_t output : of.movable) {
    const uint64_t nbytes = output_bytes(call)[output];
    const bool is_plain = kind_of(call).ways[number].is_plain;
    if (!is_plain && !moves_all && static_cast<int64_t>(stays_bytes + nbytes) <= room) {
      stays_bytes += nbytes;
    } else {
      placed.moved.push_back(output);
    }
  }
  placed.moves = of.moves_input || !placed.moved.empty();
  std::ranges::sort(placed.moved);
  return stays_bytes;
}

std::optional<CallPlan> BlockPlans::moving(size_t call, uint32_t number, size_t moved_count) const {
  const std::vector<uint32_t>& outputs = kept(call, number).movable;
  const bool is_plain = kind_of(call).ways[number].is_plain;
  const size_t count = is_plain ? outputs.size() : std::min(moved_count, outputs.size());
  CallPlan placed{number, {outputs.end() - static_cast<ptrdiff_t>(count), outputs.end()}, true};
  if (placed.moved.empty() && !kept(call, number).moves_input) return std::nullopt;
  std::ranges::sort(placed.moved);
  return placed;
}

uint64_t BlockPlans::kept_of(size_t call, const CallPlan& placed) const {
  const Kept& of = kept(call, placed.way);
  uint64_t nbytes = of.nbytes;
  for (const uint32_t output : placed.moved) nbytes -= output_bytes(call)[output];
  return placed.moves && of.moves_input ? nbytes - kind_of(call).ways[placed.way].input_bytes : nbytes;
}

bool BlockPlans::sum_up(JointPlan& plan, uint64_t memory_bytes) const {
  uint64_t kept = 0, all = 0;
  // The bytes that the calls before each one keep and move, and that all do.
  std::vector<uint64_t> before(plan.calls.size() + 1), moved(plan.calls.size() + 1);
  for (size_t call = 0; call < plan.calls.size(); ++call) {
    kept += kept_of(call, plan.calls[call]);
    all += kept_[step_.calls[call].kind][plan.calls[call].way].nbytes;
    before[call + 1] = kept;
    moved[call + 1] = all - kept;
  }
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
  std::vector<uint64_t> sizes;
  for (size_t call = 0; call < plan.calls.size(); ++call) add_sizes(call, plan.calls[call], sizes);
  return each_once(std::move(sizes));
}

std::vector<uint64_t> BlockPlans::movable_sizes(const std::vector<uint32_t>& ways) const {
  std::vector<uint64_t> sizes;
  std::vector<std::vector<bool>> seen(step_.kinds.size());  // by kind and way
  for (size_t call = 0; call < ways.size(); ++call) {
    std::vector<bool>& of_kind = seen[step_.calls[call].kind];
    of_kind.resize(kind_of(call).ways.size());
    if (of_kind[ways[call]]) continue;
    of_kind[ways[call]] = true;
    add_sizes(call, {ways[call], kept(call, ways[call]).movable, true}, sizes);
  }
  return each_once(std::move(sizes));
}

void BlockPlans::add_sizes(size_t call, const CallPlan& placed, std::vector<uint64_t>& sizes) const {
  const BlockKind& kind = kind_of(call);
  if (placed.moves && kept(call, placed.way).moves_input) sizes.push_back(kind.ways[placed.way].input_bytes);
  for (const uint32_t output : placed.moved)
    sizes.insert(sizes.end(), kind.outputs[output].sizes.begin(), kind.outputs[output].sizes.end());
}

// ---- times ----

// The copies of a plan, as a step that simulate() takes.
struct BlockPlans::Copies {
  StepShape shape;
  StepTimes times;
  Plan windows;
  std::vector<size_t> calls;     // by record
  std::vector<double> starts_s;  // by call

  void reserve(size_t count) {
    shape.last_save.reserve(count);
    shape.nbytes.reserve(count);
    times.records.reserve(count);
    calls.reserve(count);
    windows.kept.reserve(count);
    windows.offload_bytes.reserve(count);
    windows.reload_bytes_from.reserve(count);
  }
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
  size_t count = 1;  // at most
  for (size_t call = 0; call < plan.calls.size(); ++call) {
    count += 2;
    for (const uint32_t number : plan.calls[call].moved) count += kind_of(call).outputs[number].sizes.size();
  }
  copies.reserve(count);
  copies.starts_s.reserve(plan.calls.size());
  double clock_s = step_.head_s;
  for (size_t call = 0; call < plan.calls.size(); ++call) {
    const BlockKind& kind = kind_of(call);
    const CallPlan& placed = plan.calls[call];
    const BlockWay& way = kind.ways[placed.way];
    copies.change_window(call, plan, clock_s, plan.windows[call].offload_bytes);
    copies.starts_s.push_back(clock_s);
    if (placed.moves && kept(call, placed.way).moves_input)
      copies.add(call, plan, way.input_bytes, {clock_s, -1}, Reason::None);
    for (const uint32_t number : placed.moved) {
      const BlockOutput& output = kind.outputs[number];
      for (const uint64_t nbytes : output.sizes)
        copies.add(call, plan, nbytes, {clock_s + output.ready_s, -1}, Reason::None);
    }
    clock_s += kind.forward_s;
  }
  if (!plan.calls.empty()) copies.change_window(plan.calls.size() - 1, plan, clock_s, plan.loss_window_bytes);
  copies.times.compute_s = clock_s + step_.loss_s;  // until backward begins
  return copies;
}

double BlockPlans::least_s(const std::vector<uint32_t>& ways, uint64_t memory_bytes) const {
  double forward_s = forward_s_, backward_s = backward_s_;
  uint64_t nbytes = 0;
  for (size_t call = 0; call < ways.size(); ++call) {
    backward_s += kind_of(call).ways[ways[call]].recompute_s;
    nbytes += kept(call, ways[call]).nbytes;
  }
  // At the loss there is no room for so much of it, in a window or not: it goes out before, and comes back behind.
  const int64_t away_bytes = -left(memory_bytes, step_.loss_bytes, nbytes);
  if (step_.may_move && away_bytes > 0) {
    const auto link_bytes = static_cast<double>(away_bytes);
    forward_s = std::max(forward_s, step_.head_s + link_bytes / step_.link.out_bytes_per_s);
    const double reload_s = link_bytes / step_.link.in_bytes_per_s - between_asks_s_;
    backward_s = std::max(backward_s, step_.loss_s + reload_s + step_.end_s);
  }
  return (forward_s + backward_s) * (1 - kRounding);
}

double BlockPlans::link_bytes(size_t call, const CallPlan& placed) const {
  const BlockKind& kind = kind_of(call);
  const bool moves_input = placed.moves && kept(call, placed.way).moves_input;
  double sum = moves_input ? static_cast<double>(kind.ways[placed.way].input_bytes) : 0;
  for (const uint32_t output : placed.moved) sum += static_cast<double>(output_bytes(call)[output]);
  return sum;
}

// Copies follow each other, and as a call ends, at most its window is left on the way out. Records that are on their way
// at the loss are not reloaded. The records of a call and of the calls behind it are back before its backward ends, and
// before it begins unless the call is plain.
double BlockPlans::least_s(const JointPlan& plan) const {
  const LinkRates& link = step_.link;
  double clock_s = step_.head_s, link_s = 0;
  std::vector<double> moved(plan.calls.size());  // bytes on the link, by call
  const auto wait = [&](uint64_t window_bytes) {
    if (link_s > 0) clock_s = std::max(clock_s, link_s - static_cast<double>(window_bytes) / link.out_bytes_per_s);
  };
  for (size_t call = 0; call < plan.calls.size(); ++call) {
    moved[call] = link_bytes(call, plan.calls[call]);
    if (moved[call] > 0) link_s = std::max(link_s, clock_s) + moved[call] / link.out_bytes_per_s;
    clock_s += kind_of(call).forward_s;
    wait(plan.windows[call].offload_bytes);
  }
  wait(plan.loss_window_bytes);
  clock_s += step_.loss_s;
  link_s = clock_s - between_asks_s_;
  auto held_bytes = static_cast<double>(plan.loss_window_bytes);
  for (size_t call = plan.calls.size(); call-- > 0;) {
    const BlockWay& way = kind_of(call).ways[plan.calls[call].way];
    const double reloaded = std::max(0.0, moved[call] - held_bytes);
    held_bytes -= moved[call] - reloaded;
    if (reloaded > 0) link_s += reloaded / link.in_bytes_per_s;
    if (reloaded > 0 && !way.is_plain) clock_s = std::max(clock_s, link_s);
    clock_s += way.recompute_s + kind_of(call).backward_s;
    if (reloaded > 0) clock_s = std::max(clock_s, link_s);
  }
  return (clock_s + step_.end_s) * (1 - kRounding);
}

bool BlockPlans::time(JointPlan& plan, double most_s) const {
  if (most_s < std::numeric_limits<double>::infinity() && least_s(plan) > most_s) return false;
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
  if (shape.nbytes.empty()) return true;
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
  plan.step_s = simulate(shape, times, windows, nullptr, most_s).step_s;
  return std::isfinite(plan.step_s);
}

}  // namespace torchoffload
