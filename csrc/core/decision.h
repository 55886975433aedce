// Decision: the place of a saved tensor's bytes until backward asks for them, and the reason for it.
// Ownership:     values only.
// Thread safety: immutable values; any thread.
//
// A new place is a new enumerator of Placement. A new reason is a line in reasons.def.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace torchoffload {

enum class Placement : uint8_t {
  Keep,  // on the device, in the saved tensor's own memory
  Host,  // in host memory, pinned or not
  Disk,  // in a spill file
};
const char* to_string(Placement where);

// Why a saved tensor is kept; None if it moves. reasons.def lists the reasons.
enum class Reason : uint8_t {
  None,
#define TORCHOFFLOAD_REASON(enumerator, name) enumerator,
#include "core/reasons.def"
};
inline constexpr std::array kReasonNames{
    "none",
#define TORCHOFFLOAD_REASON(enumerator, name) name,
#include "core/reasons.def"
};
inline constexpr size_t kReasonCount = kReasonNames.size();  // None included
const char* to_string(Reason why);

struct Decision {
  Placement where = Placement::Keep;
  Reason why = Reason::None;

  static Decision move_to(Placement where) { return {where, Reason::None}; }
  static Decision keep(Reason why) { return {Placement::Keep, why}; }

  bool keeps() const { return where == Placement::Keep; }
};

}  // namespace torchoffload
