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

enum class Found : uint8_t { All, Unknown, Error };

bool has_no_tensors(PyObject* object) {
  return object == Py_None || PyLong_Check(object) || PyFloat_Check(object) || PyUnicode_Check(object) ||
         PyComplex_Check(object) || THPDtype_Check(object) || THPDevice_Check(object) || THPLayout_Check(object) ||
         THPMemoryFormat_Check(object) || THPGenerator_Check(object);
}

Found add_tensor(PyObject* object, PyObject* addresses) {
  const at::Tensor& tensor = THPVariable_Unpack(object);
  if (tensor.layout() != at::kStrided || tensor.is_quantized() || tensor.is_nested()) return Found::All;
  if (!tensor.has_storage()) return Found::Unknown;
  THPObjectPtr address(PyLong_FromVoidPtr(tensor.storage().unsafeGetStorageImpl()));
  if (!address || PySet_Add(addresses, address.get()) != 0) return Found::Error;
  return Found::All;
}

Found add_all(PyObject* value, PyObject* addresses) {
  // The class and its subclass Parameter; others may be wrappers around tensors.
  if (THPVariable_CheckExact(value)) return add_tensor(value, addresses);
  if (PyTuple_Check(value) || PyList_CheckExact(value)) {
    const Py_ssize_t count = PySequence_Fast_GET_SIZE(value);
    for (Py_ssize_t i = 0; i < count; ++i) {
      if (const Found found = add_all(PySequence_Fast_GET_ITEM(value, i), addresses); found != Found::All) return found;
    }
    return Found::All;
  }
  if (PyDict_CheckExact(value)) {
    PyObject *key = nullptr, *item = nullptr;
    for (Py_ssize_t position = 0; PyDict_Next(value, &position, &key, &item);) {
      if (const Found found = add_all(item, addresses); found != Found::All) return found;
    }
    return Found::All;
  }
  return has_no_tensors(value) ? Found::All : Found::Unknown;
}

}  // namespace

PyObject* storage_addresses(PyObject* value) {
  THPObjectPtr addresses(PySet_New(nullptr));
  if (!addresses) return nullptr;
  switch (add_all(value, addresses.get())) {
    case Found::All:
      return addresses.release();
    case Found::Unknown:
      Py_RETURN_NONE;
    case Found::Error:
      return nullptr;
  }
  return nullptr;
}

}  // namespace torchoffload
