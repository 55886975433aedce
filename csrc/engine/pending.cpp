// Pending copies: which copies out of a thread are enqueued at a hook event, and which ones wait.
//
// A thread has three lists of them (ThreadState): those whose operators have not ended, those whose turn has come, and
// those that wait for room.
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
#include <utility>
#include <vector>

#include "engine/offloader.h"

namespace torchoffload {

namespace {

constexpr size_t kMostWaiting = 32;  // of one thread, since each flush looks at all of them

bool is_entered(const ThreadState& thread, const ContextState* context) {
  return std::ranges::any_of(thread.entered, [&](const auto& entered) { return entered.get() == context; });
}

}  // namespace

// A flush of the calling thread's copies: those that wait for room come first, then those whose operators have ended.
// Code of others may run at the begin of each copy's turn, and the thread's lists change then. So nothing is kept from
// one turn to the next but the number of a wait, and the order that the streams are known to have.
struct Offloader::Flush {
  enum class Outcome : uint8_t { Goes, Waits, OldestOfThreadGoes, OldestGoes };

  ThreadState& thread;
  const ContextState* const leaving;
  const bool is_inside;  // an operator
  FlushOrder order = {};
  const Offloader* ordered = nullptr;               // the one that `order` holds for
  std::vector<const Offloader*> without_room = {};  // their later copies wait behind an older one

  // All of these may block.
  void run() REQUIRES(gil);
  void flush_waiting() REQUIRES(gil);
  void flush_ready() REQUIRES(gil);

  // The copies whose operators have ended become ready.
  void collect_ready() REQUIRES(gil);
  // Has the operator that saved this tensor ended? Before that it may not have filled it (R1).
  bool has_ended(const PendingCopy& copy) const;
  // Looks after the copies of the engine that have ended, and drops the memory that was put off. Returns whether code
  // of others has run. May block.
  bool drop_finished(Offloader& its) REQUIRES(gil);
  // The outcome for a copy whose operator has ended.
  Outcome outcome_of(const PendingCopy& copy) REQUIRES(gil);
  bool can_wait(const PendingCopy& copy) const REQUIRES(gil);
  size_t waiting_count() const REQUIRES(gil);
  // The copy at the front of `ready` waits for room from now on. May block.
  void begin_wait() REQUIRES(gil);
  // The copy of this number waits on. May block.
  void go_on_waiting(uint64_t number) REQUIRES(gil);
  // Enqueues the engine's copy that has waited longest: of all threads if the outcome is OldestGoes, else of this one.
  // Those of this thread count up to the number `last`. Returns whether there is one. May block.
  bool enqueue_oldest(Offloader& its, Outcome outcome, uint64_t last) REQUIRES(gil);
  // Does the same if another thread has packed that copy. May block.
  bool enqueue_of_another_thread(Offloader& its) REQUIRES(gil);
  // Enqueue a copy of this thread: one of `waiting`, or one that was taken from its list. Both may block.
  void enqueue_waiting(uint64_t number) REQUIRES(gil);
  void enqueue(const PendingCopy& copy, Point filled) REQUIRES(gil);
};

void Offloader::flush_pending(const ContextState* leaving) {
  ThreadState& thread = ThreadState::current();
  if (!thread.has_copies()) return;
  // R1: below autograd this thread is inside an operator, even if the sequence number has moved on: the Python code of
  // a dispatch mode or a subclass may run autograd functions and contexts of its own there.
  const bool is_inside = program::is_inside_operator() && !mutated(Mutant::CopyNotInsideItsOperator);
  if (is_inside && !thread.packs_made) return;
  if (leaving != nullptr) thread.latest_copy().offloader->backend_.observer.saw_operators_end();
  Flush{thread, leaving, is_inside}.run();
}

void Offloader::Flush::run() {
  if (!thread.waiting.empty()) flush_waiting();
  collect_ready();
  flush_ready();
}

// Other threads, and code of others on this one, may take copies out of `waiting` meanwhile. None comes in below the
// number that was looked at last.
void Offloader::Flush::flush_waiting() {
  for (uint64_t last = 0;;) {
    const auto next = thread.waiting.upper_bound(last);
    if (next == thread.waiting.end()) return;
    const uint64_t number = next->first;
    Offloader& its = *next->second.copy.offloader;
    if (!has_ended(next->second.copy) || its.backend_.streams.is_capturing()) {
      last = number;
      continue;
    }
    if (drop_finished(its)) continue;
    const auto present = thread.waiting.find(number);
    if (present == thread.waiting.end()) continue;
    const Outcome outcome = outcome_of(present->second.copy);
    if (outcome == Outcome::Waits) {
      last = number;
      go_on_waiting(number);
    } else if (outcome == Outcome::Goes || !enqueue_oldest(its, outcome, number)) {
      last = number;
      enqueue_waiting(number);
    }
  }
}

void Offloader::Flush::flush_ready() {
  while (!thread.ready.empty()) {
    const PendingCopy copy = thread.ready.front();
    Offloader& its = *copy.offloader;
    if (its.backend_.streams.is_capturing()) {  // its turn comes in a later flush
      thread.pending.push_back(copy);
      thread.pending.back().sequence_number = kOperatorEnded;
      thread.ready.pop_front();
      continue;
    }
    if (drop_finished(its)) {
      collect_ready();
      continue;
    }
    const Outcome outcome = outcome_of(copy);
    if (outcome == Outcome::Waits) {
      begin_wait();
    } else if (outcome == Outcome::Goes || !enqueue_oldest(its, outcome, UINT64_MAX)) {
      thread.ready.pop_front();
      enqueue(copy, {});
    }
  }
}

void Offloader::Flush::collect_ready() {
  auto rest = thread.pending.begin();
  for (const PendingCopy& copy : thread.pending) {
    if (has_ended(copy)) {
      thread.ready.push_back(copy);
    } else {
      *rest++ = copy;
    }
  }
  thread.pending.erase(rest, thread.pending.end());
}

bool Offloader::Flush::has_ended(const PendingCopy& copy) const {
  if (copy.sequence_number == kOperatorEnded || mutated(Mutant::CopyNotInsideItsOperator)) return true;
  if (is_inside || copy.sequence_number == kOperatorUnderWay) return false;
  return copy.sequence_number != program::sequence_number() || copy.context == leaving;
}

bool Offloader::Flush::drop_finished(Offloader& its) {
  if (!its.records_.is_inherited()) its.free_deferred();
  if (!Operation::drop_now()) return false;
  order = {};
  return true;
}

Offloader::Flush::Outcome Offloader::Flush::outcome_of(const PendingCopy& copy) {
  Offloader& its = *copy.offloader;
  if (its.records_.is_inherited() || !its.ledger_.is_live(copy.record)) return Outcome::Goes;
  const bool may_wait = can_wait(copy);
  if (!may_wait && its.windows_.waiting_bytes() == 0) return Outcome::Goes;
  const Record& record = its.ledger_.record(copy.record);
  const bool is_new = may_wait && !record.awaits_room;
  const uint64_t new_bytes = is_new ? its.records_.pinned_bytes(copy.record) : 0;
  if (!its.windows_.may_wait(its.held(record.tape).windows, new_bytes)) return Outcome::OldestGoes;
  if (is_new && waiting_count() >= kMostWaiting) return Outcome::OldestOfThreadGoes;
  if (!may_wait) return Outcome::Goes;
  if (std::ranges::find(without_room, &its) != without_room.end()) return Outcome::Waits;
  if (!its.slots_.grow_awaits_disk(record.nbytes())) return Outcome::Goes;
  without_room.push_back(&its);
  return Outcome::Waits;
}

bool Offloader::Flush::can_wait(const PendingCopy& copy) const {
  Offloader& its = *copy.offloader;
  const auto lasts = [&](StreamId stream)
                         REQUIRES(gil) { return stream == kNoStream || its.streams_.is_lasting(stream); };
  return its.slots_.moves_slots() && copy.context != leaving && is_entered(thread, copy.context) &&
         its.records_.is_pending(copy.record) && lasts(its.held(copy.record).bytes.stream) &&
         lasts(its.held(copy.record).allocated_on) && !its.timeline_.is_on();
}

size_t Offloader::Flush::waiting_count() const {
  return static_cast<size_t>(std::ranges::count_if(thread.waiting, is_waiting, &WaitingCopies::value_type::second));
}

bool Offloader::Flush::enqueue_oldest(Offloader& its, Outcome outcome, uint64_t last) {
  if (outcome == Outcome::OldestGoes && enqueue_of_another_thread(its)) return true;
  const auto can_go = [&](const WaitingCopy& waiting) REQUIRES(gil) {
    return waiting.copy.offloader == &its && is_waiting(waiting) && has_ended(waiting.copy);
  };
  const auto oldest = std::ranges::find_if(thread.waiting, can_go, &WaitingCopies::value_type::second);
  if (oldest == thread.waiting.end() || oldest->first > last) return false;
  enqueue_waiting(oldest->first);
  return true;
}

// A copy that waits begins behind all that filled its source by the beginning of the wait, whichever thread enqueues
// it. That may come behind the operators that this flush knows the copy's stream to have waited for. These copies are
// left to their own thread: one whose storage an operator saves again (R1); one whose failure its own program must hear
// of (on_full="error"); and one whose source's stream must not be made to wait, since it is captured.
bool Offloader::Flush::enqueue_of_another_thread(Offloader& its) {
  const auto can_be_taken = [&](const WaitingCopy& waiting) REQUIRES(gil) {
    const PendingCopy& copy = waiting.copy;
    return copy.offloader == &its && is_waiting(waiting) && copy.sequence_number == kOperatorEnded &&
           its.records_.context(copy.record).options.on_full != OnFull::Error &&
           !its.backend_.streams.is_capturing_on(its.held(copy.record).bytes.stream);
  };
  ThreadState* owner = nullptr;
  uint64_t oldest = UINT64_MAX;
  for (ThreadState* const known : ThreadState::with_waiting()) {
    const auto first = std::ranges::find_if(known->waiting, can_be_taken, &WaitingCopies::value_type::second);
    if (first == known->waiting.end() || first->first >= oldest) continue;
    owner = known;
    oldest = first->first;
  }
  if (owner == nullptr || owner == &thread || mutated(Mutant::IdleThreadsMakeRoom)) return false;
  const WaitingCopy waiting = owner->take_waiting(oldest);
  FlushOrder of_its_own;
  its.enqueue_offload(waiting.copy.record, waiting.filled, of_its_own);
  return true;
}

void Offloader::Flush::begin_wait() {
  const PendingCopy copy = thread.ready.front();
  Offloader& its = *copy.offloader;
  const RecordId id = copy.record;
  const Point filled = its.point_behind_source(id);
  if (!its.records_.is_pending(id))
    return thread.ready.pop_front();  // another thread has used or released it meanwhile
  thread.begin_waiting(copy, filled);
  thread.ready.pop_front();
  its.ledger_.await_room(id);
  its.windows_.wait_began(its.records_.pinned_bytes(id));
  its.drain_window_of(id);
  Statistics::global().saw_offload_window(its.windows_.offload_bytes());
}

// A later operator has saved the storage meanwhile, and may have filled it anew.
void Offloader::Flush::go_on_waiting(uint64_t number) {
  const WaitingCopy& waiting = thread.waiting.at(number);
  if (!waiting.filled.is_beginning()) return;
  const Point filled = waiting.copy.offloader->point_behind_source(waiting.copy.record);
  const auto present = thread.waiting.find(number);
  if (present == thread.waiting.end()) return;
  present->second.copy.sequence_number = kOperatorEnded;
  present->second.filled = filled;
}

void Offloader::Flush::enqueue_waiting(uint64_t number) {
  const WaitingCopy waiting = thread.take_waiting(number);
  enqueue(waiting.copy, waiting.filled);
}

void Offloader::Flush::enqueue(const PendingCopy& copy, Point filled) {
  if (std::exchange(ordered, copy.offloader) != copy.offloader) order = {};
  copy.offloader->enqueue_offload(copy.record, filled, order);
}

Point Offloader::point_behind_source(RecordId id) {
  const StreamId stream = held(id).bytes.stream;
  Point point;
  streams_.without_gil(stream, [&] { point = backend_.streams.record(stream); });
  return point;
}

bool Offloader::is_waiting(const WaitingCopy& waiting) {
  Ledger& ledger = waiting.copy.offloader->ledger_;
  return ledger.is_live(waiting.copy.record) && ledger.record(waiting.copy.record).awaits_room;
}

void Offloader::put_off_waiting(ThreadState& thread, const void* storage) {
  const uint64_t now = thread.sequence_number();
  for (auto& [number, waiting] : thread.waiting) {
    const PendingCopy& copy = waiting.copy;
    if (!is_waiting(waiting) || copy.offloader->ledger_.record(copy.record).identity.storage != storage) continue;
    waiting.copy.sequence_number = now;
    waiting.filled = {};
  }
}

}  // namespace torchoffload
