#include "engine/operation.h"

#include <Python.h>
#include <unistd.h>

#include <utility>

#include "core/mutant.h"
#include "engine/thread_state.h"

namespace torchoffload {

namespace {

bool shut_down_flag = false;
uint64_t latest_operation = 0;  // guarded by the GIL

}  // namespace

Operation::Operation() : now_(ThreadState::current()) {
  if (now_.operation_depth++ == 0) now_.operation_began = ++latest_operation;
}

Operation::~Operation() {
  if (now_.operation_depth == 1) finish_outermost(now_);
  if (--now_.operation_depth == 0) now_.operation_began = 0;
}

uint64_t Operation::latest() { return latest_operation; }

void Operation::drop_later(Memory memory) {
  if (memory) ThreadState::current().dropped.push_back(std::move(memory));
}

void Operation::drop_now() {
  ThreadState& now = ThreadState::current();
  if (now.operation_depth == 1) finish_outermost(now);
}

bool Operation::must_queue() {
  return ThreadState::current().operation_depth > 0 && !mutated(Mutant::DeallocQueuedInsideOperation);
}

void Operation::queue(std::function<void()> release) { ThreadState::current().releases.push_back(std::move(release)); }

// Dropping memory may run Python code and so release further handles. Therefore it goes on until nothing is left.
void Operation::finish_outermost(ThreadState& now) {
  while (!now.dropped.empty() || !now.releases.empty()) {
    std::vector<Memory> dropped = std::exchange(now.dropped, {});
    const auto releases = std::exchange(now.releases, {});
    if (is_shut_down()) {
      for (Memory& memory : dropped) (void)memory.release();
    }
    dropped.clear();
    if (now.dropped.empty()) now.dropped.swap(dropped);  // the next operation needs no new memory for the list
    for (const auto& release : releases) run(release);
  }
}

bool Operation::is_shut_down() { return shut_down_flag; }
void Operation::shut_down() { shut_down_flag = true; }

BlockingSection::BlockingSection() : now_(ThreadState::current()) {
  if (now_.operation_depth == 1) Operation::finish_outermost(now_);
  depth_ = std::exchange(now_.operation_depth, 0);
  thread_state_ = PyEval_SaveThread();
}

BlockingSection::~BlockingSection() {
  try {
    PyEval_RestoreThread(static_cast<PyThreadState*>(thread_state_));
  } catch (...) {  // see Note [Threads at exit]
    while (true) pause();
  }
  now_.operation_depth = depth_;
}

WithGil::WithGil() : state_(PyGILState_Ensure()) {}

WithGil::~WithGil() { PyGILState_Release(static_cast<PyGILState_STATE>(state_)); }

}  // namespace torchoffload
