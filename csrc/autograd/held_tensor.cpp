#include "autograd/held_tensor.h"

#include <c10/core/TensorImpl.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <atomic>
#include <iterator>
#include <utility>
#include <vector>

#include "system/mutex.h"

namespace torchoffload {

namespace {

struct Held {
  int graph_task;
  c10::intrusive_ptr<c10::TensorImpl> tensor;
};

// Leaked on purpose: a backward may run while static destructors do.
struct List {
  Mutex mutex;
  std::vector<Held> held GUARDED_BY(mutex);  // nothing is dropped under the mutex
  std::atomic<size_t> count{0};
};

List& list() {
  static List* const leaked = new List;
  return *leaked;
}

template <typename Condition>
void drop_if(Condition condition) {
  if (list().count.load(std::memory_order_relaxed) == 0) return;
  std::vector<Held> dropped;  // outlives the lock
  const MutexLock lock(list().mutex);
  std::vector<Held>& held = list().held;
  const auto first =
      std::stable_partition(held.begin(), held.end(), [&](const Held& each) { return !condition(each); });
  dropped.assign(std::make_move_iterator(first), std::make_move_iterator(held.end()));
  held.erase(first, held.end());
  list().count = held.size();
}

// A tensor's Python object holds the tensor, and the tensor holds the object if anybody else holds the tensor too.
template <typename Slot>
bool is_held_by_its_object_alone(Slot& slot) {
  if constexpr (requires { slot.has_unique_reference(); }) return slot.has_unique_reference();
  return false;
}

bool is_unheld(const Held& held) {
  const size_t use_count = held.tensor.use_count();
  return use_count == 1 || (use_count == 2 && is_held_by_its_object_alone(*held.tensor->pyobj_slot()));
}

void hold(c10::intrusive_ptr<c10::TensorImpl> tensor) {
  const int graph_task = torch::autograd::get_current_graph_task_id();
  if (graph_task == -1) return;
  bool is_first = true;
  {
    const MutexLock lock(list().mutex);
    for (const Held& each : list().held) is_first = is_first && each.graph_task != graph_task;
    list().held.push_back({graph_task, std::move(tensor)});
    list().count = list().held.size();
  }
  if (!is_first) return;
  torch::autograd::Engine::get_default_engine().queue_callback(
      [graph_task] { drop_if([&](const Held& each) { return each.graph_task == graph_task; }); });
}

class HeldTensor final : public c10::TensorImpl {
 public:
  explicit HeldTensor(const c10::TensorImpl& source)
      : TensorImpl(c10::Storage(source.storage()), source.key_set(), source.dtype()) {
    copy_tensor_metadata(&source, this, source.version_counter(),
                         /*allow_tensor_metadata_change=*/true);
  }

  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(const c10::VariableVersion& version,
                                                         bool allow_change) const override {
    return held_copy(TensorImpl::shallow_copy_and_detach(version, allow_change));
  }
  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(c10::VariableVersion&& version,
                                                         bool allow_change) const override {
    return held_copy(TensorImpl::shallow_copy_and_detach(std::move(version), allow_change));
  }

 private:
  static c10::intrusive_ptr<TensorImpl> held_copy(c10::intrusive_ptr<TensorImpl> copy) {
    hold(copy);
    return copy;
  }
};

}  // namespace

at::Tensor held(const at::Tensor& tensor) {
  c10::intrusive_ptr<c10::TensorImpl> made = c10::make_intrusive<HeldTensor>(*tensor.unsafeGetTensorImpl());
  hold(made);
  return at::Tensor(std::move(made));
}

void drop_unheld() { drop_if(is_unheld); }

}  // namespace torchoffload
