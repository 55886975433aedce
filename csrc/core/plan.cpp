#include "core/plan.h"

#include <algorithm>
#include <deque>
#include <numeric>
#include <utility>

namespace torchoffload {

namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;

// A window of a few of the largest record keeps the link busy while one of them is waited for; above a GiB more than
// one brings nothing that memory is worth.
constexpr uint64_t kDefaultWindowRecords = 4;
constexpr uint64_t kDefaultWindowCapBytes = 1024 * kMiB;

// Copies below it stay well under the link's rate (1 MiB: nine tenths of it): they are the first to be kept, out of
// this share of the window.
constexpr uint64_t kSmallCopyBytes = kMiB;
constexpr uint64_t kShareForSmall = 8;

// Of the best use of compute and link that any window reaches, a chosen one may miss this much.
constexpr double kSaturated = 0.99;
constexpr double kWindowStep = 1.25;

// largest_sum_within: what bounds its work.
constexpr size_t kExactSizes = 64;
constexpr size_t kMostSums = 16'384;
constexpr size_t kMostWays = 1'000'000;
constexpr uint64_t kNearEnough = 1024;

uint64_t sum_of(const std::vector<uint64_t>& sizes) { return std::accumulate(sizes.begin(), sizes.end(), uint64_t{0}); }

}  // namespace

Windows default_windows(const WindowOptions& options, uint64_t largest_record_bytes) {
  const uint64_t usual_bytes =
      std::max(largest_record_bytes, std::min(kDefaultWindowRecords * largest_record_bytes, kDefaultWindowCapBytes));
  Windows windows{usual_bytes, options.reload_bytes.value_or(usual_bytes)};
  if (options.offload_records) windows.offload_bytes = *options.offload_records * largest_record_bytes;
  if (options.offload_bytes) windows.offload_bytes = *options.offload_bytes;
  return windows;
}

// ---- which sum ----

std::vector<bool> largest_sum_within(const std::vector<uint64_t>& sizes, uint64_t cap) {
  std::vector<bool> taken(sizes.size(), false);
  if (sum_of(sizes) <= cap) {
    taken.assign(sizes.size(), true);
    return taken;
  }
  // Each sum that was reached, and by which size from which other: the first way to reach one takes the earliest sizes.
  struct Reached {
    uint64_t sum;
    size_t size;
    size_t from;
  };
  const bool is_exact = sizes.size() <= kExactSizes;
  const size_t most_sums = is_exact ? kMostSums : std::clamp<size_t>(kMostWays / sizes.size(), 128, kMostSums);
  const uint64_t enough = is_exact ? cap : cap - cap / kNearEnough;
  std::vector<Reached> ways{{0, 0, 0}};
  std::vector<size_t> frontier{0};  // by ascending sum
  size_t best = 0;
  std::vector<size_t> merged;
  for (size_t next = 0; next < sizes.size() && ways[best].sum < enough; ++next) {
    const uint64_t size = sizes[next];
    merged.clear();
    const size_t known_count = frontier.size();
    size_t known = 0;
    for (size_t base = 0; base < known_count; ++base) {
      const uint64_t sum = ways[frontier[base]].sum + size;
      if (sum > cap) break;
      while (known < known_count && ways[frontier[known]].sum < sum) merged.push_back(frontier[known++]);
      if (known < known_count && ways[frontier[known]].sum == sum) continue;
      ways.push_back({sum, next, frontier[base]});
      merged.push_back(ways.size() - 1);
      if (sum > ways[best].sum) best = ways.size() - 1;
    }
    while (known < known_count) merged.push_back(frontier[known++]);
    if (merged.size() > most_sums) {  // of sums that lie close together the largest stays
      frontier.clear();
      const uint64_t width = cap / (most_sums / 2) + 1;
      for (size_t place = 0; place < merged.size(); ++place) {
        const bool is_last_of_its_width =
            place + 1 == merged.size() || ways[merged[place]].sum / width != ways[merged[place + 1]].sum / width;
        if (is_last_of_its_width) frontier.push_back(merged[place]);
      }
    } else {
      frontier.swap(merged);
    }
  }
  for (size_t way = best; way != 0; way = ways[way].from) taken[ways[way].size] = true;
  return taken;
}

// ---- what a step takes ----

PlannedStep simulate(const StepShape& shape, const StepTimes& times, const Plan& plan) {
  enum class State : uint8_t { Resident, Offloading, Offloaded, Reloading, Done };
  struct Live {
    State state = State::Resident;
    double copied_s = 0;  // out, then in
  };
  const size_t count = shape.nbytes.size();
  const LinkRates& link = times.link;
  std::vector<Live> live(count);
  PlannedStep step;
  double clock_s = 0;
  double pure_s = 0;
  double out_free_s = 0;
  double in_free_s = 0;
  uint64_t kept_bytes = 0;
  uint64_t offloading_bytes = 0;
  uint64_t ahead_bytes = 0;
  uint64_t moved_out_bytes = 0;
  uint64_t moved_in_bytes = 0;
  std::deque<size_t> in_flight;
  const auto is_kept = [&](size_t record) { return plan.kept[record] != KeptReason::None; };
  const auto advance = [&](double to_s) {
    clock_s += std::max(0.0, to_s - pure_s);
    pure_s = std::max(pure_s, to_s);
  };
  const auto note_held = [&] {
    step.peak_held_bytes = std::max(step.peak_held_bytes, kept_bytes + offloading_bytes + ahead_bytes);
  };

  for (size_t record = 0; record < count; ++record) {
    const uint64_t nbytes = shape.nbytes[record];
    advance(times.records[record].ready_s);
    if (is_kept(record)) {
      kept_bytes += nbytes;
      step.kept_bytes += nbytes;
    } else {
      out_free_s = std::max(clock_s, out_free_s) + static_cast<double>(nbytes) / link.out_bytes_per_s + link.latency_s;
      live[record] = {State::Offloading, out_free_s};
      in_flight.push_back(record);
      offloading_bytes += nbytes;
      moved_out_bytes += nbytes;
    }
    while (!in_flight.empty() && offloading_bytes + kept_bytes > plan.windows.offload_bytes) {
      const size_t oldest = in_flight.front();
      in_flight.pop_front();
      clock_s = std::max(clock_s, live[oldest].copied_s);
      live[oldest].state = State::Offloaded;
      offloading_bytes -= shape.nbytes[oldest];
    }
    note_held();
  }

  const double forward_s = pure_s;
  std::vector<size_t> uses;
  std::vector<size_t> reloads;
  for (size_t record = 0; record < count; ++record) {
    if (times.records[record].needed_s < 0) continue;
    uses.push_back(record);
    reloads.push_back(record);
  }
  std::stable_sort(uses.begin(), uses.end(),
                   [&](size_t a, size_t b) { return times.records[a].needed_s < times.records[b].needed_s; });
  std::stable_sort(reloads.begin(), reloads.end(),
                   [&](size_t a, size_t b) { return shape.last_save[a] > shape.last_save[b]; });
  const auto start_reload = [&](size_t record) {
    in_free_s = std::max({clock_s, in_free_s, live[record].copied_s}) +
                static_cast<double>(shape.nbytes[record]) / link.in_bytes_per_s + link.latency_s;
    live[record] = {State::Reloading, in_free_s};
    moved_in_bytes += shape.nbytes[record];
  };
  size_t cursor = 0;
  uint64_t released_bytes = 0;  // of what was kept: a handle dies after its operator ran
  for (const size_t used : uses) {
    const uint64_t nbytes = shape.nbytes[used];
    advance(times.records[used].needed_s);
    kept_bytes -= std::exchange(released_bytes, 0);
    switch (live[used].state) {
      case State::Resident:
        released_bytes = nbytes;
        break;
      case State::Offloading:  // the source is still here
        offloading_bytes -= nbytes;
        break;
      case State::Offloaded:
        start_reload(used);
        ahead_bytes += nbytes;
        break;
      case State::Reloading:
      case State::Done:
        break;
    }
    while (cursor < reloads.size()) {
      const size_t next = reloads[cursor];
      if (live[next].state == State::Offloaded) {
        if (ahead_bytes + kept_bytes + shape.nbytes[next] > plan.windows.reload_bytes) break;
        start_reload(next);
        ahead_bytes += shape.nbytes[next];
      }
      ++cursor;
    }
    note_held();
    if (live[used].state == State::Reloading) {
      clock_s = std::max(clock_s, live[used].copied_s);
      ahead_bytes -= nbytes;
    }
    live[used].state = State::Done;
  }
  advance(times.compute_s);
  step.step_s = clock_s;
  step.moved_bytes = moved_out_bytes;
  step.bound_s = std::max(forward_s, static_cast<double>(moved_out_bytes) / link.out_bytes_per_s) +
                 std::max(times.compute_s - forward_s, static_cast<double>(moved_in_bytes) / link.in_bytes_per_s);
  return step;
}

// ---- the plan ----

namespace {

// L2: a record that is asked for again before it could be out and back saves nothing while it is away.
std::vector<KeptReason> keep_what_returns_soon(const StepShape& shape, const StepTimes* times) {
  std::vector<KeptReason> kept(shape.nbytes.size(), KeptReason::None);
  if (times == nullptr) return kept;
  for (size_t record = 0; record < kept.size(); ++record) {
    const auto [ready_s, needed_s] = times->records[record];
    const auto nbytes = static_cast<double>(shape.nbytes[record]);
    const double round_trip_s =
        nbytes / times->link.out_bytes_per_s + nbytes / times->link.in_bytes_per_s + times->link.latency_s;
    if (needed_s >= 0 && needed_s - ready_s < round_trip_s) kept[record] = KeptReason::NeededSoon;
  }
  return kept;
}

uint64_t kept_bytes(const StepShape& shape, const std::vector<KeptReason>& kept) {
  uint64_t sum = 0;
  for (size_t record = 0; record < kept.size(); ++record) {
    if (kept[record] != KeptReason::None) sum += shape.nbytes[record];
  }
  return sum;
}

// L3: `room_bytes` of the tape stay. What is too small for the link's rate goes first, then the tape's end, which would
// be brought back as backward starts. `is_exact`: the gap that the end leaves is filled as far as any choice can.
void keep_within(std::vector<KeptReason>& kept, const StepShape& shape, uint64_t room_bytes, bool is_exact) {
  uint64_t small_bytes = room_bytes / kShareForSmall;
  for (size_t record = kept.size(); record-- > 0;) {
    const uint64_t nbytes = shape.nbytes[record];
    if (kept[record] != KeptReason::None || nbytes >= kSmallCopyBytes || nbytes > small_bytes) continue;
    small_bytes -= nbytes;
    room_bytes -= nbytes;
    kept[record] = KeptReason::SmallCopy;
  }
  std::vector<size_t> from_end;
  std::vector<uint64_t> sizes;
  uint64_t seen_bytes = 0;
  for (size_t record = kept.size(); record-- > 0 && (is_exact || seen_bytes <= room_bytes);) {
    if (kept[record] != KeptReason::None) continue;
    from_end.push_back(record);
    sizes.push_back(shape.nbytes[record]);
    seen_bytes += shape.nbytes[record];
  }
  if (!is_exact && seen_bytes > room_bytes) from_end.pop_back();
  const std::vector<bool> taken =
      is_exact ? largest_sum_within(sizes, room_bytes) : std::vector<bool>(from_end.size(), true);
  for (size_t place = 0; place < from_end.size(); ++place) {
    if (taken[place]) kept[from_end[place]] = KeptReason::TapeEnd;
  }
}

// A plan with windows of `window_bytes` where the user set none, beside what returns soon.
Plan plan_for(const StepShape& shape, std::vector<KeptReason> returns_soon, const WindowOptions& options,
              uint64_t window_bytes, bool keeps_end, bool is_exact) {
  const uint64_t soon_bytes = kept_bytes(shape, returns_soon);
  const uint64_t largest_bytes = shape.nbytes.empty() ? 0 : *std::max_element(shape.nbytes.begin(), shape.nbytes.end());
  Plan plan{std::move(returns_soon), default_windows(options, largest_bytes)};
  if (!options.offload_bytes && !options.offload_records) plan.windows.offload_bytes = soon_bytes + window_bytes;
  if (!options.reload_bytes) plan.windows.reload_bytes = soon_bytes + window_bytes;
  if (keeps_end && plan.windows.reload_bytes > soon_bytes)
    keep_within(plan.kept, shape, plan.windows.reload_bytes - soon_bytes, is_exact);
  return plan;
}

// The least window at which compute or link is as busy as any window makes it.
uint64_t choose_window(const StepShape& shape, const StepTimes& times, const std::vector<KeptReason>& returns_soon,
                       const WindowOptions& options, bool keeps_end) {
  uint64_t largest_bytes = 0;
  for (size_t record = 0; record < shape.nbytes.size(); ++record) {
    if (returns_soon[record] == KeptReason::None) largest_bytes = std::max(largest_bytes, shape.nbytes[record]);
  }
  const uint64_t most_bytes = std::max(kDefaultWindowRecords * largest_bytes, 2 * kDefaultWindowCapBytes);
  struct Tried {
    uint64_t window_bytes;
    double efficiency;
  };
  std::vector<Tried> tried;
  double best = 0;
  for (auto window = static_cast<double>(largest_bytes); window <= static_cast<double>(most_bytes);
       window *= kWindowStep) {
    const auto window_bytes = static_cast<uint64_t>(window);
    const PlannedStep step =
        simulate(shape, times, plan_for(shape, returns_soon, options, window_bytes, keeps_end, /*is_exact=*/false));
    const double efficiency = step.step_s > 0 ? step.bound_s / step.step_s : 1;
    tried.push_back({window_bytes, efficiency});
    best = std::max(best, efficiency);
    if (window < 1) break;
  }
  for (const auto& [window_bytes, efficiency] : tried) {
    if (efficiency >= kSaturated * best) return window_bytes;
  }
  return largest_bytes;
}

}  // namespace

Plan make_plan(const StepShape& shape, const StepTimes* times, const WindowOptions& options, bool keeps_end) {
  const bool is_timed = times != nullptr && times->link.is_known();
  const bool is_least_memory = options.reload_bytes == 0;
  const auto returns_soon = keep_what_returns_soon(shape, is_timed && !is_least_memory ? times : nullptr);
  uint64_t window_bytes = 0;
  if (is_timed) {
    window_bytes = choose_window(shape, *times, returns_soon, options, keeps_end);
  } else if (!shape.nbytes.empty()) {
    window_bytes = default_windows({}, *std::max_element(shape.nbytes.begin(), shape.nbytes.end())).reload_bytes;
  }
  return plan_for(shape, returns_soon, options, window_bytes, keeps_end, /*is_exact=*/true);
}

}  // namespace torchoffload
