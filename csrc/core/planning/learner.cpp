#include "core/planning/learner.h"

#include <algorithm>
#include <utility>

namespace torchoffload {

namespace {

constexpr uint32_t kTimedAgain = 64;  // after so many tapes of a shape, the next one is timed again

// Is the next tape of a shape or structure due to be timed, once `sightings` of its tapes were learned?
bool is_time_due(uint32_t sightings) {
  return sightings == 1 || sightings == 4 || (sightings > 0 && sightings % kTimedAgain == 0);
}

template <typename Value>
bool is_prefix(const std::vector<Value>& prefix, const std::vector<Value>& of) {
  return prefix.size() <= of.size() && std::equal(prefix.begin(), prefix.end(), of.begin());
}

// Evicts as many as it takes for one more that has `record_count` records, those first that were seen the longest ago.
template <typename Known, typename RecordsOf>
void evict_oldest(std::vector<Known>& known, size_t record_count, RecordsOf records_of) {
  for (const Known& each : known) record_count += records_of(each);
  while (known.size() >= Learner::kShapeLimit || (!known.empty() && record_count > Learner::kRecordLimit)) {
    const auto oldest = std::ranges::min_element(known, {}, &Known::seen_at);
    record_count -= records_of(*oldest);
    known.erase(oldest);
  }
}

template <typename Known>
Known* find_in(std::vector<Known>& known, uint32_t number) {
  const auto found = std::ranges::find(known, number, &Known::number);
  return found != known.end() ? &*found : nullptr;
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
    const bool is_like = shape.options == trace.options && is_prefix(trace.nbytes, shape.records.nbytes) &&
                         is_prefix(trace.kinds, shape.records.kinds);
    if (is_like) like |= uint32_t{1} << place;
  }
  return like;
}

Reason Learner::next(Trace& trace, uint64_t nbytes, RecordKind kind) {
  if (trace.is_long) return Reason::None;
  const size_t position = trace.nbytes.size();
  if (position == kRecordLimit) {
    const WindowOptions options = trace.options;
    trace = {};
    trace.options = options;
    trace.is_long = true;
    return Reason::None;
  }
  trace.nbytes.push_back(nbytes);
  trace.kinds.push_back(kind);
  Reason reason = Reason::None;
  if (Shape* const shape = follow_shape(trace)) {
    reason = plan(*shape, trace.keeps_end.value_or(shape->keeps_end)).kept[position];
    if (position == 0) trace.is_timed = is_time_due(shape->sightings);
  } else {
    reason = follow_structure(trace);
  }
  if (!trace.is_known()) trace.is_timed = false;
  return reason;
}

Learner::Shape* Learner::follow_shape(Trace& trace) {
  if (trace.candidates == 0) return nullptr;
  if (trace.known_since != changes_) {
    trace.candidates = all_like(trace);
    trace.known_since = changes_;
  } else {
    const size_t position = trace.nbytes.size() - 1;
    for (size_t place = 0; place < shapes_.size(); ++place) {
      const StepShape& known = shapes_[place].records;
      const bool goes_on = position < known.count() && known.nbytes[position] == trace.nbytes.back() &&
                           known.kinds[position] == trace.kinds.back();
      if (!goes_on) trace.candidates &= ~(uint32_t{1} << place);
    }
  }
  const Shape* const known = latest(trace.candidates);
  return known != nullptr ? &shapes_[static_cast<size_t>(known - shapes_.data())] : nullptr;
}

Reason Learner::follow_structure(Trace& trace) {
  const size_t position = trace.nbytes.size() - 1;
  const bool may_expect_anew = trace.expected_count < kExpectedLimit;
  if (trace.scaled && trace.scaled->matches(position, trace.nbytes.back(), trace.kinds.back(), may_expect_anew))
    return trace.scaled->plan().kept[position];
  trace.scaled.reset();
  if (!may_expect_anew) return Reason::None;
  Structure* const structure = latest_structure(trace);
  if (structure == nullptr) {
    trace.expected_count = kExpectedLimit;  // no structure is looked for again in this tape
    return Reason::None;
  }
  ++trace.expected_count;
  if (position == 0) trace.is_timed = is_time_due(structure->sightings);
  trace.scaled = std::make_shared<ScaledTape>(*structure, trace.nbytes, trace.keeps_end.value_or(structure->keeps_end));
  return trace.scaled->plan().kept[position];
}

std::optional<WindowBytes> Learner::windows(const Trace& trace) const {
  if (trace.nbytes.empty()) return std::nullopt;
  const size_t position = trace.nbytes.size() - 1;
  if (trace.scaled) return trace.scaled->plan().windows(position);
  if (trace.known_since != changes_) return std::nullopt;  // not known until the tape's next record
  const Shape* const shape = latest(trace.candidates);
  if (shape == nullptr) return std::nullopt;
  const std::optional<Plan>& plan = shape->plans[trace.keeps_end.value_or(shape->keeps_end) ? 1 : 0];
  return plan ? std::optional(plan->windows(position)) : std::nullopt;
}

const Learner::Shape* Learner::latest(uint32_t candidates) const {
  const Shape* found = nullptr;
  for (size_t place = 0; place < shapes_.size(); ++place) {
    const bool is_candidate = (candidates >> place & 1) != 0;
    if (is_candidate && (found == nullptr || shapes_[place].seen_at > found->seen_at)) found = &shapes_[place];
  }
  return found;
}

Structure* Learner::latest_structure(const Trace& trace) {
  Structure* found = nullptr;
  for (Structure& structure : structures_) {
    const bool is_later = found == nullptr || structure.seen_at > found->seen_at;
    if (is_later && structure.options == trace.options && is_prefix(trace.kinds, structure.sample.kinds))
      found = &structure;
  }
  return found;
}

std::optional<uint32_t> Learner::learn(const Trace& trace, std::vector<uint64_t> last_save) {
  if (trace.is_long || trace.nbytes.empty()) return std::nullopt;
  // next() got a record that was then refused with an error. Then the numbers of the tape's records do not match.
  if (trace.nbytes.size() != last_save.size()) return std::nullopt;
  ++clock_;
  const uint32_t structure = learn_structure(trace, last_save);
  for (Shape& shape : shapes_) {
    const bool is_this =
        shape.options == trace.options && shape.records.nbytes == trace.nbytes && shape.records.kinds == trace.kinds;
    if (!is_this) continue;
    ++shape.sightings;
    shape.seen_at = clock_;
    shape.structure = structure;
    return shape.number;
  }
  evict_oldest(shapes_, trace.nbytes.size(), [](const Shape& shape) { return shape.records.count(); });
  ++changes_;
  Shape& shape = shapes_.emplace_back();
  shape.number = next_number_++;
  shape.structure = structure;
  shape.sightings = 1;
  shape.seen_at = clock_;
  shape.options = trace.options;
  shape.records = {trace.nbytes, std::move(last_save), trace.kinds};
  return shape.number;
}

uint32_t Learner::learn_structure(const Trace& trace, const std::vector<uint64_t>& last_save) {
  for (Structure& structure : structures_) {
    if (structure.options != trace.options || structure.sample.kinds != trace.kinds) continue;
    ++structure.sightings;
    structure.seen_at = clock_;
    structure.saw(trace.nbytes);
    return structure.number;
  }
  evict_oldest(structures_, trace.nbytes.size(), [](const Structure& known) { return known.sample.count(); });
  Structure& structure = structures_.emplace_back();
  structure.number = next_number_++;
  structure.sightings = 1;
  structure.seen_at = clock_;
  structure.options = trace.options;
  structure.sample = {trace.nbytes, last_save, trace.kinds};
  return structure.number;
}

void Learner::backward_began(uint32_t number, bool is_next) {
  Shape* const shape = find(number);
  if (shape == nullptr) return;
  shape->keeps_end = is_next;
  if (Structure* const structure = find_structure(shape->structure)) structure->keeps_end = is_next;
}

void Learner::learn_times(uint32_t number, const StepTimes& times) {
  Shape* const shape = find(number);
  if (shape == nullptr || times.records.size() != shape->records.count()) return;
  if (Structure* const structure = find_structure(shape->structure)) {
    structure->sample = shape->records;
    structure->times = times;
    structure->window_bytes.reset();
    for (Shape& other : shapes_) {
      if (other.structure == structure->number && !other.times) other.plans = {};
    }
  }
  shape->times = times;
  shape->plans = {};
}

const Plan* Learner::plan_of(uint32_t number) {
  Shape* const shape = find(number);
  return shape != nullptr ? &plan(*shape, shape->keeps_end) : nullptr;
}

void Learner::plan_as(const Plan& plan) {
  for (Shape& shape : shapes_) {
    if (shape.records.count() == plan.kept.size()) shape.plans = {plan, plan};
  }
}

Learner::Shape* Learner::find(uint32_t number) { return find_in(shapes_, number); }

Structure* Learner::find_structure(uint32_t number) { return find_in(structures_, number); }

const Plan& Learner::plan(Shape& shape, bool keeps_end) {
  std::optional<Plan>& plan = shape.plans[keeps_end ? 1 : 0];
  if (plan) return *plan;
  // A shape that was not timed itself takes its times from another length of the same structure, scaled.
  std::optional<StepTimes> times = shape.times;
  const Structure* const structure = find_structure(shape.structure);
  if (!times && structure != nullptr) times = structure->times_for(shape.records);
  plan = make_plan(shape.records, times ? &*times : nullptr, shape.options, keeps_end);
  return *plan;
}

}  // namespace torchoffload
