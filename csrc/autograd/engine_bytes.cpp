// What a record has: copies that are pending, streams, and bytes on the device. Nothing here waits or enqueues a copy.
#include <ATen/SequenceNumber.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <utility>

#include "autograd/engine.h"
#include "autograd/operation.h"
#include "autograd/thread_state.h"
#include "core/mutant.h"

namespace torchoffload {

// ---- pending copies ----

void Engine::flush_pending(const ContextState* leaving) {
  std::deque<PendingCopy>& pending = ThreadState::current().pending;
  // R1: below autograd we are inside an operator, whatever the numbers say: the Python of a dispatch mode or subclass
  // has its own autograd functions, and contexts.
  const bool is_inside_operator = c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::AutogradFunctionality);
  if (is_inside_operator && !mutated(Mutant::CopyNotInsideItsOperator)) return;
  if (leaving != nullptr && !pending.empty()) pending.back().engine->backend_.saw_operators_end();
  const uint64_t now = at::sequence_number::peek();
  StreamId ordered_after = kNoStream;
  Engine* ordered_engine = nullptr;
  for (size_t next = 0; next < pending.size();) {
    const PendingCopy copy = pending[next];
    // R1: the operator that saved this may not have filled it yet.
    const bool has_ended = copy.sequence_number != now || copy.context == leaving;
    const bool is_possible = has_ended && !copy.engine->backend_.is_capturing();
    if (!is_possible && !mutated(Mutant::CopyNotInsideItsOperator)) {
      ++next;
      continue;
    }
    pending.erase(pending.begin() + static_cast<ptrdiff_t>(next));
    if (std::exchange(ordered_engine, copy.engine) != copy.engine) ordered_after = kNoStream;
    copy.engine->enqueue_offload(copy, ordered_after);
  }
}

// ---- what a record has ----

StreamId Engine::offload_stream(RecordId id) {
  return context(id).options.use_streams ? backend_.offload_stream() : holdings(id).bytes.stream;
}

StreamId Engine::reload_stream(RecordId id, StreamId consumer) {
  return context(id).options.use_streams ? backend_.reload_stream() : consumer;
}

bool Engine::was_resized(RecordId id) {
  const c10::Storage& source = holdings(id).bytes.storage;
  const Identity& identity = ledger_.record(id).identity;
  if (source.data() != identity.data || source.nbytes() != identity.nbytes) return true;
  if (mutated(Mutant::ResizeSeesAllocation)) return false;
  return backend_.origin_of(*source.unsafeGetStorageImpl()).allocation != identity.allocation;
}

// R10: of a source that was resized under its copy the slot has torn bytes, or none. The program's storage is what the
// saved tensor is without us, once it is filled again.
void Engine::keep_if_resized(RecordId id) {
  if (mutated(Mutant::ResizeCheckedInFlight)) return;
  if (ledger_.record(id).state == RecordState::Offloading && was_resized(id)) {
    leave_offload_window(id);
    keep(id, KeptReason::Resized);
  }
  const Record& record = ledger_.record(id);
  const DeviceBytes& bytes = holdings(id).bytes;
  TORCH_CHECK(
      !bytes.storage || bytes.is_buffer || bytes.storage.nbytes() >= record.span.end,
      "torchoffload: the storage of a saved tensor was resized before backward, so its bytes are gone. Exempt it "
      "with torchoffload.never_offload(tensor).");
}

bool Engine::slot_is_complete(RecordId id) {
  Holdings& held = holdings(id);
  if (!ledger_.record(id).has_slot) return false;
  const bool serves_source = held.bytes.storage && !held.bytes.is_buffer;
  if (serves_source && was_resized(id)) return false;  // perhaps under its copy (R10)
  if (!streams_.is_polled() || held.is_confirmed || mutated(Mutant::UnwrittenSourceStays)) return true;
  held.is_confirmed =
      backend_.status(held.offload_end) == PointStatus::Reached && backend_.failure(held.offload_end).empty();
  return held.is_confirmed;
}

// R8: from here on the bytes are held weakly, until the next reload.
void Engine::give_up_if_seen(RecordId id) {
  if (ledger_.record(id).state != RecordState::Reloaded) return;
  if (ledger_.all_seen(id) || mutated(Mutant::BufferHeldUntilSeen)) give_up(id);
}

// Nothing happens where there is no slot that could bring the bytes back.
void Engine::give_up(RecordId id) {
  if (!slot_is_complete(id)) return;
  Holdings& held = holdings(id);
  DeviceBytes bytes = std::exchange(held.bytes, {});
  held.given_up.emplace(bytes.storage.getWeakStorageImpl());
  held.given_up_bytes = {{}, bytes.base_bytes, bytes.stream, bytes.busy_until, bytes.is_buffer};
  ledger_.give_up(id);
  const bool is_reload = bytes.busy_until == held.reload_end;
  streams_.retire(std::move(bytes), is_reload ? Rule::DroppedBufferWaitsForReload : Rule::DroppedSourceWaitsForOffload);
}

std::optional<DeviceBytes> Engine::lock_given_up(RecordId id) {
  Holdings& held = holdings(id);
  if (!held.given_up || mutated(Mutant::GivenUpIsFoundAgain)) return std::nullopt;
  c10::intrusive_ptr<c10::StorageImpl> alive = held.given_up->lock();
  if (!alive) {
    held.given_up.reset();
    return std::nullopt;
  }
  // A source that the program emptied since is read from the slot, which was complete by then.
  if (!held.given_up_bytes.is_buffer && alive->nbytes() < ledger_.record(id).span.end) return std::nullopt;
  DeviceBytes bytes = held.given_up_bytes;
  bytes.storage = c10::Storage(std::move(alive));
  return bytes;
}

// The bytes go to a consumer on the current stream.
DeviceBytes Engine::hand_out(RecordId id, const DeviceBytes& bytes) {
  const StreamId consumer = backend_.current_stream();
  // The buffer may have been allocated on another stream: its memory then waits for the consumer's too (R3). A source
  // is as without us; see Note [Streams that may be destroyed].
  if ((bytes.is_buffer || streams_.is_lasting(consumer)) && !mutated(Mutant::NoteUseAtUnpack))
    backend_.note_use(*bytes.storage.unsafeGetStorageImpl(), consumer);
  const Span& span = ledger_.record(id).span;
  const auto* first = static_cast<const std::byte*>(bytes.storage.data()) + (span.begin - bytes.base_bytes);
  backend_.saw_unpack(first, span.nbytes(), consumer);
  return bytes;
}

}  // namespace torchoffload
