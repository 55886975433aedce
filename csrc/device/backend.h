// Backend: the parts that serve one pair of device and tier. The interface between the engine and devices.
// Ownership:     refers to its parts, which outlive it. Several backends may share a part: those of one device with two
//                stores, say.
// Thread safety: as each part says.
// Shutdown:      see Note [No CUDA after main].
#pragma once

#include <memory>
#include <string>

#include "device/device_memory.h"
#include "device/link.h"
#include "device/observer.h"
#include "device/streams.h"
#include "storage/slot_store.h"

namespace torchoffload {

struct Backend {
  std::string device;  // as PyTorch writes it: "cuda:0"
  DeviceMemory& memory;
  Streams& streams;
  Link& link;        // between the device and `store`
  SlotStore& store;  // of the tier
  Observer& observer = no_observer();
  mutable std::shared_ptr<void> user = {};  // the upper floor's object for this backend, to be found quickly
};

}  // namespace torchoffload
