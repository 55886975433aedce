// SlotBudget: whether a record may have a slot, and how large the store of slots is to be.
// Ownership:     borrows its store, which lives for the process. What the default budget has given out is one count for
//                all engines, since all devices of the process share the host's memory.
// Thread safety: needs the GIL. What may block releases it.
// Failures:      grow() throws StoreFull; no other call of a store's does.
// Shutdown:      part of its engine; see Note [No CUDA after main].
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/context_state.h"
#include "storage/slot_store.h"

namespace torchoffload {

class SlotBudget {
 public:
  explicit SlotBudget(SlotStore& store) : store_(store) {}

  // ---- the budget ----

  // Does a slot for `nbytes` fit the context's budget, with what was charged to it before?
  bool fits(ContextState& context, uint64_t nbytes);

  // Charges a slot for `nbytes`. Returns what was charged, for uncharge().
  uint64_t charge(ContextState& context, uint64_t nbytes);
  void uncharge(ContextState& context, uint64_t charged_bytes);

  // A slot was refused because of `why`: warns once for each context, or throws std::runtime_error where the user asked
  // for an error. `remedy` says how to change that.
  static void refuse(ContextState& context, const std::string& why, const std::string& remedy);

  // ---- slots ----

  // Appends the points that guard the slot's first write. nullopt: grow() first.
  std::optional<Slot> try_acquire(uint64_t nbytes, std::vector<Point>& guards);

  // Room for one slot at least. Blocks. Throws StoreFull.
  void grow(uint64_t nbytes);

  void release(const Slot& slot, const std::vector<Point>& guards) { store_.release(slot, guards); }

  // ---- the store's size ----

  // Between steps, while no tape is alive. Once several steps in a row have had the same number of bytes in slots, the
  // next one is expected to have as many, and the store is brought to that size. May block.
  void fit_to_steps(ContextState& context);

  // What the step needs is not known any more: the store grows ahead of it.
  void grow_ahead(ContextState& context) { store_.grow_ahead(most_capacity_bytes(context)); }

  // A CUDA graph is being captured: nothing is taken from the system in the background until the next step. May block.
  void hold_growth();

 private:
  uint64_t most_capacity_bytes(ContextState& context);

  SlotStore& store_;
  std::optional<uint64_t> default_budget_bytes_;
  uint64_t budget_read_at_capacity_ = 0;
  uint64_t step_bytes_ = 0;  // in slots at once, at most, in the last step
  uint32_t same_step_count_ = 0;
  bool is_growth_held_ = false;
};

}  // namespace torchoffload
