// GenericBackend: a device of any type that PyTorch knows through a DeviceGuardImpl, and host memory.
// Ownership:     the parts are one device's, and may be combined with any store. Its streams and events live for the
//                process.
// Thread safety: every method, any thread. No mutex that another stream's users need is held over a call that may
//                block, and none is held while the GIL is asked for.
// Stream order:  the caller's; see Streams, and Note [Devices that copy at once].
// Shutdown:      nothing is destroyed; see Note [No CUDA after main].
// Not handled:   streams that their owner destroys, and memory of graphs that are replayed without autograd's
//                knowledge: PyTorch's interface tells neither. The stream that memory was allocated on is not known.
//
// Copies are ATen's copy_ on a stream of ours, below autograd, every dispatch mode and the profiler. Whether such a
// copy runs beside the computation is up to the device.
//
// Note [Devices that copy at once]
// A device without streams of its own, or without events, is waited for on the host: each copy has ended when the call
// returns, and a wait for the device's own work waits for all of it. Such a device's contexts have windows of 0, since
// nothing is on its way at any time.
#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "device/backend.h"
#include "storage/pinned_chunk.h"
#include "system/gil.h"

namespace torchoffload {

// Can the generic backend serve devices of this type? CUDA has a backend of its own, unless the environment variable
// TORCHOFFLOAD_GENERIC_BACKEND=1 says that the generic one serves it as well.
bool is_generic(c10::DeviceType type);

// Does TORCHOFFLOAD_GENERIC_BACKEND=1 say so?
bool is_generic_forced();

// The types of those devices that PyTorch has here.
std::vector<c10::DeviceType> generic_types_here();

// The parts of a device, made at first use, with a store of host memory. Throws std::runtime_error if its memory cannot
// be allocated.
Backend generic_backend(c10::Device device, SlotStore& store) REQUIRES(gil);

// Blocks the host until a point of any such device is reached.
void generic_synchronize(Point point) EXCLUDES(gil);

// Blocks a thread that is not the program's own until a point is reached, or for some milliseconds. Returns whether the
// point was reached.
bool generic_wait_in_background(Point point);

// Page-locked memory of the type's own allocator; empty: PyTorch knows none.
HostRegistration generic_host_registration(c10::DeviceType type);

// A sentence for each device in use that works less well than it could.
std::vector<std::string> generic_notes() REQUIRES(gil);

}  // namespace torchoffload
