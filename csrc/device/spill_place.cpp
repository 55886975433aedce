#include "device/spill_place.h"

#include "device/backends.h"

namespace torchoffload {

SpillPlace::SpillPlace(const DiskKey& key, PinnedArena& arena, const SpillPlan& plan, const SpillHooks& hooks)
    : DiskPlace(key),
      store_(arena, {plan.directories.begin(), plan.directories.end()}, plan.policy, hooks),
      memory_bytes_(plan.policy.memory_bytes) {}

const Backend& SpillPlace::find(DiskPlaces& places, const BackendUsers& users, PinnedArena& arena,
                                const SpillPlan& plan, const SpillHooks& hooks, int device_index,
                                const MakeBackend& make) {
  const DiskKey key{plan.directories, &arena, plan.policy.writes_at_once};
  auto& place = static_cast<SpillPlace&>(places.turn_to(key, users, [&]() -> std::shared_ptr<DiskPlace> {
    return std::make_shared<SpillPlace>(key, arena, plan, hooks);
  }));
  if (place.memory_bytes_ != plan.policy.memory_bytes) {
    place.memory_bytes_ = plan.policy.memory_bytes;
    place.store_.limit_memory(plan.policy.memory_bytes);
  }
  std::shared_ptr<const Backend>& backend = place.backends_[device_index];
  if (backend == nullptr) backend = make(place.store_);
  return *backend;
}

std::vector<const Backend*> SpillPlace::backends() const {
  std::vector<const Backend*> all;
  for (const auto& [device, backend] : backends_) all.push_back(backend.get());
  return all;
}

}  // namespace torchoffload
