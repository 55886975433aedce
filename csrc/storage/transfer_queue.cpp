#include "storage/transfer_queue.h"

#include <exception>

#include "system/host_wait.h"

namespace torchoffload {
namespace {

constexpr unsigned kThreadsOfADirection = 2;

}  // namespace

// ---- the transfers of one disk in one direction ----

ThreadedTransfers::Queue::Queue(const char* name, RunTransfer run)
    : run_(std::move(run)), pool_(name, kThreadsOfADirection, [this] { run_next(); }) {}

void ThreadedTransfers::Queue::submit(const SlotTransfer& transfer) {
  pool_.reserve();
  try {
    const MutexLock lock(mutex_);
    waiting_.push_back(transfer);
  } catch (const std::exception&) {
    pool_.submit();  // a call that finds nothing to do
    throw;
  }
  pool_.submit();
}

void ThreadedTransfers::Queue::run_next() {
  SlotTransfer next;
  {
    const MutexLock lock(mutex_);
    if (waiting_.empty()) return;  // there was no memory to list it
    next = waiting_.front();
    waiting_.pop_front();
  }
  try {
    run_(next);
  } catch (const std::exception&) {  // the store keeps the failures
  }
}

// ---- all of them ----

ThreadedTransfers::ThreadedTransfers(size_t disk_count, const RunTransfer& run) {
  for (size_t disk = 0; disk < disk_count; ++disk)
    disks_.push_back({std::make_unique<Queue>("spill-io", run), std::make_unique<Queue>("fetch-io", run)});
}

std::unique_ptr<TransferQueue> ThreadedTransfers::make(size_t disk_count, const RunTransfer& run) {
  return std::make_unique<ThreadedTransfers>(disk_count, run);
}

void ThreadedTransfers::submit(const SlotTransfer& transfer) {
  const OfDisk& disk = disks_.at(transfer.disk);
  (transfer.direction == IoDirection::Out ? disk.out : disk.in)->submit(transfer);
}

void ThreadedTransfers::wait(Mutex& mutex, CondVar& changed, const std::function<bool()>& is_done,
                             const std::function<std::string()>& what) {
  HostWait::until(mutex, changed, is_done, what);
}

void ThreadedTransfers::end_idle_threads() {
  for (const OfDisk& disk : disks_) {
    disk.out->end_idle_threads();
    disk.in->end_idle_threads();
  }
}

}  // namespace torchoffload
