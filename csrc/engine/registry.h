// Registry: the engines of the process, one for each backend, made at first use.
// Ownership:     an engine belongs to its backend. That of a device's own memory lives for the process, and that of a
//                directory until the directory is used no more; see Note [Ends of engines].
// Thread safety: needs the GIL.
// Shutdown:      see Note [No CUDA after main]. Once the interpreter goes down handles that die leak their memory and
//                slots (Operation::is_shut_down), and so do those that a forked child inherited (Engine::is_inherited).
//
// Note [Ends of engines]
// A kind of backend drops a place (a set of directories) when it is idle and no context knows it. Nobody finds its
// engines from then on, but somebody may use one still: a hook call of another thread that found it before, and waits
// for something without the GIL; a tape that such a call has opened; a context that keeps it; a pending copy whose
// record was released; a call that goes through all engines, which has shares in them. So a dropped place is looked at
// whenever another one is dropped, and by trim(). Once all its engines are unused, each operation that is open may
// refer to one. When all these have ended, and no tape was opened since, nothing refers to them, and the place is
// destroyed.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "device/backends.h"
#include "engine/engine.h"
#include "system/gil.h"

namespace torchoffload {

// The engine that moves tensors at `place`, or null if no backend serves that place. Call it inside of an operation:
// the engine exists until that ends, and after it while a tape is alive or the caller has a share in it. May block if
// its directory is another one than the last, since those that are left close their files and end their threads. Throws
// std::runtime_error for a CUDA tensor under Placement::Disk, and if no spill file can be made.
Engine* find_engine(const Place& place) REQUIRES(gil);

// Every engine that there is: shares in them, since a caller that lets other threads run may see some come and go.
std::vector<std::shared_ptr<Engine>> all_engines() REQUIRES(gil);

// profile() on or off, for the engines there are and those that come. Starting it throws std::runtime_error while a
// CUDA graph is being captured.
void start_profile() REQUIRES(gil);
// The timeline of each engine, with its device; empty if profile() was off.
struct EngineProfile {
  std::string device;
  std::vector<Timeline::Entry> entries;
};
std::vector<EngineProfile> stop_profile() REQUIRES(gil);

// Releases the memory that no slot uses, in every store, and ends the threads of those that no copy uses. Returns the
// bytes released. May block.
uint64_t trim_stores() REQUIRES(gil);

// The process is about to end, and Operation::shut_down() was called: no store takes anything any more, and none that
// is made later does. May block.
void stop_threads() REQUIRES(gil);

}  // namespace torchoffload
