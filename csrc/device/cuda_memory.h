// What PyTorch's own CUDA allocator tells of its memory while it allocates: the number and the stream of each
// allocation, and whether segments came or went. Listened to from the first question on, for the rest of the process.
// Ownership:     numbers and addresses only.
// Thread safety: every function, any thread. The allocator calls the listener under its own lock; the listener takes
//                one lock of a table, under which nothing else is called.
// Not handled:   other allocators (cudaMallocAsync, pluggable ones): they tell nothing.
#pragma once

#include <c10/cuda/CUDAStream.h>

#include <cstdint>
#include <optional>

namespace torchoffload {

// Begins to listen, if nobody did yet. Never blocks. False where there is nothing to listen to: CUDA is not
// initialised, which this does not change, or the allocator is another.
bool listen_to_cuda_allocator();

// Of memory that is older than the listening nobody knows which streams fill it. So the devices in use are waited for
// once, before the first record is made: from then on, until settle_cuda() has returned once, must_settle_cuda() is
// true. settle_cuda() blocks: call it without the GIL.
bool must_settle_cuda();
void settle_cuda();

struct CudaAllocation {
  uint64_t number = 0;                          // from 1, over all devices
  void* raw_stream = nullptr;                   // as CUDA has it: null is the default stream
  std::optional<c10::cuda::CUDAStream> stream;  // the same; nullopt: not known
};

// The allocation in use that begins at `address`; nullopt: it was made before the listening began, or there is none.
std::optional<CudaAllocation> find_cuda_allocation(c10::DeviceIndex device, const void* address);

// Another number than before: since then a device has taken segments from the driver or given some back.
uint64_t cuda_segment_changes();

}  // namespace torchoffload
