// The engine's bookkeeping: tapes, saves, windows, statistics. Nothing here waits or enqueues a copy.
#include <ATen/SequenceNumber.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <string>
#include <utility>

#include "autograd/engine.h"
#include "autograd/operation.h"
#include "autograd/thread_state.h"
#include "core/mutant.h"
#include "core/tape_records.h"

namespace torchoffload {

// ---- tapes ----

void Engine::settle() {
  if (!backend_.must_settle()) return;
  const BlockingSection blocking;
  backend_.settle();
}

TapeId Engine::open_tape(std::shared_ptr<ContextState> context) {
  give_back_of_ended();
  const TapeId tape = ledger_.open_tape();
  tapes_.grow_to(tape.index + size_t{1});
  TapeInfo& info = tapes_[tape.index];
  info = {};
  info.id = tape;
  info.context = std::move(context);
  info.number = ++tapes_opened_;
  const size_t left_behind_count = order_.left_behind_count();
  info.order_number = order_.opened(tape);
  Statistics::global().tapes_left_behind += order_.left_behind_count() - left_behind_count;
  windows_.open(tape);
  begin_trace(info);
  ++Statistics::global().live_tapes;
  return tape;
}

void Engine::fit_store(ContextState& context) {
  if (is_inherited() || Statistics::global().live_tapes > Statistics::global().tapes_left_behind) return;
  slots_.fit_to_steps(context);
}

void Engine::close_tape(TapeId id) {
  if (!ledger_.is_open(id)) return;
  if (const auto& context = tapes_[id.index].context; context->options.fraction < 1)
    context->eligible_bytes[this] = tapes_[id.index].eligible_bytes;
  const uint64_t number = tapes_[id.index].number;
  learn_tape(id);
  for (const Save& save : ledger_.tape(id).saves) {
    if (!ledger_.is_live(save.record)) continue;
    holdings(save.record).identity.reset();
    holdings(save.record).wrappers.clear();
  }
  windows_.close(id, ledger_.tape(id).end_save());
  if (ledger_.close_tape(id).gone) tape_is_gone(id);
  if (!is_inherited()) timeline_.note_close(number);  // may block
}

void Engine::tape_is_gone(TapeId id) {
  stop_timing(tapes_[id.index], /*is_complete=*/true);
  const size_t left_behind_count = order_.left_behind_count();
  order_.gone(tapes_[id.index].order_number);
  Statistics::global().tapes_left_behind -= left_behind_count - order_.left_behind_count();
  Statistics::global().tape_finished(tapes_[id.index].row);
  --Statistics::global().live_tapes;
  tapes_[id.index] = {};
}

void Engine::append_live_rows(std::vector<TapeRow>& rows) const {
  for (const TapeInfo& tape : tapes_) {
    if (tape.context) rows.push_back(tape.row);
  }
}

// ---- saves ----

std::optional<RecordHandle> Engine::pack(const at::Tensor& tensor, const Span& span, Extent extent, TapeId tape,
                                         const c10::VariableVersion* wrapper) {
  c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
  const c10::VariableVersion& version = tensor.unsafeGetTensorImpl()->version_counter();
  const MemoryOrigin origin = backend_.origin_of(storage);
  Identity identity{&storage,       address_of(version), version.current_version(),
                    storage.data(), storage.nbytes(),    origin.allocation};
  if (wrapper != nullptr) {
    identity.wrapper_counter = address_of(*wrapper);
    identity.wrapper_version = wrapper->current_version();
  }
  ContextState& context = *tapes_[tape.index].context;
  Span moved = extent == Extent::Storage ? Span{0, identity.nbytes} : span;
  std::optional<RecordId> id = ledger_.find(tape, identity, moved, tensor.itemsize());
  if (id && was_written_through_a_wrapper(*id)) id.reset();
  // What an external stream does with the storage is waited for through a record of its own.
  const StreamId stream = backend_.current_stream();
  if (id && stream != holdings(*id).packed_on && !streams_.is_lasting(stream)) id.reset();
  if (id) {
    const Record& record = ledger_.record(*id);
    if (record.kept == KeptReason::None) {
      count(row(tape), &TapeRow::records_deduplicated, 1);
      count(row(tape), &TapeRow::bytes_deduplicated, span.nbytes());
    } else {
      note_kept(*id, record.kept, span.nbytes());
    }
    // Another stream uses the storage now; its memory waits for that one too, whoever drops it last: without us the
    // graph would hold it (R3).
    if (stream != holdings(*id).packed_on && !mutated(Mutant::NoteUseAtJoin))
      backend_.note_use(*tensor.storage().unsafeGetStorageImpl(), stream);
    const auto* first = static_cast<const std::byte*>(identity.data) + span.begin;
    backend_.saw_pack(first, span.nbytes(), stream, at::sequence_number::peek());
    if (wrapper != nullptr) holdings(*id).wrappers.note(*wrapper);
    return RecordHandle{*id, ledger_.add_handle(*id)};
  }
  if (moved.nbytes() < context.options.min_offload_size) {
    const auto small = extent_of_small_view(ledger_.of_storage(tape, identity.storage));
    if (!small) return std::nullopt;
    if (*small == Extent::Storage) moved = {0, identity.nbytes};
  }
  return add_record(tensor, identity, moved, origin.stream, tape, wrapper);
}

// The record has its handle before anything else, so that whatever throws, both are undone in the one way that there
// is.
RecordHandle Engine::add_record(const at::Tensor& tensor, const Identity& identity, const Span& moved,
                                StreamId allocated_on, TapeId tape, const c10::VariableVersion* wrapper) {
  const std::shared_ptr<ContextState> context = tapes_[tape.index].context;
  KeptReason kept = learned_reason(tapes_[tape.index], tensor, moved.nbytes());
  if (is_beyond_fraction(tapes_[tape.index], moved.nbytes())) kept = KeptReason::BeyondFraction;
  if (kept == KeptReason::None && !slots_.fits(*context, moved.nbytes())) {
    const std::string place = context->options.tier == Tier::Disk ? "the spill file" : "host memory";
    SlotBudget::refuse(*context, "the budget of " + place + " (budget_bytes) is spent", "raise budget_bytes");
    kept = KeptReason::TierFull;
  }
  holdings_.grow_to(ledger_.next_index_limit());
  const RecordId id = ledger_.add_record(tape, identity, moved);
  const Hold hold(*this, id);
  const RecordHandle handle{id, ledger_.add_handle(id)};
  try {
    fill_record(id, tensor, allocated_on, kept);
    if (wrapper != nullptr) holdings(id).wrappers.note(*wrapper);
  } catch (...) {
    release(handle);
    throw;
  }
  return handle;
}

void Engine::fill_record(RecordId id, const at::Tensor& tensor, StreamId allocated_on, KeptReason kept) {
  const Record& record = ledger_.record(id);
  TapeInfo& tape = tapes_[record.tape.index];
  ContextState& context = *tape.context;
  Holdings& held = holdings(id);
  const c10::Storage& storage = tensor.storage();
  if (!mutated(Mutant::IdentityHoldsStorage)) held.identity.emplace(storage.getWeakStorageImpl());
  held.version = tensor.unsafeGetTensorImpl()->version_counter();
  const auto* const first = static_cast<const std::byte*>(record.identity.data) + record.span.begin;
  held.address_modulo = reinterpret_cast<uintptr_t>(first) % kAlignmentBytes;
  held.number = static_cast<uint32_t>(tape.record_count++);
  held.module = context.module;
  held.packed_on = backend_.current_stream();
  held.allocated_on = allocated_on;
  held.bytes = {storage, 0, held.packed_on, {}};
  // See Note [Streams that may be destroyed].
  if (streams_.is_lasting(held.packed_on) && !mutated(Mutant::NoteUseAtPack))
    backend_.note_use(*storage.unsafeGetStorageImpl(), held.packed_on);
  if (kept == KeptReason::TierFull) {
    ledger_.keep(id, kept);
    return note_kept(id, kept, record.nbytes());
  }
  if (kept != KeptReason::None) {
    keep_learned(id, kept);
  } else {
    held.charged_bytes = slots_.charge(context, record.nbytes());
  }
  const uint64_t sequence_number = at::sequence_number::peek();
  backend_.saw_pack(first, record.nbytes(), held.packed_on, sequence_number);
  ThreadState::current().pending.push_back({this, id, sequence_number, &context});
}

// See Note [Versions of inner tensors]. Where a wrapper alone says that the bytes are the same, the tensor that the
// record was made of must be unchanged, too.
bool Engine::was_written_through_a_wrapper(RecordId id) {
  const Holdings& held = holdings(id);
  const Record& record = ledger_.record(id);
  // A record whose copy was not enqueued yet stands for whatever the storage holds.
  if (record.state == RecordState::Resident || mutated(Mutant::IdentityChecksWrapper)) return false;
  return held.wrappers.changed() ||
         (!held.wrappers.empty() && held.version.current_version() != record.identity.version);
}

bool Engine::is_pending(RecordId id) {
  if (!ledger_.is_live(id)) return false;
  const Record& record = ledger_.record(id);
  return record.state == RecordState::Resident && record.kept == KeptReason::None && record.live_handles > 0;
}

// ---- kept and moved ----

void Engine::keep(RecordId id, KeptReason reason) {
  Holdings& held = holdings(id);
  const Record& record = ledger_.record(id);
  if (record.has_slot) release_slot(held);
  slots_.uncharge(context(id), std::exchange(held.charged_bytes, 0));
  note_kept(id, reason, record.nbytes());
  ledger_.keep(id, reason);
}

void Engine::note_kept(RecordId id, KeptReason reason, uint64_t nbytes) {
  count_kept(row(ledger_.record(id).tape), context(id).row_of(holdings(id).module), reason, nbytes);
}

void Engine::note_offloaded(RecordId id) {
  const uint64_t nbytes = ledger_.record(id).nbytes();
  TapeRow& row = this->row(ledger_.record(id).tape);
  count(row, &TapeRow::records_offloaded, 1);
  count(row, &TapeRow::bytes_offloaded, nbytes);
  ModuleRow* const module = context(id).row_of(holdings(id).module);
  if (module == nullptr) return;
  ++module->records_offloaded;
  module->bytes_offloaded += nbytes;
}

// ---- slots ----

// May block; the record may be gone, or used, after it.
std::optional<Slot> Engine::acquire_slot(RecordId id, std::vector<Point>& guards) {
  const uint64_t nbytes = ledger_.record(id).nbytes();
  std::optional<Slot> slot = slots_.try_acquire(nbytes, guards);
  while (!slot) {
    try {
      slots_.grow(nbytes);
    } catch (const StoreFull& full) {
      if (!is_pending(id)) return std::nullopt;
      const std::shared_ptr<ContextState> context = tapes_[ledger_.record(id).tape.index].context;
      keep(id, KeptReason::TierFull);
      const bool is_disk = context->options.tier == Tier::Disk;
      SlotBudget::refuse(*context, full.what(),
                         is_disk ? "set disk_dir to a directory with room" : "lower budget_bytes");
      return std::nullopt;
    }
    backend_.saw_growth();
    if (!is_pending(id)) return std::nullopt;
    slot = slots_.try_acquire(nbytes, guards);
  }
  return slot;
}

void Engine::release_slot(Holdings& held) {
  std::vector<Point> guards;
  if (!held.offload_end.is_beginning() && !mutated(Mutant::SlotGuardedByOffload)) guards.push_back(held.offload_end);
  if (!held.reload_end.is_beginning() && !mutated(Mutant::SlotGuardedByReload)) guards.push_back(held.reload_end);
  guards.insert(guards.end(), held.other_reload_ends.begin(), held.other_reload_ends.end());
  if (!held.is_slot_lost) slots_.release(held.slot, guards);
  Statistics::global().slot_released(held.slot.nbytes());
  held.slot = {};
}

// ---- windows ----

void Engine::enter_offload_window(RecordId id) {
  windows_.offload_began(id, ledger_.record(id).nbytes(), [this](RecordId known) { return is_offloading(known); });
}

void Engine::leave_offload_window(RecordId id) { windows_.offload_left(ledger_.record(id).nbytes()); }

void Engine::leave_reload_window(RecordId id) { windows_.reload_left(id, ledger_.record(id).nbytes()); }

void Engine::leave_windows(RecordId id) {
  const Record& record = ledger_.record(id);
  if (record.state == RecordState::Offloading) leave_offload_window(id);
  if (record.prefetched) leave_reload_window(id);
}

// The window may have room by now: what was kept has died, or was asked for.
void Engine::go_on_reloading() {
  const auto [engine, tape, graph_task] = ThreadState::current().asked;
  if (engine == nullptr || graph_task != torch::autograd::get_current_graph_task_id()) return;
  if (engine->is_inherited() || !engine->ledger_.has_tape(tape)) return;
  engine->reap();
  if (engine->ledger_.has_tape(tape)) engine->prefetch(tape);
}

// Reloads ahead of the consumer, once per unpack in backward.
void Engine::prefetch(TapeId tape) {
  if (backend_.is_capturing()) return;
  const TapeInfo& info = tapes_[tape.index];
  const uint64_t kept_bytes = windows_.kept_bytes(tape);
  const bool goes_on = info.context->options.learn && order_.is_latest(info.order_number);
  if (reload_ahead(tape, kept_bytes, AtSource::GoesOn) && goes_on) prefetch_coming(kept_bytes);
}

// R11: what was reloaded ahead and then passed by goes back to its slot.
void Engine::let_pass(TapeId tape, uint64_t place) {
  if (windows_.ahead().empty() || mutated(Mutant::PassedByReturnsToOffloaded)) return;
  for (const RecordId id : windows_.passed_by(tape, place, TapeRecords(ledger_, tape))) pass_by(id);
}

// Returns whether all of the tape was looked at.
bool Engine::reload_ahead(TapeId id, uint64_t kept_bytes, AtSource at_source) {
  if (windows_.reload_place(id) == ledger_.tape(id).first_save) return true;
  auto wanted = windows_.take_reloads(id, kept_bytes, at_source, TapeRecords(ledger_, id));
  std::erase_if(wanted, [&](const Windows::Ahead& ahead) { return lock_given_up(ahead.record).has_value(); });
  start_reloads(wanted, Reload::Ahead);
  return ledger_.has_tape(id) && windows_.reload_place(id) == ledger_.tape(id).first_save;
}

void Engine::begin_reload(const Windows::Ahead& started, Reload why) {
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
  TapeRow& row = this->row(ledger_.record(id).tape);
  count(row, &TapeRow::records_reloaded, 1);
  count(row, &TapeRow::bytes_reloaded, nbytes);
}

// The consumer's stream has waited for the reload.
void Engine::finish_reload(RecordId id) {
  const std::string failure = backend_.failure(holdings(id).reload_end);
  const bool was_ahead = ledger_.record(id).prefetched;
  if (was_ahead) leave_reload_window(id);
  if (failure.empty() || mutated(Mutant::FailedReadRaises)) {
    ledger_.finish_reload(id);
    return;
  }
  ledger_.pass_by(id);
  Operation::drop_later(std::move(std::exchange(holdings(id).bytes, {}).storage));
  // What failed ahead of its consumer, in a backward that may have ended long ago, is read again first.
  TORCH_CHECK(was_ahead, "torchoffload: a saved tensor could not be read back: ", failure);
}

}  // namespace torchoffload
