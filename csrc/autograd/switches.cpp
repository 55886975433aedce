#include "autograd/switches.h"

#include <c10/util/Exception.h>

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
  now.matmul_precision = context.float32MatmulPrecision();
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
  if (matmul_precision != before.matmul_precision) context.setFloat32MatmulPrecision(name_of(matmul_precision));
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
