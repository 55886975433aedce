// kernel_source: the text of the kernels that code bfloat16 on a GPU, for a compiler at run time.
// Ownership:     the text lives for the process.
// Thread safety: any thread.
#pragma once

#include <string>

namespace torchoffload::codec {

inline constexpr const char* kEncodeKernel = "torchoffload_encode";
inline constexpr const char* kDecodeKernel = "torchoffload_decode";

// CUDA C++ for compute capability 7.0 and later. Both kernels take whole warps, and any number of them.
std::string kernel_source();

}  // namespace torchoffload::codec
