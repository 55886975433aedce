#include "engine/thread_state.h"

namespace torchoffload {

ThreadState& ThreadState::current() {
  thread_local ThreadState* const leaked = new ThreadState;
  return *leaked;
}

}  // namespace torchoffload
