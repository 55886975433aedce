#include "storage/transfer_queue.h"

#include "system/host_wait.h"
#include "system/mutex.h"

namespace torchoffload {
namespace {

constexpr unsigned kThreadsOfADirection = 2;

}  // namespace

ThreadedTransfers::ThreadedTransfers(size_t disk_count, const RunTransfer& run) {
  for (size_t disk = 0; disk < disk_count; ++disk) {
    const auto transfer = [run, disk](const IoJob& job) {
      run({job.direction, job.slot.range.offset, disk});
      return std::string();  // the store keeps the failures
    };
    disks_.push_back({std::make_unique<IoQueue>("spill-io", kThreadsOfADirection, transfer),
                      std::make_unique<IoQueue>("fetch-io", kThreadsOfADirection, transfer)});
  }
}

std::unique_ptr<TransferQueue> ThreadedTransfers::make(size_t disk_count, const RunTransfer& run) {
  return std::make_unique<ThreadedTransfers>(disk_count, run);
}

void ThreadedTransfers::submit(const SlotTransfer& transfer) {
  OfDisk& disk = disks_.at(transfer.disk);
  IoQueue& queue = transfer.direction == IoDirection::Out ? *disk.out : *disk.in;
  queue.submit({transfer.direction, Slot{{0, transfer.slot, 1}, nullptr}, nullptr, 0});
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
