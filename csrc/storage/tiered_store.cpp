#include "storage/tiered_store.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <utility>

#include "core/mutant.h"
#include "system/host_memory.h"
#include "system/local_world.h"
#include "system/mutex.h"

namespace torchoffload {
namespace {

std::atomic<uint64_t> all_memory_bytes{0};

constexpr char kTiersInherited[] = "slots in host memory and on disk were inherited by a forked process";

}  // namespace

uint64_t spill_memory_bytes() { return all_memory_bytes; }

TieredStore::TieredStore(PinnedArena& arena, const std::vector<std::string>& directories, SpillPolicy policy,
                         SpillHooks hooks)
    : arena_(arena),
      writes_at_once_(policy.writes_at_once),
      hooks_(std::move(hooks)),
      memory_limit_bytes_(policy.memory_bytes) {
  for (const std::string& directory : directories)
    files_.push_back(std::make_unique<SpillFile>(directory, [](Point) {}));  // its slots have no guards
  disks_.resize(files_.size());
  for (const auto& file : files_) file->trim();  // made to be sure that it can be; the first write opens it again
  transfers_ = hooks_.make_transfers(files_.size(), [this](const SlotTransfer& transfer) { run(transfer); });
}

TieredStore::~TieredStore() {
  if (fork_guard_.inherited()) {  // its threads are the parent's: there are none to end
    [[maybe_unused]] const TransferQueue* const leaked = transfers_.release();
    return;
  }
  const MutexLock lock(mutex_);
  is_stopped_ = true;
  changed_.notify_all();
  transfers_->wait(
      mutex_, changed_, [&]() REQUIRES(mutex_) { return transfer_count_ == 0; },
      [&] { return describe_wait("the end of"); });
  while (!slots_.empty()) free_slot(slots_.begin()->first, {});
}

// ---- slots ----

std::optional<Slot> TieredStore::try_acquire(uint64_t nbytes, std::vector<Point>& guards) {
  if (fork_guard_.inherited()) return std::nullopt;
  std::optional<Slot> slot;
  {
    const MutexLock lock(mutex_);
    Resting made;
    made.nbytes = slot_bytes(nbytes);
    if (!take_memory(made, guards, UINT64_MAX)) return std::nullopt;
    largest_bytes_ = std::max(largest_bytes_, made.memory.nbytes());
    demand_.acquired(memory_for(made.nbytes), limit_locked());
    const uint64_t number = ++last_number_;
    slot = Slot{{0, number, made.nbytes}, made.address};
    slots_.emplace(number, std::move(made));
    write_ahead();
  }
  transfers_->make_progress();
  return slot;
}

void TieredStore::grow(uint64_t nbytes) {
  if (fork_guard_.inherited()) throw StoreFull(kTiersInherited);
  require_sane_request(nbytes, "host memory");
  {
    const MutexLock lock(mutex_);
    grow_or_await_eviction(memory_for(slot_bytes(nbytes)), OverLimit::No);
  }
  transfers_->make_progress();
}

void TieredStore::note_filled(const Slot& slot, Point end) {
  if (fork_guard_.inherited()) return;
  {
    const MutexLock lock(mutex_);
    Resting& resting = at(slot);
    add_point(resting.busy_until, end);
    resting.filled = end;
    resting.state = SlotState::InMemory;
    --resting.hold_count;
    sort_in(slot.range.offset, resting);
    ++change_count_;
    write_ahead();
    changed_.notify_all();
  }
  transfers_->make_progress();
}

void TieredStore::release(const Slot& slot, const std::vector<Point>& guards) {
  if (fork_guard_.inherited()) return;
  {
    const MutexLock lock(mutex_);
    Resting& resting = at(slot);
    demand_.released(memory_for(resting.nbytes));
    if (resting.is_in_transfer()) {
      resting.is_released = true;
      ++released_count_;
      for (const Point& guard : guards) add_point(resting.busy_until, guard);
      if (mutated(Mutant::SlotHeldUntilIoDone)) release_memory(resting);
    } else {
      free_slot(slot.range.offset, guards);
    }
    ++change_count_;
    changed_.notify_all();
  }
  transfers_->make_progress();
}

void TieredStore::free_slot(uint64_t number, const std::vector<Point>& guards) {
  Resting& resting = slots_.at(number);
  for (const Point& guard : guards) add_point(resting.busy_until, guard);
  if (resting.memory.nbytes() > 0) release_memory(resting);
  if (resting.on_disk) {
    Disk& disk = disks_[resting.disk];
    files_[resting.disk]->release(*resting.on_disk, {});
    disk.slot_bytes -= resting.nbytes;
    if (disk.refusal) disk.refusal->due_wave = 0;  // there may be room again
  }
  dirty_.set(number, 0, false);
  clean_.set(number, 0, false);
  slots_.erase(number);
}

// ---- holds ----

bool TieredStore::is_here(const Slot& slot) const {
  if (fork_guard_.inherited()) return false;
  const MutexLock lock(mutex_);
  return at(slot).is_in_memory() || mutated(Mutant::ReloadWaitsForFetch);
}

std::optional<Slot> TieredStore::try_hold(const Slot& slot) {
  if (fork_guard_.inherited()) return std::nullopt;
  const MutexLock lock(mutex_);
  Resting& resting = at(slot);
  const bool is_here = resting.is_in_memory() || (mutated(Mutant::ReloadWaitsForFetch) && resting.address != nullptr);
  return is_here ? std::optional(held(slot, resting)) : std::nullopt;
}

Slot TieredStore::held(const Slot& slot, Resting& resting) {
  ++resting.hold_count;
  sort_in(slot.range.offset, resting);
  return {slot.range, resting.address};
}

Slot TieredStore::hold(const Slot& slot) {
  if (fork_guard_.inherited()) throw std::runtime_error(kTiersInherited);
  transfers_->make_progress();
  const MutexLock lock(mutex_);
  while (true) {
    Resting& resting = at(slot);
    if (resting.is_in_memory()) return held(slot, resting);
    bool is_by_caller = false;
    if (resting.state == SlotState::OnDisk) {
      const Fetch begun = begin_fetch_of(slot.range.offset, resting, UINT64_MAX);
      if (begun == Fetch::NoRoom) {
        grow_or_await_eviction(memory_for(resting.nbytes), OverLimit::Yes);
        continue;
      }
      is_by_caller = begun == Fetch::ByCaller;
    }
    const uint64_t fetch_number = resting.fetch_number;
    if (is_by_caller) {
      const MutexUnlock unlocked(mutex_);
      fetch(slot.range.offset);
    }
    if (mutated(Mutant::ReloadWaitsForFetch)) return held(slot, resting);
    wait_for_disk("a saved tensor to be read from", [&]() REQUIRES(mutex_) {
      const Resting& now = at(slot);
      return now.state != SlotState::BeingFetched || now.fetch_number != fetch_number;
    });
    const Resting& now = at(slot);
    if (now.failed_fetch_number == fetch_number) throw std::runtime_error(now.fetch_failure);
  }
}

void TieredStore::release_hold(const Slot& slot, std::optional<Point> until) {
  if (fork_guard_.inherited()) return;
  {
    const MutexLock lock(mutex_);
    Resting& resting = at(slot);
    if (until) add_point(resting.busy_until, *until);
    --resting.hold_count;
    sort_in(slot.range.offset, resting);
    ++change_count_;
    changed_.notify_all();
  }
  transfers_->make_progress();
}

bool TieredStore::begin_fetch(const Slot& slot) {
  if (fork_guard_.inherited()) return false;
  bool has_begun = true;
  {
    const MutexLock lock(mutex_);
    Resting& resting = at(slot);
    // Slots that were saved before this one are wanted later.
    if (resting.state == SlotState::OnDisk) {
      const Fetch begun = is_stopped_ ? Fetch::NoRoom : begin_fetch_of(slot.range.offset, resting, slot.range.offset);
      if (begun == Fetch::ByCaller) cancel_fetch(resting);  // nobody waits for the slot yet
      has_begun = begun == Fetch::Begun;
    }
  }
  transfers_->make_progress();
  return has_begun;
}

// ---- memory ----

uint64_t TieredStore::limit_locked() const {
  if (memory_limit_bytes_) return *memory_limit_bytes_;
  const uint64_t capacity_bytes = arena_.capacity_bytes();
  if (!default_budget_bytes_ || budget_read_at_capacity_ != capacity_bytes) {
    default_budget_bytes_ = default_budget_bytes(read_host_memory(), local_world_size(), capacity_bytes);
    budget_read_at_capacity_ = capacity_bytes;
  }
  return *default_budget_bytes_ - std::min(others_bytes(), *default_budget_bytes_);
}

uint64_t TieredStore::others_bytes() const {
  const uint64_t used_bytes = arena_.used_bytes();
  return used_bytes - std::min(used_bytes, memory_bytes_);
}

bool TieredStore::is_arena_full() const {
  const uint64_t capacity_bytes = arena_.capacity_bytes();
  return capacity_bytes > 0 && capacity_bytes >= limit_locked() + others_bytes();
}

bool TieredStore::take_memory(Resting& resting, std::vector<Point>& guards, uint64_t before) {
  const uint64_t nbytes = memory_for(resting.nbytes);
  while (!fits_limit(nbytes)) {
    if (!evict_oldest(before)) return false;
  }
  std::optional<Slot> memory;
  while (!(memory = arena_.try_acquire(nbytes, guards))) {
    if (!is_arena_full() || !evict_oldest(before)) return false;
  }
  if (memory_bytes_ + nbytes > limit_locked()) over_limit_bytes_ = 0;
  resting.memory = *memory;
  const auto begin = reinterpret_cast<uintptr_t>(memory->address);
  resting.address = memory->address + (round_up(begin, kDiskBlockBytes) - begin);
  memory_bytes_ += memory->nbytes();
  all_memory_bytes += memory->nbytes();
  return true;
}

void TieredStore::release_memory(Resting& resting) {
  if (resting.memory.nbytes() == 0) return;
  const bool is_guarded = !mutated(Mutant::SpilledMemoryIsGuarded);
  arena_.release(resting.memory, is_guarded ? resting.busy_until : std::vector<Point>());
  memory_bytes_ -= resting.memory.nbytes();
  all_memory_bytes -= resting.memory.nbytes();
  resting.memory = {};
  resting.busy_until.clear();
}

bool TieredStore::evict_oldest(uint64_t before) {
  if (clean_.empty() || clean_.first() >= before) return false;
  const uint64_t number = clean_.first();
  Resting& resting = slots_.at(number);
  release_memory(resting);
  resting.address = nullptr;
  resting.state = SlotState::OnDisk;
  sort_in(number, resting);
  return true;
}

void TieredStore::grow_or_await_eviction(uint64_t nbytes, OverLimit over_limit) {
  throw_if_stopped();
  std::string refusal;
  const bool can_evict = !clean_.empty() || can_await_eviction();
  const bool is_allowed = fits_limit_after_eviction(nbytes);
  if (is_allowed && !(is_arena_full() && can_evict)) {
    try {
      const MutexUnlock unlocked(mutex_);
      arena_.grow(nbytes);
    } catch (const StoreFull& full) {
      refusal = full.what();
    }
    if (refusal.empty()) return;
    if (evict_oldest(UINT64_MAX)) return;
  }
  begin_writes_for(nbytes, is_allowed);
  if (is_allowed && refusal.empty() && evict_oldest(UINT64_MAX)) return;
  if (transfer_count_ > 0) {
    const uint64_t seen = change_count_;
    return wait_for_disk("room in host memory, by way of",
                         [&]() REQUIRES(mutex_) { return change_count_ != seen || is_stopped_; });
  }
  if (!refusal.empty()) throw StoreFull(refusal);
  if (is_allowed) return;  // nothing can leave the arena: it grows
  if (over_limit == OverLimit::No && !dirty_.empty()) throw StoreFull(disk_refusal());
  over_limit_bytes_ = nbytes;
}

void TieredStore::sort_in(uint64_t number, const Resting& resting) {
  const bool is_free = resting.hold_count == 0 || mutated(Mutant::SlotStaysWhileHeld);
  dirty_.set(number, resting.memory.nbytes(), resting.state == SlotState::InMemory);
  clean_.set(number, resting.memory.nbytes(), resting.state == SlotState::InBoth && is_free && !resting.is_released);
}

void TieredStore::BySize::set(uint64_t number, uint64_t nbytes, bool is_member) {
  const auto known = members_.find(number);
  if (known != members_.end()) {
    nbytes_ -= known->second;
    members_.erase(known);
  }
  if (!is_member) return;
  members_.emplace(number, nbytes);
  nbytes_ += nbytes;
}

void TieredStore::add_point(std::vector<Point>& points, Point point) {
  if (point.is_beginning()) return;
  for (Point& known : points) {
    if (known.stream != point.stream) continue;
    known.serial = std::max(known.serial, point.serial);
    return;
  }
  points.push_back(point);
}

// ---- releasing, and questions to the store ----

uint64_t TieredStore::trim() {
  if (fork_guard_.inherited()) return 0;
  {
    const MutexLock lock(mutex_);
    transfers_->wait(
        mutex_, changed_, [&]() REQUIRES(mutex_) { return released_count_ == 0; },
        [&] { return describe_wait("transfers of"); });
    while (evict_oldest(UINT64_MAX)) {
    }
  }
  uint64_t released_bytes = arena_.trim();
  for (const auto& file : files_) released_bytes += file->trim();
  transfers_->end_idle_threads();
  return released_bytes;
}

uint64_t TieredStore::used_bytes() const {
  if (fork_guard_.inherited()) return 0;
  const MutexLock lock(mutex_);
  return memory_bytes_;
}

uint64_t TieredStore::limit_bytes() const {
  if (fork_guard_.inherited()) return 0;
  const MutexLock lock(mutex_);
  return limit_locked() + others_bytes();
}

uint64_t TieredStore::disk_used_bytes() const {
  if (fork_guard_.inherited()) return 0;
  uint64_t used_bytes = 0;
  for (const auto& file : files_) used_bytes += file->used_bytes();
  return used_bytes;
}

std::string TieredStore::take_trouble() {
  if (fork_guard_.inherited()) return {};
  std::string told = arena_.take_trouble();
  if (!told.empty()) return told;
  const MutexLock lock(mutex_);
  return std::exchange(trouble_, {});
}

void TieredStore::check_invariants() const {
  const auto require = [](bool holds, const char* what) {
    if (!holds) throw std::logic_error(std::string("TieredStore: ") + what);
  };
  const MutexLock lock(mutex_);
  uint64_t memory_bytes = 0, slot_bytes = 0, writing_bytes = 0, fetching_bytes = 0;
  uint32_t transfer_count = 0;
  for (const auto& [number, resting] : slots_) {
    memory_bytes += resting.memory.nbytes();
    if (!resting.is_released) slot_bytes += memory_for(resting.nbytes);
    if (resting.state == SlotState::BeingWritten) writing_bytes += resting.memory.nbytes();
    if (resting.state == SlotState::BeingFetched) fetching_bytes += resting.memory.nbytes();
    if (resting.is_in_transfer()) ++transfer_count;
    require((resting.memory.nbytes() > 0) == (resting.state != SlotState::OnDisk), "memory does not fit the state");
    const bool has_disk = resting.state == SlotState::InBoth || resting.state == SlotState::OnDisk ||
                          resting.state == SlotState::BeingFetched;
    require(resting.on_disk.has_value() == has_disk, "the place on the disk does not fit the state");
    require(dirty_.contains(number) == (resting.state == SlotState::InMemory), "dirty slots are not listed");
    require(clean_.contains(number) == (resting.state == SlotState::InBoth && resting.hold_count == 0),
            "clean slots are not listed");
  }
  require(memory_bytes == memory_bytes_, "memory_bytes_ is wrong");
  require(slot_bytes == demand_.slot_bytes() && demand_.holds(), "the slots' bytes are wrong");
  require(writing_bytes == writing_bytes_ && fetching_bytes == fetching_bytes_, "bytes on their way are wrong");
  require(transfer_count == transfer_count_, "transfer_count_ is wrong");
}

}  // namespace torchoffload
