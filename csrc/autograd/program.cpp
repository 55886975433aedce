#include "engine/program.h"

#include <ATen/SequenceNumber.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <new>
#include <utility>

namespace torchoffload::program {

uint64_t sequence_number() { return at::sequence_number::peek(); }

bool is_inside_operator() { return c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::AutogradFunctionality); }

int graph_task() { return torch::autograd::get_current_graph_task_id(); }

bool keeps_graph() { return torch::autograd::get_current_graph_task_keep_graph(); }

void at_end_of_graph_task(std::function<void()> call) {
  torch::autograd::Engine::get_default_engine().queue_callback(std::move(call));
}

// On CUDA an error of its own; CPU allocators raise the plain one.
bool is_out_of_memory(const std::exception& error) {
  return dynamic_cast<const c10::Error*>(&error) != nullptr || dynamic_cast<const std::bad_alloc*>(&error) != nullptr;
}

void warn(const std::string& text) noexcept {
  try {
    TORCH_WARN(text);
  } catch (...) {  // a warning that became an error: there is nobody to tell
  }
}

}  // namespace torchoffload::program
