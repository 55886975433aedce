// Registry: the engines of the process, one for each backend, made at first use.
// Ownership:     engines, backends and stores live for the process and are leaked on purpose.
// Thread safety: needs the GIL.
// Shutdown:      see Note [No CUDA after main]. Once the interpreter goes down handles that die leak what they hold
//                (Operation::is_shut_down), and so do those that a forked child inherited (Engine::is_inherited).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "device/backends.h"
#include "engine/engine.h"

namespace torchoffload {

// The engine that moves what is at `place`, or null where no backend serves it. May block under Placement::Disk: where
// another directory than the last is used, those that are idle give up their files and threads.
// Throws std::runtime_error for a CUDA tensor under Placement::Disk, and where no spill file can be made.
Engine* find_engine(const Place& place);

// Every engine made so far: a copy, since a caller that lets other threads run may see more being made.
std::vector<Engine*> all_engines();

// profile() on or off, for the engines there are and those that come. Starting it throws std::runtime_error while a
// CUDA graph is being captured.
void start_profile();
// What each engine saw, with its device; empty where profile() was off.
struct EngineProfile {
  std::string device;
  std::vector<Timeline::Entry> entries;
};
std::vector<EngineProfile> stop_profile();

// Gives back what no slot uses, in every store, and the threads of those that no copy uses. Returns the bytes given
// back. May block, without the GIL.
uint64_t trim_stores();

// Begins to make the codes ready on the devices that the program uses, so that steps need not wait for them. Returns at
// once.
void prepare_coders();

// The process is about to end, and Operation::shut_down() was called: no store takes anything any more, none that is
// made later does, and no code is made ready. May block, without the GIL.
void stop_threads();

}  // namespace torchoffload
