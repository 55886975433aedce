// Replay: runs recorded operators again, in C++ and below autograd, autocast and modes, for the values that are wanted.
// Ownership:     the values that it makes are the caller's; intermediate values are dropped after their last use.
// Thread safety: prepare() and its destructor need the GIL. run() does not want it, and is quicker without: a kernel
//                that is written in Python takes it. One replay of a record at a time.
// Failures:      ValueGone if a needed value is gone; any error of an operator.
#pragma once

#include <c10/core/Storage.h>
#include <c10/util/FunctionRef.h>

#include <vector>

#include "autograd/recorded_operators.h"
#include "system/gil.h"

namespace torchoffload {

class Replay {
 public:
  enum class Uses : uint8_t { All, NothingKept };  // All: values that a plan keeps are read, not made again

  // `wanted`: storages whose values of their last epochs are wanted.
  Replay(const RecordedOperators& record, std::vector<StorageNumber> wanted, Uses uses);

  const std::vector<OperatorNumber>& operators() const { return operators_; }
  // The held values among those that the operators read, and among those that are wanted.
  const std::vector<std::pair<StorageNumber, Epoch>>& held() const { return held_; }

  // Whether an operator makes this storage again, or writes to it.
  bool makes(StorageNumber number) const { return made_[number] > 0; }

  // Gets the values that contexts hold.
  void prepare() REQUIRES(gil);
  // The values that came back and that autograd has saved, too.
  std::vector<c10::Storage> take_reloaded() { return std::move(reloaded_); }

  // Called with the value of each wanted storage, once it is there.
  using Give = c10::function_ref<void(StorageNumber, const c10::Storage&)>;
  // Called before and after each operator.
  using Around = c10::function_ref<void(OperatorNumber, bool is_before)>;
  void run(Give give, Around around);

 private:
  void find_needed();
  void need(StorageNumber number, Epoch epoch);
  void find_last_uses();
  void prepare_one(StorageNumber number, Epoch epoch) REQUIRES(gil);
  const c10::Storage& value(StorageNumber number, Epoch epoch);
  at::Tensor argument(const TensorRef& ref);
  void run_operator(const RecordedOperator& op);
  void await(StorageNumber number);

  const RecordedOperators& record_;
  Uses uses_;
  std::vector<StorageNumber> wanted_;
  std::vector<OperatorNumber> operators_;
  std::vector<std::pair<StorageNumber, Epoch>> held_;
  std::vector<Epoch> made_;                                          // by storage: how many of its writers run
  std::vector<std::vector<StorageNumber>> last_used_by_;             // by place in `operators_`
  std::vector<c10::Storage> values_;                                 // by storage, made again
  std::vector<std::vector<std::pair<Epoch, c10::Storage>>> loaded_;  // by storage, not made again
  std::vector<c10::Storage> reloaded_;
  std::vector<bool> is_wanted_;
  std::vector<bool> is_on_its_way_;  // by storage: a collective is still to fill it, unless somebody has waited
  torch::jit::Stack stack_;
};

// The replay's surroundings are those of forward, for its scope: devices, streams, switches, gradients on.
class InForwardsState {
 public:
  explicit InForwardsState(const RecordedOperators& record);
  ~InForwardsState();
  InForwardsState(const InForwardsState&) = delete;
  InForwardsState& operator=(const InForwardsState&) = delete;

  // A value that the replay has made, and that the caller's stream is to use.
  void hand_over(const c10::Storage& storage) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace torchoffload
