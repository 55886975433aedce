// The simulated devices as a kind of backend. They serve the CPU tensors whose memory is theirs.
#include <c10/core/DeviceType.h>

#include "device/backends.h"
#include "testing/sim_backend.h"

namespace torchoffload {

namespace {

class SimKind final : public BackendKind {
 public:
  std::string name() const override { return "simulated"; }

  const Backend* find(const Place& place, const BackendUsers&) override {
    const bool is_cpu = place.device_type == static_cast<int8_t>(c10::DeviceType::CPU);
    if (!is_cpu || place.tier != Placement::Host) return nullptr;
    return simulated_backend_for(place.memory.data());
  }

  bool is_available() const override { return active_simulation() != nullptr; }

  HostRegistration host_registration() const override { return {simulated_register, simulated_unregister}; }

  PinnedMemory pinned_memory() const override {
    return {simulated_arena().capacity_bytes(), simulated_arena().used_bytes()};
  }
};

const RegisterBackendKind sim_is_registered(*new SimKind);

}  // namespace

}  // namespace torchoffload
