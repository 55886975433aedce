// Context: the part of one OffloadActivations below Python: its open tapes on each thread, and the tensors that it
// never moves.
// Ownership:     shares its ContextState with its tapes, which may outlive it.
// Thread safety: needs the GIL.
#pragma once

#include <ATen/core/Tensor.h>

#include <list>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "autograd/saved_tensor.h"
#include "engine/context_state.h"
#include "engine/engine.h"
#include "system/gil.h"

namespace torchoffload {

class Context {
 public:
  explicit Context(ContextOptions options);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  // Throw std::runtime_error: no accelerator for Placement::Host; inside a context of another tier; left more often
  // than entered on this thread. exit() enqueues the pending copies and may block.
  void enter() REQUIRES(gil);
  void exit() REQUIRES(gil);

  // The Python type of a saved tensor. The caller, who knows Python, recognises it if it is not exactly torch.Tensor.
  enum class TypeKind : uint8_t { Tensor, Parameter, Subclass };

  // A save. May block.
  // `wrapper` is the version of the wrapper subclass that the tensor is an inner one of, or null.
  std::unique_ptr<SavedTensor> pack(const at::Tensor& tensor, TypeKind kind, bool is_view_of_parameter,
                                    const c10::VariableVersion* wrapper = nullptr) REQUIRES(gil);

  void exempt(const at::Tensor& tensor);

  // Of offload_modules. Counts the later saves of this thread for the module of that number; returns the number before.
  // 0 is for saves outside of all modules.
  uint32_t set_module(uint32_t number) REQUIRES(gil);
  // Each module has windows of its own, by its number. Before it is entered.
  void set_windows(std::vector<ModuleWindows> windows) { state_->module_windows = std::move(windows); }
  void change_windows(uint32_t number, const ModuleWindows& windows) { state_->module_windows.at(number) = windows; }
  std::vector<ModuleRow> module_rows() const { return state_->modules; }
  void forget_modules() { state_->modules.assign(state_->modules.size(), {}); }

  // Before it is entered.
  void restrict(double fraction, bool only_inputs);

  // Under `only_inputs`, until the exit: tensors of this storage that this thread saves move, also those that it saved
  // before. May block.
  void admit(const at::Tensor& tensor) REQUIRES(gil);

  // Takes the warnings that came up; the caller gives them once the operation has ended.
  std::vector<std::string> take_warnings() { return std::exchange(state_->warnings, {}); }

 private:
  // A save that is kept unless its storage is admitted.
  struct Candidate {
    std::shared_ptr<SavedTensor*> saved;
    uint64_t nbytes = 0;
    uint32_t module = 0;
    std::optional<c10::VariableVersion> wrapper;
    Extent extent = Extent::Storage;
    StreamId stream = kNoStream;  // that the operator which saved it fills it on
  };
  using Tapes = std::vector<std::pair<Engine*, TapeId>>;
  struct OnThread {
    std::thread::id thread;
    int depth = 0;
    Tapes tapes;  // of each engine that a save met at most one that is open
    uint32_t module = 0;
    WindowBytes windows;  // if modules have windows of their own: those of the next save
    MemorySet admitted;
    std::unordered_map<const c10::StorageImpl*, std::vector<Candidate>> candidates;
  };
  struct Moved {
    Engine* engine = nullptr;
    TensorLayout layout;
    RecordHandle handle;
  };
  // Do not hold the reference over a call that may block: the context may be left meanwhile.
  OnThread& on_this_thread();
  // The engine that moves this tensor, or null. The context has a share in it from here on, so that the engine and its
  // lessons exist for as long as the context. May block.
  Engine* find_engine_of(const at::Tensor& tensor) REQUIRES(gil);
  // The open tape of the calling thread for this engine. May block.
  TapeId open_tape(Engine& engine) REQUIRES(gil);
  // May block.
  static void close_tapes(const Tapes& tapes) REQUIRES(gil);
  // Closes the tapes of the calling thread, and returns them. May block.
  Tapes leave_thread() REQUIRES(gil);
  // `extent`: the part of its storage that moves with the tensor, as was determined when it was saved. nullopt: it is
  // being saved now, and the extent is determined here.
  std::optional<Moved> try_move(const at::Tensor& tensor, std::optional<Extent> extent,
                                const c10::VariableVersion* wrapper, uint32_t module, Reason& why) REQUIRES(gil);
  std::unique_ptr<SavedTensor> pack_candidate(const at::Tensor& tensor, uint32_t module,
                                              const c10::VariableVersion* wrapper) REQUIRES(gil);
  void keep_candidates(OnThread& entry) REQUIRES(gil);
  void count_kept_here(Reason reason, uint64_t nbytes, uint32_t module) REQUIRES(gil);
  Reason never_moved(const at::Tensor& tensor, TypeKind kind, bool is_view_of_parameter) const;

  std::shared_ptr<ContextState> state_;
  std::list<OnThread> threads_;                   // a reference stays valid while other threads come and go
  std::vector<std::shared_ptr<Engine>> engines_;  // that its saves have met
  TapeRow kept_row_;                              // saves that meet no tape
};

// Storages of every Parameter seen, also of those that a wrapper subclass has inside: no context moves them.
bool is_storage_of_parameter(const at::Tensor& tensor);
void note_parameter(const at::Tensor& tensor);

// Marks a tensor's storage: no context moves it.
void never_offload(const at::Tensor& tensor);
// Marks the storage of a value that a planned compiled graph keeps. No context moves it, and it counts as `planned`.
void keep_by_plan(const at::Tensor& tensor);

}  // namespace torchoffload
