#include "autograd/saved_tensor.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones.h>
#include <c10/util/accumulate.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/tensor.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <ctime>
#include <utility>

#include "autograd/graph_tokens.h"
#include "autograd/held_tensor.h"
#include "autograd/recorded_operators.h"
#include "core/mutant.h"
#include "core/node_pool.h"
#include "device/torch_memory.h"
#include "engine/operation.h"

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

// A Function of the user's, from Python or C++: all others are generated, with one base.
template <typename Node>
bool is_custom(const Node& node) {
  return node && dynamic_cast<const torch::autograd::TraceableFunction*>(node.get()) == nullptr;
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
      grad_fn_(weak(tensor.grad_fn())),
      base_(c10::intrusive_ptr<c10::TensorImpl>()),
      tensor_(tensor.getIntrusivePtr()) {
  // An operator makes its node first of all: an output comes from the youngest node, an input from an older one.
  const Node& grad_fn = tensor.grad_fn();
  seems_output_ = grad_fn && grad_fn->sequence_nr() + 1 == at::sequence_number::peek();
  const auto* const view = torch::autograd::impl::get_view_autograd_meta(tensor);
  if (view == nullptr || !view->has_bw_view()) return;
  view_ = view->get_backward_view().has_view_fn() ? View::Replayed : View::Strided;
  creation_ = view->get_creation_meta();
  did_base_require_grad_ = view->get_backward_view().base_.requires_grad();
  base_ = c10::weak_intrusive_ptr<c10::TensorImpl>(view->get_backward_view().base_.getIntrusivePtr());
}

bool VersionCheck::is_output_of(const Node& node) const { return node && node.get() == grad_fn_.lock().get(); }

// The node that the error names: the one that the tensor comes from now, which an in-place operation may have changed
// since. If the program has dropped the tensor, that node is known only for tensors that were not changed in place
// themselves.
VersionCheck::Node VersionCheck::origin() const {
  if (const auto alive = tensor_.lock()) return at::Tensor(alive).grad_fn();
  const Node before = grad_fn_.lock();
  return view_ == View::None ? before : origin_of_view(before);
}

// For a view whose base was written to: autograd makes its grad_fn anew, or refuses to, before it looks at versions.
// Here it does so for a stand-in. A base that the program has dropped required a gradient if it did when the view was
// saved.
VersionCheck::Node VersionCheck::origin_of_view(const Node& before) const {
  if (view_ == View::Replayed && creation_ == torch::autograd::CreationMeta::DEFAULT) return before;
  const at::AutoGradMode with_grad(true);
  const auto alive = base_.lock();
  const bool does_base_require_grad = alive ? at::Tensor(alive).requires_grad() : did_base_require_grad_;
  if (!before && !does_base_require_grad) return before;
  const at::Tensor base = at::ones({1}, at::TensorOptions(at::kCPU).dtype(at::kFloat)).set_requires_grad(true).clone();
  const at::Tensor view = torch::autograd::make_variable_differentiable_view(
      base.tensor_data(), torch::autograd::ViewInfo(base, nullptr, nullptr), std::nullopt, /*shared_view_info=*/false,
      creation_);
  torch::autograd::impl::get_autograd_meta(view)->grad_fn_ = before;
  torch::autograd::impl::get_autograd_meta(view)->output_nr_ =
      creation_ == torch::autograd::CreationMeta::DEFAULT ? 0 : output_nr_;
  base.add_(1);
  return view.grad_fn();
}

// Autograd itself raises, so that its text is the running version's own: it gets a stand-in that was saved at the
// former version, and has the present one. An output is named by its own node, and an input by its origin.
void VersionCheck::raise(const at::Tensor& described) const {
  const WithoutHooks without_hooks;
  const Node node = torch::autograd::get_current_node();
  const auto* const slices = dynamic_cast<const torch::autograd::CopySlices*>(node.get());
  const bool is_output = node && slices == nullptr ? is_output_of(node) : seems_output_;
  // In place on a view the operator's own node runs inside of one for the base; PyTorch's own operators still name the
  // node that the view came from afterwards.
  Node own = grad_fn_.lock();
  if (slices != nullptr && (!own || is_custom(slices->fn))) own = slices->fn;
  const Node grad_fn = is_output ? own : origin();
  c10::VariableVersion version(saved_version_);
  torch::autograd::impl::set_version_counter(described, version);
  const at::Tensor stand_in =
      grad_fn ? torch::autograd::make_variable(described, torch::autograd::Edge(grad_fn, output_nr_)) : described;
  torch::autograd::impl::set_version_counter(stand_in, version);
  const torch::autograd::SavedVariable saved(stand_in, is_output && grad_fn);
  version.set_version(version_.current_version());  // not bumped until equal: a counter can be set back
  saved.unpack(is_output ? grad_fn : Node());
  TORCH_INTERNAL_ASSERT(false, "autograd took a saved tensor of another version");
}

bool VersionCheck::is_held_without_us() const {
  const bool is_held = torch::autograd::get_current_graph_task_keep_graph() || tensor_.use_count() > 0 ||
                       tensor_.weak_use_count() > 1;  // another handle of the same tensor
  if (!is_held || torch::autograd::get_current_graph_task_id() == -1) return false;
  const Node node = torch::autograd::get_current_node();
  return is_custom(node) && !is_output_of(node);  // of an output stock makes a new one, too
}

// ---- live saved tensors ----

namespace {

double coarse_now_s() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC_COARSE, &now);  // read at every save: it takes a fraction of the exact clock's time
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

}  // namespace

Saved*& Saved::newest() {
  static Saved* newest = nullptr;
  return newest;
}

Saved::Saved() : older_(newest()), born_s_(coarse_now_s()) {
  if (older_ != nullptr) older_->newer_ = this;
  newest() = this;
  gil.assert_held();
  ++Statistics::global().live_handles;
}

Saved::~Saved() {
  leave_list();
  gil.assert_held();
  --Statistics::global().live_handles;
}

void Saved::leave_list() {
  if (!std::exchange(is_listed_, false)) return;
  (newer_ != nullptr ? newer_->older_ : newest()) = older_;
  if (older_ != nullptr) older_->newer_ = newer_;
}

std::vector<LiveSave> Saved::all_alive() {
  std::vector<LiveSave> alive;
  const double now_s = coarse_now_s();
  for (const Saved* saved = newest(); saved != nullptr; saved = saved->older_) {
    std::optional<LiveSave> found = saved->describe();
    if (!found) continue;
    found->age_s = now_s - saved->born_s_;
    alive.push_back(std::move(*found));
  }
  return alive;
}

std::optional<LiveSave> SavedTensor::describe() const {
  if (engine_ != nullptr) {
    const c10::IntArrayRef sizes = layout_.sizes();
    return LiveSave{layout_.dtype(), sizes.vec(), c10::multiply_integers(sizes) * layout_.itemsize(), 0};
  }
  if (!kept_.defined() || is_token(kept_)) return std::nullopt;
  LiveSave save{kept_.scalar_type(), std::nullopt, 0, 0};
  if (!TensorLayout::is_plain(kept_)) return save;
  save.sizes = kept_.sizes().vec();
  save.nbytes = static_cast<uint64_t>(kept_.nbytes());
  return save;
}

// ---- one saved tensor ----

namespace {

// Guarded by the GIL. Leaked, since handles may die while static destructors run.
NodePool& saved_tensor_pool() {
  static auto* const leaked = new NodePool;
  return *leaked;
}

}  // namespace

void* SavedTensor::operator new(size_t nbytes) { return saved_tensor_pool().allocate(nbytes, alignof(SavedTensor)); }

void SavedTensor::operator delete(void* address, size_t nbytes) {
  saved_tensor_pool().deallocate(address, nbytes, alignof(SavedTensor));
}

SavedTensor::SavedTensor(const at::Tensor& tensor) : SavedTensor(tensor, Undecided::Yet) { keep(tensor); }

void SavedTensor::keep(const at::Tensor& tensor) {
  is_itself_ = tensor.is_leaf();
  kept_ = is_itself_ ? tensor : detached_alias(tensor);
}

SavedTensor::~SavedTensor() {
  leave_list();  // while there is something to describe
  if (self_) *self_ = nullptr;
  if (Operation::is_shut_down()) {
    (void)kept_.unsafeReleaseIntrusivePtr().release();
    return;
  }
  if (engine_ == nullptr) return;
  Operation::run_or_queue([engine = engine_, handle = handle_] {
    gil.assert_held();
    engine->release(handle);
  });
}

void SavedTensor::move_to(Engine& engine, TensorLayout&& layout, RecordHandle handle) noexcept {
  engine_ = &engine;
  handle_ = handle;
  layout_ = std::move(layout);
  is_itself_ = false;
  kept_ = at::Tensor();
}

void SavedTensor::release_source(const at::Tensor& tensor) {
  if (engine_ != nullptr && engine_->release_source(handle_.record)) return;
  keep(mutated(Mutant::KeptSourceCopied) ? tensor : TensorLayout(tensor).on(copied(tensor.storage())));
  if (Engine* const engine = std::exchange(engine_, nullptr)) engine->release(handle_);
}

const std::shared_ptr<SavedTensor*>& SavedTensor::self() {
  if (!self_) self_ = std::make_shared<SavedTensor*>(this);
  return self_;
}

at::Tensor SavedTensor::unpack(Versions versions) {
  if (versions == Versions::Check && !mutated(Mutant::VersionCheckedAtUnpack)) {
    version_check_.check([this] {
      return engine_ == nullptr ? kept_.detach()
                                : layout_.build(c10::Storage::create_legacy(c10::Device(engine_->backend().device)), 0,
                                                version_check_.version());
    });
  }
  drop_unheld();
  at::Tensor tensor = unpacked();
  // For a leaf that requires a gradient autograd makes a new tensor, too; any other is itself held here.
  const bool is_made_anew = !is_itself_ || tensor.requires_grad();
  const bool must_hold = is_made_anew && version_check_.is_held_without_us() && TensorLayout::is_plain(tensor);
  return must_hold ? held(tensor) : tensor;
}

at::Tensor SavedTensor::unpacked() {
  const bool in_backward = torch::autograd::get_current_graph_task_id() != -1;
  if (engine_ == nullptr && in_backward) Engine::go_on_reloading();  // may block
  if (engine_ == nullptr) {
    return is_itself_ ? kept_ : detached_alias(kept_);
  }
  if (in_backward) engine_->close_tape_of(handle_.record);
  DeviceBytes bytes = engine_->unpack(handle_, in_backward);
  return layout_.build(storage_from(std::move(bytes.memory)), bytes.base_bytes, version_check_.version());
}

}  // namespace torchoffload
