// mutant.h: the numbered waits and checks that the test build can leave out, one at a time.
// Ownership:     one of them is in force in the process, or none, in the test build alone.
// Thread safety: any thread may ask; a test puts one in force before it starts the threads that are to ask.
// Cost:          none outside of the test build: there mutated() is a constant false.
//
// `make mutants` runs, for each mutant, the scenario of its name in tests/mutants/. The scenario must pass without the
// mutant and fail with it, and in the way that it names.
#pragma once

#include <cstdint>

namespace torchoffload {

enum class Mutant : uint8_t {
  // Waits (engine/stream_order.h).
  OffloadWaitsForCompute,         // R2
  OffloadWaitsForAllocation,      // R2, the stream that the source's memory is from
  ComputeWaitsForOffload,         // R3, window full
  OffloadWaitsForGuards,          // R5
  ReloadWaitsForCompute,          // R6, the buffer's memory
  ReloadWaitsForOffload,          // R6, the slot's bytes
  ReloadWaitsForReload,           // R5, one guard for all that read the slot
  ConsumerWaitsForReload,         // R7
  LaterConsumerWaitsForReload,    // R7, on another stream than the first
  ConsumerWaitsForWeak,           // R7, bytes that an earlier consumer still holds
  DroppedSourceWaitsForOffload,   // R9, graph dropped with a copy out in flight
  DroppedBufferWaitsForReload,    // R9, buffer dropped with a copy in in flight
  ReleasedSourceWaitsForOffload,  // R17, memory that a compiled graph reuses
  SpillWaitsForOffload,           // R16, in storage/tiered_transfers.cpp: a disk's thread waits for the copy out
  FetchWaitsForGuards,            // R16, likewise: for the former users of memory that it reads into
  ReloadWaitsForFetch,            // R16, in storage/tiered_store.cpp
  IoMemoryHeldUntilDone,          // R9, the same if no stream order protects it
  TrimWaitsForGuards,             // R13, in storage/pinned_arena.cpp
  // Guards and notes.
  SlotGuardedByOffload,       // R5, R9
  SlotGuardedByReload,        // R5
  SlotGuardedByEachReload,    // R5, of two threads at once
  SlotGuardedByCopyInVain,    // R5, the record was used or dropped while its copy was enqueued
  SourceBusyUntilCopyInVain,  // R9, likewise
  SpilledMemoryIsGuarded,     // R16, memory that a slot released as it went on to a disk
  SlotStaysWhileHeld,         // R16, a copy that uses its memory is being enqueued
  SlotHeldUntilIoDone,        // R16, a slot that is released while it is written or read
  NoteUseAtPack,              // R3
  NoteUseAtJoin,              // R3, a later save on another stream
  NoteUseAtUnpack,            // R3
  // Checks.
  CopyNotInsideItsOperator,  // R1
  VersionCheckedAtUnpack,    // design.md, Unpack
  IdentityChecksVersion,     // design.md, Identity
  IdentityChecksVersionCounter,
  IdentityChecksData,
  IdentityChecksAllocation,
  IdentityHoldsStorage,   // the weak reference: an address cannot be reused
  IdentityChecksWrapper,  // writes through a wrapper
  JoinOnlyWithinSpan,
  JoinOnlyAligned,
  StridesRestored,
  AlignmentRestored,
  ResizeCheckedAtEnqueue,      // R10
  ResizeCheckedInFlight,       // R10
  ResizeSeesAllocation,        // R10, other memory at the same address
  BufferHeldUntilSeen,         // R8
  WeakIsFoundAgain,            // R8
  PassedByReturnsToOffloaded,  // R11
  EndedTaskPassesBy,           // R14
  EndedTaskWeakens,            // R14
  FailedTaskIsNoticed,         // R14
  FailedWriteKeepsRecord,      // a write to the disk that failed
  FailedSpillStaysInMemory,    // R16, the same for a slot that is in host memory
  UnwrittenSourceStays,        // the same, for a source that backward used
  FailedReadRaises,
  RefusalPasses,                  // a disk whose write failed is tried again
  InterruptEndsWait,              // a wait for a disk, in system/host_wait.cpp
  ParameterStaysByStorage,        // design.md, Pack
  DeallocQueuedInsideOperation,   // design.md, Locks
  PackedInGraphTaskStays,         // design.md, Pack
  BorrowedStays,                  // memory that is not the storage's own
  StreamsMayBeDestroyed,          // by their owners, if they came from outside
  BudgetHonoured,                 // design.md, Memory
  DropsArePutOff,                 // Note [What may run Python]
  CopyNotInsideOneAroundIt,       // R1, an operator inside of which a finalizer runs others
  IdleThreadsMakeRoom,            // Note [Copies that wait for room]
  PartCountsItsStorage,           // engine/offload.cpp, Note [Parts in the offload window]
  DroppedEngineAwaitsOperations,  // engine/registry.h, Note [Ends of engines]
  KeptSourceCopied,               // R17, autograd/graph_tokens.h: a value that stays, before its memory is reused
  RetainedValueCopied,            // likewise: a compiled backward writes into its inputs
  // Replay (design.md, Planned blocks).
  ReplaySetsSwitches,
  ReplaySetsRandomState,
  ReplayedVersionChecked,  // autograd's own error for a saved tensor that was written to
  ForeignVersionChecked,   // a value from outside that was written to since
  KeptValueChecked,        // a kept value that was written to is made again
  SmallForeignCopied,
  CopyBeforeWrite,
  UninitialisedIsKept,
  ReplayedCollectiveAwaited,  // only the replay knows of the collective that it calls again
  // The generic backend (device/generic_backend.cpp), on a device of PyTorch's.
  GenericStreamWaits,  // Streams::wait
  GenericHostWaits,    // Streams::synchronize
  GenericDiskWaits,    // R16, a disk's thread waits for the device
  GenericNotesUse,     // R3
  GenericSeesRefill,   // R10, in device/refilled_memory.cpp
  kCount,
};

#ifdef TORCHOFFLOAD_TESTING
extern Mutant mutant_in_force;  // kCount: none
inline bool mutated(Mutant mutant) { return mutant == mutant_in_force; }
const char* mutant_name(Mutant mutant);
#else
constexpr bool mutated(Mutant) { return false; }
#endif

}  // namespace torchoffload
