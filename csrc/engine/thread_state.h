// ThreadState: all that the core remembers for one thread. Python keeps PyTorch's stack of hooks beside it.
// Ownership:     one for each thread that runs. That of a thread that has ended goes to a later thread. None is freed,
//                since handles may die while static destructors run.
// Thread safety: used by its own thread, with the GIL held; others ask about it with the GIL held.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "core/types.h"
#include "device/memory.h"
#include "engine/program.h"

namespace torchoffload {

class Engine;
struct ContextState;

// Stands for the sequence number of an operator that has returned; see PacksMade.
constexpr uint64_t kOperatorEnded = UINT64_MAX;

// A record that the thread has packed and whose copy it has not enqueued yet: its operator has not ended (R1), or the
// store has no room.
struct PendingCopy {
  Engine* engine;
  RecordId record;
  uint64_t sequence_number;     // autograd's sequence number at the pack, or kOperatorEnded
  const ContextState* context;  // compared, never dereferenced
  Point filled = {};            // where the copy waits for room: behind all that has filled its source by then
};

// In one flush, the stream whose operators a copy's stream was already made to wait for. The operators that filled the
// sources had been enqueued by then, so one point serves all copies of a flush.
struct FlushOrder {
  StreamId waiter = kNoStream;
  StreamId producer = kNoStream;
};

// The tape that a backward on the thread asked last.
struct AskedTape {
  Engine* engine = nullptr;
  TapeId tape;
  int graph_task = kNoGraphTask;
};

struct ThreadState {
  // How many operations are open, one inside the other, and what the outermost one does when it ends. See Operation.
  int operation_depth = 0;
  uint64_t operation_began = 0;  // the outermost one's number among those of the process, while it is open; else 0
  std::vector<Memory> dropped;
  std::vector<std::function<void()>> releases;

  std::vector<std::shared_ptr<ContextState>> entered;  // the contexts that the thread has entered, the innermost last
  std::deque<PendingCopy> pending;
  bool has_waiting = false;  // some of them may wait for room; see Note [Copies that wait for room]
  uint64_t flush_count = 0;  // of flushes begun: one that another one's copies led to has changed `pending`
  bool packs_made = false;   // see PacksMade

  // The operator inside of which the thread packs now.
  uint64_t sequence_number() const { return packs_made ? kOperatorEnded : program::sequence_number(); }
  AskedTape asked;

  static ThreadState& current();

  // Has some thread an open operation that is the one of this number, or began before it?
  static bool any_has_operation_until(uint64_t number);
  // Has some thread a pending copy of this engine, perhaps one whose record was released?
  static bool any_has_pending(const Engine& engine);
  // The tape that a thread asked last is not one of this engine any more.
  static void forget_asked(const Engine& engine);
};

// While it lives, what its thread packs are outputs of operators that have returned. Code that sees operators from
// below autograd packs so. It is inside an operator for as long as that one's Python code runs, and so is all that it
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
