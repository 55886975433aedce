#include "engine/profiler_range.h"

#include <ATen/record_function.h>

#include <string>
#include <utility>

namespace torchoffload {

struct ProfilerRange::Range {
  explicit Range(at::StepCallbacks&& callbacks) : function(std::move(callbacks)) {}
  at::RecordFunction function;
};

ProfilerRange::ProfilerRange(const char* name) {
  auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
  if (!callbacks) return;
  range_ = std::make_unique<Range>(std::move(*callbacks));
  range_->function.before(name);
}

ProfilerRange::ProfilerRange(const char* name, uint64_t nbytes) {
  auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
  if (!callbacks) return;
  range_ = std::make_unique<Range>(std::move(*callbacks));
  range_->function.before(std::string(name) + " " + std::to_string(nbytes));
}

ProfilerRange::~ProfilerRange() = default;

}  // namespace torchoffload
