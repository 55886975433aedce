#include "autograd/link_share.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstdint>
#include <optional>

#include "device/codec/codes.h"
#include "engine/operation.h"

namespace torchoffload {

namespace {

constexpr int64_t kBlocksSeen = 64;  // at least, and less than twice as many, if there are so many

// Some blocks of the storage's values, spread over it, on the host.
at::Tensor some_blocks(const at::Tensor& tensor) {
  const at::Tensor values = at::empty({0}, tensor.options()).set_(tensor.storage());
  constexpr auto kBlockValues = static_cast<int64_t>(codec::kBlockValues);
  const int64_t count = values.numel() / kBlockValues;
  const at::Tensor blocks = values.narrow(0, 0, count * kBlockValues).view({count, kBlockValues});
  return blocks.slice(0, 0, count, std::max<int64_t>(count / kBlocksSeen, 1)).contiguous().cpu();
}

}  // namespace

double link_share(const Context& context, const at::Tensor& tensor) {
  const std::optional<codec::Code> code = context.expected_code(tensor);
  if (!code) return 1;
  const BlockingSection blocking;
  const at::NoGradGuard no_grad;
  const at::Tensor blocks = some_blocks(tensor);
  return codec::link_share(*code, static_cast<const std::byte*>(blocks.const_data_ptr()), blocks.nbytes());
}

}  // namespace torchoffload
