// link_share: the fraction of a tensor's bytes that the link would carry, for plans that reckon with codes.
// Ownership:     borrows its arguments for the length of a call.
// Thread safety: needs the GIL, which it releases while it waits for the device.
// Not handled:   values that change from step to step; records whose bytes are other tensors' too.
#pragma once

#include <ATen/core/Tensor.h>

#include "autograd/context.h"
#include "system/gil.h"

namespace torchoffload {

// The link share of this tensor's storage, once it moves under this context, estimated from some blocks of its values;
// 1 if it is not coded. Waits for the device if it may be coded.
double link_share(const Context& context, const at::Tensor& tensor) REQUIRES(gil);

}  // namespace torchoffload
