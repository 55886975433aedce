#include "engine/thread_state.h"

namespace torchoffload {

ThreadState& ThreadState::current() {
  // No initializer, which each call would have to ask for.
  constinit thread_local ThreadState* leaked = nullptr;
  if (leaked == nullptr) leaked = new ThreadState;
  return *leaked;
}

}  // namespace torchoffload
