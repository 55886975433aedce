"""The host's time, in ms, for the plans of ``fit``: ``python benchmarks/planning.py``.

The steps are made up: a Llama of 32 blocks, a ConvNeXt of 36 blocks of four kinds, and a diffusion UNet of 40 blocks of
twelve kinds. A climb tries plans for each on a device that differs from the survey, as devices do. The digest of a
model is the same if all of its plans are.
"""

import argparse
import hashlib
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torchoffload._core import core
from torchoffload._fit.block.graph import BlockPlan, OperatorGroup
from torchoffload._fit.plan.climb import Climb, Room
from torchoffload._fit.plan.step import BlockCall, BlockKind, Output, Step, StepPlan, Way, plan_step, survey_plan
from torchoffload._fit.survey.kinds import hull

MIB = 1 << 20
MS = 1e-3
STEPS = 9  # of a climb
RATE = 25e9  # bytes a second over the link
PARTS = (0.1, 0.35, 0.7)  # of the memory between the least and what a step takes that keeps all


# ---- the steps ----


def operators(chosen: random.Random, mib: int, forward_s: float, count: int) -> list[OperatorGroup]:
    """Return the operators of a block, whose values are of a few multiples of a size."""
    shares = [chosen.choice((0.2, 0.5, 1.0, 4.0)) for _ in range(count)]
    groups = []
    for number, share in enumerate(shares):
        inputs = {max(0, number - chosen.choice((1, 1, 2, 3))) for _ in range(2)} - {number}
        groups.append(
            OperatorGroup(
                operators=(number,), duration_ns=int(forward_s * 1e9 * share / sum(shares)),
                sizes=(mib * MIB * chosen.choice((1, 1, 1, 2, 4)),), inputs=tuple(sorted(inputs)),
                may_keep=True, may_recompute=True, is_needed=chosen.random() < 0.6,
            )
        )  # fmt: skip
    return groups


def frontier(groups: Sequence[OperatorGroup]) -> list[tuple[int, int, list[int], list[int]]]:
    """Return the corners of a block."""
    return core.block_frontier(groups, [])


def kind(groups: Sequence[OperatorGroup], mib: int) -> BlockKind:
    """Return a kind of blocks with these operators, as a survey makes it."""
    corners = frontier(groups)
    plain = [number for number, group in enumerate(groups) if group.is_needed]
    numbers = sorted({*plain, *(number for _, _, kept, _ in corners for number in kept)})
    outputs, so_far = [], 0
    for number, group in enumerate(groups):
        so_far += group.duration_ns
        if number in numbers:
            outputs.append(Output(group.sizes, so_far * 1e-9, (number,)))
    ways = [Way(0.0, tuple(map(numbers.index, plain)), mib * MIB)]
    for _, again_ns, kept, _ in corners:
        again_s = again_ns * 1e-9 + 1e-6 * len(groups)
        ways.append(Way(again_s, tuple(map(numbers.index, kept)), mib * MIB, BlockPlan(operators=())))
    forward_s = so_far * 1e-9
    return BlockKind(forward_s, 2 * forward_s, tuple(outputs), tuple(hull(ways, outputs)))


def step(kinds: Sequence[BlockKind], of_calls: Sequence[int], fixed_mib: int, loss_mib: int) -> Step:
    """Return the step that calls blocks of these kinds in this order."""
    fixed = fixed_mib * MIB
    calls = []
    for number in of_calls:
        own = kinds[number].kept_bytes(kinds[number].ways[-1])
        calls.append(BlockCall(number, fixed + own // 2, fixed + own * 5 // 4))
    return Step(
        kinds=tuple(kinds), calls=tuple(calls), head_s=1 * MS, loss_s=4 * MS, end_s=1 * MS,
        loss_bytes=fixed + loss_mib * MIB, other_bytes=fixed, fixed={"weights": fixed}, least_moved_bytes=MIB,
        out_bytes_per_s=RATE, in_bytes_per_s=RATE, latency_s=1e-5,
    )  # fmt: skip


class Model:
    """A model's blocks: their operators by kind, with the size of their values, and the kinds of its calls."""

    def __init__(
        self, seed: int, kinds: Sequence[tuple[int, float, int]], of_calls: Sequence[int], loss_mib: int
    ) -> None:
        chosen = random.Random(seed)
        self._sizes = [mib for mib, _, _ in kinds]
        self.blocks = [operators(chosen, *of) for of in kinds]
        self._of_calls, self._loss_mib = of_calls, loss_mib

    def step(self) -> Step:
        """Return the surveyed step."""
        kinds = [kind(groups, mib) for groups, mib in zip(self.blocks, self._sizes, strict=True)]
        return step(kinds, self._of_calls, 8000, self._loss_mib)


def models() -> dict[str, Model]:
    """Return the models. A kind is the MiB of its values, its time in seconds, and its count of operators."""
    stages = [(96, 4 * MS, 10), (48, 3 * MS, 10), (24, 2 * MS, 10), (12, 2 * MS, 10)]
    levels = [(80, 6 * MS, 12), (40, 5 * MS, 12), (20, 4 * MS, 12), (10, 3 * MS, 12)]
    # Of each level: the blocks on the way down, those with attention, and those on the way up.
    unet = [
        (mib, seconds * of, count + 6 * more)
        for mib, seconds, count in levels
        for of, more in ((1, 0), (2, 2), (1.5, 1))
    ]
    down = [3 * level + each for level in range(4) for each in (0, 1, 0, 1)]
    up = [3 * level + each for level in reversed(range(4)) for each in (2, 1, 2, 1, 2, 1)]
    return {
        "Llama": Model(1, [(32, 5 * MS, 24)], [0] * 32, 2000),
        "ConvNeXt": Model(2, stages, [0] * 3 + [1] * 3 + [2] * 27 + [3] * 3, 200),
        "UNet": Model(3, unet, [*down, *up], 100),
    }


# ---- the stages ----


class Watch:
    """The times of the stages of planning, and a digest of the plans."""

    def __init__(self) -> None:
        self.taken_s: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)  # on the clock, of all threads
        self._digest = hashlib.sha256()

    def timed(self, stage: str, call: Callable[[], Any]) -> Any:
        """Call, and note the time as one of a stage's."""
        began_s, cpu_s = time.perf_counter(), time.process_time()
        result = call()
        self.taken_s[stage].append((time.perf_counter() - began_s, time.process_time() - cpu_s))
        return result

    def note(self, plan: StepPlan | None) -> None:
        """Take a plan into the digest."""
        self._digest.update(repr(plan).encode())

    @property
    def digest(self) -> str:
        """The digest of all plans so far."""
        return self._digest.hexdigest()[:12]


def amounts(of: Step) -> Iterator[int]:
    """Return amounts of memory between what the survey's plan takes and what a step takes that keeps all."""
    all_kept = plan_step(of, 1 << 60)
    assert all_kept is not None
    least_bytes = survey_plan(of).peak_bytes
    for part in PARTS:
        yield least_bytes + int((all_kept.peak_bytes - least_bytes) * part)


def climb(of: Step, memory_bytes: int, watch: Watch) -> None:
    """Try plans as ``fit`` does, on a device that computes again slowly and reserves more than is allocated."""
    true = of.with_times(pace=1.1, again=1.5, rate=0.85)
    own = survey_plan(of)
    room = Room(int(memory_bytes * 1.2), memory_bytes, is_measured=True)
    tried = Climb(of, own, room, STEPS, own_reserved_bytes=int(own.peak_bytes * 1.1))
    trial = watch.timed("first trial", tried.take_next)
    while trial is not None:
        watch.note(trial.plan)
        taken_s, peak_bytes = trial.plan.timed_as(true).step_s, int(trial.peak_bytes * 1.02)
        note = partial(
            tried.note_step, taken_s, allocated_bytes=peak_bytes, reserved_bytes=int(peak_bytes * 1.1),
            waits_for_memory=False,
        )  # fmt: skip
        assert not note()
        assert watch.timed("last step of a trial", note)
        trial = watch.timed("next trial", tried.take_next)


def measure(model: Model) -> Watch:
    """Plan once for all amounts of memory."""
    watch = Watch()
    for groups in model.blocks:
        watch.timed("corners of a kind", partial(frontier, groups))
    of = model.step()
    watch.note(watch.timed("survey's plan", lambda: survey_plan(of)))
    for memory_bytes in amounts(of):
        plan = watch.timed("one plan", partial(plan_step, of, memory_bytes))
        watch.note(plan)
        assert plan is not None
        watch.timed("times of a plan", partial(plan.timed_as, of))
        climb(of, memory_bytes, watch)
    return watch


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(models()), choices=list(models()))
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    for name in args.models:
        rounds = [measure(models()[name]) for _ in range(args.rounds)]
        of = models()[name].step()
        ways = "/".join(str(len(each.ways)) for each in of.kinds)
        print(
            f"{name}: {len(of.calls)} calls, {ways} ways; digest {' '.join(sorted({each.digest for each in rounds}))}"
        )
        head = f"ms, median of {args.rounds} rounds"
        print(f"  {head:24} {'mean':>9} {'longest':>9} {'mean CPU':>9} {'calls':>6}")
        for stage in rounds[0].taken_s:
            taken = [list(zip(*each.taken_s[stage], strict=True)) for each in rounds]
            mean, longest, cpu = (
                statistics.median(of_round(each[which]) for each in taken) / MS
                for of_round, which in ((statistics.mean, 0), (max, 0), (statistics.mean, 1))
            )
            print(f"  {stage:24} {mean:9.2f} {longest:9.2f} {cpu:9.2f} {len(taken[0][0]):6}")


if __name__ == "__main__":
    main()
