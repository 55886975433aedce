// How a record ends, and what is taken note of at each hook event.
#include <c10/util/Exception.h>

#include <utility>

#include "autograd/engine.h"
#include "autograd/operation.h"

namespace torchoffload {

// Takes note of what has ended since the last hook event. May block, unless I/O completes in the background.
void Engine::reap() {
  if (streams_.is_polled()) {
    while (const auto oldest = windows_.oldest_offload([this](RecordId id) { return is_offloading(id); })) {
      if (backend_.status(holdings(*oldest).offload_end) == PointStatus::Pending) break;
      finish_offload(*oldest);
    }
  }
  streams_.reap();
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
    const Rule rule;
    ~AtTheEnd() { engine.streams_.retire(std::move(bytes), rule); }
  } memory{*this, std::exchange(held.bytes, {}),
           is_reload ? Rule::DroppedBufferWaitsForReload : Rule::DroppedSourceWaitsForOffload};
  if (is_inherited()) {  // no copy of ours touches it here, and no device may be called: it is left to the child's end
    (void)memory.bytes.storage.unsafeReleaseStorageImpl();
    memory.bytes = {};
  }
  // What it holds, not what its state says: an exception may have come between.
  if (held.slot.nbytes() > 0) release_slot(held);
  for (const Point& copy_end : {held.offload_end, held.reload_end}) backend_.forget(copy_end);
  slots_.uncharge(*tapes_[dropped.tape.index].context, held.charged_bytes);
  if (dropped.tape_gone) tape_is_gone(dropped.tape);
}

}  // namespace torchoffload
