#include "autograd/context.h"

#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

#include "autograd/graph_tokens.h"
#include "autograd/user_code.h"
#include "core/mutant.h"
#include "device/backends.h"
#include "device/torch_memory.h"
#include "engine/operation.h"
#include "engine/registry.h"
#include "engine/thread_state.h"

namespace torchoffload {

namespace {

// Storages of every Parameter seen: aliases in custom Functions and compiled graphs are found by storage alone.
MemorySet& parameter_storages() {
  static auto* const leaked = new MemorySet;
  return *leaked;
}

MemorySet& marked_storages() {
  static auto* const leaked = new MemorySet;
  return *leaked;
}

// Storages of values that a planned compiled graph keeps.
MemorySet& planned_storages() {
  static auto* const leaked = new MemorySet;
  return *leaked;
}

c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
}

// Is make_fx tracing? It knows only tensors that come from dispatched operators: one that is built anew would be a
// constant of its graph.
bool is_traced() {
  using c10::impl::TorchDispatchModeKey;
  using c10::impl::TorchDispatchModeTLS;
  return TorchDispatchModeTLS::any_modes_set() && TorchDispatchModeTLS::get_mode(TorchDispatchModeKey::PROXY);
}

void mark(MemorySet& set, const at::Tensor& tensor) {
  if (storage_of(tensor) != nullptr) set.insert(memory_of(tensor.storage()));
}

uint64_t bytes_of(const at::Tensor& tensor) {
  return TensorLayout::is_plain(tensor) ? static_cast<uint64_t>(tensor.nbytes()) : 0;
}

// The owner of such memory may write it anew, or hand it on, with no new version or storage. Once the memory is
// dropped, the owner may do so at once, even while streams still use it.
bool is_borrowed(const at::Tensor& tensor, DeviceMemory& memory) {
  const c10::DataPtr& data = storage_of(tensor)->data_ptr();
  return data.get_context() == nullptr || !memory.owns(memory_of(tensor.storage())) ||
         memory.is_graph_memory(data.get());
}

// For a tensor that has a storage.
Place place_of(const at::Tensor& tensor, const ContextOptions& options) {
  const c10::Device device = tensor.device();
  return {.device_type = static_cast<int8_t>(device.type()),
          .device_index = device.index(),
          .memory = memory_of(tensor.storage()),
          .tier = options.tier,
          .use_pin_memory = options.use_pin_memory,
          .disk_dirs = options.disk_dir,
          .spills = options.on_full == OnFull::Disk,
          .budget_bytes = options.budget_bytes};
}

// The part of its storage that moves with a plain tensor that is being packed. An inner tensor's offset stays exact,
// too: a wrapper may compare the offsets of its parts, or compute with them. See Note [Offsets that count]. May run
// Python.
Extent extent_to_move(const at::Tensor& tensor, const c10::VariableVersion* wrapper) {
  const uint64_t storage_bytes = tensor.storage().nbytes();
  const Span moved = span_to_move(TensorLayout(tensor).span(), storage_bytes);
  const bool moves_alone = moved.nbytes() < storage_bytes && wrapper == nullptr && !saves_for_user_code();
  return moves_alone ? Extent::Span : Extent::Storage;
}

SavedBytes saved_bytes(const at::Tensor& tensor, const TensorLayout& layout, const Span& span, Extent extent,
                       const c10::VariableVersion* wrapper) {
  SavedBytes saved;
  saved.memory = memory_of(tensor.storage());
  saved.span = span;
  saved.extent = extent;
  saved.itemsize = layout.itemsize();
  saved.dtype = static_cast<uint8_t>(layout.dtype());
  saved.dim = static_cast<uint8_t>(std::min<int64_t>(tensor.dim(), UINT8_MAX));
  saved.version = VersionRef(&tensor.unsafeGetTensorImpl()->version_counter());
  saved.wrapper = VersionRef(wrapper);
  return saved;
}

}  // namespace

void never_offload(const at::Tensor& tensor) {
  TORCH_CHECK(storage_of(tensor) != nullptr, "torchoffload.never_offload: the tensor has no storage of its own (",
              tensor.toString(), "), so it is never moved anyway.");
  mark(marked_storages(), tensor);
}

void keep_by_plan(const at::Tensor& tensor) { mark(planned_storages(), tensor); }

bool is_storage_of_parameter(const at::Tensor& tensor) { return parameter_storages().contains(storage_of(tensor)); }

void note_parameter(const at::Tensor& tensor) { mark(parameter_storages(), tensor); }

Context::Context(ContextOptions options) : state_(std::make_shared<ContextState>()) {
  state_->options = std::move(options);
}

Context::~Context() {
  if (Operation::is_shut_down()) return;
  const Operation operation;
  for (const OnThread& entry : threads_) close_tapes(entry.tapes);
}

void Context::exempt(const at::Tensor& tensor) { mark(state_->exempt, tensor); }

// ---- entry and exit ----

Context::OnThread& Context::on_this_thread() {
  const std::thread::id thread = std::this_thread::get_id();
  for (OnThread& entry : threads_) {
    if (entry.thread == thread) return entry;
  }
  threads_.emplace_back().thread = thread;
  return threads_.back();
}

void Context::enter() {
  const Placement tier = state_->options.tier;
  TORCH_CHECK(tier == Placement::Disk || accelerator_available(),
              "torchoffload: tier=\"host\" moves tensors of an accelerator, and there is none (PyTorch sees no "
              "CUDA device, and no accelerator of another type). "
              "Give the context tier=\"disk\" to move CPU tensors to disk.");
  std::vector<std::shared_ptr<ContextState>>& entered = ThreadState::current().entered;
  TORCH_CHECK(entered.empty() || entered.back()->options.tier == tier, "torchoffload: a context with tier=\"",
              to_string(tier), "\" was entered inside one with tier=\"",
              entered.empty() ? "" : to_string(entered.back()->options.tier), "\". Nested contexts must share a tier.");
  note_entry(tier);
  const Operation operation;
  Engine::flush_pending();
  OnThread& entry = on_this_thread();
  ++entry.depth;
  entered.push_back(state_);
}

void Context::exit() {
  OnThread& entry = on_this_thread();
  TORCH_CHECK(entry.depth > 0, "torchoffload: a context was left more often than it was entered on this thread.");
  std::vector<std::shared_ptr<ContextState>>& entered = ThreadState::current().entered;
  const auto innermost = std::find(entered.rbegin(), entered.rend(), state_);
  entered.erase(std::next(innermost).base());
  --entry.depth;
  if (entry.depth == 0) keep_candidates(entry);
  const Operation operation;
  try {
    Engine::flush_pending(state_.get());
    Operation::drop_now();  // a closing tape counts the memory that it freed
  } catch (...) {
    leave_thread();  // the tapes are over even if the copies failed
    throw;
  }
  for (const auto& [engine, tape] : leave_thread()) engine->forward_ended(tape);
}

Context::Tapes Context::leave_thread() {
  OnThread& entry = on_this_thread();
  Tapes closed = std::exchange(entry.tapes, {});
  if (entry.depth == 0) {
    std::erase_if(threads_, [](const OnThread& known) { return known.depth == 0 && known.tapes.empty(); });
  }
  close_tapes(closed);
  return closed;
}

void Context::close_tapes(const Tapes& tapes) {
  for (const auto& [engine, tape] : tapes) engine->close_tape(tape);
}

// A call that blocks here lets other threads run, which may open the tape, or leave the context and so close it.
TapeId Context::open_tape(Engine& engine) {
  while (true) {
    for (const auto& [known, tape] : on_this_thread().tapes) {
      if (known == &engine && engine.is_open(tape)) return tape;
    }
    engine.fit_store(*state_);
    const TapeId opened = engine.open_tape(state_);
    const bool has_no_windows = engine.backend().streams.copies_at_once();
    if (has_no_windows) engine.change_windows(opened, WindowBytes(), Engine::Part::Begins);
    OnThread& entry = on_this_thread();
    std::erase_if(entry.tapes, [&](const Tapes::value_type& known)
                                   REQUIRES(gil) { return known.first == &engine && !engine.is_open(known.second); });
    entry.tapes.emplace_back(&engine, opened);
    if (state_->module_windows.empty() || has_no_windows) return opened;
    engine.change_windows(opened, WindowBytes(entry.windows), Engine::Part::Begins);
  }
}

// ---- saves ----

Reason Context::never_moved(const at::Tensor& tensor, TypeKind kind, bool is_view_of_parameter) const {
  if (kind == TypeKind::Parameter || is_view_of_parameter) {
    mark(parameter_storages(), tensor);
    return Reason::Parameter;
  }
  if (kind == TypeKind::Subclass || !TensorLayout::is_plain(tensor) || is_traced()) return Reason::Layout;
  if (tensor.storage().nbytes() < state_->options.min_offload_size || tensor.numel() == 0) return Reason::Small;
  const c10::StorageImpl* const storage = storage_of(tensor);
  const bool is_known_parameter = parameter_storages().contains(storage) && !mutated(Mutant::ParameterStaysByStorage);
  if (is_known_parameter || state_->exempt.contains(storage)) return Reason::Parameter;
  if (marked_storages().contains(storage)) return Reason::Marked;
  if (planned_storages().contains(storage)) return Reason::Planned;
  const bool in_backward = torch::autograd::get_current_graph_task_id() != -1;
  if (in_backward && !mutated(Mutant::PackedInGraphTaskStays)) return Reason::InBackward;
  return Reason::None;
}

Engine* Context::find_engine_of(const at::Tensor& tensor) {
  Engine* const engine = find_engine(place_of(tensor, state_->options));
  const auto is_it = [&](const std::shared_ptr<Engine>& known) { return known.get() == engine; };
  if (engine != nullptr && std::ranges::none_of(engines_, is_it)) engines_.push_back(engine->shared_from_this());
  return engine;
}

std::optional<Context::Moved> Context::try_move(const at::Tensor& tensor, std::optional<Extent> extent,
                                                const c10::VariableVersion* wrapper, uint32_t module, Reason& why) {
  Engine* const engine = find_engine_of(tensor);
  if (engine == nullptr) {
    why = Reason::Device;
    if (!tensor.is_meta())
      state_->warn_once(Warning::NoEngine, "torchoffload: saved tensors on " + tensor.device().str() +
                                               " stay where they are: tier=\"" + to_string(state_->options.tier) +
                                               "\" does not move them.");
    return std::nullopt;
  }
  if (engine->backend().streams.is_capturing()) {
    // The graph would write to this slot at each replay, long after the slot was another's.
    why = Reason::Capturing;
    engine->hold_growth();
    return std::nullopt;
  }
  if (is_borrowed(tensor, engine->backend().memory) && !mutated(Mutant::BorrowedStays)) {
    why = Reason::Borrowed;
    return std::nullopt;
  }
  engine->settle();
  if (!extent) extent = extent_to_move(tensor, wrapper);
  const TapeId tape = open_tape(*engine);
  state_->module = module;
  // Read only now: while the calls above blocked, another thread may have changed the tensor.
  TensorLayout layout(tensor);
  const Span span = layout.span();
  const auto handle = engine->pack(saved_bytes(tensor, layout, span, *extent, wrapper), tape);
  if (mutated(Mutant::CopyNotInsideItsOperator)) Engine::flush_pending();
  if (handle) return Moved{engine, std::move(layout), *handle};
  why = Reason::Small;
  return std::nullopt;
}

std::unique_ptr<SavedTensor> Context::pack(const at::Tensor& tensor, TypeKind kind, bool is_view_of_parameter,
                                           const c10::VariableVersion* wrapper) {
  Engine::flush_pending();
  ++Statistics::global().handles;
  if (is_token(tensor)) return std::make_unique<SavedTensor>(tensor);  // it has no memory
  const uint32_t module = on_this_thread().module;
  Reason reason = never_moved(tensor, kind, is_view_of_parameter);
  const bool is_candidate =
      reason == Reason::None && state_->options.only_inputs && !on_this_thread().admitted.contains(storage_of(tensor));
  if (is_candidate) return pack_candidate(tensor, module, wrapper);
  auto saved = std::make_unique<SavedTensor>(tensor, SavedTensor::Undecided::Yet);
  if (reason == Reason::None) {
    if (auto moved = try_move(tensor, std::nullopt, wrapper, module, reason)) {
      saved->move_to(*moved->engine, std::move(moved->layout), moved->handle);
      return saved;
    }
  }
  saved->keep(tensor);
  count_kept_here(reason, bytes_of(tensor), module);
  return saved;
}

// Kept until its storage is admitted.
std::unique_ptr<SavedTensor> Context::pack_candidate(const at::Tensor& tensor, uint32_t module,
                                                     const c10::VariableVersion* wrapper) {
  auto saved = std::make_unique<SavedTensor>(tensor);
  std::optional<c10::VariableVersion> version;
  if (wrapper != nullptr) version = *wrapper;
  Engine* const engine = find_engine_of(tensor);
  const StreamId stream = engine != nullptr ? engine->backend().streams.current_stream() : kNoStream;
  const Extent extent = extent_to_move(tensor, wrapper);
  on_this_thread().candidates[storage_of(tensor)].push_back(
      {saved->self(), bytes_of(tensor), module, std::move(version), extent, stream});
  return saved;
}

void Context::count_kept_here(Reason reason, uint64_t nbytes, uint32_t module) {
  const std::vector<std::pair<Engine*, TapeId>>& tapes = on_this_thread().tapes;
  const bool has_tape = !tapes.empty() && tapes.front().first->is_open(tapes.front().second);
  TapeRow& row = has_tape ? tapes.front().first->row(tapes.front().second) : kept_row_;
  count_kept(row, state_->row_of(module), reason, nbytes);
}

// ---- offload_modules ----

void Context::restrict(double fraction, bool only_inputs) {
  state_->options.fraction = fraction;
  state_->options.only_inputs = only_inputs;
}

uint32_t Context::set_module(uint32_t number) {
  if (state_->modules.size() <= number) state_->modules.resize(number + 1);
  OnThread& entry = on_this_thread();
  const uint32_t before = std::exchange(entry.module, number);
  const std::vector<ModuleWindows>& windows = state_->module_windows;
  if (std::max(number, before) < windows.size() && number != before) {
    const ModuleWindows& now = windows[number != 0 ? number : before];
    entry.windows = {number != 0 ? now.offload_bytes : now.after_bytes, now.reload_bytes};
    const WindowBytes changed = entry.windows;
    const Engine::Part part = number != 0 ? Engine::Part::Begins : Engine::Part::GoesOn;
    const Operation operation;
    const Tapes tapes = entry.tapes;
    for (const std::shared_ptr<Engine>& engine : std::vector(engines_)) {
      const auto is_open = [&](const Tapes::value_type& known)
                               REQUIRES(gil) { return known.first == engine.get() && engine->is_open(known.second); };
      const auto open = std::ranges::find_if(tapes, is_open);
      if (open != tapes.end()) {
        engine->change_windows(open->second, changed, part);
      } else {  // no save has opened a tape in this forward, but sources of earlier ones may be on their way out
        engine->drain_offloads(changed.offload_bytes);
      }
    }
  }
  return before;
}

void Context::admit(const at::Tensor& tensor) {
  const c10::StorageImpl* const storage = storage_of(tensor);
  if (storage == nullptr) return;
  const Operation operation;
  on_this_thread().admitted.insert(memory_of(tensor.storage()));
  const auto waiting = on_this_thread().candidates.extract(storage);
  if (waiting.empty()) return;
  const uint32_t module = on_this_thread().module;
  for (const Candidate& candidate : waiting.mapped()) {
    if (*candidate.saved == nullptr) continue;
    const at::Tensor kept = (*candidate.saved)->kept();
    // R2: its copy would wait for the stream that is current now, which may not wait for the one that fills it yet.
    Engine* const engine = find_engine_of(kept);
    if (engine != nullptr && engine->backend().streams.current_stream() != candidate.stream) {
      count_kept_here(Reason::NotAnInput, candidate.nbytes, candidate.module);
      continue;
    }
    Reason why = Reason::None;
    const c10::VariableVersion* const wrapper = candidate.wrapper ? &*candidate.wrapper : nullptr;
    auto moved = try_move(kept, candidate.extent, wrapper, module, why);
    if (!moved) {
      count_kept_here(why, candidate.nbytes, module);
    } else if (SavedTensor* const saved = *candidate.saved) {
      saved->move_to(*moved->engine, std::move(moved->layout), moved->handle);
    } else {  // it died while something blocked
      moved->engine->release(moved->handle);
    }
  }
}

void Context::keep_candidates(OnThread& entry) {
  for (const auto& [storage, candidates] : entry.candidates) {
    for (const Candidate& candidate : candidates)
      count_kept_here(Reason::NotAnInput, candidate.nbytes, candidate.module);
  }
  entry.candidates.clear();
  entry.admitted = {};
}

}  // namespace torchoffload
