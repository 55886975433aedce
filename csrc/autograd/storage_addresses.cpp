#include "autograd/storage_addresses.h"

#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/Layout.h>
#include <torch/csrc/MemoryFormat.h>
#include <torch/csrc/Stream.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>

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

}  // namespace

Found find_storages(PyObject* value, std::vector<void*>& addresses) {
  // The class and its subclass Parameter; others may be wrappers around tensors.
  if (THPVariable_CheckExact(value)) return find_storage(value, addresses);
  if (PyTuple_Check(value) || PyList_CheckExact(value)) {
    const Py_ssize_t count = PySequence_Fast_GET_SIZE(value);
    for (Py_ssize_t i = 0; i < count; ++i) {
      if (find_storages(PySequence_Fast_GET_ITEM(value, i), addresses) == Found::Unknown) return Found::Unknown;
    }
    return Found::All;
  }
  if (PyDict_CheckExact(value)) {
    PyObject *key = nullptr, *item = nullptr;
    for (Py_ssize_t position = 0; PyDict_Next(value, &position, &key, &item);) {
      if (find_storages(item, addresses) == Found::Unknown) return Found::Unknown;
    }
    return Found::All;
  }
  return has_no_tensors(value) ? Found::All : Found::Unknown;
}

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
