#include "engine/registry.h"

#include <algorithm>
#include <functional>
#include <stdexcept>

#include "engine/operation.h"

namespace torchoffload {

namespace {

// Leaked on purpose, with all that they refer to. Each list grows under the GIL, at any thread's first use of a
// backend: whoever goes through one and may release the GIL meanwhile goes through a copy.
std::vector<Engine*>& engines() {
  static auto* const leaked = new std::vector<Engine*>;
  return *leaked;
}

std::vector<SlotStore*>& stores() {
  static auto* const leaked = new std::vector<SlotStore*>;
  return *leaked;
}

// By the number of its backend; null: it has none yet.
Engine*& engine_of(const Backend& backend) {
  static auto* const leaked = new std::vector<Engine*>;
  if (leaked->size() <= backend.number) leaked->resize(backend.number + 1, nullptr);
  return (*leaked)[backend.number];
}

// Several backends may have one store.
void add_store(SlotStore& store) {
  if (std::find(stores().begin(), stores().end(), &store) != stores().end()) return;
  stores().push_back(&store);
  if (Operation::is_shut_down()) store.stop();  // a thread that outlives the others came after stop_threads()
}

bool is_profiling = false;

Engine* make_engine(const Backend& backend) {
  auto* const engine = new Engine(backend);
  engine_of(backend) = engine;  // before anything that lets other threads in, which may ask for it, too
  engines().push_back(engine);
  add_store(backend.store);
  if (is_profiling) engine->timeline().start_profile();
  return engine;
}

class EnginesOfBackends final : public BackendUsers {
 public:
  bool has_tapes(const Backend& backend) const override {
    const Engine* const engine = engine_of(backend);
    return engine != nullptr && engine->ledger().live_tapes() > 0;
  }
  void without_gil(const std::function<void()>& call) const override {
    const BlockingSection blocking;
    call();
  }
};

}  // namespace

Engine* find_engine(const Place& place) {
  const Backend* const backend = find_backend(place, EnginesOfBackends());
  if (backend == nullptr) return nullptr;
  Engine* const known = engine_of(*backend);
  return known != nullptr ? known : make_engine(*backend);
}

std::vector<Engine*> all_engines() { return engines(); }

void start_profile() {
  for (const Engine* const engine : all_engines()) {
    if (!engine->is_inherited() && engine->backend().streams.is_capturing())
      throw std::runtime_error("torchoffload: profile() cannot be entered while a CUDA graph is being captured.");
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

uint64_t trim_stores() {
  for (Engine* const engine : all_engines()) engine->give_up_staging();
  uint64_t given_back_bytes = 0;
  EnginesOfBackends().without_gil([&, all = stores()] {
    for (SlotStore* const store : all) given_back_bytes += store->trim();
  });
  return given_back_bytes + trim_backends(EnginesOfBackends());
}

void prepare_coders() {
  if (Operation::is_shut_down()) return;
  make_coders();
  for (Coder* const coder : all_coders()) coder->prepare();
}

void stop_threads() {
  const std::vector<SlotStore*> all = stores();
  const std::vector<Coder*> coders = all_coders();
  const BlockingSection blocking;
  for (SlotStore* const store : all) store->stop();
  for (Coder* const coder : coders) coder->stop();
}

}  // namespace torchoffload
