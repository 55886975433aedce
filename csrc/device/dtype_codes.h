// dtype_codes: the code by which the values of a dtype cross the link.
// Ownership:     values only.
// Thread safety: immutable values; any thread.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>

#include "device/codec/block.h"

namespace torchoffload {

// `dtype`: PyTorch's number for it.
inline std::optional<codec::Code> code_of_dtype(uint8_t dtype) {
  switch (static_cast<c10::ScalarType>(dtype)) {
    case c10::ScalarType::BFloat16:
      return codec::Code::Bfloat16;
    case c10::ScalarType::Float:
      return codec::Code::Widened;
    default:
      return std::nullopt;
  }
}

}  // namespace torchoffload
