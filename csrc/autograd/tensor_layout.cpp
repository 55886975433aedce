#include "autograd/tensor_layout.h"

#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/TensorImpl.h>

#include <optional>
#include <utility>

#include "autograd/graph_tokens.h"
#include "core/mutant.h"

namespace torchoffload {

namespace {

// The dispatch keys that a tensor without behaviour of its own may carry. Anything else (Python, functorch, sparse,
// ...) is kept.
bool has_plain_keys(c10::DispatchKeySet keys) {
  static const c10::DispatchKeySet allowed =
      c10::DispatchKeySet({c10::DispatchKey::Dense, c10::DispatchKey::ADInplaceOrView, c10::DispatchKey::Conjugate,
                           c10::DispatchKey::Negative, c10::DispatchKey::AutogradFunctionality}) |
      c10::autocast_dispatch_keyset | c10::DispatchKeySet(c10::DispatchKeySet::RAW, c10::full_backend_mask);
  return keys.isSupersetOf(c10::DispatchKeySet(c10::DispatchKey::Dense)) && allowed.isSupersetOf(keys);
}

}  // namespace

TensorLayout::TensorLayout(const at::Tensor& tensor)
    : key_set_(tensor.key_set()), dtype_(tensor.dtype()), storage_offset_(tensor.storage_offset()) {
  sizes_and_strides_.set_sizes(tensor.sizes());
  sizes_and_strides_.set_strides(tensor.strides());
}

bool TensorLayout::is_plain(const at::Tensor& tensor) {
  return is_strided(tensor) && !tensor.is_inference() && !tensor.unsafeGetTensorImpl()->is_wrapped_number();
}

bool TensorLayout::is_strided(const at::Tensor& tensor) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  return has_plain_keys(impl.key_set()) && impl.has_storage() && !impl.has_symbolic_sizes_strides() &&
         impl.layout() == c10::kStrided && impl.storage().unsafeGetStorageImpl() != nullptr && !is_token(tensor);
}

at::Tensor TensorLayout::on(c10::Storage storage) const {
  auto impl = c10::make_intrusive<c10::TensorImpl>(std::move(storage), key_set_, dtype_);
  impl->set_storage_offset(storage_offset_);
  impl->set_sizes_and_strides(sizes_and_strides_.sizes_arrayref(), sizes_and_strides_.strides_arrayref());
  return at::Tensor(std::move(impl));
}

at::Tensor TensorLayout::bits_on(c10::Storage storage) const {
  c10::SmallVector<int64_t, 6> sizes(this->sizes().begin(), this->sizes().end());
  c10::SmallVector<int64_t, 6> strides(sizes_and_strides_.strides_arrayref().begin(),
                                       sizes_and_strides_.strides_arrayref().end());
  int64_t offset = storage_offset_;
  at::ScalarType type = itemsize() == 1   ? at::kByte
                        : itemsize() == 2 ? at::kShort
                        : itemsize() == 4 ? at::kInt
                                          : at::kLong;
  if (itemsize() > sizeof(int64_t)) {
    const auto parts = static_cast<int64_t>(itemsize() / sizeof(int64_t));
    for (int64_t& stride : strides) stride *= parts;
    offset *= parts;
    sizes.push_back(parts);
    strides.push_back(1);
  }
  const c10::DispatchKeySet keys(c10::computeDispatchKey(type, c10::kStrided, storage.device()));
  auto impl = c10::make_intrusive<c10::TensorImpl>(std::move(storage), keys, c10::scalarTypeToTypeMeta(type));
  impl->set_storage_offset(offset);
  impl->set_sizes_and_strides(sizes, strides);
  return at::Tensor(std::move(impl));
}

at::Tensor TensorLayout::zeros(c10::Device device) const {
  return at::zeros(sizes(), at::TensorOptions().dtype(dtype_).device(device));
}

Span TensorLayout::span() const {
  uint64_t last = 0;
  for (size_t dim = 0; dim < sizes_and_strides_.size(); ++dim) {
    const int64_t size = sizes_and_strides_.size_at_unchecked(dim);
    if (size == 0) return {};
    last += static_cast<uint64_t>(size - 1) * static_cast<uint64_t>(sizes_and_strides_.stride_at_unchecked(dim));
  }
  const uint64_t begin = static_cast<uint64_t>(storage_offset_) * itemsize();
  return {begin, begin + (last + 1) * itemsize()};
}

at::Tensor TensorLayout::build(c10::Storage storage, uint64_t base_bytes, const c10::VariableVersion& version) const {
  // The saved tensor was no inference tensor, so the result is none in any mode.
  std::optional<c10::InferenceMode> normal_mode;
  if (c10::InferenceMode::is_enabled()) normal_mode.emplace(false);
  auto impl = c10::make_intrusive<c10::TensorImpl>(std::move(storage), key_set_, dtype_);
  impl->set_version_counter(version);
  impl->set_storage_offset(storage_offset_ - static_cast<int64_t>(base_bytes / itemsize()));
  if (mutated(Mutant::StridesRestored)) {
    impl->set_sizes_contiguous(sizes_and_strides_.sizes_arrayref());
  } else {
    impl->set_sizes_and_strides(sizes_and_strides_.sizes_arrayref(), sizes_and_strides_.strides_arrayref());
  }
  return at::Tensor(std::move(impl));
}

}  // namespace torchoffload
