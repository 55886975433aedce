// StorageSet: storages marked once and recognised again, for as long as they live.
// Ownership:     weak. An entry keeps the StorageImpl's address from being reused, not its bytes.
// Thread safety: needs the GIL.
#pragma once

#include <c10/core/Storage.h>
#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <unordered_map>

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

  bool contains(const c10::StorageImpl* storage) const { return entries_.contains(storage); }

 private:
  // Forgets the storages that are gone, each time the set has doubled.
  void prune() {
    std::erase_if(entries_, [](const auto& entry) { return entry.second.expired(); });
    prune_at_ = 2 * entries_.size() + kSmallest;
  }

  static constexpr size_t kSmallest = 64;
  size_t prune_at_ = kSmallest;
  std::unordered_map<const c10::StorageImpl*, Weak> entries_;
};

}  // namespace torchoffload
