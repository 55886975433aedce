// StorageSet: storages marked once and recognised again, for as long as they live.
// Ownership:     weak. An entry keeps the StorageImpl's address from being reused, not its bytes.
// Thread safety: needs the GIL.
#pragma once

#include <c10/core/Storage.h>
#include <c10/util/flat_hash_map.h>
#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <utility>

namespace torchoffload {

class StorageSet {
 public:
  using Weak = c10::weak_intrusive_ptr<c10::StorageImpl>;

  void insert(const c10::Storage& storage) { insert(storage.getWeakStorageImpl()); }
  void insert(const Weak& storage) {
    const c10::StorageImpl* const address = storage._unsafe_get_target();
    if (contains(address)) return;
    if (entries_.size() >= prune_at_) prune();
    entries_.emplace(address, storage);
  }

  bool contains(const c10::StorageImpl* storage) const { return entries_.find(storage) != entries_.end(); }

 private:
  // Flat, since several are looked into at each save, and what a step did before has taken the caches.
  using Entries = ska::flat_hash_map<const c10::StorageImpl*, Weak>;

  // Forgets the storages that are gone, each time the set has doubled.
  void prune() {
    Entries alive;
    for (auto& entry : entries_) {
      if (!entry.second.expired()) alive.emplace(entry.first, std::move(entry.second));
    }
    entries_.swap(alive);
    prune_at_ = 2 * entries_.size() + kSmallest;
  }

  static constexpr size_t kSmallest = 64;
  size_t prune_at_ = kSmallest;
  Entries entries_;
};

}  // namespace torchoffload
