#include "engine/registry.h"

#include <algorithm>
#include <functional>
#include <optional>
#include <stdexcept>
#include <utility>

#include "core/mutant.h"
#include "engine/operation.h"
#include "engine/thread_state.h"

namespace torchoffload {

namespace {

// Leaked on purpose. Each list changes under the GIL, at any thread's first or last use of a backend: whoever goes
// through one and may release the GIL meanwhile goes through a copy.
std::vector<Engine*>& engines() {
  static auto* const leaked = new std::vector<Engine*>;
  return *leaked;
}

std::vector<SlotStore*>& stores() {
  static auto* const leaked = new std::vector<SlotStore*>;
  return *leaked;
}

// A place that its kind looks up no more. See Note [Ends of engines].
struct DroppedPlace {
  std::shared_ptr<DiskPlace> place;
  // Since its engines were seen unused; nullopt: they were in use when they were looked at last.
  struct Unused {
    uint64_t operation = 0;     // the latest one that had begun by then
    uint64_t tapes_opened = 0;  // of all its engines
    bool operator==(const Unused&) const = default;
  };
  std::optional<Unused> unused = {};
};

std::vector<DroppedPlace>& dropped_places() {
  static auto* const leaked = new std::vector<DroppedPlace>;
  return *leaked;
}

Engine* engine_of(const Backend& backend) { return static_cast<Engine*>(backend.user.get()); }

// Several backends may have one store.
void add_store(SlotStore& store) {
  if (std::find(stores().begin(), stores().end(), &store) != stores().end()) return;
  stores().push_back(&store);
  if (Operation::is_shut_down()) store.stop();  // a thread that outlives the others came after stop_threads()
}

bool is_profiling = false;

Engine* make_engine(const Backend& backend) {
  const auto engine = std::make_shared<Engine>(backend);
  backend.user = engine;  // before anything that lets other threads in, which may ask for it, too
  engines().push_back(engine.get());
  add_store(backend.store);
  if (is_profiling) engine->timeline().start_profile();
  return engine.get();
}

bool is_used(const Backend& backend) {
  const Engine* const engine = engine_of(backend);
  if (engine == nullptr) return false;
  return backend.user.use_count() > 1 || !engine->is_unused() || ThreadState::any_has_pending(*engine) || is_profiling;
}

bool is_used(const DiskPlace& place) {
  const std::vector<const Backend*> backends = place.backends();
  return std::ranges::any_of(backends, [](const Backend* backend) { return is_used(*backend); });
}

// Looks whether something may still refer to the place, and notes since when nothing does. May block.
bool is_referred_to(DroppedPlace& dropped) {
  for (const Backend* const backend : dropped.place->backends()) {
    if (Engine* const engine = engine_of(*backend)) engine->give_up_idle();
  }
  if (is_used(*dropped.place) || !dropped.place->is_idle()) {
    dropped.unused.reset();
    return true;
  }
  uint64_t tapes_opened = 0;
  for (const Backend* const backend : dropped.place->backends()) {
    if (const Engine* const engine = engine_of(*backend)) tapes_opened += engine->tapes_opened();
  }
  if (!dropped.unused || dropped.unused->tapes_opened != tapes_opened) {
    dropped.unused = {Operation::latest(), tapes_opened};
    return true;
  }
  if (mutated(Mutant::DroppedEngineAwaitsOperations)) return false;
  return ThreadState::any_has_operation_until(dropped.unused->operation);
}

void forget_engine(const Backend& backend) {
  const std::shared_ptr<void> shared = std::exchange(backend.user, nullptr);
  if (shared == nullptr) return;
  auto* const engine = static_cast<Engine*>(shared.get());
  ThreadState::forget_asked(*engine);
  std::erase(engines(), engine);
  std::erase(stores(), &backend.store);
}

// Destroys the dropped places that nothing refers to any more. May block.
void destroy_dropped() {
  std::vector<std::shared_ptr<DiskPlace>> unused;
  std::erase_if(dropped_places(), [&](DroppedPlace& dropped) {
    if (is_referred_to(dropped)) return false;
    unused.push_back(std::move(dropped.place));
    return true;
  });
  if (unused.empty()) return;
  for (const auto& place : unused) {
    for (const Backend* const backend : place->backends()) forget_engine(*backend);
  }
  const BlockingSection blocking;
  unused.clear();
}

class EnginesOfBackends final : public BackendUsers {
 public:
  bool have_tapes(const DiskPlace& place) const override {
    const std::vector<const Backend*> backends = place.backends();
    return std::ranges::any_of(backends, [](const Backend* backend) {
      const Engine* const engine = engine_of(*backend);
      return engine != nullptr && engine->ledger().live_tapes() > 0;
    });
  }
  bool know(const DiskPlace& place) const override {
    const std::vector<const Backend*> backends = place.backends();
    return std::ranges::any_of(backends, [](const Backend* backend) { return backend->user.use_count() > 1; });
  }
  void give_up_staging(const DiskPlace& place) const override {
    for (const Backend* const backend : place.backends()) {
      if (Engine* const engine = engine_of(*backend)) engine->give_up_staging();
    }
  }
  void drop(std::shared_ptr<DiskPlace> place) const override { dropped_places().push_back({std::move(place)}); }
  void without_gil(const std::function<void()>& call) const override {
    const BlockingSection blocking;
    call();
  }
};

}  // namespace

Engine* find_engine(const Place& place) {
  const size_t dropped_count = dropped_places().size();
  const Backend* const backend = find_backend(place, EnginesOfBackends());
  if (backend == nullptr) return nullptr;
  if (dropped_places().size() > dropped_count) destroy_dropped();
  Engine* const known = engine_of(*backend);
  return known != nullptr ? known : make_engine(*backend);
}

std::vector<std::shared_ptr<Engine>> all_engines() {
  std::vector<std::shared_ptr<Engine>> all;
  for (Engine* const engine : engines()) all.push_back(engine->shared_from_this());
  return all;
}

void start_profile() {
  for (const auto& engine : all_engines()) {
    if (!engine->is_inherited() && engine->backend().streams.is_capturing())
      throw std::runtime_error("torchoffload: profile() cannot be entered while a CUDA graph is being captured.");
  }
  is_profiling = true;
  for (const auto& engine : all_engines()) {
    if (!engine->is_inherited()) engine->timeline().start_profile();
  }
}

std::vector<EngineProfile> stop_profile() {
  is_profiling = false;
  std::vector<EngineProfile> profiles;
  for (const auto& engine : all_engines()) {
    if (engine->is_inherited() || !engine->timeline().is_profiled()) continue;
    profiles.push_back({engine->backend().device, engine->timeline().stop_profile()});
  }
  return profiles;
}

uint64_t trim_stores() {
  const Operation operation;
  auto all = all_engines();  // shares in them: none of their stores is destroyed meanwhile
  for (const auto& engine : all) engine->give_up_staging();
  uint64_t given_back_bytes = 0;
  EnginesOfBackends().without_gil([&, known = stores()] {
    for (SlotStore* const store : known) given_back_bytes += store->trim();
  });
  all.clear();
  given_back_bytes += trim_backends(EnginesOfBackends());
  destroy_dropped();
  return given_back_bytes;
}

void prepare_coders() {
  if (Operation::is_shut_down()) return;
  make_coders();
  for (Coder* const coder : all_coders()) coder->prepare();
}

void stop_threads() {
  const Operation operation;
  const auto engines = all_engines();  // shares in them: none of their stores is destroyed meanwhile
  const std::vector<SlotStore*> all = stores();
  const std::vector<Coder*> coders = all_coders();
  const BlockingSection blocking;
  for (SlotStore* const store : all) store->stop();
  for (Coder* const coder : coders) coder->stop();
}

}  // namespace torchoffload
