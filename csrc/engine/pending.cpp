// Pending copies: which copies out of a thread are enqueued at a hook event, and which ones wait.
//
// Note [Copies that wait for room]
// Where slots go on to a disk, a slot may have to wait until the disk has written others. A host that waits for it
// launches nothing meanwhile, and once the device has done what it was given it stands still. So a copy whose slot
// would have to wait stays pending, and its source stays on the device:
// - Its bytes count in the offload window, beside those in flight, which are waited for where both have no room.
// - Each later flush of the thread tries again, the oldest copy first. Where one has to wait, the later ones of its
//   engine wait behind it, so that they do not take the room that it waits for.
// - Where the window has no room for one more, or kMostWaiting wait already, the oldest one is enqueued, and the host
//   waits for its slot. So is each copy of a context that is being left.
// - A copy that waited begins once the operators that were enqueued as its wait began have ended. It does not wait for
//   those that the host has enqueued since. If one of these saves the storage once more, it may fill it, and counts.
// - While the times of a step are taken none waits, since the times say when a copy could have begun.
// - Only copies of contexts that the thread has entered wait, since their exit is sure to come on this thread. And only
//   those whose streams last: whether a stream that may be destroyed is current is known at this flush alone.
// - The record stays Resident, as one does between its save and the next hook event: a backward uses the source, and a
//   release drops it. But operators after the one that saved it run meanwhile, also on other streams, and may write to
//   the storage. So from here on a save joins the record only at its own version, as if its copy were enqueued. And a
//   copy is not enqueued inside of an operator that saves the same storage once more, in whichever record (R1).
#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "engine/engine.h"

namespace torchoffload {

namespace {

constexpr size_t kMostWaiting = 32;  // of one thread, since each flush looks at all of them

bool is_entered(const ThreadState& thread, const ContextState* context) {
  return std::ranges::any_of(thread.entered, [&](const auto& entered) { return entered.get() == context; });
}

}  // namespace

struct Engine::Flush {
  enum class Turn : uint8_t { Goes, Waits, OldestGoes };

  ThreadState& thread;
  const ContextState* const leaving;
  const bool is_inside;  // an operator
  const uint64_t sequence_number = program::sequence_number();
  FlushOrder order = {};
  const Engine* ordered_engine = nullptr;
  std::vector<const Engine*> without_room = {};  // their later copies wait behind an older one

  void run();
  bool is_possible(const PendingCopy& copy) const;
  // What becomes of the copy at this place, which can be enqueued.
  Turn turn_of(size_t place);
  bool can_wait(const PendingCopy& copy) const;
  // How many of the copies before this place wait for room.
  size_t waiting_before(size_t place) const;
  // The first copy of the engine at `last` that waits for room and can be enqueued, up to that place.
  std::optional<size_t> oldest_waiting(size_t last) const;
  // Both may block.
  void begin_wait(PendingCopy& copy);
  void enqueue(size_t place);
};

void Engine::flush_pending(const ContextState* leaving) {
  ThreadState& thread = ThreadState::current();
  if (thread.pending.empty()) return;
  // R1: below autograd this thread is inside an operator, even if the sequence number has moved on: the Python code of
  // a dispatch mode or a subclass may run autograd functions and contexts of its own there.
  const bool is_inside = program::is_inside_operator() && !mutated(Mutant::CopyNotInsideItsOperator);
  if (is_inside && !thread.packs_made) return;
  if (leaving != nullptr) thread.pending.back().engine->backend_.observer.saw_operators_end();
  Flush{thread, leaving, is_inside}.run();
}

// What is called here may run Python code, with flushes of its own. After these nothing is known of places.
void Engine::Flush::run() {
  uint64_t flush_count = ++thread.flush_count;
  for (size_t next = 0; next < thread.pending.size();) {
    PendingCopy& copy = thread.pending[next];
    if (!is_possible(copy) && !mutated(Mutant::CopyNotInsideItsOperator)) {
      ++next;
      continue;
    }
    const Turn turn = turn_of(next);
    if (turn == Turn::Waits) {
      ++next;
      begin_wait(copy);
    } else {
      const size_t chosen = turn == Turn::OldestGoes ? oldest_waiting(next).value_or(next) : next;
      if (chosen < next) --next;
      enqueue(chosen);
    }
    if (std::exchange(flush_count, thread.flush_count) != thread.flush_count) next = 0;
  }
  if (thread.has_waiting) thread.has_waiting = std::ranges::any_of(thread.pending, is_waiting);
}

bool Engine::Flush::is_possible(const PendingCopy& copy) const {
  // R1: the operator that saved this tensor may not have filled it yet.
  const bool has_ended = copy.sequence_number == kOperatorEnded ||
                         (!is_inside && (copy.sequence_number != sequence_number || copy.context == leaving));
  return has_ended && !copy.engine->backend_.streams.is_capturing();
}

Engine::Flush::Turn Engine::Flush::turn_of(size_t place) {
  const PendingCopy& copy = thread.pending[place];
  Engine& engine = *copy.engine;
  if (engine.is_inherited() || !engine.ledger_.is_live(copy.record)) return Turn::Goes;
  const bool may_wait = can_wait(copy);
  if (!may_wait && engine.windows_.waiting_bytes() == 0) return Turn::Goes;
  const Record& record = engine.ledger_.record(copy.record);
  const bool is_new = may_wait && !record.awaits_room;
  const bool fits = engine.windows_.may_wait(record.tape, is_new ? engine.pinned_bytes(copy.record) : 0);
  if (!fits || (is_new && waiting_before(place) >= kMostWaiting)) return Turn::OldestGoes;
  if (!may_wait) return Turn::Goes;
  if (std::ranges::find(without_room, &engine) != without_room.end()) return Turn::Waits;
  if (!engine.slots_.waits_for_room(engine.held(copy.record).slot_bytes)) return Turn::Goes;
  without_room.push_back(&engine);
  return Turn::Waits;
}

bool Engine::Flush::can_wait(const PendingCopy& copy) const {
  Engine& engine = *copy.engine;
  const auto lasts = [&](StreamId stream) { return stream == kNoStream || engine.streams_.is_lasting(stream); };
  return engine.slots_.moves_slots() && copy.context != leaving && is_entered(thread, copy.context) &&
         engine.is_pending(copy.record) && lasts(engine.held(copy.record).bytes.stream) &&
         lasts(engine.held(copy.record).allocated_on) && !engine.timeline_.is_on();
}

size_t Engine::Flush::waiting_before(size_t place) const {
  const auto end = thread.pending.begin() + static_cast<ptrdiff_t>(place);
  return static_cast<size_t>(std::count_if(thread.pending.begin(), end, is_waiting));
}

std::optional<size_t> Engine::Flush::oldest_waiting(size_t last) const {
  const Engine* const engine = thread.pending[last].engine;
  for (size_t place = 0; place <= last; ++place) {
    const PendingCopy& copy = thread.pending[place];
    if (copy.engine == engine && is_waiting(copy) && is_possible(copy)) return place;
  }
  return std::nullopt;
}

void Engine::Flush::begin_wait(PendingCopy& copy) {
  thread.has_waiting = true;
  copy.sequence_number = kOperatorEnded;
  Engine& engine = *copy.engine;
  const RecordId id = copy.record;
  if (copy.filled.is_beginning()) {
    const StreamId stream = engine.held(id).bytes.stream;
    engine.streams_.without_gil(stream, [&] { copy.filled = engine.backend_.streams.record(stream); });
  }
  if (is_waiting(copy) || !engine.is_pending(id)) return;  // another thread may have released it meanwhile
  engine.ledger_.await_room(id);
  engine.windows_.wait_began(engine.pinned_bytes(id));
  engine.drain_window_of(id);
  Statistics::global().saw_offload_window(engine.windows_.offload_bytes());
}

void Engine::Flush::enqueue(size_t place) {
  const PendingCopy copy = thread.pending[place];
  if (place == 0)
    thread.pending.pop_front();
  else
    thread.pending.erase(thread.pending.begin() + static_cast<ptrdiff_t>(place));
  if (std::exchange(ordered_engine, copy.engine) != copy.engine) order = {};
  copy.engine->enqueue_offload(copy, order);
}

bool Engine::is_waiting(const PendingCopy& copy) {
  Ledger& ledger = copy.engine->ledger_;
  return ledger.is_live(copy.record) && ledger.record(copy.record).awaits_room;
}

// Copies that wait are older than those of the present operator, of which there may be many.
void Engine::put_off_waiting(const void* storage) {
  ThreadState& thread = ThreadState::current();
  const uint64_t now = thread.sequence_number();
  for (PendingCopy& copy : thread.pending) {
    if (!is_waiting(copy)) {
      if (copy.sequence_number == now && now != kOperatorEnded) return;
    } else if (copy.engine->ledger_.record(copy.record).identity.storage == storage) {
      copy.sequence_number = now;
      copy.filled = {};
    }
  }
}

bool Engine::is_pending(RecordId id) {
  if (!ledger_.is_live(id)) return false;
  const Record& record = ledger_.record(id);
  return record.state == RecordState::Resident && !record.is_kept() && record.live_handles > 0;
}

void Engine::stop_waiting(RecordId id) {
  if (ledger_.stop_awaiting_room(id)) windows_.wait_ended(pinned_bytes(id));
}

}  // namespace torchoffload
