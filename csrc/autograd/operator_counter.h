// OperatorCounter: the listener that runs and counts the operators that it is shown; and the functions by which Python
// uses the modes that show operators. It tells the cost of being shown operators, and whether a mode is shown each one
// that it should see.
// Ownership:     as any listener.
// Thread safety: the counts may be read on any thread.
#pragma once

#include <torch/csrc/python_headers.h>

#include <atomic>
#include <cstdint>

#include "autograd/operator_listener.h"

namespace torchoffload {

class OperatorCounter final : public OperatorListener {
 public:
  void call(const c10::OperatorHandle& op, torch::jit::Stack* stack) override;
  void opaque(const char* name, c10::ArrayRef<at::Tensor> inputs, Region region) override;

  uint64_t operators() const { return operators_; }
  uint64_t regions() const { return regions_; }

 private:
  std::atomic<uint64_t> operators_ = 0;
  std::atomic<uint64_t> regions_ = 0;
};

// Adds the type OperatorMode and the functions around it to the module. Returns false with a Python error set.
bool add_operator_functions(PyObject* module);

}  // namespace torchoffload
