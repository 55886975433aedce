// TransferQueue: has a TieredStore run its transfers to and from disks, on threads or in a test's own order.
// Ownership:     borrows the store that runs the transfers, which outlives it. ThreadedTransfers owns its threads.
// Thread safety: submit() and wait() are called with the store's lock held, and let other threads have it only while
//                wait() waits. make_progress() and end_idle_threads() are called without it.
// Failures:      submit() throws NoThread if no thread can be started.
// Shutdown:      leaked on purpose with its store; see Note [No CUDA after main].
//
// The threads are behind an interface because the simulated device runs the transfers itself, at a time that its mode
// says, so that a test can bring about each order of events.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "system/file_io.h"
#include "system/mutex.h"
#include "system/thread_pool.h"

namespace torchoffload {

// A transfer of one slot, by the slot's number.
struct SlotTransfer {
  IoDirection direction = IoDirection::Out;
  uint64_t slot = 0;
  size_t disk = 0;
};

class TransferQueue {
 public:
  virtual ~TransferQueue() = default;

  // The transfer is run later: on one disk those of one direction begin in the order of submission.
  virtual void submit(const SlotTransfer& transfer) = 0;

  // Waits until `is_done`, which is asked with the store's lock held, returns true. `changed` is notified when a
  // transfer has ended. `what` names the transfer that is waited for. Throws WaitAbandoned if the user interrupts the
  // wait.
  virtual void wait(Mutex& mutex, CondVar& changed, const std::function<bool()>& is_done,
                    const std::function<std::string()>& what) REQUIRES(mutex) = 0;

  // Called at the end of each call of the store.
  virtual void make_progress() {}

  // Blocks until threads without work are gone. The next transfer starts them anew.
  virtual void end_idle_threads() {}
};

using RunTransfer = std::function<void(const SlotTransfer&)>;
using MakeTransferQueue = std::unique_ptr<TransferQueue> (*)(size_t disk_count, const RunTransfer& run);

// Two threads for each disk and direction.
class ThreadedTransfers final : public TransferQueue {
 public:
  ThreadedTransfers(size_t disk_count, const RunTransfer& run);

  void submit(const SlotTransfer& transfer) override;
  void wait(Mutex& mutex, CondVar& changed, const std::function<bool()>& is_done,
            const std::function<std::string()>& what) override REQUIRES(mutex);
  void end_idle_threads() override;

  static std::unique_ptr<TransferQueue> make(size_t disk_count, const RunTransfer& run);

 private:
  class Queue {
   public:
    Queue(const char* name, RunTransfer run);
    void submit(const SlotTransfer& transfer) EXCLUDES(mutex_);
    void end_idle_threads() { pool_.end_idle_threads(); }

   private:
    void run_next() EXCLUDES(mutex_);

    const RunTransfer run_;
    Mutex mutex_;
    std::deque<SlotTransfer> waiting_ GUARDED_BY(mutex_);
    ThreadPool pool_;  // destroyed first: its threads use all of the above
  };
  struct OfDisk {
    std::unique_ptr<Queue> out;
    std::unique_ptr<Queue> in;
  };
  std::vector<OfDisk> disks_;
};

}  // namespace torchoffload
