// Switches: what decides how PyTorch's kernels compute, other than their arguments: a replayed operator finds it as it
// was in forward.
// Ownership:     values.
// Thread safety: the switches are the process's, but for the number of threads. Two replays that need other ones at a
//                time disturb each other, as two threads of the program that set them do.
// Not handled:   switches of libraries that PyTorch does not know.
#pragma once

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <c10/core/DefaultDtype.h>

#include <optional>

namespace torchoffload {

struct Switches {
  static Switches now();
  void set() const;
  bool operator==(const Switches&) const = default;

  bool mkldnn = false;
  bool cudnn = false;
  bool cudnn_benchmark = false;
  bool cudnn_deterministic = false;
  bool deterministic = false;
  bool deterministic_warns_only = false;
  bool fills_uninitialised = false;
  at::Float32MatmulPrecision matmul_precision{};
  caffe2::TypeMeta default_dtype;
  int thread_count = 0;
};

// Sets switches for its scope, if they are others than now.
class WithSwitches {
 public:
  explicit WithSwitches(const Switches& wanted);
  ~WithSwitches();
  WithSwitches(const WithSwitches&) = delete;
  WithSwitches& operator=(const WithSwitches&) = delete;

 private:
  std::optional<Switches> before_;
};

}  // namespace torchoffload
