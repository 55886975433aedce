#include "engine/version_counter.h"

#include <c10/core/TensorImpl.h>

#include <cstring>
#include <memory>
#include <new>
#include <utility>

namespace torchoffload {

namespace {

const c10::VariableVersion* in(const std::byte* shared) {
  return std::launder(reinterpret_cast<const c10::VariableVersion*>(shared));
}

c10::VariableVersion* in(std::byte* shared) { return std::launder(reinterpret_cast<c10::VariableVersion*>(shared)); }

}  // namespace

uint32_t VersionRef::current() const { return version_->current_version(); }

// The counter has no public address of its own. An object that shares it has one member, the pointer to it, and that
// pointer names it.
const void* VersionRef::address() const {
  static_assert(sizeof(c10::VariableVersion) == sizeof(void*));
  const void* address = nullptr;
  std::memcpy(&address, static_cast<const void*>(version_), sizeof address);
  return address;
}

VersionCounter::VersionCounter(VersionRef version) : is_set_(static_cast<bool>(version)) {
  static_assert(sizeof(c10::VariableVersion) == sizeof shared_ && alignof(c10::VariableVersion) <= alignof(void*));
  if (is_set_) new (shared_) c10::VariableVersion(*version.version());
}

VersionRef VersionCounter::ref() const { return is_set_ ? VersionRef(in(shared_)) : VersionRef(); }

void VersionCounter::take(VersionCounter& other) noexcept {
  new (shared_) c10::VariableVersion(std::move(*in(other.shared_)));
  is_set_ = true;
  other.drop();
}

void VersionCounter::drop() noexcept {
  std::destroy_at(in(shared_));
  is_set_ = false;
}

}  // namespace torchoffload
