#include "core/planning/step.h"

#include <algorithm>
#include <utility>

namespace torchoffload {

namespace {

// A window of a few times the largest record keeps the link busy while one such record is waited for. Above a GiB more
// would cost memory and gain little: the window is then a GiB, or one such record if that is larger.
constexpr uint64_t kDefaultWindowRecords = 4;
constexpr uint64_t kDefaultWindowCapBytes = uint64_t{1} << 30;

}  // namespace

WindowBytes default_windows(const WindowOptions& options, uint64_t largest_record_bytes) {
  const uint64_t usual_bytes =
      std::max(largest_record_bytes, std::min(kDefaultWindowRecords * largest_record_bytes, kDefaultWindowCapBytes));
  WindowBytes windows{usual_bytes, options.reload_window_bytes.value_or(usual_bytes)};
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
  plan.kept.assign(shape.count(), Reason::None);
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

RecordId id_of(size_t record) { return {static_cast<uint32_t>(record), 0}; }

// Simulates one step, from its first record to the end of its backward, with numbers in place of copies. Windows
// decides, as it does for the engine.
class Walk {
 public:
  Walk(const StepShape& shape, const StepTimes& times, const Plan& plan, std::vector<StepEvent>* events, double most_s)
      : most_s_(most_s * (1 + kRounding)),
        shape_(shape),
        times_(times),
        plan_(plan),
        events_(events),
        saves_(operator_saves(shape)),
        live_(shape.count()),
        place_of_(shape.count()) {}

  PlannedStep run() {
    forward();
    const double forward_s = pure_s_;
    if (!is_over()) backward();
    if (is_over()) return {.step_s = std::numeric_limits<double>::infinity()};
    advance(times_.compute_s);
    const LinkRates& link = times_.link;
    step_.step_s = clock_s_;
    step_.bound_s = std::max(forward_s, out_link_bytes_ / link.out_bytes_per_s) +
                    std::max(times_.compute_s - forward_s, in_link_bytes_ / link.in_bytes_per_s);
    return step_;
  }

 private:
  enum class State : uint8_t { Resident, Offloading, Offloaded, Reloading, Done };
  struct Live {
    State state = State::Resident;
    double copied_s = 0;  // the end of its copy out, and later of its copy in
  };

  // Answers the questions of CopyWindows about a tape's records; see CopyWindows::take_reloads(). Each record has its
  // last save alone.
  struct Records {
    const Walk& walk;

    uint64_t first_save() const { return 0; }
    SavedRecord at(uint64_t save) const {
      const size_t record = walk.by_last_save_[save];
      const bool is_in_slot = walk.live_[record].state == State::Offloaded;
      return {id_of(record), is_in_slot ? Rests::InSlot : Rests::Neither, walk.shape_.nbytes[record]};
    }
  };
  auto is_in_flight() const {
    return [this](RecordId id) { return live_[id.index].state == State::Offloading; };
  }

  double link_bytes(size_t record) const { return static_cast<double>(shape_.nbytes[record]); }

  void note(StepEvent::What what, size_t record) {
    if (events_ != nullptr) events_->push_back({what, record});
  }

  void advance(double to_s) {
    clock_s_ += std::max(0.0, to_s - pure_s_);
    pure_s_ = std::max(pure_s_, to_s);
  }

  // Is it certain that the step takes too long? All waits so far are in the clock, and the rest is at least computed.
  bool is_over() const { return clock_s_ + (times_.compute_s - pure_s_) > most_s_; }

  // The same before backward begins: its records in the tier come over the link one after the other, and the device
  // computes on once it has the last one of these.
  bool is_over_by_link(const std::vector<size_t>& uses) const {
    double link_s = 0, needed_s = 0;
    for (const size_t used : uses) {
      if (live_[used].state != State::Offloaded) continue;
      link_s += link_bytes(used) / times_.link.in_bytes_per_s + times_.link.latency_s;
      needed_s = times_.records[used].needed_s;
    }
    if (link_s == 0) return false;
    const double asked_s = clock_s_ + std::max(0.0, times_.records[uses.front()].needed_s - pure_s_);
    return asked_s + link_s + std::max(0.0, times_.compute_s - needed_s) > most_s_;
  }

  void forward() {
    uint64_t held_bytes = 0;       // held when the operator before this one had ended
    uint64_t held_late_bytes = 0;  // the same if the copies of that operator are enqueued only now
    for (size_t record = 0; record < shape_.count() && !is_over(); ++record) {
      const bool begins = record == 0 || !shape_.joins_operator(record);
      const bool ends = record + 1 == saves_.end[record];
      if (begins) {
        step_.held.forward = std::max(step_.held.forward, held_bytes + saves_.nbytes[record]);
        step_.held.forward_late = std::max(step_.held.forward_late, held_late_bytes + saves_.nbytes[record]);
        held_late_bytes = held_bytes + saves_.nbytes[record];
      }
      make(record);
      drain(plan_.windows(saves_.end[record] - 1));
      if (ends) held_bytes = tape_.kept_bytes() + windows_.offload_bytes();
    }
  }

  void make(size_t record) {
    const uint64_t nbytes = shape_.nbytes[record];
    advance(times_.records[record].ready_s);
    if (plan_.kept[record] != Reason::None) {
      tape_.kept(nbytes);
      step_.kept_bytes += nbytes;
      return;
    }
    const LinkRates& link = times_.link;
    out_free_s_ = std::max(clock_s_, out_free_s_) + link_bytes(record) / link.out_bytes_per_s + link.latency_s;
    live_[record] = {State::Offloading, out_free_s_};
    windows_.offload_began(id_of(record), nbytes, is_in_flight());
    step_.moved_bytes += nbytes;
    out_link_bytes_ += link_bytes(record);
  }

  void drain(WindowBytes limits) {
    tape_.set_limits(limits);
    while (const auto oldest = windows_.offload_to_wait_for(limits.offload_bytes, tape_.kept_bytes(), is_in_flight())) {
      const size_t record = oldest->index;
      note(StepEvent::What::WaitForOffload, record);
      clock_s_ = std::max(clock_s_, live_[record].copied_s);
      live_[record].state = State::Offloaded;
      windows_.offload_left(shape_.nbytes[record]);
    }
  }

  void backward() {
    std::vector<size_t> uses;
    uses.reserve(shape_.count());
    for (size_t record = 0; record < shape_.count(); ++record) {
      if (times_.records[record].needed_s >= 0) uses.push_back(record);
    }
    by_last_save_ = uses;
    // Of records that are needed at the same time or have the same last save, the first one is used and reloaded first.
    // Mostly the records are in these orders already: the last one is used first.
    const auto is_used_sooner = [&](size_t a, size_t b) {
      return times_.records[a].needed_s < times_.records[b].needed_s;
    };
    const auto is_saved_sooner = [&](size_t a, size_t b) { return shape_.last_save[a] < shape_.last_save[b]; };
    if (is_in_order(uses.rbegin(), uses.rend(), is_used_sooner)) {
      std::ranges::reverse(uses);
    } else {
      std::ranges::stable_sort(uses, is_used_sooner);
    }
    if (!is_in_order(by_last_save_.begin(), by_last_save_.end(), is_saved_sooner)) {
      std::ranges::reverse(by_last_save_);
      std::ranges::stable_sort(by_last_save_, is_saved_sooner);
    }
    if (is_over_by_link(uses)) {
      clock_s_ = std::numeric_limits<double>::infinity();
      return;
    }
    for (size_t place = 0; place < by_last_save_.size(); ++place) {
      place_of_[by_last_save_[place]] = place;
      if (plan_.reload_bytes_from.empty()) continue;
      const uint64_t reload_bytes = plan_.reload_bytes_from[by_last_save_[place]];
      if (place == 0 || reload_bytes != plan_.reload_bytes_from[by_last_save_[place - 1]])
        tape_.begin_part(place, {0, reload_bytes});
    }
    tape_.close(by_last_save_.size());
    for (const size_t used : uses) {
      use(used);
      if (is_over()) return;
    }
  }

  // Does each come before the next one, with no two in the same place?
  template <typename Iterator, typename Before>
  static bool is_in_order(const Iterator& begin, const Iterator& end, Before is_before) {
    return std::adjacent_find(begin, end, [&](size_t a, size_t b) { return !is_before(a, b); }) == end;
  }

  void use(size_t used) {
    const uint64_t nbytes = shape_.nbytes[used];
    uint64_t in_use_bytes = 0;  // in use, and counted neither as kept nor as on its way
    advance(times_.records[used].needed_s);
    tape_.released(std::exchange(released_bytes_, 0));
    note(StepEvent::What::Ask, used);
    if (!plan_.reload_bytes_from.empty()) tape_.consumer_asks(place_of_[used]);
    switch (live_[used].state) {
      case State::Resident:  // the record was kept; its handle dies after the operator has run
        released_bytes_ = nbytes;
        break;
      case State::Offloading:  // the source is still here
        windows_.offload_left(nbytes);
        in_use_bytes = nbytes;
        break;
      case State::Offloaded:
        note(StepEvent::What::ReloadAskedFor, used);
        start_reload(used);
        break;
      case State::Reloading:
      case State::Done:
        break;
    }
    reload_ahead();
    const uint64_t held_bytes = tape_.kept_bytes() + windows_.offload_bytes() + windows_.reload_bytes();
    step_.held.backward = std::max(step_.held.backward, held_bytes + in_use_bytes);
    if (live_[used].state == State::Reloading) {
      clock_s_ = std::max(clock_s_, live_[used].copied_s);
      windows_.reload_left(id_of(used), nbytes);
    }
    live_[used].state = State::Done;
  }

  void reload_ahead() {
    const uint64_t kept_bytes = tape_.kept_bytes();
    for (const CopyWindows::Ahead& ahead : windows_.take_reloads(tape_, kept_bytes, AtSource::GoesOn, Records{*this})) {
      note(StepEvent::What::ReloadAhead, ahead.record.index);
      start_reload(ahead.record.index);
    }
  }

  void start_reload(size_t record) {
    const LinkRates& link = times_.link;
    in_free_s_ = std::max({clock_s_, in_free_s_, live_[record].copied_s}) + link_bytes(record) / link.in_bytes_per_s +
                 link.latency_s;
    live_[record] = {State::Reloading, in_free_s_};
    windows_.reload_began(id_of(record), shape_.nbytes[record]);
    in_link_bytes_ += link_bytes(record);
  }

  // Sums of the same times in another order differ by no more than this part.
  static constexpr double kRounding = 1e-10;

  const double most_s_;
  const StepShape& shape_;
  const StepTimes& times_;
  const Plan& plan_;
  std::vector<StepEvent>* const events_;
  const OperatorSaves saves_;
  std::vector<Live> live_;
  std::vector<size_t> by_last_save_;  // the records that are asked for; the last one in this list is reloaded first
  std::vector<size_t> place_of_;      // by record: its place in that list
  CopyWindows windows_;
  TapeWindows tape_;
  PlannedStep step_;
  double clock_s_ = 0, pure_s_ = 0, out_free_s_ = 0, in_free_s_ = 0;
  uint64_t released_bytes_ = 0;                    // of kept records that are released before the next use
  double out_link_bytes_ = 0, in_link_bytes_ = 0;  // carried by the link
};

}  // namespace

PlannedStep simulate(const StepShape& shape, const StepTimes& times, const Plan& plan, std::vector<StepEvent>* events,
                     double most_s) {
  return Walk(shape, times, plan, events, most_s).run();
}

}  // namespace torchoffload
