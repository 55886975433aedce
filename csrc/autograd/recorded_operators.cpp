#include "autograd/recorded_operators.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/DispatchKeySet.h>

#include <algorithm>

#include "core/mutant.h"
#include "engine/operation.h"
#include "engine/version_counter.h"
#include "system/mutex.h"

namespace torchoffload {

bool VersionMark::is_of(const c10::VariableVersion& other) const {
  return VersionRef(&version_).address() == VersionRef(&other).address();
}

void DeleteWithGil::operator()(Saved* saved) const {
  if (Operation::is_shut_down()) return;  // leaked
  const WithGil with_gil;
  delete saved;
}

bool KeptValue::has_changed() const {
  return std::ranges::any_of(versions, [](const VersionMark& each) { return each.has_changed(); });
}

const c10::Storage* RecordedStorage::copy_of(Epoch wanted) const {
  for (const auto& [of, copy] : copies) {
    if (of == wanted) return &copy;
  }
  return nullptr;
}

bool RecordedOperators::is_held(StorageNumber number, Epoch epoch) const { return storages[number].pinned <= epoch; }

bool RecordedOperators::is_kept(StorageNumber number, Epoch epoch) const {
  const KeptValue& kept = storages[number].kept;
  return kept.is_there() && kept.epoch == epoch && (!kept.has_changed() || mutated(Mutant::KeptValueChecked));
}

c10::Storage RecordedOperators::held(StorageNumber number, Epoch epoch) const {
  const RecordedStorage& storage = storages[number];
  if (storage.pinned > epoch) return storage.kept.storage;
  const MutexLock lock(held_mutex());
  if (const c10::Storage* const copy = storage.copy_of(epoch)) return *copy;
  TORCH_INTERNAL_ASSERT(epoch == storage.epoch, "a value that is held has no copy");
  const void* const address = storage.strong.unsafeGetStorageImpl();
  const bool has_changed = std::ranges::any_of(storage.versions, [](const auto& each) { return each.has_changed(); });
  if (has_changed && !mutated(Mutant::ForeignVersionChecked))
    throw ValueGone("was written to after the forward of a block that is computed again", address);
  if (storage.strong && storage.strong.nbytes() < storage.nbytes)
    throw ValueGone("lost its memory after the forward of a block that is computed again", address);
  return storage.strong;
}

Saved* RecordedOperators::packed(StorageNumber number, Epoch epoch) const {
  const RecordedStorage& storage = storages[number];
  if (storage.pinned > epoch) return storage.kept.packed.get();
  if (storage.copy_of(epoch) != nullptr) return nullptr;
  if (storage.packed == nullptr) return nullptr;
  const bool has_changed = std::ranges::any_of(storage.versions, [](const auto& each) { return each.has_changed(); });
  if (has_changed) throw ValueGone("was written to after the forward of a block that is computed again", nullptr);
  return storage.packed.get();
}

Mutex& held_mutex() {
  static auto* const leaked = new Mutex;
  return *leaked;
}

at::Tensor bytes_of(const c10::Storage& storage) {
  const BelowModes below_modes;
  at::Tensor bytes = at::empty({0}, at::TensorOptions().dtype(at::kByte).device(storage.device()));
  bytes.unsafeGetTensorImpl()->set_storage_keep_dtype(storage);
  bytes.unsafeGetTensorImpl()->set_sizes_contiguous({static_cast<int64_t>(storage.nbytes())});
  return bytes;
}

c10::Storage copied(const c10::Storage& storage) {
  const BelowModes below_modes;
  const at::Tensor bytes = bytes_of(storage);
  at::Tensor copy = at::empty_like(bytes);
  copy.copy_(bytes);
  return copy.storage();
}

namespace {

c10::DispatchKeySet keys_above_kernels() {
  return c10::autograd_dispatch_keyset | c10::autocast_dispatch_keyset |
         c10::DispatchKeySet({c10::DispatchKey::ADInplaceOrView, c10::DispatchKey::Python,
                              c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::PythonDispatcher});
}

}  // namespace

BelowModes::BelowModes() : guard_(keys_above_kernels()) {}

}  // namespace torchoffload
