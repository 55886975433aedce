// CudaCoder: the lossless codes on a CUDA device, for slots in pinned memory.
// Ownership:     its two streams and its kernels live for the process.
// Thread safety: every method, any thread.
// Stream order:  its streams have the highest priority, so that a copy which waits for a kernel does not wait for the
//                program's kernels.
// Shutdown:      nothing is destroyed; see Note [No CUDA after main]. Each has a thread, which its stop() ends.
#pragma once

#include <c10/cuda/CUDAMacros.h>

#include <vector>

#include "device/coder.h"
#include "system/gil.h"

namespace torchoffload {

// The device's one; nothing is compiled and no stream is made before prepare().
Coder& cuda_coder(int device_index) REQUIRES(gil);

// Makes those of the devices that this process has a context on. Makes no context, and throws nothing.
void make_cuda_coders() REQUIRES(gil);

// Those that were made. Asks no device.
std::vector<Coder*> cuda_coders() REQUIRES(gil);

}  // namespace torchoffload
