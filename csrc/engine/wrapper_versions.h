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

#include <algorithm>
#include <cstdint>
#include <vector>

#include "engine/version_counter.h"

namespace torchoffload {

class WrapperVersions {
 public:
  void note(VersionRef version) {
    const auto is_same = [&](const Noted& known) { return known.version.address() == version.address(); };
    if (std::any_of(noted_.begin(), noted_.end(), is_same)) return;
    noted_.push_back({VersionCounter(version), version.current()});
  }

  // Was one of them written to since it was noted?
  bool changed() const {
    return std::any_of(noted_.begin(), noted_.end(),
                       [](const Noted& known) { return known.version.current() != known.at_pack; });
  }

  bool empty() const { return noted_.empty(); }
  void clear() { noted_.clear(); }

 private:
  struct Noted {
    VersionCounter version;
    uint32_t at_pack;
  };
  std::vector<Noted> noted_;
};

}  // namespace torchoffload
