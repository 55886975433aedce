// Calls of CUDA's driver by threads of ours: they make the pinned arena's memory known to it, and wait for points.
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>

#include <array>
#include <chrono>
#include <optional>
#include <string>
#include <thread>

#include "device/cuda_backend.h"
#include "system/numa.h"

namespace torchoffload {

namespace {

std::string reason(cudaError_t error) {
  if (error == cudaSuccess) return {};
  (void)cudaGetLastError();  // the caller gets the reason; the next call of CUDA must not report it again
  return cudaGetErrorString(error);
}

// For driver calls of a thread of ours, which has no current device and may run while another thread captures a CUDA
// graph. Its scope has a device with a context as the current one, since the call would otherwise create a context on
// the first device. And it declares that the call is no part of a capture, which would otherwise be invalidated: see
// cudaThreadExchangeStreamCaptureMode.
class ApartFromCaptures {
 public:
  ApartFromCaptures() {
    if (const auto device = c10::cuda::getDeviceIndexWithPrimaryContext()) guard_.set_index(*device);
    relaxed_.emplace(cudaStreamCaptureModeRelaxed);
  }

 private:
  c10::cuda::OptionalCUDAGuard guard_;
  std::optional<c10::cuda::CUDAStreamCaptureModeGuard> relaxed_;
};

// The NUMA node of the devices that this process uses; nullopt: they are at different nodes, or it is not known.
std::optional<int> node_of_devices_in_use() {
  std::optional<int> node;
  for (c10::DeviceIndex index = 0; index < c10::cuda::device_count(); ++index) {
    if (!c10::cuda::hasPrimaryContext(index)) continue;
    std::array<char, 32> address{};
    if (cudaDeviceGetPCIBusId(address.data(), static_cast<int>(address.size()), index) != cudaSuccess) {
      (void)cudaGetLastError();
      return std::nullopt;
    }
    const std::optional<int> its_node = node_of_pci_device(address.data());
    if (!its_node || (node && *node != *its_node)) return std::nullopt;
    node = its_node;
  }
  return node;
}

// Between two questions whether a point was reached: short beside a copy, and long beside a question.
constexpr std::chrono::microseconds kBetweenQuestions{50};
constexpr int kMostQuestions = 100;

}  // namespace

bool cuda_wait_in_background(Point point) {
  if (point.is_beginning()) return true;
  const ApartFromCaptures apart;
  for (int question = 0; question < kMostQuestions; ++question) {
    if (cuda_has_reached(point)) return true;
    (void)cudaGetLastError();  // that it was not reached is no error
    std::this_thread::sleep_for(kBetweenQuestions);
  }
  return false;
}

HostRegistration cuda_host_registration() {
  return {
      [](void* address, size_t nbytes) {
        const ApartFromCaptures apart;
        return reason(cudaHostRegister(address, nbytes, cudaHostRegisterPortable));
      },
      [](void* address) {
        const ApartFromCaptures apart;
        return reason(cudaHostUnregister(address));
      },
      node_of_devices_in_use,
  };
}

}  // namespace torchoffload
