// Pending copies: which copies out of a thread are enqueued at a hook event, and which ones wait.
//
// Note [Copies that wait for room]
// If slots go on to a disk, a slot may have to wait until the disk has written others. A host that waits for it
// launches nothing meanwhile, and the device stands still once it has done its work. So a copy whose slot would have to
// wait stays pending, and its source stays on the device:
// - Its bytes count in the offload window, beside those in flight. If both do not fit, the host waits for those in
//   flight.
// - Each later flush of the thread tries again, the oldest copy first. If one has to wait, the later ones of its engine
//   wait behind it, so that they do not take the room that it waits for.
// - If the window has no room for one more, or kMostWaiting wait already, the oldest one is enqueued, and the host
//   waits for its slot. Each copy of a context that is being left is enqueued in the same way. The window is shared by
//   all threads, and so the oldest one may be of another thread: otherwise a thread that idles inside of its context
//   would keep the window from the others.
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

// A flush of the calling thread's copies. After code of others has run, nothing is known any more of places in
// `pending`, nor of the waits that the streams have made.
struct Engine::Flush {
  enum class Outcome : uint8_t { Goes, Waits, OldestOfThreadGoes, OldestGoes };

  ThreadState& thread;
  const ContextState* const leaving;
  const bool is_inside;  // an operator
  FlushOrder order = {};
  const Engine* ordered_engine = nullptr;
  std::vector<const Engine*> without_room = {};  // their later copies wait behind an older one

  void run() REQUIRES(gil);
  // Looks after the copies of the engine that have ended, and drops the memory that was given up. Returns whether all
  // has to be looked at again. May block.
  bool drop_finished(Engine& engine) REQUIRES(gil);
  bool is_possible(const PendingCopy& copy) const;
  // The outcome for the copy at this place, which can be enqueued.
  Outcome outcome_of(size_t place) REQUIRES(gil);
  bool can_wait(const PendingCopy& copy) const REQUIRES(gil);
  // How many of the copies before this place wait for room.
  size_t waiting_before(size_t place) const REQUIRES(gil);
  // The first copy of the engine at `last` that waits for room and can be enqueued, up to that place.
  std::optional<size_t> oldest_waiting(size_t last) const REQUIRES(gil);
  // Enqueues the engine's copy that has waited longest, if another thread has packed that one. Returns whether it did
  // so. May block.
  bool enqueue_of_another_thread(Engine& engine) REQUIRES(gil);
  // Both may block.
  void begin_wait(size_t place) REQUIRES(gil);
  void enqueue(ThreadState& owner, size_t place) REQUIRES(gil);
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

// Each copy's turn begins with nothing held. Memory that earlier copies gave up is dropped before the host may wait for
// a slot, and copies that were taken from `pending` meanwhile are noticed.
void Engine::Flush::run() {
  uint64_t taken_count = thread.taken_count;
  const auto is_changed = [&] { return std::exchange(taken_count, thread.taken_count) != thread.taken_count; };
  for (size_t next = 0; next < thread.pending.size();) {
    if (!is_possible(thread.pending[next]) && !mutated(Mutant::CopyNotInsideItsOperator)) {
      ++next;
      continue;
    }
    if (drop_finished(*thread.pending[next].engine) || is_changed()) {
      next = 0;
      order = {};
      continue;
    }
    const Outcome outcome = outcome_of(next);
    if (outcome == Outcome::Waits) {
      begin_wait(next++);
    } else if (outcome != Outcome::OldestGoes || !enqueue_of_another_thread(*thread.pending[next].engine)) {
      const size_t chosen = outcome == Outcome::Goes ? next : oldest_waiting(next).value_or(next);
      if (chosen < next) --next;
      enqueue(thread, chosen);
    }
    if (is_changed()) next = 0;
  }
  if (thread.has_waiting) thread.set_has_waiting(std::ranges::any_of(thread.pending, is_waiting));
}

bool Engine::Flush::drop_finished(Engine& engine) {
  if (!engine.is_inherited()) engine.reap();
  return Operation::drop_now();
}

bool Engine::Flush::is_possible(const PendingCopy& copy) const {
  // R1: the operator that saved this tensor may not have filled it yet.
  const bool is_of_another = copy.sequence_number != program::sequence_number() || copy.context == leaving;
  const bool has_ended = copy.sequence_number == kOperatorEnded ||
                         (!is_inside && is_of_another && copy.sequence_number != kOperatorUnderWay);
  return has_ended && !copy.engine->backend_.streams.is_capturing();
}

Engine::Flush::Outcome Engine::Flush::outcome_of(size_t place) {
  const PendingCopy& copy = thread.pending[place];
  Engine& engine = *copy.engine;
  if (engine.is_inherited() || !engine.ledger_.is_live(copy.record)) return Outcome::Goes;
  const bool may_wait = can_wait(copy);
  if (!may_wait && engine.windows_.waiting_bytes() == 0) return Outcome::Goes;
  const Record& record = engine.ledger_.record(copy.record);
  const bool is_new = may_wait && !record.awaits_room;
  const uint64_t new_bytes = is_new ? engine.pinned_bytes(copy.record) : 0;
  if (!engine.windows_.may_wait(record.tape, new_bytes)) return Outcome::OldestGoes;
  if (is_new && waiting_before(place) >= kMostWaiting) return Outcome::OldestOfThreadGoes;
  if (!may_wait) return Outcome::Goes;
  if (std::ranges::find(without_room, &engine) != without_room.end()) return Outcome::Waits;
  if (!engine.slots_.waits_for_room(engine.held(copy.record).slot_bytes)) return Outcome::Goes;
  without_room.push_back(&engine);
  return Outcome::Waits;
}

bool Engine::Flush::can_wait(const PendingCopy& copy) const {
  Engine& engine = *copy.engine;
  const auto lasts = [&](StreamId stream)
                         REQUIRES(gil) { return stream == kNoStream || engine.streams_.is_lasting(stream); };
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

// A copy that waits begins behind all that filled its source by the beginning of the wait, whichever thread enqueues
// it. These copies are left to their own thread: one whose storage an operator saves again (R1); one whose failure its
// own program must hear of (on_full="error"); and one whose source's stream must not be made to wait, since it is
// captured.
bool Engine::Flush::enqueue_of_another_thread(Engine& engine) {
  const auto can_be_taken = [&](const PendingCopy& copy) REQUIRES(gil) {
    return copy.engine == &engine && is_waiting(copy) && copy.sequence_number == kOperatorEnded &&
           engine.context(copy.record).options.on_full != OnFull::Error &&
           !engine.backend_.streams.is_capturing_on(engine.held(copy.record).bytes.stream);
  };
  ThreadState* owner = nullptr;
  size_t place = 0;
  uint64_t oldest = UINT64_MAX;
  for (ThreadState* const known : ThreadState::with_waiting()) {
    const auto first = std::ranges::find_if(known->pending, can_be_taken);
    if (first == known->pending.end() || first->wait_number >= oldest) continue;
    owner = known;
    place = static_cast<size_t>(first - known->pending.begin());
    oldest = first->wait_number;
  }
  if (owner == nullptr || owner == &thread || mutated(Mutant::IdleThreadsMakeRoom)) return false;
  ++owner->taken_count;
  enqueue(*owner, place);
  return true;
}

void Engine::Flush::begin_wait(size_t place) {
  PendingCopy copy = thread.pending[place];
  Engine& engine = *copy.engine;
  const RecordId id = copy.record;
  if (copy.filled.is_beginning()) {
    const StreamId stream = engine.held(id).bytes.stream;
    engine.streams_.without_gil(stream, [&] { copy.filled = engine.backend_.streams.record(stream); });
  }
  // Other threads take only copies that wait already. This copy may be one of those, so it may be gone from its place.
  const auto known = std::ranges::find_if(thread.pending, [&](const PendingCopy& other) {
    return other.engine == copy.engine && other.record == copy.record;
  });
  if (known == thread.pending.end()) return;
  known->sequence_number = kOperatorEnded;
  known->filled = copy.filled;
  if (is_waiting(copy) || !engine.is_pending(id)) return;  // another thread may have released it meanwhile
  static uint64_t waits_begun = 0;
  known->wait_number = ++waits_begun;
  thread.set_has_waiting(true);
  engine.ledger_.await_room(id);
  engine.windows_.wait_began(engine.pinned_bytes(id));
  engine.drain_window_of(id);
  Statistics::global().saw_offload_window(engine.windows_.offload_bytes());
}

void Engine::Flush::enqueue(ThreadState& owner, size_t place) {
  const PendingCopy copy = owner.pending[place];
  if (place == 0)
    owner.pending.pop_front();
  else
    owner.pending.erase(owner.pending.begin() + static_cast<ptrdiff_t>(place));
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
