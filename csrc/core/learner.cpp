#include "core/learner.h"

#include <algorithm>
#include <utility>

namespace torchoffload {

namespace {

constexpr uint32_t kTimedAfter[] = {1, 4};  // earlier sightings

bool is_prefix(const std::vector<uint64_t>& prefix, const std::vector<uint64_t>& of) {
  return prefix.size() <= of.size() && std::equal(prefix.begin(), prefix.end(), of.begin());
}

}  // namespace

Learner::Trace Learner::begin(const WindowOptions& options, std::optional<bool> keeps_end) const {
  Trace trace;
  trace.options = options;
  trace.keeps_end = keeps_end;
  trace.candidates = all_like(trace);
  trace.known_since = changes_;
  return trace;
}

uint32_t Learner::all_like(const Trace& trace) const {
  uint32_t like = 0;
  for (size_t place = 0; place < shapes_.size(); ++place) {
    const Shape& shape = shapes_[place];
    if (shape.options == trace.options && is_prefix(trace.nbytes, shape.records.nbytes)) like |= uint32_t{1} << place;
  }
  return like;
}

KeptReason Learner::next(Trace& trace, uint64_t nbytes) {
  if (trace.is_long) return KeptReason::None;
  const size_t position = trace.nbytes.size();
  if (position == kRecordLimit) {
    trace.nbytes = {};
    trace.candidates = 0;
    trace.is_timed = false;
    trace.is_long = true;
    return KeptReason::None;
  }
  trace.nbytes.push_back(nbytes);
  if (trace.candidates == 0) return KeptReason::None;
  if (trace.known_since != changes_) {
    trace.candidates = all_like(trace);
    trace.known_since = changes_;
  } else {
    for (size_t place = 0; place < shapes_.size(); ++place) {
      const std::vector<uint64_t>& known = shapes_[place].records.nbytes;
      if (position >= known.size() || known[position] != nbytes) trace.candidates &= ~(uint32_t{1} << place);
    }
  }
  const Shape* const known = latest(trace.candidates);
  Shape* const shape = known != nullptr ? &shapes_[static_cast<size_t>(known - shapes_.data())] : nullptr;
  if (position == 0 && shape != nullptr)
    trace.is_timed = std::ranges::find(kTimedAfter, shape->sightings) != std::end(kTimedAfter);
  if (shape == nullptr) trace.is_timed = false;
  if (shape == nullptr) return KeptReason::None;
  return plan(*shape, trace.keeps_end.value_or(shape->keeps_end)).kept[position];
}

std::optional<Windows> Learner::windows(const Trace& trace) const {
  if (trace.known_since != changes_) return std::nullopt;  // until its next record
  const Shape* const shape = latest(trace.candidates);
  if (shape == nullptr) return std::nullopt;
  const std::optional<Plan>& plan = shape->plans[trace.keeps_end.value_or(shape->keeps_end) ? 1 : 0];
  return plan ? std::optional(plan->windows) : std::nullopt;
}

const Learner::Shape* Learner::latest(uint32_t candidates) const {
  const Shape* found = nullptr;
  for (size_t place = 0; place < shapes_.size(); ++place) {
    const bool is_candidate = (candidates >> place & 1) != 0;
    if (is_candidate && (found == nullptr || shapes_[place].seen_at > found->seen_at)) found = &shapes_[place];
  }
  return found;
}

std::optional<uint32_t> Learner::learn(const Trace& trace, std::vector<uint64_t> last_save) {
  if (trace.is_long || trace.nbytes.empty()) return std::nullopt;
  // A record was refused with an error after it had been told of. The tape has one less, so nothing fits together.
  if (trace.nbytes.size() != last_save.size()) return std::nullopt;
  for (Shape& shape : shapes_) {
    if (shape.options != trace.options || shape.records.nbytes != trace.nbytes) continue;
    ++shape.sightings;
    shape.seen_at = ++clock_;
    return shape.number;
  }
  make_room(trace.nbytes.size());
  ++changes_;
  record_count_ += trace.nbytes.size();
  Shape& shape = shapes_.emplace_back();
  shape.number = next_number_++;
  shape.sightings = 1;
  shape.seen_at = ++clock_;
  shape.options = trace.options;
  shape.records = {trace.nbytes, std::move(last_save)};
  return shape.number;
}

void Learner::make_room(size_t record_count) {
  while (shapes_.size() >= kShapeLimit || (!shapes_.empty() && record_count_ + record_count > kRecordLimit)) {
    const auto oldest = std::ranges::min_element(shapes_, {}, &Shape::seen_at);
    record_count_ -= oldest->records.nbytes.size();
    shapes_.erase(oldest);
  }
}

void Learner::backward_began(uint32_t number, bool is_next) {
  Shape* const shape = find(number);
  if (shape != nullptr) shape->keeps_end = is_next;
}

void Learner::learn_times(uint32_t number, StepTimes times) {
  Shape* const shape = find(number);
  if (shape == nullptr || times.records.size() != shape->records.nbytes.size()) return;
  shape->times = std::move(times);
  shape->plans = {};
}

const Plan* Learner::plan_of(uint32_t number) {
  Shape* const shape = find(number);
  return shape != nullptr ? &plan(*shape, shape->keeps_end) : nullptr;
}

Learner::Shape* Learner::find(uint32_t number) {
  const auto found = std::ranges::find(shapes_, number, &Shape::number);
  return found != shapes_.end() ? &*found : nullptr;
}

const Plan& Learner::plan(Shape& shape, bool keeps_end) {
  std::optional<Plan>& plan = shape.plans[keeps_end ? 1 : 0];
  if (!plan) plan = make_plan(shape.records, shape.times ? &*shape.times : nullptr, shape.options, keeps_end);
  return *plan;
}

}  // namespace torchoffload
