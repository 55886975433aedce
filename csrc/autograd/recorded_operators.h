// RecordedOperators: the operators of one call of a planned block, below autograd, and the values that are held until
// they run again.
// Ownership:     holds storages that nobody in the call made, copies of some, and the values that a plan keeps. Of
//                storages that the call made and that can be made again it holds nothing. No tensor in it has a
//                history.
// Thread safety: recorded by one thread. Later several may read; the holders of values change under `held_mutex()`.
// Not handled:   values that no operator made; they are held as they were found, like all values from outside.
//
// Note [Storages and epochs]
// A value is named by its storage, by how many operators of the call had written to that storage (its epoch; to make it
// counts as the first one), and by a layout. So views and metadata need no replay, and a tensor's Python class does not
// matter. From some epoch on a storage may be pinned: its values are not made again but held, by a reference to the
// storage, whose value is that of the last epoch, or by copies that were made before it was written to. Every storage
// from outside is pinned from epoch 0. A storage that was written by an operator that must not run twice is pinned from
// that epoch on.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/Storage.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "autograd/operator_traits.h"
#include "autograd/random_states.h"
#include "autograd/saved_tensor.h"
#include "autograd/switches.h"
#include "autograd/tensor_layout.h"
#include "system/mutex.h"

namespace torchoffload {

using StorageNumber = uint32_t;
using OperatorNumber = uint32_t;
using Epoch = uint32_t;
inline constexpr Epoch kNeverPinned = UINT32_MAX;

// A tensor's version counter, without its memory, and the version that it had.
class VersionMark {
 public:
  explicit VersionMark(const c10::VariableVersion& version)
      : version_(version), marked_(version.enabled() ? version.current_version() : 0) {}
  bool has_changed() const { return version_.enabled() && version_.current_version() != marked_; }
  void mark_again() {
    if (version_.enabled()) marked_ = version_.current_version();
  }
  bool is_of(const c10::VariableVersion& other) const;
  const c10::VariableVersion& version() const { return version_; }

 private:
  c10::VariableVersion version_;
  uint32_t marked_;
};

// Operators drop values while PyTorch has released the GIL, which a Saved needs.
struct DeleteWithGil {
  DeleteWithGil() = default;
  explicit(false) DeleteWithGil(const std::default_delete<Saved>&) {}
  void operator()(Saved* saved) const;
};

// A storage that a plan keeps: itself, or the handle that a context gave for it.
struct KeptValue {
  Epoch epoch = 0;
  c10::Storage storage;
  std::unique_ptr<Saved, DeleteWithGil> packed;
  std::vector<VersionMark> versions;

  bool is_there() const { return static_cast<bool>(storage) || packed != nullptr; }
  bool has_changed() const;
};

struct RecordedStorage {
  // While it is recorded: its address stays its own.
  c10::weak_intrusive_ptr<c10::StorageImpl> weak{c10::intrusive_ptr<c10::StorageImpl>()};
  c10::Device device = c10::kCPU;
  uint64_t nbytes = 0;
  Epoch epoch = 0;
  Epoch pinned = kNeverPinned;
  std::vector<OperatorNumber> writers;  // by epoch, if it was made in the call
  int64_t read_epoch = -1;              // the last one that an operator has read
  bool is_input = false;
  bool is_leaf = false;  // a parameter, or another leaf that requires gradients
  bool is_movable = false;
  bool is_uninitialised = false;
  bool is_saved = false;
  bool is_made_unseen = false;        // by code that no listener looked into
  bool is_filled = false;             // as its operator returned
  bool stays = false;                 // it is held on its device, as the plan has it
  std::optional<TensorLayout> whole;  // of a tensor that has all of its bytes

  c10::Storage strong;
  std::shared_ptr<Saved> packed;  // instead of `strong`
  std::weak_ptr<Saved> given;     // autograd's Saved of the whole storage, if that moves
  std::vector<std::pair<Epoch, c10::Storage>> copies;
  std::vector<VersionMark> versions;
  KeptValue kept;

  bool is_pinned() const { return pinned <= epoch; }
  bool was_made_here() const { return pinned != 0; }
  const c10::Storage* copy_of(Epoch epoch) const;
};

// A tensor that an operator was given.
struct TensorRef {
  enum class From : uint8_t {
    Storage,  // `number` is a storage's
    Opaque,   // that of a tensor without a strided storage, which is held as it is
    Scratch,  // running statistics: the operator's changes of them are thrown away
    Nothing,  // an undefined tensor in a list
  };
  From from = From::Storage;
  bool requires_grad = false;
  uint32_t number = 0;
  Epoch epoch = 0;
  TensorLayout layout;
};

struct RecordedOperator {
  enum class ArgumentKind : uint8_t { Tensor, List, OptionalList };
  struct TensorArgument {
    ArgumentKind kind;
    uint8_t argument;
    uint32_t first_ref;
    uint32_t ref_count;
  };
  struct Made {
    uint16_t result;
    int32_t element;  // of a list of tensors; -1 if the result is a tensor
    StorageNumber storage;
  };
  explicit RecordedOperator(std::optional<c10::OperatorHandle> op) : handle(std::move(op)) {}

  std::optional<c10::OperatorHandle> handle;  // nothing: code that no listener looked into
  torch::jit::Stack arguments;                // without tensors
  c10::SmallVector<TensorArgument, 4> tensor_arguments;
  uint32_t first_ref = 0;
  uint32_t ref_count = 0;
  c10::SmallVector<Made, 1> makes;
  c10::SmallVector<StorageNumber, 1> writes;
  RandomStates random_states;
  int32_t counted = -1;        // its number in the block; -1 if forward need not call it equally often
  uint32_t switches = 0;       // their number
  bool runs_once = false;      // it is never replayed
  bool returns_early = false;  // its results and writes are there once somebody has waited for them
  bool is_needed = true;
};

// A value that is needed has changed, or its memory is gone.
class ValueGone : public std::runtime_error {
 public:
  ValueGone(const std::string& what, const void* storage_address)
      : std::runtime_error(what), storage(storage_address) {}
  const void* storage;  // compared, never dereferenced
};

struct RecordedOperators {
  std::vector<RecordedStorage> storages;
  std::vector<RecordedOperator> operators;
  std::vector<TensorRef> refs;
  std::vector<std::pair<at::Tensor, VersionMark>> opaques;
  std::vector<c10::Stream> streams;  // of each device that operators ran on
  std::vector<Switches> switches;    // as the call began, and each time that an operator found others

  // Whether a value need not be made again: it is held in any case, or a plan keeps it.
  bool is_held(StorageNumber number, Epoch epoch) const;
  bool is_kept(StorageNumber number, Epoch epoch) const;
  // Such a value, unless a context holds it. Throws ValueGone.
  c10::Storage held(StorageNumber number, Epoch epoch) const;
  Saved* packed(StorageNumber number, Epoch epoch) const;  // null if no context holds it
};

// Guards the part of a finished record that may change: the copies that a later call of a block makes before it writes.
Mutex& held_mutex();

// The bytes of a storage.
at::Tensor bytes_of(const c10::Storage& storage);
// A copy of a storage. Runs below autograd, and no mode sees it.
c10::Storage copied(const c10::Storage& storage);

// Excludes everything above kernels: autograd, autocast, and modes.
class BelowModes {
 public:
  BelowModes();

 private:
  c10::impl::ExcludeDispatchKeyGuard guard_;
};

}  // namespace torchoffload
