// Reloads ahead of the consumer: which records are reloaded next, and which ones go back to their slots unused.
#include <algorithm>
#include <utility>

#include "core/tape_records.h"
#include "engine/reloader.h"

namespace torchoffload {

namespace {

constexpr size_t kTapesAhead = 4;  // so many tapes may be reloaded at once, if each is smaller than the window

// The most that may be reloaded ahead while a tape is in backward. If a plan gives modules windows of their own, it
// counts no more for the module in backward than that module's window.
uint64_t most_ahead_of(const HeldTape& tape) {
  return tape.context->module_windows.empty() ? kAnyBytes : tape.windows.limits().reload_bytes;
}

}  // namespace

// ---- ahead ----

// The window may have room by now, because a kept record was released.
void Reloader::go_on_reloading() {
  const auto [reloader, tape, graph_task] = ThreadState::current().asked;
  if (reloader == nullptr || graph_task != program::graph_task()) return;
  if (reloader->records_.is_inherited() || !reloader->ledger_.has_tape(tape)) return;
  reloader->offloader_.free_deferred();
  Operation::drop_now();
  if (reloader->ledger_.has_tape(tape)) reloader->prefetch(tape);
}

void Reloader::prefetch(TapeId tape, const AlsoWait& also) {
  if (backend_.streams.is_capturing()) return;
  const HeldTape& asked = held(tape);
  const uint64_t kept_bytes = asked.windows.kept_bytes();
  const uint64_t most_bytes = most_ahead_of(asked);
  const bool goes_on = asked.context->options.learn && lessons_.is_latest(asked.lessons);
  if (reload_ahead(tape, kept_bytes, kAnyBytes, AtSource::GoesOn, also) && goes_on) {
    prefetch_coming(kept_bytes, most_bytes);
  }
}

bool Reloader::reload_ahead(TapeId id, uint64_t kept_bytes, uint64_t most_bytes, AtSource at_source,
                            const AlsoWait& also) {
  TapeWindows& windows = held(id).windows;
  if (windows.reload_place() == ledger_.tape(id).first_save) return true;
  const TapeRecords::IsHere is_here = [this](RecordId record)
                                          REQUIRES(gil) { return slots_.is_here(held(record).slot); };
  if (slots_.moves_slots()) fetch_ahead(id);
  const TapeRecords records(ledger_, id, slots_.moves_slots() ? &is_here : nullptr);
  auto wanted = windows_.take_reloads(windows, kept_bytes, at_source, records, most_bytes);
  std::erase_if(wanted, [&](const CopyWindows::Ahead& ahead)
                            REQUIRES(gil) { return records_.lock_weak(ahead.record).has_value(); });
  start_reloads(wanted, Reload::Ahead, also);
  return ledger_.has_tape(id) && windows.reload_place() == ledger_.tape(id).first_save;
}

// The slots that come next may have gone to the disk again after they were looked at.
void Reloader::fetch_ahead(TapeId id) {
  const Tape& tape = ledger_.tape(id);
  const auto begin_fetch = [&](uint64_t save) {
    gil.assert_held();
    const RecordId record = tape.save(save).record;
    if (!ledger_.is_live(record) || ledger_.record(record).state != RecordState::Offloaded) return true;
    return slots_.begin_fetch(held(record).slot);
  };
  const uint64_t next = held(id).windows.reload_place();
  uint64_t& place = held(id).fetch_place;
  place = std::min(place, next);
  if (place < next && next > tape.first_save && !begin_fetch(next - 1)) return;
  while (place > tape.first_save && begin_fetch(place - 1)) --place;
}

// Reloads the ends of the tapes whose backwards come next, as far as the window goes. The search stops at a tape whose
// end has not left the device yet: records reloaded from before that end would fill the window that the end needs
// first.
void Reloader::prefetch_coming(uint64_t kept_bytes, uint64_t most_bytes) {
  for (size_t places = 0; places < kTapesAhead; ++places) {
    const std::optional<TapeId> next = lessons_.coming(places);
    if (!next || !ledger_.has_tape(*next) || ledger_.is_open(*next)) return;
    const HeldTape& coming = held(*next);
    if (!coming.context->options.learn) return;
    kept_bytes += coming.windows.kept_bytes();
    most_bytes = std::min(most_bytes, most_ahead_of(coming));  // for the tapes behind it, too: it comes before them
    if (!reload_ahead(*next, kept_bytes, most_bytes, AtSource::Stops)) return;
  }
}

// The copies of this forward may have pushed an older tape's end out of the offload window, and the next backward may
// begin with that end.
void Reloader::forward_ended(TapeId tape) {
  if (records_.is_inherited() || !lessons_.is_backward_next() || lessons_.coming(0) == tape ||
      backend_.streams.is_capturing())
    return;
  prefetch_coming(0, kAnyBytes);
}

// ---- passed by ----

void Reloader::let_pass(TapeId tape, uint64_t place) {
  if (windows_.ahead().empty() || mutated(Mutant::PassedByReturnsToOffloaded)) return;
  for (const RecordId id : windows_.passed_by(held(tape).windows, place, TapeRecords(ledger_, tape))) pass_by(id);
}

// Another thread may have passed the record by, or used it, before.
void Reloader::pass_by(RecordId id) {
  if (!ledger_.is_live(id) || !ledger_.record(id).prefetched) return;
  records_.leave_reload_window(id);
  ledger_.pass_by(id);
  count(records_.row(ledger_.record(id).tape), &TapeRow::passed_by, 1);
  records_.defer_free(std::exchange(held(id).bytes, {}), Rule::DroppedBufferWaitsForReload,
                      records_.entry(EntryKind::DropWait, id));
}

void Reloader::pass_by_others(TapeId id) {
  for (const RecordId ahead : std::vector(windows_.ahead())) {
    if (!ledger_.is_live(ahead)) continue;  // another thread released it while the one before was passed by
    const TapeId tape = ledger_.record(ahead).tape;
    if (tape != id && !held(tape).has_backward_begun) pass_by(ahead);
  }
}

}  // namespace torchoffload
