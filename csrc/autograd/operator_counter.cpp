#include "autograd/operator_counter.h"

#include <torch/csrc/Exceptions.h>

#include <memory>

#include "autograd/interpreter_delegate.h"
#include "autograd/operator_mode.h"

namespace torchoffload {

namespace {

PyObject* counting_listener(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  return to_python(std::make_shared<OperatorCounter>());
  END_HANDLE_TH_ERRORS
}

PyObject* counted(PyObject*, PyObject* capsule) {
  HANDLE_TH_ERRORS
  const auto* const counter = dynamic_cast<const OperatorCounter*>(listener_of(capsule).get());
  TORCH_CHECK_TYPE(counter != nullptr, "torchoffload: a listener that counts is expected");
  return Py_BuildValue("KK", static_cast<unsigned long long>(counter->operators()),
                       static_cast<unsigned long long>(counter->regions()));
  END_HANDLE_TH_ERRORS
}

PyObject* install(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  install_interpreter_delegate();
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* remove(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  remove_interpreter_delegate();
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* by_python(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  return PyLong_FromUnsignedLongLong(operators_by_python());
  END_HANDLE_TH_ERRORS
}

PyObject* opaque(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject* function = nullptr;
  const char* name = nullptr;
  return PyArg_ParseTuple(args, "Os", &function, &name) != 0 ? opaque_method(function, name) : nullptr;
  END_HANDLE_TH_ERRORS
}

PyMethodDef functions[] = {
    {"counting_listener", counting_listener, METH_NOARGS, "Returns the capsule of a listener that counts."},
    {"counted", counted, METH_O, "counted(listener) -> the operators and the opaque regions that it was shown."},
    {"install_interpreter_delegate", install, METH_NOARGS, "Operators come to listeners without Python."},
    {"remove_interpreter_delegate", remove, METH_NOARGS, "Operators come to listeners by way of Python."},
    {"operators_by_python", by_python, METH_NOARGS, "How many operators came by way of Python."},
    {"opaque_method", opaque, METH_VARARGS, "opaque_method(function, name) -> a method that is an opaque region."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

void OperatorCounter::call(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  operators_.fetch_add(1, std::memory_order_relaxed);
  op.callBoxed(stack);
}

void OperatorCounter::opaque(const char* /*name*/, c10::ArrayRef<at::Tensor> /*inputs*/, Region region) {
  regions_.fetch_add(1, std::memory_order_relaxed);
  static_cast<void>(region());
}

bool add_operator_functions(PyObject* module) {
  return add_operator_mode(module) && PyModule_AddFunctions(module, functions) == 0;
}

}  // namespace torchoffload
