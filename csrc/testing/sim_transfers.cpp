#include "testing/sim_transfers.h"

#include <atomic>
#include <chrono>

#include "system/mutex.h"
#include "testing/sim_world.h"

namespace torchoffload {

namespace {

std::atomic<bool> transfers_wait{false};
std::atomic<bool> has_disk_threads{false};

}  // namespace

void set_transfers_wait(bool wait) { transfers_wait = wait; }

void set_disk_threads(bool has_threads) { has_disk_threads = has_threads; }

std::unique_ptr<TransferQueue> SimTransfers::make(size_t disk_count, const RunTransfer& run) {
  if (has_disk_threads) return ThreadedTransfers::make(disk_count, run);
  return std::make_unique<SimTransfers>(run);
}

void SimTransfers::submit(const SlotTransfer& transfer) {
  const MutexLock lock(mutex_);
  queue_.push_back(transfer);
}

std::optional<SlotTransfer> SimTransfers::take(size_t place) {
  const MutexLock lock(mutex_);
  if (place >= queue_.size()) return std::nullopt;
  const SlotTransfer taken = queue_[place];
  queue_.erase(queue_.begin() + static_cast<ptrdiff_t>(place));
  return taken;
}

size_t SimTransfers::queued_count() {
  const MutexLock lock(mutex_);
  return queue_.size();
}

void SimTransfers::wait(Mutex& mutex, CondVar& changed, const std::function<bool()>& is_done,
                        const std::function<std::string()>& /*what*/) {
  while (!is_done()) {
    if (const auto next = take(0)) {
      const MutexUnlock unlocked(mutex);
      run_(*next);
    } else {  // another thread runs the transfer that this one waits for
      changed.wait_until(mutex, std::chrono::steady_clock::now() + std::chrono::seconds(1));
    }
  }
}

bool SimTransfers::run_next() {
  const auto next = take(0);
  if (next) run_(*next);
  return next.has_value();
}

void SimTransfers::make_progress() {
  if (transfers_wait || runs_when_waited_for_) return;
  SimWorld& world = SimWorld::instance();
  const SimMode mode = world.mode();
  if (mode == SimMode::Late) return;
  uint64_t turns = mode == SimMode::Early ? UINT64_MAX : world.draw(3);
  for (; turns > 0; --turns) {
    const size_t count = queued_count();
    if (count == 0) return;
    if (const auto next = take(mode == SimMode::Early ? 0 : world.draw(count))) run_(*next);
  }
}

}  // namespace torchoffload
