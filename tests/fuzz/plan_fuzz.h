// plan_fuzz.h: random tapes through the Learner and the plan: what they keep stays within what they may. And random
// orders of tapes through TapeOrder, beside a model that looks the whole step up.
#pragma once

#include <algorithm>
#include <iterator>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "core/planning/learner.h"
#include "core/planning/plan.h"
#include "core/planning/tape_order.h"
#include "driver.h"

namespace torchoffload::fuzz {

class PlanFuzz {
 public:
  explicit PlanFuzz(uint64_t seed) : random_(seed) {}

  // Steps over a few shapes, known ones and new ones, timed and not, with tapes that stay open over each other.
  void run() {
    std::vector<std::vector<uint64_t>> shapes(1 + below(2 * Learner::kShapeLimit));
    for (std::vector<uint64_t>& shape : shapes) shape = some_sizes();
    std::vector<std::pair<Learner::Trace, std::vector<uint64_t>>> open;
    for (unsigned step = 0; step < 60; ++step) {
      std::vector<uint64_t> nbytes = shapes[below(shapes.size())];
      if (below(4) == 0) nbytes.resize(below(nbytes.size() + 1));
      if (below(3) == 0) {  // another length
        const uint64_t ratio = 1 + below(7);
        for (uint64_t& size : nbytes) size *= ratio;
      }
      const std::optional<bool> keeps_end = below(2) == 0 ? std::nullopt : std::optional(below(2) == 0);
      Learner::Trace trace = learner_.begin(options_of(nbytes.size()), keeps_end);
      walk(trace, nbytes);
      open.emplace_back(std::move(trace), std::move(nbytes));
      if (open.size() < 1 + below(3)) continue;
      for (const auto& [closed, sizes] : std::exchange(open, {})) close(closed, sizes);
    }
    expect(learner_.shape_count() <= Learner::kShapeLimit, "more shapes are known than the limit");
    expect(learner_.structure_count() <= Learner::kShapeLimit, "more structures are known than the limit");
    run_orders();
    run_beside_kept_ones();
  }

 private:
  // A step: which tape's forward or backward comes when.
  struct Event {
    uint32_t tape = 0;
    bool is_backward = false;
    bool operator==(const Event&) const = default;
  };
  using Step = std::vector<Event>;

  // Some tapes are never asked for, and each is only after it was opened.
  Step some_step() {
    Step step;
    std::vector<uint32_t> waiting;
    const auto tape_count = static_cast<uint32_t>(1 + below(8));
    for (uint32_t opened = 0; opened < tape_count || !waiting.empty();) {
      if (opened < tape_count && (waiting.empty() || below(2) == 0)) {
        step.push_back({opened, false});
        if (below(6) > 0) waiting.push_back(opened);
        ++opened;
      } else {
        const auto next = waiting.begin() + static_cast<ptrdiff_t>(below(waiting.size()));
        step.push_back({*next, true});
        waiting.erase(next);
      }
    }
    return step;
  }

  // A loop comes back to earlier steps, as one that trains networks in turns.
  void run_orders() {
    TapeOrder order;
    std::vector<Step> known;  // the latest first
    std::vector<Step> steps{some_step()};
    for (uint32_t round = 0; round < 24; ++round) {
      if (below(3) == 0) steps.push_back(some_step());
      const Step& step = steps[below(3) == 0 ? below(steps.size()) : steps.size() - 1];
      run_order(order, step, known, round);
      if (std::ranges::none_of(step, &Event::is_backward)) continue;
      std::erase(known, step);
      known.insert(known.begin(), step);
      if (known.size() > TapeOrder::kKnownLimit) known.pop_back();
    }
  }

  static TapeId id_of(uint32_t tape, uint32_t round) { return {tape, round}; }

  void run_order(TapeOrder& order, const Step& step, const std::vector<Step>& known, uint32_t round) {
    std::vector<Step> alike = known;
    bool was_expected = true;  // since the latest backward
    uint64_t first = 0;
    uint32_t opened = 0;
    for (size_t place = 0; place < step.size(); ++place) {
      const Event& event = step[place];
      const auto is_next = [&](const Step& of) { return place < of.size() && of[place] == event; };
      if (place > 0) check_coming(order, alike, place, opened, round);
      was_expected = was_expected && !alike.empty() && is_next(alike.front());
      std::erase_if(alike, [&](const Step& of) { return !is_next(of); });
      if (event.is_backward) {
        expect(order.backward_began(first + event.tape) == std::exchange(was_expected, true),
               "a backward was expected, or not, against the model");
        expect(order.is_latest(first + event.tape), "the latest backward is another's");
      } else {
        const uint64_t number = order.opened(id_of(event.tape, round));
        if (opened++ == 0) first = number;
        expect(number == first + event.tape, "a tape has another's number");
      }
    }
    for (uint32_t tape = 0; tape < opened; ++tape) order.gone(first + tape);
  }

  // Steps of which all tapes are opened before the first is asked for, beside some that are never asked for.
  void run_beside_kept_ones() {
    TapeOrder order;
    const auto kept_count = static_cast<uint32_t>(1 + below(4));
    for (uint32_t tape = 0; tape < kept_count; ++tape) (void)order.opened({tape, 0});
    const auto tape_count = static_cast<uint32_t>(1 + below(6));
    const size_t known_after = TapeOrder::rounds_until_left(kept_count) + 1;
    for (size_t step = 0; step < known_after + 4; ++step) {
      std::vector<uint64_t> numbers;
      for (uint32_t tape = 0; tape < tape_count; ++tape) numbers.push_back(order.opened({tape, 1}));
      for (const uint64_t number : numbers) {
        const bool was_expected = order.backward_began(number);
        expect(was_expected || step <= known_after, "a step beside tapes that are kept is not known");
        order.gone(number);
      }
    }
    expect(order.left_behind_count() == kept_count, "tapes that are kept were not left behind");
  }

  static void check_coming(const TapeOrder& order, const std::vector<Step>& alike, size_t place, uint32_t opened,
                           uint32_t round) {
    Step backwards;
    if (!alike.empty() && place <= alike.front().size())
      std::copy_if(alike.front().begin() + static_cast<ptrdiff_t>(place), alike.front().end(),
                   std::back_inserter(backwards), [](const Event& event) { return event.is_backward; });
    for (size_t places = 0; places < backwards.size() + 2; ++places) {
      const bool is_known = places < backwards.size() && backwards[places].tape < opened;
      const auto expected = is_known ? std::optional(id_of(backwards[places].tape, round)) : std::nullopt;
      expect(order.coming(places) == expected, "another tape is expected than in the model");
    }
    const bool is_backward_next = !alike.empty() && std::ranges::all_of(alike, [&](const Step& of) {
      return place < of.size() && of[place].is_backward;
    });
    expect(order.is_backward_next() == is_backward_next, "a backward is next, or not, against the model");
  }

  uint64_t below(uint64_t limit) { return random_() % limit; }
  double seconds() { return 1e-6 * static_cast<double>(below(20'000)); }

  std::vector<uint64_t> some_sizes() {
    std::vector<uint64_t> sizes(1 + below(90));
    const uint64_t largest = uint64_t{1} << below(30);
    for (uint64_t& size : sizes) size = 1 + below(largest);
    return sizes;
  }

  // The same for the same tape: other options make another shape.
  static WindowOptions options_of(uint64_t length) {
    WindowOptions options;
    if (length % 3 == 1) options.reload_window_bytes = 1000 * (length % 7);
    if (length % 5 == 1) options.offload_window_bytes = 1000 * (length % 4);
    if (length % 5 == 2) options.max_fwd_stash_size = 1 + length % 4;
    return options;
  }

  // The same for the same tape, at any length of its sequence.
  static RecordKind kind_of(size_t record, size_t count) {
    return {.dtype = static_cast<uint8_t>(count % 3), .is_same_operator = record % (1 + count % 5) != 0};
  }

  void walk(Learner::Trace& trace, const std::vector<uint64_t>& nbytes) {
    for (const uint64_t size : nbytes) {
      const Reason reason = learner_.next(trace, size, kind_of(trace.nbytes.size(), nbytes.size()));
      const auto windows = learner_.windows(trace);
      expect(windows || reason == Reason::None || trace.is_known(), "a tape of no shape keeps something");
    }
  }

  void close(const Learner::Trace& trace, const std::vector<uint64_t>& nbytes) {
    std::vector<uint64_t> last_save(nbytes.size());
    for (uint64_t& save : last_save) save = below(2 * nbytes.size());
    const auto shape = learner_.learn(trace, last_save);
    expect(shape.has_value() == !nbytes.empty(), "a tape was not learned, or an empty one was");
    if (!shape) return;
    learner_.backward_began(*shape, below(3) > 0);
    if (below(2) == 0) learner_.learn_times(*shape, some_times(nbytes.size()));
    check(*learner_.plan_of(*shape), {nbytes, last_save, trace.kinds}, trace.options);
  }

  StepTimes some_times(size_t count) {
    StepTimes times;
    double now = 0;
    for (size_t record = 0; record < count; ++record) times.records.push_back({now += seconds(), -1});
    for (size_t record = count; record-- > 0;) {
      if (below(10) > 0) times.records[record].needed_s = now += seconds();
    }
    times.compute_s = now + seconds();
    times.link = {1e6 * static_cast<double>(1 + below(60'000)), 1e6 * static_cast<double>(1 + below(60'000)), 2e-5};
    return times;
  }

  void check(const Plan& plan, const StepShape& shape, const WindowOptions& options) {
    uint64_t kept_bytes = 0;
    uint64_t soon_bytes = 0;
    for (size_t record = 0; record < shape.nbytes.size(); ++record) {
      if (plan.kept[record] == Reason::NeededSoon) soon_bytes += shape.nbytes[record];
      if (plan.kept[record] != Reason::None) kept_bytes += shape.nbytes[record];
    }
    const bool is_within = !options.reload_window_bytes || kept_bytes <= std::max(plan.reload_bytes, soon_bytes);
    expect(is_within, "more is kept than the window that was set");
    const StepTimes times = some_times(shape.nbytes.size());
    const PlannedStep step = simulate(shape, times, plan);
    expect(step.kept_bytes == kept_bytes, "the plan and its step differ in what is kept");
    expect(step.step_s >= 0 && step.bound_s >= 0, "a step takes less than nothing");
    if (options.sets_offload()) return;
    // What is held in forward does not depend on the times.
    const HeldBytes first = simulate(shape, times, first_plan(shape, options)).held;
    expect(step.held.forward <= first.forward, "a plan holds more in forward than the first step did");
    expect(step.held.forward_late <= first.forward_late, "with late copies a plan holds more than the first step did");
  }

  std::mt19937_64 random_;
  Learner learner_;
};

}  // namespace torchoffload::fuzz
