#include "device/cuda_backend.h"

#include <c10/core/StorageImpl.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "device/cuda_graph_pools.h"
#include "device/cuda_memory.h"
#include "device/cuda_streams.h"
#include "device/marked_memory.h"
#include "device/torch_memory.h"
#include "system/mutex.h"

namespace torchoffload {

namespace {

// Events with timing, by number from 1. Those that are released are used again.
class TimedEvents {
 public:
  explicit TimedEvents(c10::DeviceIndex device) : device_(device) {}

  TimedPoint record(cudaStream_t stream) {
    const OnDevice on_device(device_);
    const auto [id, event] = take();
    const cudaError_t error = cudaEventRecord(event, stream);  // may block: no lock is held
    if (error != cudaSuccess) release({id});
    C10_CUDA_CHECK(error);
    return {id};
  }

  std::optional<double> seconds_between(TimedPoint from, TimedPoint to) {
    const OnDevice on_device(device_);
    float milliseconds = 0;
    const cudaError_t error = cudaEventElapsedTime(&milliseconds, event(from), event(to));
    if (error == cudaErrorNotReady) {
      (void)cudaGetLastError();  // not an error: CUDA must not report it at the next call
      return std::nullopt;
    }
    C10_CUDA_CHECK(error);
    return static_cast<double>(milliseconds) / 1000;
  }

  void release(TimedPoint point) {
    if (!point.is_set()) return;
    const MutexLock lock(mutex_);
    free_.push_back(point.id);
  }

 private:
  std::pair<uint32_t, cudaEvent_t> take() {
    const MutexLock lock(mutex_);
    if (free_.empty()) {
      cudaEvent_t event = nullptr;
      C10_CUDA_CHECK(cudaEventCreate(&event));
      events_.push_back(event);
      free_.push_back(static_cast<uint32_t>(events_.size()));
    }
    const uint32_t id = free_.back();
    free_.pop_back();
    return {id, events_[id - 1]};
  }

  cudaEvent_t event(TimedPoint point) {
    const MutexLock lock(mutex_);
    return events_.at(point.id - 1);
  }

  const c10::DeviceIndex device_;
  Mutex mutex_;  // never held while a call may block
  std::vector<cudaEvent_t> events_ GUARDED_BY(mutex_);
  std::vector<uint32_t> free_ GUARDED_BY(mutex_);
};

class CudaDevice final : public DeviceMemory, public Streams, public Link {
 public:
  explicit CudaDevice(c10::DeviceIndex device)
      : device_(device),
        timed_(device),
        offload_(StreamTable::instance().make_own(device)),
        reload_(StreamTable::instance().make_own(device)) {}

  Backend with(SlotStore& store) {
    const std::string device = c10::Device(c10::kCUDA, device_).str();
    return {.device = device, .memory = *this, .streams = *this, .link = *this, .store = store};
  }

  StreamId offload_stream() override { return offload_; }
  StreamId reload_stream() override { return reload_; }

  StreamId current_stream() override {
    const c10::cuda::CUDAStream current = c10::cuda::getCurrentCUDAStream(device_);
    thread_local std::pair<std::optional<c10::cuda::CUDAStream>, StreamId> latest{std::nullopt, kNoStream};
    if (!latest.first || *latest.first != current) latest = {current, StreamTable::instance().id_of(current)};
    return latest.second;
  }

  Point record(StreamId stream) override { return {stream, StreamTable::instance().at(stream).record()}; }

  void wait(StreamId waiter, Point point) override {
    TrackedStream& waiting = StreamTable::instance().at(waiter);
    const OnDevice on_device(waiting.device());
    const cudaEvent_t event = StreamTable::instance().at(point.stream).event_of(point.serial);
    if (event != nullptr) C10_CUDA_CHECK(cudaStreamWaitEvent(waiting.raw(), event, 0));
  }

  Memory allocate(uint64_t nbytes, uint64_t address_modulo) override {
    const c10::cuda::CUDAGuard guard(device_);
    c10::DataPtr base = c10::cuda::CUDACachingAllocator::get()->allocate(nbytes + address_modulo);
    if (address_modulo == 0) return make_memory(std::move(base), nbytes);
    return make_memory(shifted(std::move(base), address_modulo), nbytes);
  }

  void copy_out(const Slot& slot, const void* source, uint64_t nbytes, StreamId stream) override {
    const OnDevice on_device(device_);
    C10_CUDA_CHECK(cudaMemcpyAsync(slot.address, source, nbytes, cudaMemcpyDeviceToHost,
                                   StreamTable::instance().at(stream).raw()));
  }

  void copy_in(void* target, const Slot& slot, uint64_t nbytes, StreamId stream) override {
    const OnDevice on_device(device_);
    C10_CUDA_CHECK(cudaMemcpyAsync(target, slot.address, nbytes, cudaMemcpyHostToDevice,
                                   StreamTable::instance().at(stream).raw()));
  }

  // Recognises the memory by its deleter, as the native allocator does. Tensors that came through DLPack, the CUDA
  // array interface or from another process have deleters of their own. Those of a MemPool have the allocator's.
  bool owns(MemoryRef memory) const override {
    const c10::DeleterFnPtr deleter = whole_allocation(memory).get_deleter();
    return deleter == c10::cuda::CUDACachingAllocator::get()->raw_deleter() || is_marked(deleter);
  }

  void note_use(MemoryRef memory, StreamId stream) override {
    const auto& torch_stream = StreamTable::instance().at(stream).torch_stream();
    // cudaMallocAsync's allocator raises an error for memory that is not its own.
    if (!torch_stream || !owns(memory)) return;
    c10::cuda::CUDACachingAllocator::get()->recordStream(whole_allocation(memory), *torch_stream);
  }

  // The stream of memory that was allocated on an external stream is not returned, since its owner may have destroyed
  // it.
  MemoryOrigin origin_of(MemoryRef memory) override {
    if (!listen_to_cuda_allocator()) {
      auto* const allocator = c10::cuda::CUDACachingAllocator::get();
      return {mark_memory(storage_impl(memory), allocator->raw_deleter()), kNoStream};
    }
    const auto found = find_cuda_allocation(device_, whole_allocation(memory).get());
    if (!found) return {};
    const c10::cuda::CUDAStream current = c10::cuda::getCurrentCUDAStream(device_);
    if (found->raw_stream == current.stream()) return {found->number, current_stream()};
    if (!found->stream) return {found->number, kNoStream};
    const StreamId stream = StreamTable::instance().id_of(*found->stream);
    return {found->number, is_lasting(stream) ? stream : kNoStream};
  }

  uint64_t allocation_of(MemoryRef memory) override {
    if (!listen_to_cuda_allocator()) return origin_of(memory).allocation;
    const auto found = find_cuda_allocation(device_, whole_allocation(memory).get());
    return found ? found->number : 0;
  }

  bool must_settle() override { return must_settle_cuda(); }
  void settle() override { settle_cuda(); }

  bool is_graph_memory(const void* address) override { return is_in_graph_pool(address); }

  void synchronize(Point point) override { cuda_synchronize(point); }

  PointStatus status(Point) override {
    TORCH_INTERNAL_ASSERT(false, "a step on a GPU never asks for a point's status");
  }
  bool is_lasting(StreamId stream) override {
    // Called at each save, nearly always for the same stream.
    thread_local std::pair<StreamId, bool> latest{kNoStream, true};
    if (latest.first != stream) latest = {stream, !StreamTable::instance().at(stream).is_external()};
    return latest.second;
  }
  bool is_capturing() override {
    // Called several times at each save. For the default stream, which cannot be captured, no call of CUDA is made.
    const cudaStream_t current = c10::cuda::getCurrentCUDAStream(device_).stream();
    if (current == nullptr) return false;
    return is_capturing_raw(current);
  }
  bool is_capturing_on(StreamId stream) override {
    const cudaStream_t raw = StreamTable::instance().at(stream).raw();
    return raw != nullptr && is_capturing_raw(raw);
  }
  Completion completion(StreamId) const override { return Completion::ByStreamOrder; }
  bool may_block(StreamId) const override { return true; }

  bool tells_time() const override { return true; }
  TimedPoint record_timed(StreamId stream) override { return timed_.record(StreamTable::instance().at(stream).raw()); }
  std::optional<double> seconds_between(TimedPoint from, TimedPoint to) override {
    return timed_.seconds_between(from, to);
  }
  void release(TimedPoint point) override { timed_.release(point); }
  uint64_t allocated_bytes() override {
    try {
      const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(device_);
      return static_cast<uint64_t>(
          stats.allocated_bytes[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)].current);
    } catch (const c10::Error&) {  // a CUDAPluggableAllocator keeps no account
      return 0;
    }
  }

 private:
  bool is_capturing_raw(cudaStream_t stream) const {
    const OnDevice on_device(device_);
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    C10_CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
    return status != cudaStreamCaptureStatusNone;
  }

  const c10::DeviceIndex device_;
  TimedEvents timed_;
  const StreamId offload_;
  const StreamId reload_;
};

}  // namespace

bool cuda_available() { return c10::cuda::device_count() > 0; }

void note_entry_on_cuda() { (void)listen_to_cuda_allocator(); }

Backend cuda_backend(int device_index, SlotStore& store) {
  static auto* const devices = new std::array<CudaDevice*, C10_COMPILE_TIME_MAX_GPUS>{};
  CudaDevice*& device = devices->at(static_cast<size_t>(device_index));
  if (device == nullptr) device = new CudaDevice(static_cast<c10::DeviceIndex>(device_index));
  return device->with(store);
}

// CUDA would make a context on the device that is current, which the program may not use.
bool cuda_has_reached(Point point) {
  const TrackedStream& stream = StreamTable::instance().at(point.stream);
  const cudaEvent_t event = stream.event_of(point.serial);
  if (event == nullptr) return true;
  const OnDevice on_device(stream.device());
  const cudaError_t status = cudaEventQuery(event);
  if (status != cudaErrorNotReady) C10_CUDA_CHECK(status);
  return status == cudaSuccess;
}

void cuda_synchronize(Point point) {
  if (point.is_beginning()) return;
  const TrackedStream& stream = StreamTable::instance().at(point.stream);
  const cudaEvent_t event = stream.event_of(point.serial);
  if (event == nullptr) return;
  const OnDevice on_device(stream.device());
  C10_CUDA_CHECK(cudaEventSynchronize(event));
}

}  // namespace torchoffload
