// RandomStates: the states of the random number generators that an operator draws from, as they were before it.
// Ownership:     share the generators, and own copies of their states.
// Thread safety: a generator's state is read and written under its lock. A thread that draws from the same generator
//                while an operator is replayed draws from the replayed state, as beside torch's own checkpoint.
// Not handled:   generators of the program's own libraries.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <c10/util/ArrayRef.h>

#include <utility>
#include <vector>

#include "autograd/operator_traits.h"

namespace torchoffload {

class RandomStates {
 public:
  RandomStates() = default;
  // Those that an operator with these arguments draws from, or may draw from.
  RandomStates(const OperatorTraits& traits, c10::ArrayRef<c10::IValue> arguments);

  // Keeps those alone whose generators are in another state now.
  void keep_changed();
  bool empty() const { return states_.empty(); }

  // Sets the states for its scope, and sets back those that it found. See Note [States of CUDA generators].
  class Scope {
   public:
    explicit Scope(const RandomStates& states);  // one that throws sets back the states that it has set
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Scope() = default;

    std::vector<std::pair<at::Generator, at::Tensor>> before_;
    std::vector<std::pair<at::Generator, at::Generator>> exchanged_;  // with one that has the state it had
  };

 private:
  std::vector<std::pair<at::Generator, at::Tensor>> states_;
};

}  // namespace torchoffload
