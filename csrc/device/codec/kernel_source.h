// kernel_source: the text of the kernels of all codes on a GPU, for a compiler at run time.
// Ownership:     the text lives for the process.
// Thread safety: any thread.
#pragma once

#include <string>

#include "device/codec/block.h"

namespace torchoffload::codec {

// The names of a code's kernels.
constexpr const char* encode_kernel(Code code) {
  return code == Code::Bfloat16 ? "torchoffload_encode_bfloat16" : "torchoffload_encode_widened";
}
constexpr const char* decode_kernel(Code code) {
  return code == Code::Bfloat16 ? "torchoffload_decode_bfloat16" : "torchoffload_decode_widened";
}

// CUDA C++ for compute capability 7.0 and later. All kernels take whole warps, and any number of them.
std::string kernel_source();

}  // namespace torchoffload::codec
