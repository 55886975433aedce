#include "autograd/operator_arguments.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/object_ptr.h>

#include <string>
#include <unordered_map>
#include <utility>

#include "autograd/python_calls.h"

namespace torchoffload {

namespace {

// Leaked on purpose, with the OpOverloads, whose addresses stay theirs as long as they are held.
std::unordered_map<PyObject*, std::optional<c10::OperatorHandle>>& known_operators() {
  static auto* const leaked = new std::unordered_map<PyObject*, std::optional<c10::OperatorHandle>>;
  return *leaked;
}

PyObject* overload_class() {
  static PyObject* known = nullptr;
  if (known == nullptr) {
    THPObjectPtr module(or_throw(PyImport_ImportModule("torch._ops")));
    known = or_throw(PyObject_GetAttrString(module.get(), "OpOverload"));
  }
  return known;
}

std::string text_of(PyObject* object, const char* attribute) {
  THPObjectPtr text(or_throw(PyObject_GetAttrString(object, attribute)));
  const char* const characters = PyUnicode_AsUTF8(text.get());
  if (characters == nullptr) throw python_error();
  return characters;
}

}  // namespace

std::optional<c10::OperatorHandle> operator_of(PyObject* function) {
  if (reinterpret_cast<PyObject*>(Py_TYPE(function)) != overload_class()) return std::nullopt;
  auto& known = known_operators();
  if (const auto found = known.find(function); found != known.end()) return found->second;
  THPObjectPtr schema(or_throw(PyObject_GetAttrString(function, "_schema")));
  const c10::OperatorName name{text_of(schema.get(), "name"), text_of(schema.get(), "overload_name")};
  return known.emplace(Py_NewRef(function), c10::Dispatcher::singleton().findSchema(name)).first->second;
}

bool fill_stack(const c10::FunctionSchema& schema, PyObject* args, PyObject* kwargs, torch::jit::Stack& stack) {
  const auto& arguments = schema.arguments();
  const auto positional = static_cast<size_t>(PyTuple_GET_SIZE(args));
  size_t used = 0;
  const torch::jit::ToIValueAllowNumbersAsTensors allow_numbers(true);  // as PyTorch hands over the 2 of `x * 2`
  stack.reserve(arguments.size());
  for (size_t place = 0; place < arguments.size(); ++place) {
    const c10::Argument& argument = arguments[place];
    PyObject* given = place < positional ? PyTuple_GET_ITEM(args, static_cast<Py_ssize_t>(place)) : nullptr;
    if (given == nullptr && kwargs != nullptr) given = PyDict_GetItemString(kwargs, argument.name().c_str());
    if (given == nullptr) {
      if (!argument.default_value()) return false;
      stack.push_back(*argument.default_value());
      continue;
    }
    ++used;
    try {
      stack.push_back(torch::jit::toIValue(given, argument.real_type(), argument.N()));
    } catch (const std::exception&) {  // it is of another type
      PyErr_Clear();
      return false;
    }
  }
  return used == positional + static_cast<size_t>(kwargs != nullptr ? PyDict_GET_SIZE(kwargs) : 0);
}

PyObject* results_in(torch::jit::Stack&& stack) {
  if (stack.empty()) return Py_NewRef(Py_None);
  if (stack.size() == 1) return torch::jit::toPyObject(std::move(stack.front())).release().ptr();
  THPObjectPtr results(PyTuple_New(static_cast<Py_ssize_t>(stack.size())));
  if (!results) return nullptr;
  for (size_t place = 0; place < stack.size(); ++place) {
    PyTuple_SET_ITEM(results.get(), static_cast<Py_ssize_t>(place),
                     torch::jit::toPyObject(std::move(stack[place])).release().ptr());
  }
  return results.release();
}

void add_tensors_in(PyObject* value, std::vector<at::Tensor>& tensors) {
  if (THPVariable_Check(value)) {
    tensors.push_back(THPVariable_Unpack(value));
  } else if (PyTuple_Check(value) || PyList_Check(value)) {
    for (Py_ssize_t place = 0; place < PySequence_Fast_GET_SIZE(value); ++place)
      add_tensors_in(PySequence_Fast_GET_ITEM(value, place), tensors);
  } else if (PyDict_Check(value)) {
    PyObject *key = nullptr, *item = nullptr;
    for (Py_ssize_t place = 0; PyDict_Next(value, &place, &key, &item) != 0;) add_tensors_in(item, tensors);
  }
}

std::vector<at::Tensor> tensors_in(PyObject* value) {
  std::vector<at::Tensor> tensors;
  add_tensors_in(value, tensors);
  return tensors;
}

}  // namespace torchoffload
