// ProfilerRange: a range that torch.profiler shows, as record_function in Python makes it.
// Ownership:     a value of one scope.
// Thread safety: any thread; it ends on the one that began it.
// Cost:          a few nanoseconds where no profiler is on.
//
// What is declared here is defined in autograd/profiler_range.cpp.
#pragma once

#include <cstdint>
#include <memory>

namespace torchoffload {

class ProfilerRange {
 public:
  explicit ProfilerRange(const char* name);
  // Of a copy: its name ends in its bytes.
  ProfilerRange(const char* name, uint64_t nbytes);
  ~ProfilerRange();
  ProfilerRange(const ProfilerRange&) = delete;
  ProfilerRange& operator=(const ProfilerRange&) = delete;

 private:
  struct Range;
  std::unique_ptr<Range> range_;  // made only where a profiler is on
};

}  // namespace torchoffload
