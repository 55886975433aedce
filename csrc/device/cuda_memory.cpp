#include "device/cuda_memory.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/util/flat_hash_map.h>

#include <array>
#include <atomic>
#include <vector>

#include "system/mutex.h"

namespace torchoffload {

namespace {

using TraceEntry = c10::cuda::CUDACachingAllocator::TraceEntry;

// Does nothing while a CUDA graph is being captured: the wait would invalidate the capture, and no tensor saved
// meanwhile moves.
void wait_for_devices_in_use() {
  std::vector<c10::DeviceIndex> in_use;
  for (c10::DeviceIndex device = 0; device < c10::cuda::device_count(); ++device) {
    if (!c10::cuda::hasPrimaryContext(device)) continue;
    const c10::cuda::CUDAGuard guard(device);  // the question would make a context on a device that has none
    if (c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None) return;
    in_use.push_back(device);
  }
  for (const c10::DeviceIndex device : in_use) {
    const c10::cuda::CUDAGuard guard(device);
    const c10::cuda::CUDAStreamCaptureModeGuard apart_from_captures(cudaStreamCaptureModeRelaxed);
    if (cudaDeviceSynchronize() != cudaSuccess) (void)cudaGetLastError();
  }
}

class Listener {
 public:
  static Listener& instance() {
    static Listener* const leaked = new Listener;
    return *leaked;
  }

  bool listen() {
    const State known = state_.load(std::memory_order_acquire);
    if (known != State::NotAsked) return known == State::Listening;
    auto* const allocator = c10::cuda::CUDACachingAllocator::get();
    if (!allocator->initialized()) return false;
    const MutexLock lock(attach_mutex_);
    if (state_.load(std::memory_order_relaxed) == State::NotAsked) {
      const bool is_native = allocator->name() == "native";  // an allocator that is in use is never exchanged
      if (is_native) {
        must_settle_.store(true, std::memory_order_relaxed);
        allocator->attachAllocatorTraceTracker([this](const TraceEntry& entry) { note(entry); });
      }
      state_.store(is_native ? State::Listening : State::Silent, std::memory_order_release);
    }
    return state_.load(std::memory_order_relaxed) == State::Listening;
  }

  std::optional<CudaAllocation> find(c10::DeviceIndex device, const void* address) {
    Table& table = tables_.at(static_cast<size_t>(device));
    const MutexLock lock(table.mutex);
    const auto found = table.allocations.find(reinterpret_cast<size_t>(address));
    return found == table.allocations.end() ? std::nullopt : std::optional(found->second);
  }

  bool must_settle() const { return must_settle_.load(std::memory_order_acquire); }

  void settle() {
    wait_for_devices_in_use();
    must_settle_.store(false, std::memory_order_release);
  }

  uint64_t segment_changes() const { return segment_changes_.load(std::memory_order_relaxed); }

 private:
  enum class State : uint8_t { NotAsked, Listening, Silent };
  struct Table {
    Mutex mutex;
    ska::flat_hash_map<size_t, CudaAllocation> allocations GUARDED_BY(mutex);  // in use, by address
  };

  // Runs under the allocator's lock, at each allocation of the process. It must not call anything that allocates on a
  // device.
  void note(const TraceEntry& entry) {
    switch (entry.action_) {
      case TraceEntry::ALLOC:
        return add(entry);
      case TraceEntry::FREE_REQUESTED: {
        Table& table = tables_.at(static_cast<size_t>(entry.device_));
        const MutexLock lock(table.mutex);
        table.allocations.erase(entry.addr_);
        return;
      }
      case TraceEntry::SEGMENT_ALLOC:
      case TraceEntry::SEGMENT_FREE:
      case TraceEntry::SEGMENT_MAP:
      case TraceEntry::SEGMENT_UNMAP:
        segment_changes_.fetch_add(1, std::memory_order_relaxed);
        return;
      default:
        return;
    }
  }

  // An allocation is made on the current stream unless the caller names another one. Of those only the default stream
  // is known here.
  void add(const TraceEntry& entry) {
    CudaAllocation allocation{next_number_.fetch_add(1, std::memory_order_relaxed), entry.stream_, std::nullopt};
    if (entry.stream_ != nullptr) {
      const c10::cuda::CUDAStream current = c10::cuda::getCurrentCUDAStream(entry.device_);
      if (static_cast<void*>(current.stream()) == entry.stream_) allocation.stream = current;
    } else {
      allocation.stream = c10::cuda::getDefaultCUDAStream(entry.device_);
    }
    Table& table = tables_.at(static_cast<size_t>(entry.device_));
    const MutexLock lock(table.mutex);
    table.allocations[entry.addr_] = allocation;
  }

  Mutex attach_mutex_;
  std::atomic<State> state_ = State::NotAsked;
  std::atomic<bool> must_settle_ = false;
  std::atomic<uint64_t> next_number_ = 1;
  std::atomic<uint64_t> segment_changes_ = 1;  // from 1, since a thread that never asked has 0
  std::array<Table, C10_COMPILE_TIME_MAX_GPUS> tables_;
};

}  // namespace

bool must_settle_cuda() { return Listener::instance().must_settle(); }

void settle_cuda() { Listener::instance().settle(); }

bool listen_to_cuda_allocator() { return Listener::instance().listen(); }

std::optional<CudaAllocation> find_cuda_allocation(c10::DeviceIndex device, const void* address) {
  return Listener::instance().find(device, address);
}

uint64_t cuda_segment_changes() { return Listener::instance().segment_changes(); }

}  // namespace torchoffload
