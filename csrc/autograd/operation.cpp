#include "autograd/operation.h"

#include <Python.h>
#include <unistd.h>

#include <utility>

#include "core/mutant.h"

namespace torchoffload {

namespace {

// Of one thread, since what an operation drops may run Python, and let another thread in. Leaked on purpose: handles
// may die while static destructors run.
struct State {
  int depth = 0;
  std::vector<c10::Storage> dropped;
  std::vector<std::function<void()>> releases;
};

State& state() {
  thread_local State* const leaked = new State;
  return *leaked;
}

bool shut_down_flag = false;

}  // namespace

Operation::Operation() { ++state().depth; }

Operation::~Operation() {
  if (state().depth == 1) finish_outermost();
  --state().depth;
}

void Operation::drop_later(c10::Storage storage) {
  if (storage) state().dropped.push_back(std::move(storage));
}

void Operation::drop_now() {
  if (state().depth == 1) finish_outermost();
}

bool Operation::must_queue() { return state().depth > 0 && !mutated(Mutant::DeallocQueuedInsideOperation); }

void Operation::queue(std::function<void()> release) { state().releases.push_back(std::move(release)); }

// Dropping may run Python and let further handles die, so it goes on until nothing is left.
void Operation::finish_outermost() {
  State& now = state();
  while (!now.dropped.empty() || !now.releases.empty()) {
    auto dropped = std::exchange(now.dropped, {});
    const auto releases = std::exchange(now.releases, {});
    if (is_shut_down()) {
      for (c10::Storage& storage : dropped) (void)storage.unsafeReleaseStorageImpl();
    }
    dropped.clear();
    for (const auto& release : releases) run(release);
  }
}

bool Operation::is_shut_down() { return shut_down_flag; }
void Operation::shut_down() { shut_down_flag = true; }

BlockingSection::BlockingSection() {
  Operation::drop_now();
  depth_ = std::exchange(state().depth, 0);
  thread_state_ = PyEval_SaveThread();
}

BlockingSection::~BlockingSection() {
  try {
    PyEval_RestoreThread(static_cast<PyThreadState*>(thread_state_));
  } catch (...) {  // see Note [Threads at exit]
    while (true) pause();
  }
  state().depth = depth_;
}

}  // namespace torchoffload
