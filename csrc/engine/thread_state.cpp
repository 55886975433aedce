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

std::vector<ThreadState*>& waiting() REQUIRES(gil) {
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
  void give_back(ThreadState* state) { entry_ = new Ended{state, nullptr}; }
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
  std::erase_if(state.pending, [](const PendingCopy& copy) { return copy.wait_number == 0; });
  for (PendingCopy& copy : state.pending) copy.sequence_number = kOperatorEnded;
  state.set_has_waiting(!state.pending.empty());
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
  return waiting();
}

void ThreadState::set_has_waiting(bool has_waiting_now) {
  if (has_waiting == has_waiting_now) return;
  if (has_waiting_now) {
    waiting().push_back(this);
  } else {
    std::erase(waiting(), this);
  }
  has_waiting = has_waiting_now;
}

ThreadState& ThreadState::current() {
  // With a dynamic initializer each call would first check whether it has run.
  if (mine == nullptr) {
    gil.assert_held();
    mine = take_state();
    if (!has_thread_ended) {  // else a handle dies while the main thread's static destructors run
      thread_local AtThreadExit at_exit;
      at_exit.give_back(mine);
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

bool ThreadState::any_has_pending(const Engine& engine) {
  collect_ended();
  const auto is_its = [&](const PendingCopy& copy) { return copy.engine == &engine; };
  for (ThreadState* const state : free_states()) std::erase_if(state->pending, is_its);
  return std::ranges::any_of(all_states(),
                             [&](const ThreadState* state) { return std::ranges::any_of(state->pending, is_its); });
}

void ThreadState::forget_asked(const Engine& engine) {
  for (ThreadState* const state : all_states()) {
    if (state->asked.engine == &engine) state->asked = {};
  }
}

}  // namespace torchoffload
