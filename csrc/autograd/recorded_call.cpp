#include "autograd/recorded_call.h"

#include <ATen/ops/equal.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <iterator>
#include <string_view>
#include <typeinfo>
#include <unordered_map>
#include <utility>

#include "autograd/held_tensor.h"
#include "autograd/hooks.h"
#include "autograd/input_copies.h"
#include "autograd/python_calls.h"
#include "autograd/replay.h"
#include "autograd/saved_wrapper.h"
#include "core/mutant.h"
#include "engine/operation.h"
#include "engine/program.h"
#include "engine/thread_state.h"

namespace torchoffload {

namespace {

constexpr uint64_t kMostOfStorage = 4;    // times the bytes that are read of it, for an input to be copied
constexpr uint64_t kCopiedBytes = 65536;  // tensors from outside up to this size are copied when they are read

// Locks a mutex whose holder may want the GIL, and so waits for it without the GIL.
class SCOPED_CAPABILITY LockWithGil {
 public:
  explicit LockWithGil(Mutex& mutex) ACQUIRE(mutex) : mutex_(mutex) {
    const WithoutGil without_gil;
    mutex_.lock();
  }
  ~LockWithGil() RELEASE() { mutex_.unlock(); }
  LockWithGil(const LockWithGil&) = delete;
  LockWithGil& operator=(const LockWithGil&) = delete;

 private:
  Mutex& mutex_;
};

const c10::StorageImpl* impl_of(const at::Tensor& tensor) { return tensor.storage().unsafeGetStorageImpl(); }

// An alias without history, with the tensor's version counter. Calls no operator.
at::Tensor alias_of(const at::Tensor& tensor) {
  return at::Tensor(tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(
      tensor.unsafeGetTensorImpl()->version_counter(), /*allow_tensor_metadata_change=*/true));
}

// ---- calls that hold a storage ----

// The finished calls that will read a storage which none of their operators made.
std::unordered_multimap<const void*, RecordedCall*>& readers() REQUIRES(held_mutex()) {
  static auto* const leaked = new std::unordered_multimap<const void*, RecordedCall*>;
  return *leaked;
}

}  // namespace

// All that is known of one operator while it is recorded.
struct RecordedCall::Recording {
  explicit Recording(const c10::OperatorHandle& handle) : op(handle) {}

  RecordedOperator op;
  c10::SmallVector<std::pair<StorageNumber, at::Tensor>, 2> written;
  bool has_opaque = false;
  bool reads_written = false;  // values that the block has written to storages from outside
  bool may_be_remembered = false;
};

RecordedCall::RecordedCall(const Options& options)
    : plan_(options.plan),
      context_(Py_XNewRef(options.context)),
      observer_(Py_XNewRef(options.observer)),
      clock_(Py_XNewRef(options.clock)),
      verifies_(options.verifies),
      times_replay_(options.times_replay),
      copies_inputs_(options.copies_inputs) {
  record_.switches.push_back(Switches::now());
}

RecordedCall::~RecordedCall() {
  {
    const MutexLock lock(held_mutex());
    for (const RecordedStorage& storage : record_.storages) {
      auto [each, end] = readers().equal_range(storage.strong.unsafeGetStorageImpl());
      while (each != end) each = each->second == this ? readers().erase(each) : std::next(each);
    }
  }
  const WithGil with_gil;  // for the handles of contexts, and for Python objects
  for (RecordedStorage& storage : record_.storages) {
    storage.packed.reset();
    storage.kept.packed.reset();
  }
  record_.operators.clear();
  context_ = nullptr;
  observer_ = nullptr;
  clock_ = nullptr;
  moments_.clear();
}

void RecordedCall::note_inputs(const std::vector<void*>& storages) {
  input_storages_.assign(storages.begin(), storages.end());
}

// ---- recording ----

StorageNumber RecordedCall::add_storage(const at::Tensor& tensor) {
  const c10::Storage& storage = tensor.storage();
  const auto number = static_cast<StorageNumber>(record_.storages.size());
  RecordedStorage& added = record_.storages.emplace_back();
  added.weak = storage.getWeakStorageImpl();
  added.device = storage.device();
  added.nbytes = storage.nbytes();
  if (TensorLayout layout(tensor);
      layout.span().begin == 0 && layout.span().end == added.nbytes && tensor.is_non_overlapping_and_dense())
    added.whole = std::move(layout);
  numbers_.emplace(storage.unsafeGetStorageImpl(), number);
  return number;
}

// The number of a storage. A storage that no operator of the call has made gets a new number.
StorageNumber RecordedCall::storage_of(const at::Tensor& tensor) {
  const auto found = numbers_.find(impl_of(tensor));
  if (found != numbers_.end()) {
    if (record_.storages[found->second].is_pinned()) watch(record_.storages[found->second], tensor);
    return found->second;
  }
  const StorageNumber number = add_storage(tensor);
  RecordedStorage& added = record_.storages[number];
  added.pinned = 0;
  added.is_input = std::ranges::find(input_storages_, impl_of(tensor)) != input_storages_.end();
  watch(added, tensor);
  return number;
}

void RecordedCall::watch(RecordedStorage& storage, const at::Tensor& tensor) {
  const at::Tensor owner = tensor.is_view() ? at::Tensor(tensor._base()) : tensor;
  storage.is_leaf |= !storage.is_input && owner.is_leaf() && owner.requires_grad();
  storage.is_movable |= storage.is_input || !owner.is_leaf();
  const c10::VariableVersion& version = tensor.unsafeGetTensorImpl()->version_counter();
  if (!version.enabled()) return;
  const auto is_known = [&](const VersionMark& each) { return each.is_of(version); };
  if (std::ranges::none_of(storage.versions, is_known)) storage.versions.emplace_back(version);
}

void RecordedCall::pin(RecordedStorage& storage, const c10::Storage& strong) {
  if (storage.pinned != kNeverPinned) return;
  storage.pinned = storage.epoch;
  storage.strong = strong;
}

void RecordedCall::note_read(StorageNumber number, const at::Tensor& tensor, bool is_statistic) {
  RecordedStorage& storage = record_.storages[number];
  // Either unseen code has filled the storage, or nobody has.
  if (storage.is_uninitialised && storage.nbytes != 0 && !mutated(Mutant::UninitialisedIsKept)) {
    pin(storage, tensor.storage());
    watch(storage, tensor);
  }
  storage.is_uninitialised = false;
  storage.read_epoch = storage.epoch;
  if (storage.is_pinned() && !storage.strong) storage.strong = tensor.storage();
  const bool is_from_outside = storage.pinned == 0 && storage.epoch == 0;
  if (!is_from_outside || storage.copy_of(0) != nullptr || storage.is_leaf || tensor.requires_grad()) return;
  const bool is_small = storage.nbytes <= kCopiedBytes;
  if ((is_small || is_statistic) && !mutated(Mutant::SmallForeignCopied))
    storage.copies.emplace_back(0, copied(storage.strong));
}

TensorRef RecordedCall::ref_of(const at::Tensor& tensor, Role role, bool is_statistic, Recording& recording) {
  TensorRef ref;
  if (!tensor.defined()) {
    ref.from = TensorRef::From::Nothing;
    return ref;
  }
  if (!TensorLayout::is_strided(tensor)) {
    ref.from = TensorRef::From::Opaque;
    ref.number = static_cast<uint32_t>(record_.opaques.size());
    record_.opaques.emplace_back(alias_of(tensor), VersionMark(tensor.unsafeGetTensorImpl()->version_counter()));
    recording.has_opaque = true;
    if (role == Role::Write) recording.op.runs_once = true;
    return ref;
  }
  ref.number = storage_of(tensor);
  RecordedStorage& storage = record_.storages[ref.number];
  if (role == Role::Read) note_read(ref.number, tensor, is_statistic);
  if (role != Role::Read) {
    if (storage.is_pinned() && !storage.strong) storage.strong = tensor.storage();
    if (role == Role::Scratch && storage.is_pinned()) ref.from = TensorRef::From::Scratch;
    const auto is_same = [&](const auto& each) { return each.first == ref.number; };
    if (std::ranges::none_of(recording.written, is_same)) recording.written.emplace_back(ref.number, tensor);
    if (role == Role::Write && storage.is_pinned()) recording.op.runs_once = true;
  }
  recording.reads_written |=
      role == Role::Read && storage.pinned != kNeverPinned && !storage.is_input && storage.epoch > storage.pinned;
  ref.epoch = storage.epoch;
  ref.requires_grad = tensor.requires_grad() && c10::isFloatingType(tensor.scalar_type());
  ref.layout = TensorLayout(tensor);
  return ref;
}

void RecordedCall::note_argument(c10::IValue& value, uint8_t argument, Role role, bool is_statistic,
                                 Recording& recording) {
  using ArgumentKind = RecordedOperator::ArgumentKind;
  const auto first = static_cast<uint32_t>(record_.refs.size());
  const auto add_tensors = [&](ArgumentKind kind) {
    const auto count = static_cast<uint32_t>(record_.refs.size()) - first;
    recording.op.tensor_arguments.push_back({kind, argument, first, count});
    recording.op.arguments.emplace_back();
  };
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (!tensor.defined() || tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
      recording.op.arguments.push_back(value);
      return;
    }
    record_.refs.push_back(ref_of(tensor, role, is_statistic, recording));
    add_tensors(ArgumentKind::Tensor);
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector())
      record_.refs.push_back(ref_of(tensor, role, is_statistic, recording));
    add_tensors(ArgumentKind::List);
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList().vec())
      record_.refs.push_back(ref_of(tensor.value_or(at::Tensor()), role, is_statistic, recording));
    add_tensors(ArgumentKind::OptionalList);
  } else {
    recording.op.runs_once |= value.isGenericDict() || value.isTuple();  // there may be tensors inside
    recording.op.arguments.push_back(value);
  }
}

// Before an operator writes: copies the values that somebody will read again later.
void RecordedCall::prepare_writes(Recording& recording) {
  if (recording.has_opaque && !recording.written.empty()) recording.op.runs_once = true;
  for (const auto& [number, tensor] : recording.written) {
    RecordedStorage& storage = record_.storages[number];
    if (!storage.is_pinned() || mutated(Mutant::CopyBeforeWrite)) continue;
    if (storage.read_epoch == static_cast<int64_t>(storage.epoch) && storage.copy_of(storage.epoch) == nullptr)
      storage.copies.emplace_back(storage.epoch, copied(storage.strong));
    const MutexLock lock(held_mutex());
    const void* const address = storage.strong.unsafeGetStorageImpl();
    const auto [begin, end] = readers().equal_range(address);
    for (auto each = begin; each != end; ++each) {
      for (RecordedStorage& theirs : each->second->record_.storages) {
        const bool is_it = theirs.strong.unsafeGetStorageImpl() == address && theirs.copy_of(theirs.epoch) == nullptr;
        if (is_it) theirs.copies.emplace_back(theirs.epoch, copied(theirs.strong));
      }
    }
  }
}

void RecordedCall::note_results(Recording& recording, const torch::jit::Stack& stack) {
  const size_t result_count = recording.op.handle->schema().returns().size();
  const auto note = [&](const at::Tensor& tensor, size_t result, int32_t element) {
    if (!tensor.defined() || !TensorLayout::is_strided(tensor) || numbers_.contains(impl_of(tensor))) return;
    const StorageNumber number = add_storage(tensor);
    RecordedStorage& made = record_.storages[number];
    made.epoch = 1;
    made.writers.push_back(static_cast<OperatorNumber>(record_.operators.size()));
    recording.op.makes.push_back({static_cast<uint16_t>(result), element, number});
  };
  for (size_t result = 0; result < result_count; ++result) {
    const c10::IValue& value = stack[stack.size() - result_count + result];
    if (value.isTensor()) {
      note(value.toTensor(), result, -1);
    } else if (value.isTensorList()) {
      int32_t element = 0;
      for (const at::Tensor& tensor : value.toTensorVector()) note(tensor, result, element++);
    }
  }
}

void RecordedCall::note_writes(Recording& recording) {
  for (const auto& [number, tensor] : recording.written) {
    RecordedStorage& storage = record_.storages[number];
    ++storage.epoch;
    storage.writers.push_back(static_cast<OperatorNumber>(record_.operators.size()));
    storage.is_uninitialised = false;
    storage.nbytes = tensor.storage().nbytes();
    storage.kept = {};
    if (recording.op.runs_once) pin(storage, tensor.storage());
    if (storage.is_pinned()) watch(storage, tensor);
    recording.op.writes.push_back(number);
  }
}

// Did the operator run on a stream that is not its device's first one in this call?
bool RecordedCall::ran_elsewhere(const c10::Device& device) {
  if (device.is_cpu() || device.is_meta()) return false;
  const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  for (const c10::Stream& known : record_.streams) {
    if (known.device() == device) return known != stream;
  }
  record_.streams.push_back(stream);
  return false;
}

THPObjectPtr RecordedCall::now() {
  const WithGil with_gil;
  return THPObjectPtr(or_throw(PyObject_CallNoArgs(clock_.get())));
}

// The action of the plan for the next operator that counts. A collective that no plan has is not called again: the plan
// of another rank may keep its result.
BlockActions::Planned RecordedCall::planned_for(const c10::OperatorHandle& op, const OperatorTraits& traits) const {
  if (!plan_) return {};
  const auto number = static_cast<size_t>(counted_);
  const bool is_planned = !left_at_ && number < plan_->operators.size() && plan_->operators[number] == op;
  if (is_planned) return plan_->planned[number];
  return {.runs_once = traits.communicates || (left_at_ && plan_->keeps_if_left)};
}

void RecordedCall::call(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const OperatorTraits& traits = traits_of(op);
  if (traits.makes_views || is_finished_ || is_busy_) {
    op.callBoxed(stack);
    if (traits.has_own_counter) watch_view(stack->back());
    return;
  }
  const size_t argument_count = op.schema().arguments().size();
  const size_t first_argument = stack->size() - argument_count;
  const auto first_ref = static_cast<uint32_t>(record_.refs.size());
  const auto first_opaque = record_.opaques.size();
  Recording recording(op);
  recording.op.first_ref = first_ref;
  recording.op.arguments.reserve(argument_count);
  const auto is_among = [](const OperatorTraits::Places& places, size_t place) {
    return std::ranges::find(places, static_cast<uint8_t>(place)) != places.end();
  };
  bool trains = !traits.statistics.empty() && traits.training.empty();
  for (const uint8_t place : traits.training) {
    const c10::IValue& value = (*stack)[first_argument + place];
    trains |= value.isBool() && value.toBool();
  }
  for (size_t place = 0; place < argument_count; ++place) {
    const bool is_statistic = is_among(traits.statistics, place);
    Role role = is_among(traits.writes, place) ? Role::Write : Role::Read;
    if (is_statistic && trains) role = Role::Scratch;
    note_argument((*stack)[first_argument + place], static_cast<uint8_t>(place), role, is_statistic, recording);
  }
  recording.op.ref_count = static_cast<uint32_t>(record_.refs.size()) - first_ref;
  recording.op.returns_early = traits.returns_early;
  recording.op.runs_once |= traits.runs_once || (recording.reads_written && recording.written.empty());
  const bool may_be_remembered = traits.casts && recording.op.ref_count == 1 && is_remembered(record_.refs[first_ref]);
  const auto planned = may_be_remembered ? BlockActions::Planned() : planned_for(op, traits);
  recording.op.runs_once |= planned.runs_once;
  // A second call would draw other numbers, and change those that the next call of the program draws.
  if (traits.dropout_state >= 0) {
    const c10::IValue& state = (*stack)[first_argument + traits.dropout_state];
    recording.op.runs_once |= state.isTensor() && state.toTensor().defined();
  }
  if (const Switches switches = Switches::now(); switches != record_.switches.back())
    record_.switches.push_back(switches);
  recording.op.switches = static_cast<uint32_t>(record_.switches.size() - 1);
  prepare_writes(recording);
  recording.op.random_states =
      RandomStates(traits, c10::ArrayRef<c10::IValue>(stack->data() + first_argument, argument_count));
  const bool is_timed = clock_ && !times_replay_;
  Moments moments;
  if (is_timed) moments.begin = now();
  op.callBoxed(stack);
  if (is_timed) moments.end = now();
  if (traits.may_draw && !traits.draws) recording.op.random_states.keep_changed();
  note_results(recording, *stack);
  if (recording.op.makes.empty() && recording.written.empty()) {
    record_.refs.resize(first_ref);
    record_.opaques.erase(record_.opaques.begin() + static_cast<ptrdiff_t>(first_opaque), record_.opaques.end());
    return;
  }
  finish_recording(std::move(recording), traits, planned, may_be_remembered, *stack);
  if (is_timed) note_moment(std::move(moments.begin), std::move(moments.end));
}

// Autocast casts a leaf once in each of its regions and then remembers the result, so forward need not cast it each
// time.
bool RecordedCall::is_remembered(const TensorRef& ref) const {
  if (ref.from != TensorRef::From::Storage) return false;
  const RecordedStorage& storage = record_.storages[ref.number];
  return storage.pinned == 0 && (storage.is_leaf || storage.is_input);
}

void RecordedCall::finish_recording(Recording&& recording, const OperatorTraits& traits,
                                    const BlockActions::Planned& planned, bool may_be_remembered,
                                    const torch::jit::Stack& stack) {
  RecordedOperator& op = recording.op;
  const size_t result_count = op.handle->schema().returns().size();
  const auto tensor_of = [&](const RecordedOperator::Made& made) {
    const c10::IValue& value = stack[stack.size() - result_count + made.result];
    return made.element < 0 ? value.toTensor() : value.toTensorList().get(static_cast<size_t>(made.element));
  };
  // Operators on a second stream are not ordered behind those on the first one, so they are not replayed on that.
  bool is_elsewhere = false;
  for (uint32_t ref = op.first_ref; ref < op.first_ref + op.ref_count; ++ref) {
    const TensorRef& read = record_.refs[ref];
    if (read.from == TensorRef::From::Storage) is_elsewhere |= ran_elsewhere(record_.storages[read.number].device);
  }
  for (const RecordedOperator::Made& made : op.makes)
    is_elsewhere |= ran_elsewhere(record_.storages[made.storage].device);
  op.runs_once |= is_elsewhere;
  const auto has_bit = [](uint64_t mask, size_t place) { return place < 64 && ((mask >> place) & 1) != 0; };
  for (size_t place = 0; place < op.makes.size(); ++place) {
    RecordedStorage& storage = record_.storages[op.makes[place].storage];
    storage.is_uninitialised = traits.leaves_uninitialised;
    if (!op.runs_once && !has_bit(planned.held, place)) continue;
    const at::Tensor tensor = tensor_of(op.makes[place]);
    storage.is_filled = fills_results(op) && !is_elsewhere;
    storage.stays = planned.action == BlockActions::Action::Keep;
    pin(storage, tensor.storage());
    watch(storage, tensor);
  }
  note_writes(recording);
  if (!may_be_remembered) {
    const auto number = static_cast<size_t>(counted_);
    const bool is_planned = plan_ && number < plan_->operators.size() && plan_->operators[number] == *op.handle;
    if (plan_ && !is_planned && !left_at_) left_at_ = counted_;
    op.counted = counted_++;
  }
  if (planned.action != BlockActions::Action::Nothing) {
    const bool moves = planned.action == BlockActions::Action::Move && context_;
    for (size_t place = 0; place < op.makes.size(); ++place) {
      if (!has_bit(planned.rewritten, place)) keep(op.makes[place].storage, tensor_of(op.makes[place]), moves, op);
    }
    for (const auto& [number, tensor] : recording.written) keep(number, tensor, moves, op);
  }
  record_.operators.push_back(std::move(op));
}

// Other operators may fill their results on a stream of their own, which the program joins later.
bool RecordedCall::fills_results(const RecordedOperator& op) {
  const std::string& name = op.handle->schema().name();
  return name.starts_with("aten::") || name.starts_with("prims::");
}

void RecordedCall::keep(StorageNumber number, const at::Tensor& tensor, bool moves, const RecordedOperator& op) {
  RecordedStorage& storage = record_.storages[number];
  if (storage.is_pinned() || storage.is_uninitialised || tensor.is_inference() || storage.nbytes == 0) return;
  const c10::VariableVersion& version = tensor.unsafeGetTensorImpl()->version_counter();
  storage.kept.epoch = storage.epoch;
  storage.kept.versions.emplace_back(version);
  if (!moves) {
    storage.kept.storage = tensor.storage();
    return;
  }
  const WithGil with_gil;
  storage.kept.packed = pack_whole(storage, tensor.storage(), version, fills_results(op));
}

// For a view, with a version counter of its own, of a kept value.
void RecordedCall::watch_view(const c10::IValue& value) {
  const auto watch_one = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || !TensorLayout::is_strided(tensor)) return;
    const auto found = numbers_.find(impl_of(tensor));
    if (found == numbers_.end()) return;
    KeptValue& kept = record_.storages[found->second].kept;
    if (kept.is_there()) kept.versions.emplace_back(tensor.unsafeGetTensorImpl()->version_counter());
  };
  if (is_finished_ || is_busy_) return;
  if (value.isTensor()) watch_one(value.toTensor());
  if (!value.isTensorList()) return;
  for (const at::Tensor& tensor : value.toTensorVector()) watch_one(tensor);
}

void RecordedCall::note_moment(THPObjectPtr begin, THPObjectPtr end) {
  const WithGil with_gil;
  moments_.push_back({record_.operators.back().counted, std::move(begin), std::move(end)});
}

RecordedCall::Moments::~Moments() {
  if (!begin && !end) return;
  const WithGil with_gil;
  begin = nullptr;
  end = nullptr;
}

void RecordedCall::opaque(const char* name, c10::ArrayRef<at::Tensor> inputs, Region region) {
  std::vector<StorageNumber> given;
  const std::string_view what = name;
  const bool may_write =
      what.find("triton") != std::string_view::npos || what.find("auto_functionalized") != std::string_view::npos;
  for (const at::Tensor& tensor : inputs) {
    if (!may_write || is_finished_ || !TensorLayout::is_strided(tensor)) continue;
    const auto found = numbers_.find(impl_of(tensor));
    if (found != numbers_.end()) given.push_back(found->second);
  }
  const std::vector<at::Tensor> outputs = region();
  if (is_finished_) return;
  RecordedOperator op(std::nullopt);
  op.runs_once = true;
  for (const StorageNumber number : given) {
    RecordedStorage& storage = record_.storages[number];
    const c10::intrusive_ptr<c10::StorageImpl> alive = storage.weak.lock();
    if (storage.is_pinned() || storage.is_uninitialised || !alive) continue;
    ++storage.epoch;
    storage.writers.push_back(static_cast<OperatorNumber>(record_.operators.size()));
    storage.kept = {};
    pin(storage, c10::Storage(alive));
    op.writes.push_back(number);
  }
  if (!op.writes.empty()) record_.operators.push_back(std::move(op));
  for (const at::Tensor& tensor : outputs) {
    if (!tensor.defined() || !TensorLayout::is_strided(tensor) || numbers_.contains(impl_of(tensor))) continue;
    RecordedStorage& made = record_.storages[storage_of(tensor)];
    made.is_made_unseen = true;
  }
}

// ---- saved tensors ----

std::unique_ptr<Saved> RecordedCall::pack_whole(const RecordedStorage& recorded, const c10::Storage& storage,
                                                const c10::VariableVersion& version, bool is_filled) {
  Context* const context = context_of(context_.get());
  if (context == nullptr) throw python_error();
  const at::Tensor tensor = recorded.whole ? recorded.whole->build(storage, 0, version) : bytes_of(storage);
  std::optional<PacksMade> packs_made;
  if (is_filled) packs_made.emplace();
  const Operation operation;
  std::unique_ptr<Saved> saved = context->pack(tensor, Context::TypeKind::Tensor, /*is_view_of_parameter=*/false);
  if (is_filled) Engine::flush_pending();
  return saved;
}

std::unique_ptr<Saved> RecordedCall::pack(PyObject* object, const c10::VariableVersion* wrapper) {
  const at::Tensor& tensor = THPVariable_Unpack(object);
  Context* context = nullptr;
  if (context_ && (context = context_of(context_.get())) == nullptr) throw python_error();
  if (!TensorLayout::is_plain(tensor)) {
    if (!THPVariable_CheckExact(object) && SavedWrapper::is_wrapper(object)) {
      const c10::VariableVersion outermost =
          wrapper != nullptr ? *wrapper : torch::autograd::impl::version_counter(tensor);
      return std::make_unique<SavedWrapper>(object,
                                            [&](PyObject* inner) REQUIRES(gil) { return pack(inner, &outermost); });
    }
    return pack_as_is(context, object, wrapper);
  }
  if (is_finished_) return pack_as_is(context, object, wrapper);
  const auto found = numbers_.find(impl_of(tensor));
  const StorageNumber number = found != numbers_.end() ? found->second : storage_of(tensor);
  RecordedStorage& storage = record_.storages[number];
  storage.is_saved = true;
  const bool is_found = storage.is_uninitialised && storage.nbytes != 0 && !storage.is_pinned();
  if (is_found && !mutated(Mutant::UninitialisedIsKept)) {
    pin(storage, tensor.storage());
    watch(storage, tensor);
  }
  if (storage.is_pinned()) {
    std::unique_ptr<Saved> as_is = pack_as_is(storage.stays ? nullptr : context, object, wrapper);
    if (context == nullptr || storage.is_leaf || !storage.is_movable || storage.stays) return as_is;
    std::shared_ptr<Saved> shared = std::move(as_is);
    const Span span = TensorLayout(tensor).span();
    if (span.begin == 0 && span.end == storage.nbytes) storage.given = shared;
    return std::make_unique<SavedInput>(shared_from_this(), std::move(shared));
  }
  auto saved = std::make_unique<ReplayedTensor>(shared_from_this(), number, tensor);
  if (verifies_) saved->truth_ = alias_of(tensor);
  return saved;
}

ReplayedTensor::ReplayedTensor(std::shared_ptr<RecordedCall> call, StorageNumber storage, const at::Tensor& tensor)
    : call_(std::move(call)), storage_(storage), device_(tensor.device()), version_check_(tensor), layout_(tensor) {
  call_->saved_.push_back(this);
}

ReplayedTensor::~ReplayedTensor() {
  leave_list();
  std::erase(call_->saved_, this);
  std::erase(call_->handed_out_, this);
}

at::Tensor ReplayedTensor::stand_in() const {
  return layout_.build(c10::Storage::create_legacy(device_), 0, version_check_.version());
}

void ReplayedTensor::prepare() {
  const bool is_checked = !mutated(Mutant::ReplayedVersionChecked);
  if (is_checked) version_check_.check([this] { return stand_in(); });
  if (!kept_ && !has_value()) call_->replay(*this);
}

bool ReplayedTensor::has_value() {
  if (value_) return true;
  if (c10::intrusive_ptr<c10::StorageImpl> alive = handed_out_.lock()) value_ = c10::Storage(std::move(alive));
  return static_cast<bool>(value_);
}

at::Tensor ReplayedTensor::unpack(Versions versions) {
  if (versions == Versions::Check && !mutated(Mutant::ReplayedVersionChecked))
    version_check_.check([this] { return stand_in(); });
  if (kept_) return kept_->unpack(Versions::Ignore);
  if (!has_value()) call_->replay(*this);
  at::Tensor tensor = layout_.build(value_, 0, version_check_.version());
  call_->asked_for(*this);
  return version_check_.is_held_without_us() ? held(tensor) : tensor;
}

at::Tensor SavedInput::unpack(Versions versions) { return saved_->unpack(versions); }

std::optional<LiveSave> ReplayedTensor::describe() const {
  if (!value_) return std::nullopt;
  const c10::IntArrayRef sizes = layout_.sizes();
  return LiveSave{layout_.dtype(), sizes.vec(), c10::multiply_integers(sizes) * layout_.itemsize(), 0};
}

// ---- after forward ----

std::vector<StorageNumber> RecordedCall::wanted() const {
  std::vector<StorageNumber> wanted;
  for (const ReplayedTensor* const each : saved_) {
    if (!each->kept_ && !each->value_) wanted.push_back(each->storage_);
  }
  std::ranges::sort(wanted);
  wanted.erase(std::ranges::unique(wanted).begin(), wanted.end());
  return wanted;
}

void RecordedCall::finish() {
  if (std::exchange(is_finished_, true)) return;
  numbers_.clear();
  const Replay needs(record_, wanted(), Replay::Uses::NothingKept);
  std::vector<bool> is_needed(record_.operators.size(), false);
  std::vector<bool> has_opaque(record_.opaques.size(), false);
  for (const OperatorNumber number : needs.operators()) {
    is_needed[number] = true;
    const RecordedOperator& op = record_.operators[number];
    for (uint32_t ref = op.first_ref; ref < op.first_ref + op.ref_count; ++ref) {
      if (record_.refs[ref].from == TensorRef::From::Opaque) has_opaque[record_.refs[ref].number] = true;
    }
  }
  for (size_t number = 0; number < is_needed.size(); ++number) {
    if (is_needed[number]) continue;
    RecordedOperator& op = record_.operators[number];
    op.is_needed = false;
    op.arguments = {};
    op.random_states = {};
  }
  for (size_t number = 0; number < has_opaque.size(); ++number) {
    if (!has_opaque[number]) record_.opaques[number].first = at::Tensor();
  }
  for (StorageNumber number = 0; number < record_.storages.size(); ++number) finish_storage(number, needs);
}

// Drops a storage's held values that nothing needs. Gives the storage to the context if its value is needed and may
// move.
void RecordedCall::finish_storage(StorageNumber number, const Replay& needs) {
  RecordedStorage& storage = record_.storages[number];
  storage.weak.reset();
  const auto is_read = [&](Epoch epoch) {
    return std::ranges::find(needs.held(), std::pair(number, epoch)) != needs.held().end();
  };
  if (!needs.makes(number)) storage.kept = {};
  for (VersionMark& each : storage.kept.versions) each.mark_again();
  if (!storage.is_pinned()) return;
  std::erase_if(storage.copies, [&](const auto& each) { return !is_read(each.first); });
  if (!is_read(storage.epoch) || storage.copy_of(storage.epoch) != nullptr) {
    storage.strong = {};
    storage.versions.clear();
    return;
  }
  if (storage.epoch > 0) {
    for (VersionMark& each : storage.versions) each.mark_again();
  }
  if (copies_inputs_ && storage.pinned == 0 && storage.is_movable && !storage.is_leaf && !storage.is_saved)
    copy_input(number);
  const bool is_given = storage.pinned == 0;
  // A write to a result that autograd has saved, too, is an error without us, so that no program makes one.
  const bool is_result = storage.pinned == storage.epoch && storage.is_saved && storage.is_filled && !storage.stays;
  const bool moves =
      context_ && storage.is_movable && !storage.is_leaf && (is_given || is_result) && storage.versions.size() == 1;
  if (moves && std::ranges::none_of(storage.versions, [](const auto& each) { return each.has_changed(); })) {
    give_to_context(number);
    return;
  }
  const MutexLock lock(held_mutex());
  readers().emplace(storage.strong.unsafeGetStorageImpl(), this);
}

// Holds a copy of a tensor instead of the tensor. If autograd has saved it as well, a write to it is an error without
// us, so that no program makes one. A small part of a storage, such as a batch of a data set that is on the device, is
// no value that the program goes on computing with.
void RecordedCall::copy_input(StorageNumber number) {
  RecordedStorage& storage = record_.storages[number];
  uint64_t read_bytes = 0;
  for (const TensorRef& ref : record_.refs) {
    if (ref.from != TensorRef::From::Storage || ref.number != number) continue;
    const Span span = ref.layout.span();
    read_bytes = std::max<uint64_t>(read_bytes, span.end - span.begin);
  }
  if (storage.versions.empty() || storage.nbytes > kMostOfStorage * read_bytes) return;
  const InputCopy copy = copy_of_input(storage.strong, storage.versions.front());
  std::ranges::move(storage.versions, std::back_inserter(copied_inputs_));
  storage.versions.assign(1, VersionMark(copy.version));
  storage.strong = copy.storage;
}

// Tells, in backward, that the program needs the copies of inputs that the call has made.
void RecordedCall::tell_written_inputs() {
  const bool is_written = std::ranges::any_of(copied_inputs_, [](const auto& each) { return each.has_changed(); });
  copied_inputs_.clear();
  if (is_written && observer_)
    THPObjectPtr(or_throw(PyObject_CallMethod(observer_.get(), "inputs_were_written", nullptr)));
}

// A context brings back first the tensors that it was given last. So the values that the replay asks for are given to
// it now, behind all that autograd has saved in the call. Values that are superfluous under a plan, unless a kept value
// is lost, come back with the tensors that autograd has saved of them.
void RecordedCall::give_to_context(StorageNumber number) {
  RecordedStorage& storage = record_.storages[number];
  storage.packed = storage.given.lock();
  const std::pair asked(number, storage.epoch);
  if (storage.packed != nullptr) {
    const Replay planned(record_, wanted(), Replay::Uses::All);
    if (std::ranges::find(planned.held(), asked) != planned.held().end()) storage.packed = nullptr;
  }
  if (storage.packed == nullptr)
    storage.packed = pack_whole(storage, storage.strong, storage.versions.front().version(), /*is_filled=*/true);
  storage.strong = {};
}

namespace {

struct Truth {
  StorageNumber storage;
  TensorLayout layout;
  at::Tensor tensor;
};

}  // namespace

std::vector<std::pair<int32_t, StorageNumber>> RecordedCall::verify() {
  std::vector<Truth> truths;
  for (const ReplayedTensor* const each : saved_) truths.push_back({each->storage_, each->layout_, each->truth_});
  std::vector<bool> differs(record_.storages.size(), false);
  run_replay(wanted(), [&](StorageNumber number, const c10::Storage& storage) {
    for (const Truth& truth : truths) {
      if (truth.storage != number || differs[number]) continue;
      differs[number] = !at::equal(truth.layout.bits_on(truth.tensor.storage()), truth.layout.bits_on(storage));
    }
  });
  std::vector<std::pair<int32_t, StorageNumber>> different;
  for (StorageNumber number = 0; number < differs.size(); ++number) {
    if (differs[number])
      different.emplace_back(record_.operators[record_.storages[number].writers.back()].counted, number);
  }
  differs_ = std::move(differs);
  return different;
}

void RecordedCall::settle(bool keeps_all) {
  for (ReplayedTensor* const each : std::vector<ReplayedTensor*>(saved_)) {
    const bool keeps = keeps_all || (each->storage_ < differs_.size() && differs_[each->storage_]);
    const at::Tensor truth = std::exchange(each->truth_, at::Tensor());
    if (!keeps || !truth.defined()) continue;
    const Operation operation;
    Context* const context = context_ ? context_of(context_.get()) : nullptr;
    if (context != nullptr) {
      each->kept_ = context->pack(truth, Context::TypeKind::Tensor, /*is_view_of_parameter=*/false);
    } else {
      each->kept_ = std::make_unique<SavedTensor>(truth);
    }
  }
}

// ---- replay ----

// Autograd raises the versions of the tensors that an operator has written to only after the operator, and so after it
// was recorded.
void RecordedCall::mark_written() {
  for (RecordedStorage& storage : record_.storages) {
    for (VersionMark& each : storage.kept.versions) each.mark_again();
    if (storage.epoch == 0) continue;
    for (VersionMark& each : storage.versions) each.mark_again();
  }
}

void RecordedCall::refuse(const ValueGone& gone) {
  THPObjectPtr message;
  if (observer_) {
    message = THPObjectPtr(PyObject_CallMethod(observer_.get(), "refused", "sN", gone.what(),
                                               PyLong_FromVoidPtr(const_cast<void*>(gone.storage))));
    if (!message) throw python_error();
  }
  const char* const text = message && PyUnicode_Check(message.get()) ? PyUnicode_AsUTF8(message.get()) : nullptr;
  TORCH_CHECK(false, text != nullptr ? std::string(text) : std::string("torchoffload: a tensor ") + gone.what());
}

void RecordedCall::run_replay(std::vector<StorageNumber> wanted,
                              c10::function_ref<void(StorageNumber, const c10::Storage&)> give) {
  if (!is_finished_) mark_written();
  try {
    Replay replay(record_, std::move(wanted), Replay::Uses::All);
    ++replay_count_;
    replayed_operator_count_ += replay.operators().size();
    const InForwardsState state(record_);
    {
      const Operation operation;
      replay.prepare();
      reloaded_ = replay.take_reloaded();
      Engine::flush_pending();
    }
    std::vector<Moment> moments;
    const auto around = [&](OperatorNumber number, bool is_before) {
      if (!times_replay_) return;
      if (is_before) {
        THPObjectPtr begin = now();
        const WithGil with_gil;
        moments.push_back({record_.operators[number].counted, std::move(begin), {}});
      } else {
        moments.back().end = now();
      }
    };
    {
      const WithoutGil without_gil;
      replay.run(
          [&](StorageNumber number, const c10::Storage& storage) {
            state.hand_over(storage);
            give(number, storage);
          },
          around);
    }
    if (times_replay_) moments_ = std::move(moments);
  } catch (const ValueGone& gone) {
    refuse(gone);
  }
}

// The nodes of a retained graph drop nothing. So the storages that were reloaded for a call's replay are dropped once
// another call is replayed. If a node asks for one later, as in a branch beside that call, it is reloaded again.
void RecordedCall::drop_reloaded_of_former() {
  static std::weak_ptr<RecordedCall>* const latest = new std::weak_ptr<RecordedCall>;  // leaked on purpose
  const std::shared_ptr<RecordedCall> former = std::exchange(*latest, weak_from_this()).lock();
  if (former && former.get() != this) former->drop_reloaded();
}

// The list is emptied first: to free memory may release the GIL, and then another thread may look at the list.
void RecordedCall::drop_reloaded() { const std::vector<c10::Storage> dropped = std::exchange(reloaded_, {}); }

void RecordedCall::replay(ReplayedTensor& asked) {
  const std::shared_ptr<RecordedCall> alive = shared_from_this();
  const LockWithGil lock(replay_mutex_);
  if (asked.value_) return;  // another thread has made it meanwhile
  tell_written_inputs();
  bool keeps_for_later = true;
  if (observer_) {
    THPObjectPtr told(or_throw(PyObject_CallMethod(observer_.get(), "begins_again", nullptr)));
    keeps_for_later = PyObject_IsTrue(told.get()) == 1;
  }
  const int graph_task = program::graph_task();
  if (graph_task != kNoGraphTask && program::keeps_graph()) drop_reloaded_of_former();
  std::vector<StorageNumber> all = graph_task != kNoGraphTask ? wanted() : std::vector<StorageNumber>{asked.storage_};
  std::vector<c10::Storage> values(record_.storages.size());
  run_replay(std::move(all), [&](StorageNumber number, const c10::Storage& storage) { values[number] = storage; });
  for (ReplayedTensor* const each : saved_) {
    if (!each->value_ && !each->kept_ && values[each->storage_]) each->value_ = values[each->storage_];
  }
  values.clear();
  // Without a retained graph no node asks twice. If another part of the graph has a backward of its own, kept values
  // are made again for that. So are they for a later backward through a retained graph, unless the plan counts the kept
  // values until then.
  if (graph_task != kNoGraphTask && !(program::keeps_graph() && keeps_for_later)) {
    for (RecordedStorage& storage : record_.storages) storage.kept = {};
  }
  if (graph_task != kNoGraphTask && graph_task != value_task_) {
    value_task_ = graph_task;
    program::at_end_of_graph_task([weak = weak_from_this()] {
      if (Operation::is_shut_down()) return;
      const WithGil with_gil;
      if (const std::shared_ptr<RecordedCall> call = weak.lock()) call->drop_values();
    });
  }
  if (observer_) {
    THPObjectPtr told(or_throw(PyList_New(0)));
    for (const Moment& each : times_replay_ ? std::exchange(moments_, {}) : std::vector<Moment>()) {
      THPObjectPtr moment(or_throw(Py_BuildValue("iOO", each.counted, each.begin.get(), each.end.get())));
      if (PyList_Append(told.get(), moment.get()) != 0) throw python_error();
    }
    const THPObjectPtr result(or_throw(PyObject_CallMethod(observer_.get(), "ends_again", "O", told.get())));
  }
}

namespace {

// PyTorch's own nodes ask once for each tensor, and drop it as soon as they have computed. Autograd drops the saved
// tensors of a node later: only once it has summed the node's results to their sizes, which takes memory as well.
bool asks_once(const torch::autograd::Node* node) {
  static constexpr std::string_view kGenerated = "N5torch8autograd9generated";
  return node != nullptr && std::string_view(typeid(*node).name()).starts_with(kGenerated);
}

}  // namespace

// With a graph that is retained nobody drops a saved tensor once its node has run. A node that may ask twice is done
// once another one asks.
void RecordedCall::asked_for(ReplayedTensor& saved) {
  if (program::graph_task() == kNoGraphTask) {
    saved.value_ = {};
    return;
  }
  const torch::autograd::Node* const node = torch::autograd::get_current_node().get();
  const bool keeps_graph = program::keeps_graph();
  if (keeps_graph && node != asking_node_) {
    for (ReplayedTensor* const each : std::exchange(handed_out_, {})) {
      if (each != &saved) each->value_ = {};
    }
    asking_node_ = node;
  }
  if (asks_once(node)) {
    saved.handed_out_ = saved.value_.getWeakStorageImpl();
    saved.value_ = {};
  } else if (keeps_graph) {
    handed_out_.push_back(&saved);
  }
}

// A backward has ended. The values that it made live on if the program holds them, and the next backward makes them
// again.
void RecordedCall::drop_values() {
  handed_out_.clear();
  asking_node_ = nullptr;
  value_task_ = kNoGraphTask;
  drop_reloaded();
  for (ReplayedTensor* const each : saved_) each->value_ = {};
}

}  // namespace torchoffload
