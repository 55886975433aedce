#include "autograd/input_copies.h"

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/variable.h>

#include <unordered_map>
#include <utility>

#include "autograd/tensor_layout.h"

namespace torchoffload {

namespace {

struct KnownCopy {
  c10::weak_intrusive_ptr<c10::StorageImpl> original;
  c10::weak_intrusive_ptr<c10::StorageImpl> copy;
  VersionMark original_version;
  c10::VariableVersion version;  // of the copy

  bool is_of(const VersionMark& now) const {
    return !original.expired() && original_version.is_of(now.version()) && !original_version.has_changed();
  }
};

// By the addresses of the originals.
std::unordered_map<const void*, KnownCopy>& known_copies() REQUIRES(gil) {
  static auto* const leaked = new std::unordered_map<const void*, KnownCopy>;
  return *leaked;
}

}  // namespace

InputCopy copy_of_input(const c10::Storage& storage, const VersionMark& version) {
  std::erase_if(known_copies(), [](const auto& each) { return each.second.copy.expired(); });
  const void* const address = storage.unsafeGetStorageImpl();
  if (const auto found = known_copies().find(address); found != known_copies().end() && found->second.is_of(version)) {
    if (c10::intrusive_ptr<c10::StorageImpl> copy = found->second.copy.lock())
      return {c10::Storage(std::move(copy)), found->second.version};
  }
  c10::Storage copy = copied(storage);
  const c10::VariableVersion of_copy(/*version=*/0);
  known_copies().insert_or_assign(address,
                                  KnownCopy{storage.getWeakStorageImpl(), copy.getWeakStorageImpl(), version, of_copy});
  return {std::move(copy), of_copy};
}

CopiedInput::CopiedInput(const at::Tensor& original) : original_(torch::autograd::impl::version_counter(original)) {
  const InputCopy copy = copy_of_input(original.storage(), original_);
  tensor_ = TensorLayout(original).build(copy.storage, 0, copy.version);
}

}  // namespace torchoffload
