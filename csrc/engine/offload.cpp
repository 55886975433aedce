// Copies out: when a copy is enqueued, the steps before and after it, and how its source is dropped.
//
// Note [Copies that others come between]
// A stream's queue takes about a thousand commands. A call that adds one more blocks the host until the device has
// executed some of them. If the GIL were held then, every Python thread would stop, and the program would hang if the
// device waits for something that one of these threads is to launch. So a copy is enqueued in three parts. The first
// one reads the copy's arguments, with the GIL held. The second one makes the calls without the GIL. The third one
// takes the GIL again and enters the copy into ledger and windows. Meanwhile the record is held, so that the record,
// its slot and its memory still exist. Anything else may have happened to it, so the third part looks at its state
// again:
// - The source of a copy out may have been used by a backward, or the record may be kept by now. Then the copy is not
//   used: its slot goes back to the store, guarded by the copy's end, and the source is busy until the copy's end.
// - Another thread may have reloaded the record too. Then the second buffer is not used: it is dropped after its copy,
//   whose end guards the slot beside the end of the first one.
#include <algorithm>
#include <array>
#include <exception>
#include <string>
#include <utility>

#include "engine/copy_time.h"
#include "engine/offloader.h"
#include "engine/profiler_range.h"
#include "system/host_wait.h"

namespace torchoffload {

namespace {

// Owns a slot until a record takes it. If none does, the slot goes back to its store.
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

struct Offloader::OffloadCopy {
  Slot slot;
  DeviceBytes source;
  const std::byte* first = nullptr;  // the source's address when it was checked: it may be resized meanwhile (R10)
  uint64_t nbytes = 0;
  StreamId stream = kNoStream;
  std::span<const Point> guards;
  bool waits_for_operators = false;
  Point filled;  // of the source's stream; the beginning: the present point
  StreamId also_filled_on = kNoStream;
  std::array<std::optional<StreamOrder::Wanted>, 2> window_waits;  // that the window asks for with this copy in it
  bool has_begun = false;
  Point end;  // the beginning: not known, if it has begun
  TimedPoint ready;
  CopyTime time;
};

// ---- one copy ----

// If the user interrupts a wait for the disk, the record is kept and the program goes on, so that Python can handle the
// interruption. So it is as well if the store has no room.
void Offloader::enqueue_offload(RecordId id, Point filled, FlushOrder& order) {
  if (records_.is_inherited() || !ledger_.is_live(id)) return;
  const Records::Hold hold(records_, id);
  try {
    try_enqueue_offload(id, filled, order);
  } catch (const WaitAbandoned&) {
    if (records_.is_pending(id)) records_.keep(id, Reason::TierFull);
  } catch (const StoreFull& full) {
    if (!records_.is_pending(id)) return;
    const std::shared_ptr<ContextState> context = records_.tape_of(id).context;
    records_.keep(id, Reason::TierFull);
    const bool is_on_disk = context->options.tier == Placement::Disk || context->options.on_full == OnFull::Disk;
    SlotBudget::refuse(*context, full.what(),
                       is_on_disk ? "set disk_dir to a directory with room" : "lower budget_bytes");
  }
}

void Offloader::try_enqueue_offload(RecordId id, Point filled, FlushOrder& order) {
  records_.stop_waiting(id);
  if (held(id).learned_bytes > 0) {
    if (streams_.can_be_used(held(id).bytes.stream)) records_.mark(EntryKind::Ready, id, held(id).bytes.stream);
    return drain_window_of(id);
  }
  if (!records_.is_pending(id)) return;
  std::vector<Point> guards;
  const std::optional<Slot> slot = acquire_slot(id, guards);
  if (!slot) return;
  SlotLoan loan(slots_, *slot, guards);
  const StreamId stream = offload_begins_on(id);
  const std::span<const Point> waited_for = guards_to_wait_for(stream, guards);
  timeline_.set_origin();
  if (!records_.is_pending(id)) return;
  if (records_.was_resized(id) && !mutated(Mutant::ResizeCheckedAtEnqueue))
    return records_.keep(id, Reason::Resized);  // R10
  if (!streams_.can_be_used(held(id).bytes.stream) || !can_name_allocation(id))
    return records_.keep(id, Reason::ExternalStream);
  OffloadCopy copy = plan_offload(id, order);
  if (!copy.time.is_wanted) copy.filled = filled;
  copy.slot = *slot;
  copy.guards = waited_for;
  StreamOrder::Batch waits = streams_.batch();
  try {
    streams_.without_gil(stream, [&] { enqueue(copy, waits); });
  } catch (const std::exception&) {
    if (copy.has_begun && copy.end.is_beginning()) {  // it will end at a time that cannot be known
      loan.keep_for_ever();
      (void)copy.source.memory.release();
    }
    if (copy.end.is_beginning()) throw;
  }
  if (stream != copy.source.stream && copy.filled.is_beginning()) order = {stream, copy.source.stream};
  streams_.remember(waits);
  if (!records_.is_pending(id)) {  // see Note [Copies that others come between]
    guards.clear();
    if (!mutated(Mutant::SlotGuardedByCopyInVain)) guards.push_back(copy.end);
    if (!mutated(Mutant::SourceBusyUntilCopyInVain)) held(id).bytes.busy_until = copy.end;
    backend_.link.forget(copy.end);
    for (const TimedPoint point : {copy.ready, copy.time.begin, copy.time.end}) backend_.streams.release(point);
    return;
  }
  (void)loan.take();
  offload_is_enqueued(id, copy);
}

bool Offloader::can_name_allocation(RecordId id) {
  const StreamId allocated_on = held(id).allocated_on;
  return allocated_on == kNoStream || streams_.can_be_used(allocated_on);
}

StreamId Offloader::offload_begins_on(RecordId id) {
  return records_.context(id).options.use_streams ? backend_.streams.offload_stream() : held(id).bytes.stream;
}

Offloader::OffloadCopy Offloader::plan_offload(RecordId id, const FlushOrder& order) {
  const HeldRecord& held = this->held(id);
  OffloadCopy copy;
  copy.source = held.bytes;
  copy.first = copy.source.memory.data() + ledger_.record(id).span.begin;
  copy.nbytes = ledger_.record(id).nbytes();
  copy.stream = offload_begins_on(id);
  // A copy on the source's own stream needs no wait, and makes offload_stream wait for nothing.
  const bool is_elsewhere = copy.stream != copy.source.stream;
  const bool is_ordered = order.waiter == copy.stream && order.producer == copy.source.stream;
  copy.waits_for_operators = is_elsewhere && !is_ordered;
  const StreamId allocated_on = held.allocated_on;
  const bool is_filled_here = allocated_on == copy.source.stream || allocated_on == copy.stream;
  if (allocated_on != kNoStream && !is_filled_here && !backend_.streams.is_capturing_on(allocated_on))
    copy.also_filled_on = allocated_on;
  copy.time.is_wanted = timeline_.is_on();
  if (!copy.time.is_wanted) plan_window_waits(id, copy);  // a wait that is timed is made by itself
  return copy;
}

// The first few: drain_window() makes the others by themselves.
void Offloader::plan_window_waits(RecordId id, OffloadCopy& copy) {
  const TapeWindows& tape = records_.tape_of(id).windows;
  const auto bytes_of = [this](RecordId known) {
    gil.assert_held();
    return held(known).window_bytes;
  };
  auto next = copy.window_waits.begin();
  const auto note = [&](RecordId known) {
    gil.assert_held();
    const DeviceBytes& source = held(known).bytes;
    *next = streams_.wanted(Rule::ComputeWaitsForOffload, source.stream, source.busy_until);
    if (!*next) return false;
    ++next;
    return next != copy.window_waits.end();
  };
  windows_.each_offload_to_wait_for(copy.nbytes, tape.limits().offload_bytes, tape.kept_bytes(), asks_offloading(),
                                    bytes_of, note);
}

void Offloader::enqueue(OffloadCopy& copy, StreamOrder::Batch& waits) {
  for (const Point& guard : copy.guards) waits.wait(Rule::OffloadWaitsForGuards, copy.stream, guard);
  if (copy.waits_for_operators) {
    const Point filled = copy.filled.is_beginning() ? backend_.streams.record(copy.source.stream) : copy.filled;
    waits.wait(Rule::OffloadWaitsForCompute, copy.stream, filled);
  }
  if (copy.also_filled_on != kNoStream)
    waits.wait(Rule::OffloadWaitsForAllocation, copy.stream, backend_.streams.record(copy.also_filled_on));
  copy.ready = time_if(copy.time.is_wanted, backend_.streams, copy.source.stream);
  const ProfilerRange range("torchoffload::offload", copy.nbytes);
  copy.time.begin = time_if(copy.time.is_wanted, backend_.streams, copy.stream);
  backend_.link.copy_out(copy.slot, copy.first, copy.nbytes, copy.stream);
  copy.has_begun = true;
  copy.end = end_of_copy(backend_.streams, copy.stream);
  copy.time.end = time_if(copy.time.is_wanted, backend_.streams, copy.stream);
  for (const auto& wait : copy.window_waits) waits.make(wait);
}

void Offloader::offload_is_enqueued(RecordId id, const OffloadCopy& copy) {
  HeldRecord& held = this->held(id);
  const uint64_t nbytes = copy.nbytes;
  held.slot = copy.slot;
  if (slots_.moves_slots()) held.slot.address = nullptr;  // from here on the slot has one while it is held
  slots_.note_filled(held.slot, copy.end);
  Statistics::global().slot_acquired(copy.slot.nbytes());
  held.offload_end = held.bytes.busy_until = copy.end;
  if (copy.time.is_wanted) {
    Timeline::Entry ready = records_.entry(EntryKind::Ready, id);
    ready.begin = copy.ready;
    timeline_.add(ready);
    copy.time.enter(timeline_, records_.entry(EntryKind::CopyOut, id));
  }
  ledger_.begin_offload(id);
  enter_offload_window(id);
  TapeRow& row = records_.row(ledger_.record(id).tape);
  count(row, &TapeRow::records_offloaded, 1);
  count(row, &TapeRow::bytes_offloaded, nbytes);
  if (ModuleRow* const module = records_.context(id).row_of(held.module); module != nullptr) {
    ++module->records_offloaded;
    module->bytes_offloaded += nbytes;
  }
  drain_window_of(id);
  Statistics::global().saw_offload_window(windows_.offload_bytes());
}

// ---- slots ----

std::optional<Slot> Offloader::acquire_slot(RecordId id, std::vector<Point>& guards) {
  const uint64_t nbytes = ledger_.record(id).nbytes();
  std::optional<Slot> slot = slots_.try_acquire(nbytes, guards);
  while (!slot) {
    slots_.grow(nbytes);
    backend_.observer.saw_growth();
    slots_.tell_trouble(records_.context(id));
    if (!records_.is_pending(id)) return std::nullopt;
    slot = slots_.try_acquire(nbytes, guards);
  }
  return slot;
}

std::span<const Point> Offloader::guards_to_wait_for(StreamId stream, std::vector<Point>& guards) {
  const auto end = std::partition(guards.begin(), guards.end(), [&](const Point& guard) REQUIRES(gil) {
    return !streams_.is_polled(guard) && streams_.must_wait(Rule::OffloadWaitsForGuards, stream, guard);
  });
  for (const Point& guard : std::span(end, guards.end())) {
    if (streams_.is_polled(guard)) streams_.wait(Rule::OffloadWaitsForGuards, stream, guard);
  }
  return {guards.begin(), end};
}

// ---- the window ----
//
// Note [Parts in the offload window]
// A view that moves alone keeps its whole storage on the device while its copy is in flight, since the storage can be
// freed as a whole alone. So in the window it counts with the bytes of the storage. Of several views of one storage the
// one whose copy began last counts, and the others with nothing: the storage that they keep is freed with that one.

void Offloader::enter_offload_window(RecordId id) {
  const bool is_part = ledger_.record(id).nbytes() < records_.pinned_bytes(id);
  const std::optional<RecordId> before = is_part ? ledger_.before_of_storage(id) : std::nullopt;
  if (before && records_.is_offloading(*before)) records_.leave_offload_window(*before);
  const bool counts_whole = !mutated(Mutant::PartCountsItsStorage);
  held(id).window_bytes = counts_whole ? records_.pinned_bytes(id) : ledger_.record(id).nbytes();
  windows_.offload_began(id, held(id).window_bytes, asks_offloading());
}

void Offloader::drain_window_of(RecordId id) {
  const TapeWindows& tape = records_.tape_of(id).windows;
  drain_window(tape.limits().offload_bytes, tape.kept_bytes());
}

void Offloader::free_deferred() {
  if (!streams_.has_polled()) return streams_.free_deferred();
  while (const auto oldest = windows_.oldest_offload(asks_offloading())) {
    if (!streams_.is_seen_reached(held(*oldest).offload_end)) break;
    finish_offload(*oldest);
  }
  streams_.free_deferred();
}

// R4: the compute stream is made to wait only when the window is full, for the oldest copy first.
void Offloader::drain_window(uint64_t window_bytes, uint64_t kept_bytes) {
  while (const auto next = windows_.offload_to_wait_for(window_bytes, kept_bytes, asks_offloading())) {
    const RecordId oldest = *next;
    count(records_.row(ledger_.record(oldest).tape), &TapeRow::window_waits, 1);
    const DeviceBytes source = held(oldest).bytes;  // a copy: another thread may drop the record's own meanwhile
    try {
      if (!streams_.is_lasting(source.stream)) {  // see Note [Streams that may be destroyed]
        streams_.synchronize(source.busy_until);
      } else {  // the wait is timed, so that its time can be subtracted from compute
        const TimedSpan span(timeline_, source.stream, records_.entry(EntryKind::WindowWait, oldest));
        streams_.wait(Rule::ComputeWaitsForOffload, source.stream, source.busy_until);
      }
    } catch (const WaitAbandoned&) {  // by the user: the window stays over its limit, for Python to handle that
      return;
    }
    if (records_.is_offloading(oldest)) finish_offload(oldest);
  }
}

// A compiled graph may hand the memory to another of its values, or return it, while the storage lives on. So the
// storage says nothing any more of whether the program holds the saved bytes, and the record forgets it.
bool Offloader::release_source(RecordId id) {
  flush_pending(nullptr);
  if (records_.is_inherited()) return false;
  const Records::Hold hold(records_, id);
  if (records_.is_offloading(id)) {
    const DeviceBytes source = held(id).bytes;
    if (streams_.is_lasting(source.stream)) {
      // The current stream runs the graph, which reuses the memory. The source's stream gets it once the graph has
      // dropped it.
      for (const StreamId stream : {backend_.streams.current_stream(), source.stream})
        streams_.wait(Rule::ReleasedSourceWaitsForOffload, stream, source.busy_until);
    } else {  // see Note [Streams that may be destroyed]
      streams_.synchronize(source.busy_until);
    }
    if (records_.is_offloading(id)) finish_offload(id);
  }
  if (ledger_.record(id).state != RecordState::Offloaded) return false;
  if (held(id).identity) count(records_.row(ledger_.record(id).tape), &TapeRow::bytes_away, records_.pinned_bytes(id));
  held(id).identity = {};
  return true;
}

void Offloader::finish_offload(RecordId id) {
  HeldRecord& held = this->held(id);
  records_.leave_offload_window(id);
  if (records_.was_resized(id) && !mutated(Mutant::ResizeCheckedInFlight)) {  // R10
    records_.keep(id, Reason::Resized);
    return;
  }
  const std::string failure = backend_.link.failure(held.offload_end);
  if (!failure.empty() && !mutated(Mutant::FailedWriteKeepsRecord)) {
    records_.context(id).warn_once(
        Warning::WriteFailed, "torchoffload: a saved tensor stays in memory because writing it failed: " + failure);
    records_.keep(id, Reason::WriteFailed);
    return;
  }
  held.is_confirmed = true;
  ledger_.finish_offload(id);
  held.bytes = {};
}

}  // namespace torchoffload
