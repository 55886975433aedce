// What the engine tells the Learner of each tape, and keeps because of what was learned.
#include <ATen/SequenceNumber.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "autograd/engine.h"

namespace torchoffload {

namespace {

constexpr uint64_t kTimedTapeLife = 64;                // in tapes: one that outlives as many later ones is not timed on
constexpr size_t kTapesAhead = 4;                      // tapes smaller than the window follow each other
constexpr double kLatencyS = 20e-6;                    // of a copy, beside its bytes
constexpr uint64_t kTellingBytes = uint64_t{4} << 20;  // copies of that size tell the link's rate

}  // namespace

// ---- forward ----

void Engine::begin_trace(TapeInfo& tape) {
  learn_times();
  if (timeline_.is_on()) {
    for (TapeInfo& known : tapes_) {
      if (known.is_timed && known.number + kTimedTapeLife < tape.number) stop_timing(known, /*is_complete=*/false);
    }
  }
  if (tape.context->options.learn)
    tape.trace = learner_.begin(tape.context->options.windows, order_.is_own_backward_next(tape.order_number));
  windows_.set_limits(tape.id, default_windows(tape.context->options.windows, tape.largest_record_bytes));
}

// The tape's next record, of this tensor: what it is, and how much its operator saved by now.
RecordKind Engine::note_operator(TapeInfo& tape, const at::Tensor& tensor, uint64_t nbytes) {
  const uint64_t sequence_number = at::sequence_number::peek();
  const bool is_same_operator = std::exchange(tape.latest_operator, sequence_number) == sequence_number;
  tape.operator_bytes = is_same_operator ? tape.operator_bytes + nbytes : nbytes;
  for (TapeRow* const row : {&tape.row, &Statistics::global().totals})
    row->bytes_at_once = std::max(row->bytes_at_once, tape.operator_bytes);
  return {static_cast<uint8_t>(tensor.scalar_type()), static_cast<uint8_t>(std::min<int64_t>(tensor.dim(), UINT8_MAX)),
          is_same_operator};
}

// Why the tape's next record is to stay, or None.
KeptReason Engine::learned_reason(TapeInfo& tape, const at::Tensor& tensor, uint64_t nbytes) {
  tape.latest_record = ++records_added_;
  tape.largest_record_bytes = std::max(tape.largest_record_bytes, nbytes);
  const bool is_first = tape.record_count == 0;
  const bool was_known = tape.trace.is_known();
  const RecordKind kind = note_operator(tape, tensor, nbytes);
  KeptReason reason = tape.context->options.learn ? learner_.next(tape.trace, nbytes, kind) : KeptReason::None;
  if (is_first && tape.trace.is_timed && backend_.tells_time()) {
    tape.is_timed = true;
    timeline_.start();
    tape.first_entry = timeline_.entry_count();
  } else if (tape.is_timed && !tape.trace.is_timed) {
    stop_timing(tape, /*is_complete=*/false);
  }
  if (was_known && !tape.trace.is_known()) slots_.grow_ahead(*tape.context);
  const WindowBytes limits =
      learner_.windows(tape.trace).value_or(default_windows(tape.context->options.windows, tape.largest_record_bytes));
  windows_.set_limits(tape.id, limits);
  // L1: what lives on elsewhere frees nothing by being moved.
  if (tape.context->options.learn && lives_on_.contains(tensor.storage().unsafeGetStorageImpl()))
    return KeptReason::LivesOn;
  // A part of a storage pins all of it where it is kept, and counts towards the windows with its own bytes alone.
  if (nbytes < tensor.storage().nbytes()) return KeptReason::None;
  const bool is_bounded = reason == KeptReason::TapeEnd || reason == KeptReason::SmallCopy;
  if (is_bounded && learned_bytes_ + nbytes > limits.reload_bytes) return KeptReason::None;
  return reason;
}

// The tape that the context closed before tells how much there is: without one, and for a first, nothing is beyond.
bool Engine::is_beyond_fraction(TapeInfo& tape, uint64_t nbytes) {
  if (tape.context->options.fraction >= 1) return false;
  tape.eligible_bytes += nbytes;
  const auto known = tape.context->eligible_bytes.find(this);
  if (known == tape.context->eligible_bytes.end()) return false;
  const double limit_bytes = tape.context->options.fraction * static_cast<double>(known->second);
  return static_cast<double>(tape.eligible_bytes) > limit_bytes;
}

void Engine::keep_learned(RecordId id, KeptReason reason) {
  const Record& record = ledger_.record(id);
  ledger_.keep(id, reason);
  note_kept(id, reason, record.nbytes());
  if (reason == KeptReason::LivesOn || reason == KeptReason::BeyondFraction) return;
  holdings(id).learned_bytes = record.nbytes();
  windows_.kept(record.tape, record.nbytes());
  if (reason != KeptReason::NeededSoon) learned_bytes_ += record.nbytes();
}

void Engine::forget_learned(RecordId id) {
  const Record& record = ledger_.record(id);
  const uint64_t nbytes = std::exchange(holdings(id).learned_bytes, 0);
  windows_.released(record.tape, nbytes);
  if (record.kept != KeptReason::NeededSoon) learned_bytes_ -= nbytes;
}

// The tape closes: what it was, what of its storages lives on without us, and what it freed. Storages are looked at,
// not held: the last reference to one may be dropped by another thread meanwhile, and dropping it is not for here.
void Engine::learn_tape(TapeId id) {
  TapeInfo& info = tapes_[id.index];
  const bool learns = info.context->options.learn;
  const Tape& tape = ledger_.tape(id);
  std::vector<uint64_t> last_save(learns ? info.record_count : 0, 0);
  uint64_t next_number = 0;  // records are numbered by their first saves
  for (uint64_t number = tape.first_save; number < tape.end_save(); ++number) {
    const RecordId record_id = tape.save(number).record;
    if (!ledger_.is_live(record_id)) continue;
    const Holdings& held = holdings(record_id);
    if (learns) last_save[held.number] = number;
    if (held.number < next_number) continue;
    next_number = held.number + uint64_t{1};
    const Record& record = ledger_.record(record_id);
    if (!held.identity || record.kept != KeptReason::None) continue;
    const size_t owners = held.identity->use_count();
    const bool is_last_of_storage = record.next_same_storage == UINT32_MAX;
    if (owners == 0 && is_last_of_storage) count(info.row, &TapeRow::bytes_away, record.identity.nbytes);
    // A graph holds handles, no storage; we hold one where the source is still here.
    const bool is_held = record.state == RecordState::Resident || record.state == RecordState::Offloading;
    if (!learns || owners <= (is_held ? 1U : 0U)) continue;
    if (lived_on_.contains(held.identity->_unsafe_get_target())) lives_on_.insert(*held.identity);
    lived_on_.insert(*held.identity);
  }
  if (learns) info.shape = learner_.learn(info.trace, std::move(last_save));
}

void Engine::forget_learned_steps() {
  learner_ = {};
  Statistics::global().tapes_left_behind -= order_.left_behind_count();
  order_ = {};
  lived_on_ = {};
  lives_on_ = {};
}

// ---- backward ----

void Engine::backward_begins(TapeId id) {
  TapeInfo& tape = tapes_[id.index];
  if (std::exchange(tape.has_backward_begun, true)) return;
  if (!order_.backward_began(tape.order_number)) pass_by_others(id);
  if (tape.shape) learner_.backward_began(*tape.shape, tape.latest_record == records_added_);
}

// Another backward was expected: what was reloaded for it goes back to its slots.
void Engine::pass_by_others(TapeId id) {
  for (const RecordId ahead : std::vector(windows_.ahead())) {
    if (!ledger_.is_live(ahead)) continue;  // another thread released it while the one before was passed by
    const TapeId tape = ledger_.record(ahead).tape;
    if (tape != id && !tapes_[tape.index].has_backward_begun) pass_by(ahead);
  }
}

// The ends of the tapes whose backwards come next, as far as the window goes. Of one whose end is still here, on its
// way out or to be, nothing: what was reloaded before that would fill the window that its end will need first.
void Engine::prefetch_coming(uint64_t kept_bytes) {
  for (size_t places = 0; places < kTapesAhead; ++places) {
    const std::optional<TapeId> next = order_.coming(places);
    if (!next || !ledger_.has_tape(*next) || ledger_.is_open(*next)) return;
    const TapeInfo& info = tapes_[next->index];
    if (!info.context->options.learn) return;
    kept_bytes += windows_.kept_bytes(*next);
    if (!reload_ahead(*next, kept_bytes, AtSource::Stops)) return;
  }
}

// A forward ended. What it drove out of the offload window may be what the next backward, of an older tape, begins
// with.
void Engine::forward_ended(TapeId tape) {
  if (is_inherited() || !order_.is_backward_next() || order_.coming(0) == tape || backend_.is_capturing()) return;
  prefetch_coming(0);
}

// ---- times ----

Timeline::Entry Engine::entry(EntryKind kind, RecordId id) {
  Timeline::Entry entry;
  if (!timeline_.is_on()) return entry;
  const Record& record = ledger_.record(id);
  entry.kind = kind;
  entry.is_kept = record.kept != KeptReason::None;
  entry.tape = tapes_[record.tape.index].number;
  entry.record = holdings(id).number;
  entry.nbytes = record.nbytes();
  entry.out_bytes = windows_.offload_bytes();
  entry.in_bytes = windows_.reload_bytes();
  return entry;
}

// May block.
void Engine::mark(EntryKind kind, RecordId id, StreamId stream) {
  if (!timeline_.is_on() || backend_.is_capturing()) return;
  Timeline::Entry moment = entry(kind, id);
  moment.begin = timeline_.now(stream);
  if (moment.begin.is_set()) timeline_.add(moment);
}

void Engine::stop_timing(TapeInfo& tape, bool is_complete) {
  if (!std::exchange(tape.is_timed, false)) return;
  if (!is_complete || !tape.shape || !tape.has_backward_begun) return timeline_.stop();
  timed_tapes_.push_back({*tape.shape, tape.number, tape.record_count, tape.first_entry, timeline_.entry_count()});
}

// One step's times by the timeline's entries of a timed tape, our own waits taken out; its copies tell the link's rate.
StepTimes Engine::times_of(const TimedTape& tape) {
  StepTimes times;
  times.records.resize(tape.record_count);
  struct Rate {
    double bytes = 0;
    double seconds = 0;
  } out, in;
  double stalled_s = 0;
  std::optional<double> began_s;
  uint64_t largest_bytes = 0;  // that was copied
  for (uint64_t number = tape.first_entry; number < tape.end_entry; ++number) {
    const Timeline::Entry& entry = timeline_.entry(number);
    const bool is_copy = entry.kind == EntryKind::CopyOut || entry.kind == EntryKind::CopyIn;
    if (is_copy) largest_bytes = std::max(largest_bytes, entry.nbytes);
  }
  for (uint64_t number = tape.first_entry; number < tape.end_entry; ++number) {
    const Timeline::Entry& entry = timeline_.entry(number);
    const double span_s = entry.end_s - entry.begin_s;
    if (entry.kind == EntryKind::WindowWait || entry.kind == EntryKind::ReloadWait) {
      stalled_s += span_s;
    } else if (entry.kind == EntryKind::CopyOut || entry.kind == EntryKind::CopyIn) {
      if (entry.nbytes < std::min(kTellingBytes, largest_bytes)) continue;
      Rate& rate = entry.kind == EntryKind::CopyOut ? out : in;
      rate.bytes += static_cast<double>(entry.nbytes);
      rate.seconds += span_s;
    } else if (entry.tape == tape.number) {
      const double pure_s = entry.begin_s - stalled_s;
      if (!began_s) began_s = pure_s;
      StepTimes::Record& record = times.records.at(entry.record);
      (entry.kind == EntryKind::Ready ? record.ready_s : record.needed_s) = pure_s - *began_s;
      times.compute_s = std::max(times.compute_s, pure_s - *began_s);
    }
  }
  if (out.seconds > 0) link_.out_bytes_per_s = out.bytes / out.seconds;
  if (in.seconds > 0) link_.in_bytes_per_s = in.bytes / in.seconds;
  link_.latency_s = kLatencyS;
  times.link = link_;
  return times;
}

// Reads the times of timed tapes as far as the device has come. Asks the device only while there is such a tape.
void Engine::learn_times() {
  if (timed_tapes_.empty() || is_inherited() || backend_.is_capturing()) return;
  const uint64_t read_count = timeline_.read();
  while (!timed_tapes_.empty() && timed_tapes_.front().end_entry <= read_count) {
    const TimedTape& tape = timed_tapes_.front();
    learner_.learn_times(tape.shape, times_of(tape));
    timed_tapes_.pop_front();
    timeline_.stop();
  }
}

}  // namespace torchoffload
