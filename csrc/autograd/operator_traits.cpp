#include "autograd/operator_traits.h"

#include <ATen/core/enum_tag.h>

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "system/mutex.h"

namespace torchoffload {

namespace {

template <size_t Count>
bool is_among(const std::array<std::string_view, Count>& names, std::string_view name) {
  return std::ranges::find(names, name) != names.end();
}

// They return a view of their argument, or the argument, though their schemas do not say so.
constexpr std::array<std::string_view, 6> kUnannotatedViews = {
    "aten::_unsafe_view", "aten::_reshape_alias",
    "aten::unsafe_split", "aten::unsafe_split_with_sizes",
    "aten::lift_fresh",   "_c10d_functional::_wrap_tensor_autograd"};
// They change a tensor's metadata, and not the bytes of a storage.
constexpr std::array<std::string_view, 4> kMetadata = {"aten::set_", "aten::detach_", "aten::record_stream",
                                                       "aten::rename_"};
constexpr std::array<std::string_view, 5> kUninitialised = {"aten::empty", "aten::empty_like", "aten::empty_strided",
                                                            "aten::new_empty", "aten::new_empty_strided"};
constexpr std::array<std::string_view, 2> kResizes = {"aten::resize_", "aten::resize_as_"};
constexpr std::array<std::string_view, 3> kKnownNamespaces = {"aten", "prims", "prim"};
constexpr std::array<std::string_view, 2> kStatistics = {"running_mean", "running_var"};
constexpr std::array<std::string_view, 3> kTraining = {"training", "train", "use_input_stats"};

bool returns_views(const c10::FunctionSchema& schema) {
  if (schema.is_mutable() || schema.returns().empty()) return false;
  return std::ranges::all_of(schema.returns(), [](const c10::Argument& each) { return each.alias_info() != nullptr; });
}

void find_arguments(const c10::FunctionSchema& schema, OperatorTraits& traits) {
  const std::vector<c10::Argument>& arguments = schema.arguments();
  for (size_t place = 0; place < arguments.size(); ++place) {
    const c10::Argument& each = arguments[place];
    const auto number = static_cast<uint8_t>(place);
    if (each.alias_info() != nullptr && each.alias_info()->isWrite()) traits.writes.push_back(number);
    if (is_among(kStatistics, each.name())) traits.statistics.push_back(number);
    if (is_among(kTraining, each.name())) traits.training.push_back(number);
    if (each.type()->str().find("Generator") != std::string::npos) traits.generator = number;
    // The recurrent layers of cuDNN and MIOpen write to it, though their schemas do not say so.
    if (each.name() == "dropout_state") traits.dropout_state = number;
  }
  // Others read them, or have nothing to do with batch normalization.
  if (traits.training.empty() && traits.writes.empty()) traits.statistics.clear();
}

OperatorTraits find_traits(const c10::OperatorHandle& op) {
  const c10::FunctionSchema& schema = op.schema();
  const std::string_view name = schema.name();
  const std::string_view name_space = name.substr(0, name.find(':'));
  OperatorTraits traits;
  const bool changes_shape = op.hasTag(at::Tag::inplace_view) && !is_among(kResizes, name);
  traits.makes_views =
      is_among(kUnannotatedViews, name) || is_among(kMetadata, name) || changes_shape || returns_views(schema);
  traits.has_own_counter = is_among(kUnannotatedViews, name);
  if (traits.makes_views || schema.arguments().size() > UINT8_MAX) return traits;
  find_arguments(schema, traits);
  traits.may_draw = !is_among(kKnownNamespaces, name_space);
  traits.draws = op.hasTag(at::Tag::nondeterministic_seeded) || traits.generator >= 0;
  traits.leaves_uninitialised = is_among(kUninitialised, name);
  traits.casts = name == "aten::_to_copy";
  // The result of a functional collective is filled once wait_tensor, which returns its argument, has returned.
  const bool is_functional = name_space.ends_with("c10d_functional");
  const bool waits = is_functional && name.ends_with("::wait_tensor");
  if (waits) traits.writes.push_back(0);
  if (is_functional) traits.may_draw = false;
  traits.returns_early = is_functional && !waits;
  traits.communicates = is_functional || name_space == "symm_mem";
  // Those of c10d write to their first argument, which their schemas do not say, and return before they have done so.
  if (name_space == "c10d" || name_space == "fsdp") {
    traits.runs_once = true;
    traits.may_draw = false;
    if (traits.writes.empty() && !schema.arguments().empty()) traits.writes.push_back(0);
  }
  return traits;
}

struct Known {
  c10::OperatorName name;  // another operator may come to have the address of one that is gone
  OperatorTraits traits;
};

// The traits that all threads share.
const Known& shared(const c10::OperatorHandle& op) {
  static auto* const mutex = new Mutex;
  static auto* const known = new std::unordered_map<const void*, std::unique_ptr<const Known>>;
  const c10::OperatorName& name = op.operator_name();
  const MutexLock lock(*mutex);
  std::unique_ptr<const Known>& found = (*known)[&name];
  if (!found || found->name != name) {
    // Somebody may still read the traits of an operator that is gone.
    static_cast<void>(found.release());
    found = std::make_unique<const Known>(Known{name, find_traits(op)});
  }
  return *found;
}

// A thread's latest operators. Most calls find theirs here, without the lock: a program runs a few dozens of operators.
struct Latest {
  const void* address = nullptr;
  const Known* known = nullptr;
};
constexpr size_t kLatest = 256;
constexpr size_t kNameBytes = sizeof(c10::OperatorName);  // no two names begin within so many bytes

thread_local std::array<Latest, kLatest> latest;

}  // namespace

const OperatorTraits& traits_of(const c10::OperatorHandle& op) {
  const c10::OperatorName& name = op.operator_name();
  Latest& found = latest[reinterpret_cast<uintptr_t>(&name) / kNameBytes % kLatest];
  if (found.address != &name || found.known->name != name) found = {&name, &shared(op)};
  return found.known->traits;
}

}  // namespace torchoffload
