// graph_tokens: the operators by which a compiled graph saves its values through a context, and the tokens that stand
// for these values between the graph of forward and that of backward.
// Ownership:     the storage of a token shares the saved value. With the last token it is released.
// Thread safety: the operators take the GIL, and so does the end of a token. is_token(), any thread.
// Failures:      a token that is read as a tensor raises an error that names it.
// Stream order:  pack begins the copy out behind the current stream; release makes the current stream wait for it (R17);
//                unpack makes the current stream wait for the copy in.
//
//   torchoffload::pack(x, index) -> token             saves x by the context that is entered
//   torchoffload::release(token, x, after) -> token   from here on the graph may reuse the memory of x
//   torchoffload::unpack(token, device, dtype) -> x   the value, in memory of its own
//   torchoffload::keep(xs) -> note                    contexts leave these values where they are
//
// Note [Operators of compiled graphs]
// All are functional, so that data alone orders them, and a compiler needs to know nothing of them. A compiler
// such as inductor decides itself which of its buffers share memory, and asks no reference count: it reuses the memory of
// x behind the last operator that reads x. So `release` reads x, behind the operators that the copy out is to overlap,
// which the argument `after` says: it is a value that has to be there first, and is not looked at. A value that its
// context keeps on the device is copied there by `release`, for the same reason.
// A token is a CPU tensor that has the sizes and strides of x, so that AOTAutograd learns from it the layout and the
// symbolic sizes of the tensors that backward gets; but it has no memory. A compiler that reuses memory does so for values of the
// same device, dtype and size, so the dtype of a token is one that is of no use on a CPU, and a graph that computes with
// that one is left alone.
// `keep` is for the values that a planned graph saves and does not move: as forward ends, autograd gives them to the
// hooks of the context, which would move them. Its result, one byte, stands for nothing: it is saved, so that a compiler does not leave
// the operator out. It is no token, so that hooks of others may copy it, and a graph may hold the region that made it.
// `unpack` gives memory that nothing else holds, since compiled backwards write into their inputs: in a backward that
// retains its graph a copy, and otherwise the bytes, after which the token stands for nothing.
#pragma once

#include <ATen/core/Tensor.h>

namespace torchoffload {

constexpr at::ScalarType kTokenType = at::ScalarType::Float8_e5m2fnuz;

bool is_token(const at::Tensor& tensor);

}  // namespace torchoffload
