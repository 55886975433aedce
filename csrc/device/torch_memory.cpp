#include "device/torch_memory.h"

#include <c10/util/flat_hash_map.h>
#include <c10/util/intrusive_ptr.h>

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

}  // namespace

const std::byte* MemoryRef::data() const { return static_cast<const std::byte*>(storage_->data()); }

uint64_t MemoryRef::nbytes() const { return storage_->nbytes(); }

void Memory::share() { (void)Strong::reclaim_copy(memory_.storage()).release(); }

void Memory::give_up() { (void)Strong::reclaim(memory_.storage()); }

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

void WeakMemory::give_up() { (void)Weak::reclaim(storage_); }

size_t WeakMemory::share_count() const {
  return with_weak(storage_, [](const Weak& weak) { return static_cast<size_t>(weak.use_count()); });
}

Memory WeakMemory::lock() const {
  return Memory::of_share(with_weak(storage_, [](const Weak& weak) { return weak.lock().release(); }));
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

  // Forgets the storages that are gone. Called each time that the set has doubled.
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
