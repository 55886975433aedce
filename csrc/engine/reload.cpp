// Copies in: how a record's bytes come back to the device, because a consumer asks for them or ahead of it. See
// Note [Copies that others come between].
#include <algorithm>
#include <array>
#include <exception>
#include <memory_resource>
#include <stdexcept>
#include <string>
#include <utility>

#include "engine/copy_time.h"
#include "engine/profiler_range.h"
#include "engine/reloader.h"

namespace torchoffload {

struct Reloader::ReloadCopy {
  CopyWindows::Ahead wanted;
  Records::Hold hold;
  HeldSlot here;
  StreamId stream = kNoStream;
  uint64_t nbytes = 0;
  uint64_t address_modulo = 0;
  std::optional<Point> offload_end = {};      // set if the copy's stream has to wait for it
  std::optional<Point> previous_reload = {};  // set if the copy's stream has to wait for it
  Point latest_reload = {};                   // the end of the record's latest reload when this one was planned
  Memory buffer = {};
  bool has_begun = false;
  Point end = {};  // the beginning: not known, if it has begun
  CopyTime time = {};
};

std::optional<Reloader::ReloadCopy> Reloader::plan_reload(const CopyWindows::Ahead& wanted, StreamId consumer) {
  const RecordId id = wanted.record;
  const HeldRecord& held = this->held(id);
  std::optional<HeldSlot> here = slots_.try_hold(held.slot);
  if (!here) return std::nullopt;
  ReloadCopy copy{wanted, Records::Hold(records_, id), std::move(*here)};
  copy.stream = records_.context(id).options.use_streams ? backend_.streams.reload_stream() : consumer;
  copy.nbytes = ledger_.record(id).nbytes();
  copy.address_modulo = mutated(Mutant::AlignmentRestored) ? 8 : held.address_modulo;
  if (streams_.must_wait(Rule::ReloadWaitsForOffload, copy.stream, held.offload_end))
    copy.offload_end = held.offload_end;
  const bool is_behind_the_last = copy.stream == held.reload_end.stream;
  if (!is_behind_the_last && streams_.must_wait(Rule::ReloadWaitsForReload, copy.stream, held.reload_end))
    copy.previous_reload = held.reload_end;
  copy.latest_reload = held.reload_end;
  copy.time.is_wanted = timeline_.is_on();
  return copy;
}

void Reloader::start_reloads(std::span<const CopyWindows::Ahead> wanted, Reload why, const AlsoWait& also) {
  const StreamId consumer = backend_.streams.current_stream();
  timeline_.set_origin();
  // There are nearly always one or two copies: these take no memory from the heap.
  alignas(ReloadCopy) std::array<std::byte, 2 * sizeof(ReloadCopy)> first_bytes;
  std::pmr::monotonic_buffer_resource memory(first_bytes.data(), first_bytes.size());
  std::pmr::vector<ReloadCopy> copies(&memory);
  copies.reserve(wanted.size());
  for (const CopyWindows::Ahead& one : wanted) {
    if (!ledger_.is_live(one.record) || ledger_.record(one.record).state != RecordState::Offloaded) continue;
    if (auto copy = plan_reload(one, consumer)) copies.push_back(std::move(*copy));
  }
  if (copies.empty()) return;
  uint64_t starting_bytes = 0;
  for (const ReloadCopy& copy : copies) starting_bytes += why == Reload::Ahead ? copy.nbytes : 0;
  windows_.reloads_start(starting_bytes);
  StreamOrder::Batch waits = streams_.batch();
  std::exception_ptr failure;
  try {
    streams_.without_gil(consumer, [&] {
      allocate(copies, why);
      enqueue(copies, consumer, waits);
      waits.make(also);
    });
  } catch (const std::exception&) {
    failure = std::current_exception();
  }
  windows_.reloads_started(starting_bytes);
  streams_.remember(waits);
  for (ReloadCopy& copy : copies) {
    if (!copy.has_begun) break;
    if (copy.end.is_beginning()) {  // the copy will end at a time that cannot be known
      held(copy.wanted.record).is_slot_lost = true;
      copy.here.lose();
      (void)copy.buffer.release();
    } else {
      copy.here.release_hold(copy.end);
      reload_is_enqueued(copy, consumer, why);
    }
  }
  if (failure) std::rethrow_exception(failure);
}

void Reloader::allocate(std::span<ReloadCopy> copies, Reload why) const {
  for (ReloadCopy& copy : copies) {
    try {
      copy.buffer = backend_.memory.allocate(copy.nbytes, copy.address_modulo);
    } catch (const std::exception& error) {
      if (why == Reload::AskedFor || !program::is_out_of_memory(error)) throw;
      return;  // no memory: these records are loaded when they are asked for
    }
  }
}

void Reloader::enqueue(std::span<ReloadCopy> copies, StreamId consumer, StreamOrder::Batch& waits) {
  if (!copies.front().buffer) return;
  const Point allocated = backend_.streams.record(consumer);
  for (ReloadCopy& copy : copies) {
    if (!copy.buffer) return;
    if (copy.stream != consumer) waits.wait(Rule::ReloadWaitsForCompute, copy.stream, allocated);
    enqueue(copy, waits);
  }
}

void Reloader::enqueue(ReloadCopy& copy, StreamOrder::Batch& waits) {
  if (copy.offload_end) waits.wait(Rule::ReloadWaitsForOffload, copy.stream, *copy.offload_end);
  if (copy.previous_reload) waits.wait(Rule::ReloadWaitsForReload, copy.stream, *copy.previous_reload);
  const ProfilerRange range("torchoffload::reload", copy.nbytes);
  copy.time.begin = time_if(copy.time.is_wanted, backend_.streams, copy.stream);
  backend_.link.copy_in(copy.buffer.mutable_data(), copy.here.slot(), copy.nbytes, copy.stream);
  copy.has_begun = true;
  copy.end = end_of_copy(backend_.streams, copy.stream);
  copy.time.end = time_if(copy.time.is_wanted, backend_.streams, copy.stream);
}

void Reloader::reload_is_enqueued(ReloadCopy& copy, StreamId consumer, Reload why) {
  const RecordId id = copy.wanted.record;
  HeldRecord& held = this->held(id);
  DeviceBytes bytes = {std::move(copy.buffer), ledger_.record(id).span.begin, consumer, copy.end,
                       /*is_buffer=*/true};
  if (copy.time.end.is_set()) {
    copy.time.enter(timeline_, records_.entry(EntryKind::CopyIn, id));
  } else {
    backend_.streams.release(copy.time.begin);
  }
  const bool is_alone = held.reload_end == copy.latest_reload;
  const auto guard_slot = [&](Point reload_end) {
    if (!mutated(Mutant::SlotGuardedByEachReload)) held.other_reload_ends.push_back(reload_end);
  };
  if (ledger_.record(id).state != RecordState::Offloaded) {  // see Note [Copies that others come between]
    guard_slot(copy.end);
    backend_.link.forget(copy.end);
    return records_.defer_free(std::move(bytes), Rule::DroppedBufferWaitsForReload,
                               records_.entry(EntryKind::DropWait, id));
  }
  if (!is_alone) guard_slot(held.reload_end);
  backend_.link.forget(held.reload_end);
  held.reload_end = copy.end;
  held.bytes = std::move(bytes);
  begin_reload(copy.wanted, why);
}

void Reloader::begin_reload(const CopyWindows::Ahead& started, Reload why) {
  const RecordId id = started.record;
  const uint64_t nbytes = ledger_.record(id).nbytes();
  if (why == Reload::Ahead) {
    windows_.reload_began(id, nbytes);
    ledger_.begin_reload_ahead(id, started.expected_at);
    uint64_t& peak_bytes = Statistics::global().peak_reload_window_bytes;
    peak_bytes = std::max(peak_bytes, windows_.reload_bytes());
  } else {
    ledger_.begin_reload(id);
  }
  TapeRow& row = records_.row(ledger_.record(id).tape);
  count(row, &TapeRow::records_reloaded, 1);
  count(row, &TapeRow::bytes_reloaded, nbytes);
}

void Reloader::finish_reload(RecordId id) {
  const std::string failure = backend_.link.failure(held(id).reload_end);
  const bool was_ahead = ledger_.record(id).prefetched;
  if (was_ahead) records_.leave_reload_window(id);
  if (failure.empty() || mutated(Mutant::FailedReadRaises)) {
    ledger_.finish_reload(id);
    return;
  }
  ledger_.pass_by(id);
  held(id).bytes = {};
  // A reload ahead may have failed in a backward that ended long ago. So the record is read again before an error is
  // raised.
  if (!was_ahead) throw std::runtime_error("torchoffload: a saved tensor could not be read back: " + failure);
}

}  // namespace torchoffload
