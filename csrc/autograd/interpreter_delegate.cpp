#include "autograd/interpreter_delegate.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/PyInterpreter.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/utils/torch_dispatch_mode.h>
#include <torch/version.h>

#include <algorithm>
#include <atomic>
#include <string>

#include "autograd/operator_mode.h"

namespace torchoffload {

namespace {

using c10::TensorImpl;
using c10::impl::PyInterpreterVTable;
using ModeOff = torch::torch_dispatch_mode::StashTorchDispatchModeGuard;

bool has_own_dispatch(const c10::IValue& tensor) {
  return tensor.isTensor() && tensor.unsafeToTensorImpl()->key_set().has(c10::DispatchKey::Python);
}

// Whether the operator is given a tensor of a class with a __torch_dispatch__ of its own.
bool is_for_a_class(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  return std::ranges::any_of(torch::jit::last(stack, op.schema().arguments().size()), [](const c10::IValue& argument) {
    if (argument.isTensor()) return has_own_dispatch(argument);
    return (argument.isTensorList() || argument.isOptionalTensorList()) &&
           std::ranges::any_of(argument.toListRef(), has_own_dispatch);
  });
}

class InterpreterDelegate final : public PyInterpreterVTable {
 public:
  explicit InterpreterDelegate(const PyInterpreterVTable& real) : real_(real) {}

  void dispatch(const c10::OperatorHandle& op, torch::jit::Stack* stack) const override {
    const OperatorMode* const mode = mode_on_top();
    if (mode == nullptr || is_for_a_class(op, *stack)) return real_.dispatch(op, stack);
    const ModeOff off;  // and it holds the mode
    if (mode->shows()) {
      mode->listener->call(op, stack);
    } else {
      op.callBoxed(stack);
    }
  }

  // Autograd saves an operator's output as a detached tensor, and asks this table for it, not the dispatcher.
  c10::intrusive_ptr<TensorImpl> detach(const TensorImpl* self) const override {
    if (mode_on_top() == nullptr || self->key_set().has(c10::DispatchKey::Python)) return real_.detach(self);
    const ModeOff off;
    return self->shallow_copy_and_detach(c10::VariableVersion(0), /*allow_tensor_metadata_change=*/false);
  }

  // All other calls are passed on. If a later torch adds a virtual function, this class does not compile until it has
  // that one, too.
  // clang-format off
  std::string name() const override { return real_.name(); }
  void incref(PyObject* object) const override { real_.incref(object); }
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 10
  void decref(PyObject* object, bool has_slot) const override { real_.decref(object, has_slot); }
#else
  void decref(PyObject* object) const override { real_.decref(object); }
  bool try_incref(const c10::impl::PyObjectSlot& slot) const override { return real_.try_incref(slot); }
  size_t refcnt(PyObject* object) const override { return real_.refcnt(object); }
#endif
  void reportErrorCallback(PyObject* callback, c10::DispatchKey key) const override {
    real_.reportErrorCallback(callback, key);
  }
  void python_op_registration_trampoline(const c10::OperatorHandle& op, c10::DispatchKey key,
                                         c10::DispatchKeySet keys, torch::jit::Stack* stack, bool with_keyset,
                                         bool with_op) const override {
    real_.python_op_registration_trampoline(op, key, keys, stack, with_keyset, with_op);
  }
  void throw_abstract_impl_not_imported_error(std::string name, const char* module,
                                              const char* context) const override {
    real_.throw_abstract_impl_not_imported_error(std::move(name), module, context);
  }
  void python_dispatcher(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                         torch::jit::Stack* stack) const override {
    real_.python_dispatcher(op, keys, stack);
  }
  bool is_contiguous(const TensorImpl* self, at::MemoryFormat format) const override {
    return real_.is_contiguous(self, format);
  }
  c10::SymBool sym_is_contiguous(const TensorImpl* self, at::MemoryFormat format) const override {
    return real_.sym_is_contiguous(self, format);
  }
  bool is_strides_like(const TensorImpl* self, at::MemoryFormat format) const override {
    return real_.is_strides_like(self, format);
  }
  bool is_non_overlapping_and_dense(const TensorImpl* self) const override {
    return real_.is_non_overlapping_and_dense(self);
  }
  c10::Device device(const TensorImpl* self) const override { return real_.device(self); }
  int64_t dim(const TensorImpl* self) const override { return real_.dim(self); }
  c10::IntArrayRef strides(const TensorImpl* self) const override { return real_.strides(self); }
  c10::IntArrayRef sizes(const TensorImpl* self) const override { return real_.sizes(self); }
  c10::SymIntArrayRef sym_sizes(const TensorImpl* self) const override { return real_.sym_sizes(self); }
  c10::Layout layout(const TensorImpl* self) const override { return real_.layout(self); }
  int64_t numel(const TensorImpl* self) const override { return real_.numel(self); }
  c10::SymInt sym_numel(const TensorImpl* self) const override { return real_.sym_numel(self); }
  c10::SymIntArrayRef sym_strides(const TensorImpl* self) const override { return real_.sym_strides(self); }
  c10::SymInt sym_storage_offset(const TensorImpl* self) const override { return real_.sym_storage_offset(self); }
  void trace_gpu_event_creation(c10::DeviceType type, uintptr_t event) const override {
    real_.trace_gpu_event_creation(type, event);
  }
  void trace_gpu_event_deletion(c10::DeviceType type, uintptr_t event) const override {
    real_.trace_gpu_event_deletion(type, event);
  }
  void trace_gpu_event_record(c10::DeviceType type, uintptr_t event, uintptr_t stream) const override {
    real_.trace_gpu_event_record(type, event, stream);
  }
  void trace_gpu_event_wait(c10::DeviceType type, uintptr_t event, uintptr_t stream) const override {
    real_.trace_gpu_event_wait(type, event, stream);
  }
  void trace_gpu_memory_allocation(c10::DeviceType type, uintptr_t pointer) const override {
    real_.trace_gpu_memory_allocation(type, pointer);
  }
  void trace_gpu_memory_deallocation(c10::DeviceType type, uintptr_t pointer) const override {
    real_.trace_gpu_memory_deallocation(type, pointer);
  }
  void trace_gpu_stream_creation(c10::DeviceType type, uintptr_t stream) const override {
    real_.trace_gpu_stream_creation(type, stream);
  }
  void trace_gpu_device_synchronization(c10::DeviceType type) const override {
    real_.trace_gpu_device_synchronization(type);
  }
  void trace_gpu_stream_synchronization(c10::DeviceType type, uintptr_t stream) const override {
    real_.trace_gpu_stream_synchronization(type, stream);
  }
  void trace_gpu_event_synchronization(c10::DeviceType type, uintptr_t event) const override {
    real_.trace_gpu_event_synchronization(type, event);
  }
  void reset_backward_hooks(const TensorImpl* self) const override { real_.reset_backward_hooks(self); }
  // clang-format on

  const PyInterpreterVTable& real() const { return real_; }

 private:
  const PyInterpreterVTable& real_;
};

// The place that other threads read meanwhile: an aligned pointer, so they find the one or the other.
std::atomic_ref<const PyInterpreterVTable*> table() { return std::atomic_ref(getPyInterpreter()->vtable_); }

const InterpreterDelegate& delegate() {
  static const auto* const leaked = new InterpreterDelegate(*table().load());
  return *leaked;
}

}  // namespace

void install_interpreter_delegate() { table().store(&delegate()); }

void remove_interpreter_delegate() {
  const PyInterpreterVTable* ours = &delegate();
  table().compare_exchange_strong(ours, &delegate().real());
}

}  // namespace torchoffload
