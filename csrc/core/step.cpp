#include "core/step.h"

#include <algorithm>
#include <deque>
#include <utility>

namespace torchoffload {

namespace {

// A window of a few of the largest record keeps the link busy while one of them is waited for; above a GiB more than
// one brings nothing that memory is worth.
constexpr uint64_t kDefaultWindowRecords = 4;
constexpr uint64_t kDefaultWindowCapBytes = uint64_t{1} << 30;

}  // namespace

Windows default_windows(const WindowOptions& options, uint64_t largest_record_bytes) {
  const uint64_t usual_bytes =
      std::max(largest_record_bytes, std::min(kDefaultWindowRecords * largest_record_bytes, kDefaultWindowCapBytes));
  Windows windows{usual_bytes, options.reload_window_bytes.value_or(usual_bytes)};
  if (options.max_fwd_stash_size) windows.offload_bytes = *options.max_fwd_stash_size * largest_record_bytes;
  if (options.offload_window_bytes) windows.offload_bytes = *options.offload_window_bytes;
  return windows;
}

uint64_t StepShape::largest_bytes() const { return nbytes.empty() ? 0 : *std::ranges::max_element(nbytes); }

OperatorSaves operator_saves(const StepShape& shape) {
  const size_t count = shape.count();
  OperatorSaves saves{std::vector<size_t>(count), std::vector<uint64_t>(count)};
  for (size_t begin = 0, end = 0; begin < count; begin = end) {
    uint64_t nbytes = 0;
    for (end = begin; end == begin || (end < count && shape.joins_operator(end)); ++end) nbytes += shape.nbytes[end];
    std::fill_n(saves.end.begin() + static_cast<ptrdiff_t>(begin), end - begin, end);
    std::fill_n(saves.nbytes.begin() + static_cast<ptrdiff_t>(begin), end - begin, nbytes);
  }
  return saves;
}

Plan first_plan(const StepShape& shape, const WindowOptions& options) {
  Plan plan;
  plan.kept.assign(shape.count(), KeptReason::None);
  uint64_t largest_bytes = 0;
  for (const uint64_t nbytes : shape.nbytes) {
    largest_bytes = std::max(largest_bytes, nbytes);
    plan.offload_bytes.push_back(default_windows(options, largest_bytes).offload_bytes);
  }
  plan.reload_bytes = default_windows(options, largest_bytes).reload_bytes;
  return plan;
}

StepTimes times_in_order(size_t record_count) {
  StepTimes times;
  const auto count = static_cast<double>(record_count);
  for (size_t record = 0; record < record_count; ++record)
    times.records.push_back({static_cast<double>(record), 2 * count - static_cast<double>(record)});
  times.compute_s = 2 * count + 1;
  times.link = {1e30, 1e30, 0};
  return times;
}

namespace {

// One step, from its first record to the end of its backward.
class Walk {
 public:
  Walk(const StepShape& shape, const StepTimes& times, const Plan& plan)
      : shape_(shape), times_(times), plan_(plan), saves_(operator_saves(shape)), live_(shape.count()) {}

  PlannedStep run() {
    forward();
    const double forward_s = pure_s_;
    backward();
    advance(times_.compute_s);
    const LinkRates& link = times_.link;
    step_.step_s = clock_s_;
    step_.moved_bytes = moved_out_bytes_;
    step_.bound_s = std::max(forward_s, static_cast<double>(moved_out_bytes_) / link.out_bytes_per_s) +
                    std::max(times_.compute_s - forward_s, static_cast<double>(moved_in_bytes_) / link.in_bytes_per_s);
    return step_;
  }

 private:
  enum class State : uint8_t { Resident, Offloading, Offloaded, Reloading, Done };
  struct Live {
    State state = State::Resident;
    double copied_s = 0;  // out, then in
  };

  void advance(double to_s) {
    clock_s_ += std::max(0.0, to_s - pure_s_);
    pure_s_ = std::max(pure_s_, to_s);
  }

  void forward() {
    uint64_t held_bytes = 0;       // as the operator before had ended
    uint64_t held_late_bytes = 0;  // as the one before that had, and what it saved
    for (size_t record = 0; record < shape_.count(); ++record) {
      const bool begins = record == 0 || !shape_.joins_operator(record);
      const bool ends = record + 1 == saves_.end[record];
      if (begins) {
        step_.held.forward = std::max(step_.held.forward, held_bytes + saves_.nbytes[record]);
        step_.held.forward_late = std::max(step_.held.forward_late, held_late_bytes + saves_.nbytes[record]);
        held_late_bytes = held_bytes + saves_.nbytes[record];
      }
      make(record);
      drain(plan_.offload_bytes[saves_.end[record] - 1]);
      if (ends) held_bytes = kept_bytes_ + offloading_bytes_;
    }
  }

  void make(size_t record) {
    const uint64_t nbytes = shape_.nbytes[record];
    advance(times_.records[record].ready_s);
    if (plan_.kept[record] != KeptReason::None) {
      kept_bytes_ += nbytes;
      step_.kept_bytes += nbytes;
      return;
    }
    const LinkRates& link = times_.link;
    out_free_s_ = std::max(clock_s_, out_free_s_) + static_cast<double>(nbytes) / link.out_bytes_per_s + link.latency_s;
    live_[record] = {State::Offloading, out_free_s_};
    in_flight_.push_back(record);
    offloading_bytes_ += nbytes;
    moved_out_bytes_ += nbytes;
  }

  void drain(uint64_t window_bytes) {
    while (!in_flight_.empty() && offloading_bytes_ + kept_bytes_ > window_bytes) {
      const size_t oldest = in_flight_.front();
      in_flight_.pop_front();
      clock_s_ = std::max(clock_s_, live_[oldest].copied_s);
      live_[oldest].state = State::Offloaded;
      offloading_bytes_ -= shape_.nbytes[oldest];
    }
  }

  void backward() {
    std::vector<size_t> uses;
    for (size_t record = 0; record < shape_.count(); ++record) {
      if (times_.records[record].needed_s >= 0) uses.push_back(record);
    }
    reloads_ = uses;
    std::stable_sort(uses.begin(), uses.end(),
                     [&](size_t a, size_t b) { return times_.records[a].needed_s < times_.records[b].needed_s; });
    std::stable_sort(reloads_.begin(), reloads_.end(),
                     [&](size_t a, size_t b) { return shape_.last_save[a] > shape_.last_save[b]; });
    for (const size_t used : uses) use(used);
  }

  void use(size_t used) {
    const uint64_t nbytes = shape_.nbytes[used];
    uint64_t in_use_bytes = 0;  // beside what is counted as kept, or as on its way
    advance(times_.records[used].needed_s);
    kept_bytes_ -= std::exchange(released_bytes_, 0);
    switch (live_[used].state) {
      case State::Resident:  // a handle dies after its operator ran
        released_bytes_ = nbytes;
        break;
      case State::Offloading:  // the source is still here
        offloading_bytes_ -= nbytes;
        in_use_bytes = nbytes;
        break;
      case State::Offloaded:
        start_reload(used);
        break;
      case State::Reloading:
      case State::Done:
        break;
    }
    reload_ahead();
    step_.held.backward = std::max(step_.held.backward, kept_bytes_ + offloading_bytes_ + ahead_bytes_ + in_use_bytes);
    if (live_[used].state == State::Reloading) {
      clock_s_ = std::max(clock_s_, live_[used].copied_s);
      ahead_bytes_ -= nbytes;
    }
    live_[used].state = State::Done;
  }

  void reload_ahead() {
    for (; cursor_ < reloads_.size(); ++cursor_) {
      const size_t next = reloads_[cursor_];
      if (live_[next].state != State::Offloaded) continue;
      if (ahead_bytes_ + kept_bytes_ + shape_.nbytes[next] > plan_.reload_bytes) break;
      start_reload(next);
    }
  }

  void start_reload(size_t record) {
    const LinkRates& link = times_.link;
    in_free_s_ = std::max({clock_s_, in_free_s_, live_[record].copied_s}) +
                 static_cast<double>(shape_.nbytes[record]) / link.in_bytes_per_s + link.latency_s;
    live_[record] = {State::Reloading, in_free_s_};
    ahead_bytes_ += shape_.nbytes[record];
    moved_in_bytes_ += shape_.nbytes[record];
  }

  const StepShape& shape_;
  const StepTimes& times_;
  const Plan& plan_;
  const OperatorSaves saves_;
  std::vector<Live> live_;
  std::deque<size_t> in_flight_;
  std::vector<size_t> reloads_;
  size_t cursor_ = 0;
  PlannedStep step_;
  double clock_s_ = 0, pure_s_ = 0, out_free_s_ = 0, in_free_s_ = 0;
  uint64_t kept_bytes_ = 0, offloading_bytes_ = 0, ahead_bytes_ = 0;
  uint64_t released_bytes_ = 0;  // of what was kept, by the next use
  uint64_t moved_out_bytes_ = 0, moved_in_bytes_ = 0;
};

}  // namespace

PlannedStep simulate(const StepShape& shape, const StepTimes& times, const Plan& plan) {
  return Walk(shape, times, plan).run();
}

}  // namespace torchoffload
