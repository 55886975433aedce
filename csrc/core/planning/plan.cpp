#include "core/planning/plan.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace torchoffload {

namespace {

// The windows that are tried go up to so many times the largest record, or up to so many bytes if that is more.
constexpr uint64_t kMostWindowRecords = 4;
constexpr uint64_t kMostWindowBytes = 2048 * kMiB;

// Smaller copies do not reach the link's rate (one of 1 MiB reaches nine tenths of it). So they are the first records
// to be kept, within one kShareForSmall-th of the window.
constexpr uint64_t kSmallCopyBytes = kMiB;
constexpr uint64_t kShareForSmall = 8;

// A window is good enough if it reaches this share of the best efficiency of any window. The tried windows grow by
// kWindowStep.
constexpr double kSaturated = 0.99;
constexpr double kWindowStep = 1.25;

// These bound the work of largest_sum_within().
constexpr size_t kExactSizes = 64;
constexpr size_t kMostSums = 16'384;
constexpr size_t kMostWays = 1'000'000;
constexpr uint64_t kNearEnough = 1024;

uint64_t sum_of(const std::vector<uint64_t>& sizes) { return std::accumulate(sizes.begin(), sizes.end(), uint64_t{0}); }

}  // namespace

// ---- the choice of a sum ----

std::vector<bool> largest_sum_within(const std::vector<uint64_t>& sizes, uint64_t cap) {
  std::vector<bool> taken(sizes.size(), false);
  if (sum_of(sizes) <= cap) {
    taken.assign(sizes.size(), true);
    return taken;
  }
  // A sum that was reached: by adding the size of this number to the sum that stands at `from`. The first way to reach
  // a sum takes the earliest sizes.
  struct Reached {
    uint64_t sum;
    size_t size;
    size_t from;
  };
  const bool is_exact = sizes.size() <= kExactSizes;
  const size_t most_sums = is_exact ? kMostSums : std::clamp<size_t>(kMostWays / sizes.size(), 128, kMostSums);
  const uint64_t enough = is_exact ? cap : cap - cap / kNearEnough;
  std::vector<Reached> ways{{0, 0, 0}};
  std::vector<size_t> sums{0};  // by ascending sum
  size_t best = 0;
  std::vector<size_t> merged;
  for (size_t next = 0; next < sizes.size() && ways[best].sum < enough; ++next) {
    const uint64_t size = sizes[next];
    merged.clear();
    const size_t known_count = sums.size();
    size_t known = 0;
    for (size_t base = 0; base < known_count; ++base) {
      const uint64_t sum = ways[sums[base]].sum + size;
      if (sum > cap) break;
      while (known < known_count && ways[sums[known]].sum < sum) merged.push_back(sums[known++]);
      if (known < known_count && ways[sums[known]].sum == sum) continue;
      ways.push_back({sum, next, sums[base]});
      merged.push_back(ways.size() - 1);
      if (sum > ways[best].sum) best = ways.size() - 1;
    }
    while (known < known_count) merged.push_back(sums[known++]);
    if (merged.size() > most_sums) {  // of sums that lie close together only the largest is kept
      sums.clear();
      const uint64_t width = cap / (most_sums / 2) + 1;
      for (size_t place = 0; place < merged.size(); ++place) {
        const bool is_last_of_its_width =
            place + 1 == merged.size() || ways[merged[place]].sum / width != ways[merged[place + 1]].sum / width;
        if (is_last_of_its_width) sums.push_back(merged[place]);
      }
    } else {
      sums.swap(merged);
    }
  }
  for (size_t way = best; way != 0; way = ways[way].from) taken[ways[way].size] = true;
  return taken;
}

// ---- the plan ----

namespace {

// The number of times that a plan that holds too much is made smaller before it is discarded.
constexpr int kMostTries = 8;

// The most that a plan may hold; see Note [What a learned step may hold].
struct Bound {
  HeldBytes first;                    // held by the first step
  std::vector<uint64_t> after_bytes;  // by record: kept and in flight at most, once its operator has ended
  uint64_t reload_bytes = 0;          // the first step's reload window
};

Bound bound_of(const StepShape& shape, const StepTimes& times, const WindowOptions& options) {
  const Plan plan = first_plan(shape, options);
  Bound bound{simulate(shape, times, plan).held, {}, plan.reload_bytes};
  const OperatorSaves saves = operator_saves(shape);
  const uint64_t set_bytes = options.sets_offload() ? default_windows(options, shape.largest_bytes()).offload_bytes : 0;
  const auto saved_at = [&](size_t record) { return record < shape.count() ? saves.nbytes[record] : 0; };
  for (size_t record = 0; record < shape.count(); ++record) {
    const size_t next = saves.end[record];
    const size_t after_next = next < shape.count() ? saves.end[next] : next;
    const uint64_t room_bytes = std::min(bound.first.forward - saved_at(next),
                                         bound.first.forward_late - saved_at(next) - saved_at(after_next));
    bound.after_bytes.push_back(std::max(room_bytes, set_bytes));
  }
  return bound;
}

// By how much the kept records exceed the bound in forward.
uint64_t excess_bytes(const StepShape& shape, const std::vector<Reason>& kept, const Bound& bound) {
  uint64_t kept_bytes = 0;
  uint64_t excess_bytes = 0;
  for (size_t record = 0; record < kept.size(); ++record) {
    if (kept[record] != Reason::None) kept_bytes += shape.nbytes[record];
    excess_bytes = std::max(excess_bytes, kept_bytes - std::min(kept_bytes, bound.after_bytes[record]));
  }
  return excess_bytes;
}

// Keeps as needed_soon the records that backward asks for before they could be out and back, since moving them would
// save no memory. If the bound does not admit all of them, those at the tape's end come first: backward asks for them
// first.
std::vector<Reason> keep_what_returns_soon(const StepShape& shape, const StepTimes* times, const Bound& bound) {
  std::vector<Reason> kept(shape.count(), Reason::None);
  if (times == nullptr) return kept;
  uint64_t room_bytes = UINT64_MAX;
  for (size_t record = kept.size(); record-- > 0;) {
    room_bytes = std::min(room_bytes, bound.after_bytes[record]);
    const auto [ready_s, needed_s] = times->records[record];
    const auto link_bytes = static_cast<double>(shape.nbytes[record]);
    const double round_trip_s =
        link_bytes / times->link.out_bytes_per_s + link_bytes / times->link.in_bytes_per_s + times->link.latency_s;
    const bool is_soon = needed_s >= 0 && needed_s - ready_s < round_trip_s;
    if (!is_soon || shape.nbytes[record] > room_bytes) continue;
    room_bytes -= shape.nbytes[record];
    kept[record] = Reason::NeededSoon;
  }
  return kept;
}

uint64_t kept_bytes(const StepShape& shape, const std::vector<Reason>& kept) {
  uint64_t sum = 0;
  for (size_t record = 0; record < kept.size(); ++record) {
    if (kept[record] != Reason::None) sum += shape.nbytes[record];
  }
  return sum;
}

// Keeps up to `room_bytes` of the tape. First, as small_copy, the records too small for the link's rate; then, as
// tape_end, the tape's end, which backward would begin by reloading. `is_exact`: the records of the end are chosen so
// that they fill the room as far as possible.
void keep_within(std::vector<Reason>& kept, const StepShape& shape, uint64_t room_bytes, bool is_exact) {
  uint64_t small_bytes = room_bytes / kShareForSmall;
  for (size_t record = kept.size(); record-- > 0;) {
    const uint64_t nbytes = shape.nbytes[record];
    if (kept[record] != Reason::None || nbytes >= kSmallCopyBytes || nbytes > small_bytes) continue;
    small_bytes -= nbytes;
    room_bytes -= nbytes;
    kept[record] = Reason::SmallCopy;
  }
  std::vector<size_t> from_end;
  std::vector<uint64_t> sizes;
  uint64_t seen_bytes = 0;
  for (size_t record = kept.size(); record-- > 0 && (is_exact || seen_bytes <= room_bytes);) {
    if (kept[record] != Reason::None) continue;
    from_end.push_back(record);
    sizes.push_back(shape.nbytes[record]);
    seen_bytes += shape.nbytes[record];
  }
  if (!is_exact && seen_bytes > room_bytes) from_end.pop_back();
  const std::vector<bool> taken =
      is_exact ? largest_sum_within(sizes, room_bytes) : std::vector<bool>(from_end.size(), true);
  for (size_t place = 0; place < from_end.size(); ++place) {
    if (taken[place]) kept[from_end[place]] = Reason::TapeEnd;
  }
}

// Keeps the tape's end, with as much of `room_bytes` as the bound admits.
void keep_end(std::vector<Reason>& kept, const StepShape& shape, uint64_t room_bytes, const Bound& bound,
              bool is_exact) {
  const uint64_t soon_bytes = kept_bytes(shape, kept);
  for (int tries = 0; tries < kMostTries && room_bytes > 0; ++tries) {
    std::vector<Reason> with_end = kept;
    keep_within(with_end, shape, room_bytes, is_exact);
    const uint64_t excess = excess_bytes(shape, with_end, bound);
    if (excess == 0) {
      kept = std::move(with_end);
      return;
    }
    const uint64_t end_bytes = kept_bytes(shape, with_end) - soon_bytes;
    room_bytes = end_bytes - std::min(end_bytes, excess);
  }
}

// The input of all plans for one step.
struct Planning {
  const StepShape& shape;
  const StepTimes& times;
  const WindowOptions& options;
  const Bound& bound;
  const std::vector<Reason>& returns_soon;
};

// A plan whose windows have `window_bytes` beside the records kept as needed_soon. Windows that the user set are taken
// as they are.
Plan plan_for(const Planning& step, uint64_t window_bytes, bool keeps_end, bool is_exact) {
  const auto& [shape, times, options, bound, returns_soon] = step;
  const uint64_t soon_bytes = kept_bytes(shape, returns_soon);
  Plan plan{returns_soon, {}, options.reload_window_bytes.value_or(soon_bytes + window_bytes), window_bytes};
  if (keeps_end && plan.reload_bytes > soon_bytes)
    keep_end(plan.kept, shape, plan.reload_bytes - soon_bytes, bound, is_exact);
  if (!options.reload_window_bytes)
    plan.reload_bytes = std::min(plan.reload_bytes, std::max(bound.reload_bytes, kept_bytes(shape, plan.kept)));
  const uint64_t set_bytes = default_windows(options, shape.largest_bytes()).offload_bytes;
  for (const uint64_t bound_bytes : bound.after_bytes)
    plan.offload_bytes.push_back(options.sets_offload() ? set_bytes : std::min(soon_bytes + window_bytes, bound_bytes));
  return plan;
}

// Are the bytes that a plan holds within the bound? Bytes held because of windows that the user set are not compared.
bool is_within(const HeldBytes& held, const WindowOptions& options, const Bound& bound) {
  const bool is_forward_within = held.forward <= bound.first.forward && held.forward_late <= bound.first.forward_late;
  return (options.sets_offload() || is_forward_within) &&
         (options.reload_window_bytes || held.backward <= std::max(bound.first.forward, bound.first.backward));
}

// The smallest window that is good enough, among those whose plans are within the bound.
uint64_t choose_window(const Planning& step, bool keeps_end) {
  uint64_t largest_bytes = 0;
  for (size_t record = 0; record < step.shape.count(); ++record) {
    if (step.returns_soon[record] == Reason::None) largest_bytes = std::max(largest_bytes, step.shape.nbytes[record]);
  }
  const uint64_t most_bytes = std::max(kMostWindowRecords * largest_bytes, kMostWindowBytes);
  struct Tried {
    uint64_t window_bytes;
    double efficiency;
  };
  std::vector<Tried> tried;
  double best = 0;
  for (auto window = static_cast<double>(largest_bytes); window <= static_cast<double>(most_bytes);
       window *= kWindowStep) {
    const auto window_bytes = static_cast<uint64_t>(window);
    const PlannedStep planned =
        simulate(step.shape, step.times, plan_for(step, window_bytes, keeps_end, /*is_exact=*/false));
    if (is_within(planned.held, step.options, step.bound)) {
      const double efficiency = planned.step_s > 0 ? planned.bound_s / planned.step_s : 1;
      tried.push_back({window_bytes, efficiency});
      best = std::max(best, efficiency);
    }
    if (window < 1) break;
  }
  for (const auto& [window_bytes, efficiency] : tried) {
    if (efficiency >= kSaturated * best) return window_bytes;
  }
  return largest_bytes;
}

// The plan, with a reload window that is made smaller until the plan is within the bound; nullopt: no such window
// helps.
std::optional<Plan> within_bound(const Planning& step, Plan plan) {
  for (int tries = 0; tries < kMostTries; ++tries) {
    const HeldBytes held = simulate(step.shape, step.times, plan).held;
    if (is_within(held, step.options, step.bound)) return plan;
    const uint64_t most_bytes = std::max(step.bound.first.forward, step.bound.first.backward);
    if (step.options.reload_window_bytes || held.backward <= most_bytes) return std::nullopt;
    plan.reload_bytes -= std::min(plan.reload_bytes, held.backward - most_bytes);
  }
  return std::nullopt;
}

}  // namespace

Plan make_plan(const StepShape& shape, const StepTimes* times, const WindowOptions& options, bool keeps_end,
               std::optional<uint64_t> window_bytes) {
  const bool is_timed = times != nullptr && times->link.is_known();
  const bool is_least_memory = options.reload_window_bytes == 0;
  const StepTimes in_order = is_timed ? StepTimes{} : times_in_order(shape.count());
  const StepTimes& known = is_timed ? *times : in_order;
  const Bound bound = bound_of(shape, known, options);
  const auto returns_soon = keep_what_returns_soon(shape, is_timed && !is_least_memory ? times : nullptr, bound);
  const Planning step{shape, known, options, bound, returns_soon};
  if (!window_bytes)
    window_bytes = is_timed ? choose_window(step, keeps_end) : default_windows({}, shape.largest_bytes()).reload_bytes;
  if (auto plan = within_bound(step, plan_for(step, *window_bytes, keeps_end, /*is_exact=*/true)))
    return *std::move(plan);
  if (auto plan = within_bound(step, plan_for(step, *window_bytes, /*keeps_end=*/false, /*is_exact=*/true)))
    return *std::move(plan);
  return first_plan(shape, options);
}

}  // namespace torchoffload
