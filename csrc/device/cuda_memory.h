// cuda_memory: reports of PyTorch's own CUDA allocator while it allocates: the number and the stream of each
// allocation, and whether segments came or went. A listener is attached at first use, for the rest of the process.
// Ownership:     numbers and addresses only.
// Thread safety: every function, any thread. The allocator calls the listener under its own lock; the listener takes
//                one lock of a table, under which nothing else is called.
// Not handled:   other allocators (cudaMallocAsync, pluggable ones), which report nothing.
#pragma once

#include <c10/cuda/CUDAStream.h>

#include <cstdint>
#include <optional>

#include "system/gil.h"

namespace torchoffload {

// Attaches the listener unless it is attached. Never blocks. False if there is nothing to listen to: CUDA is not
// initialised, which this call does not change, or another allocator is in use.
bool listen_to_cuda_allocator();

// It is not known which streams fill memory that was allocated before the listener was attached. So the host waits once
// for the devices in use, before the first record is made: must_settle_cuda() is true from the attaching until
// settle_cuda() has returned once. settle_cuda() blocks.
bool must_settle_cuda();
void settle_cuda() EXCLUDES(gil);

struct CudaAllocation {
  uint64_t number = 0;                          // from 1, over all devices
  void* raw_stream = nullptr;                   // CUDA's handle: null is the default stream
  std::optional<c10::cuda::CUDAStream> stream;  // the same stream for PyTorch; nullopt: not known
};

// The allocation in use that begins at `address`; nullopt: there is none, or it is older than the listener.
std::optional<CudaAllocation> find_cuda_allocation(c10::DeviceIndex device, const void* address);

// Counts the times that a device took segments from the driver or gave some back.
uint64_t cuda_segment_changes();

}  // namespace torchoffload
