#include "engine/slot_budget.h"

#include <algorithm>
#include <stdexcept>

#include "core/mutant.h"
#include "engine/operation.h"
#include "storage/tiered_store.h"
#include "system/host_memory.h"
#include "system/local_world.h"

namespace torchoffload {

namespace {

uint64_t host_charged_bytes = 0;  // charged to the default budget by slots in host memory, on all devices

// After so many steps in a row with the same bytes in slots at once, the next step is expected to have as many. With
// fewer steps the store's size would be changed each time that something is learned.
constexpr uint32_t kStepsUntilKnown = 3;

}  // namespace

// ---- the budget ----

bool SlotBudget::is_within_budget(ContextState& context, uint64_t nbytes) {
  if (mutated(Mutant::BudgetHonoured)) return true;
  const bool is_of_disk = context.options.tier == Placement::Disk;
  if (store_.limits_itself() && !is_of_disk) return true;  // bytes beyond the budget go on to the disk
  const uint64_t slot_bytes = nbytes == 0 ? 0 : store_.slot_bytes(nbytes);
  if (context.options.budget_bytes) return context.charged_bytes + slot_bytes <= *context.options.budget_bytes;
  if (is_of_disk) return true;  // the disk itself says when it is full
  const uint64_t capacity_bytes = store_.capacity_bytes();
  if (!default_budget_bytes_ || budget_read_at_capacity_ != capacity_bytes) {
    default_budget_bytes_ = default_budget_bytes(read_host_memory(), local_world_size(), capacity_bytes);
    budget_read_at_capacity_ = capacity_bytes;
  }
  return host_charged_bytes + spill_memory_bytes() + slot_bytes <= *default_budget_bytes_;
}

uint64_t SlotBudget::charge(ContextState& context, uint64_t nbytes) {
  const uint64_t charged_bytes = store_.slot_bytes(nbytes);
  context.charged_bytes += charged_bytes;
  if (is_in_default_budget(context)) host_charged_bytes += charged_bytes;
  Statistics::global().charged_bytes += charged_bytes;
  return charged_bytes;
}

void SlotBudget::uncharge(ContextState& context, uint64_t charged_bytes) {
  context.charged_bytes -= charged_bytes;
  if (is_in_default_budget(context)) host_charged_bytes -= charged_bytes;
  Statistics::global().charged_bytes -= charged_bytes;
}

// If slots may be on a disk, the store itself knows how many are in memory.
bool SlotBudget::is_in_default_budget(const ContextState& context) const {
  return context.options.tier == Placement::Host && !store_.limits_itself();
}

void SlotBudget::refuse(ContextState& context, const std::string& why, const std::string& remedy) {
  if (context.options.on_full == OnFull::Error)
    throw std::runtime_error("torchoffload: a saved tensor cannot be offloaded: " + why + ". To change that, " +
                             remedy + "; or set on_full=\"keep\" to let such tensors stay on the device.");
  context.warn_once(Warning::Full, "torchoffload: saved tensors stay on the device from here on: " + why +
                                       ". To change that, " + remedy + "; on_full=\"error\" makes it an error.");
}

// ---- slots ----

std::optional<Slot> SlotBudget::try_acquire(uint64_t nbytes, std::vector<Point>& guards) {
  return store_.try_acquire(nbytes, guards);
}

void SlotBudget::grow(uint64_t nbytes) {
  const BlockingSection blocking;
  store_.grow(nbytes);
}

// ---- slots that may be on a disk ----

std::optional<HeldSlot> SlotBudget::try_hold(const Slot& slot) {
  if (!moves_slots_) return HeldSlot(nullptr, slot);
  const std::optional<Slot> held = store_.try_hold(slot);
  if (!held) return std::nullopt;
  return HeldSlot(&store_, *held);
}

HeldSlot SlotBudget::hold(Slot slot) {
  if (std::optional<HeldSlot> held = try_hold(slot)) return std::move(*held);
  const BlockingSection blocking;
  return {&store_, store_.hold(slot)};
}

void SlotBudget::tell_trouble(ContextState& context) {
  const std::string trouble = store_.take_trouble();
  if (!trouble.empty()) context.warn_once(Warning::Trouble, "torchoffload: " + trouble + ".");
}

// ---- the store's size ----

void SlotBudget::fit_to_steps(ContextState& context) {
  const uint64_t needed_bytes = store_.take_peak_bytes();
  is_growth_held_ = false;
  same_step_count_ = needed_bytes == step_bytes_ ? same_step_count_ + 1 : 1;
  step_bytes_ = needed_bytes;
  const uint64_t limit_bytes = most_capacity_bytes(context);
  // If steps move nothing any more, the memory of the store is released, once. If a later step moves something, the
  // store grows as in the first step.
  const bool is_known = needed_bytes > 0 ? same_step_count_ >= kStepsUntilKnown : same_step_count_ == kStepsUntilKnown;
  if (!is_known) return store_.grow_ahead(limit_bytes);
  const BlockingSection blocking;
  store_.shrink(needed_bytes);
  if (needed_bytes == 0) return store_.grow_ahead(limit_bytes);
  store_.reserve(std::min(needed_bytes, limit_bytes));
}

void SlotBudget::hold_growth() {
  if (std::exchange(is_growth_held_, true)) return;
  const BlockingSection blocking;
  store_.grow_on_need();
}

uint64_t SlotBudget::most_capacity_bytes(ContextState& context) {
  (void)is_within_budget(context, 0);
  if (store_.limits_itself()) return store_.limit_bytes();
  if (context.options.budget_bytes) return store_.used_bytes() - context.charged_bytes + *context.options.budget_bytes;
  return default_budget_bytes_.value_or(0);
}

}  // namespace torchoffload
