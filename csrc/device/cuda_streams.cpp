#include "device/cuda_streams.h"

#include <c10/cuda/CUDAGraphsC10Utils.h>

#include "system/mutex.h"

namespace torchoffload {

namespace {

constexpr size_t kExternalStreamsWithEvents = 64;

}  // namespace

cudaEvent_t ExternalEvents::take(c10::DeviceIndex device) {
  {
    const MutexLock lock(mutex_);
    std::vector<cudaEvent_t>& spare = spare_[device];
    if (!spare.empty()) {
      cudaEvent_t const event = spare.back();
      spare.pop_back();
      return event;
    }
  }
  cudaEvent_t event = nullptr;
  C10_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  return event;
}

// Looks at two streams for each new one: if the first still has work under way and keeps its events, the next may not.
void ExternalEvents::note(TrackedStream& stream) {
  const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);  // another thread may capture
  const MutexLock lock(mutex_);
  with_events_.push_back(&stream);
  for (int look = 0; look < 2 && with_events_.size() > kExternalStreamsWithEvents; ++look) {
    TrackedStream* const oldest = with_events_.front();
    with_events_.pop_front();
    const OnDevice on_device(oldest->device());
    if (!oldest->try_release_events(spare_[oldest->device()])) with_events_.push_back(oldest);
  }
}

}  // namespace torchoffload
