// TieredStore: slots in host memory that go on to disks when the memory is used up, and come back to be read.
// Ownership:     the slots' bytes, in memory and on disk; it owns its spill files, and borrows an arena, which outlives
//                it and may serve other stores. A slot in use has no fixed address: see SlotStore::moves_slots().
// Thread safety: every method, any thread. grow(), hold(), trim() and stop() block: call them without the GIL. The
//                store holds no lock while it waits for the system, a disk or a device.
// Stream order:  its threads wait for points of the device on the host: for the copy that fills a slot before the slot
//                is written to a disk, and for the former users of memory before a slot is read into it (R16). Memory
//                that a slot releases carries the points of the copies that used it, as a released range of the arena
//                does.
// Shutdown:      destroyed if nothing uses its directories any more, and otherwise leaked on purpose, with its threads;
//                see Note [No CUDA after main]. After stop() nothing is written or read, and the device is not asked.
//                In a forked child it is full; see Note [Forked children].
// Not handled:   compression, encryption, writing a part of a slot.
//
// Note [Where a slot is]
//
//   try_acquire     note_filled    begin_write      written        memory is wanted
//   -> BeingFilled ---> InMemory ---> BeingWritten ---> InBoth ------------------------> OnDisk
//                          ^_____ failed ___/             ^ fetched                        |
//                                                         \___________ BeingFetched <______/ begin_fetch
//                                                                           \___ failed ___>
//
// The slots that were saved first go to the disk first, since a backward wants the latest ones first. A slot in both
// places can be evicted without further I/O. Slots are numbered in the order in which they were acquired.
//
// Slots are written while less memory is free, or can be evicted without I/O, than slots are about to want. So if it is
// known how far the slots' bytes will rise (SlotDemand), the excess over the limit is written from the first slot on,
// and nothing more. If it is not known, slots are written once an eighth of the limit is left.
// - A slot is held while a call that uses its address is under way. It is not evicted meanwhile. A write to the disk
//   may go on meanwhile, since it does not change the slot.
// - A slot that is released while a transfer of it is under way stays until the transfer has ended, and is then given
//   back by the thread that ran it.
// - A thread that waits for room holds no slot. If nothing can leave the memory, because other threads hold all slots
//   in it, room is taken beyond the limit, for one slot. So a slot that is larger than the limit has room, too, and no
//   two threads wait for each other.
// - A write that fails leaves the slot in memory, and its disk is refused: nothing more is written to it. The disk is
//   tried again, with one slot at a time, in the next wave, after a minute, or once a slot is released there. Each
//   failed try doubles the number of waves until the next one. A write that succeeds ends the refusal.
// - A read that fails leaves the slot on the disk. Each thread that waits for this read gets the error. A later call
//   reads again.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "storage/pinned_arena.h"
#include "storage/slot_demand.h"
#include "storage/slot_store.h"
#include "storage/spill_file.h"
#include "storage/transfer_queue.h"
#include "system/mutex.h"

namespace torchoffload {

// How much memory a TieredStore uses, and when it writes.
struct SpillPolicy {
  std::optional<uint64_t> memory_bytes;  // the most in slots; absent: the default budget of host memory
  bool writes_at_once = false;           // each slot is written once it is filled, and not only if room runs short
};

double steady_now_s();

// The functions that a TieredStore is given from outside.
struct SpillHooks {
  // Blocks the calling thread, one of the store's own, until a point is reached, or for some milliseconds. Returns
  // whether the point was reached. If it was not, the store asks again, unless it is stopped.
  std::function<bool(Point)> wait_for_point;
  MakeTransferQueue make_transfers = ThreadedTransfers::make;
  double (*now_s)() = steady_now_s;
  // A transfer is about to read (Out) or write (In) memory. For the simulated device; null: no call is made.
  void (*saw_transfer)(IoDirection direction, const void* memory, uint64_t nbytes) = nullptr;
};

// The bytes that all TieredStores of the process have written to disks and read back, and the waits for them.
struct SpillCounts {
  uint64_t spilled_bytes = 0;
  uint64_t fetched_bytes = 0;
  uint64_t wait_count = 0;  // how often a caller waited for a disk: for a slot to come back, or for room in memory
  double wait_s = 0;
};
SpillCounts spill_counts();
void reset_spill_counts();

// The host memory that the slots of all TieredStores of the process have now.
uint64_t spill_memory_bytes();

class TieredStore final : public SlotStore {
 public:
  // Makes a spill file in each directory. Throws std::runtime_error if one cannot be made.
  TieredStore(PinnedArena& arena, const std::vector<std::string>& directories, SpillPolicy policy, SpillHooks hooks);

  // Waits for its transfers. The arena goes on for its other users.
  ~TieredStore() override;
  TieredStore(const TieredStore&) = delete;
  TieredStore& operator=(const TieredStore&) = delete;

  uint64_t slot_bytes(uint64_t nbytes) const override { return round_up(nbytes, kDiskBlockBytes); }
  std::optional<Slot> try_acquire(uint64_t nbytes, std::vector<Point>& guards) override;
  // If the memory is full, waits until something has left it. Throws StoreFull if nothing can leave it, and
  // WaitAbandoned if the user interrupts the wait.
  void grow(uint64_t nbytes) override;
  // Evicts slots that are in both places, as try_acquire() does.
  bool grow_awaits_disk(uint64_t nbytes) override;
  void release(const Slot& slot, const std::vector<Point>& guards) override;
  uint64_t trim() override;  // also waits for transfers of slots that were released meanwhile
  uint64_t capacity_bytes() const override { return arena_.capacity_bytes(); }
  uint64_t used_bytes() const override;  // in memory
  uint64_t grow_count() const override { return arena_.grow_count(); }

  void grow_ahead(uint64_t limit_bytes) override { arena_.grow_ahead(limit_bytes); }
  void reserve(uint64_t capacity_bytes) override { arena_.reserve(capacity_bytes); }
  void grow_on_need() override { arena_.grow_on_need(); }
  uint64_t take_peak_bytes() override { return arena_.take_peak_bytes(); }
  uint64_t shrink(uint64_t needed_bytes) override { return arena_.shrink(needed_bytes); }
  void stop() override;

  bool moves_slots() const override { return true; }
  void note_filled(const Slot& slot, Point end) override;
  bool is_here(const Slot& slot) const override;
  std::optional<Slot> try_hold(const Slot& slot) override;
  Slot hold(const Slot& slot) override;
  void release_hold(const Slot& slot, std::optional<Point> until) override;
  bool begin_fetch(const Slot& slot) override;
  bool limits_itself() const override { return true; }
  std::string take_trouble() override;

  uint64_t limit_bytes() const override;  // with the share of other stores in the arena
  uint64_t disk_used_bytes() const;       // in slots

  // From here on slots have at most so much memory; absent: the default budget. If they have more now, the excess is
  // evicted as others want memory.
  void limit_memory(std::optional<uint64_t> memory_bytes);

  // Is no slot in use, and no transfer under way? False in a forked child of the process that made the store.
  bool is_idle() const;

  // For tests: throws std::logic_error if a slot is listed otherwise than its state says, or a count is wrong.
  void check_invariants() const;

 private:
  enum class SlotState : uint8_t { BeingFilled, InMemory, BeingWritten, InBoth, OnDisk, BeingFetched };

  struct Resting {
    uint64_t nbytes = 0;
    SlotState state = SlotState::BeingFilled;
    Slot memory;                      // of the arena, and larger than `nbytes`; empty if the slot is on disk alone
    std::byte* address = nullptr;     // in `memory`, at a multiple of kDiskBlockBytes
    Point filled;                     // the end of the copy that filled it
    std::vector<Point> busy_until;    // the ends of the copies that used the memory: the latest of each stream
    std::vector<Point> fetch_guards;  // while it is being fetched: the memory's former users
    size_t disk = 0;
    std::optional<Slot> on_disk;
    uint32_t hold_count = 1;
    bool is_released = false;          // while a transfer was under way
    uint64_t fetch_number = 0;         // counts the fetches that were begun
    uint64_t failed_fetch_number = 0;  // the latest one that failed
    std::string fetch_failure;         // of that one

    bool is_in_memory() const { return state != SlotState::OnDisk && state != SlotState::BeingFetched; }
    bool is_in_transfer() const { return state == SlotState::BeingWritten || state == SlotState::BeingFetched; }
  };
  using Slots = std::map<uint64_t, Resting>;  // by number

  // Why a disk is not written to, and when that is tried again.
  struct Refusal {
    std::string why;
    uint32_t failure_count = 0;  // in a row
    uint64_t due_wave = 0;
    double due_s = 0;
    bool is_tried = false;  // a slot is being written, to see whether the disk works again
  };

  struct Disk {
    uint64_t queued_bytes = 0;
    uint64_t slot_bytes = 0;  // of slots on it
    std::optional<Refusal> refusal;
  };

  // Slots by number, with their bytes of memory.
  class BySize {
   public:
    void set(uint64_t number, uint64_t nbytes, bool is_member);
    bool empty() const { return members_.empty(); }
    uint64_t first() const { return members_.begin()->first; }
    bool contains(uint64_t number) const { return members_.contains(number); }
    uint64_t nbytes() const { return nbytes_; }

   private:
    std::map<uint64_t, uint64_t> members_;
    uint64_t nbytes_ = 0;
  };

  // May a slot take memory beyond the limit if nothing can be written?
  enum class OverLimit : uint8_t { No, Yes };

  // ---- tiered_store.cpp ----

  Resting& at(const Slot& slot) REQUIRES(mutex_) { return slots_.at(slot.range.offset); }
  const Resting& at(const Slot& slot) const REQUIRES(mutex_) { return slots_.at(slot.range.offset); }
  static uint64_t memory_for(uint64_t nbytes) { return nbytes + kDiskBlockBytes - kAlignmentBytes; }
  uint64_t limit_locked() const REQUIRES(mutex_);
  uint64_t others_bytes() const REQUIRES(mutex_);  // of the arena, in slots of other stores
  bool fits_limit(uint64_t nbytes) const REQUIRES(mutex_) {
    return memory_bytes_ + nbytes <= limit_locked() || over_limit_bytes_ >= nbytes;
  }
  // Has the arena as much memory as this store and the others in it may use?
  bool is_arena_full() const REQUIRES(mutex_);
  // Gives a slot memory of the arena. Evicts slots in both places, with numbers below `before`, for it, oldest first.
  // Returns false if that is not enough.
  bool take_memory(Resting& resting, std::vector<Point>& guards, uint64_t before) REQUIRES(mutex_);
  void release_memory(Resting& resting) REQUIRES(mutex_);
  bool evict_oldest(uint64_t before) REQUIRES(mutex_);
  // Lists the slot, by its state, among those that can be written and those that can be evicted.
  void sort_in(uint64_t number, const Resting& resting) REQUIRES(mutex_);
  static void add_point(std::vector<Point>& points, Point point);
  // Grows the arena, or waits, once, for something that may have freed `nbytes` of memory. Throws StoreFull if nothing
  // can.
  void grow_or_await_eviction(uint64_t nbytes, OverLimit over_limit) REQUIRES(mutex_);
  // Does the limit allow `nbytes` more of memory, once all slots in both places are evicted?
  bool fits_limit_after_eviction(uint64_t nbytes) const REQUIRES(mutex_) {
    return memory_bytes_ - clean_.nbytes() + nbytes <= limit_locked() || over_limit_bytes_ >= nbytes;
  }
  Slot held(const Slot& slot, Resting& resting) REQUIRES(mutex_);
  void free_slot(uint64_t number, const std::vector<Point>& guards) REQUIRES(mutex_);
  // Waits for transfers until `is_done`, and counts the wait. `what` and the names of all disks tell the user of the
  // wait.
  void wait_for_disk(const char* what, const std::function<bool()>& is_done) REQUIRES(mutex_);
  // The same with the names of the files.
  std::string describe_wait(const char* what) const;

  // ---- tiered_transfers.cpp ----

  // Begins to write the oldest slots, as many as it takes for the memory that slots are about to want.
  void write_ahead() REQUIRES(mutex_);
  bool must_write_more() const REQUIRES(mutex_);
  bool begin_write_of_oldest() REQUIRES(mutex_);
  // Begins to write as many as it takes until `nbytes` of memory are free. `is_allowed`: the limit already allows them,
  // and only the arena lacks a range of that size.
  void begin_writes_for(uint64_t nbytes, bool is_allowed) REQUIRES(mutex_);
  // Is a transfer under way, or can one begin, behind which a slot can be evicted?
  bool can_await_eviction() const REQUIRES(mutex_) {
    return transfer_count_ > 0 || (!dirty_.empty() && disk_to_write_to());
  }
  // Evicts slots in both places until there are `nbytes` of memory, or until the arena can grow by them. Returns false
  // if that is not enough.
  bool evict_for(uint64_t nbytes) REQUIRES(mutex_);
  // The outcome of begin_fetch_of(). ByCaller: the fetch has begun, but there is no thread for it, so the caller is to
  // run it.
  enum class Fetch : uint8_t { NoRoom, Begun, ByCaller };
  Fetch begin_fetch_of(uint64_t number, Resting& resting, uint64_t before) REQUIRES(mutex_);
  void cancel_fetch(Resting& resting) REQUIRES(mutex_);
  bool may_write_to(const Disk& disk) const REQUIRES(mutex_);
  std::optional<size_t> disk_to_write_to() const REQUIRES(mutex_);
  std::string disk_refusal() const REQUIRES(mutex_);
  void throw_if_stopped() const REQUIRES(mutex_);
  void note_refusal(Disk& disk, const std::string& why) REQUIRES(mutex_);

  // On a thread of the store:
  void run(const SlotTransfer& transfer) EXCLUDES(mutex_);
  void write(uint64_t number) EXCLUDES(mutex_);
  void fetch(uint64_t number) EXCLUDES(mutex_);
  void ended(uint64_t number) REQUIRES(mutex_);
  void wait_for_device(const std::vector<Point>& points) EXCLUDES(mutex_);
  bool wait_for_point(Point point) EXCLUDES(mutex_);  // false: it was not reached yet
  static Slot acquire_on(SpillFile& file, uint64_t nbytes);

  PinnedArena& arena_;
  const bool writes_at_once_;
  const SpillHooks hooks_;
  const ForkGuard fork_guard_;
  std::vector<std::unique_ptr<SpillFile>> files_;  // one for each disk; none comes or goes

  mutable Mutex mutex_;
  mutable CondVar changed_;
  std::optional<uint64_t> memory_limit_bytes_ GUARDED_BY(mutex_);  // absent: the default budget
  Slots slots_ GUARDED_BY(mutex_);
  std::vector<Disk> disks_ GUARDED_BY(mutex_);
  uint64_t last_number_ GUARDED_BY(mutex_) = 0;
  BySize dirty_ GUARDED_BY(mutex_);                 // InMemory
  BySize clean_ GUARDED_BY(mutex_);                 // InBoth, and not held
  uint64_t memory_bytes_ GUARDED_BY(mutex_) = 0;    // of all slots that have memory
  uint64_t writing_bytes_ GUARDED_BY(mutex_) = 0;   // of those that are BeingWritten
  uint64_t fetching_bytes_ GUARDED_BY(mutex_) = 0;  // of those that are BeingFetched: they will be clean
  SlotDemand demand_ GUARDED_BY(mutex_);            // in bytes of memory that slots take while they are in memory
  uint32_t transfer_count_ GUARDED_BY(mutex_) = 0;  // under way
  // Of slots that were released while a transfer of them was under way.
  uint32_t released_count_ GUARDED_BY(mutex_) = 0;
  uint64_t change_count_ GUARDED_BY(mutex_) = 0;      // of events that may have made room
  uint64_t over_limit_bytes_ GUARDED_BY(mutex_) = 0;  // the next slot of at most so much may exceed the limit
  uint64_t largest_bytes_ GUARDED_BY(mutex_) = 0;     // of a slot's memory
  uint32_t device_calls_ GUARDED_BY(mutex_) = 0;      // of hooks_.wait_for_point, under way
  bool is_stopped_ GUARDED_BY(mutex_) = false;
  bool has_told_trouble_ GUARDED_BY(mutex_) = false;
  std::string trouble_ GUARDED_BY(mutex_);  // that was not told yet
  mutable std::optional<uint64_t> default_budget_bytes_ GUARDED_BY(mutex_);
  mutable uint64_t budget_read_at_capacity_ GUARDED_BY(mutex_) = 0;

  std::unique_ptr<TransferQueue> transfers_;  // destroyed first: its threads use all of the above
};

}  // namespace torchoffload
