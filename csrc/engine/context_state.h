// ContextState: what one OffloadActivations stands for below Python: its options, its budget and its warnings.
// Ownership:     shared by the Python object and by the tapes that were opened under it, whichever lives longer.
// Thread safety: needs the GIL.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/planning/plan.h"
#include "device/memory.h"
#include "engine/statistics.h"

namespace torchoffload {

enum class OnFull : uint8_t { Keep, Error };

// The options of OffloadActivations and of offload_modules, under the names that they have there.
struct ContextOptions {
  Placement tier = Placement::Host;
  bool use_pin_memory = true;
  bool use_streams = true;
  bool learn = true;
  uint64_t min_offload_size = 0;  // in bytes
  WindowOptions windows;
  std::string disk_dir;  // with Placement::Disk
  std::optional<uint64_t> budget_bytes;
  OnFull on_full = OnFull::Keep;
  // Of offload_modules.
  double fraction = 1;       // of a tape's bytes, the earliest first, as the tape before it had them
  bool only_inputs = false;  // of what is saved only that which admit() named
};

// Each is given at most once per context.
enum class Warning : uint8_t { NoEngine, Full, WriteFailed, kCount };

struct ContextState {
  ContextOptions options;
  uint64_t charged_bytes = 0;  // of the budget, by records that are to be moved or were
  MemorySet exempt;            // storages of `model`'s parameters and buffers
  std::array<bool, static_cast<size_t>(Warning::kCount)> warned{};
  std::unordered_map<const void*, uint64_t> eligible_bytes;  // of the latest tape, by engine; where `fraction` is set
  std::vector<ModuleRow> modules;                            // by number; empty without offload_modules
  uint32_t module = 0;                                       // that the save under way is counted for
  std::vector<std::string> warnings;  // to be given once the operation has ended, since that runs Python

  void warn_once(Warning kind, std::string text) {
    if (!std::exchange(warned[static_cast<size_t>(kind)], true)) warnings.push_back(std::move(text));
  }
  ModuleRow* row_of(uint32_t number) { return number < modules.size() ? &modules[number] : nullptr; }
};

}  // namespace torchoffload
