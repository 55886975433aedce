"""simulated_steps.py: random steps of blocks, and a device that runs plans for them in other times and bytes.

What a plan really takes differs from what the survey says: computing again, the link and all else by factors of their
own, and PyTorch's allocator reserves more than is allocated, by a factor that differs by model.
"""

import dataclasses
import random

from torchoffload._fit.block.graph import BlockPlan
from torchoffload._fit.plan.step import BlockCall, BlockKind, Output, Step, Way, survey_plan
from torchoffload._fit.plan.trials import Trial

__all__ = ["SimulatedDevice", "random_step"]

MIB = 1 << 20
_AGAIN = BlockPlan(operators=())


def _random_kind(rng: random.Random) -> BlockKind:
    forward_s = rng.uniform(0.5, 20.0)
    outputs = tuple(
        Output((rng.randint(1, 64) * MIB,), forward_s * (number + 1) / 6, (number,))
        for number in range(rng.randint(2, 5))
    )
    input_bytes = rng.randint(1, 32) * MIB
    ways = [
        Way(forward_s * (1 - count / len(outputs)) ** 1.5, tuple(range(count)), input_bytes, _AGAIN)
        for count in range(len(outputs))
    ]
    ways.append(Way(0.0, tuple(range(len(outputs))), input_bytes))
    return BlockKind(forward_s, 2 * forward_s, outputs, tuple(ways))


def random_step(rng: random.Random) -> Step:
    """Return a step with calls of one to three kinds, in which things move fast or slowly."""
    kinds = tuple(_random_kind(rng) for _ in range(rng.randint(1, 3)))
    fixed = rng.randint(10, 500) * MIB
    calls = tuple(
        BlockCall(kind, fixed + rng.randint(1, 100) * MIB, fixed + rng.randint(50, 300) * MIB)
        for kind in range(len(kinds))
        for _ in range(rng.randint(1, 8))
    )
    rate = 10 ** rng.uniform(0.0, 2.5) * MIB
    return Step(
        kinds=kinds, calls=calls, head_s=rng.uniform(0, 5), loss_s=rng.uniform(0, 20), end_s=rng.uniform(0, 5),
        loss_bytes=fixed + rng.randint(1, 600) * MIB, other_bytes=fixed, fixed={"weights": fixed},
        may_move=rng.random() < 0.8, out_bytes_per_s=rate, in_bytes_per_s=rate * rng.uniform(0.8, 1.2), latency_s=1e-4,
    )  # fmt: skip


@dataclasses.dataclass
class SimulatedDevice:
    """Runs plans for a step.

    Attributes
    ----------
    step : Step
        What the survey showed.
    true : Step
        What is so.
    growth, offset_bytes : float, int
        What is reserved grows with what is allocated, and more is reserved besides.
    jitter, noise : float
        By which part plans differ in what is reserved, and steps in what they take.
    peak_error : float
        How many times as much is allocated as predicted.
    cap_bytes : int
        What the device has.
    pieces : float or None
        If the allocator gives pages back as the device runs out of them: the part of what is allocated that it cannot
        give back besides.
    """

    step: Step
    true: Step
    growth: float
    offset_bytes: int
    jitter: float
    noise: float
    peak_error: float
    rng: random.Random
    cap_bytes: int = 1 << 60
    ooms: int = 0
    pieces: float | None = None

    @classmethod
    def random(cls, rng: random.Random, *, jitter: float = 0.01) -> "SimulatedDevice":
        """Return a device that differs from what the survey says as such surveys were seen to do."""
        step = random_step(rng)
        true = step.with_times(
            pace=2 ** rng.uniform(-1, 1), again=2 ** rng.uniform(-1.3, 1.3), rate=rng.uniform(0.5, 1.0)
        )
        return cls(
            step, true, growth=rng.uniform(1.0, 1.43), offset_bytes=rng.randint(0, 64) * MIB, jitter=jitter,
            noise=0.02, peak_error=rng.uniform(0.97, 1.03), rng=rng,
        )  # fmt: skip

    def allocated_bytes(self, trial: Trial) -> int:
        """Return what a plan allocates."""
        return int(trial.peak_bytes * self.peak_error)

    def reserved_bytes(self, trial: Trial) -> int:
        """Return what is reserved for a plan, which is the same each time."""
        own = random.Random(hash(trial.plan.calls)).uniform(1 - self.jitter, 1 + self.jitter)
        reserved_bytes = int((self.allocated_bytes(trial) * self.growth) * own) + self.offset_bytes
        if self.pieces is None:
            return reserved_bytes
        least_bytes = int(self.allocated_bytes(trial) * (1 + self.pieces)) + self.offset_bytes
        return max(least_bytes, min(reserved_bytes, self.cap_bytes))

    def backward_reserved_bytes(self, trial: Trial) -> int:
        """Return what is reserved for a plan until its backward ends."""
        return self.reserved_bytes(trial)

    def true_s(self, trial: Trial) -> float:
        """Return what a step takes under a plan."""
        return trial.plan.timed_as(self.true).step_s

    def step_s(self, trial: Trial) -> float:
        """Return what a step takes under a plan, as measured."""
        return self.true_s(trial) * self.rng.uniform(1 - self.noise, 1 + self.noise)

    def runs(self, trial: Trial) -> bool:
        """Return whether a plan fits; count it as a step that ran out of memory if it does not."""
        fits = self.reserved_bytes(trial) <= self.cap_bytes
        self.ooms += not fits
        return fits

    def own_reserved_bytes(self) -> int:
        """Return what the survey's own plan has reserved."""
        return self.reserved_bytes(Trial(self.step, survey_plan(self.step)))
