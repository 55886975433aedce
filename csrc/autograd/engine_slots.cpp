// Where a record's bytes come to rest: budgets and slots.
#include <c10/util/Exception.h>

#include <string>
#include <utility>

#include "autograd/engine.h"
#include "autograd/operation.h"
#include "core/mutant.h"
#include "storage/host_memory.h"
#include "storage/local_world.h"
#ifdef TORCHOFFLOAD_TESTING
#include "device/logging_backend.h"
#endif

namespace torchoffload {

namespace {

uint64_t host_charged_bytes = 0;  // of the default budget, which all devices of the process share

}  // namespace

bool Engine::fits_budget(ContextState& context, uint64_t nbytes) {
  if (mutated(Mutant::BudgetHonoured)) return true;
  if (context.options.budget_bytes) return context.charged_bytes + nbytes <= *context.options.budget_bytes;
  if (context.options.tier == Tier::Disk) return true;  // the disk itself says when it is full
  const uint64_t capacity_bytes = store_.capacity_bytes();
  if (!default_budget_bytes_ || budget_read_at_capacity_ != capacity_bytes) {
    default_budget_bytes_ = default_budget_bytes(read_host_memory(), local_world_size(), capacity_bytes);
    budget_read_at_capacity_ = capacity_bytes;
  }
  return host_charged_bytes + nbytes <= *default_budget_bytes_;
}

void Engine::store_is_full(ContextState& context, const std::string& why, const std::string& remedy) {
  TORCH_CHECK(context.options.on_full == OnFull::Keep, "torchoffload: a saved tensor cannot be offloaded: ", why,
              ". To change that, ", remedy, "; or set on_full=\"keep\" to let such tensors stay on the device.");
  context.warn_once(Warning::Full, "torchoffload: saved tensors stay on the device from here on: " + why +
                                       ". To change that, " + remedy + "; on_full=\"error\" makes it an error.");
}

// May block; the record may be gone, or used, after it.
std::optional<Slot> Engine::acquire_slot(RecordId id, std::vector<Point>& guards) {
  const uint64_t nbytes = ledger_.record(id).nbytes();
  std::optional<Slot> slot = store_.try_acquire(nbytes, guards);
  while (!slot) {
    try {
      const BlockingSection blocking;
      store_.grow(nbytes);
    } catch (const StoreFull& full) {
      if (!is_pending(id)) return std::nullopt;
      const std::shared_ptr<ContextState> context = tapes_[ledger_.record(id).tape.index].context;
      keep(id, KeptReason::TierFull);
      const bool is_disk = context->options.tier == Tier::Disk;
      store_is_full(*context, full.what(), is_disk ? "set disk_dir to a directory with room" : "lower budget_bytes");
      return std::nullopt;
    }
#ifdef TORCHOFFLOAD_TESTING
    log_event("grow");
#endif
    if (!is_pending(id)) return std::nullopt;
    slot = store_.try_acquire(nbytes, guards);
  }
  return slot;
}

void Engine::release_slot(Holdings& held) {
  std::vector<Point> guards;
  if (!held.offload_end.is_beginning() && !mutated(Mutant::SlotGuardedByOffload)) guards.push_back(held.offload_end);
  if (!held.reload_end.is_beginning() && !mutated(Mutant::SlotGuardedByReload)) guards.push_back(held.reload_end);
  guards.insert(guards.end(), held.other_reload_ends.begin(), held.other_reload_ends.end());
  if (!held.is_slot_lost) store_.release(held.slot, guards);
  Statistics::global().slot_released(held.slot.nbytes());
  held.slot = {};
}

void Engine::charge(Holdings& held, ContextState& context, uint64_t nbytes) {
  held.charged_bytes = nbytes;
  context.charged_bytes += nbytes;
  if (context.options.tier == Tier::Host) host_charged_bytes += nbytes;
  Statistics::global().charged_bytes += nbytes;
}

void Engine::uncharge(Holdings& held, TapeId tape) {
  ContextState& context = *tapes_[tape.index].context;
  context.charged_bytes -= held.charged_bytes;
  if (context.options.tier == Tier::Host) host_charged_bytes -= held.charged_bytes;
  Statistics::global().charged_bytes -= held.charged_bytes;
  held.charged_bytes = 0;
}

}  // namespace torchoffload
