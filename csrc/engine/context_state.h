// ContextState: the options, the budget and the warnings of one OffloadActivations, below Python.
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

// The fate of saved tensors for which the budget has no room.
enum class OnFull : uint8_t { Keep, Error, Disk };

// The options of OffloadActivations and of offload_modules, under the names that they have there.
struct ContextOptions {
  Placement tier = Placement::Host;
  bool use_pin_memory = true;
  bool use_streams = true;
  bool learn = true;
  uint64_t min_offload_size = 0;  // in bytes
  WindowOptions windows;
  std::vector<std::string> disk_dir;  // with Placement::Disk and OnFull::Disk
  std::optional<uint64_t> budget_bytes;
  OnFull on_full = OnFull::Keep;
  // Set by offload_modules.
  double fraction = 1;       // this share of a tape's bytes moves, the earliest first; the previous tape's bytes are
                             // the measure
  bool only_inputs = false;  // only storages that Context::admit() was given move
};

// A context gives each of these warnings at most once.
enum class Warning : uint8_t { NoEngine, Full, WriteFailed, Trouble, kCount };

// The windows of one module of offload_modules, if it has its own.
struct ModuleWindows {
  uint64_t offload_bytes = 0;  // while its forward runs
  uint64_t after_bytes = 0;    // the offload window from its end to the next module's beginning
  uint64_t reload_bytes = 0;   // while backward asks for its saved tensors
};

struct ContextState {
  ContextOptions options;
  uint64_t charged_bytes = 0;  // budget bytes of the records that are to move, or have moved
  MemorySet exempt;            // storages of `model`'s parameters and buffers
  std::array<bool, static_cast<size_t>(Warning::kCount)> warned{};
  std::unordered_map<const void*, uint64_t> eligible_bytes;  // of the latest tape, by engine; if `fraction` is set
  std::vector<ModuleRow> modules;                            // by number; empty without offload_modules
  uint32_t module = 0;                                       // the module that the present save is counted for
  std::vector<ModuleWindows> module_windows;  // by number; empty: the windows of the options, or learned ones
  std::vector<std::string> warnings;  // given to Python once the operation has ended, since that runs Python code

  void warn_once(Warning kind, std::string text) {
    if (!std::exchange(warned[static_cast<size_t>(kind)], true)) warnings.push_back(std::move(text));
  }
  ModuleRow* row_of(uint32_t number) { return number < modules.size() ? &modules[number] : nullptr; }
};

}  // namespace torchoffload
