// ThreadState: everything that the core remembers for one thread. Python keeps PyTorch's stack of hooks beside it.
// Ownership:     one for each thread that runs. That of a thread that has ended goes to a later thread. None is freed,
//                since handles may die while static destructors run.
// Thread safety: needs the GIL. Used by its own thread alone, except `waiting`: another thread may take copies out of
//                it, while this one is not running or is in a BlockingSection. Others ask about it with the GIL held.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "core/mutant.h"
#include "core/types.h"
#include "device/memory.h"
#include "engine/program.h"
#include "system/gil.h"

namespace torchoffload {

class Offloader;
class Reloader;
struct ContextState;

// Stands for the sequence number of an operator that has returned; see PacksMade.
constexpr uint64_t kOperatorEnded = UINT64_MAX;
// Stands for the sequence number of an operator inside of which code of others runs; see OperatorUnderWay.
constexpr uint64_t kOperatorUnderWay = UINT64_MAX - 1;

// A record that the thread has packed and whose copy is not enqueued yet.
struct PendingCopy {
  Offloader* offloader;
  RecordId record;
  uint64_t sequence_number;     // autograd's sequence number at the pack, or one of the constants above
  const ContextState* context;  // compared, never dereferenced
};

// A pending copy whose record's store has no room for it. See Note [Copies that wait for room].
struct WaitingCopy {
  PendingCopy copy;  // its sequence number: kOperatorEnded, unless a later operator saves the same storage
  Point filled;      // behind all that has filled its source; the beginning: that has to be recorded anew
};
// By numbers that count the waits of all threads in the order in which they began.
using WaitingCopies = std::map<uint64_t, WaitingCopy>;

// In one flush, the stream whose operators a copy's stream was already made to wait for. The operators that filled the
// sources had been enqueued by then, so one point serves all copies of a flush.
struct FlushOrder {
  StreamId waiter = kNoStream;
  StreamId producer = kNoStream;
};

// The tape that a backward on the thread asked last.
struct AskedTape {
  Reloader* reloader = nullptr;
  TapeId tape;
  int graph_task = kNoGraphTask;
};

struct ThreadState {
  // How many operations are open, one inside the other, and the work of the outermost one at its end. See Operation.
  int operation_depth = 0;
  uint64_t operation_began = 0;  // the outermost one's number among those of the process, while it is open; else 0
  PutOffDrops dropped;
  std::vector<std::function<void()>> releases;

  std::vector<std::shared_ptr<ContextState>> entered;  // the contexts that the thread has entered, the innermost last

  // The pending copies. Each goes from one of these lists to the next, until it is enqueued.
  std::vector<PendingCopy> pending;  // their operators had not ended at the latest flush (R1)
  std::deque<PendingCopy> ready;     // their operators have ended, and their turn comes in the present flush
  WaitingCopies waiting;             // their turn has come, and their store had no room for them
  bool has_copies() const { return !pending.empty() || !ready.empty() || !waiting.empty(); }
  const PendingCopy& latest_copy() const {
    if (!pending.empty()) return pending.back();
    return ready.empty() ? waiting.rbegin()->second.copy : ready.back();
  }

  bool packs_made = false;  // see PacksMade

  // The operator inside of which the thread packs now.
  uint64_t sequence_number() const { return packs_made ? kOperatorEnded : program::sequence_number(); }
  AskedTape asked;

  // The threads that have copies in `waiting`, which these three functions alone change.
  static const std::vector<ThreadState*>& with_waiting() REQUIRES(gil);
  void begin_waiting(const PendingCopy& copy, Point filled) REQUIRES(gil);
  WaitingCopy take_waiting(uint64_t number) REQUIRES(gil);
  void forget_waiting_of(const Offloader& offloader) REQUIRES(gil);

  static ThreadState& current();

  // Has some thread an open operation that is the one of this number, or began before it?
  static bool any_has_operation_until(uint64_t number) REQUIRES(gil);
  // Has some thread that runs a pending copy of this engine, whose records were all released? Forgets those that
  // threads left behind.
  static bool any_has_pending(const Offloader& offloader) REQUIRES(gil);
  // The tape that a thread asked last is not one of this engine any more.
  static void forget_asked(const Reloader& reloader) REQUIRES(gil);
};

// While it lives, code of others runs on the thread, perhaps inside of an operator that has packed already. That code
// may run operators of its own, which raises the sequence number, and may leave contexts. Neither says that the
// operator around it has ended (R1). Afterwards its former packs have the number that its later ones will have.
class OperatorUnderWay {
 public:
  explicit OperatorUnderWay(ThreadState& thread) : thread_(thread) {
    renumber(program::sequence_number(), kOperatorUnderWay);
  }
  ~OperatorUnderWay() { renumber(kOperatorUnderWay, program::sequence_number()); }
  OperatorUnderWay(const OperatorUnderWay&) = delete;
  OperatorUnderWay& operator=(const OperatorUnderWay&) = delete;

 private:
  void renumber(uint64_t from, uint64_t to) {
    if (mutated(Mutant::CopyNotInsideOneAroundIt)) return;
    const auto renumber_one = [&](PendingCopy& copy) {
      if (copy.sequence_number == from) copy.sequence_number = to;
    };
    for (PendingCopy& copy : thread_.pending) renumber_one(copy);
    for (auto& [number, waiting] : thread_.waiting) renumber_one(waiting.copy);
  }

  ThreadState& thread_;
};

// While it lives, its thread packs only outputs of operators that have returned. Code that sees operators from below
// autograd needs it: such code is inside an operator for as long as that one's Python code runs, and so are all its
// packs.
class PacksMade {
 public:
  PacksMade() : before_(std::exchange(ThreadState::current().packs_made, true)) {}
  ~PacksMade() { ThreadState::current().packs_made = before_; }
  PacksMade(const PacksMade&) = delete;
  PacksMade& operator=(const PacksMade&) = delete;

 private:
  bool before_;
};

}  // namespace torchoffload
