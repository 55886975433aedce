// CudaBackend: a CUDA device and host memory, pinned or plain, over c10/cuda and the CUDA runtime.
// Ownership:     the parts are one device's, and may be combined with any store. Its two streams and all events live
//                for the process.
// Thread safety: every method, any thread. No mutex that another stream's users need is held over a call that may
//                block, and none is held while the GIL is asked for.
// Stream order:  the caller's; see Streams. Pageable memory makes copies block the calling host thread, as CUDA
//                documents.
// Shutdown:      nothing is destroyed; see Note [No CUDA after main].
// Not handled:   copies under stream capture; memory that is not the caching allocator's (owns() denies it).
//
// Note [Event ring]
// A stream's points are recorded into a ring of kEventsPerStream events, in turn. To wait for a point older than the
// ring, a stream waits for the oldest event in it. That event stands for a later point of the same stream, and once
// that point is reached, the older one is reached too. So no references to events are counted, and no list of free ones
// is searched. If an event is recorded anew between the look at the ring and the wait, the wait is only for a still
// later point. An external stream has a short ring, since a program may make new ones again and again. Once all points
// of such a stream were reached, its events may go to others. An empty place of its ring then means that the point was
// reached. A thread that looked at the ring before may wait for a later point of another stream. That wait is needless
// but harmless.
#pragma once

#include <c10/cuda/CUDAMacros.h>

#include "device/backend.h"
#include "storage/pinned_arena.h"
#include "system/gil.h"

namespace torchoffload {

// Is there a CUDA device? Counts the devices, and does not initialise CUDA otherwise.
bool cuda_available();

// Call it when a context is entered: from then on the allocator's allocations are noted. Does not initialise CUDA.
void note_entry_on_cuda();

// The parts of a device, made at first use, with a store of host memory.
Backend cuda_backend(int device_index, SlotStore& store) REQUIRES(gil);

// Blocks the host until a point of any CUDA stream is reached.
void cuda_synchronize(Point point) EXCLUDES(gil);

// Has a point of any CUDA stream been reached? For threads that are not the program's.
bool cuda_has_reached(Point point);

// Blocks a thread that is not the program's own until a point is reached, or for some milliseconds. Returns whether the
// point was reached. It polls with pauses, and so occupies no core; it disturbs no capture of another thread, and makes
// no context on a device that has none.
bool cuda_wait_in_background(Point point);

HostRegistration cuda_host_registration();

}  // namespace torchoffload
