#include "autograd/graph_tokens.h"

#include <ATen/ops/zeros.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/Storage.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/utils/object_ptr.h>
#include <torch/library.h>

#include <memory>
#include <optional>
#include <utility>

#include "autograd/context.h"
#include "autograd/graph_trees.h"
#include "autograd/hooks.h"
#include "autograd/recorded_operators.h"
#include "autograd/saved_tensor.h"
#include "core/mutant.h"
#include "engine/operation.h"
#include "engine/profiler_range.h"
#include "engine/thread_state.h"
#include "system/host_wait.h"

namespace torchoffload {

namespace {

constexpr const char* kReadAsTensor =
    "torchoffload: this tensor is a token, which stands for a saved value that a compiled graph has moved, and has no "
    "memory. Saved-tensor hooks of others cannot copy it: leave them out around graphs that were compiled with "
    "torchoffload.compile_options().";

// A value that a compiled graph has saved.
struct GraphValue {
  TensorLayout layout;
  const void* address = nullptr;       // of the value's first byte
  std::unique_ptr<SavedTensor> saved;  // null once it was handed out for good
};

using SharedValue = std::shared_ptr<GraphValue>;

void drop_value(void* address) {
  auto* const value = static_cast<SharedValue*>(address);
  if (Operation::is_shut_down()) return;  // leaked
  const WithGil with_gil;
  delete value;
}

at::Tensor token_of(SharedValue value, uint64_t storage_bytes) {
  const TensorLayout& layout = value->layout;
  c10::DataPtr data(nullptr, new SharedValue(value), drop_value, c10::kCPU);
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), storage_bytes,
                                                       std::move(data), /*allocator=*/nullptr, /*resizable=*/false);
  storage->release_data_and_set_meta_custom_data_ptr_error_msg_(kReadAsTensor);
  auto impl =
      c10::make_intrusive<c10::TensorImpl>(c10::Storage(std::move(storage)), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                           c10::scalarTypeToTypeMeta(kTokenType));
  impl->set_sizes_and_strides(layout.sizes(), layout.strides());
  return at::Tensor(std::move(impl));
}

const c10::DataPtr& token_data(const at::Tensor& token) {
  return token.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
}

const SharedValue& value_of(const at::Tensor& token) {
  TORCH_CHECK(is_token(token), "torchoffload: a compiled backward got a tensor of the sizes ", token.sizes(),
              " in place of the token that its forward had saved. Saved-tensor hooks of others have copied the token: "
              "leave them out around graphs that were compiled with torchoffload.compile_options().");
  return *static_cast<const SharedValue*>(token_data(token).get_context());
}

// The same memory, with a version counter of its own: a compiler that reuses a buffer raises no version, so nothing may
// join a record of the former contents of the buffer.
at::Tensor fresh_alias(const at::Tensor& tensor) {
  return at::Tensor(tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(c10::VariableVersion(0),
                                                                          /*allow_tensor_metadata_change=*/true));
}

// Makes `call`, which may wait for a disk. If the handler of Ctrl-C raises nothing, the wait begins anew.
template <typename Function>
void while_interrupted(const Function& call) REQUIRES(gil) {
  while (true) {
    try {
      return call();
    } catch (const WaitAbandoned&) {
      if (PyErr_CheckSignals() != 0) throw python_error();
    }
  }
}

std::unique_ptr<SavedTensor> save_value(Context* context, const at::Tensor& value) REQUIRES(gil) {
  const PacksMade packs_made;
  const Operation operation;
  if (context == nullptr) return std::make_unique<SavedTensor>(value);
  std::unique_ptr<SavedTensor> saved = context->pack(value, Context::TypeKind::Tensor, /*is_view_of_parameter=*/false);
  Engine::flush_pending();
  return saved;
}

// `index` tells the values of a graph apart, so that no compiler takes two packs for one.
at::Tensor pack_value(const at::Tensor& x, int64_t /*index*/) {
  const WithGil with_gil;
  if (!look_for_graph_trees()) throw python_error();
  const ProfilerRange range("torchoffload::pack");
  THPObjectPtr context(top_context());
  auto value = std::make_shared<GraphValue>();
  value->layout = TensorLayout(x);
  value->address = x.const_data_ptr();
  value->saved = save_value(context ? context_of(context.get()) : nullptr, fresh_alias(x));
  if (context && !give_warnings_of(context.get())) throw python_error();
  return token_of(std::move(value), x.storage().nbytes());
}

at::Tensor release_value(const at::Tensor& token, const at::Tensor& x, const std::optional<at::Tensor>& /*after*/) {
  const WithGil with_gil;
  const SharedValue value = value_of(token);
  // A compiler may make a cheap value twice. Then the copy reads other memory than that of x, and nothing holds it.
  TORCH_CHECK(x.const_data_ptr() == value->address && x.sizes() == value->layout.sizes() &&
                  x.strides() == value->layout.strides(),
              "torchoffload: a compiled graph has made one value in two places, so that the copy of it cannot be "
              "protected. Please report this; compile without torchoffload.compile_options() meanwhile.");
  while_interrupted([&]() REQUIRES(gil) {
    const Operation operation;
    value->saved->release_source(x);
  });
  return token_of(value, token.storage().nbytes());
}

at::Tensor keep_values(at::TensorList xs) {
  const WithGil with_gil;
  for (const at::Tensor& x : xs) keep_by_plan(x);
  at::Tensor note = at::zeros({1}, at::kByte);
  keep_by_plan(note);
  return note;
}

at::Tensor copied_value(const at::Tensor& tensor) { return TensorLayout(tensor).on(copied(tensor.storage())); }

at::Tensor unpack_value(const at::Tensor& token, c10::Device /*device*/, at::ScalarType /*dtype*/) {
  const WithGil with_gil;
  const SharedValue value = value_of(token);
  TORCH_CHECK(value->saved != nullptr,
              "torchoffload: a compiled backward asked for a saved value a second time. Pass retain_graph=True to the "
              "first backward, or run the forward again: after a backward that failed its values are gone.");
  if (!look_for_graph_trees()) throw python_error();
  const ProfilerRange range("torchoffload::unpack");
  at::Tensor tensor;
  while_interrupted([&]() REQUIRES(gil) {
    const Operation operation;
    tensor = value->saved->unpacked();
    Engine::flush_pending();
  });
  if (torch::autograd::get_current_graph_task_keep_graph())
    return mutated(Mutant::RetainedValueCopied) ? tensor : copied_value(tensor);
  value->saved.reset();
  return tensor;
}

TORCH_LIBRARY(torchoffload, library) {
  library.def("pack(Tensor x, int index) -> Tensor", {at::Tag::needs_fixed_stride_order});
  library.def("release(Tensor token, Tensor x, Tensor? after) -> Tensor", {at::Tag::flexible_layout});
  library.def("keep(Tensor[] xs) -> Tensor", {at::Tag::flexible_layout});
  library.def("unpack(Tensor token, Device device, ScalarType dtype) -> Tensor", {at::Tag::flexible_layout});
}

TORCH_LIBRARY_IMPL(torchoffload, CompositeExplicitAutograd, library) {
  library.impl("pack", pack_value);
  library.impl("release", release_value);
  library.impl("keep", keep_values);
  library.impl("unpack", unpack_value);
}

}  // namespace

bool is_token(const at::Tensor& tensor) {
  if (tensor.scalar_type() != kTokenType || !tensor.has_storage()) return false;
  c10::StorageImpl* const storage = tensor.storage().unsafeGetStorageImpl();
  return storage != nullptr && storage->_mutable_data_ptr_no_checks().get_deleter() == drop_value;
}

}  // namespace torchoffload
