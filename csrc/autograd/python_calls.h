// Calls between C++ and Python: the GIL, and errors of Python's that go through C++.
// Ownership:     or_throw hands on its argument.
// Thread safety: WithoutGil is made with the GIL held, and gives it back to the thread that it took it from.
#pragma once

#include <Python.h>
#include <torch/csrc/Exceptions.h>

#include "engine/operation.h"
#include "system/gil.h"

namespace torchoffload {

// Others may run Python in its scope.
class SCOPED_CAPABILITY WithoutGil {
 public:
  WithoutGil() RELEASE(gil) : state_(PyEval_SaveThread()) {}
  ~WithoutGil() RELEASE() { take_gil_back(state_); }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

// Returns the result of a call of Python; throws if that is null.
inline PyObject* or_throw(PyObject* result) {
  if (result != nullptr) return result;
  python_error error;
  error.persist();
  throw error;
}

}  // namespace torchoffload
