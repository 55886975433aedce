// A save: the record that it joins, or the new record that it makes.
#include <algorithm>
#include <string>
#include <utility>

#include "engine/engine.h"

namespace torchoffload {

std::optional<RecordHandle> Engine::pack(const SavedBytes& saved, TapeId tape) {
  if (ThreadState& thread = ThreadState::current(); !thread.waiting.empty())
    Offloader::put_off_waiting(thread, saved.memory.storage());
  const MemoryOrigin origin = records_.backend.memory.origin_of(saved.memory);
  Identity identity{saved.memory.storage(), saved.version.address(), saved.version.current(),
                    saved.memory.data(),    saved.memory.nbytes(),   origin.allocation};
  if (saved.wrapper) {
    identity.wrapper_counter = saved.wrapper.address();
    identity.wrapper_version = saved.wrapper.current();
  }
  Span moved = saved.extent == Extent::Storage ? Span{0, identity.nbytes} : saved.span;
  const std::optional<RecordId> id = records_.ledger.find(tape, identity, moved, saved.itemsize);
  const StreamId stream = records_.backend.streams.current_stream();
  if (id && !records_.held(*id).was_written_through_a_wrapper(records_.ledger.record(*id))) {
    // A save on an external stream needs a record of its own, whose copy waits for that stream.
    if (stream == records_.held(*id).packed_on || records_.streams.is_lasting(stream)) return join(*id, saved, stream);
  }
  if (moved.nbytes() < records_.held(tape).context->options.min_offload_size) {
    const auto small = extent_of_small_view(records_.ledger.of_storage(tape, identity.storage));
    if (!small) return std::nullopt;
    if (*small == Extent::Storage) moved = {0, identity.nbytes};
  }
  return add_record(saved, identity, moved, origin.stream, tape);
}

RecordHandle Engine::join(RecordId id, const SavedBytes& saved, StreamId stream) {
  const Record& record = records_.ledger.record(id);
  if (record.is_kept()) {
    records_.note_kept(id, record.decision.why, saved.span.nbytes());
  } else {
    count(records_.row(record.tape), &TapeRow::records_deduplicated, 1);
    count(records_.row(record.tape), &TapeRow::bytes_deduplicated, saved.span.nbytes());
  }
  // Another stream uses the storage now. Without us, autograd's graph would hold the storage until backward. So the
  // allocator has to wait for that stream too before it hands the memory on (R3).
  if (stream != records_.held(id).packed_on && !mutated(Mutant::NoteUseAtJoin))
    records_.backend.memory.note_use(saved.memory, stream);
  const std::byte* const first = saved.memory.data() + saved.span.begin;
  records_.backend.observer.saw_pack(first, saved.span.nbytes(), stream, ThreadState::current().sequence_number());
  if (saved.wrapper) records_.held(id).wrappers.note(saved.wrapper);
  return RecordHandle{id, records_.ledger.add_handle(id)};
}

// The record gets its handle first. So release() undoes both if a later call throws.
RecordHandle Engine::add_record(const SavedBytes& saved, const Identity& identity, const Span& moved,
                                StreamId allocated_on, TapeId tape) {
  const Decision decision = decide(tape, saved, moved.nbytes());
  records_.held_records.grow_to(records_.ledger.next_index_limit());
  const RecordId id = records_.ledger.add_record(tape, identity, moved, decision);
  const Records::Hold hold(records_, id);
  const RecordHandle handle{id, records_.ledger.add_handle(id)};
  try {
    fill_record(id, saved, allocated_on);
    if (saved.wrapper) records_.held(id).wrappers.note(saved.wrapper);
  } catch (...) {
    release(handle);
    throw;
  }
  return handle;
}

// ---- the decision on a new record ----

Decision Engine::decide(TapeId tape, const SavedBytes& saved, uint64_t nbytes) {
  HeldTape& info = records_.held(tape);
  const std::shared_ptr<ContextState> context = info.context;
  const Lessons::Known known = learned(tape, saved, nbytes);
  if (is_beyond_fraction(info, nbytes)) return Decision::keep(Reason::BeyondFraction);
  if (known.why != Reason::None) return Decision::keep(known.why);
  if (records_.slots.is_within_budget(*context, nbytes)) return Decision::move_to(context->options.tier);
  const std::string place = context->options.tier == Placement::Disk ? "the spill file" : "host memory";
  SlotBudget::refuse(*context, "the budget of " + place + " (budget_bytes) is spent", "raise budget_bytes");
  return Decision::keep(Reason::TierFull);
}

Lessons::Known Engine::learned(TapeId tape, const SavedBytes& saved, uint64_t nbytes) {
  HeldTape& info = records_.held(tape);
  const Lessons::Known known =
      records_.lessons.next(info.lessons, {saved.memory, nbytes, saved.dtype, saved.dim, program::sequence_number()});
  for (TapeRow* const row : {&info.row, &Statistics::global().totals})
    row->bytes_at_once = std::max(row->bytes_at_once, known.operator_bytes);
  records_.times.next(info.number, /*is_first=*/info.record_count == 0, known.wants_times);
  if (known.has_lost_way) records_.slots.grow_ahead(*info.context);
  if (info.context->module_windows.empty()) info.windows.set_limits(known.limits);
  return known;
}

// The bytes of the tape that the context closed last are taken for the bytes of this one. Until a tape was closed, no
// record is beyond the fraction.
bool Engine::is_beyond_fraction(HeldTape& tape, uint64_t nbytes) {
  if (tape.context->options.fraction >= 1) return false;
  tape.eligible_bytes += nbytes;
  const auto known = tape.context->eligible_bytes.find(this);
  if (known == tape.context->eligible_bytes.end()) return false;
  const double limit_bytes = tape.context->options.fraction * static_cast<double>(known->second);
  return static_cast<double>(tape.eligible_bytes) > limit_bytes;
}

// ---- the memory and slot of a new record ----

void Engine::fill_record(RecordId id, const SavedBytes& saved, StreamId allocated_on) {
  const Record& record = records_.ledger.record(id);
  HeldTape& tape = records_.held(record.tape);
  ContextState& context = *tape.context;
  HeldRecord& held = records_.held(id);
  if (!mutated(Mutant::IdentityHoldsStorage)) held.identity = WeakMemory(saved.memory);
  held.version = VersionCounter(saved.version);
  const auto* const first = static_cast<const std::byte*>(record.identity.data) + record.span.begin;
  held.address_modulo = reinterpret_cast<uintptr_t>(first) % kAlignmentBytes;
  held.number = static_cast<uint32_t>(tape.record_count++);
  held.module = context.module;
  held.packed_on = records_.backend.streams.current_stream();
  held.allocated_on = allocated_on;
  held.bytes = {Memory(saved.memory), 0, held.packed_on, {}};
  // See Note [Streams that may be destroyed].
  if (records_.streams.is_lasting(held.packed_on) && !mutated(Mutant::NoteUseAtPack))
    records_.backend.memory.note_use(saved.memory, held.packed_on);
  if (record.is_kept()) {
    count_kept_from_start(id);
    if (record.decision.why == Reason::TierFull) return;
  } else {
    held.charged_bytes = records_.slots.charge(context, record.nbytes());
  }
  const uint64_t sequence_number = ThreadState::current().sequence_number();
  records_.backend.observer.saw_pack(first, record.nbytes(), held.packed_on, sequence_number);
  ThreadState::current().pending.push_back({&offloader_, id, sequence_number, &context});
}

void Engine::count_kept_from_start(RecordId id) {
  const Record& record = records_.ledger.record(id);
  const Reason why = record.decision.why;
  records_.note_kept(id, why, record.nbytes());
  if (why == Reason::LivesOn || why == Reason::BeyondFraction || why == Reason::TierFull) return;
  records_.held(id).learned_bytes = record.nbytes();
  records_.held(record.tape).windows.kept(record.nbytes());
  records_.lessons.kept(why, record.nbytes());
}

}  // namespace torchoffload
