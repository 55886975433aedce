#include "device/refilled_memory.h"

#include <c10/core/Allocator.h>
#include <c10/util/flat_hash_map.h>

#include <atomic>
#include <map>
#include <memory>

#include "core/mutant.h"
#include "system/mutex.h"

namespace torchoffload {

namespace {

// Stands in for one allocator in the storages that are watched.
class RefillCountingAllocator final : public c10::Allocator {
 public:
  explicit RefillCountingAllocator(c10::Allocator* counted) : counted_(counted) {}

  c10::DataPtr allocate(size_t nbytes) override {
    c10::DataPtr data = counted_->allocate(nbytes);
    const MutexLock lock(mutex_);
    numbers_[data.get()] = ++latest_;
    return data;
  }
  c10::DeleterFnPtr raw_deleter() const override { return counted_->raw_deleter(); }
  void copy_data(void* target, const void* source, size_t nbytes) const override {
    counted_->copy_data(target, source, nbytes);
  }
  bool is_simple_data_ptr(const c10::DataPtr& data) const override { return counted_->is_simple_data_ptr(data); }

  // Memory that came from elsewhere, or before its storage was watched, has number 1.
  uint64_t number_of(const void* address) {
    if (latest_.load(std::memory_order_relaxed) == 1) return 1;
    const MutexLock lock(mutex_);
    const auto found = numbers_.find(address);
    return found == numbers_.end() ? 1 : found->second;
  }

 private:
  c10::Allocator* const counted_;
  Mutex mutex_;
  std::atomic<uint64_t> latest_{1};
  ska::flat_hash_map<const void*, uint64_t> numbers_ GUARDED_BY(mutex_);  // by address; the latest that was given there
};

class CountingAllocators {
 public:
  static CountingAllocators& instance() {
    static auto* const leaked = new CountingAllocators;
    return *leaked;
  }

  // The one that is, or that counts, `allocator`.
  RefillCountingAllocator& of(c10::Allocator* allocator) {
    const MutexLock lock(mutex_);
    if (const auto own = own_.find(allocator); own != own_.end()) return *own->second;
    std::unique_ptr<RefillCountingAllocator>& made = of_[allocator];
    if (made == nullptr) {
      made = std::make_unique<RefillCountingAllocator>(allocator);
      own_[made.get()] = made.get();
    }
    return *made;
  }

 private:
  Mutex mutex_;
  std::map<c10::Allocator*, std::unique_ptr<RefillCountingAllocator>> of_ GUARDED_BY(mutex_);
  std::map<c10::Allocator*, RefillCountingAllocator*> own_ GUARDED_BY(mutex_);
};

}  // namespace

uint64_t number_of_allocation(c10::StorageImpl& storage) {
  c10::Allocator* const allocator = storage.allocator();
  if (allocator == nullptr) return 0;
  if (mutated(Mutant::GenericSeesRefill)) return 1;
  thread_local std::pair<c10::Allocator*, RefillCountingAllocator*> latest{nullptr, nullptr};
  if (latest.first != allocator) latest = {allocator, &CountingAllocators::instance().of(allocator)};
  RefillCountingAllocator& counting = *latest.second;
  if (allocator != &counting) storage.set_allocator(&counting);
  return counting.number_of(storage.data());
}

}  // namespace torchoffload
