#include "device/cuda_graph_pools.h"

#include <c10/cuda/CUDACachingAllocator.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <set>
#include <utility>

#include "device/cuda_memory.h"
#include "system/mutex.h"

namespace torchoffload {

namespace {

class CudaGraphPools final : public GraphPools {
 public:
  static CudaGraphPools& instance() {
    static auto* const leaked = new CudaGraphPools;
    return *leaked;
  }

  bool may_have_changed() override {
    // Before CUDA is initialised there are no trees; and another allocator has no private pools that could be looked
    // at.
    if (!listen_to_cuda_allocator()) return false;
    thread_local uint64_t seen = 0;  // by each thread, which has trees of its own
    const uint64_t now = cuda_segment_changes();
    return std::exchange(seen, now) != now;
  }

  void add(const std::vector<GraphPool>& pools) override {
    const MutexLock lock(mutex_);
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
    const MutexLock lock(mutex_);
    const auto after = ranges_.upper_bound(reinterpret_cast<size_t>(address));
    return after != ranges_.begin() && reinterpret_cast<size_t>(address) < std::prev(after)->second;
  }

 private:
  Mutex mutex_;
  // Ids are never used again, so those of pools that are gone do no harm.
  std::set<GraphPool> pools_ GUARDED_BY(mutex_);
  // Maps a segment's first address to the address behind its last byte.
  std::map<size_t, size_t> ranges_ GUARDED_BY(mutex_);
  std::atomic<bool> has_ranges_ = false;
};

}  // namespace

GraphPools& cuda_graph_pools() { return CudaGraphPools::instance(); }
bool is_in_graph_pool(const void* address) { return CudaGraphPools::instance().contains(address); }

}  // namespace torchoffload
