// SavedWrapper: a saved wrapper subclass (DTensor, jagged nested tensor, quantised weight, ...): its inner tensors are
// saved one by one, and unpack makes the wrapper anew around them.
// Ownership:     a Saved for each inner tensor that may move; strong references to objects that must come back as
//                themselves, and to the metadata of __tensor_flatten__.
// Thread safety: needs the GIL; packing and unpacking run the subclass's own Python.
// Not handled:   subclasses without __tensor_flatten__ and __tensor_unflatten__: they are kept.
//
// Source: the protocol of torch.utils._python_dispatch, is_traceable_wrapper_subclass.
#pragma once

#include <Python.h>
#include <torch/csrc/utils/object_ptr.h>

#include <functional>
#include <memory>
#include <vector>

#include "autograd/saved_tensor.h"
#include "system/gil.h"

namespace torchoffload {

class SavedWrapper final : public Saved {
 public:
  // Saves an inner tensor, which may be a wrapper itself.
  using PackInner = std::function<std::unique_ptr<Saved>(PyObject* inner)>;

  // Has the object's type both methods of the protocol?
  static bool is_wrapper(PyObject* object);

  // Calls `visit` with each tensor that is no wrapper inside `object`, which may be such a tensor itself. Throws
  // python_error.
  static void visit_inner_tensors(PyObject* object, const std::function<void(const at::Tensor&)>& visit);

  // Throws python_error if the subclass's code raises.
  SavedWrapper(PyObject* object, const PackInner& pack_inner);

  void prepare() override REQUIRES(gil);
  at::Tensor unpack(Versions versions) override REQUIRES(gil);

 private:
  struct Inner {
    THPObjectPtr name;
    std::unique_ptr<Saved> saved;  // one of the two
    THPObjectPtr object;
  };

  VersionCheck version_check_;
  THPObjectPtr type_;
  THPObjectPtr metadata_;
  THPObjectPtr outer_size_;
  THPObjectPtr outer_stride_;
  std::vector<Inner> inners_;
};

}  // namespace torchoffload
