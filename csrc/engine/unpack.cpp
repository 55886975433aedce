// Unpack: a consumer asks for the bytes of a record, wherever they are.
#include <stdexcept>
#include <string>
#include <utility>

#include "engine/reloader.h"
#include "system/host_wait.h"

namespace torchoffload {

// One unpack: a handle that asks for its bytes.
struct Reloader::Ask {
  RecordHandle& handle;
  const StreamId consumer;
  const bool in_backward;
  uint64_t place;          // the consumer's place in its tape
  bool is_prefetched_for;  // the reloads ahead of this consumer were started
  bool has_made_room = false;

  RecordId id() const { return handle.record; }
};

DeviceBytes Reloader::unpack(RecordHandle& handle, bool in_backward) {
  offloader_.free_deferred();
  const RecordId id = handle.record;
  Ask ask{handle, backend_.streams.current_stream(), in_backward, handle.save, /*is_prefetched_for=*/!in_backward};
  if (in_backward) backward_asks(ask);
  Operation::drop_now();  // before buffers are allocated, and before the host may wait for a disk
  if (!ledger_.record(id).is_kept() && backend_.streams.is_capturing())
    throw std::runtime_error(
        "torchoffload: a tensor that was offloaded before this CUDA graph capture is asked for inside it. Capture "
        "forward and backward together, or run the forward under torchoffload.NoOpManager().");
  while (true) {  // the state is read again after each call that may have blocked
    keep_if_resized(id);
    std::optional<DeviceBytes> bytes;
    switch (ledger_.record(id).state) {
      case RecordState::Resident:
      case RecordState::Offloading:
        bytes = unpack_source(ask);
        break;
      case RecordState::Offloaded:
        bytes = unpack_away(ask);
        break;
      case RecordState::Reloading:
        wait_for_reload(ask);
        break;
      case RecordState::Reloaded:
        bytes = unpack_here(ask);
        break;
      case RecordState::Released:
        throw std::logic_error("torchoffload: a handle outlived its record");
    }
    if (bytes) return *std::move(bytes);
  }
}

void Reloader::backward_asks(Ask& ask) {
  const TapeId tape = ledger_.record(ask.id()).tape;
  note_asking(tape);
  backward_begins(tape);
  if (!std::exchange(held(ask.id()).was_needed, true)) records_.mark(EntryKind::Needed, ask.id(), ask.consumer);
  ask.place = held(tape).windows.consumer_asks(ask.handle.save);
  // The place where it will go on is not known yet: a record loaded now might not be the next one that it asks for.
  if (ask.place == TapeWindows::kUnknownPlace) ask.is_prefetched_for = true;
  let_pass(tape, ask.place);
}

void Reloader::backward_begins(TapeId tape) {
  if (std::exchange(held(tape).has_backward_begun, true)) return;
  if (!lessons_.backward_began(held(tape).lessons)) pass_by_others(tape);
}

// Called once the record itself needs no further reload, so that its own reload comes before those ahead.
bool Reloader::prefetch_for(Ask& ask, const AlsoWait& also) {
  if (std::exchange(ask.is_prefetched_for, true)) return false;
  prefetch(ledger_.record(ask.id()).tape, also);
  return true;
}

// The source is still on the device, and is used. In a backward its copy is not needed any more: if the copy is pending
// it is not made.
std::optional<DeviceBytes> Reloader::unpack_source(Ask& ask) {
  if (prefetch_for(ask)) return std::nullopt;
  const RecordId id = ask.id();
  const Record& record = ledger_.record(id);
  if (!ask.in_backward || record.is_kept()) return hand_out(id, held(id).bytes);
  if (record.state == RecordState::Offloading) {
    records_.leave_offload_window(id);
  } else {
    records_.stop_waiting(id);
    records_.note_kept(id, Reason::Pending, record.nbytes());
  }
  ledger_.use_source(id);
  return std::nullopt;
}

// The bytes are in the slot. If an earlier consumer still holds the reloaded bytes they are used again; otherwise a
// reload is started.
std::optional<DeviceBytes> Reloader::unpack_away(Ask& ask) {
  const RecordId id = ask.id();
  if (const auto alive = records_.lock_weak(id)) {
    streams_.wait(Rule::ConsumerWaitsForWeak, ask.consumer, alive->busy_until);
    return hand_out(id, *alive);
  }
  const CopyWindows::Ahead only[] = {{id, ask.handle.save}};
  try {
    const HeldSlot here = hold_slot(id);
    start_reloads(only, Reload::AskedFor);
  } catch (const std::exception& error) {
    // This is PyTorch's own error, and the failed call has changed nothing.
    if (ask.has_made_room || !program::is_out_of_memory(error)) throw;
    free_device_memory();
    // Nothing is loaded ahead for this ask either, because the operator that asks needs memory too.
    ask.has_made_room = ask.is_prefetched_for = true;
    return std::nullopt;
  }
  if (ask.in_backward) {
    HeldTape& tape = records_.tape_of(id);
    tape.windows.consumer_missed(ask.handle.save, ask.place);
    tape.fetch_place = tape.windows.reload_place();
  }
  return std::nullopt;
}

HeldSlot Reloader::hold_slot(RecordId id) {
  try {
    return slots_.hold(held(id).slot);
  } catch (const WaitAbandoned&) {
    throw;
  } catch (const std::exception& error) {
    throw std::runtime_error(std::string("torchoffload: a saved tensor could not be read back: ") + error.what());
  }
}

void Reloader::wait_for_reload(Ask& ask) {
  const RecordId id = ask.id();
  const Point reload_end = held(id).reload_end;
  AlsoWait wait;  // one that is timed is made by itself
  if (!ask.is_prefetched_for && !timeline_.is_on())
    wait = streams_.wanted(Rule::ConsumerWaitsForReload, ask.consumer, reload_end);
  if (prefetch_for(ask, wait)) return;
  const Memory held_meanwhile = held(id).bytes.memory;
  {
    const TimedSpan span(timeline_, ask.consumer, records_.entry(EntryKind::ReloadWait, id));
    streams_.wait(Rule::ConsumerWaitsForReload, ask.consumer, reload_end);
  }
  const Record& now = ledger_.record(id);
  if (now.state == RecordState::Reloading && held(id).reload_end == reload_end) finish_reload(id);
}

std::optional<DeviceBytes> Reloader::unpack_here(Ask& ask) {
  if (prefetch_for(ask)) return std::nullopt;
  const RecordId id = ask.id();
  const DeviceBytes bytes = held(id).bytes;
  // A source that was used instead of a reload needs no wait, since no copy wrote to it.
  if (held(id).are_bytes_reloaded()) streams_.wait(Rule::LaterConsumerWaitsForReload, ask.consumer, bytes.busy_until);
  const bool is_as_before =
      ledger_.record(id).state == RecordState::Reloaded && held(id).bytes.memory.ref() == bytes.memory.ref();
  if (!is_as_before) return std::nullopt;  // another thread used the record while this one waited
  ask.handle.seen_epoch = ledger_.mark_seen(id, ask.handle.seen_epoch);
  DeviceBytes handed_out = hand_out(id, bytes);
  ask.in_backward ? records_.weaken_if_seen(id) : records_.weaken(id);
  return handed_out;
}

DeviceBytes Reloader::hand_out(RecordId id, const DeviceBytes& bytes) {
  const StreamId consumer = backend_.streams.current_stream();
  // The buffer may have been allocated on another stream. Then the allocator has to wait for the consumer's stream too
  // before it hands the memory on (R3). For a source see Note [Streams that may be destroyed].
  if ((bytes.is_buffer || streams_.is_lasting(consumer)) && !mutated(Mutant::NoteUseAtUnpack))
    backend_.memory.note_use(bytes.memory.ref(), consumer);
  const Span& span = ledger_.record(id).span;
  backend_.observer.saw_unpack(bytes.memory.data() + (span.begin - bytes.base_bytes), span.nbytes(), consumer);
  return bytes;
}

// If the program resized a source while its copy was under way, the slot's bytes are not usable. Without us, the saved
// tensor would show the storage's contents at unpack. So the record is kept.
void Reloader::keep_if_resized(RecordId id) {
  if (mutated(Mutant::ResizeCheckedInFlight)) return;
  if (ledger_.record(id).state == RecordState::Offloading && records_.was_resized(id)) {
    records_.leave_offload_window(id);
    records_.keep(id, Reason::Resized);
  }
  const DeviceBytes& bytes = held(id).bytes;
  const bool is_source = bytes.memory && !bytes.is_buffer;
  if (is_source && bytes.memory.nbytes() < ledger_.record(id).span.end)
    throw std::runtime_error(
        "torchoffload: the storage of a saved tensor was resized before backward, so its bytes are gone. Exempt it "
        "with torchoffload.never_offload(tensor).");
}

// Drops the buffers that were reloaded ahead, and the sources whose copies are on their way. The memory is dropped at
// once, so the ledger must be read again afterwards.
void Reloader::free_device_memory() {
  while (!windows_.ahead().empty()) pass_by(windows_.ahead().back());
  offloader_.drain_window(0, 0);
  streams_.finish_deferred();
  Operation::drop_now();
}

}  // namespace torchoffload
