"""program.py: a random program is data, so that it can be cut down and printed.

A step is a dict of plain values. ``do`` names its kind, a method of `Interpreter`; ``x``, ``y``, ``of`` and ``source``
name values, ``out`` names the one that it makes. A step whose values are not there is left out, in each run alike.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Step = dict[str, Any]
BODIES = ("body", "bodies")


@dataclass(frozen=True)
class Program:
    """One program.

    Attributes
    ----------
    seed : int
        What it was drawn from; the legal order that "simulated-seeded" takes.
    contexts : list of dict
        Options of the OffloadActivations that its steps enter, by index.
    watches_storages : bool
        Whether the storages of its values are held weakly, to see what is alive afterwards. In half of the programs
        they are not: a storage that is held weakly never shares its address with a later one.
    steps : list of Step
        What it does.
    """

    seed: int
    contexts: list[dict[str, Any]]
    watches_storages: bool
    steps: list[Step]

    @property
    def learns(self) -> bool:
        """Whether its contexts let one run of it teach the next: in a third of the programs."""
        return self.seed % 3 == 0

    def step_count(self) -> int:
        return sum(1 for _ in all_steps(self.steps))


def all_steps(steps: list[Step]) -> Iterator[Step]:
    """Every step, those of bodies too."""
    for step in steps:
        yield step
        for body in bodies_of(step):
            yield from all_steps(body)


def bodies_of(step: Step) -> list[list[Step]]:
    return [step["body"]] if "body" in step else step.get("bodies", [])
