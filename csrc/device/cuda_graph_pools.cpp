#include "device/cuda_graph_pools.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <utility>

namespace torchoffload {

namespace {

// What a device has got and given back so far: it changes with every segment that comes or goes.
using SegmentCounts = std::array<int64_t, 3>;

SegmentCounts segment_counts(c10::DeviceIndex device) {
  const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(device);
  const auto& reserved = stats.reserved_bytes[0];  // of all pools
  return {reserved.allocated, reserved.freed, reserved.current};
}

class GraphPools {
 public:
  static GraphPools& instance() {
    static GraphPools* const leaked = new GraphPools;
    return *leaked;
  }

  void add(const std::vector<GraphPool>& pools) {
    const std::lock_guard lock(mutex_);
    pools_.insert(pools.begin(), pools.end());
    ranges_.clear();
    if (!pools_.empty()) {
      for (const auto& segment : c10::cuda::CUDACachingAllocator::get()->snapshot().segments) {
        if (pools_.contains({segment.device, segment.owner_private_pool_id}))
          ranges_.emplace(segment.address, segment.address + segment.total_size);
      }
    }
    has_ranges_ = !ranges_.empty();
  }

  bool contains(const void* address) {
    if (!has_ranges_) return false;
    const std::lock_guard lock(mutex_);
    const auto after = ranges_.upper_bound(reinterpret_cast<size_t>(address));
    return after != ranges_.begin() && reinterpret_cast<size_t>(address) < std::prev(after)->second;
  }

 private:
  std::mutex mutex_;
  std::set<GraphPool> pools_;        // an id is never given twice, so those that are gone do no harm
  std::map<size_t, size_t> ranges_;  // from the first address to the one behind the last
  std::atomic<bool> has_ranges_ = false;
};

}  // namespace

bool graph_pools_may_have_changed() {
  // Another allocator has no private pools that could be looked at, nor trees.
  if (c10::cuda::CUDACachingAllocator::name() != "native") return false;
  thread_local std::map<c10::DeviceIndex, SegmentCounts> seen;  // by each thread, which has trees of its own
  const c10::DeviceIndex device = c10::cuda::current_device();
  const SegmentCounts counts = segment_counts(device);
  return std::exchange(seen[device], counts) != counts;
}

void add_graph_pools(const std::vector<GraphPool>& pools) { GraphPools::instance().add(pools); }
bool is_in_graph_pool(const void* address) { return GraphPools::instance().contains(address); }

}  // namespace torchoffload
