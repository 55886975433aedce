#include "autograd/saved_wrapper.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

namespace torchoffload {

namespace {

// A new reference that is not null.
THPObjectPtr checked(PyObject* result) {
  if (result == nullptr) throw python_error();
  return THPObjectPtr(result);
}

THPObjectPtr borrow(PyObject* object) { return THPObjectPtr(Py_NewRef(object)); }

// A collective's result may still be on its way, on a stream that nobody else knows: its bytes are there after this.
void wait_for_collective(PyObject* object) {
  if (PyObject_HasAttrString(object, "trigger_wait") == 0) return;
  checked(PyObject_CallMethod(object, "trigger_wait", nullptr));
}

}  // namespace

bool SavedWrapper::is_wrapper(PyObject* object) {
  auto* const type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  return PyObject_HasAttrString(type, "__tensor_flatten__") != 0 &&
         PyObject_HasAttrString(type, "__tensor_unflatten__") != 0;
}

void SavedWrapper::visit_inner_tensors(PyObject* object, const std::function<void(const at::Tensor&)>& visit) {
  if (!is_wrapper(object)) {
    visit(THPVariable_Unpack(object));
    return;
  }
  THPObjectPtr flat = checked(PyObject_CallMethod(object, "__tensor_flatten__", nullptr));
  THPObjectPtr names = checked(PySequence_GetItem(flat.get(), 0));
  THPObjectPtr iterator = checked(PyObject_GetIter(names.get()));
  while (THPObjectPtr name = THPObjectPtr(PyIter_Next(iterator.get()))) {
    THPObjectPtr inner = checked(PyObject_GetAttr(object, name.get()));
    if (THPVariable_Check(inner.get())) visit_inner_tensors(inner.get(), visit);
  }
  if (PyErr_Occurred() != nullptr) throw python_error();
}

SavedWrapper::SavedWrapper(PyObject* object, const PackInner& pack_inner)
    : version_check_(THPVariable_Unpack(object)), type_(borrow(reinterpret_cast<PyObject*>(Py_TYPE(object)))) {
  wait_for_collective(object);
  const bool is_symbolic = THPVariable_Unpack(object).unsafeGetTensorImpl()->has_symbolic_sizes_strides();
  THPObjectPtr flat = checked(PyObject_CallMethod(object, "__tensor_flatten__", nullptr));
  THPObjectPtr names = checked(PySequence_GetItem(flat.get(), 0));
  metadata_ = checked(PySequence_GetItem(flat.get(), 1));
  outer_size_ = checked(PyObject_GetAttrString(object, "shape"));
  outer_stride_ = checked(PyObject_CallMethod(object, "stride", nullptr));
  THPObjectPtr iterator = checked(PyObject_GetIter(names.get()));
  while (THPObjectPtr name = THPObjectPtr(PyIter_Next(iterator.get()))) {
    THPObjectPtr inner = checked(PyObject_GetAttr(object, name.get()));
    const bool is_tensor = THPVariable_Check(inner.get());
    // A symbolic size is tied to the very tensor that it was read from, such as a nested tensor's offsets.
    const bool names_a_size = is_tensor && is_symbolic &&
                              c10::isIntegralType(THPVariable_Unpack(inner.get()).scalar_type(), /*includeBool=*/false);
    if (is_tensor && !names_a_size) {
      wait_for_collective(inner.get());
      inners_.push_back({std::move(name), pack_inner(inner.get()), THPObjectPtr()});
    } else {
      inners_.push_back({std::move(name), nullptr, std::move(inner)});
    }
  }
  if (PyErr_Occurred() != nullptr) throw python_error();
}

void SavedWrapper::prepare() {
  for (Inner& inner : inners_) {
    if (inner.saved) inner.saved->prepare();
  }
}

at::Tensor SavedWrapper::unpack(Versions versions) {
  if (versions == Versions::Check) version_check_.check([this]() REQUIRES(gil) { return unpack(Versions::Ignore); });
  const at::NoGradGuard no_grad;
  THPObjectPtr inner_tensors = checked(PyDict_New());
  for (Inner& inner : inners_) {
    THPObjectPtr value =
        inner.saved ? checked(THPVariable_Wrap(inner.saved->unpack(versions))) : borrow(inner.object.get());
    if (PyDict_SetItem(inner_tensors.get(), inner.name.get(), value.get()) != 0) throw python_error();
  }
  THPObjectPtr rebuilt = checked(PyObject_CallMethod(type_.get(), "__tensor_unflatten__", "OOOO", inner_tensors.get(),
                                                     metadata_.get(), outer_size_.get(), outer_stride_.get()));
  at::Tensor tensor = THPVariable_Unpack(rebuilt.get());
  if (tensor.requires_grad()) tensor = tensor.detach();
  torch::autograd::impl::set_version_counter(tensor, version_check_.version());
  return tensor;
}

}  // namespace torchoffload
