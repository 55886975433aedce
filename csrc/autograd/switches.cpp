#include "autograd/switches.h"

#include <c10/util/Exception.h>

#include <string>
#include <type_traits>

#include "core/mutant.h"
#include "engine/program.h"

namespace torchoffload {

namespace {

const char* name_of(at::Float32MatmulPrecision precision) {
  switch (precision) {
    case at::Float32MatmulPrecision::HIGH:
      return "high";
    case at::Float32MatmulPrecision::MEDIUM:
      return "medium";
    default:
      return "highest";
  }
}

using Precision = Float32Precisions::Value;

// An enumerator of this name, or the name itself.
#define NAMED_AS(type, enumerator, name)                \
  []<typename Type>(std::type_identity<Type>) -> Type { \
    if constexpr (std::is_same_v<Type, std::string>)    \
      return name;                                      \
    else                                                \
      return Type::enumerator;                          \
  }(std::type_identity<type>{})

struct PrecisionKey {
  Float32Precisions::BackendName backend;
  Float32Precisions::OpName op;
};

const std::array<PrecisionKey, 6>& precision_keys() {
  static const auto keys = [] {
    const auto cuda = NAMED_AS(Float32Precisions::BackendName, CUDA, "cuda");
    const auto mkldnn = NAMED_AS(Float32Precisions::BackendName, MKLDNN, "mkldnn");
    const auto matmul = NAMED_AS(Float32Precisions::OpName, MATMUL, "matmul");
    const auto conv = NAMED_AS(Float32Precisions::OpName, CONV, "conv");
    const auto rnn = NAMED_AS(Float32Precisions::OpName, RNN, "rnn");
    return std::array<PrecisionKey, 6>{
        {{cuda, matmul}, {mkldnn, matmul}, {cuda, conv}, {mkldnn, conv}, {cuda, rnn}, {mkldnn, rnn}}};
  }();
  return keys;
}

bool is_reduced(const Precision& precision) {
  static const auto tf32 = NAMED_AS(Precision, TF32, "tf32");
  static const auto bf16 = NAMED_AS(Precision, BF16, "bf16");
  return precision == tf32 || precision == bf16;
}

// In torch 2.9 an option is a bool; in later releases it also says whether a product may be split along its sum.
template <typename Option, typename... Splits>
void set_reduction(at::Context& context, void (at::Context::*set)(bool, Splits...), Option option) {
  if constexpr (std::is_same_v<Option, bool>)
    (context.*set)(option, Splits{true}...);
  else
    (context.*set)(option == Option::AllowReducedPrecisionWithSplitK,
                   option != Option::DisallowReducedPrecisionDisallowSplitK);
}

}  // namespace

Switches Switches::now() {
  const at::Context& context = at::globalContext();
  Switches now;
  now.mkldnn = context.userEnabledMkldnn();
  now.cudnn = context.userEnabledCuDNN();
  now.cudnn_benchmark = context.benchmarkCuDNN();
  now.cudnn_deterministic = context.deterministicCuDNN();
  now.deterministic = context.deterministicAlgorithms();
  now.deterministic_warns_only = context.deterministicAlgorithmsWarnOnly();
  now.fills_uninitialised = context.deterministicFillUninitializedMemory();
  for (size_t index = 0; index < precision_keys().size(); ++index) {
    const PrecisionKey& key = precision_keys()[index];
    now.float32_precisions[index] = context.float32Precision(key.backend, key.op);
  }
  if (!is_reduced(now.float32_precisions[0]) && !is_reduced(now.float32_precisions[1]))
    now.matmul_precision = context.float32MatmulPrecision();
  now.fp16_reduction = context.allowFP16ReductionCuBLAS();
  now.bf16_reduction = context.allowBF16ReductionCuBLAS();
  now.fp16_accumulation = context.allowFP16AccumulationCuBLAS();
  now.default_dtype = c10::get_default_dtype();
  now.thread_count = at::get_num_threads();
  return now;
}

void Switches::set() const {
  at::Context& context = at::globalContext();
  const Switches before = now();
  context.setUserEnabledMkldnn(mkldnn);
  context.setUserEnabledCuDNN(cudnn);
  context.setBenchmarkCuDNN(cudnn_benchmark);
  context.setDeterministicCuDNN(cudnn_deterministic);
  context.setDeterministicAlgorithms(deterministic, deterministic_warns_only);
  context.setDeterministicFillUninitializedMemory(fills_uninitialised);
  if (matmul_precision != before.matmul_precision)
    context.setFloat32MatmulPrecision(name_of(matmul_precision.value_or(at::Float32MatmulPrecision::HIGH)));
  for (size_t index = 0; index < precision_keys().size(); ++index) {
    const PrecisionKey& key = precision_keys()[index];
    if (context.float32Precision(key.backend, key.op) != float32_precisions[index])
      context.setFloat32Precision(key.backend, key.op, float32_precisions[index]);
  }
  set_reduction(context, &at::Context::setAllowFP16ReductionCuBLAS, fp16_reduction);
  set_reduction(context, &at::Context::setAllowBF16ReductionCuBLAS, bf16_reduction);
  context.setAllowFP16AccumulationCuBLAS(fp16_accumulation);
  if (default_dtype != before.default_dtype) c10::set_default_dtype(default_dtype);
  if (thread_count != before.thread_count) at::set_num_threads(thread_count);
}

WithSwitches::WithSwitches(const Switches& wanted) {
  const Switches before = Switches::now();
  if (before == wanted || mutated(Mutant::ReplaySetsSwitches)) return;
  before_ = before;
  wanted.set();
}

WithSwitches::~WithSwitches() {
  if (!before_) return;
  try {
    before_->set();
  } catch (const std::exception& error) {
    program::warn(std::string("torchoffload: a switch of PyTorch's could not be set back: ") + error.what());
  }
}

}  // namespace torchoffload
