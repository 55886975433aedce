#include "autograd/registry.h"

#include <c10/util/Exception.h>

#include <array>
#include <map>
#include <string>

#include "autograd/operation.h"
#include "device/disk_backend.h"
#include "storage/pinned_arena.h"
#include "storage/process.h"
#ifdef TORCHOFFLOAD_WITH_CUDA
#include "device/cuda_backend.h"
#endif
#ifdef TORCHOFFLOAD_TESTING
#include "device/logging_backend.h"
#include "device/sim_backend.h"
#endif

namespace torchoffload {

namespace {

// Leaked on purpose, with all that they refer to. Both lists grow under the GIL, at any thread's first use of a device
// or a directory: whoever goes through one and may release the GIL meanwhile goes through a copy.
std::vector<Engine*>& engines() {
  static auto* const leaked = new std::vector<Engine*>;
  return *leaked;
}

std::vector<SlotStore*>& stores() {
  static auto* const leaked = new std::vector<SlotStore*>;
  return *leaked;
}

void add_store(SlotStore& store) {
  stores().push_back(&store);
  if (Operation::is_shut_down()) store.stop();  // a thread that outlives the others came after stop_stores()
}

[[maybe_unused]] PinnedArena& make_arena(HostRegistration registration, std::function<void(Point)> synchronize) {
  auto* const arena = new PinnedArena(registration, std::move(synchronize));
  add_store(*arena);
  return *arena;
}

bool is_profiling = false;

Engine* make_engine(Backend& backend, SlotStore& store) {
  engines().push_back(new Engine(backend, store));
  if (is_profiling) engines().back()->timeline().start_profile();
  return engines().back();
}

Engine* disk_engine(const std::string& directory) {
  // A forked child makes its own: the file that it inherits is the parent's; see Note [Forked children].
  static auto* const by_directory = new std::map<std::pair<std::string, uint64_t>, Engine*>;
  Engine*& engine = (*by_directory)[{directory, fork_generation()}];
  if (engine == nullptr) {
    auto* const backend = new DiskBackend(directory);
    add_store(backend->store());
    engine = make_engine(*backend, backend->store());
  }
  return engine;
}

#ifdef TORCHOFFLOAD_WITH_CUDA
PinnedArena& cuda_arena(bool is_pinned) {
  static PinnedArena* const pinned = &make_arena(cuda_host_registration(), cuda_synchronize);
  static PinnedArena* const plain = &make_arena({}, cuda_synchronize);
  return is_pinned ? *pinned : *plain;
}

Engine* cuda_engine(int device_index, bool is_pinned) {
  static auto* const by_device = new std::array<std::array<Engine*, 2>, C10_COMPILE_TIME_MAX_GPUS>{};
  Engine*& engine = by_device->at(static_cast<size_t>(device_index))[is_pinned ? 1 : 0];
  if (engine == nullptr) {
    Backend* backend = &cuda_backend(device_index);
#ifdef TORCHOFFLOAD_TESTING
    backend = new LoggingBackend(*backend, device_index);
#endif
    engine = make_engine(*backend, cuda_arena(is_pinned));
  }
  return engine;
}
#endif

#ifdef TORCHOFFLOAD_TESTING
PinnedArena& simulated_arena() {
  static PinnedArena* const arena = &make_arena({simulated_register, simulated_unregister},
                                                [](Point point) { simulated_backend(0)->synchronize(point); });
  return *arena;
}

Engine* simulated_engine(const void* data) {
  Backend* const backend = simulated_backend_for(data);
  if (backend == nullptr) return nullptr;
  static auto* const by_backend = new std::map<Backend*, Engine*>;
  Engine*& engine = (*by_backend)[backend];
  if (engine == nullptr) engine = make_engine(*backend, simulated_arena());
  return engine;
}
#endif

}  // namespace

Engine* find_engine(const at::Tensor& tensor, const ContextOptions& options) {
  const c10::Device device = tensor.device();
  TORCH_CHECK(!(device.is_cuda() && options.tier == Tier::Disk),
              "torchoffload: tier=\"disk\" offloads CPU tensors, and this one is on ", device,
              ". Use tier=\"host\" for CUDA tensors.");
  if (options.tier == Tier::Disk) return device.is_cpu() ? disk_engine(options.disk_dir) : nullptr;
#ifdef TORCHOFFLOAD_TESTING
  if (device.is_cpu()) return simulated_engine(tensor.storage().data());
#endif
#ifdef TORCHOFFLOAD_WITH_CUDA
  if (device.is_cuda()) return cuda_engine(device.index(), options.use_pin_memory);
#endif
  return nullptr;
}

void start_profile() {
  for (Engine* const engine : all_engines()) {
    TORCH_CHECK(engine->is_inherited() || !engine->backend().is_capturing(),
                "torchoffload: profile() cannot be entered while a CUDA graph is being captured.");
  }
  is_profiling = true;
  for (Engine* const engine : all_engines()) {
    if (!engine->is_inherited()) engine->timeline().start_profile();
  }
}

std::vector<EngineProfile> stop_profile() {
  is_profiling = false;
  std::vector<EngineProfile> profiles;
  for (Engine* const engine : all_engines()) {
    if (engine->is_inherited() || !engine->timeline().is_profiled()) continue;
    profiles.push_back({engine->backend().device().str(), engine->timeline().stop_profile()});
  }
  return profiles;
}

std::vector<Engine*> all_engines() { return engines(); }

void note_entry([[maybe_unused]] Tier tier) {
#ifdef TORCHOFFLOAD_WITH_CUDA
  if (tier == Tier::Host) note_entry_on_cuda();
#endif
}

bool accelerator_available() {
#ifdef TORCHOFFLOAD_TESTING
  if (active_simulation() != nullptr) return true;
#endif
#ifdef TORCHOFFLOAD_WITH_CUDA
  return cuda_available();
#else
  return false;
#endif
}

PinnedMemory pinned_memory() {
  [[maybe_unused]] const auto of = [](const PinnedArena& arena) {
    return PinnedMemory{arena.capacity_bytes(), arena.used_bytes()};
  };
#ifdef TORCHOFFLOAD_WITH_CUDA
  if (cuda_available()) return of(cuda_arena(true));
#endif
#ifdef TORCHOFFLOAD_TESTING
  return of(simulated_arena());
#else
  return {};
#endif
}

void stop_stores() {
  const std::vector<SlotStore*> all = stores();
  const BlockingSection blocking;
  for (SlotStore* const store : all) store->stop();
}

uint64_t trim_stores() {
  const std::vector<SlotStore*> all = stores();
  const BlockingSection blocking;
  uint64_t given_back_bytes = 0;
  for (SlotStore* const store : all) given_back_bytes += store->trim();
  return given_back_bytes;
}

}  // namespace torchoffload
