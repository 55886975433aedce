// RecordedCall: one call of a planned block. It records the block's operators, stands in for those of their results
// that autograd saves, and makes these again when backward asks for the first of them.
// Ownership:     shared by the hook and the mode that are open while forward runs, and by each saved tensor that it
//                stands in for. It holds no tensor with a history, and nothing in it refers to itself.
// Thread safety: forward runs on one thread: operators are recorded without the GIL, and everything else needs it.
//                Several threads may ask for saved tensors.
// Failures:      the errors of replayed operators; RuntimeError that names a tensor whose value is gone.
// Not handled:   see recorded_operators.h and operator_listener.h.
//
// Note [Recomputation by replay]
// A recomputation calls no code of the user's. In forward the call is shown each operator below autograd and autocast,
// and notes the operator, its arguments with tensors named as in Note [Storages and epochs], the state of the random
// number generators that it draws from, and the switches of PyTorch's that decide how kernels compute. If autograd
// saves a result of these operators, the call does not hold it, but names it, at the last epoch of its storage: an
// alias would show that value. The first saved tensor that is asked for in backward has all those made again that are
// still alive, in one go, so that an optimizer that steps in backward comes behind them. A plan says which values
// forward keeps or moves to a tier instead. It is advice: a call that does something else than planned keeps less, and
// its gradients are right.
#pragma once

#include <Python.h>
#include <torch/csrc/utils/object_ptr.h>

#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "autograd/context.h"
#include "autograd/operator_listener.h"
#include "autograd/recorded_operators.h"
#include "autograd/replay.h"
#include "autograd/saved_tensor.h"
#include "system/gil.h"
#include "system/mutex.h"

namespace torchoffload {

// The actions of a plan: one for the values of each counted operator.
struct BlockActions {
  enum class Action : uint8_t { Nothing = 0, Keep = 1, Move = 2 };
  struct Planned {
    Action action = Action::Nothing;
    bool runs_once = false;  // it is not called again
    // A bit for each storage that it makes:
    uint64_t rewritten = 0;  // a later operator writes to it
    uint64_t held = 0;  // it comes out differently each time, so it is held, whether or not the operator runs again
  };
  std::vector<c10::OperatorHandle> operators;
  std::vector<Planned> planned;  // by operator
  bool keeps_if_left = false;    // once a call has left the plan, nothing of it is computed again
};

class ReplayedTensor;

class RecordedCall final : public OperatorListener, public std::enable_shared_from_this<RecordedCall> {
 public:
  struct Options {
    std::shared_ptr<const BlockActions> plan;  // may be null: nothing is kept
    PyObject* context = nullptr;               // that moves values; borrowed. Null: none
    PyObject* observer = nullptr;              // has begins_again(), ends_again(moments), refused(what, address) and
                                               // inputs_were_written(); or null
    PyObject* clock = nullptr;                 // returns a moment; null: operators are not timed
    bool verifies = false;       // the call holds the tensors that it stands in for, and `verify` may be called
    bool times_replay = false;   // and not forward
    bool copies_inputs = false;  // those that the program may write to later, as by `x += block(x)`
  };
  explicit RecordedCall(const Options& options);
  ~RecordedCall() override;

  // Marks the storages of tensors that the block is given.
  void note_inputs(const std::vector<void*>& storages);

  // In forward.
  void call(const c10::OperatorHandle& op, torch::jit::Stack* stack) override;
  void opaque(const char* name, c10::ArrayRef<at::Tensor> inputs, Region region) override;
  std::unique_ptr<Saved> pack(PyObject* object, const c10::VariableVersion* wrapper = nullptr) REQUIRES(gil);

  // After forward: drops the recorded values and operators that nothing needs.
  void finish() REQUIRES(gil);

  // Between forward and finish(), if the call verifies: makes everything again and compares each bit. Returns the
  // storages whose values came out differently, each with the counted number of the operator that wrote to it last, or
  // -1 for one that is not counted. Throws the errors of replayed operators.
  std::vector<std::pair<int32_t, StorageNumber>> verify() REQUIRES(gil);
  // Ends that: holds for good all tensors that the call stands in for, or only those that came out differently.
  void settle(bool keeps_all) REQUIRES(gil);

  const RecordedOperators& record() const { return record_; }
  PyObject* context() { return context_.get(); }  // borrowed; may be null
  std::optional<int32_t> left_at() const { return left_at_; }
  uint64_t replay_count() const { return replay_count_; }
  uint64_t replayed_operator_count() const { return replayed_operator_count_; }
  // Moments before and after each counted operator, of forward if the call has a clock.
  struct Moment {
    int32_t counted;
    THPObjectPtr begin, end;
  };
  std::vector<Moment>& moments() { return moments_; }

 private:
  friend class ReplayedTensor;
  enum class Role : uint8_t { Read, Write, Scratch };
  struct Recording;  // of one operator
  // When an operator began and ended. It may throw, while this thread does not hold the GIL.
  struct Moments {
    Moments() = default;
    Moments(const Moments&) = delete;
    Moments& operator=(const Moments&) = delete;
    ~Moments();

    THPObjectPtr begin, end;
  };

  StorageNumber storage_of(const at::Tensor& tensor);
  StorageNumber add_storage(const at::Tensor& tensor);
  void watch(RecordedStorage& storage, const at::Tensor& tensor);
  void watch_view(const c10::IValue& value);
  void pin(RecordedStorage& storage, const c10::Storage& strong);
  void note_read(StorageNumber number, const at::Tensor& tensor, bool is_statistic);
  TensorRef ref_of(const at::Tensor& tensor, Role role, bool is_statistic, Recording& recording);
  void note_argument(c10::IValue& value, uint8_t argument, Role role, bool is_statistic, Recording& recording);
  void prepare_writes(Recording& recording);
  void note_results(Recording& recording, const torch::jit::Stack& stack);
  void note_writes(Recording& recording);
  bool is_remembered(const TensorRef& ref) const;
  void finish_recording(Recording&& recording, const OperatorTraits& traits, const BlockActions::Planned& planned,
                        bool may_be_remembered, const torch::jit::Stack& stack);
  static bool fills_results(const RecordedOperator& op);
  void keep(StorageNumber number, const at::Tensor& tensor, bool moves, const RecordedOperator& op);
  bool ran_elsewhere(const c10::Device& device);
  THPObjectPtr now();
  void note_moment(THPObjectPtr begin, THPObjectPtr end);

  std::unique_ptr<Saved> pack_whole(const RecordedStorage& recorded, const c10::Storage& storage,
                                    const c10::VariableVersion& version, bool is_filled) REQUIRES(gil);

  void finish_storage(StorageNumber number, const Replay& needs) REQUIRES(gil);
  void copy_input(StorageNumber number) REQUIRES(gil);
  void tell_written_inputs() REQUIRES(gil);
  void give_to_context(StorageNumber number) REQUIRES(gil);
  BlockActions::Planned planned_for(const c10::OperatorHandle& op, const OperatorTraits& traits) const;
  std::vector<StorageNumber> wanted() const;
  void replay(ReplayedTensor& asked) REQUIRES(gil);
  void run_replay(std::vector<StorageNumber> wanted, c10::function_ref<void(StorageNumber, const c10::Storage&)> give)
      REQUIRES(gil);
  void asked_for(ReplayedTensor& saved);
  void drop_values();
  void drop_reloaded_of_former() REQUIRES(gil);
  void drop_reloaded();
  void mark_written();
  [[noreturn]] void refuse(const ValueGone& gone);

  RecordedOperators record_;
  std::unordered_map<const c10::StorageImpl*, StorageNumber> numbers_;  // while it is recorded
  std::vector<const void*> input_storages_;
  std::vector<ReplayedTensor*> saved_;
  std::shared_ptr<const BlockActions> plan_;
  std::optional<int32_t> left_at_;
  int32_t counted_ = 0;
  THPObjectPtr context_, observer_, clock_;
  bool verifies_ = false;
  bool times_replay_ = false;
  bool copies_inputs_ = false;
  bool is_finished_ = false;
  bool is_busy_ = false;                    // operators are not recorded
  std::vector<bool> differs_;               // by storage, as verify() found
  std::vector<VersionMark> copied_inputs_;  // of the tensors of which the call holds a copy
  uint64_t replay_count_ = 0;
  uint64_t replayed_operator_count_ = 0;
  std::vector<Moment> moments_;
  Mutex replay_mutex_;  // one replay at a time
  const void* asking_node_ = nullptr;
  std::vector<ReplayedTensor*> handed_out_;
  // Were reloaded for a replay, and nodes ask for them, too. Held until the graph task ends; if the graph is retained,
  // until another call is replayed.
  std::vector<c10::Storage> reloaded_;
  int value_task_ = -1;  // the graph task that the values were made in
};

// Stands in for a saved tensor that the call can make again.
class ReplayedTensor final : public Saved {
 public:
  ReplayedTensor(std::shared_ptr<RecordedCall> call, StorageNumber storage, const at::Tensor& tensor);
  ~ReplayedTensor() override;

  void prepare() override REQUIRES(gil);
  at::Tensor unpack(Versions versions) override REQUIRES(gil);

 private:
  friend class RecordedCall;
  std::optional<LiveSave> describe() const override;
  at::Tensor stand_in() const;
  bool has_value();

  std::shared_ptr<RecordedCall> call_;
  StorageNumber storage_;
  c10::Device device_;
  VersionCheck version_check_;
  TensorLayout layout_;
  c10::Storage value_;
  // Once a node that asks once has it: it is there as long as the node, or the program, holds it.
  c10::weak_intrusive_ptr<c10::StorageImpl> handed_out_{c10::intrusive_ptr<c10::StorageImpl>()};
  at::Tensor truth_;             // while the call may be verified
  std::unique_ptr<Saved> kept_;  // it is not made again
};

// A saved tensor that was given to the call and moves. It holds the call, and so the storages that came back for the
// call's replay.
class SavedInput final : public Saved {
 public:
  SavedInput(std::shared_ptr<RecordedCall> call, std::shared_ptr<Saved> saved)
      : saved_(std::move(saved)), call_(std::move(call)) {}
  void prepare() override REQUIRES(gil) { saved_->prepare(); }
  at::Tensor unpack(Versions versions) override REQUIRES(gil);

 private:
  std::shared_ptr<Saved> saved_;
  std::shared_ptr<RecordedCall> call_;  // goes first: its own handle is not to ask for a value that is dropped
};

}  // namespace torchoffload
