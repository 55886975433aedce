#include "core/mutant.h"

#ifdef TORCHOFFLOAD_TESTING

namespace torchoffload {

static_assert(static_cast<unsigned>(Mutant::kCount) <= 64, "mutant_mask has one bit for each");

uint64_t mutant_mask = 0;

#define NAME(mutant)   \
  case Mutant::mutant: \
    return #mutant;

// No default: the compiler names a mutant that is missing here.
const char* mutant_name(Mutant mutant) {
  switch (mutant) {
    NAME(OffloadWaitsForCompute)
    NAME(OffloadWaitsForAllocation)
    NAME(ComputeWaitsForOffload)
    NAME(OffloadWaitsForGuards)
    NAME(ReloadWaitsForCompute)
    NAME(ReloadWaitsForOffload)
    NAME(ReloadWaitsForReload)
    NAME(ConsumerWaitsForReload)
    NAME(LaterConsumerWaitsForReload)
    NAME(ConsumerWaitsForGivenUp)
    NAME(DroppedSourceWaitsForOffload)
    NAME(DroppedBufferWaitsForReload)
    NAME(IoMemoryHeldUntilDone)
    NAME(TrimWaitsForGuards)
    NAME(SlotGuardedByOffload)
    NAME(SlotGuardedByReload)
    NAME(SlotGuardedByEachReload)
    NAME(SlotGuardedByCopyInVain)
    NAME(SourceBusyUntilCopyInVain)
    NAME(NoteUseAtPack)
    NAME(NoteUseAtJoin)
    NAME(NoteUseAtUnpack)
    NAME(CopyNotInsideItsOperator)
    NAME(VersionCheckedAtUnpack)
    NAME(IdentityChecksVersion)
    NAME(IdentityChecksVersionCounter)
    NAME(IdentityChecksData)
    NAME(IdentityChecksAllocation)
    NAME(IdentityHoldsStorage)
    NAME(IdentityChecksWrapper)
    NAME(JoinOnlyWithinSpan)
    NAME(JoinOnlyAligned)
    NAME(StridesRestored)
    NAME(AlignmentRestored)
    NAME(ResizeCheckedAtEnqueue)
    NAME(ResizeCheckedInFlight)
    NAME(ResizeSeesAllocation)
    NAME(BufferHeldUntilSeen)
    NAME(GivenUpIsFoundAgain)
    NAME(PassedByReturnsToOffloaded)
    NAME(EndedTaskPassesBy)
    NAME(EndedTaskGivesUp)
    NAME(FailedTaskIsNoticed)
    NAME(FailedWriteKeepsRecord)
    NAME(UnwrittenSourceStays)
    NAME(FailedReadRaises)
    NAME(ParameterStaysByStorage)
    NAME(DeallocQueuedInsideOperation)
    NAME(PackedInGraphTaskStays)
    NAME(BorrowedStays)
    NAME(StreamsMayBeDestroyed)
    NAME(BudgetHonoured)
    case Mutant::kCount:
      break;
  }
  return "";
}

#undef NAME

}  // namespace torchoffload

#endif
