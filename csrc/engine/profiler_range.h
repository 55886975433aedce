// ProfilerRange: a range that torch.profiler shows, as record_function in Python makes it.
// Ownership:     a value of one scope.
// Thread safety: any thread; a range ends on the thread that began it.
// Cost:          a few nanoseconds while no profiler is on.
//
// The functions of this header are defined in autograd/profiler_range.cpp.
#pragma once

#include <cstdint>
#include <memory>

namespace torchoffload {

class ProfilerRange {
 public:
  explicit ProfilerRange(const char* name);
  // For a copy: the number of bytes is appended to the name.
  ProfilerRange(const char* name, uint64_t nbytes);
  ~ProfilerRange();
  ProfilerRange(const ProfilerRange&) = delete;
  ProfilerRange& operator=(const ProfilerRange&) = delete;

 private:
  struct Range;
  std::unique_ptr<Range> range_;  // null while no profiler is on
};

}  // namespace torchoffload
