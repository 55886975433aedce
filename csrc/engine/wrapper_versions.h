// WrapperVersions: the wrapper subclasses that a record was packed inside of, with their versions at the pack.
// Ownership:     shares the version counters: while one is noted here, its address is given to no other one.
// Thread safety: needs the GIL.
//
// Note [Versions of inner tensors]
// A write through a wrapper subclass raises only the wrapper's version. Its inner tensors are written below autograd,
// which raises no version there. So a record is joined only while each wrapper that it was packed inside of still has
// the version that it had at the pack. For the same reason the inner tensors of a wrapper and those of a view on it
// have version counters of their own; that the two wrappers share one counter shows that the bytes are the same.
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

  // Was one of the wrappers written to since it was noted?
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
