#include "autograd/registry.h"

#include <c10/util/Exception.h>

#include <unistd.h>

#include <algorithm>
#include <array>
#include <map>
#include <string>

#include "device/disk_backend.h"
#include "engine/operation.h"
#include "storage/pinned_arena.h"
#include "system/process.h"
#ifdef TORCHOFFLOAD_WITH_CUDA
#include "device/cuda_backend.h"
#endif
#ifdef TORCHOFFLOAD_TESTING
#include "testing/logging_backend.h"
#include "testing/sim_backend.h"
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
  if (std::find(stores().begin(), stores().end(), &store) != stores().end()) return;
  stores().push_back(&store);
  if (Operation::is_shut_down()) store.stop();  // a thread that outlives the others came after stop_stores()
}

bool is_profiling = false;

Engine* make_engine(const Backend& backend) {
  add_store(backend.store);
  engines().push_back(new Engine(backend));
  if (is_profiling) engines().back()->timeline().start_profile();
  return engines().back();
}

// A directory that was offloaded to. Its engine stays, since handles, tapes and copies refer to it; what it has from
// the system, a file and threads, it gives up while it is idle.
struct Directory {
  std::string path;
  uint64_t generation =
      0;  // a forked child makes its own: the inherited file is the parent's; see Note [Forked children]
  DiskBackend* backend = nullptr;
  Engine* engine = nullptr;

  bool is_idle() const { return engine->ledger().live_tapes() == 0 && backend->is_idle(); }
};

// The latest used first.
std::vector<Directory>& directories() {
  static auto* const leaked = new std::vector<Directory>;
  return *leaked;
}

// Idle directories that keep what they have, for a program that uses some in turn. One that was deleted does not count.
constexpr size_t kDirectoriesKept = 2;

std::vector<DiskBackend*> idle_backends() {
  std::vector<DiskBackend*> idle;
  size_t kept_count = 0;
  for (const Directory& directory : directories()) {
    const bool is_kept = kept_count < kDirectoriesKept && access(directory.path.c_str(), F_OK) == 0;
    if (is_kept) ++kept_count;
    if (!is_kept && directory.backend->store().is_open() && directory.is_idle()) idle.push_back(directory.backend);
  }
  return idle;
}

Engine* disk_engine(const std::string& path) {
  std::vector<Directory>& known = directories();
  const auto is_it = [&](const Directory& each) { return each.path == path && each.generation == fork_generation(); };
  if (!known.empty() && is_it(known.front())) return known.front().engine;
  const auto found = std::find_if(known.begin(), known.end(), is_it);
  if (found == known.end()) {
    auto* const backend = new DiskBackend(path);
    Engine* const engine = make_engine(backend->parts());
    known.insert(known.begin(), {path, fork_generation(), backend, engine});
  } else {
    std::rotate(known.begin(), found, found + 1);
  }
  Engine* const engine = known.front().engine;
  if (const std::vector<DiskBackend*> idle = idle_backends(); !idle.empty()) {
    const BlockingSection blocking;
    for (DiskBackend* const backend : idle) backend->trim();
  }
  return engine;
}

#ifdef TORCHOFFLOAD_WITH_CUDA
PinnedArena& cuda_arena(bool is_pinned) {
  static auto* const pinned = new PinnedArena(cuda_host_registration(), cuda_synchronize);
  static auto* const plain = new PinnedArena({}, cuda_synchronize);
  return is_pinned ? *pinned : *plain;
}

Engine* cuda_engine(int device_index, bool is_pinned) {
  static auto* const by_device = new std::array<std::array<Engine*, 2>, C10_COMPILE_TIME_MAX_GPUS>{};
  Engine*& engine = by_device->at(static_cast<size_t>(device_index))[is_pinned ? 1 : 0];
  if (engine == nullptr) {
    const Backend backend = cuda_backend(device_index, cuda_arena(is_pinned));
#ifdef TORCHOFFLOAD_TESTING
    engine = make_engine((new LoggingBackend(backend, device_index))->parts());
#else
    engine = make_engine(backend);
#endif
  }
  return engine;
}
#endif

#ifdef TORCHOFFLOAD_TESTING
Engine* simulated_engine(const void* data) {
  const Backend* const backend = simulated_backend_for(data);
  if (backend == nullptr) return nullptr;
  static auto* const by_backend = new std::map<const Backend*, Engine*>;
  Engine*& engine = (*by_backend)[backend];
  if (engine == nullptr) engine = make_engine(*backend);
  return engine;
}
#endif

}  // namespace

Engine* find_engine(const at::Tensor& tensor, const ContextOptions& options) {
  const c10::Device device = tensor.device();
  TORCH_CHECK(!(device.is_cuda() && options.tier == Placement::Disk),
              "torchoffload: tier=\"disk\" offloads CPU tensors, and this one is on ", device,
              ". Use tier=\"host\" for CUDA tensors.");
  if (options.tier == Placement::Disk) return device.is_cpu() ? disk_engine(options.disk_dir) : nullptr;
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
    TORCH_CHECK(engine->is_inherited() || !engine->backend().streams.is_capturing(),
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
    profiles.push_back({engine->backend().device, engine->timeline().stop_profile()});
  }
  return profiles;
}

std::vector<Engine*> all_engines() { return engines(); }

void note_entry([[maybe_unused]] Placement tier) {
#ifdef TORCHOFFLOAD_WITH_CUDA
  if (tier == Placement::Host) note_entry_on_cuda();
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
  const std::vector<Directory> all_directories = directories();
  const BlockingSection blocking;
  uint64_t given_back_bytes = 0;
  for (SlotStore* const store : all) given_back_bytes += store->trim();
  for (const Directory& directory : all_directories) given_back_bytes += directory.backend->trim();
  return given_back_bytes;
}

}  // namespace torchoffload
