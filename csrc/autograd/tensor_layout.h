// TensorLayout: the metadata by which unpack rebuilds a tensor on a record's bytes: dtype, sizes, strides, offset, conj
// and neg.
// Ownership:     values only; it holds no tensor.
// Thread safety: immutable after construction.
// Not handled:   tensors that is_plain() refuses (subclasses with a dispatch of their own, sparse, quantized, nested,
//                symbolic or named ones). They are kept.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/Storage.h>
#include <c10/core/impl/SizesAndStrides.h>

#include "core/types.h"

namespace torchoffload {

class TensorLayout {
 public:
  TensorLayout() = default;
  explicit TensorLayout(const at::Tensor& tensor);

  // A dense strided tensor of one storage that a layout describes wholly.
  static bool is_plain(const at::Tensor& tensor);

  // The same, but it may be an inference tensor, and it may stand for a number of the program.
  static bool is_strided(const at::Tensor& tensor);

  // The tensor on `storage`, whose first byte is that of the storage which the layout was taken of. It has a version
  // counter of its own.
  at::Tensor on(c10::Storage storage) const;
  // A tensor of the same sizes and type, full of zeros.
  at::Tensor zeros(c10::Device device) const;
  // Integers that have the bits of the tensor's elements.
  at::Tensor bits_on(c10::Storage storage) const;
  bool is_floating_point() const { return c10::isFloatingType(dtype()) || c10::isComplexType(dtype()); }

  // The addresses, in bytes from the storage's beginning, that the tensor's elements reach. Empty for no elements.
  Span span() const;

  // The tensor on `storage`, whose first byte stands at `base_bytes` of the storage that was packed.
  at::Tensor build(c10::Storage storage, uint64_t base_bytes, const c10::VariableVersion& version) const;

  uint64_t itemsize() const { return dtype_.itemsize(); }
  at::ScalarType dtype() const { return dtype_.toScalarType(); }
  c10::IntArrayRef sizes() const { return sizes_and_strides_.sizes_arrayref(); }
  c10::IntArrayRef strides() const { return sizes_and_strides_.strides_arrayref(); }

 private:
  c10::DispatchKeySet key_set_;
  caffe2::TypeMeta dtype_;
  int64_t storage_offset_ = 0;
  c10::impl::SizesAndStrides sizes_and_strides_;
};

}  // namespace torchoffload
