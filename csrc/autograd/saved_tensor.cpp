#include "autograd/saved_tensor.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

#include "autograd/operation.h"
#include "core/mutant.h"

namespace torchoffload {

namespace {

// Saved-tensor hooks are off in its scope.
class WithoutHooks {
 public:
  WithoutHooks() : hooks_(at::SavedTensorDefaultHooks::get_tls_state()) {
    at::SavedTensorDefaultHooks::set_tls_state({});
  }
  ~WithoutHooks() { at::SavedTensorDefaultHooks::set_tls_state(hooks_); }
  WithoutHooks(const WithoutHooks&) = delete;
  WithoutHooks& operator=(const WithoutHooks&) = delete;

 private:
  const at::impl::SavedTensorDefaultHooksTLS hooks_;
};

// Of a view whose base was written to: autograd makes its grad_fn anew, whatever it was. Made here in the same way,
// since the view itself may be gone.
auto regenerated_grad_fn() {
  const at::AutoGradMode with_grad(true);
  const at::Tensor base = at::ones({1}).set_requires_grad(true).clone();
  const at::Tensor view = base.view({1, 1});
  base.add_(1);
  return view.grad_fn();
}

}  // namespace

at::Tensor detached_alias(const at::Tensor& tensor) {
  if (!TensorLayout::is_plain(tensor)) return tensor.detach();
  return at::Tensor(tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(
      tensor.unsafeGetTensorImpl()->version_counter(), /*allow_tensor_metadata_change=*/true));
}

VersionCheck::VersionCheck(const at::Tensor& tensor)
    : version_(torch::autograd::impl::version_counter(tensor)),
      saved_version_(version_.enabled() ? version_.current_version() : 0),
      output_nr_(static_cast<uint32_t>(tensor.output_nr())),
      grad_fn_(tensor.grad_fn().get()),
      is_view_(tensor.is_view()),
      tensor_(tensor.getIntrusivePtr()) {}

// Autograd itself raises, so that its text is the running version's own: it is given a stand-in that was saved at the
// version of then, and has the version of now. An output of the node that unpacks is named by that node, an input by
// the node that its tensor comes from now, which an in-place operation may have changed since.
void VersionCheck::raise(const at::Tensor& described) const {
  const WithoutHooks without_hooks;
  const auto node = torch::autograd::get_current_node();
  const bool is_output = grad_fn_ != nullptr && node && node.get() == grad_fn_;
  auto grad_fn = decltype(node)();
  if (is_output) {
    grad_fn = node;
  } else if (const auto alive = tensor_.lock(); alive && grad_fn_ != nullptr) {
    grad_fn = at::Tensor(alive).grad_fn();
  } else if (is_view_) {
    grad_fn = regenerated_grad_fn();
  } else if (node && grad_fn_ != nullptr) {
    for (const auto& edge : node->next_edges()) {
      if (edge.function.get() == grad_fn_) grad_fn = edge.function;
    }
  }
  c10::VariableVersion version(saved_version_);
  torch::autograd::impl::set_version_counter(described, version);
  const at::Tensor stand_in =
      grad_fn ? torch::autograd::make_variable(described, torch::autograd::Edge(grad_fn, output_nr_)) : described;
  torch::autograd::impl::set_version_counter(stand_in, version);
  const torch::autograd::SavedVariable saved(stand_in, is_output);
  version.set_version(version_.current_version());  // not bumped until equal: a counter can be set back
  saved.unpack(is_output ? node : decltype(node)());
  TORCH_INTERNAL_ASSERT(false, "autograd took a saved tensor of another version");
}

SavedTensor::SavedTensor(const at::Tensor& tensor)
    : version_check_(tensor), kept_(tensor.is_leaf() ? tensor : detached_alias(tensor)), is_itself_(tensor.is_leaf()) {}

SavedTensor::SavedTensor(const at::Tensor& tensor, const TensorLayout& layout, Engine& engine, RecordHandle handle)
    : version_check_(tensor), engine_(&engine), handle_(handle), layout_(layout) {}

SavedTensor::~SavedTensor() {
  if (Operation::is_shut_down()) {
    (void)kept_.unsafeReleaseIntrusivePtr().release();
    return;
  }
  if (engine_ == nullptr) return;
  Operation::run_or_queue([engine = engine_, handle = handle_] { engine->release(handle); });
}

at::Tensor SavedTensor::unpack(Versions versions) {
  const bool in_backward = torch::autograd::get_current_graph_task_id() != -1;
  if (versions == Versions::Check && !mutated(Mutant::VersionCheckedAtUnpack)) {
    version_check_.check([this] {
      return engine_ == nullptr
                 ? kept_.detach()
                 : layout_.build(c10::Storage::create_legacy(engine_->backend().device()), 0, version_check_.version());
    });
  }
  if (engine_ == nullptr) return is_itself_ ? kept_ : detached_alias(kept_);
  if (in_backward) engine_->close_tape_of(handle_.record);
  return engine_->unpack(handle_, layout_, version_check_.version(), in_backward);
}

}  // namespace torchoffload
