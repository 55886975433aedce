// The engine's two ways: windows that are drained, and unpack. Copies are enqueued in engine_copies.cpp, what they
// touch is dropped in engine_order.cpp, and what has no order is in engine_records.cpp.
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
    // The compute stream waits for the copy's end: later work there may be given the source's memory (R3).
    if (!is_lasting(source.stream)) {  // see Note [Streams that may be destroyed]
      synchronize(offload_end);
    } else if (!mutated(Mutant::ComputeWaitsForOffload)) {
      stall(source.stream, offload_end, EntryKind::WindowWait, oldest);
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
  retire(std::exchange(holdings(id).bytes, {}), Mutant::DroppedBufferWaitsForReload);
}

// Device memory is short: drops what can be had again, of every tape: buffers reloaded ahead, and sources whose copies
// are on their way. May block, and drops at once: read the ledger again after it.
void Engine::make_room() {
  while (!windows_.ahead().empty()) pass_by(windows_.ahead().back());
  drain_window(0, 0);
  if (backend_.completes_in_background() && !retired_.empty()) {
    std::vector<Point> busy;
    for (const DeviceBytes& bytes : retired_) busy.push_back(bytes.busy_until);
    {
      const BlockingSection blocking;
      for (const Point& point : busy) backend_.synchronize(point);
    }
    reap();
  }
  Operation::drop_now();
}

at::Tensor Engine::unpack(RecordHandle& handle, const TensorLayout& layout, const c10::VariableVersion& version,
                          bool in_backward) {
  reap();
  const RecordId id = handle.record;
  const StreamId consumer = backend_.current_stream();
  uint64_t place = handle.save;
  if (in_backward) {
    const TapeId tape = ledger_.record(id).tape;
    note_asking(tape);
    backward_begins(tape);
    if (!std::exchange(holdings(id).was_needed, true)) mark(EntryKind::Needed, id, consumer);
    place = windows_.consumer_asks(tape, handle.save);
    let_pass(tape, place);
  }
  TORCH_CHECK(
      ledger_.record(id).kept != KeptReason::None || !backend_.is_capturing(),
      "torchoffload: a tensor that was offloaded before this CUDA graph capture is asked for inside it. Capture "
      "forward and backward together, or run the forward under torchoffload.NoOpManager().");
  bool is_prefetched_for = !in_backward;
  bool has_made_room = false;
  while (true) {  // read again after whatever may have blocked
    Holdings& held = holdings(id);
    const Record& record = ledger_.record(id);
    keep_if_resized(id);
    switch (record.state) {
      case RecordState::Resident:
      case RecordState::Offloading:
        // The source is still here: use it. In backward its copy, if still pending, has become pointless.
        if (!std::exchange(is_prefetched_for, true)) {
          prefetch(record.tape);
          break;
        }
        if (!in_backward || record.kept != KeptReason::None) return hand_out(id, layout, version, held.bytes);
        if (record.state == RecordState::Offloading) {
          leave_offload_window(id);
        } else {
          note_kept(id, KeptReason::Pending, record.nbytes());
        }
        ledger_.use_source(id);
        break;
      case RecordState::Offloaded: {
        if (const auto alive = lock_given_up(id)) {
          // The consumer waits for the reload's end, like the first one did (R7).
          if (!mutated(Mutant::ConsumerWaitsForGivenUp)) order(consumer, alive->busy_until);
          return hand_out(id, layout, version, *alive);
        }
        const Windows::Ahead only[] = {{id, handle.save}};
        try {
          start_reloads(only, Reload::AskedFor);
        } catch (const std::exception& error) {
          if (has_made_room || !is_out_of_memory(error)) throw;  // PyTorch's own error; nothing has changed
          make_room();
          // Nor is anything loaded ahead this once: the operator that asks needs memory too.
          has_made_room = is_prefetched_for = true;
          break;
        }
        if (in_backward) windows_.consumer_missed(record.tape, handle.save, place);
        break;
      }
      case RecordState::Reloading: {
        if (!std::exchange(is_prefetched_for, true)) {
          prefetch(record.tape);
          break;
        }
        const Point reload_end = held.reload_end;
        const c10::Storage held_meanwhile = held.bytes.storage;
        // The consumer waits for the reload's end: the buffer's bytes are there only then (R7).
        if (!mutated(Mutant::ConsumerWaitsForReload)) stall(consumer, reload_end, EntryKind::ReloadWait, id);
        const Record& now = ledger_.record(id);
        if (now.state == RecordState::Reloading && holdings(id).reload_end == reload_end) finish_reload(id);
        break;
      }
      case RecordState::Reloaded: {
        if (!std::exchange(is_prefetched_for, true)) {
          prefetch(record.tape);
          break;
        }
        const DeviceBytes bytes = holdings(id).bytes;
        // A consumer on another stream than the first waits as the first did (R7). The source, where it served, was
        // never written by us.
        if (bytes.busy_until == holdings(id).reload_end && !mutated(Mutant::ConsumerWaitsForReload) &&
            !mutated(Mutant::LaterConsumerWaitsForReload))
          order(consumer, bytes.busy_until);
        const bool is_as_before =
            record.state == RecordState::Reloaded &&
            holdings(id).bytes.storage.unsafeGetStorageImpl() == bytes.storage.unsafeGetStorageImpl();
        if (!is_as_before) break;  // another thread had it while this one waited
        handle.seen_epoch = ledger_.mark_seen(id, handle.seen_epoch);
        at::Tensor tensor = hand_out(id, layout, version, bytes);
        in_backward ? give_up_if_seen(id) : give_up(id);
        return tensor;
      }
      case RecordState::Released:
        TORCH_INTERNAL_ASSERT(false, "a handle outlived its record");
    }
  }
}

}  // namespace torchoffload
