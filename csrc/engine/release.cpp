// How a record is released, and the upkeep at each hook event.
#include <exception>
#include <optional>
#include <string>
#include <utility>

#include "engine/engine.h"

namespace torchoffload {

void Engine::reap() {
  if (!streams_.has_polled()) return streams_.reap();
  while (const auto oldest = windows_.oldest_offload(asks_offloading())) {
    if (!streams_.is_seen_reached(held(*oldest).offload_end)) break;
    finish_offload(*oldest);
  }
  streams_.reap();
}

void Engine::release(const RecordHandle& handle) {
  if (!is_inherited()) {
    try {
      reap();
    } catch (const std::exception&) {  // that concerned other records; this one is released all the same
    }
  }
  const RecordId id = handle.record;
  if (ledger_.is_last_handle(id)) {
    leave_windows(id);
    forget_learned(id);
  }
  const Ledger::DroppedHandle dropped = ledger_.drop_handle(id, handle.seen_epoch);
  if (dropped.released) return drop_held(id, dropped);
  if (dropped.was == RecordState::Reloaded && !is_inherited()) weaken_if_seen(id);
}

void Engine::let_go(RecordId id) noexcept {
  try {
    if (ledger_.let_go_unless_last(id)) return;
    leave_windows(id);
    forget_learned(id);
    const Ledger::DroppedHandle dropped = ledger_.let_go(id);
    if (dropped.released) drop_held(id, dropped);
  } catch (const std::exception& error) {
    program::warn(std::string("torchoffload: a saved tensor could not be released: ") + error.what());
  }
}

void Engine::leave_windows(RecordId id) {
  const Record& record = ledger_.record(id);
  if (record.state == RecordState::Offloading) leave_offload_window(id);
  stop_waiting(id);
  if (record.prefetched) leave_reload_window(id);
}

void Engine::forget_learned(RecordId id) {
  const Record& record = ledger_.record(id);
  const uint64_t nbytes = std::exchange(held(id).learned_bytes, 0);
  if (nbytes == 0) return;
  windows_.released(record.tape, nbytes);
  lessons_.released(record.decision.why, nbytes);
}

// The memory goes last, because it may have to wait for a copy.
void Engine::drop_held(RecordId id, const Ledger::DroppedHandle& dropped) {
  HeldRecord held = std::exchange(held_[id.index], {});
  const bool is_reload = dropped.was == RecordState::Reloading || held.are_bytes_reloaded();
  struct AtTheEnd {  // retires the memory, also if an exception leaves this function
    Engine& engine;
    DeviceBytes bytes;
    const Rule rule;
    const Timeline::Entry what;
    ~AtTheEnd() { engine.retire(std::move(bytes), rule, what); }
  } memory{*this, std::exchange(held.bytes, {}),
           is_reload ? Rule::DroppedBufferWaitsForReload : Rule::DroppedSourceWaitsForOffload,
           drop_wait(dropped, held)};
  if (is_inherited()) {  // no copy touches the memory in a child, and no device may be called there: it is leaked
    (void)memory.bytes.memory.release();
    memory.bytes = {};
  }
  // The slot is looked at, and not the record's state, because an exception may have come between the two.
  if (held.slot.nbytes() > 0) learn_from_slot(held, dropped);
  if (held.slot.nbytes() > 0) release_slot(held);
  for (const Point& copy_end : {held.offload_end, held.reload_end}) backend_.link.forget(copy_end);
  slots_.uncharge(*tapes_[dropped.tape.index].context, held.charged_bytes);
  if (dropped.tape_gone) tape_is_gone(dropped.tape);
}

Timeline::Entry Engine::drop_wait(const Ledger::DroppedHandle& dropped, const HeldRecord& held) const {
  Timeline::Entry entry;
  entry.kind = EntryKind::DropWait;
  entry.tape = tapes_[dropped.tape.index].number;
  entry.record = held.number;
  entry.nbytes = dropped.nbytes;
  entry.out_bytes = windows_.offload_bytes();
  entry.in_bytes = windows_.reload_bytes();
  return entry;
}

void Engine::retire(DeviceBytes bytes, Rule rule, const Timeline::Entry& what) noexcept {
  std::optional<TimedSpan> span;
  try {
    if (timeline_.is_on() && streams_.stalls_when_dropped(bytes, rule)) span.emplace(timeline_, bytes.stream, what);
  } catch (const std::exception&) {  // no time; a failing device raises again at the next call that can report it
  }
  streams_.retire(std::move(bytes), rule);
}

void Engine::release_slot(HeldRecord& held) {
  std::vector<Point> guards;
  guards.reserve(2 + held.other_reload_ends.size());
  if (!held.offload_end.is_beginning() && !mutated(Mutant::SlotGuardedByOffload)) guards.push_back(held.offload_end);
  if (!held.reload_end.is_beginning() && !mutated(Mutant::SlotGuardedByReload)) guards.push_back(held.reload_end);
  guards.insert(guards.end(), held.other_reload_ends.begin(), held.other_reload_ends.end());
  if (!held.is_slot_lost) slots_.release(held.slot, guards);
  Statistics::global().slot_released(held.slot.nbytes());
  held.slot = {};
}

}  // namespace torchoffload
