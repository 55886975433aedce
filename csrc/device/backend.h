// Backend: the parts that serve one pair of device and tier. The seam between the engine and the world.
// Ownership:     refers to its parts, which live for the process. Several backends may share a part: those of one
//                device with two stores, say.
// Thread safety: as each part says.
// Shutdown:      see Note [No CUDA after main].
#pragma once

#include <cstddef>
#include <string>

#include "device/coder.h"
#include "device/device_memory.h"
#include "device/link.h"
#include "device/observer.h"
#include "device/streams.h"
#include "storage/slot_store.h"

namespace torchoffload {

// The next number of a backend, from the one counter of the process. Thread-safe.
size_t next_backend_number();

struct Backend {
  std::string device;  // as PyTorch writes it: "cuda:0"
  DeviceMemory& memory;
  Streams& streams;
  Link& link;              // between the device and `store`
  SlotStore& store;        // of the tier
  Coder* coder = nullptr;  // null: what crosses the link is not coded
  Observer& observer = no_observer();
  size_t number = next_backend_number();  // in the process, from 0, so that what belongs to a backend is found quickly
};

}  // namespace torchoffload
