#include "engine/operation.h"

#include <Python.h>
#include <unistd.h>

#include <atomic>
#include <utility>

#include "core/mutant.h"
#include "engine/thread_state.h"

namespace torchoffload {

namespace {

std::atomic<bool> shut_down_flag = false;  // callbacks of autograd ask before they take the GIL
uint64_t latest_operation GUARDED_BY(gil) = 0;

// See Note [Threads at exit].
template <typename Take>
auto or_stop(const Take& take) noexcept {
  try {
    return take();
  } catch (...) {
    while (true) pause();
  }
}

}  // namespace

Operation::Operation() : now_(ThreadState::current()), is_inside_another_(now_.operation_began != 0) {
  gil.assert_held();
  if (++now_.operation_depth > 1) return;
  if (!is_inside_another_) now_.operation_began = ++latest_operation;
  (void)PutOffDrops::put_in_force(&now_.dropped);
}

Operation::~Operation() {
  if (now_.operation_depth == 1) finish_outermost(now_);
  if (--now_.operation_depth > 0) return;
  if (!is_inside_another_) now_.operation_began = 0;
  (void)PutOffDrops::put_in_force(nullptr);
}

uint64_t Operation::latest() { return latest_operation; }

bool Operation::drop_now() {
  ThreadState& now = ThreadState::current();
  return now.operation_depth == 1 && finish_outermost(now);
}

bool Operation::must_queue() {
  return ThreadState::current().operation_depth > 0 && !mutated(Mutant::DeallocQueuedInsideOperation);
}

void Operation::queue(std::function<void()> release) { ThreadState::current().releases.push_back(std::move(release)); }

// Dropping memory may run Python code and so drop more memory and release further handles. Therefore it goes on until
// nothing is left.
bool Operation::finish_outermost(ThreadState& now) {
  if (now.dropped.is_empty() && now.releases.empty()) return false;
  const OperatorUnderWay under_way(now);
  while (!now.dropped.is_empty() || !now.releases.empty()) {
    is_shut_down() ? now.dropped.leak() : now.dropped.drop();
    const auto releases = std::exchange(now.releases, {});
    for (const auto& release : releases) run(release);
  }
  return true;
}

bool Operation::is_shut_down() { return shut_down_flag; }
void Operation::shut_down() { shut_down_flag = true; }

BlockingSection::BlockingSection()
    : now_(ThreadState::current()),
      depth_(std::exchange(now_.operation_depth, 0)),
      put_off_(PutOffDrops::put_in_force(nullptr)),
      thread_state_(PyEval_SaveThread()) {}

BlockingSection::~BlockingSection() {
  take_gil_back(thread_state_);
  now_.operation_depth = depth_;
  (void)PutOffDrops::put_in_force(put_off_);
}

bool is_interrupted() {
  if (gettid() != getpid()) return false;
  const WithGil gil;
  if (PyOS_InterruptOccurred() == 0) return false;
  PyErr_SetInterrupt();
  return true;
}

void take_gil_back(void* thread_state) noexcept {
  or_stop([thread_state] { PyEval_RestoreThread(static_cast<PyThreadState*>(thread_state)); });
}

WithGil::WithGil() : state_(or_stop(PyGILState_Ensure)) {}

WithGil::~WithGil() { PyGILState_Release(static_cast<PyGILState_STATE>(state_)); }

}  // namespace torchoffload
