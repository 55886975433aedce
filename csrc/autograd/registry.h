// Registry: which engine serves a tensor. One for each pair of device and store, made at first use.
// Ownership:     engines, backends and stores live for the process and are leaked on purpose.
// Thread safety: needs the GIL.
// Shutdown:      see Note [No CUDA after main]. Once the interpreter goes down handles that die leak what they hold
//                (Operation::is_shut_down), and so do those that a forked child inherited (Engine::is_inherited).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "engine/context_state.h"
#include "engine/engine.h"

namespace torchoffload {

// The engine that moves `tensor` under these options, or null where no engine serves its device. May block under
// Placement::Disk: where another directory than the last is used, those that are idle give up their files and threads.
// Throws std::runtime_error for a CUDA tensor under Placement::Disk, and where no spill file can be made.
Engine* find_engine(const at::Tensor& tensor, const ContextOptions& options);

// profile() on or off, for the engines there are and those that come.
void start_profile();
// What each engine saw, with its device; empty where profile() was off.
struct EngineProfile {
  std::string device;
  std::vector<Timeline::Entry> entries;
};
std::vector<EngineProfile> stop_profile();

// Every engine made so far: a copy, since a caller that lets other threads run may see more being made.
std::vector<Engine*> all_engines();

// A context of this tier is entered on some thread.
void note_entry(Placement tier);

// Is there a device with an engine for Placement::Host?
bool accelerator_available();

// Bytes of pinned memory held, and of those that slots use.
struct PinnedMemory {
  uint64_t held_bytes = 0;
  uint64_t used_bytes = 0;
};
PinnedMemory pinned_memory();

// Gives back what no slot uses, in every store, and the threads of those that no copy uses. Returns the bytes given
// back. May block, without the GIL.
uint64_t trim_stores();

// The process is about to end, and Operation::shut_down() was called: no store takes anything any more, and none that
// is made later. May block, without the GIL.
void stop_stores();

}  // namespace torchoffload
