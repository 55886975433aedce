#include "autograd/random_states.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/ops/equal.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <mutex>
#include <string>

#include "core/mutant.h"
#include "engine/program.h"

namespace torchoffload {

namespace {

at::Tensor state_of(at::Generator& generator) {
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

void set_state(at::Generator& generator, const at::Tensor& state) {
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

// Note [States of CUDA generators]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// After set_state() of a CUDA generator, the next recurrent layer with dropout draws a new dropout state from it
// (CUDAGeneratorImpl::reset_rnn_state): all that the program draws later is different. A CUDA generator can also
// exchange its state object for another generator's, which is free of that, and leaves the object that CUDA graphs have
// registered as it is.
at::Generator exchange_state(at::Generator& generator, const at::Tensor& state) {
  const std::lock_guard lock(generator.mutex());
  at::Generator other = generator.clone();
  other.set_state(state);
  at::Generator before = generator.graphsafe_get_state();
  generator.graphsafe_set_state(other);
  return before;
}

// The generator that operators of a device draw from: the CPU's, if PyTorch knows none of the device's own.
at::Generator generator_of(c10::Device device) {
  try {
    return at::globalContext().defaultGenerator(device);
  } catch (const c10::Error&) {
    return at::detail::getDefaultCPUGenerator();
  }
}

void add_device(c10::Device device, std::vector<c10::Device>& devices) {
  if (device.type() == c10::kMeta) return;
  if (std::ranges::find(devices, device) == devices.end()) devices.push_back(device);
}

std::vector<c10::Device> devices_of(c10::ArrayRef<c10::IValue> arguments) {
  std::vector<c10::Device> devices;
  for (const c10::IValue& each : arguments) {
    if (each.isTensor() && each.toTensor().defined()) add_device(each.toTensor().device(), devices);
    if (each.isDevice()) add_device(each.toDevice(), devices);
    if (!each.isTensorList()) continue;
    for (const at::Tensor& tensor : each.toTensorList())
      if (tensor.defined()) add_device(tensor.device(), devices);
  }
  if (devices.empty()) devices.emplace_back(c10::kCPU);
  return devices;
}

}  // namespace

RandomStates::RandomStates(const OperatorTraits& traits, c10::ArrayRef<c10::IValue> arguments) {
  if (!traits.draws && !traits.may_draw) return;
  const bool is_given = traits.generator >= 0 && arguments[traits.generator].isGenerator();
  if (is_given) {
    at::Generator generator = arguments[traits.generator].toGenerator();
    if (generator.defined()) {
      states_.emplace_back(generator, state_of(generator));
      return;
    }
  }
  std::vector<c10::Device> devices = devices_of(arguments);
  if (traits.may_draw) add_device(c10::kCPU, devices);
  for (const c10::Device& device : devices) {
    at::Generator generator = generator_of(device);
    const auto is_this = [&](const auto& each) { return each.first == generator; };
    if (std::ranges::any_of(states_, is_this)) continue;  // devices that draw from the CPU's share it
    states_.emplace_back(generator, state_of(generator));
  }
}

void RandomStates::keep_changed() {
  std::erase_if(states_, [](auto& each) { return at::equal(state_of(each.first), each.second); });
}

// The destructor runs also if this throws, since the other constructor has ended by then.
RandomStates::Scope::Scope(const RandomStates& states) : Scope() {
  if (mutated(Mutant::ReplaySetsRandomState)) return;
  for (const auto& [generator, state] : states.states_) {
    at::Generator shared = generator;
    if (shared.device().is_cuda()) {
      exchanged_.emplace_back(shared, exchange_state(shared, state));
      continue;
    }
    before_.emplace_back(shared, state_of(shared));
    set_state(shared, state);
  }
}

RandomStates::Scope::~Scope() {
  const auto try_to = [](const auto& set_back) {
    try {
      set_back();
    } catch (const std::exception& error) {
      program::warn(std::string("torchoffload: the state of a generator could not be set back: ") + error.what());
    }
  };
  for (auto& [generator, before] : exchanged_) {
    try_to([&generator = generator, &before = before] {
      const std::lock_guard lock(generator.mutex());
      generator.graphsafe_set_state(before);
    });
  }
  for (auto& [generator, state] : before_)
    try_to([&generator = generator, &state = state] { set_state(generator, state); });
}

}  // namespace torchoffload
