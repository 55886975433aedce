// WrapperVersions: the wrapper subclasses that a record was packed inside of, with their versions of then.
// Ownership:     shares the version counters, so that the address of one names it for as long as it is noted here.
// Thread safety: needs the GIL.
//
// Note [Versions of inner tensors]
// What is written through a wrapper subclass raises the wrapper's version alone: its inner tensors are written below
// autograd, where nobody counts. So a record is joined only while each wrapper that it was packed inside of has the
// version of then. Inner tensors of a wrapper and of a view on it have a counter each, for the same reason; that the
// wrappers share one says that they are the same bytes.
#pragma once

#include <c10/core/TensorImpl.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace torchoffload {

// The version counter has no public address of its own. Its one member is the pointer that shares it, which names it as
// long as we hold a copy.
inline const void* address_of(const c10::VariableVersion& version) {
  static_assert(sizeof(c10::VariableVersion) == sizeof(void*));
  const void* address = nullptr;
  std::memcpy(&address, &version, sizeof address);
  return address;
}

class WrapperVersions {
 public:
  void note(const c10::VariableVersion& version) {
    const auto is_same = [&](const Noted& known) { return address_of(known.version) == address_of(version); };
    if (std::any_of(noted_.begin(), noted_.end(), is_same)) return;
    noted_.push_back({version, version.current_version()});
  }

  // Was one of them written to since it was noted?
  bool changed() const {
    return std::any_of(noted_.begin(), noted_.end(),
                       [](const Noted& known) { return known.version.current_version() != known.at_pack; });
  }

  bool empty() const { return noted_.empty(); }
  void clear() { noted_.clear(); }

 private:
  struct Noted {
    c10::VariableVersion version;
    uint32_t at_pack;
  };
  std::vector<Noted> noted_;
};

}  // namespace torchoffload
