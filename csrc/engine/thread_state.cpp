#include "engine/thread_state.h"

#include <algorithm>
#include <atomic>
#include <utility>

namespace torchoffload {

namespace {

// These are leaked.
std::vector<ThreadState*>& all_states() REQUIRES(gil) {
  static auto* const leaked = new std::vector<ThreadState*>;
  return *leaked;
}

std::vector<ThreadState*>& states_with_waiting() REQUIRES(gil) {
  static auto* const leaked = new std::vector<ThreadState*>;
  return *leaked;
}

// The states of ended threads, which other threads may take.
std::vector<ThreadState*>& free_states() REQUIRES(gil) {
  static auto* const leaked = new std::vector<ThreadState*>;
  return *leaked;
}

// A thread that ends has no GIL, and may not take it, since the interpreter may be going down. So it leaves its state
// on a list without a lock, and the next thread that wants one takes all of the list.
struct Ended {
  ThreadState* state;
  Ended* next;
};
std::atomic<Ended*> ended{nullptr};

constinit thread_local ThreadState* mine = nullptr;
constinit thread_local bool has_thread_ended = false;

class AtThreadExit {
 public:
  void hand_over(ThreadState* state) { entry_ = new Ended{state, nullptr}; }
  ~AtThreadExit() {
    mine = nullptr;
    has_thread_ended = true;
    if (entry_ == nullptr) return;
    entry_->next = ended.load(std::memory_order_relaxed);
    while (!ended.compare_exchange_weak(entry_->next, entry_, std::memory_order_release, std::memory_order_relaxed)) {
    }
  }

 private:
  Ended* entry_ = nullptr;
};

// Clears the state of a thread that has ended. The sources of its pending copies stay on the device until their records
// are released.
// Those that wait for room count in the window, so they stay listed: others that need the window enqueue them, or the
// thread that takes the state over. Their operators have ended with the thread.
// The memory that it had to drop is dropped by the first operation of the thread that takes the state over.
void clear(ThreadState& state) REQUIRES(gil) {
  state.operation_depth = 0;
  state.operation_began = 0;
  state.pending.clear();
  state.ready.clear();
  for (auto& [number, waiting] : state.waiting) waiting.copy.sequence_number = kOperatorEnded;
  state.entered.clear();
  state.packs_made = false;
  state.asked = {};
}

void collect_ended() REQUIRES(gil) {
  Ended* entry = ended.exchange(nullptr, std::memory_order_acquire);
  while (entry != nullptr) {
    clear(*entry->state);
    free_states().push_back(entry->state);
    delete std::exchange(entry, entry->next);
  }
}

ThreadState* take_state() REQUIRES(gil) {
  collect_ended();
  if (free_states().empty()) {
    all_states().push_back(new ThreadState);
    return all_states().back();
  }
  ThreadState* const taken = free_states().back();
  free_states().pop_back();
  return taken;
}

}  // namespace

const std::vector<ThreadState*>& ThreadState::with_waiting() {
  collect_ended();
  return states_with_waiting();
}

void ThreadState::begin_waiting(const PendingCopy& copy, Point filled) {
  static uint64_t waits_begun = 0;
  PendingCopy ended = copy;
  ended.sequence_number = kOperatorEnded;
  if (waiting.empty()) states_with_waiting().push_back(this);
  waiting.emplace_hint(waiting.end(), ++waits_begun, WaitingCopy{ended, filled});
}

WaitingCopy ThreadState::take_waiting(uint64_t number) {
  const WaitingCopy taken = waiting.extract(number).mapped();
  if (waiting.empty()) std::erase(states_with_waiting(), this);
  return taken;
}

void ThreadState::forget_waiting_of(const Offloader& offloader) {
  if (waiting.empty()) return;
  std::erase_if(waiting, [&](const auto& entry) { return entry.second.copy.offloader == &offloader; });
  if (waiting.empty()) std::erase(states_with_waiting(), this);
}

ThreadState& ThreadState::current() {
  // With a dynamic initializer each call would first check whether it has run.
  if (mine == nullptr) {
    gil.assert_held();
    mine = take_state();
    if (!has_thread_ended) {  // else a handle dies while the main thread's static destructors run
      thread_local AtThreadExit at_exit;
      at_exit.hand_over(mine);
    }
  }
  return *mine;
}

bool ThreadState::any_has_operation_until(uint64_t number) {
  collect_ended();
  return std::ranges::any_of(all_states(), [&](const ThreadState* state) {
    return state->operation_began != 0 && state->operation_began <= number;
  });
}

bool ThreadState::any_has_pending(const Offloader& offloader) {
  collect_ended();
  for (ThreadState* const state : free_states()) state->forget_waiting_of(offloader);
  const auto is_its = [&](const PendingCopy& copy) { return copy.offloader == &offloader; };
  return std::ranges::any_of(all_states(), [&](const ThreadState* state) {
    return std::ranges::any_of(state->pending, is_its) || std::ranges::any_of(state->ready, is_its) ||
           std::ranges::any_of(state->waiting, [&](const auto& entry) { return is_its(entry.second.copy); });
  });
}

void ThreadState::forget_asked(const Reloader& reloader) {
  for (ThreadState* const state : all_states()) {
    if (state->asked.reloader == &reloader) state->asked = {};
  }
}

}  // namespace torchoffload
