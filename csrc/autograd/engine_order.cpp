// How streams are ordered, and how what a copy touches is dropped: after a wait for that copy, or not yet.
//
// Note [Streams that may be destroyed]
// PyTorch takes streams from outside (ExternalStream). Their owner may destroy one whenever it likes, and any call that
// names a destroyed stream may fail, hang or reach another stream that got its handle. Such a stream is there for sure
// only while it is the current one of the calling thread. So no call of ours names it at any other time:
// - What was saved on it moves if it is still current when the copy is enqueued, and else it is kept.
// - The allocator is not told that it used a source: it would ask the stream when the memory is freed. A source is
//   dropped after the host has waited for its copy, which is after the operators that filled it; then no stream needs
//   to wait.
// - A reload buffer is dropped after the stream was told to wait for the copy, if it is current, and else after the
//   host has waited.
// - It is not remembered what such a stream has waited for, and a point of it says nothing of one that has its id
//   later.
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "autograd/engine.h"
#include "autograd/operation.h"
#include "core/mutant.h"

namespace torchoffload {

// ---- order ----

// Must `waiter` be told to wait for `point`? Not where it is known to have waited for it or for a later one of that
// stream. On I/O, where asking costs little and a wait of the host blocks, nothing is remembered.
bool Engine::must_wait(StreamId waiter, Point point) {
  if (point.is_beginning()) return false;
  if (backend_.completes_in_background()) return backend_.status(point) == PointStatus::Pending;
  return !is_ordered(waiter, point);
}

// `waiter` was told to wait for `point`.
void Engine::remember_wait(StreamId waiter, Point point) {
  if (backend_.completes_in_background() || !is_lasting(waiter)) return;
  const auto known = std::find_if(waited_.begin(), waited_.end(), [&](const Waited& waited) {
    return waited.waiter == waiter && waited.producer == point.stream;
  });
  if (known != waited_.end()) {
    known->serial = std::max(known->serial, point.serial);  // another thread may have come further
  } else {
    waited_.push_back({waiter, point.stream, point.serial});
  }
}

// `waiter` waits for `point`. May block.
void Engine::order(StreamId waiter, Point point) {
  if (!must_wait(waiter, point)) return;
  without_gil(waiter, [&] { backend_.wait(waiter, point); });
  remember_wait(waiter, point);
}

// As order(), where the waiter computes: the time that it stands still is ours.
void Engine::stall(StreamId waiter, Point point, EntryKind why, RecordId id) {
  const TimedSpan span(timeline_, waiter, entry(why, id));
  order(waiter, point);
}

// Is `waiter` known to be ordered after `point`?
bool Engine::is_ordered(StreamId waiter, Point point) const {
  if (point.is_beginning()) return true;
  if (waiter == point.stream) return is_lasting(waiter);
  return std::any_of(waited_.begin(), waited_.end(), [&](const Waited& waited) {
    return waited.waiter == waiter && waited.producer == point.stream && waited.serial >= point.serial;
  });
}

bool Engine::is_lasting(StreamId stream) const {
  return backend_.is_lasting(stream) || mutated(Mutant::StreamsMayBeDestroyed);
}

// May a call of ours name it? See Note [Streams that may be destroyed].
bool Engine::can_be_used(StreamId stream) const { return stream == backend_.current_stream() || is_lasting(stream); }

// The host waits. Blocks.
void Engine::synchronize(Point point) {
  if (point.is_beginning()) return;
  const BlockingSection blocking;
  backend_.synchronize(point);
}

// ---- release ----

// R9: memory that a copy touches is dropped after its stream was told to wait for that copy's end. What could not be
// waited for, because I/O is in flight, a graph is being captured or the device fails, is tried again at the next hook
// event. May block, unless I/O completes in the background.
void Engine::retire(DeviceBytes bytes, Mutant mutant) noexcept {
  if (!bytes.storage) return;
  try {
    bool is_free = false;
    try {
      is_free = may_be_dropped(bytes, mutant);
    } catch (const std::exception&) {  // a failing device says so at the next call that matters
    }
    if (is_free) {
      Operation::drop_later(std::move(bytes.storage));
    } else {
      retired_.push_back(std::move(bytes));
    }
  } catch (const std::exception&) {  // no memory for the list: better held for ever than handed on too early
    if (bytes.storage) (void)bytes.storage.unsafeReleaseStorageImpl();
  }
}

bool Engine::may_be_dropped(const DeviceBytes& bytes, Mutant mutant) {
  if (backend_.completes_in_background()) {
    return mutated(Mutant::IoMemoryHeldUntilDone) || bytes.busy_until.is_beginning() ||
           backend_.status(bytes.busy_until) == PointStatus::Reached;
  }
  if (is_ordered(bytes.stream, bytes.busy_until)) return true;
  if (backend_.is_capturing()) return false;
  // The memory's stream waits for the copy's end: later work there may be given the memory (R9).
  if (mutated(mutant)) return true;
  if (bytes.is_buffer ? can_be_used(bytes.stream) : is_lasting(bytes.stream)) {
    order(bytes.stream, bytes.busy_until);
  } else {
    synchronize(bytes.busy_until);
  }
  return true;
}

// Takes note of what has ended since the last hook event. May block, unless I/O completes in the background.
void Engine::reap() {
  if (!backend_.completes_in_background()) {
    if (retired_.empty() || backend_.is_capturing()) return;
    for (DeviceBytes& bytes : std::exchange(retired_, {})) retire(std::move(bytes), Mutant::kCount);
    return;
  }
  while (const auto oldest = windows_.oldest_offload([this](RecordId id) { return is_offloading(id); })) {
    if (backend_.status(holdings(*oldest).offload_end) == PointStatus::Pending) break;
    finish_offload(*oldest);
  }
  for (DeviceBytes& bytes : retired_) {
    if (backend_.status(bytes.busy_until) == PointStatus::Reached) Operation::drop_later(std::move(bytes.storage));
  }
  std::erase_if(retired_, [](const DeviceBytes& bytes) { return !bytes.storage; });
}

void Engine::release(const RecordHandle& handle) {
  if (!is_inherited()) {
    try {
      reap();
    } catch (const std::exception&) {  // it is for others; this record goes all the same
    }
  }
  const RecordId id = handle.record;
  if (ledger_.is_last_handle(id)) {
    leave_windows(id);
    forget_learned(id);
  }
  const Ledger::DroppedHandle dropped = ledger_.drop_handle(id, handle.seen_epoch);
  if (dropped.released) return drop_holdings(id, dropped);
  if (dropped.was == RecordState::Reloaded && !is_inherited()) give_up_if_seen(id);
}

// As release(), by who held the record while its copy was enqueued.
void Engine::let_go(RecordId id) noexcept {
  try {
    if (ledger_.is_last_hold(id)) {
      leave_windows(id);
      forget_learned(id);
    }
    const Ledger::DroppedHandle dropped = ledger_.let_go(id);
    if (dropped.released) drop_holdings(id, dropped);
  } catch (const std::exception& error) {
    TORCH_WARN("torchoffload: a saved tensor could not be released: ", error.what());
  }
}

// Slot, budget and tape are given back before the memory, which may have to wait for a copy.
void Engine::drop_holdings(RecordId id, const Ledger::DroppedHandle& dropped) {
  Holdings held = std::exchange(holdings_[id.index], {});
  const bool is_reload = dropped.was == RecordState::Reloading || held.bytes.busy_until == held.reload_end;
  struct AtTheEnd {  // whichever way it comes
    Engine& engine;
    DeviceBytes bytes;
    const Mutant mutant;
    ~AtTheEnd() { engine.retire(std::move(bytes), mutant); }
  } memory{*this, std::exchange(held.bytes, {}),
           is_reload ? Mutant::DroppedBufferWaitsForReload : Mutant::DroppedSourceWaitsForOffload};
  if (is_inherited()) {  // no copy of ours touches it here, and no device may be called: it is left to the child's end
    (void)memory.bytes.storage.unsafeReleaseStorageImpl();
    memory.bytes = {};
  }
  // What it holds, not what its state says: an exception may have come between.
  if (held.slot.nbytes() > 0) release_slot(held);
  for (const Point& copy_end : {held.offload_end, held.reload_end}) backend_.forget(copy_end);
  uncharge(held, dropped.tape);
  if (dropped.tape_gone) tape_is_gone(dropped.tape);
}

}  // namespace torchoffload
