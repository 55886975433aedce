// OperatorTraits: how a planned block records an operator, as its schema, its tags and its name tell.
// Ownership:     values, remembered for the life of the process.
// Thread safety: any thread.
// Not handled:   kernels that write to memory which their schema does not name, except those that are listed here.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/SmallVector.h>

#include <cstdint>

namespace torchoffload {

struct OperatorTraits {
  using Places = c10::SmallVector<uint8_t, 4>;  // of arguments in the schema

  bool makes_views = false;           // or changes nothing but metadata: it is not recorded
  bool has_own_counter = false;       // such a view, which does not share its argument's version counter
  bool draws = false;                 // random numbers, by its tag, or it takes a generator
  bool may_draw = false;              // nothing is known of its namespace
  bool leaves_uninitialised = false;  // its output is for others to fill
  bool runs_once = false;             // it is never called again
  bool returns_early = false;         // its results and writes are there once somebody has waited for them
  bool communicates = false;          // other ranks call it at the same time
  bool casts = false;                 // autocast may remember its output
  int16_t generator = -1;             // the place of a generator among its arguments
  int16_t dropout_state = -1;         // the place of a state outside of generators that a call advances
  Places writes;
  // For batch normalization: its running statistics, and the arguments that say whether it trains.
  Places statistics;
  Places training;
};

const OperatorTraits& traits_of(const c10::OperatorHandle& op);

}  // namespace torchoffload
