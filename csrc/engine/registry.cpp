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

// Leaked on purpose. It changes under the GIL, at any thread's first or last use of a backend: code that may release
// the GIL meanwhile goes through all_engines().
std::vector<Engine*>& engines() REQUIRES(gil) {
  static auto* const leaked = new std::vector<Engine*>;
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

// Likewise: code that may release the GIL takes out the places that it looks at.
std::vector<DroppedPlace>& dropped_places() REQUIRES(gil) {
  static auto* const leaked = new std::vector<DroppedPlace>;
  return *leaked;
}

Engine* engine_of(const Backend& backend) { return static_cast<Engine*>(backend.user.get()); }

bool is_profiling GUARDED_BY(gil) = false;

Engine* make_engine(const Backend& backend) REQUIRES(gil) {
  const auto engine = std::make_shared<Engine>(backend);
  backend.user = engine;  // before anything that lets other threads in, which may ask for it, too
  engines().push_back(engine.get());
  if (Operation::is_shut_down()) {  // a thread that outlives the others came after stop_threads()
    const BlockingSection blocking;
    backend.store.stop();
  }
  if (is_profiling) engine->timeline().start_profile();
  return engine.get();
}

bool is_used(const Backend& backend) REQUIRES(gil) {
  const Engine* const engine = engine_of(backend);
  if (engine == nullptr) return false;
  return backend.user.use_count() > 1 || !engine->is_unused() || is_profiling;
}

bool is_used(const DiskPlace& place) REQUIRES(gil) {
  const std::vector<const Backend*> backends = place.backends();
  return std::ranges::any_of(backends, [](const Backend* backend) REQUIRES(gil) { return is_used(*backend); });
}

// Looks whether something may still refer to the place, and notes since when nothing does. May block.
bool is_referred_to(DroppedPlace& dropped) REQUIRES(gil) {
  for (const Backend* const backend : dropped.place->backends()) {
    if (Engine* const engine = engine_of(*backend)) engine->release_idle();
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

void forget_engine(const Backend& backend) REQUIRES(gil) {
  const std::shared_ptr<void> shared = std::exchange(backend.user, nullptr);
  if (shared == nullptr) return;
  auto* const engine = static_cast<Engine*>(shared.get());
  engine->forget_asked();
  std::erase(engines(), engine);
}

// Destroys the dropped places that nothing refers to any more. May block: meanwhile other threads may drop places, and
// look at them. So this one takes out those that it looks at, and between the look at one and the end of its engines
// nothing blocks.
void destroy_dropped() REQUIRES(gil) {
  std::vector<DroppedPlace> looked_at = std::exchange(dropped_places(), {});
  std::vector<std::shared_ptr<DiskPlace>> unused;
  const auto put_back = [](DroppedPlace& dropped) REQUIRES(gil) {
    if (dropped.place != nullptr) dropped_places().push_back(std::move(dropped));
  };
  try {
    for (DroppedPlace& dropped : looked_at) {
      if (is_referred_to(dropped)) continue;
      for (const Backend* const backend : dropped.place->backends()) forget_engine(*backend);
      unused.push_back(std::move(dropped.place));
    }
  } catch (...) {
    std::ranges::for_each(looked_at, put_back);
    throw;
  }
  std::ranges::for_each(looked_at, put_back);
  if (unused.empty()) return;
  const BlockingSection blocking;
  unused.clear();
}

// Several engines may have one store.
std::vector<SlotStore*> stores_of(const std::vector<std::shared_ptr<Engine>>& engines) {
  std::vector<SlotStore*> stores;
  for (const auto& engine : engines) {
    SlotStore* const store = &engine->backend().store;
    if (std::ranges::find(stores, store) == stores.end()) stores.push_back(store);
  }
  return stores;
}

// May block.
uint64_t trim_stores_of_engines() REQUIRES(gil) {
  const std::vector<std::shared_ptr<Engine>> engines = all_engines();  // which keep their stores
  const BlockingSection blocking;
  uint64_t released_bytes = 0;
  for (SlotStore* const store : stores_of(engines)) released_bytes += store->trim();
  return released_bytes;
}

class EnginesOfBackends final : public BackendUsers {
 public:
  bool have_tapes(const DiskPlace& place) const override REQUIRES(gil) {
    const std::vector<const Backend*> backends = place.backends();
    return std::ranges::any_of(backends, [](const Backend* backend) REQUIRES(gil) {
      const Engine* const engine = engine_of(*backend);
      return engine != nullptr && engine->ledger().live_tapes() > 0;
    });
  }
  bool know(const DiskPlace& place) const override {
    const std::vector<const Backend*> backends = place.backends();
    return std::ranges::any_of(backends, [](const Backend* backend) { return backend->user.use_count() > 1; });
  }
  void drop(std::shared_ptr<DiskPlace> place) const override REQUIRES(gil) {
    dropped_places().push_back({std::move(place)});
  }
  void without_gil(const std::function<void()>& call) const override REQUIRES(gil) {
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
  uint64_t released_bytes = trim_stores_of_engines();
  released_bytes += trim_backends(EnginesOfBackends());
  destroy_dropped();
  return released_bytes;
}

void stop_threads() {
  const Operation operation;
  const std::vector<std::shared_ptr<Engine>> engines = all_engines();  // which keep their stores
  const BlockingSection blocking;
  for (SlotStore* const store : stores_of(engines)) store->stop();
}

}  // namespace torchoffload
