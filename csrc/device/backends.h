// Backends: the kinds of backend that this build has, and the lookup of the backend that serves a place.
// Ownership:     kinds and backends live for the process and are leaked on purpose.
// Thread safety: needs the GIL, but for registering, which is done while the module is loaded.
// Shutdown:      see Note [No CUDA after main].
//
// A kind registers itself from its own file, cuda_kind.cpp say, by an object of static storage:
//   const RegisterBackendKind registered(*new CudaKind);
// No other file names it: the linked files decide which kinds there are.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/decision.h"
#include "device/backend.h"
#include "device/graph_pools.h"
#include "device/memory.h"
#include "device/spill_place.h"
#include "storage/pinned_chunk.h"
#include "system/gil.h"

namespace torchoffload {

// The place of a tensor, and the place to which the options of its context send it. For the length of a call.
struct Place {
  int8_t device_type = 0;   // PyTorch's number of it (c10::DeviceType)
  int8_t device_index = 0;  // as tensor.device() says
  MemoryRef memory;
  Placement tier = Placement::Host;
  bool use_pin_memory = true;
  std::span<const std::string> disk_dirs;  // with Placement::Disk, and if slots spill
  bool spills = false;                     // slots for which the budget has no room go on to disks
  std::optional<uint64_t> budget_bytes;
};

// The users of the backends, which are the engines. A kind asks them before it releases a backend's system resources.
class BackendUsers {
 public:
  virtual ~BackendUsers() = default;

  // Is a tape alive that was opened for a backend of this place?
  virtual bool have_tapes(const DiskPlace& place) const REQUIRES(gil) = 0;
  // Does a context still refer to the facts that were learned about the place?
  virtual bool know(const DiskPlace& place) const = 0;
  // No call looks the place up any more: it is destroyed once nothing refers to it.
  virtual void drop(std::shared_ptr<DiskPlace> place) const REQUIRES(gil) = 0;

  // Makes a call that may block.
  virtual void without_gil(const std::function<void()>& call) const REQUIRES(gil) = 0;
};

// Page-locked host memory.
struct PinnedMemory {
  uint64_t held_bytes = 0;
  uint64_t used_bytes = 0;  // of those, by slots
};

class BackendKind {
 public:
  virtual ~BackendKind() = default;

  virtual std::string name() const = 0;

  // The backend that serves `place`, the same one each time; null: none of this kind. At most one kind serves a place.
  // May block. Throws std::runtime_error if the user's options can serve no tensor of that device, or if the backend
  // cannot get its resources from the system.
  virtual const Backend* find(const Place& place, const BackendUsers& users) REQUIRES(gil) = 0;

  // Is there an accelerator of this kind, whose tensors Placement::Host moves?
  virtual bool is_available() const { return false; }

  // A context of this tier is entered on some thread.
  virtual void note_entry(Placement /*tier*/) {}

  // Releases the system resources that the backends of this kind have beside their stores, if nothing uses them.
  // Returns the bytes released. May block.
  virtual uint64_t trim(const BackendUsers& /*users*/) REQUIRES(gil) { return 0; }

  // How host memory is page-locked for its devices; empty: it is not.
  virtual HostRegistration host_registration() const { return {}; }
  virtual PinnedMemory pinned_memory() const REQUIRES(gil) { return {}; }

  // Sentences for the user's report, on devices in use that work less well than they could.
  virtual std::vector<std::string> notes() const REQUIRES(gil) { return {}; }

  // Null: CUDA graphs are unknown to it.
  virtual GraphPools* graph_pools() { return nullptr; }
};

class RegisterBackendKind {
 public:
  explicit RegisterBackendKind(BackendKind& kind);
};

// ---- questions to all kinds ----

// Null: none serves it.
const Backend* find_backend(const Place& place, const BackendUsers& users) REQUIRES(gil);

BackendKind* find_backend_kind(std::string_view name);  // null: this build has none of that name

// Is there a device with a backend for Placement::Host?
bool accelerator_available();

void note_entry(Placement tier);

uint64_t trim_backends(const BackendUsers& users) REQUIRES(gil);

PinnedMemory pinned_memory() REQUIRES(gil);

std::vector<std::string> backend_notes() REQUIRES(gil);

// Of the kind that knows CUDA graphs; null: there is none in this build.
GraphPools* graph_pools();

// How slots of an accelerator's tensors go on to disks; nullopt: they stay in host memory.
// For the length of a call.
std::optional<SpillPlan> spill_plan(const Place& place);

// ---- the test build's wrapper ----

// A kind that has just put a backend together hands out the wrapper's backend for it, or the backend itself if no
// wrapper was set.
using BackendWrapper = std::shared_ptr<const Backend> (*)(const Backend& backend, int device_index);
std::shared_ptr<const Backend> wrapped(const Backend& backend, int device_index);

// While a test has set a plan, slots of contexts without a budget go on to disks by that plan, and their options do not
// count.
void set_spill_plan(const std::vector<std::string>& directories, SpillPolicy policy);
void forget_spill_plan();

class RegisterBackendWrapper {
 public:
  explicit RegisterBackendWrapper(BackendWrapper wrapper);
};

}  // namespace torchoffload
