#include "core/decision.h"

namespace torchoffload {

const char* to_string(Placement where) {
  switch (where) {
    case Placement::Keep:
      return "keep";
    case Placement::Host:
      return "host";
    case Placement::Disk:
      return "disk";
  }
  return "?";
}

const char* to_string(Reason why) {
  const auto index = static_cast<size_t>(why);
  return index < kReasonCount ? kReasonNames[index] : "?";
}

}  // namespace torchoffload
