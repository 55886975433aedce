// The simulated devices as a kind of backend. They serve the CPU tensors whose memory is theirs.
#include <c10/core/DeviceType.h>

#include <memory>
#include <optional>

#include "device/backends.h"
#include "device/spill_place.h"
#include "testing/logging_backend.h"
#include "testing/sim_backend.h"
#include "testing/sim_transfers.h"

namespace torchoffload {

namespace {

class SimKind final : public BackendKind {
 public:
  std::string name() const override { return "simulated"; }

  const Backend* find(const Place& place, const BackendUsers& users) override REQUIRES(gil) {
    const bool is_cpu = place.device_type == static_cast<int8_t>(c10::DeviceType::CPU);
    if (!is_cpu || place.tier != Placement::Host) return nullptr;
    const auto device_index = SimWorld::instance().device_index_of(place.memory.data());
    if (!device_index) return nullptr;
    const std::optional<SpillPlan> plan = spill_plan(place);
    if (!plan) return &simulated_backend(*device_index);
    return &SpillPlace::find(
        spilling_, users, simulated_arena(), *plan, hooks_, *device_index,
        [&](TieredStore& store) { return logged(simulated_device(*device_index).with(store), *device_index); });
  }

  bool is_available() const override { return active_simulation() != nullptr; }

  HostRegistration host_registration() const override { return {simulated_register, simulated_unregister}; }

  PinnedMemory pinned_memory() const override REQUIRES(gil) {
    return {simulated_arena().capacity_bytes(), simulated_arena().used_bytes()};
  }

 private:
  const SpillHooks hooks_{
      .wait_for_point =
          [](Point point) {
            SimWorld::instance().synchronize(point);
            return true;
          },
      .make_transfers = SimTransfers::make,
      .saw_transfer =
          [](IoDirection direction, const void* memory, uint64_t nbytes) {
            SimWorld::instance().saw_transfer(direction == IoDirection::Out, memory, nbytes);
          },
  };
  DiskPlaces spilling_;
};

const RegisterBackendKind sim_is_registered(*new SimKind);

}  // namespace

}  // namespace torchoffload
