#include "core/windows.h"

namespace torchoffload {

void CopyWindows::reload_began(RecordId id, uint64_t nbytes) {
  ahead_.push_back(id);
  reload_bytes_ += nbytes;
}

void CopyWindows::reload_left(RecordId id, uint64_t nbytes) {
  reload_bytes_ -= nbytes;
  std::erase(ahead_, id);
}

}  // namespace torchoffload
