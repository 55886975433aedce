// VersionCounter: a share in a tensor's version counter, which autograd raises at each in-place write to the tensor.
// Ownership:     VersionRef borrows the counter. VersionCounter shares it: while it lives, the counter's address is
//                given to no other one.
// Thread safety: as c10::VariableVersion.
//
// VersionRef points to a c10::VariableVersion, and VersionCounter holds one. They are defined in
// autograd/version_counter.cpp, since the engine is compiled without PyTorch's headers.
#pragma once

#include <cstddef>
#include <cstdint>

namespace c10 {
struct VariableVersion;
}

namespace torchoffload {

class VersionRef {
 public:
  VersionRef() = default;
  explicit VersionRef(const c10::VariableVersion* version) : version_(version) {}

  explicit operator bool() const { return version_ != nullptr; }
  uint32_t current() const;
  const void* address() const;  // of the counter: the same for all that share it
  const c10::VariableVersion* version() const { return version_; }

 private:
  const c10::VariableVersion* version_ = nullptr;
};

class VersionCounter {
 public:
  VersionCounter() = default;
  explicit VersionCounter(VersionRef version);
  VersionCounter(VersionCounter&& other) noexcept {
    if (other.is_set_) take(other);
  }
  VersionCounter& operator=(VersionCounter&& other) noexcept {
    if (is_set_) drop();
    if (other.is_set_) take(other);
    return *this;
  }
  ~VersionCounter() {
    if (is_set_) drop();
  }

  // Valid until this object moves or is destroyed.
  VersionRef ref() const;
  uint32_t current() const { return ref().current(); }
  const void* address() const { return ref().address(); }

 private:
  void take(VersionCounter& other) noexcept;
  void drop() noexcept;

  alignas(void*) std::byte shared_[sizeof(void*)];
  bool is_set_ = false;
};

}  // namespace torchoffload
