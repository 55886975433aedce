// The transfers of a TieredStore to its disks and back: which ones, and when.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "core/mutant.h"
#include "storage/tiered_store.h"
#include "system/host_wait.h"
#include "system/mutex.h"

namespace torchoffload {
namespace {

std::atomic<uint64_t> spilled_bytes{0};
std::atomic<uint64_t> fetched_bytes{0};
std::atomic<uint64_t> wait_count{0};
std::atomic<int64_t> wait_ns{0};

// The share of the limit that is kept free if the demand is not known: room for two slots at least.
constexpr uint64_t kShareAhead = 8;
constexpr uint64_t kMostBytesAhead = uint64_t{4} << 30;

// A disk whose write failed is tried again after so long, or after 1, 2, 4, ... waves.
constexpr double kSecondsUntilTried = 60;
constexpr uint32_t kMostDoublings = 6;

}  // namespace

double steady_now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

SpillCounts spill_counts() { return {spilled_bytes, fetched_bytes, wait_count, static_cast<double>(wait_ns) * 1e-9}; }

void reset_spill_counts() {
  spilled_bytes = fetched_bytes = wait_count = 0;
  wait_ns = 0;
}

void TieredStore::wait_for_disk(const char* what, const std::function<bool()>& is_done) {
  if (is_done()) return;
  const auto begin = std::chrono::steady_clock::now();
  ++wait_count;
  transfers_->wait(mutex_, changed_, is_done, [&] { return describe_wait(what); });
  wait_ns += std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - begin).count();
}

std::string TieredStore::describe_wait(const char* what) const {
  std::string told = what;
  for (const auto& file : files_) told += (&file == &files_.front() ? " " : " or ") + file->name();
  return told;
}

// ---- beginning ----

void TieredStore::write_ahead() {
  if (is_stopped_) return;
  while (!dirty_.empty() && must_write_more() && begin_write_of_oldest()) {
  }
}

bool TieredStore::must_write_more() const {
  if (writes_at_once_) return true;
  const uint64_t limit_bytes = limit_locked();
  const uint64_t share_bytes = std::min(limit_bytes / kShareAhead, kMostBytesAhead);
  const uint64_t ahead_bytes = std::min(limit_bytes, std::max(share_bytes, 2 * largest_bytes_));
  const uint64_t free_bytes = limit_bytes - std::min(memory_bytes_, limit_bytes);
  return free_bytes + clean_.nbytes() + writing_bytes_ + fetching_bytes_ < demand_.coming_bytes(ahead_bytes);
}

bool TieredStore::may_write_to(const Disk& disk) const {
  if (!disk.refusal) return true;
  const Refusal& refusal = *disk.refusal;
  if (mutated(Mutant::RefusalPasses)) return false;
  return !refusal.is_tried && (demand_.wave_count() >= refusal.due_wave || hooks_.now_s() >= refusal.due_s);
}

std::optional<size_t> TieredStore::disk_to_write_to() const {
  std::optional<size_t> best;
  const auto load = [&](size_t disk) REQUIRES(mutex_) {
    return std::tuple(disks_[disk].refusal.has_value(), disks_[disk].queued_bytes, disks_[disk].slot_bytes);
  };
  for (size_t disk = 0; disk < disks_.size(); ++disk) {
    if (may_write_to(disks_[disk]) && (!best || load(disk) < load(*best))) best = disk;
  }
  return best;
}

bool TieredStore::begin_write_of_oldest() {
  const std::optional<size_t> disk = is_stopped_ || dirty_.empty() ? std::nullopt : disk_to_write_to();
  if (!disk) return false;
  const uint64_t number = dirty_.first();
  if (auto& refusal = disks_[*disk].refusal) refusal->is_tried = true;
  try {
    transfers_->submit({IoDirection::Out, number, *disk});
  } catch (const std::runtime_error& error) {
    note_refusal(disks_[*disk], error.what());
    return false;
  }
  Resting& resting = slots_.at(number);
  resting.state = SlotState::BeingWritten;
  resting.disk = *disk;
  disks_[*disk].queued_bytes += resting.nbytes;
  writing_bytes_ += resting.memory.nbytes();
  ++transfer_count_;
  sort_in(number, resting);
  return true;
}

void TieredStore::begin_writes_for(uint64_t nbytes, bool is_allowed) {
  const auto is_short = [&]() REQUIRES(mutex_) {
    const bool is_over = memory_bytes_ - clean_.nbytes() - writing_bytes_ + nbytes > limit_locked();
    return is_over || (is_allowed && clean_.empty() && writing_bytes_ == 0);
  };
  while (is_short() && begin_write_of_oldest()) {
  }
}

bool TieredStore::evict_for(uint64_t nbytes) {
  if (!fits_limit_after_eviction(nbytes)) return false;
  while (is_arena_full() && !arena_.can_acquire(nbytes)) {
    if (!evict_oldest(UINT64_MAX)) return false;
  }
  return true;
}

bool TieredStore::grow_awaits_disk(uint64_t nbytes) {
  if (fork_guard_.inherited()) return false;
  const uint64_t memory_bytes = memory_for(slot_bytes(nbytes));
  {
    const MutexLock lock(mutex_);
    if (is_stopped_ || evict_for(memory_bytes)) return false;
    begin_writes_for(memory_bytes, fits_limit_after_eviction(memory_bytes));
  }
  transfers_->make_progress();
  const MutexLock lock(mutex_);  // that may have made room
  return !is_stopped_ && !evict_for(memory_bytes) && can_await_eviction();
}

TieredStore::Fetch TieredStore::begin_fetch_of(uint64_t number, Resting& resting, uint64_t before) {
  throw_if_stopped();
  std::vector<Point> guards;
  if (!take_memory(resting, guards, before)) return Fetch::NoRoom;
  Fetch begun = Fetch::Begun;
  try {
    transfers_->submit({IoDirection::In, number, resting.disk});
  } catch (const NoThread&) {
    begun = Fetch::ByCaller;
  }
  ++resting.fetch_number;
  resting.fetch_guards = std::move(guards);
  resting.state = SlotState::BeingFetched;
  fetching_bytes_ += resting.memory.nbytes();
  ++transfer_count_;
  return begun;
}

void TieredStore::cancel_fetch(Resting& resting) {
  fetching_bytes_ -= std::min(fetching_bytes_, resting.memory.nbytes());
  --transfer_count_;
  for (const Point& guard : std::exchange(resting.fetch_guards, {})) add_point(resting.busy_until, guard);
  release_memory(resting);
  resting.address = nullptr;
  resting.state = SlotState::OnDisk;
}

// ---- the limit ----

void TieredStore::limit_memory(std::optional<uint64_t> memory_bytes) {
  if (fork_guard_.inherited()) return;
  const MutexLock lock(mutex_);
  memory_limit_bytes_ = memory_bytes;
  ++change_count_;
  changed_.notify_all();
}

bool TieredStore::is_idle() const {
  if (fork_guard_.inherited()) return false;
  const MutexLock lock(mutex_);
  return slots_.empty() && transfer_count_ == 0;
}

// ---- running, on a thread of the store ----

void TieredStore::run(const SlotTransfer& transfer) {
  transfer.direction == IoDirection::Out ? write(transfer.slot) : fetch(transfer.slot);
}

void TieredStore::write(uint64_t number) {
  const MutexLock lock(mutex_);
  Resting& resting = slots_.at(number);
  Disk& disk = disks_[resting.disk];
  SpillFile& file = *files_[resting.disk];
  const Point filled = resting.filled;
  const std::byte* const address = resting.address;
  const bool is_in_vain = resting.is_released && !mutated(Mutant::SlotHeldUntilIoDone);
  std::optional<Slot> place;
  std::string failure;
  if (!is_in_vain) {
    const MutexUnlock unlocked(mutex_);
    try {
      // The I/O thread waits for the copy out: the slot's bytes are complete only then (R16).
      if (!mutated(Mutant::SpillWaitsForOffload)) wait_for_device({filled});
      place = acquire_on(file, resting.nbytes);
      if (hooks_.saw_transfer != nullptr) hooks_.saw_transfer(IoDirection::Out, address, resting.nbytes);
      failure = file.write(*place, address, resting.nbytes, SpillFile::Memory::Blocks);
    } catch (const std::exception& error) {
      failure = error.what();
    }
  }
  disk.queued_bytes -= resting.nbytes;
  writing_bytes_ -= std::min(writing_bytes_, resting.memory.nbytes());
  --transfer_count_;
  if (place && (failure.empty() || mutated(Mutant::FailedSpillStaysInMemory))) {
    resting.on_disk = place;
    resting.state = SlotState::InBoth;
    disk.slot_bytes += resting.nbytes;
    spilled_bytes += resting.nbytes;
    disk.refusal.reset();
  } else {
    if (place) file.release(*place, {});
    resting.state = SlotState::InMemory;
    if (is_in_vain) {
      if (disk.refusal) disk.refusal->is_tried = false;
    } else if (!is_stopped_) {
      note_refusal(disk, failure);
    }
  }
  ended(number);
}

void TieredStore::fetch(uint64_t number) {
  const MutexLock lock(mutex_);
  Resting& resting = slots_.at(number);
  SpillFile& file = *files_[resting.disk];
  const std::vector<Point> guards = resting.fetch_guards;
  std::byte* const address = resting.address;
  const Slot place = resting.on_disk.value_or(Slot());  // a slot that is fetched has one
  const bool is_in_vain = resting.is_released && !mutated(Mutant::SlotHeldUntilIoDone);
  std::string failure = is_in_vain ? "its record was released" : "";
  if (!is_in_vain) {
    const MutexUnlock unlocked(mutex_);
    try {
      // The I/O thread waits for the memory's former users: they read or write it until then (R16).
      if (!mutated(Mutant::FetchWaitsForGuards)) wait_for_device(guards);
      if (hooks_.saw_transfer != nullptr) hooks_.saw_transfer(IoDirection::In, address, resting.nbytes);
      failure = file.read(address, place, resting.nbytes, SpillFile::Memory::Blocks);
    } catch (const std::exception& error) {
      failure = error.what();
    }
  }
  if (failure.empty()) {
    fetching_bytes_ -= std::min(fetching_bytes_, resting.memory.nbytes());
    --transfer_count_;
    resting.fetch_guards.clear();
    resting.state = SlotState::InBoth;
    fetched_bytes += resting.nbytes;
  } else {
    cancel_fetch(resting);
    resting.failed_fetch_number = resting.fetch_number;
    resting.fetch_failure = failure;
  }
  ended(number);
}

void TieredStore::ended(uint64_t number) {
  ++change_count_;
  if (slots_.at(number).is_released) {
    --released_count_;
    free_slot(number, {});
  } else {
    sort_in(number, slots_.at(number));
    if (slots_.at(number).state == SlotState::InMemory) write_ahead();  // it was not written: another disk may take it
  }
  changed_.notify_all();
}

void TieredStore::wait_for_device(const std::vector<Point>& points) {
  for (const Point& point : points) {
    while (!point.is_beginning() && !wait_for_point(point)) {
    }
  }
}

bool TieredStore::wait_for_point(Point point) {
  {
    const MutexLock lock(mutex_);
    throw_if_stopped();
    ++device_calls_;
  }
  bool is_reached = false;
  std::exception_ptr failure;
  try {
    is_reached = hooks_.wait_for_point(point);
  } catch (const std::exception&) {
    failure = std::current_exception();
  }
  {
    const MutexLock lock(mutex_);
    --device_calls_;
    changed_.notify_all();
  }
  if (failure) std::rethrow_exception(failure);
  return is_reached;
}

Slot TieredStore::acquire_on(SpillFile& file, uint64_t nbytes) {
  std::vector<Point> none;  // nothing but this store touches the file, and no transfer is left when a slot is released
  std::optional<Slot> place;
  while (!(place = file.try_acquire(nbytes, none))) file.grow(nbytes);
  return *place;
}

// ---- the end ----

void TieredStore::stop() {
  if (fork_guard_.inherited()) return;
  arena_.stop();
  const MutexLock lock(mutex_);
  is_stopped_ = true;
  changed_.notify_all();
  ExitWait::until(
      mutex_, changed_, [&]() REQUIRES(mutex_) { return device_calls_ == 0; },
      "a copy between the device and host memory");
}

void TieredStore::throw_if_stopped() const {
  if (is_stopped_) throw StoreFull("the process is about to end, and nothing is written to a disk or read any more");
}

// ---- refusals ----

void TieredStore::note_refusal(Disk& disk, const std::string& why) {
  if (!disk.refusal) disk.refusal = Refusal{};
  Refusal& refusal = *disk.refusal;
  refusal.why = why;
  // If several writes were under way together, only the first failure counts.
  if (refusal.failure_count == 0 || std::exchange(refusal.is_tried, false)) {
    refusal.due_wave = demand_.wave_count() + (uint64_t{1} << std::min(refusal.failure_count++, kMostDoublings));
    refusal.due_s = hooks_.now_s() + kSecondsUntilTried;
  }
  if (!std::exchange(has_told_trouble_, true)) {
    trouble_ = "saved tensors stay in host memory, because writing them to a disk failed: " + why +
               ". Once the budget of host memory is used up, others stay on the device";
  }
}

std::string TieredStore::disk_refusal() const {
  for (const Disk& disk : disks_) {
    if (disk.refusal) return disk.refusal->why;
  }
  return "no slot can be written to a disk";
}

}  // namespace torchoffload
