// IoQueue: one stream of file transfers, run in order of submission by the threads of a pool of its own.
// Ownership:     a queue owns its pool, and borrows the memory of a job until the job's serial is reached.
// Thread safety: every method, any thread. Jobs run on the queue's threads, which take no signal and touch no Python.
// Stream order:  as a CUDA stream's, as far as serials, slots and memory show it; see Note [I/O streams].
// Shutdown:      leaked on purpose; see Note [No CUDA after main]. In a forked child submit() and wait_for() throw; see
//                Note [Forked children].
// Not handled:   a bound on the queued jobs (the engine's windows are the bound), cancelling, priorities.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "storage/slot_store.h"
#include "system/file_io.h"
#include "system/mutex.h"
#include "system/process.h"
#include "system/thread_pool.h"

namespace torchoffload {

// Note [I/O streams]
// A queue keeps a stream's promises, with several threads behind it:
// - A serial is reached when its job and all before it are done. Jobs may end out of order. No caller sees that,
//   because the reached serial moves on only once all earlier jobs are done.
// - Two jobs of one queue that touch the same bytes of a slot or of memory, and may not swap, run one after the other.
//   The thread that takes the later one waits for the earlier one first.
// - After run_after(other, serial), no job submitted later starts before that serial of the other queue is reached. So
//   each job carries the queue's floors, the highest serials it was told to run after, one per queue.
// It cannot deadlock, for the following reason. Floors and conflicts name only jobs submitted before. Of all jobs not
// done, in all queues, take the one submitted first: its floors and conflicts are done, every earlier job of its own
// queue is done, so no thread of that queue holds an earlier job. Jobs are taken in order, so this one is either
// running or next, with a thread free to take it. It ends, as file I/O does, and then the same holds for the next job.
// While there is a job there are threads: the pool ends them only while it has nothing to do. If none can be started,
// the thread that calls run_here() is one of them until its job is taken.

struct IoJob {
  IoDirection direction = IoDirection::Out;
  Slot slot;
  std::byte* memory = nullptr;  // only read when the direction is Out
  uint64_t nbytes = 0;
};

class IoQueue {
 public:
  // Runs one job; returns the reason of its failure, or empty.
  using Transfer = std::function<std::string(const IoJob&)>;

  IoQueue(std::string name, unsigned thread_count, Transfer transfer);

  // Its end waits for the submitted jobs: in tests, since the queues of a process are never destroyed. Queues that were
  // told to run after this one have nothing left to run.

  // Returns the job's serial, counted from 1. Throws NoThread if no thread can be started; the next call tries again.
  // Throws std::runtime_error after a fork.
  uint64_t submit(const IoJob& job);

  // The same, but the calling thread does the job, after those before it that no thread has taken. Blocks.
  uint64_t run_here(const IoJob& job);

  // Jobs submitted from now on start after `serial` of `other` (which may be this queue) is reached.
  void run_after(const IoQueue& other, uint64_t serial);

  uint64_t submitted() const;
  bool is_reached(uint64_t serial) const { return serial <= completed_.load(std::memory_order_acquire); }

  // Blocks until `serial` is reached: a thread of a queue.
  void wait_for(uint64_t serial) const;

  // The same for a thread of the program. `what` names the thing that is waited for. Throws WaitAbandoned if that is
  // interrupted.
  void wait_on_host(uint64_t serial, const std::string& what) const;

  // The reason why the job of this serial failed, or empty. Kept until forget(serial): one that was lost earlier would
  // be silent wrong bytes.
  std::string failure(uint64_t serial) const;

  // Nobody asks for this job's failure any more, be it done or not.
  void forget(uint64_t serial);

  bool is_idle() const;  // every job is done

  // See ThreadPool.
  void end_idle_threads() { pool_.end_idle_threads(); }

 private:
  struct Floor {
    const IoQueue* queue = nullptr;
    uint64_t serial = 0;
  };
  struct Submitted {
    uint64_t serial = 0;
    IoJob job;
    std::vector<Floor> floors;
  };

  uint64_t add(const IoJob& job) REQUIRES(mutex_);
  // The pool calls this for each job that was submitted. It runs the jobs that wait, until there are none.
  void run_waiting();
  // Takes the first job that waits, and does it. The lock is released meanwhile.
  void take_and_run() REQUIRES(mutex_);
  std::string run(const Submitted& submitted) const;
  void finish(uint64_t serial, std::string failure) REQUIRES(mutex_);

  const Transfer transfer_;
  const ForkGuard fork_guard_;

  mutable Mutex mutex_;
  mutable CondVar completed_moved_;
  std::deque<Submitted> waiting_ GUARDED_BY(mutex_);
  std::vector<Submitted> running_ GUARDED_BY(mutex_);  // taken off the queue and not done; at most one a thread
  uint64_t submitted_ GUARDED_BY(mutex_) = 0;          // == taken_ + waiting_.size()
  uint64_t taken_ GUARDED_BY(mutex_) = 0;
  // == min(serial in running_) - 1, or taken_ if none is running. Written with the lock held, and read anywhere.
  std::atomic<uint64_t> completed_{0};
  std::vector<Floor> floors_ GUARDED_BY(mutex_);
  std::map<uint64_t, std::string> failures_ GUARDED_BY(mutex_);  // by serial
  std::set<uint64_t> forgotten_ GUARDED_BY(mutex_);              // not yet reached

  ThreadPool pool_;  // destroyed first: its threads use all of the above
};

}  // namespace torchoffload
