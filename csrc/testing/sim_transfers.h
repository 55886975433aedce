// SimTransfers: the disks' threads of the simulated devices. No thread runs: a transfer runs when the mode says so.
// Ownership:     the transfers that have not run. The store that runs them outlives it.
// Thread safety: as TransferQueue.
// Stream order:  Late: a transfer runs when a caller waits for one, in the order of submission. Early: at the end of
//                the call that submitted it. Seeded: at the end of some later call, in an order that the seed picks.
// Shutdown:      leaked on purpose with its store; see Note [No CUDA after main].
//
// It is part of the test build only.
#pragma once

#include <deque>
#include <memory>
#include <optional>

#include "storage/transfer_queue.h"
#include "system/mutex.h"

namespace torchoffload {

class SimTransfers final : public TransferQueue {
 public:
  explicit SimTransfers(RunTransfer run) : run_(std::move(run)) {}

  void submit(const SlotTransfer& transfer) override;
  void wait(Mutex& mutex, CondVar& changed, const std::function<bool()>& is_done,
            const std::function<std::string()>& what) override REQUIRES(mutex);
  void make_progress() override;

  void run_when_waited_for() { runs_when_waited_for_ = true; }
  // Runs the next transfer. Returns whether there was one.
  bool run_next();

  static std::unique_ptr<TransferQueue> make(size_t disk_count, const RunTransfer& run);

 private:
  std::optional<SlotTransfer> take(size_t place);
  size_t queued_count();

  const RunTransfer run_;
  bool runs_when_waited_for_ = false;
  Mutex mutex_;  // taken under the store's lock, and never held while a transfer runs
  std::deque<SlotTransfer> queue_ GUARDED_BY(mutex_);
};

// While true, transfers run only if a caller waits for one, whatever the mode is.
void set_transfers_wait(bool wait);

// While true, stores that are made have threads, as they have on a GPU, and run their transfers when they come to it.
void set_disk_threads(bool has_threads);

}  // namespace torchoffload
