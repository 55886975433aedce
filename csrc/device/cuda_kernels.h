// cuda_kernels: kernels that are compiled on the user's machine, by the NVRTC that comes with PyTorch.
// Ownership:     a CudaModule and its kernels live for the process; nothing is unloaded.
// Thread safety: every function, any thread. Loading takes about 0.2 s. Launching may block, as each call that enqueues
//                may.
// Failures:      loading throws std::runtime_error with a reason; launching throws c10::Error.
// Shutdown:      see Note [No CUDA after main].
//
// NVRTC and the driver are reached by dlopen: the library by which PyTorch itself uses NVRTC knows both, and is found
// beside PyTorch's others. So building takes neither a compiler for CUDA nor headers of theirs.
#pragma once

#include <c10/cuda/CUDAMacros.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

namespace torchoffload {

// Kernels for one device, which is the current one while it is made.
class CudaModule {
 public:
  // `source` is CUDA C++ without includes.
  CudaModule(const std::string& source, int device_index);

  using Kernel = void*;
  Kernel kernel(const char* name) const;

 private:
  void* module_ = nullptr;
};

// Launches a kernel on the current device. `arguments` are pointers to its arguments, in order.
void launch(CudaModule::Kernel kernel, uint32_t grid_blocks, uint32_t block_threads, void** arguments,
            cudaStream_t stream);

}  // namespace torchoffload
