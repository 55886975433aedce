#include "autograd/replay.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/Event.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "core/mutant.h"

namespace torchoffload {

Replay::Replay(const RecordedOperators& record, std::vector<StorageNumber> wanted, Uses uses)
    : record_(record), uses_(uses), wanted_(std::move(wanted)) {
  const size_t storage_count = record.storages.size();
  made_.assign(storage_count, 0);
  values_.resize(storage_count);
  loaded_.resize(storage_count);
  is_wanted_.assign(storage_count, false);
  is_on_its_way_.assign(storage_count, false);
  find_needed();
  find_last_uses();
}

void Replay::need(StorageNumber number, Epoch epoch) {
  const bool is_kept = uses_ == Uses::All && record_.is_kept(number, epoch);
  if (!is_kept && !record_.is_held(number, epoch)) {
    made_[number] = std::max(made_[number], epoch);
    return;
  }
  for (const auto& [of, storage] : loaded_[number]) {
    if (of == epoch) return;
  }
  loaded_[number].emplace_back(epoch, c10::Storage());
  held_.emplace_back(number, epoch);
}

void Replay::find_needed() {
  std::vector<bool> is_needed(record_.operators.size(), false);
  std::vector<Epoch> done(record_.storages.size(), 0);
  std::vector<StorageNumber> open;
  const auto look = [&](StorageNumber number, Epoch epoch) {
    need(number, epoch);
    if (made_[number] > done[number]) open.push_back(number);
  };
  for (const StorageNumber number : wanted_) {
    is_wanted_[number] = true;
    look(number, record_.storages[number].epoch);
  }
  while (!open.empty()) {
    const StorageNumber number = open.back();
    open.pop_back();
    while (done[number] < made_[number]) {
      const OperatorNumber writer = record_.storages[number].writers[done[number]++];
      if (is_needed[writer]) continue;
      is_needed[writer] = true;
      const RecordedOperator& op = record_.operators[writer];
      TORCH_INTERNAL_ASSERT(!op.runs_once && op.is_needed, "an operator that runs once is needed again");
      operators_.push_back(writer);
      for (uint32_t ref = op.first_ref; ref < op.first_ref + op.ref_count; ++ref) {
        const TensorRef& read = record_.refs[ref];
        if (read.from == TensorRef::From::Storage) look(read.number, read.epoch);
      }
    }
  }
  std::ranges::sort(operators_);
}

void Replay::find_last_uses() {
  constexpr size_t kNone = SIZE_MAX;
  std::vector<size_t> last(record_.storages.size(), kNone);
  for (size_t place = 0; place < operators_.size(); ++place) {
    const RecordedOperator& op = record_.operators[operators_[place]];
    for (uint32_t ref = op.first_ref; ref < op.first_ref + op.ref_count; ++ref) {
      if (record_.refs[ref].from == TensorRef::From::Storage) last[record_.refs[ref].number] = place;
    }
    for (const RecordedOperator::Made& made : op.makes) last[made.storage] = place;
  }
  last_used_by_.resize(operators_.size());
  for (StorageNumber number = 0; number < last.size(); ++number) {
    if (last[number] != kNone) last_used_by_[last[number]].push_back(number);
  }
}

void Replay::prepare() {
  // First the inputs of the call, without which nothing can be made. Then the values that a plan keeps, the last one
  // first, which is the order in which reloads run ahead.
  for (const bool is_kept : {false, true}) {
    for (auto each = held_.rbegin(); each != held_.rend(); ++each) {
      if (record_.is_held(each->first, each->second) != is_kept) prepare_one(each->first, each->second);
    }
  }
}

void Replay::prepare_one(StorageNumber number, Epoch epoch) {
  Saved* const packed = record_.packed(number, epoch);
  for (auto& [of, storage] : loaded_[number]) {
    if (of != epoch) continue;
    storage = packed != nullptr ? packed->unpack(Versions::Ignore).storage() : record_.held(number, epoch);
    if (packed != nullptr && record_.storages[number].is_saved) reloaded_.push_back(storage);
  }
}

const c10::Storage& Replay::value(StorageNumber number, Epoch epoch) {
  for (const auto& [of, storage] : loaded_[number]) {
    if (of == epoch) return storage;
  }
  return values_[number];
}

at::Tensor Replay::argument(const TensorRef& ref) {
  switch (ref.from) {
    case TensorRef::From::Nothing:
      return {};
    case TensorRef::From::Opaque: {
      const auto& [tensor, version] = record_.opaques[ref.number];
      if (version.has_changed())
        throw ValueGone("was written to after the forward of a block that is computed again", nullptr);
      return tensor;
    }
    case TensorRef::From::Scratch:
      return ref.layout.zeros(record_.storages[ref.number].device);
    default:
      break;
  }
  at::Tensor tensor = ref.layout.on(value(ref.number, ref.epoch));
  if (ref.requires_grad) tensor.set_requires_grad(true);
  return tensor;
}

void Replay::run_operator(const RecordedOperator& op) {
  stack_ = op.arguments;
  for (const RecordedOperator::TensorArgument& given : op.tensor_arguments) {
    c10::IValue& argument_value = stack_[given.argument];
    if (given.kind == RecordedOperator::ArgumentKind::Tensor) {
      argument_value = argument(record_.refs[given.first_ref]);
    } else if (given.kind == RecordedOperator::ArgumentKind::List) {
      c10::List<at::Tensor> list;
      list.reserve(given.ref_count);
      for (uint32_t ref = 0; ref < given.ref_count; ++ref)
        list.push_back(argument(record_.refs[given.first_ref + ref]));
      argument_value = std::move(list);
    } else {
      c10::List<std::optional<at::Tensor>> list;
      list.reserve(given.ref_count);
      for (uint32_t ref = 0; ref < given.ref_count; ++ref) {
        at::Tensor tensor = argument(record_.refs[given.first_ref + ref]);
        list.push_back(tensor.defined() ? std::optional<at::Tensor>(std::move(tensor)) : std::nullopt);
      }
      argument_value = std::move(list);
    }
  }
  {
    const std::optional<RandomStates::Scope> random_states =
        op.random_states.empty() ? std::nullopt : std::optional<RandomStates::Scope>(std::in_place, op.random_states);
    op.handle->callBoxed(&stack_);
  }
  for (const RecordedOperator::Made& made : op.makes) {
    const c10::IValue& result = stack_[made.result];
    const at::Tensor tensor = made.element < 0 ? result.toTensor() : result.toTensorList().get(made.element);
    values_[made.storage] = tensor.storage();
  }
  stack_.clear();
}

// Forward may have waited after the block. Nobody would wait for storages that only the replay's collective fills.
void Replay::await(StorageNumber number) {
  if (!is_on_its_way_[number] || !values_[number] || mutated(Mutant::ReplayedCollectiveAwaited)) return;
  is_on_its_way_[number] = false;
  static const c10::OperatorHandle wait =
      c10::Dispatcher::singleton().findSchemaOrThrow("_c10d_functional::wait_tensor", "");
  torch::jit::Stack stack{bytes_of(values_[number])};
  wait.callBoxed(&stack);
}

void Replay::run(Give give, Around around) {
  for (const StorageNumber number : wanted_) {
    const Epoch epoch = record_.storages[number].epoch;
    for (const auto& [of, storage] : loaded_[number]) {
      if (of == epoch) give(number, storage);
    }
  }
  const BelowModes below_modes;
  const at::AutoGradMode with_gradients(true);
  for (size_t place = 0; place < operators_.size(); ++place) {
    const OperatorNumber number = operators_[place];
    const RecordedOperator& op = record_.operators[number];
    std::optional<WithSwitches> switches;
    if (op.switches != 0) switches.emplace(record_.switches[op.switches]);
    around(number, true);
    run_operator(op);
    around(number, false);
    const auto offer = [&](StorageNumber written) {
      is_on_its_way_[written] = op.returns_early;
      const RecordedStorage& storage = record_.storages[written];
      if (!is_wanted_[written] || made_[written] != storage.epoch || storage.writers.back() != number) return;
      await(written);
      give(written, values_[written]);
    };
    for (const RecordedOperator::Made& made : op.makes) offer(made.storage);
    for (const StorageNumber written : op.writes) offer(written);
    for (const StorageNumber used : last_used_by_[place]) {
      await(used);
      values_[used] = c10::Storage();
      loaded_[used].clear();
    }
  }
}

// ---- the surroundings ----

struct InForwardsState::Impl {
  explicit Impl(const RecordedOperators& record) : switches(record.switches.front()) {
    if (c10::InferenceMode::is_enabled()) normal_mode.emplace(false);
    for (const c10::Stream& stream : record.streams) {
      const c10::impl::VirtualGuardImpl device(stream.device_type());
      const c10::Stream now = device.getStream(stream.device());
      if (now == stream) continue;
      order(now, stream);
      callers.push_back(now);
      device.exchangeStream(stream);
    }
    if (!record.streams.empty()) on_device.reset_device(record.streams.front().device());
  }
  ~Impl() {
    for (const c10::Stream& caller : callers) {
      try {
        const c10::impl::VirtualGuardImpl device(caller.device_type());
        const c10::Stream own = device.exchangeStream(caller);
        order(own, caller);
      } catch (...) {  // the error that came first is under way
      }
    }
  }

  static void order(const c10::Stream& before, const c10::Stream& after) {
    c10::Event event(before.device_type());
    event.record(before);
    event.block(after);
  }

  WithSwitches switches;
  std::optional<c10::InferenceMode> normal_mode;
  c10::OptionalDeviceGuard on_device;
  std::vector<c10::Stream> callers;  // streams that are others than in forward
};

InForwardsState::InForwardsState(const RecordedOperators& record) : impl_(std::make_unique<Impl>(record)) {}
InForwardsState::~InForwardsState() = default;

void InForwardsState::hand_over(const c10::Storage& storage) const {
  for (const c10::Stream& caller : impl_->callers) {
    if (caller.device() != storage.device()) continue;
    c10::impl::VirtualGuardImpl(caller.device_type()).recordDataPtrOnStream(storage.data_ptr(), caller);
  }
}

}  // namespace torchoffload
