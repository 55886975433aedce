// PrivateDevice: the simulated devices as devices of PyTorch's type "privateuseone": an allocator, a guard with streams
// and events, an allocator of page-locked host memory, and operators that run on the CPU.
// Ownership:     everything that is registered lives for the process; see SimWorld for the memory.
// Thread safety: every function, any thread; see SimWorld.
// Stream order:  operators run when they are called, once the work queued on their stream has run. Copies between the
//                device and page-locked memory that do not block run when the simulation says so.
// Shutdown:      nothing is destroyed; see Note [No CUDA after main].
// Not handled:   random numbers of the device's own (operators take the CPU's), autocast, times of events.
//
// It is part of the test build only.
#pragma once

#include <c10/core/Stream.h>

#include <cstdint>

#include "testing/sim_world.h"

namespace torchoffload {

inline constexpr int kPrivateDevices = 2;

inline SimWorld& private_world() { return SimWorld::instance(); }

// From here on PyTorch knows the devices. Called before the process's first backward, which asks each device type for
// its number of devices. Once in a process; later calls do nothing.
void register_private_devices();

// While a simulation runs, the device is available. Outside of one it works too, and all queues run at once.
void start_private_simulation(SimOptions options);
void stop_private_simulation();

// From here on the guard has streams, or none but the default one, as that of a device that computes at once.
void set_private_streams(bool has_streams);
// The same for events: the guard has them, or none.
void set_private_events(bool has_events);
// The reason for which page-locked memory is refused from here on; empty: it is not.
void refuse_private_host_memory(std::string why);

StreamId simulated_stream_of(c10::Stream stream);
c10::Stream torch_stream_of(StreamId stream, int device_index);

}  // namespace torchoffload
