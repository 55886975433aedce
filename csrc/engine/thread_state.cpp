#include "engine/thread_state.h"

namespace torchoffload {

ThreadState& ThreadState::current() {
  // With a dynamic initializer each call would first check whether it has run.
  constinit thread_local ThreadState* leaked = nullptr;
  if (leaked == nullptr) leaked = new ThreadState;
  return *leaked;
}

}  // namespace torchoffload
