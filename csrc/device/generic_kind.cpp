// Devices that PyTorch knows through a DeviceGuardImpl, with host memory, as a kind of backend: for each device one
// with page-locked slots, and one with plain ones.
#include <c10/core/Device.h>

#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "device/backends.h"
#include "device/generic_backend.h"
#include "device/spill_place.h"
#include "storage/pinned_arena.h"

namespace torchoffload {

namespace {

class GenericKind final : public BackendKind {
 public:
  std::string name() const override { return "generic"; }

  const Backend* find(const Place& place, const BackendUsers& users) override REQUIRES(gil) {
    const auto type = static_cast<c10::DeviceType>(place.device_type);
    if (!is_generic(type)) return nullptr;
    OfMemory& of_memory = of_memory_[{type, place.use_pin_memory}];
    if (of_memory.arena == nullptr) {
      const HostRegistration registration = place.use_pin_memory ? generic_host_registration(type) : HostRegistration{};
      of_memory.arena = new PinnedArena(registration, generic_synchronize);
    }
    const c10::Device device(type, place.device_index);
    if (const std::optional<SpillPlan> plan = spill_plan(place)) {
      return &SpillPlace::find(spilling_, users, *of_memory.arena, *plan, hooks_, place.device_index,
                               [&](TieredStore& store)
                                   REQUIRES(gil) { return wrapped(generic_backend(device, store), device.index()); });
    }
    std::shared_ptr<const Backend>& backend = of_memory.backends[device.index()];
    if (backend == nullptr) backend = wrapped(generic_backend(device, *of_memory.arena), device.index());
    return backend.get();
  }

  bool is_available() const override { return !generic_types_here().empty(); }

  PinnedMemory pinned_memory() const override REQUIRES(gil) {
    PinnedMemory all;
    for (const auto& [which, of_memory] : of_memory_) {
      if (!which.second || of_memory.arena == nullptr) continue;
      all.held_bytes += of_memory.arena->capacity_bytes();
      all.used_bytes += of_memory.arena->used_bytes();
    }
    return all;
  }

  std::vector<std::string> notes() const override REQUIRES(gil) { return generic_notes(); }

 private:
  // The store that holds the slots of all devices of a type, made at first use, and their backends.
  struct OfMemory {
    PinnedArena* arena = nullptr;
    std::map<c10::DeviceIndex, std::shared_ptr<const Backend>> backends;
  };

  std::map<std::pair<c10::DeviceType, bool>, OfMemory> of_memory_;  // the bool: page-locked
  const SpillHooks hooks_{.wait_for_point = generic_wait_in_background};
  DiskPlaces spilling_;
};

const RegisterBackendKind generic_is_registered(*new GenericKind);

}  // namespace

}  // namespace torchoffload
