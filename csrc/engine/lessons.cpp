#include "engine/lessons.h"

#include <algorithm>
#include <utility>

namespace torchoffload {

// ---- forward ----

WindowBytes Lessons::opened(TapeLessons& tape, TapeId id, const WindowOptions& options, bool learns) {
  tape = {};
  tape.options = options;
  tape.learns = learns;
  tape.order_number = order_.opened(id);
  if (learns) tape.trace = learner_.begin(options, order_.is_own_backward_next(tape.order_number));
  return default_windows(options, 0);
}

RecordKind Lessons::note_operator(TapeLessons& tape, const NewRecord& record) {
  const bool is_same_operator = std::exchange(tape.latest_operator, record.operator_number) == record.operator_number;
  tape.operator_bytes = is_same_operator ? tape.operator_bytes + record.nbytes : record.nbytes;
  return {record.dtype, record.dim, is_same_operator};
}

Lessons::Known Lessons::next(TapeLessons& tape, const NewRecord& record) {
  tape.latest_record = ++records_seen_;
  tape.largest_record_bytes = std::max(tape.largest_record_bytes, record.nbytes);
  const bool was_known = tape.trace.is_known();
  const RecordKind kind = note_operator(tape, record);
  Known known;
  if (tape.learns) known.why = learner_.next(tape.trace, record.nbytes, kind);
  known.operator_bytes = tape.operator_bytes;
  known.wants_times = tape.trace.is_timed;
  known.has_lost_way = was_known && !tape.trace.is_known();
  known.limits = learner_.windows(tape.trace).value_or(default_windows(tape.options, tape.largest_record_bytes));
  // A part of a storage is kept for no learned reason but lives_on: it would pin all of the storage, while the windows
  // would count the part's bytes alone.
  const bool is_part = record.nbytes < record.memory.nbytes();
  const bool is_bounded = known.why == Reason::TapeEnd || known.why == Reason::SmallCopy;
  const bool is_too_much = is_bounded && learned_bytes_ + record.nbytes > known.limits.reload_bytes;
  if (is_part || is_too_much) known.why = Reason::None;
  // Moving a storage that others hold until after backward would free nothing.
  if (tape.learns && lives_on_.contains(record.memory.storage())) known.why = Reason::LivesOn;
  return known;
}

void Lessons::kept(Reason why, uint64_t nbytes) {
  if (why != Reason::NeededSoon) learned_bytes_ += nbytes;
}

void Lessons::released(Reason why, uint64_t nbytes) {
  if (why != Reason::NeededSoon) learned_bytes_ -= nbytes;
}

void Lessons::outlived(const WeakMemory& memory) {
  if (lived_on_.contains(memory.storage())) lives_on_.insert(memory);
  lived_on_.insert(memory);
}

void Lessons::closed(TapeLessons& tape, std::vector<uint64_t> last_save) {
  if (tape.learns) tape.shape = learner_.learn(tape.trace, std::move(last_save));
}

// ---- backward ----

bool Lessons::backward_began(const TapeLessons& tape) {
  const bool was_expected = order_.backward_began(tape.order_number);
  if (tape.shape) learner_.backward_began(*tape.shape, tape.latest_record == records_seen_);
  return was_expected;
}

// ---- tests ----

void Lessons::clear() {
  learner_ = {};
  order_ = {};
  lived_on_ = {};
  lives_on_ = {};
}

}  // namespace torchoffload
