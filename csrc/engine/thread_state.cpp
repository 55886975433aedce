#include "engine/thread_state.h"

namespace torchoffload {

namespace {

// Leaked on purpose, as the states are.
std::vector<ThreadState*>& waiting() {
  static auto* const leaked = new std::vector<ThreadState*>;
  return *leaked;
}

}  // namespace

const std::vector<ThreadState*>& ThreadState::with_waiting() { return waiting(); }

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
  constinit thread_local ThreadState* leaked = nullptr;
  if (leaked == nullptr) leaked = new ThreadState;
  return *leaked;
}

}  // namespace torchoffload
