#include "engine/records.h"

#include <exception>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/program.h"

namespace torchoffload {

// ---- tapes ----

void Records::tape_is_gone(TapeId id) {
  const HeldTape& info = held(id);
  const auto shape = info.has_backward_begun ? info.lessons.shape : std::nullopt;
  times.gone(info.number, shape, info.record_count);
  lessons.gone(info.lessons);
  count_left_behind();
  Statistics::global().tape_finished(info.row);
  --Statistics::global().live_tapes;
  held(id) = {};
}

void Records::count_left_behind() {
  const size_t now = lessons.left_behind_count();
  Statistics::global().tapes_left_behind += now;
  Statistics::global().tapes_left_behind -= std::exchange(left_behind_count, now);
}

// ---- times ----

Timeline::Entry Records::entry(EntryKind kind, RecordId id) {
  Timeline::Entry entry;
  if (!timeline.is_on()) return entry;
  const Record& record = ledger.record(id);
  entry.kind = kind;
  entry.is_kept = record.is_kept();
  entry.tape = held(record.tape).number;
  entry.record = held(id).number;
  entry.nbytes = record.nbytes();
  entry.out_bytes = windows.offload_bytes();
  entry.in_bytes = windows.reload_bytes();
  return entry;
}

void Records::mark(EntryKind kind, RecordId id, StreamId stream) {
  if (!timeline.is_on() || backend.streams.is_capturing()) return;
  Timeline::Entry moment = entry(kind, id);
  moment.begin = timeline.now(stream);
  if (moment.begin.is_set()) timeline.add(moment);
}

// ---- records ----

bool Records::is_pending(RecordId id) {
  if (!ledger.is_live(id)) return false;
  const Record& record = ledger.record(id);
  return record.state == RecordState::Resident && !record.is_kept() && record.live_handles > 0;
}

void Records::stop_waiting(RecordId id) {
  if (ledger.stop_awaiting_room(id)) windows.wait_ended(pinned_bytes(id));
}

void Records::note_kept(RecordId id, Reason why, uint64_t nbytes) {
  count_kept(row(ledger.record(id).tape), context(id).row_of(held(id).module), why, nbytes);
}

void Records::keep(RecordId id, Reason why) {
  HeldRecord& held = this->held(id);
  const Record& record = ledger.record(id);
  stop_waiting(id);
  if (record.has_slot) release_slot(held);
  slots.uncharge(context(id), std::exchange(held.charged_bytes, 0));
  note_kept(id, why, record.nbytes());
  ledger.keep(id, why);
}

void Records::weaken_if_seen(RecordId id) {
  if (ledger.record(id).state != RecordState::Reloaded) return;
  if (ledger.all_seen(id) || mutated(Mutant::BufferHeldUntilSeen)) weaken(id);
}

void Records::weaken(RecordId id) {
  HeldRecord& held = this->held(id);
  if (!held.slot_is_complete(ledger.record(id), backend.memory, backend.link, streams)) return;
  const Rule rule = held.are_bytes_reloaded() ? Rule::DroppedBufferWaitsForReload : Rule::DroppedSourceWaitsForOffload;
  DeviceBytes bytes = held.weaken();
  ledger.weaken(id);
  defer_free(std::move(bytes), rule, entry(EntryKind::DropWait, id));
}

// ---- the end of a record ----

void Records::release(const RecordHandle& handle) {
  const RecordId id = handle.record;
  if (ledger.is_last_handle(id)) {
    leave_windows(id);
    forget_learned(id);
  }
  const Ledger::DroppedHandle dropped = ledger.drop_handle(id, handle.seen_epoch);
  if (dropped.released) return drop_held(id, dropped);
  if (dropped.was == RecordState::Reloaded && !is_inherited()) weaken_if_seen(id);
}

void Records::release_hold(RecordId id) noexcept {
  try {
    if (ledger.release_hold_unless_last(id)) return;
    leave_windows(id);
    forget_learned(id);
    const Ledger::DroppedHandle dropped = ledger.release_hold(id);
    if (dropped.released) drop_held(id, dropped);
  } catch (const std::exception& error) {
    program::warn(std::string("torchoffload: a saved tensor could not be released: ") + error.what());
  }
}

void Records::leave_windows(RecordId id) {
  const Record& record = ledger.record(id);
  if (record.state == RecordState::Offloading) leave_offload_window(id);
  stop_waiting(id);
  if (record.prefetched) leave_reload_window(id);
}

void Records::forget_learned(RecordId id) {
  const Record& record = ledger.record(id);
  const uint64_t nbytes = std::exchange(held(id).learned_bytes, 0);
  if (nbytes == 0) return;
  held(record.tape).windows.released(nbytes);
  lessons.released(record.decision.why, nbytes);
}

// The memory goes last, because it may have to wait for a copy.
void Records::drop_held(RecordId id, const Ledger::DroppedHandle& dropped) {
  HeldRecord held = std::exchange(held_records[id.index], {});
  const bool is_reload = dropped.was == RecordState::Reloading || held.are_bytes_reloaded();
  struct AtTheEnd {  // frees the memory, also if an exception leaves this function
    Records& records;
    DeviceBytes bytes;
    const Rule rule;
    const Timeline::Entry what;
    ~AtTheEnd() { records.defer_free(std::move(bytes), rule, what); }
  } memory{*this, std::exchange(held.bytes, {}),
           is_reload ? Rule::DroppedBufferWaitsForReload : Rule::DroppedSourceWaitsForOffload,
           drop_wait(dropped, held)};
  if (is_inherited()) {  // no copy touches the memory in a child, and no device may be called there: it is leaked
    (void)memory.bytes.memory.release();
    memory.bytes = {};
  }
  // The slot is looked at, and not the record's state, because an exception may have come between the two.
  if (held.slot.nbytes() > 0) release_slot(held);
  for (const Point& copy_end : {held.offload_end, held.reload_end}) backend.link.forget(copy_end);
  slots.uncharge(*this->held(dropped.tape).context, held.charged_bytes);
  if (dropped.tape_gone) tape_is_gone(dropped.tape);
}

Timeline::Entry Records::drop_wait(const Ledger::DroppedHandle& dropped, const HeldRecord& held) const {
  Timeline::Entry entry;
  entry.kind = EntryKind::DropWait;
  entry.tape = this->held(dropped.tape).number;
  entry.record = held.number;
  entry.nbytes = dropped.nbytes;
  entry.out_bytes = windows.offload_bytes();
  entry.in_bytes = windows.reload_bytes();
  return entry;
}

void Records::defer_free(DeviceBytes bytes, Rule rule, const Timeline::Entry& what) noexcept {
  std::optional<TimedSpan> span;
  try {
    if (timeline.is_on() && streams.stalls_when_dropped(bytes, rule)) span.emplace(timeline, bytes.stream, what);
  } catch (const std::exception&) {  // no time; a failing device raises again at the next call that can report it
  }
  streams.defer_free(std::move(bytes), rule);
}

void Records::release_slot(HeldRecord& held) {
  std::vector<Point> guards;
  guards.reserve(2 + held.other_reload_ends.size());
  if (!held.offload_end.is_beginning() && !mutated(Mutant::SlotGuardedByOffload)) guards.push_back(held.offload_end);
  if (!held.reload_end.is_beginning() && !mutated(Mutant::SlotGuardedByReload)) guards.push_back(held.reload_end);
  guards.insert(guards.end(), held.other_reload_ends.begin(), held.other_reload_ends.end());
  if (!held.is_slot_lost) slots.release(held.slot, guards);
  Statistics::global().slot_released(held.slot.nbytes());
  held.slot = {};
}

}  // namespace torchoffload
