#include "storage/spilling_stores.h"

#include "system/process.h"

namespace torchoffload {
namespace {

bool is_same(const SpillPlan& left, const SpillPlan& right) {
  return left.policy.memory_bytes == right.policy.memory_bytes &&
         left.policy.writes_at_once == right.policy.writes_at_once && left.directories == right.directories;
}

}  // namespace

TieredStore& SpillingStores::of(PinnedArena& arena, const SpillPlan& plan) {
  for (const Known& known : known_) {
    if (known.arena == &arena && known.generation == fork_generation() && is_same(known.plan, plan))
      return *known.store;
  }
  auto* const made = new TieredStore(arena, plan.directories, plan.policy, hooks_);
  known_.push_back({&arena, plan, fork_generation(), made});
  return *made;
}

}  // namespace torchoffload
