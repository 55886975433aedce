#include "core/mutant.h"

#ifdef TORCHOFFLOAD_TESTING

#include <algorithm>
#include <array>

namespace torchoffload {

namespace {

struct Named {
  Mutant mutant;
  const char* name;
};

#define NAMED(mutant) \
  Named { Mutant::mutant, #mutant }

// In the order of the enumerators.
constexpr std::array kNames{
    NAMED(OffloadWaitsForCompute),
    NAMED(OffloadWaitsForAllocation),
    NAMED(ComputeWaitsForOffload),
    NAMED(OffloadWaitsForGuards),
    NAMED(ReloadWaitsForCompute),
    NAMED(ReloadWaitsForOffload),
    NAMED(ReloadWaitsForReload),
    NAMED(ConsumerWaitsForReload),
    NAMED(LaterConsumerWaitsForReload),
    NAMED(ConsumerWaitsForWeak),
    NAMED(DroppedSourceWaitsForOffload),
    NAMED(DroppedBufferWaitsForReload),
    NAMED(ReleasedSourceWaitsForOffload),
    NAMED(SpillWaitsForOffload),
    NAMED(FetchWaitsForGuards),
    NAMED(ReloadWaitsForFetch),
    NAMED(IoMemoryHeldUntilDone),
    NAMED(TrimWaitsForGuards),
    NAMED(SlotGuardedByOffload),
    NAMED(SlotGuardedByReload),
    NAMED(SlotGuardedByEachReload),
    NAMED(SlotGuardedByCopyInVain),
    NAMED(SourceBusyUntilCopyInVain),
    NAMED(SpilledMemoryIsGuarded),
    NAMED(SlotStaysWhileHeld),
    NAMED(SlotHeldUntilIoDone),
    NAMED(NoteUseAtPack),
    NAMED(NoteUseAtJoin),
    NAMED(NoteUseAtUnpack),
    NAMED(CopyNotInsideItsOperator),
    NAMED(VersionCheckedAtUnpack),
    NAMED(IdentityChecksVersion),
    NAMED(IdentityChecksVersionCounter),
    NAMED(IdentityChecksData),
    NAMED(IdentityChecksAllocation),
    NAMED(IdentityHoldsStorage),
    NAMED(IdentityChecksWrapper),
    NAMED(JoinOnlyWithinSpan),
    NAMED(JoinOnlyAligned),
    NAMED(StridesRestored),
    NAMED(AlignmentRestored),
    NAMED(ResizeCheckedAtEnqueue),
    NAMED(ResizeCheckedInFlight),
    NAMED(ResizeSeesAllocation),
    NAMED(BufferHeldUntilSeen),
    NAMED(WeakIsFoundAgain),
    NAMED(PassedByReturnsToOffloaded),
    NAMED(EndedTaskPassesBy),
    NAMED(EndedTaskWeakens),
    NAMED(FailedTaskIsNoticed),
    NAMED(FailedWriteKeepsRecord),
    NAMED(FailedSpillStaysInMemory),
    NAMED(UnwrittenSourceStays),
    NAMED(FailedReadRaises),
    NAMED(RefusalPasses),
    NAMED(InterruptEndsWait),
    NAMED(ParameterStaysByStorage),
    NAMED(DeallocQueuedInsideOperation),
    NAMED(PackedInGraphTaskStays),
    NAMED(BorrowedStays),
    NAMED(StreamsMayBeDestroyed),
    NAMED(BudgetHonoured),
    NAMED(DropsArePutOff),
    NAMED(CopyNotInsideOneAroundIt),
    NAMED(IdleThreadsMakeRoom),
    NAMED(PartCountsItsStorage),
    NAMED(DroppedEngineAwaitsOperations),
    NAMED(KeptSourceCopied),
    NAMED(RetainedValueCopied),
    NAMED(ReplaySetsSwitches),
    NAMED(ReplaySetsRandomState),
    NAMED(ReplayedVersionChecked),
    NAMED(ForeignVersionChecked),
    NAMED(KeptValueChecked),
    NAMED(SmallForeignCopied),
    NAMED(CopyBeforeWrite),
    NAMED(UninitialisedIsKept),
    NAMED(ReplayedCollectiveAwaited),
    NAMED(GenericStreamWaits),
    NAMED(GenericHostWaits),
    NAMED(GenericDiskWaits),
    NAMED(GenericNotesUse),
    NAMED(GenericSeesRefill),
};

#undef NAMED

static_assert(kNames.size() == static_cast<size_t>(Mutant::kCount), "each mutant has a name");
static_assert(std::ranges::is_sorted(kNames, std::ranges::less(), &Named::mutant));

}  // namespace

Mutant mutant_in_force = Mutant::kCount;

const char* mutant_name(Mutant mutant) { return kNames.at(static_cast<size_t>(mutant)).name; }

}  // namespace torchoffload

#endif
