// Copies on their way: how a record's bytes are enqueued, out and in.
//
// Note [Copies that others come between]
// A stream takes about a thousand commands. The call that adds one more blocks the host until the device has come to
// some of them. With the GIL held that would stop every Python thread, and for good where the device waits for what one
// of them is to launch. So a copy is enqueued in three parts: what it takes is read, its calls are made without the
// GIL, and what came of them is entered with the GIL held again. Meanwhile the record is held, so that it, its slot and
// its memory are there. All else may have happened to it, and the third part looks anew:
// - The source of a copy out may have been used by a backward, or be kept. Then the copy came to nothing: its slot goes
//   back guarded by the copy's end, and the source is busy until then.
// - Another thread may have reloaded the record too. Then the second buffer came to nothing: it is dropped after its
//   copy, whose end guards the slot beside the first one's.
#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "autograd/engine.h"
#include "autograd/operation.h"
#include "autograd/profiler_range.h"
#include "core/mutant.h"

namespace torchoffload {

namespace {

// The time of a copy, on the stream that makes it.
struct CopyTime {
  bool is_wanted = false;
  TimedPoint begin, end;

  void enter(Timeline& timeline, Timeline::Entry entry) {
    entry.begin = begin;
    entry.end = end;
    timeline.add(entry);
  }
};

// Of a copy that was enqueued just now. Nobody knows without it when the copy's memory may be used again, so a failure
// is met by a second try.
Point end_of_copy(Backend& backend, StreamId stream) {
  try {
    return backend.record(stream);
  } catch (const std::exception&) {
    return backend.record(stream);
  }
}

TimedPoint time_if(bool is_wanted, Backend& backend, StreamId stream) {
  return is_wanted ? backend.record_timed(stream) : TimedPoint{};
}

// A slot that goes back to its store, unless a record takes it.
class SlotLoan {
 public:
  SlotLoan(SlotBudget& slots, Slot slot, std::vector<Point>& guards) : slots_(slots), slot_(slot), guards_(guards) {}
  ~SlotLoan() {
    if (is_ours_) slots_.release(slot_, guards_);
  }
  SlotLoan(const SlotLoan&) = delete;
  SlotLoan& operator=(const SlotLoan&) = delete;

  void keep_for_ever() { is_ours_ = false; }
  Slot take() {
    is_ours_ = false;
    return slot_;
  }

 private:
  SlotBudget& slots_;
  const Slot slot_;
  const std::vector<Point>& guards_;
  bool is_ours_ = true;
};

}  // namespace

// ---- out ----

struct Engine::OffloadCopy {
  Slot slot;
  DeviceBytes source;
  const std::byte* first = nullptr;  // of the source, as it was checked: the program may resize it meanwhile (R10)
  uint64_t nbytes = 0;
  StreamId stream = kNoStream;
  c10::SmallVector<Point, 4> guards;
  bool waits_for_operators = false;
  StreamId also_filled_on = kNoStream;
  bool is_enqueued = false;
  Point end;
  TimedPoint ready;
  CopyTime time;
};

// Without the GIL.
void Engine::enqueue(OffloadCopy& copy, StreamOrder::Batch& waits) const {
  for (const Point& guard : copy.guards) waits.wait(Rule::OffloadWaitsForGuards, copy.stream, guard);
  if (copy.waits_for_operators)
    waits.wait(Rule::OffloadWaitsForCompute, copy.stream, backend_.record(copy.source.stream));
  if (copy.also_filled_on != kNoStream)
    waits.wait(Rule::OffloadWaitsForAllocation, copy.stream, backend_.record(copy.also_filled_on));
  copy.ready = time_if(copy.time.is_wanted, backend_, copy.source.stream);
  const ProfilerRange range("torchoffload::offload", copy.nbytes);
  copy.time.begin = time_if(copy.time.is_wanted, backend_, copy.stream);
  backend_.copy_out(copy.slot, copy.first, copy.nbytes, copy.stream);
  copy.is_enqueued = true;
  copy.end = end_of_copy(backend_, copy.stream);
  copy.time.end = time_if(copy.time.is_wanted, backend_, copy.stream);
}

// `ordered_after`: the stream that offload_stream was ordered after in this flush already; its operators are the
// same ones, so one point serves all copies of a flush.
void Engine::enqueue_offload(const PendingCopy& pending, StreamId& ordered_after) {
  const RecordId id = pending.record;
  if (is_inherited() || !ledger_.is_live(id)) return;
  const Hold hold(*this, id);
  if (holdings(id).learned_bytes > 0) {
    if (streams_.can_be_used(holdings(id).bytes.stream)) mark(EntryKind::Ready, id, holdings(id).bytes.stream);
    return drain_window_of(id);
  }
  reap();
  if (!is_pending(id)) return;
  std::vector<Point> guards;
  const std::optional<Slot> slot = acquire_slot(id, guards);
  if (!slot) return;
  SlotLoan loan(slots_, *slot, guards);
  const StreamId stream = offload_stream(id);
  OffloadCopy copy;
  for (const Point& guard : guards) {
    // A wait of the host's may take long, so what is below is read after it.
    if (streams_.is_polled()) {
      streams_.wait(Rule::OffloadWaitsForGuards, stream, guard);
    } else if (streams_.must_wait(Rule::OffloadWaitsForGuards, stream, guard)) {
      copy.guards.push_back(guard);
    }
  }
  timeline_.set_origin();
  if (!is_pending(id)) return;
  if (was_resized(id) && !mutated(Mutant::ResizeCheckedAtEnqueue)) return keep(id, KeptReason::Resized);  // R10
  if (!streams_.can_be_used(holdings(id).bytes.stream)) return keep(id, KeptReason::ExternalStream);
  copy.slot = *slot;
  copy.source = holdings(id).bytes;
  copy.first = static_cast<const std::byte*>(copy.source.storage.data()) + ledger_.record(id).span.begin;
  copy.nbytes = ledger_.record(id).nbytes();
  copy.stream = stream;
  // A copy on that stream itself waits for nothing, and orders offload_stream after nothing.
  const bool is_elsewhere = stream != copy.source.stream;
  copy.waits_for_operators = is_elsewhere && ordered_after != copy.source.stream;
  const StreamId allocated_on = holdings(id).allocated_on;
  const bool is_filled_here = allocated_on == copy.source.stream || allocated_on == stream;
  if (allocated_on != kNoStream && !is_filled_here && !backend_.is_capturing_on(allocated_on))
    copy.also_filled_on = allocated_on;
  copy.time.is_wanted = timeline_.is_on();
  StreamOrder::Batch waits = streams_.batch();
  try {
    streams_.without_gil(stream, [&] { enqueue(copy, waits); });
  } catch (const std::exception&) {
    if (copy.is_enqueued && copy.end.is_beginning()) {  // it will end, but nobody will know when
      loan.keep_for_ever();
      (void)copy.source.storage.unsafeReleaseStorageImpl();
    }
    if (copy.end.is_beginning()) throw;
  }
  if (is_elsewhere) ordered_after = copy.source.stream;
  streams_.remember(waits);
  if (!is_pending(id)) {  // see Note [Copies that others come between]
    guards.clear();
    if (!mutated(Mutant::SlotGuardedByCopyInVain)) guards.push_back(copy.end);
    if (!mutated(Mutant::SourceBusyUntilCopyInVain)) holdings(id).bytes.busy_until = copy.end;
    backend_.forget(copy.end);
    for (const TimedPoint point : {copy.ready, copy.time.begin, copy.time.end}) backend_.give_back(point);
    return;
  }
  (void)loan.take();
  offload_is_enqueued(id, copy);
  drain_window_of(id);
  uint64_t& peak_bytes = Statistics::global().peak_offload_window_bytes;
  peak_bytes = std::max(peak_bytes, windows_.offload_bytes());
}

void Engine::offload_is_enqueued(RecordId id, const OffloadCopy& copy) {
  Holdings& held = holdings(id);
  held.slot = copy.slot;
  Statistics::global().slot_acquired(copy.slot.nbytes());
  held.offload_end = held.bytes.busy_until = copy.end;
  if (copy.time.is_wanted) {
    Timeline::Entry ready = entry(EntryKind::Ready, id);
    ready.begin = copy.ready;
    timeline_.add(ready);
    CopyTime(copy.time).enter(timeline_, entry(EntryKind::CopyOut, id));
  }
  ledger_.begin_offload(id);
  enter_offload_window(id);
  note_offloaded(id);
}

void Engine::drain_window_of(RecordId id) {
  const TapeId tape = ledger_.record(id).tape;
  drain_window(windows_.limits(tape).offload_bytes, windows_.kept_bytes(tape));
}

// ---- in ----

struct Engine::ReloadCopy {
  Windows::Ahead wanted;
  Hold hold;
  StreamId stream = kNoStream;
  Slot slot = {};
  uint64_t nbytes = 0;
  uint64_t address_modulo = 0;
  c10::SmallVector<std::pair<Rule, Point>, 2> waits_for = {};
  Point latest_reload = {};  // of the record, as this one was planned
  c10::Storage buffer = {};
  bool is_enqueued = false;
  Point end = {};
  CopyTime time = {};
};

Engine::ReloadCopy Engine::plan_reload(const Windows::Ahead& wanted, StreamId consumer) {
  const RecordId id = wanted.record;
  const Holdings& held = holdings(id);
  ReloadCopy copy{wanted, Hold(*this, id)};
  copy.stream = reload_stream(id, consumer);
  copy.slot = held.slot;
  copy.nbytes = ledger_.record(id).nbytes();
  copy.address_modulo = mutated(Mutant::AlignmentRestored) ? 8 : held.address_modulo;
  if (streams_.must_wait(Rule::ReloadWaitsForOffload, copy.stream, held.offload_end))
    copy.waits_for.emplace_back(Rule::ReloadWaitsForOffload, held.offload_end);
  const bool is_behind_the_last = copy.stream == held.reload_end.stream;
  if (!is_behind_the_last && streams_.must_wait(Rule::ReloadWaitsForReload, copy.stream, held.reload_end))
    copy.waits_for.emplace_back(Rule::ReloadWaitsForReload, held.reload_end);
  copy.latest_reload = held.reload_end;
  copy.time.is_wanted = timeline_.is_on();
  return copy;
}

void Engine::start_reloads(std::span<const Windows::Ahead> wanted, Reload why) {
  const StreamId consumer = backend_.current_stream();
  timeline_.set_origin();
  c10::SmallVector<ReloadCopy, 2> copies;
  for (const Windows::Ahead& one : wanted) {
    if (ledger_.is_live(one.record) && ledger_.record(one.record).state == RecordState::Offloaded)
      copies.push_back(plan_reload(one, consumer));
  }
  if (copies.empty()) return;
  uint64_t starting_bytes = 0;
  for (const ReloadCopy& copy : copies) starting_bytes += why == Reload::Ahead ? copy.nbytes : 0;
  windows_.reloads_start(starting_bytes);
  StreamOrder::Batch waits = streams_.batch();
  std::exception_ptr failure;
  try {
    streams_.without_gil(consumer, [&] { enqueue(copies, consumer, why, waits); });
  } catch (const std::exception&) {
    failure = std::current_exception();
  }
  windows_.reloads_started(starting_bytes);
  streams_.remember(waits);
  for (ReloadCopy& copy : copies) {
    if (!copy.is_enqueued) break;
    if (copy.end.is_beginning()) {  // it will end, but nobody will know when
      holdings(copy.wanted.record).is_slot_lost = true;
      (void)copy.buffer.unsafeReleaseStorageImpl();
    } else {
      reload_is_enqueued(copy, consumer, why);
    }
  }
  if (failure) std::rethrow_exception(failure);
}

// Without the GIL.
void Engine::enqueue(std::span<ReloadCopy> copies, StreamId consumer, Reload why, StreamOrder::Batch& waits) const {
  for (ReloadCopy& copy : copies) {
    try {
      c10::DataPtr memory = backend_.allocate(copy.nbytes, copy.address_modulo);
      const c10::Device device = memory.device();
      copy.buffer = c10::Storage(c10::Storage::use_byte_size_t(), copy.nbytes, std::move(memory),
                                 c10::GetAllocator(device.type()), /*resizable=*/true);
    } catch (const c10::Error&) {
      if (why == Reload::AskedFor) throw;
      break;  // no memory: what is asked for later is loaded then
    } catch (const std::bad_alloc&) {
      if (why == Reload::AskedFor) throw;
      break;
    }
  }
  if (!copies.front().buffer) return;
  const Point allocated = backend_.record(consumer);
  for (ReloadCopy& copy : copies) {
    if (!copy.buffer) return;
    if (copy.stream != consumer) waits.wait(Rule::ReloadWaitsForCompute, copy.stream, allocated);
    enqueue(copy, waits);
  }
}

void Engine::enqueue(ReloadCopy& copy, StreamOrder::Batch& waits) const {
  for (const auto& [rule, point] : copy.waits_for) waits.wait(rule, copy.stream, point);
  const ProfilerRange range("torchoffload::reload", copy.nbytes);
  copy.time.begin = time_if(copy.time.is_wanted, backend_, copy.stream);
  backend_.copy_in(copy.buffer.mutable_data(), copy.slot, copy.nbytes, copy.stream);
  copy.is_enqueued = true;
  copy.end = end_of_copy(backend_, copy.stream);
  copy.time.end = time_if(copy.time.is_wanted, backend_, copy.stream);
}

void Engine::reload_is_enqueued(ReloadCopy& copy, StreamId consumer, Reload why) {
  const RecordId id = copy.wanted.record;
  Holdings& held = holdings(id);
  DeviceBytes bytes = {std::move(copy.buffer), ledger_.record(id).span.begin, consumer, copy.end,
                       /*is_buffer=*/true};
  if (copy.time.is_wanted) copy.time.enter(timeline_, entry(EntryKind::CopyIn, id));
  const bool is_alone = held.reload_end == copy.latest_reload;
  const auto guard_slot = [&](Point reload_end) {
    if (!mutated(Mutant::SlotGuardedByEachReload)) held.other_reload_ends.push_back(reload_end);
  };
  if (ledger_.record(id).state != RecordState::Offloaded) {  // see Note [Copies that others come between]
    guard_slot(copy.end);
    backend_.forget(copy.end);
    return streams_.retire(std::move(bytes), Rule::DroppedBufferWaitsForReload);
  }
  if (!is_alone) guard_slot(held.reload_end);
  backend_.forget(held.reload_end);
  held.reload_end = copy.end;
  held.bytes = std::move(bytes);
  begin_reload(copy.wanted, why);
}

}  // namespace torchoffload
