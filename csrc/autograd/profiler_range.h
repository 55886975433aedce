// ProfilerRange: a range that torch.profiler shows, as record_function in Python makes it.
// Ownership:     a value of one scope.
// Thread safety: any thread; it ends on the one that began it.
// Cost:          a few nanoseconds where no profiler is on.
#pragma once

#include <ATen/record_function.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

namespace torchoffload {

class ProfilerRange {
 public:
  explicit ProfilerRange(const char* name) {
    if (begin()) range_->before(name);
  }
  // Of a copy: its name ends in its bytes.
  ProfilerRange(const char* name, uint64_t nbytes) {
    if (begin()) range_->before(std::string(name) + " " + std::to_string(nbytes));
  }
  ProfilerRange(const ProfilerRange&) = delete;
  ProfilerRange& operator=(const ProfilerRange&) = delete;

 private:
  bool begin() {
    auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
    if (callbacks) range_.emplace(std::move(*callbacks));
    return range_.has_value();
  }

  std::optional<at::RecordFunction> range_;  // made only where a profiler is on
};

}  // namespace torchoffload
