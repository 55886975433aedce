// OperatorListener: is shown every operator below autograd and autocast, on the thread whose mode it belongs to.
// Ownership:     shared by its maker and by its modes (operator_mode.h). A call of it holds its mode.
// Thread safety: called on the thread that entered its mode, and on no other. Two modes may share one listener.
// Failures:      may throw: the operator's caller gets the exception, and the mode is on again.
// Not handled:   operators of tensors that stand for others (fake ones), and those that are traced: they run unseen.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/FunctionRef.h>

#include <vector>

namespace torchoffload {

class OperatorListener {
 public:
  // Runs code that no listener can look into, and returns the tensors among its results.
  using Region = c10::function_ref<std::vector<at::Tensor>()>;

  virtual ~OperatorListener() = default;

  // Called instead of the operator, while its mode is off: operators that it calls are not shown to it. Modes beneath
  // its own are on, and are shown the operator once it runs. It runs the operator by `op.callBoxed(stack)`, or does
  // not, and leaves the operator's results on the stack in place of the arguments.
  // The keys of autograd and autocast are excluded, as in __torch_dispatch__. No argument is a tensor of a class with a
  // __torch_dispatch__ of its own: for such an operator the inner operators are shown.
  // The GIL is as the operator's caller left it, and PyTorch's own functions have released it: code that touches a
  // Python object has to acquire it, and `op.callBoxed` needs it neither held nor released.
  virtual void call(const c10::OperatorHandle& op, torch::jit::Stack* stack) = 0;

  // Called instead of code that runs operators unseen: a region that inductor compiled, an operator that takes
  // functions (torch.cond, flex attention), an operator with arguments that have no C++ type. Nothing that the region
  // does is shown.
  //   name     its name, for messages
  //   inputs   the tensors that it is given, until `region` is called: a compiled region frees its inputs as it goes,
  //            so nobody may hold them meanwhile. It may have written to their storages.
  //   region   runs it, once, and throws its exceptions. It returns the output tensors, on storages of the inputs or
  //            on others.
  // The mode is off, and the GIL is held.
  virtual void opaque(const char* name, c10::ArrayRef<at::Tensor> inputs, Region region) = 0;
};

}  // namespace torchoffload
