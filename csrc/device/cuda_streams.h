// cuda_streams.h: the CUDA streams that are known by an id, and the events of their points.
// Ownership:     streams, events and table live for the process. The events of external streams go from one to another.
// Thread safety: every method, any thread.
// Stream order:  see Note [Event ring] in cuda_backend.h.
// Shutdown:      nothing is destroyed; see Note [No CUDA after main].
#pragma once

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "device/streams.h"
#include "system/mutex.h"

namespace torchoffload {

inline constexpr uint64_t kEventsPerStream = 1024;
inline constexpr uint64_t kEventsPerExternalStream = 16;

// Makes a device the current one for calls of CUDA's runtime. PyTorch's own guard makes more calls at its begin and
// end, and there are several guards for each saved tensor. Here the device is nearly always current already, and then
// the end takes no call.
class OnDevice {
 public:
  explicit OnDevice(c10::DeviceIndex device) {
    int current = 0;
    C10_CUDA_CHECK(cudaGetDevice(&current));  // asks CUDA: PyTorch may not have set its current device yet
    if (current != device) guard_.set_index(device);
  }

 private:
  c10::cuda::OptionalCUDAGuard guard_;
};

class TrackedStream;

// The events of external streams, which a program may make anew in each step. The streams recorded on longest ago give
// their events to others, once all their points were reached. Leaked on purpose.
class ExternalEvents {
 public:
  static ExternalEvents& instance() {
    static auto* const leaked = new ExternalEvents;
    return *leaked;
  }

  // An event of this device, made if there is no spare one.
  cudaEvent_t take(c10::DeviceIndex device);

  // The stream has events from here on.
  void note(TrackedStream& stream);

 private:
  Mutex mutex_;  // taken under that of a stream, and never held while a stream's is waited for
  std::deque<TrackedStream*> with_events_ GUARDED_BY(mutex_);
  std::map<c10::DeviceIndex, std::vector<cudaEvent_t>> spare_ GUARDED_BY(mutex_);
};

// A stream on which points are recorded, or that waits for points. See Note [Event ring].
class TrackedStream {
 public:
  TrackedStream(c10::DeviceIndex device, cudaStream_t stream, std::optional<c10::cuda::CUDAStream> torch_stream)
      : device_(device),
        stream_(stream),
        torch_stream_(torch_stream),
        events_(is_external() ? kEventsPerExternalStream : kEventsPerStream) {}

  c10::DeviceIndex device() const { return device_; }
  cudaStream_t raw() const { return stream_; }
  const std::optional<c10::cuda::CUDAStream>& torch_stream() const { return torch_stream_; }

  // PyTorch uses the handle of an external stream as its id. For the default stream both are 0.
  bool is_external() const {
    return torch_stream_ && stream_ != nullptr && torch_stream_->id() == reinterpret_cast<intptr_t>(stream_);
  }

  uint64_t record() {
    const OnDevice on_device(device_);
    uint64_t serial = 0;
    bool has_events_now = false;
    {
      const MutexLock lock(mutex_);
      serial = serial_.load(std::memory_order_relaxed) + 1;
      std::atomic<cudaEvent_t>& place = events_[serial % events_.size()];
      cudaEvent_t event = place.load(std::memory_order_relaxed);
      if (event == nullptr) {
        event = ExternalEvents::instance().take(device_);
        place.store(event, std::memory_order_relaxed);
        has_events_now = is_external() && !std::exchange(has_events_, true);
      }
      C10_CUDA_CHECK(cudaEventRecord(event, stream_));
      serial_.store(serial, std::memory_order_release);
    }
    if (has_events_now) ExternalEvents::instance().note(*this);
    return serial;
  }

  // An event that is reached no earlier than the point. It may be recorded anew at any time, for a later point, or of
  // another stream once this one's points were reached. Null: the point was reached. Takes no lock, since record() may
  // hold it for as long as the stream's queue is full.
  cudaEvent_t event_of(uint64_t serial) const {
    const uint64_t latest = serial_.load(std::memory_order_acquire);
    const uint64_t oldest = latest < events_.size() ? 1 : latest - events_.size() + 1;
    return events_[std::max(serial, oldest) % events_.size()].load(std::memory_order_relaxed);
  }

  // Moves its events to `spare`, if all its points were reached. False: it has them still.
  bool try_release_events(std::vector<cudaEvent_t>& spare) {
    spare.reserve(spare.size() + events_.size());  // nothing throws while it is locked
    if (!mutex_.try_lock()) return false;
    const bool has_released = move_events_if_reached(spare);
    mutex_.unlock();
    return has_released;
  }

 private:
  bool move_events_if_reached(std::vector<cudaEvent_t>& spare) REQUIRES(mutex_) {
    const cudaEvent_t latest = events_[serial_.load(std::memory_order_relaxed) % events_.size()];
    if (latest != nullptr && cudaEventQuery(latest) != cudaSuccess) {
      (void)cudaGetLastError();  // CUDA must not report at the next call that it is not ready
      return false;
    }
    for (std::atomic<cudaEvent_t>& place : events_) {
      if (cudaEvent_t const event = place.exchange(nullptr, std::memory_order_relaxed)) spare.push_back(event);
    }
    has_events_ = false;
    return true;
  }

  const c10::DeviceIndex device_;
  const cudaStream_t stream_;
  const std::optional<c10::cuda::CUDAStream> torch_stream_;
  Mutex mutex_;                                   // one point at a time; held while the stream's queue is full
  std::vector<std::atomic<cudaEvent_t>> events_;  // those that were needed so far
  bool has_events_ GUARDED_BY(mutex_) = false;
  std::atomic<uint64_t> serial_ = 0;
};

// All known streams of the process, by id. Leaked on purpose.
class StreamTable {
 public:
  static StreamTable& instance() {
    static StreamTable* const leaked = new StreamTable;
    return *leaked;
  }

  // Called many times for each record, so each thread caches the streams that it found. The cache stays right, since no
  // stream is forgotten.
  TrackedStream& at(StreamId id) {
    struct Known {
      StreamId id = kNoStream;
      TrackedStream* stream = nullptr;
    };
    thread_local std::array<Known, 8> latest;
    Known& known = latest[static_cast<size_t>(id) % latest.size()];
    if (known.id != id || known.stream == nullptr) {
      const MutexLock lock(mutex_);
      known = {id, streams_.at(id).get()};  // throws for kNoStream
    }
    return *known.stream;
  }

  StreamId id_of(const c10::cuda::CUDAStream& stream) {
    const MutexLock lock(mutex_);
    const auto [known, is_new] = ids_.try_emplace({stream.device_index(), stream.id()}, kNoStream);
    if (is_new) known->second = add(stream.device_index(), stream.stream(), stream);
    return known->second;
  }

  // The stream is not taken from PyTorch's pool, which hands out the same stream again after 32 calls.
  StreamId make_own(c10::DeviceIndex device) {
    const c10::cuda::CUDAGuard guard(device);
    cudaStream_t stream = nullptr;
    C10_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    const MutexLock lock(mutex_);
    return add(device, stream, std::nullopt);
  }

 private:
  StreamId add(c10::DeviceIndex device, cudaStream_t stream, std::optional<c10::cuda::CUDAStream> torch_stream)
      REQUIRES(mutex_) {
    const StreamId id = next_stream_id();
    streams_.emplace(id, std::make_unique<TrackedStream>(device, stream, torch_stream));
    return id;
  }

  Mutex mutex_;
  std::map<StreamId, std::unique_ptr<TrackedStream>> streams_ GUARDED_BY(mutex_);
  std::map<std::pair<c10::DeviceIndex, c10::StreamId>, StreamId> ids_ GUARDED_BY(mutex_);
};

}  // namespace torchoffload
