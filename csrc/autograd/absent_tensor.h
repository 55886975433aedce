// Tensors without memory: they have sizes, strides, a dtype and a device, and no data until they are given memory.
// Ownership:     a tensor owns its storage, as any tensor does; the storage owns no memory at first.
// Thread safety: as PyTorch's tensors: one thread at a time.
// Failures:      whoever asks an absent tensor for its data gets a RuntimeError that says what it is.
//
// The recomputation of a checkpointed block does not run an operator whose output nobody needs. Its output is absent:
// views of it can be made, autograd can note it, and code that reads it after all gets an error and never bytes that
// nothing has written.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>

namespace torchoffload {

// The layout of a dense tensor on a storage of `nbytes` bytes. Strides and offset count elements.
struct AbsentLayout {
  c10::IntArrayRef sizes;
  c10::IntArrayRef strides;
  int64_t storage_offset = 0;
  uint64_t nbytes = 0;
  c10::ScalarType dtype = c10::ScalarType::Float;
  c10::Device device = c10::Device(c10::DeviceType::CPU);
};

at::Tensor make_absent(const AbsentLayout& layout);

// Gives the storage of an absent tensor memory, uninitialised, for it and for all views of it. Does nothing for a
// tensor that has memory.
void give_memory(const at::Tensor& tensor);

}  // namespace torchoffload
