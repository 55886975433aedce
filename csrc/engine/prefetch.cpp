// What is on the device ahead of its consumer: what is reloaded next, and what goes back to its slot unused.
#include <algorithm>
#include <utility>

#include "core/tape_records.h"
#include "engine/engine.h"

namespace torchoffload {

namespace {

constexpr size_t kTapesAhead = 4;  // tapes smaller than the window follow each other

}  // namespace

// ---- ahead ----

// The window may have room by now: what was kept has died, or was asked for.
void Engine::go_on_reloading() {
  const auto [engine, tape, graph_task] = ThreadState::current().asked;
  if (engine == nullptr || graph_task != program::graph_task()) return;
  if (engine->is_inherited() || !engine->ledger_.has_tape(tape)) return;
  engine->reap();
  if (engine->ledger_.has_tape(tape)) engine->prefetch(tape);
}

void Engine::prefetch(TapeId tape) {
  if (backend_.streams.is_capturing()) return;
  const uint64_t kept_bytes = windows_.kept_bytes(tape);
  const bool goes_on = tapes_[tape.index].context->options.learn && lessons_.is_latest(tape);
  if (reload_ahead(tape, kept_bytes, AtSource::GoesOn) && goes_on) prefetch_coming(kept_bytes);
}

bool Engine::reload_ahead(TapeId id, uint64_t kept_bytes, AtSource at_source) {
  if (windows_.reload_place(id) == ledger_.tape(id).first_save) return true;
  auto wanted = windows_.take_reloads(id, kept_bytes, at_source, TapeRecords(ledger_, id));
  std::erase_if(wanted, [&](const Windows::Ahead& ahead) { return lock_given_up(ahead.record).has_value(); });
  start_reloads(wanted, Reload::Ahead);
  return ledger_.has_tape(id) && windows_.reload_place(id) == ledger_.tape(id).first_save;
}

// The ends of the tapes whose backwards come next, as far as the window goes. Of one whose end is still here, on its
// way out or to be, nothing: what was reloaded before that would fill the window that its end will need first.
void Engine::prefetch_coming(uint64_t kept_bytes) {
  for (size_t places = 0; places < kTapesAhead; ++places) {
    const std::optional<TapeId> next = lessons_.coming(places);
    if (!next || !ledger_.has_tape(*next) || ledger_.is_open(*next)) return;
    if (!tapes_[next->index].context->options.learn) return;
    kept_bytes += windows_.kept_bytes(*next);
    if (!reload_ahead(*next, kept_bytes, AtSource::Stops)) return;
  }
}

// A forward ended. What it drove out of the offload window may be what the next backward, of an older tape, begins
// with.
void Engine::forward_ended(TapeId tape) {
  if (is_inherited() || !lessons_.is_backward_next() || lessons_.coming(0) == tape || backend_.streams.is_capturing())
    return;
  prefetch_coming(0);
}

// ---- passed by ----

// R11: what was reloaded ahead and then passed by goes back to its slot.
void Engine::let_pass(TapeId tape, uint64_t place) {
  if (windows_.ahead().empty() || mutated(Mutant::PassedByReturnsToOffloaded)) return;
  for (const RecordId id : windows_.passed_by(tape, place, TapeRecords(ledger_, tape))) pass_by(id);
}

// Others may have passed it by, or used it, before.
void Engine::pass_by(RecordId id) {
  if (!ledger_.is_live(id) || !ledger_.record(id).prefetched) return;
  leave_reload_window(id);
  ledger_.pass_by(id);
  count(row(ledger_.record(id).tape), &TapeRow::passed_by, 1);
  streams_.retire(std::exchange(held(id).bytes, {}), Rule::DroppedBufferWaitsForReload);
}

void Engine::pass_by_others(TapeId id) {
  for (const RecordId ahead : std::vector(windows_.ahead())) {
    if (!ledger_.is_live(ahead)) continue;  // another thread released it while the one before was passed by
    const TapeId tape = ledger_.record(ahead).tape;
    if (tape != id && !tapes_[tape.index].has_backward_begun) pass_by(ahead);
  }
}

// ---- given up ----

void Engine::give_up_if_seen(RecordId id) {
  if (ledger_.record(id).state != RecordState::Reloaded) return;
  if (ledger_.all_seen(id) || mutated(Mutant::BufferHeldUntilSeen)) give_up(id);
}

void Engine::give_up(RecordId id) {
  HeldRecord& held = this->held(id);
  if (!held.slot_is_complete(ledger_.record(id), backend_.memory, backend_.link, streams_)) return;
  const Rule rule = held.are_bytes_reloaded() ? Rule::DroppedBufferWaitsForReload : Rule::DroppedSourceWaitsForOffload;
  DeviceBytes bytes = held.give_up();
  ledger_.give_up(id);
  streams_.retire(std::move(bytes), rule);
}

}  // namespace torchoffload
