// CUDA with host memory as a kind of backend: for each device one with pinned slots, and one with plain ones.
#include <c10/core/DeviceType.h>
#include <c10/cuda/CUDAMacros.h>

#include <array>
#include <memory>
#include <optional>

#include "device/backends.h"
#include "device/cuda_backend.h"
#include "device/cuda_graph_pools.h"
#include "device/generic_backend.h"
#include "device/spill_place.h"
#include "storage/pinned_arena.h"

namespace torchoffload {

namespace {

class CudaKind final : public BackendKind {
 public:
  std::string name() const override { return "cuda"; }

  const Backend* find(const Place& place, const BackendUsers& users) override REQUIRES(gil) {
    const bool is_cuda = place.device_type == static_cast<int8_t>(c10::DeviceType::CUDA);
    if (!is_cuda || is_generic_forced()) return nullptr;
    OfMemory& of_memory = place.use_pin_memory ? pinned_ : plain_;
    if (of_memory.arena == nullptr) {
      const HostRegistration registration = place.use_pin_memory ? host_registration() : HostRegistration{};
      of_memory.arena = new PinnedArena(registration, cuda_synchronize);
    }
    if (const std::optional<SpillPlan> plan = spill_plan(place)) {
      return &SpillPlace::find(spilling_, users, *of_memory.arena, *plan, hooks_, place.device_index,
                               [&](TieredStore& store) REQUIRES(gil) { return made(place, store); });
    }
    auto& backend = of_memory.backends.at(static_cast<size_t>(place.device_index));
    if (backend == nullptr) backend = made(place, *of_memory.arena);
    return backend.get();
  }

  bool is_available() const override { return !is_generic_forced() && cuda_available(); }

  void note_entry(Placement) override {
    if (!is_generic_forced()) note_entry_on_cuda();
  }

  HostRegistration host_registration() const override { return cuda_host_registration(); }

  PinnedMemory pinned_memory() const override REQUIRES(gil) {
    if (pinned_.arena == nullptr) return {};
    return {pinned_.arena->capacity_bytes(), pinned_.arena->used_bytes()};
  }

  GraphPools* graph_pools() override { return &cuda_graph_pools(); }

 private:
  // The store that holds the slots of all devices, made at first use, and their backends.
  struct OfMemory {
    PinnedArena* arena = nullptr;
    std::array<std::shared_ptr<const Backend>, C10_COMPILE_TIME_MAX_GPUS> backends{};
  };

  static std::shared_ptr<const Backend> made(const Place& place, SlotStore& store) REQUIRES(gil) {
    return wrapped(cuda_backend(place.device_index, store), place.device_index);
  }

  OfMemory pinned_;
  OfMemory plain_;
  const SpillHooks hooks_{.wait_for_point = cuda_wait_in_background};
  DiskPlaces spilling_;
};

const RegisterBackendKind cuda_is_registered(*new CudaKind);

}  // namespace

}  // namespace torchoffload
