// Copies of the tensors that blocks are given: so the program may write to a tensor, as by `x += block(x)`, before the
// block is computed again from it.
// Ownership:     callers own the copies. The table of them holds originals and copies weakly.
// Thread safety: needs the GIL.
// Stream order:  the copy is ordered on the current stream.
// Not handled:   writes that no version counter shows, such as those by way of `.data`.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include "autograd/recorded_operators.h"
#include "system/gil.h"

namespace torchoffload {

struct InputCopy {
  c10::Storage storage;
  c10::VariableVersion version;
};

// Copies a storage whose tensors have this version. Callers that are given the same tensor, as a mask, share one copy
// until somebody writes to the tensor.
InputCopy copy_of_input(const c10::Storage& storage, const VersionMark& version) REQUIRES(gil);

// A tensor on such a copy, without history.
class CopiedInput {
 public:
  explicit CopiedInput(const at::Tensor& original) REQUIRES(gil);
  const at::Tensor& tensor() const { return tensor_; }
  // Whether somebody has written to the original since.
  bool was_written() const { return original_.has_changed(); }

 private:
  VersionMark original_;
  at::Tensor tensor_;
};

}  // namespace torchoffload
