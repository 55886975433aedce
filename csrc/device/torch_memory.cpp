#include "device/torch_memory.h"

#include <c10/util/flat_hash_map.h>
#include <c10/util/intrusive_ptr.h>

#include <new>
#include <utility>
#include <vector>

#include "core/mutant.h"

namespace torchoffload {

namespace {

using Strong = c10::intrusive_ptr<c10::StorageImpl>;
using Weak = c10::weak_intrusive_ptr<c10::StorageImpl>;

// Calls `use` with the weak reference that `storage` stands for. The reference count is unchanged afterwards.
template <typename Use>
auto with_weak(c10::StorageImpl* storage, Use use) {
  Weak weak = Weak::reclaim(storage);
  auto result = use(static_cast<const Weak&>(weak));
  (void)weak.release();
  return result;
}

constinit thread_local PutOffDrops* in_force = nullptr;

// If there is no memory for the list, the share is leaked, which is safer than to run Python code here.
void put_off(std::vector<c10::StorageImpl*>& list, c10::StorageImpl* share) noexcept {
  try {
    list.push_back(share);
  } catch (const std::bad_alloc&) {
  }
}

void delete_allocation(void* context) { delete static_cast<c10::DataPtr*>(context); }

void drop_share(c10::StorageImpl* share) { (void)Strong::reclaim(share); }
void drop_weak_share(c10::StorageImpl* share) { (void)Weak::reclaim(share); }

// The list keeps its memory for the next operation.
template <typename Drop>
void drop_all(std::vector<c10::StorageImpl*>& list, Drop drop) {
  std::vector<c10::StorageImpl*> taken = std::exchange(list, {});
  for (c10::StorageImpl* const share : taken) drop(share);
  taken.clear();
  if (list.empty()) list.swap(taken);
}

}  // namespace

void PutOffDrops::drop() {
  drop_all(shares_, drop_share);
  drop_all(weak_shares_, drop_weak_share);
}

void PutOffDrops::leak() {
  shares_.clear();
  weak_shares_.clear();
}

PutOffDrops* PutOffDrops::put_in_force(PutOffDrops* drops) { return std::exchange(in_force, drops); }

const std::byte* MemoryRef::data() const { return static_cast<const std::byte*>(storage_->data()); }

uint64_t MemoryRef::nbytes() const { return storage_->nbytes(); }

void Memory::share() { (void)Strong::reclaim_copy(memory_.storage()).release(); }

void Memory::drop() {
  if (in_force == nullptr || mutated(Mutant::DropsArePutOff)) return drop_share(memory_.storage());
  put_off(in_force->shares_, memory_.storage());
}

WeakMemory::WeakMemory(MemoryRef memory) {
  if (!memory) return;
  Strong borrowed = Strong::reclaim(memory.storage());
  storage_ = Weak(borrowed).release();
  (void)borrowed.release();
}

WeakMemory::WeakMemory(const WeakMemory& other) {
  if (other.storage_ == nullptr) return;
  storage_ = with_weak(other.storage_, [](const Weak& weak) { return Weak(weak).release(); });
}

void WeakMemory::drop() {
  if (in_force == nullptr) return drop_weak_share(storage_);
  put_off(in_force->weak_shares_, storage_);
}

size_t WeakMemory::share_count() const {
  return with_weak(storage_, [](const Weak& weak) { return static_cast<size_t>(weak.use_count()); });
}

Memory WeakMemory::lock() const {
  return Memory::of_share(with_weak(storage_, [](const Weak& weak) { return weak.lock().release(); }));
}

c10::DataPtr shifted(c10::DataPtr allocation, uint64_t shift) {
  auto* const first = static_cast<std::byte*>(allocation.get()) + shift;
  const c10::Device device = allocation.device();
  return {first, new c10::DataPtr(std::move(allocation)), &delete_allocation, device};
}

const c10::DataPtr& whole_allocation(MemoryRef memory) {
  const c10::DataPtr& data = storage_impl(memory).data_ptr();
  const auto* const whole = data.cast_context<c10::DataPtr>(&delete_allocation);
  return whole != nullptr ? *whole : data;
}

Memory make_memory(c10::DataPtr data, uint64_t nbytes) {
  const c10::DeviceType device = data.device().type();
  return memory_from(c10::Storage(c10::Storage::use_byte_size_t(), nbytes, std::move(data), c10::GetAllocator(device),
                                  /*resizable=*/true));
}

// ---- sets ----

struct MemorySet::Entries {
  static constexpr size_t kSmallest = 64;

  // A flat map: each save looks into several of these sets, and finds little of them in the CPU's caches.
  using Map = ska::flat_hash_map<const c10::StorageImpl*, WeakMemory>;

  // Forgets freed storages. Called each time that the set has doubled.
  void prune() {
    Map alive;
    for (auto& entry : map) {
      if (entry.second.share_count() > 0) alive.emplace(entry.first, std::move(entry.second));
    }
    map.swap(alive);
    prune_at = 2 * map.size() + kSmallest;
  }

  Map map;
  size_t prune_at = kSmallest;
};

MemorySet::MemorySet() : entries_(std::make_unique<Entries>()) {}
MemorySet& MemorySet::operator=(MemorySet&& other) noexcept = default;
MemorySet::~MemorySet() = default;

void MemorySet::add(WeakMemory memory) {
  const c10::StorageImpl* const storage = memory.storage();
  if (entries_->map.size() >= entries_->prune_at) entries_->prune();
  entries_->map.emplace(storage, std::move(memory));
}

bool MemorySet::contains(const c10::StorageImpl* storage) const {
  return entries_->map.find(storage) != entries_->map.end();
}

}  // namespace torchoffload
