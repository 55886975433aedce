#include "autograd/storage_addresses.h"

#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/Layout.h>
#include <torch/csrc/MemoryFormat.h>
#include <torch/csrc/Stream.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>

#include <algorithm>
#include <array>
#include <unordered_set>

namespace torchoffload {

namespace {

bool has_no_tensors(PyObject* object) {
  return object == Py_None || PyLong_Check(object) || PyFloat_Check(object) || PyUnicode_Check(object) ||
         PyComplex_Check(object) || THPDtype_Check(object) || THPDevice_Check(object) || THPLayout_Check(object) ||
         THPMemoryFormat_Check(object) || THPGenerator_Check(object);
}

Found find_storage(PyObject* object, std::vector<void*>& addresses) {
  const at::Tensor& tensor = THPVariable_Unpack(object);
  if (tensor.layout() != at::kStrided || tensor.is_quantized() || tensor.is_nested()) return Found::All;
  if (!tensor.has_storage()) return Found::Unknown;
  addresses.push_back(tensor.storage().unsafeGetStorageImpl());
  return Found::All;
}

// Goes through a nest without recursion, since it may be deeper than the stack, and into each container once, since it
// may contain itself. No Python code runs meanwhile, so references may be borrowed.
class Nest {
 public:
  explicit Nest(std::vector<void*>& addresses) : addresses_(addresses) {}

  Found find(PyObject* value) {
    if (look_at(value) == Found::Unknown) return Found::Unknown;
    while (!left_.empty()) {
      PyObject* const container = left_.back();
      left_.pop_back();
      if (look_into(container) == Found::Unknown) return Found::Unknown;
    }
    return Found::All;
  }

 private:
  Found look_at(PyObject* value) {
    // The class and its subclass Parameter; others may be wrappers around tensors.
    if (THPVariable_CheckExact(value)) return find_storage(value, addresses_);
    if (PyTuple_Check(value) || PyList_CheckExact(value) || PyDict_CheckExact(value)) {
      if (is_seen(value)) return Found::All;
      left_.push_back(value);
      return Found::All;
    }
    return has_no_tensors(value) ? Found::All : Found::Unknown;
  }

  Found look_into(PyObject* container) {
    if (PyDict_CheckExact(container)) {
      PyObject *key = nullptr, *item = nullptr;
      for (Py_ssize_t position = 0; PyDict_Next(container, &position, &key, &item);) {
        if (look_at(item) == Found::Unknown) return Found::Unknown;
      }
      return Found::All;
    }
    const Py_ssize_t count = PySequence_Fast_GET_SIZE(container);
    for (Py_ssize_t i = 0; i < count; ++i) {
      if (look_at(PySequence_Fast_GET_ITEM(container, i)) == Found::Unknown) return Found::Unknown;
    }
    return Found::All;
  }

  // Notes the container. The arguments of an operator have few: those take no memory from the heap.
  bool is_seen(PyObject* container) {
    const auto end = first_.begin() + static_cast<ptrdiff_t>(first_count_);
    if (std::find(first_.begin(), end, container) != end) return true;
    if (first_count_ == first_.size()) return !others_.insert(container).second;
    first_[first_count_++] = container;
    return false;
  }

  std::vector<void*>& addresses_;
  std::vector<PyObject*> left_;
  std::array<PyObject*, 8> first_{};
  size_t first_count_ = 0;
  std::unordered_set<PyObject*> others_;
};

}  // namespace

Found find_storages(PyObject* value, std::vector<void*>& addresses) { return Nest(addresses).find(value); }

PyObject* storage_addresses(PyObject* value) {
  std::vector<void*> found;
  if (find_storages(value, found) == Found::Unknown) Py_RETURN_NONE;
  THPObjectPtr addresses(PySet_New(nullptr));
  if (!addresses) return nullptr;
  for (void* each : found) {
    THPObjectPtr address(PyLong_FromVoidPtr(each));
    if (!address || PySet_Add(addresses.get(), address.get()) != 0) return nullptr;
  }
  return addresses.release();
}

}  // namespace torchoffload
