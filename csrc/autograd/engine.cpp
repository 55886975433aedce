// Every wait between streams, and everything that enqueues or drops. What has no order is in engine_records.cpp.
#include "autograd/engine.h"

#include <ATen/SequenceNumber.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

#include "autograd/operation.h"
#include "autograd/pending.h"
#include "autograd/profiler_range.h"
#include "core/mutant.h"

namespace torchoffload {

// `waiter` waits for `point`, unless it is known to have waited for it or for a later one of that stream. On I/O, where
// asking costs little and a wait of the host blocks, nothing is remembered. May block.
void Engine::order(StreamId waiter, Point point) {
  if (point.is_beginning()) return;
  if (backend_.completes_in_background()) {
    if (backend_.status(point) == PointStatus::Reached) return;
    std::optional<BlockingSection> blocking;
    if (backend_.may_block(waiter)) blocking.emplace();
    backend_.wait(waiter, point);
    return;
  }
  if (is_ordered(waiter, point)) return;
  backend_.wait(waiter, point);
  if (!backend_.is_lasting(waiter)) return;
  const auto known = std::find_if(waited_.begin(), waited_.end(), [&](const Waited& waited) {
    return waited.waiter == waiter && waited.producer == point.stream;
  });
  if (known != waited_.end()) {
    known->serial = point.serial;
  } else {
    waited_.push_back({waiter, point.stream, point.serial});
  }
}

// As order(), where the waiter computes: the time that it stands still is ours.
void Engine::stall(StreamId waiter, Point point, EntryKind why, RecordId id) {
  const TimedSpan span(timeline_, waiter, entry(why, id));
  order(waiter, point);
}

// Is `waiter` known to be ordered after `point`?
bool Engine::is_ordered(StreamId waiter, Point point) const {
  if (point.is_beginning() || waiter == point.stream) return true;
  return std::any_of(waited_.begin(), waited_.end(), [&](const Waited& waited) {
    return waited.waiter == waiter && waited.producer == point.stream && waited.serial >= point.serial;
  });
}

// ---- offload ----

// `ordered_after`: the stream that offload_stream was ordered after in this flush already; its operators are the
// same ones, so one point serves all copies of a flush.
void Engine::enqueue_offload(const PendingCopy& copy, StreamId& ordered_after) {
  const RecordId id = copy.record;
  if (is_inherited() || !ledger_.is_live(id)) return;
  const auto drain = [&] {
    const TapeInfo& tape = tapes_[ledger_.record(id).tape.index];
    drain_window(tape.windows.offload_bytes, tape.learned_bytes);
  };
  if (holdings(id).learned_bytes > 0) {
    mark(EntryKind::Ready, id, holdings(id).bytes.stream);
    return drain();
  }
  if (!is_pending(id)) return;
  reap();
  std::vector<Point> guards;
  const std::optional<Slot> slot = acquire_slot(id, guards);
  if (!slot) return;
  const StreamId stream = offload_stream(id);
  // offload_stream waits for the slot's former user: its bytes are still being read, or written, until then (R5). With
  // copies on the host's own stream that blocks, so what is below is read after it.
  for (const Point& guard : guards) {
    if (!mutated(Mutant::OffloadWaitsForGuards)) order(stream, guard);
  }
  if (!is_pending(id)) return store_.release(*slot, guards);
  if (was_resized(id) && !mutated(Mutant::ResizeCheckedAtEnqueue)) {  // R10
    store_.release(*slot, guards);
    keep(id, KeptReason::Resized);
    return;
  }
  Holdings& held = holdings(id);
  const Record& record = ledger_.record(id);
  held.slot = *slot;
  Statistics::global().slot_acquired(slot->nbytes());
  // offload_stream waits for the stream that was current at the pack: the operator that fills the source is on it (R2).
  // A copy on that stream itself waits for nothing, and orders offload_stream after nothing.
  if (stream != held.bytes.stream && std::exchange(ordered_after, held.bytes.stream) != held.bytes.stream &&
      !mutated(Mutant::OffloadWaitsForCompute))
    order(stream, backend_.record(held.bytes.stream));
  // And for the stream that the source's memory is from: a custom Function may fill what it saves on a stream of its
  // own, which the program joins later (R2).
  if (held.allocated_on != kNoStream && held.allocated_on != held.bytes.stream && held.allocated_on != stream &&
      !mutated(Mutant::OffloadWaitsForAllocation) && !backend_.is_capturing_on(held.allocated_on))
    order(stream, backend_.record(held.allocated_on));
  mark(EntryKind::Ready, id, held.bytes.stream);
  const auto* source = static_cast<const std::byte*>(held.bytes.storage.data()) + record.span.begin;
  {
    const ProfilerRange range("torchoffload::offload", record.nbytes());
    const TimedSpan span(timeline_, stream, entry(EntryKind::CopyOut, id));
    backend_.copy_out(*slot, source, record.nbytes(), stream);
  }
  held.offload_end = backend_.record(stream);
  held.bytes.busy_until = held.offload_end;
  ledger_.begin_offload(id);
  enter_offload_window(id);
  note_offloaded(id);
  drain();
  uint64_t& peak_bytes = Statistics::global().peak_offload_window_bytes;
  peak_bytes = std::max(peak_bytes, offload_window_bytes_);
}

// R4: the compute stream is told to wait only when the window is full, oldest copy first.
void Engine::drain_window(uint64_t window_bytes, uint64_t kept_bytes) {
  while (offload_window_bytes_ > 0 && offload_window_bytes_ + kept_bytes > window_bytes) {
    const RecordId oldest = offloads_in_flight_.front();
    if (!ledger_.is_live(oldest) || ledger_.record(oldest).state != RecordState::Offloading) {
      offloads_in_flight_.pop_front();
      continue;
    }
    count(row(ledger_.record(oldest).tape), &TapeRow::window_waits, 1);
    const DeviceBytes& source = holdings(oldest).bytes;
    const c10::Storage held_meanwhile = source.storage;
    const Point offload_end = source.busy_until;
    // The compute stream waits for the copy's end: later work there may be given the source's memory (R3).
    if (!mutated(Mutant::ComputeWaitsForOffload)) stall(source.stream, offload_end, EntryKind::WindowWait, oldest);
    if (ledger_.is_live(oldest) && ledger_.record(oldest).state == RecordState::Offloading) finish_offload(oldest);
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

void Engine::start_reloads(std::span<const Schedule::Ahead> wanted, Reload why) {
  const StreamId consumer = backend_.current_stream();
  std::vector<c10::DataPtr> targets;
  targets.reserve(wanted.size());
  for (const auto& [id, save] : wanted) {
    const uint64_t modulo = mutated(Mutant::AlignmentRestored) ? 8 : holdings(id).address_modulo;
    try {
      targets.push_back(backend_.allocate(ledger_.record(id).nbytes(), modulo));
    } catch (const c10::Error&) {
      if (why == Reload::AskedFor) throw;
      break;  // no memory: what is asked for later is loaded then
    } catch (const std::bad_alloc&) {
      if (why == Reload::AskedFor) throw;
      break;
    }
  }
  if (targets.empty()) return;
  const Point allocated = backend_.record(consumer);
  StreamId ordered = kNoStream;
  for (size_t next = 0; next < targets.size(); ++next) {
    const RecordId id = wanted[next].record;
    const StreamId stream = reload_stream(id, consumer);
    // reload_stream waits for the stream that allocated the buffer: its memory may be in use there until then (R6).
    if (std::exchange(ordered, stream) != stream && !mutated(Mutant::ReloadWaitsForCompute)) order(stream, allocated);
    enqueue_reload(id, std::move(targets[next]), consumer);
    begin_reload(wanted[next], why);
  }
}

void Engine::enqueue_reload(RecordId id, c10::DataPtr target, StreamId consumer) {
  Holdings& held = holdings(id);
  const Record& record = ledger_.record(id);
  const StreamId stream = reload_stream(id, consumer);
  // reload_stream waits for the offload's end: the slot's bytes are complete only then (R6).
  if (!mutated(Mutant::ReloadWaitsForOffload)) order(stream, held.offload_end);
  // A reload on another stream than the last waits for that one: the slot is guarded by one point, the latest (R5).
  if (stream != held.reload_end.stream && !mutated(Mutant::ReloadWaitsForReload)) order(stream, held.reload_end);
  {
    const ProfilerRange range("torchoffload::reload", record.nbytes());
    const TimedSpan span(timeline_, stream, entry(EntryKind::CopyIn, id));
    backend_.copy_in(target.get(), held.slot, record.nbytes(), stream);
  }
  backend_.forget(held.reload_end);
  held.reload_end = backend_.record(stream);
  const c10::Device device = target.device();
  held.bytes = {c10::Storage(c10::Storage::use_byte_size_t(), record.nbytes(), std::move(target),
                             c10::GetAllocator(device.type()), /*resizable=*/true),
                record.span.begin, consumer, held.reload_end};
}

// What was reloaded ahead goes back to its slot.
void Engine::pass_by(RecordId id) {
  leave_reload_window(id);
  ledger_.pass_by(id);
  count(row(ledger_.record(id).tape), &TapeRow::passed_by, 1);
  retire(std::exchange(holdings(id).bytes, {}), Mutant::DroppedBufferWaitsForReload);
}

// Device memory is short: drops what can be had again, of every tape: buffers reloaded ahead, and sources whose copies
// are on their way. May block, and drops at once: read the ledger again after it.
void Engine::make_room() {
  while (!ahead_.empty()) pass_by(ahead_.back());
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
    reloading() = {this, tape, torch::autograd::get_current_graph_task_id()};
    backward_begins(tape);
    if (!std::exchange(holdings(id).was_needed, true)) mark(EntryKind::Needed, id, consumer);
    place = Schedule::place_of(handle.save, std::exchange(tapes_[tape.index].asked_before, handle.save));
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
        const Schedule::Ahead only[] = {{id, handle.save}};
        try {
          start_reloads(only, Reload::AskedFor);
        } catch (const std::exception& error) {
          if (has_made_room || !is_out_of_memory(error)) throw;  // PyTorch's own error; nothing has changed
          make_room();
          // Nor is anything loaded ahead this once: the operator that asks needs memory too.
          has_made_room = is_prefetched_for = true;
          break;
        }
        if (in_backward) Schedule::consumer_missed(ledger_.tape(record.tape), handle.save, place);
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
        if (!std::exchange(is_prefetched_for, true)) prefetch(record.tape);
        const DeviceBytes bytes = holdings(id).bytes;
        // A consumer on another stream than the first waits as the first did (R7). The source, where it served, was
        // never written by us.
        if (bytes.busy_until == holdings(id).reload_end && !mutated(Mutant::ConsumerWaitsForReload) &&
            !mutated(Mutant::LaterConsumerWaitsForReload))
          order(consumer, bytes.busy_until);
        handle.seen_epoch = ledger_.mark_seen(id, handle.seen_epoch);
        at::Tensor tensor = hand_out(id, layout, version, bytes);
        give_up_if_seen(id);
        return tensor;
      }
      case RecordState::Released:
        TORCH_INTERNAL_ASSERT(false, "a handle outlived its record");
    }
  }
}

// ---- release ----

// R9: memory that a copy touches is dropped after its stream was told to wait for that copy's end. Never blocks.
void Engine::retire(DeviceBytes bytes, Mutant mutant) {
  if (!bytes.storage) return;
  if (backend_.completes_in_background() && !mutated(Mutant::IoMemoryHeldUntilDone) &&
      !bytes.busy_until.is_beginning() && backend_.status(bytes.busy_until) == PointStatus::Pending) {
    retired_.push_back(std::move(bytes));
    return;
  }
  if (!backend_.completes_in_background() && !is_ordered(bytes.stream, bytes.busy_until) && backend_.is_capturing()) {
    retired_.push_back(std::move(bytes));
    return;
  }
  // The memory's stream waits for the copy's end: later work there may be given the memory (R9).
  if (!backend_.completes_in_background() && !mutated(mutant)) order(bytes.stream, bytes.busy_until);
  Operation::drop_later(std::move(bytes.storage));
}

// Takes note of what has ended since the last hook event. Never blocks.
void Engine::reap() {
  if (!backend_.completes_in_background()) {
    if (retired_.empty() || backend_.is_capturing()) return;
    for (DeviceBytes& bytes : std::exchange(retired_, {})) retire(std::move(bytes), Mutant::kCount);
    return;
  }
  while (!offloads_in_flight_.empty()) {
    const RecordId oldest = offloads_in_flight_.front();
    if (ledger_.is_live(oldest) && ledger_.record(oldest).state == RecordState::Offloading) {
      if (backend_.status(holdings(oldest).offload_end) == PointStatus::Pending) break;
      finish_offload(oldest);
    } else {
      offloads_in_flight_.pop_front();
    }
  }
  for (DeviceBytes& bytes : retired_) {
    if (backend_.status(bytes.busy_until) == PointStatus::Reached) Operation::drop_later(std::move(bytes.storage));
  }
  std::erase_if(retired_, [](const DeviceBytes& bytes) { return !bytes.storage; });
}

void Engine::release(const RecordHandle& handle) {
  if (!is_inherited()) reap();
  const RecordId id = handle.record;
  const Record before = ledger_.record(id);
  if (before.live_handles == 1) {
    leave_windows(id);
    forget_learned(id);
  }
  const Ledger::DroppedHandle dropped = ledger_.drop_handle(id, handle.seen_epoch);
  if (!dropped.released) {
    if (before.state == RecordState::Reloaded && !is_inherited()) give_up_if_seen(id);
    return;
  }
  Holdings held = std::exchange(holdings(id), {});
  if (is_inherited()) {  // no copy of ours touches it here, and no device may be called: it is left to the child's end
    (void)held.bytes.storage.unsafeReleaseStorageImpl();
    held.bytes = {};
  }
  const bool is_reload = before.state == RecordState::Reloading || held.bytes.busy_until == held.reload_end;
  retire(std::move(held.bytes), is_reload ? Mutant::DroppedBufferWaitsForReload : Mutant::DroppedSourceWaitsForOffload);
  // What it holds, not what its state says: an exception may have come between.
  if (held.slot.nbytes() > 0) release_slot(held);
  for (const Point& copy_end : {held.offload_end, held.reload_end}) backend_.forget(copy_end);
  uncharge(held, dropped.tape);
  if (dropped.tape_gone) tape_is_gone(dropped.tape);
}

}  // namespace torchoffload
