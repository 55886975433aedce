// SavedTensor: the tensor of one pack call: a layout on a record, or the detached tensor if it was kept.
// Ownership:     kept: shares the tensor's storage. Moved: one handle of the record, released by the destructor alone.
// Thread safety: needs the GIL.
//
// Versions. PyTorch skips its check when hooks are set, so unpack() makes it, with the same error. The unpacked tensor
// carries the packed tensor's own version counter: a write to either is seen by every later unpack, as without us.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/variable.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "autograd/tensor_layout.h"
#include "engine/context_state.h"
#include "engine/engine.h"
#include "system/gil.h"

namespace torchoffload {

// A node of autograd's graph, weakly: torch 2.13 counts its references in the node.
template <typename Node>
std::weak_ptr<Node> weak(const std::shared_ptr<Node>& node) {
  return node;
}
template <typename Node>
c10::weak_intrusive_ptr<Node> weak(const c10::intrusive_ptr<Node>& node) {
  return c10::weak_intrusive_ptr<Node>(node);
}

// The facts that PyTorch's error names about a tensor that was written to after it was saved.
class VersionCheck {
 public:
  explicit VersionCheck(const at::Tensor& tensor);

  // Throws autograd's own error when the tensor was written to. `make_tensor` makes one, for that error, of the same
  // type and sizes.
  template <typename MakeTensor>
  void check(MakeTensor make_tensor) const REQUIRES(gil) {
    // An inference tensor, which only a wrapper may hold, tracks no version.
    if (version_.enabled() && version_.current_version() != saved_version_) raise(make_tensor());
  }
  const c10::VariableVersion& version() const { return version_; }

  // Without hooks, would anything but the node that unpacks hold the tensor, once it has returned it as a gradient?
  // See Note [Gradients that were saved].
  bool is_held_without_us() const;

 private:
  using Node = std::remove_cvref_t<decltype(std::declval<const at::Tensor&>().grad_fn())>;  // some shared pointer
  using WeakNode = decltype(weak(std::declval<const Node&>()));

  // How autograd makes the grad_fn of a view anew after its base was written to.
  enum class View : uint8_t { None, Strided, Replayed };

  [[noreturn]] void raise(const at::Tensor& described) const;
  bool is_output_of(const Node& node) const;
  Node origin() const;
  Node origin_of_view(const Node& before) const;

  c10::VariableVersion version_;
  uint32_t saved_version_;
  uint32_t output_nr_ = 0;
  WeakNode grad_fn_;           // at the pack
  bool seems_output_ = false;  // used if no node says it: a read outside backward
  View view_ = View::None;
  bool did_base_require_grad_ = false;
  torch::autograd::CreationMeta creation_ = torch::autograd::CreationMeta::DEFAULT;
  c10::weak_intrusive_ptr<c10::TensorImpl> base_;
  c10::weak_intrusive_ptr<c10::TensorImpl> tensor_;
};

enum class Versions : uint8_t { Check, Ignore };

// A saved tensor that is alive, for a report on those that should not be.
struct LiveSave {
  at::ScalarType dtype = at::ScalarType::Undefined;
  std::optional<std::vector<int64_t>> sizes;  // nullopt if asking would run Python
  uint64_t nbytes = 0;
  double age_s = 0;  // exact to some milliseconds
};

// The object that one handle owns. All live ones are in a list, the newest first.
class Saved {
 public:
  Saved();
  virtual ~Saved();
  Saved(const Saved&) = delete;
  Saved& operator=(const Saved&) = delete;

  // Called before unpack(), outside of any operation: makes the values that unpack() needs. May block, and release the
  // GIL. Throws as unpack() does.
  virtual void prepare() REQUIRES(gil) {}

  // May block. Throws autograd's own error for a tensor that was written to.
  virtual at::Tensor unpack(Versions versions) REQUIRES(gil) = 0;

  // Runs no Python.
  static std::vector<LiveSave> all_alive();

 protected:
  // The tensor that it stands for, without its age; nullopt if others stand for it.
  virtual std::optional<LiveSave> describe() const { return std::nullopt; }
  void leave_list();

 private:
  static Saved*& newest();

  Saved* newer_ = nullptr;
  Saved* older_ = nullptr;
  bool is_listed_ = true;
  double born_s_;
};

class SavedTensor final : public Saved {
 public:
  // Kept. A leaf is kept itself, as autograd keeps it: it has no history to hold, and its type, its attributes and the
  // data that `.data =` gives it count. Of any other tensor a detached alias.
  explicit SavedTensor(const at::Tensor& tensor);
  // It must be kept or moved before it is used. Every step that can fail is done before there is a record, since
  // otherwise nobody would own the record's handle.
  enum class Undecided : uint8_t { Yet };
  static void* operator new(size_t nbytes);
  static void operator delete(void* address, size_t nbytes);
  SavedTensor(const at::Tensor& tensor, Undecided) : version_check_(tensor) {}
  ~SavedTensor() override REQUIRES(gil);

  const at::Tensor& kept() const { return kept_; }
  void keep(const at::Tensor& tensor);
  // Also of one that was kept.
  void move_to(Engine& engine, TensorLayout&& layout, RecordHandle handle) noexcept;

  // Call it before the program writes to the memory of `tensor`, which was saved and has its storage still. From here on
  // the saved tensor does without that memory: its bytes are in the tier, or in a copy on the device. May block.
  void release_source(const at::Tensor& tensor) REQUIRES(gil);

  // As unpack(), without a look at versions, and for a caller that is no node of autograd's graph.
  at::Tensor unpacked() REQUIRES(gil);

  // Points to it for as long as it lives, then to null.
  const std::shared_ptr<SavedTensor*>& self();

  at::Tensor unpack(Versions versions) override REQUIRES(gil);

 private:
  std::optional<LiveSave> describe() const override;

  VersionCheck version_check_;
  at::Tensor kept_;
  bool is_itself_ = false;  // not an alias
  Engine* engine_ = nullptr;
  RecordHandle handle_;
  TensorLayout layout_;
  std::shared_ptr<SavedTensor*> self_;
};

// An alias of `tensor` that shares storage and version counter and has no history.
at::Tensor detached_alias(const at::Tensor& tensor);

}  // namespace torchoffload
