// plan_fuzz.h: random tapes through the Learner and the plan: what they keep stays within what they may.
#pragma once

#include <algorithm>
#include <random>
#include <utility>
#include <vector>

#include "core/learner.h"
#include "core/plan.h"
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
      Learner::Trace trace = learner_.begin(options_of(nbytes.size()));
      walk(trace, nbytes);
      open.emplace_back(std::move(trace), std::move(nbytes));
      if (open.size() < 1 + below(3)) continue;
      for (const auto& [closed, sizes] : std::exchange(open, {})) close(closed, sizes);
    }
    expect(learner_.shape_count() <= Learner::kShapeLimit, "more shapes are known than the limit");
  }

 private:
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
    if (length % 3 == 1) options.reload_bytes = 1000 * (length % 7);
    if (length % 5 == 1) options.offload_bytes = 1000 * (length % 4);
    if (length % 5 == 2) options.offload_records = 1 + length % 4;
    return options;
  }

  void walk(Learner::Trace& trace, const std::vector<uint64_t>& nbytes) {
    for (const uint64_t size : nbytes) {
      const KeptReason reason = learner_.next(trace, size);
      const auto windows = learner_.windows(trace);
      expect(windows || reason == KeptReason::None || trace.candidates != 0, "a tape of no shape keeps something");
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
    check(*learner_.plan_of(*shape), {nbytes, last_save});
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

  void check(const Plan& plan, const StepShape& shape) {
    uint64_t kept_bytes = 0;
    uint64_t soon_bytes = 0;
    for (size_t record = 0; record < shape.nbytes.size(); ++record) {
      if (plan.kept[record] == KeptReason::NeededSoon) soon_bytes += shape.nbytes[record];
      if (plan.kept[record] != KeptReason::None) kept_bytes += shape.nbytes[record];
    }
    expect(kept_bytes <= std::max(plan.windows.reload_bytes, soon_bytes), "more is kept than the window");
    const PlannedStep step = simulate(shape, some_times(shape.nbytes.size()), plan);
    expect(step.kept_bytes == kept_bytes, "the plan and its step differ in what is kept");
    expect(step.step_s >= 0 && step.bound_s >= 0, "a step takes less than nothing");
  }

  std::mt19937_64 random_;
  Learner learner_;
};

}  // namespace torchoffload::fuzz
