// SlotBudget: whether a record may have a slot, and how large the store of slots should be.
// Ownership:     borrows its store, which lives for the process. The bytes charged to the default budget are one count
//                for all engines, since all devices of the process share the host's memory.
// Thread safety: needs the GIL. Calls that may block release it.
// Failures:      grow() throws StoreFull, refuse() a std::runtime_error; no other call throws either.
// Shutdown:      part of its engine; see Note [No CUDA after main].
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/context_state.h"
#include "storage/slot_store.h"
#include "system/gil.h"

namespace torchoffload {

// HeldSlot: keeps a slot at its address while a copy that uses it is being enqueued. If the store never moves its
// slots, it is the slot alone.
class HeldSlot {
 public:
  HeldSlot() = default;
  // `slot`: held by the caller, whose hold this takes over; or of a store that does not move it, which `store` is not.
  HeldSlot(SlotStore* store, const Slot& slot) : store_(store), slot_(slot) {}
  HeldSlot(HeldSlot&& other) noexcept : store_(std::exchange(other.store_, nullptr)), slot_(other.slot_) {}
  HeldSlot& operator=(HeldSlot&&) = delete;
  ~HeldSlot() { release_hold(std::nullopt); }

  const Slot& slot() const { return slot_; }

  // `until`: the end of the copy; absent: there was none.
  void release_hold(std::optional<Point> until) {
    if (SlotStore* const store = std::exchange(store_, nullptr)) store->release_hold(slot_, until);
  }
  // Call it if it is not known when the copy ends: the slot stays held for ever.
  void lose() { store_ = nullptr; }

 private:
  SlotStore* store_ = nullptr;
  Slot slot_;
};

class SlotBudget {
 public:
  explicit SlotBudget(SlotStore& store) : store_(store), moves_slots_(store.moves_slots()) {}

  // ---- the budget ----

  // Is there room for a slot of `nbytes` in the context's budget, beside what was charged to it before?
  bool is_within_budget(ContextState& context, uint64_t nbytes);

  // Charges a slot of `nbytes` to the context's budget. Returns the charged bytes, for uncharge().
  uint64_t charge(ContextState& context, uint64_t nbytes) REQUIRES(gil);
  void uncharge(ContextState& context, uint64_t charged_bytes) REQUIRES(gil);

  // Call it when a slot is refused because of `why`. Notes a warning, once for each context, or throws
  // std::runtime_error if the user asked for an error. `remedy` is the advice in the message.
  static void refuse(ContextState& context, const std::string& why, const std::string& remedy);

  // ---- slots ----

  // Takes a slot, and appends the points that guard its first write. Never blocks. nullopt: there is no room; call
  // grow() and try again.
  std::optional<Slot> try_acquire(uint64_t nbytes, std::vector<Point>& guards);

  // Makes room for at least one slot of `nbytes`. Blocks. Throws StoreFull.
  void grow(uint64_t nbytes) REQUIRES(gil);

  // Would grow() wait for a disk now? See SlotStore::grow_awaits_disk(). Never blocks.
  bool grow_awaits_disk(uint64_t nbytes) { return store_.grow_awaits_disk(nbytes); }

  // Returns a slot to the store. `guards`: the points after which it may be written again. Never blocks.
  void release(const Slot& slot, const std::vector<Point>& guards) { store_.release(slot, guards); }

  // ---- slots that may be on a disk; see SlotStore::moves_slots() ----

  bool moves_slots() const { return moves_slots_; }
  bool is_here(const Slot& slot) const { return !moves_slots_ || store_.is_here(slot); }
  // nullopt: the slot is not in memory. Never blocks.
  std::optional<HeldSlot> try_hold(const Slot& slot);
  // Brings it to memory first. Blocks. Throws std::runtime_error if it cannot be read.
  HeldSlot hold(Slot slot) REQUIRES(gil);
  void note_filled(const Slot& slot, Point end) {
    if (moves_slots_) store_.note_filled(slot, end);
  }
  bool begin_fetch(const Slot& slot) { return store_.begin_fetch(slot); }

  // Notes a warning if the store has something to tell.
  void tell_trouble(ContextState& context);

  // ---- the store's size ----

  // Call it between steps, while no tape is alive. Once several steps in a row have had the same number of bytes in
  // slots, the next one is expected to have as many, and the store is brought to that size. May block.
  void fit_to_steps(ContextState& context) REQUIRES(gil);

  // Call it when the step's need is not known any more: the store then grows ahead of the step. Never blocks.
  void grow_ahead(ContextState& context) { store_.grow_ahead(most_capacity_bytes(context)); }

  // Call it when a CUDA graph is being captured. Until the next step no memory is taken from the system in the
  // background. May block.
  void hold_growth() REQUIRES(gil);

 private:
  bool is_in_default_budget(const ContextState& context) const;
  // How large the store may become under this context's budget. Reads the default budget anew if the store's size has
  // changed.
  uint64_t most_capacity_bytes(ContextState& context);

  SlotStore& store_;
  const bool moves_slots_;
  std::optional<uint64_t> default_budget_bytes_;
  uint64_t budget_read_at_capacity_ = 0;
  uint64_t step_bytes_ = 0;  // the most bytes that were in slots at once in the last step
  uint32_t same_step_count_ = 0;
  bool is_growth_held_ = false;
};

}  // namespace torchoffload
