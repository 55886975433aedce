#include "autograd/saved_tensor.h"

#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <sstream>
#include <utility>

#include "autograd/operation.h"
#include "core/mutant.h"

namespace torchoffload {

at::Tensor detached_alias(const at::Tensor& tensor) {
  if (!TensorLayout::is_plain(tensor)) return tensor.detach();
  return at::Tensor(tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(
      tensor.unsafeGetTensorImpl()->version_counter(), /*allow_tensor_metadata_change=*/true));
}

VersionCheck::VersionCheck(const at::Tensor& tensor)
    : version_(torch::autograd::impl::version_counter(tensor)),
      saved_version_(version_.current_version()),
      output_nr_(static_cast<uint32_t>(tensor.output_nr())),
      grad_fn_(tensor.grad_fn().get()),
      tensor_(tensor.getIntrusivePtr()) {}

// An output of the node that unpacks is named by that node; an input by the node that its tensor comes from now, which
// an in-place operation may have changed since. That is what autograd without hooks does, as saved_variable.cpp tells.
std::string VersionCheck::grad_fn_text() const {
  if (grad_fn_ == nullptr) return {};
  std::ostringstream text;
  const auto node = torch::autograd::get_current_node();
  if (node && node.get() == grad_fn_) {
    text << ", which is output " << output_nr_ << " of " << node->name() << ",";
  } else if (const auto alive = tensor_.lock()) {
    const auto grad_fn = at::Tensor(alive).grad_fn();
    if (grad_fn) text << ", which is output 0 of " << grad_fn->name() << ",";
  } else if (node) {
    for (const auto& edge : node->next_edges()) {
      if (edge.function.get() != grad_fn_) continue;
      text << ", which is output 0 of " << edge.function->name() << ",";
      break;
    }
  }
  return text.str();
}

void VersionCheck::raise(const at::Tensor& tensor) const {
  std::ostringstream text;
  text << "one of the variables needed for gradient computation has been modified by an inplace operation: ["
       << tensor.toString() << " ";
  if (tensor.is_nested()) {
    text << tensor._nested_tensor_size();
  } else {
    text << tensor.sizes();
  }
  text << "]" << grad_fn_text() << " is at version " << version_.current_version() << "; expected version "
       << saved_version_ << " instead.";
  if (torch::autograd::AnomalyMode::is_enabled()) {
    text << " Hint: the backtrace further above shows the operation that failed to compute its gradient. The variable "
            "in question was changed in there or anywhere later. Good luck!";
  } else {
    text << " Hint: enable anomaly detection to find the operation that failed to compute its gradient, with "
            "torch.autograd.set_detect_anomaly(True).";
  }
  TORCH_CHECK(false, text.str());
}

SavedTensor::SavedTensor(const at::Tensor& tensor, at::Tensor detached)
    : version_check_(tensor), kept_(std::move(detached)) {
  ++Statistics::global().live_handles;
}

SavedTensor::SavedTensor(const at::Tensor& tensor, const TensorLayout& layout, Engine& engine, RecordId record)
    : version_check_(tensor), engine_(&engine), record_(record), layout_(layout) {
  ++Statistics::global().live_handles;
}

SavedTensor::~SavedTensor() {
  if (Operation::is_shut_down()) {
    (void)kept_.unsafeReleaseIntrusivePtr().release();
    return;
  }
  --Statistics::global().live_handles;
  if (engine_ == nullptr) return;
  Operation::run_or_queue([engine = engine_, record = record_, seen_epoch = seen_epoch_] {
    engine->release(record, seen_epoch);
  });
}

at::Tensor SavedTensor::unpack() {
  const bool in_backward = torch::autograd::get_current_graph_task_id() != -1;
  if (!mutated(Mutant::VersionCheckedAtUnpack)) {
    version_check_.check([this] {
      return engine_ == nullptr ? kept_ : layout_.build(c10::Storage::create_legacy(engine_->backend().device()), 0,
                                                  version_check_.version());
    });
  }
  if (engine_ == nullptr) return detached_alias(kept_);
  if (in_backward) engine_->close_tape_of(record_);
  return engine_->unpack(record_, layout_, seen_epoch_, in_backward);
}

}  // namespace torchoffload
