// Switches: the settings, beside the arguments, by which PyTorch's kernels compute: a replayed operator finds them as
// they were in forward.
// Ownership:     values.
// Thread safety: the switches are the process's, except the number of threads. Two replays that need other ones at a
//                time disturb each other, as two threads of the program that set them do.
// Not handled:   switches of libraries that PyTorch does not know.
#pragma once

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <c10/core/DefaultDtype.h>

#include <array>
#include <optional>
#include <type_traits>
#include <utility>

namespace torchoffload {

// The types of PyTorch's interface for the precision of float32: strings in torch 2.9, enumerators later.
template <typename Function>
struct PrecisionFunction;
template <typename Precision, typename Backend, typename Op>
struct PrecisionFunction<Precision (at::Context::*)(Backend, Op) const> {
  using Value = Precision;
  using BackendName = std::remove_cvref_t<Backend>;
  using OpName = std::remove_cvref_t<Op>;
};
using Float32Precisions = PrecisionFunction<decltype(&at::Context::float32Precision)>;

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
  // Those of matrix products, convolutions and recurrent networks, on CUDA and in oneDNN.
  std::array<Float32Precisions::Value, 6> float32_precisions{};
  // The precision that torch.set_float32_matmul_precision() sets beside them. nullopt if a precision of matrix products
  // is reduced: PyTorch refuses to tell it if the program has set that one by itself.
  std::optional<at::Float32MatmulPrecision> matmul_precision;
  decltype(std::declval<const at::Context&>().allowFP16ReductionCuBLAS()) fp16_reduction{};
  decltype(std::declval<const at::Context&>().allowBF16ReductionCuBLAS()) bf16_reduction{};
  bool fp16_accumulation = false;
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
