// The engine's two ways: windows that are drained, and unpack. Copies are enqueued in engine_copies.cpp.
#include "autograd/engine.h"

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

#include "autograd/operation.h"
#include "core/mutant.h"

namespace torchoffload {

// ---- offload ----

// R4: the compute stream is told to wait only when the window is full, oldest copy first.
void Engine::drain_window(uint64_t window_bytes, uint64_t kept_bytes) {
  const auto is_in_flight = [this](RecordId id) { return is_offloading(id); };
  while (const auto next = windows_.offload_to_wait_for(window_bytes, kept_bytes, is_in_flight)) {
    const RecordId oldest = *next;
    count(row(ledger_.record(oldest).tape), &TapeRow::window_waits, 1);
    const DeviceBytes& source = holdings(oldest).bytes;
    const c10::Storage held_meanwhile = source.storage;
    const Point offload_end = source.busy_until;
    if (!streams_.is_lasting(source.stream)) {  // see Note [Streams that may be destroyed]
      streams_.synchronize(offload_end);
    } else {  // the time that a stream of operators stands still is ours
      const TimedSpan span(timeline_, source.stream, entry(EntryKind::WindowWait, oldest));
      streams_.wait(Rule::ComputeWaitsForOffload, source.stream, offload_end);
    }
    if (is_offloading(oldest)) finish_offload(oldest);
  }
}

// The copy out has ended, in the order of the source's stream: the source is given up.
void Engine::finish_offload(RecordId id) {
  Holdings& held = holdings(id);
  leave_offload_window(id);
  if (was_resized(id) && !mutated(Mutant::ResizeCheckedInFlight)) {  // R10
    keep(id, KeptReason::Resized);
    return;
  }
  const std::string failure = backend_.failure(held.offload_end);
  if (!failure.empty() && !mutated(Mutant::FailedWriteKeepsRecord)) {
    context(id).warn_once(Warning::WriteFailed,
                          "torchoffload: a saved tensor stays in memory because writing it failed: " + failure);
    keep(id, KeptReason::WriteFailed);
    return;
  }
  held.is_confirmed = true;
  ledger_.finish_offload(id);
  Operation::drop_later(std::move(held.bytes.storage));
  held.bytes = {};
}

// ---- reload ----

namespace {

// On CUDA an error of its own; CPU allocators raise the plain one.
bool is_out_of_memory(const std::exception& error) {
  return dynamic_cast<const c10::Error*>(&error) != nullptr || dynamic_cast<const std::bad_alloc*>(&error) != nullptr;
}

}  // namespace

// What was reloaded ahead goes back to its slot. May block; others may have passed it by, or used it, before.
void Engine::pass_by(RecordId id) {
  if (!ledger_.is_live(id) || !ledger_.record(id).prefetched) return;
  leave_reload_window(id);
  ledger_.pass_by(id);
  count(row(ledger_.record(id).tape), &TapeRow::passed_by, 1);
  streams_.retire(std::exchange(holdings(id).bytes, {}), Rule::DroppedBufferWaitsForReload);
}

// Device memory is short: drops what can be had again, of every tape: buffers reloaded ahead, and sources whose copies
// are on their way. May block, and drops at once: read the ledger again after it.
void Engine::make_room() {
  while (!windows_.ahead().empty()) pass_by(windows_.ahead().back());
  drain_window(0, 0);
  streams_.finish_retired();
  Operation::drop_now();
}

// A handle that asks for its bytes.
struct Engine::Ask {
  RecordHandle& handle;
  const StreamId consumer;
  const bool in_backward;
  uint64_t place;          // of the consumer, in its tape
  bool is_prefetched_for;  // what comes next was started
  bool has_made_room = false;

  RecordId id() const { return handle.record; }
};

DeviceBytes Engine::unpack(RecordHandle& handle, bool in_backward) {
  reap();
  const RecordId id = handle.record;
  Ask ask{handle, backend_.current_stream(), in_backward, handle.save, /*is_prefetched_for=*/!in_backward};
  if (in_backward) backward_asks(ask);
  TORCH_CHECK(
      ledger_.record(id).kept != KeptReason::None || !backend_.is_capturing(),
      "torchoffload: a tensor that was offloaded before this CUDA graph capture is asked for inside it. Capture "
      "forward and backward together, or run the forward under torchoffload.NoOpManager().");
  while (true) {  // read again after whatever may have blocked
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
        TORCH_INTERNAL_ASSERT(false, "a handle outlived its record");
    }
    if (bytes) return *std::move(bytes);
  }
}

void Engine::backward_asks(Ask& ask) {
  const TapeId tape = ledger_.record(ask.id()).tape;
  note_asking(tape);
  backward_begins(tape);
  if (!std::exchange(holdings(ask.id()).was_needed, true)) mark(EntryKind::Needed, ask.id(), ask.consumer);
  ask.place = windows_.consumer_asks(tape, ask.handle.save);
  let_pass(tape, ask.place);
}

// Once for each ask, where the record itself needs no reload any more. Returns whether it was done now: it may block.
bool Engine::prefetch_for(Ask& ask) {
  if (std::exchange(ask.is_prefetched_for, true)) return false;
  prefetch(ledger_.record(ask.id()).tape);
  return true;
}

// The source is still here: it is used. In backward its copy, if still pending, has become pointless.
std::optional<DeviceBytes> Engine::unpack_source(Ask& ask) {
  if (prefetch_for(ask)) return std::nullopt;
  const RecordId id = ask.id();
  const Record& record = ledger_.record(id);
  if (!ask.in_backward || record.kept != KeptReason::None) return hand_out(id, holdings(id).bytes);
  if (record.state == RecordState::Offloading) {
    leave_offload_window(id);
  } else {
    note_kept(id, KeptReason::Pending, record.nbytes());
  }
  ledger_.use_source(id);
  return std::nullopt;
}

// The bytes are in the slot: what an earlier consumer still holds serves, or a reload is started.
std::optional<DeviceBytes> Engine::unpack_away(Ask& ask) {
  const RecordId id = ask.id();
  if (const auto alive = lock_given_up(id)) {
    streams_.wait(Rule::ConsumerWaitsForGivenUp, ask.consumer, alive->busy_until);
    return hand_out(id, *alive);
  }
  const Windows::Ahead only[] = {{id, ask.handle.save}};
  try {
    start_reloads(only, Reload::AskedFor);
  } catch (const std::exception& error) {
    if (ask.has_made_room || !is_out_of_memory(error)) throw;  // PyTorch's own error; nothing has changed
    make_room();
    // Nor is anything loaded ahead this once: the operator that asks needs memory too.
    ask.has_made_room = ask.is_prefetched_for = true;
    return std::nullopt;
  }
  if (ask.in_backward) windows_.consumer_missed(ledger_.record(id).tape, ask.handle.save, ask.place);
  return std::nullopt;
}

void Engine::wait_for_reload(Ask& ask) {
  if (prefetch_for(ask)) return;
  const RecordId id = ask.id();
  const Point reload_end = holdings(id).reload_end;
  const c10::Storage held_meanwhile = holdings(id).bytes.storage;
  {
    const TimedSpan span(timeline_, ask.consumer, entry(EntryKind::ReloadWait, id));
    streams_.wait(Rule::ConsumerWaitsForReload, ask.consumer, reload_end);
  }
  const Record& now = ledger_.record(id);
  if (now.state == RecordState::Reloading && holdings(id).reload_end == reload_end) finish_reload(id);
}

std::optional<DeviceBytes> Engine::unpack_here(Ask& ask) {
  if (prefetch_for(ask)) return std::nullopt;
  const RecordId id = ask.id();
  const DeviceBytes bytes = holdings(id).bytes;
  // The source, where it served, was never written by us.
  if (bytes.busy_until == holdings(id).reload_end)
    streams_.wait(Rule::LaterConsumerWaitsForReload, ask.consumer, bytes.busy_until);
  const bool is_as_before = ledger_.record(id).state == RecordState::Reloaded &&
                            holdings(id).bytes.storage.unsafeGetStorageImpl() == bytes.storage.unsafeGetStorageImpl();
  if (!is_as_before) return std::nullopt;  // another thread had it while this one waited
  ask.handle.seen_epoch = ledger_.mark_seen(id, ask.handle.seen_epoch);
  DeviceBytes handed_out = hand_out(id, bytes);
  ask.in_backward ? give_up_if_seen(id) : give_up(id);
  return handed_out;
}

}  // namespace torchoffload
