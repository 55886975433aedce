// Reloads ahead of the consumer: which records are reloaded next, and which ones go back to their slots unused.
#include <algorithm>
#include <utility>

#include "core/tape_records.h"
#include "engine/engine.h"

namespace torchoffload {

namespace {

constexpr size_t kTapesAhead = 4;  // so many tapes may be reloaded at once, if each is smaller than the window

}  // namespace

// ---- ahead ----

// The window may have room by now, because a kept record was released.
void Engine::go_on_reloading() {
  const auto [engine, tape, graph_task] = ThreadState::current().asked;
  if (engine == nullptr || graph_task != program::graph_task()) return;
  if (engine->is_inherited() || !engine->ledger_.has_tape(tape)) return;
  engine->reap();
  Operation::drop_now();
  if (engine->ledger_.has_tape(tape)) engine->prefetch(tape);
}

void Engine::prefetch(TapeId tape, const AlsoWait& also) {
  if (backend_.streams.is_capturing()) return;
  const uint64_t kept_bytes = windows_.kept_bytes(tape);
  const bool goes_on = tapes_[tape.index].context->options.learn && lessons_.is_latest(tape);
  if (reload_ahead(tape, kept_bytes, AtSource::GoesOn, also) && goes_on) prefetch_coming(kept_bytes);
}

bool Engine::reload_ahead(TapeId id, uint64_t kept_bytes, AtSource at_source, const AlsoWait& also) {
  if (windows_.reload_place(id) == ledger_.tape(id).first_save) return true;
  const TapeRecords::IsHere is_here = [this](RecordId record)
                                          REQUIRES(gil) { return slots_.is_here(held(record).slot); };
  if (slots_.moves_slots()) fetch_ahead(id);
  const TapeRecords records(ledger_, id, slots_.moves_slots() ? &is_here : nullptr);
  auto wanted = windows_.take_reloads(id, kept_bytes, at_source, records);
  std::erase_if(wanted, [&](const Windows::Ahead& ahead) REQUIRES(gil) { return lock_weak(ahead.record).has_value(); });
  start_reloads(wanted, Reload::Ahead, also);
  return ledger_.has_tape(id) && windows_.reload_place(id) == ledger_.tape(id).first_save;
}

// The slots that come next may have gone to the disk again after they were looked at.
void Engine::fetch_ahead(TapeId id) {
  const Tape& tape = ledger_.tape(id);
  const auto begin_fetch = [&](uint64_t save) {
    gil.assert_held();
    const RecordId record = tape.save(save).record;
    if (!ledger_.is_live(record) || ledger_.record(record).state != RecordState::Offloaded) return true;
    return slots_.begin_fetch(held(record).slot);
  };
  const uint64_t next = windows_.reload_place(id);
  uint64_t& place = tapes_[id.index].fetch_place;
  place = std::min(place, next);
  if (place < next && next > tape.first_save && !begin_fetch(next - 1)) return;
  while (place > tape.first_save && begin_fetch(place - 1)) --place;
}

// Reloads the ends of the tapes whose backwards come next, as far as the window goes. The search stops at a tape whose
// end has not left the device yet: records reloaded from before that end would fill the window that the end needs
// first.
void Engine::prefetch_coming(uint64_t kept_bytes) {
  for (size_t places = 0; places < kTapesAhead; ++places) {
    const std::optional<TapeId> next = lessons_.coming(places);
    if (!next || !ledger_.has_tape(*next) || ledger_.is_open(*next)) return;
    if (!tapes_[next->index].context->options.learn) return;
    kept_bytes += windows_.kept_bytes(*next);
    if (!reload_ahead(*next, kept_bytes, AtSource::Stops)) return;
  }
}

// The copies of this forward may have pushed an older tape's end out of the offload window, and the next backward may
// begin with that end.
void Engine::forward_ended(TapeId tape) {
  if (is_inherited() || !lessons_.is_backward_next() || lessons_.coming(0) == tape || backend_.streams.is_capturing())
    return;
  prefetch_coming(0);
}

// ---- passed by ----

void Engine::let_pass(TapeId tape, uint64_t place) {
  if (windows_.ahead().empty() || mutated(Mutant::PassedByReturnsToOffloaded)) return;
  for (const RecordId id : windows_.passed_by(tape, place, TapeRecords(ledger_, tape))) pass_by(id);
}

// Another thread may have passed the record by, or used it, before.
void Engine::pass_by(RecordId id) {
  if (!ledger_.is_live(id) || !ledger_.record(id).prefetched) return;
  leave_reload_window(id);
  ledger_.pass_by(id);
  count(row(ledger_.record(id).tape), &TapeRow::passed_by, 1);
  retire(std::exchange(held(id).bytes, {}), Rule::DroppedBufferWaitsForReload, entry(EntryKind::DropWait, id));
}

void Engine::pass_by_others(TapeId id) {
  for (const RecordId ahead : std::vector(windows_.ahead())) {
    if (!ledger_.is_live(ahead)) continue;  // another thread released it while the one before was passed by
    const TapeId tape = ledger_.record(ahead).tape;
    if (tape != id && !tapes_[tape.index].has_backward_begun) pass_by(ahead);
  }
}

// ---- given up ----

void Engine::weaken_if_seen(RecordId id) {
  if (ledger_.record(id).state != RecordState::Reloaded) return;
  if (ledger_.all_seen(id) || mutated(Mutant::BufferHeldUntilSeen)) weaken(id);
}

void Engine::weaken(RecordId id) {
  HeldRecord& held = this->held(id);
  if (!held.slot_is_complete(ledger_.record(id), backend_.memory, backend_.link, streams_)) return;
  const Rule rule = held.are_bytes_reloaded() ? Rule::DroppedBufferWaitsForReload : Rule::DroppedSourceWaitsForOffload;
  DeviceBytes bytes = held.weaken();
  ledger_.weaken(id);
  retire(std::move(bytes), rule, entry(EntryKind::DropWait, id));
}

}  // namespace torchoffload
