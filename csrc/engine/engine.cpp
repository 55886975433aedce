// The engine's tapes, from their opening to their end, and the times of their copies and backwards.
#include "engine/engine.h"

#include <utility>

namespace torchoffload {

// ---- tapes ----

void Engine::settle() {
  if (!records_.backend.memory.must_settle()) return;
  const BlockingSection blocking;
  records_.backend.memory.settle();
}

void Engine::fit_store(ContextState& context) {
  if (is_inherited() || Statistics::global().live_tapes > Statistics::global().tapes_left_behind) return;
  records_.slots.fit_to_steps(context);
}

void Engine::release_idle() {
  if (is_inherited() || records_.ledger.live_tapes() > 0) return;
  records_.streams.free_deferred();
}

TapeId Engine::open_tape(std::shared_ptr<ContextState> context) {
  reloader_.release_reloads_of_ended();
  learn_times();
  records_.slots.tell_trouble(*context);
  const TapeId tape = records_.ledger.open_tape();
  records_.held_tapes.grow_to(tape.index + size_t{1});
  HeldTape& info = records_.held(tape);
  info = {};
  info.id = tape;
  info.context = std::move(context);
  info.number = ++records_.tapes_opened;
  records_.times.opened(info.number);
  const ContextOptions& options = info.context->options;
  info.windows.set_limits(records_.lessons.opened(info.lessons, tape, options.windows, options.learn));
  records_.count_left_behind();
  ++Statistics::global().live_tapes;
  return tape;
}

void Engine::close_tape(TapeId id) {
  if (!records_.ledger.is_open(id)) return;
  HeldTape& info = records_.held(id);
  if (info.context->options.fraction < 1) info.context->eligible_bytes[this] = info.eligible_bytes;
  const uint64_t number = info.number;
  tell_closed(id);
  for (const Save& save : records_.ledger.tape(id).saves) {
    if (!records_.ledger.is_live(save.record)) continue;
    records_.held(save.record).identity = {};
    records_.held(save.record).wrappers.clear();
  }
  info.fetch_place = records_.ledger.tape(id).end_save();
  info.windows.close(info.fetch_place);
  if (records_.ledger.close_tape(id).gone) records_.tape_is_gone(id);
  if (!is_inherited()) records_.timeline.note_close(number);  // may block
}

// Storages are looked at through weak references. A strong one could become the last one while another thread drops its
// own, and the storage would be freed here, in the middle of this loop over the ledger.
void Engine::tell_closed(TapeId id) {
  HeldTape& info = records_.held(id);
  const bool learns = info.context->options.learn;
  const Tape& tape = records_.ledger.tape(id);
  std::vector<uint64_t> last_save(learns ? info.record_count : 0, 0);
  uint64_t next_number = 0;  // records are numbered in the order of their first saves
  for (uint64_t number = tape.first_save; number < tape.end_save(); ++number) {
    const RecordId record_id = tape.save(number).record;
    if (!records_.ledger.is_live(record_id)) continue;
    const HeldRecord& held = records_.held(record_id);
    if (learns) last_save[held.number] = number;
    if (held.number < next_number) continue;
    next_number = held.number + uint64_t{1};
    const Record& record = records_.ledger.record(record_id);
    if (!held.identity || record.is_kept()) continue;
    const size_t owners = held.identity.share_count();
    const bool is_last_of_storage = record.next_same_storage == UINT32_MAX;
    if (owners == 0 && is_last_of_storage) count(info.row, &TapeRow::bytes_away, record.identity.nbytes);
    // Autograd's graph holds handles and no storage. The engine itself holds the storage while the source is still
    // here.
    const bool is_held = record.state == RecordState::Resident || record.state == RecordState::Offloading;
    if (learns && owners > (is_held ? 1U : 0U)) records_.lessons.outlived(held.identity);
  }
  records_.lessons.closed(info.lessons, std::move(last_save));
}

void Engine::forget_learned_steps() {
  records_.lessons.clear();
  records_.count_left_behind();
}

void Engine::append_live_rows(std::vector<TapeRow>& rows) const {
  for (const HeldTape& tape : records_.held_tapes) {
    if (tape.context) rows.push_back(tape.row);
  }
}

void Engine::change_windows(TapeId tape, WindowBytes windows, Part part) {
  if (is_inherited() || !records_.ledger.is_open(tape)) return;
  TapeWindows& known = records_.held(tape).windows;
  if (part == Part::Begins) {
    known.begin_part(records_.ledger.tape(tape).end_save(), windows);
  } else {
    known.set_limits(windows);
  }
  if (records_.backend.streams.is_capturing()) return;
  flush_pending();  // a copy that has not begun counts in no window, and fewer may wait for room now
  offloader_.drain_window(windows.offload_bytes, records_.held(tape).windows.kept_bytes());
}

void Engine::drain_offloads(uint64_t most_bytes) {
  if (is_inherited() || records_.backend.streams.is_capturing()) return;
  flush_pending();
  offloader_.drain_window(most_bytes, 0);
}

// ---- saves ----

void Engine::release(const RecordHandle& handle) {
  if (!is_inherited()) {
    try {
      offloader_.free_deferred();
    } catch (const std::exception&) {  // that concerned other records; this one is released all the same
    }
  }
  records_.release(handle);
}

// ---- times ----

void Engine::learn_times() {
  if (is_inherited()) return;
  while (const auto taken = records_.times.take()) records_.lessons.learn_times(taken->shape, taken->times);
}

}  // namespace torchoffload
