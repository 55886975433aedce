"""The result of an estimate: numbers with their units, and a table for people."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from torchoffload._estimate.cards import Card
from torchoffload._observe.units import human_bytes

__all__ = ["Advice", "Estimate", "StepEstimate"]

Advice = Literal["plain", "move", "checkpoint", "fit", "none"]
"""Which way to use: the step as it is, ``OffloadActivations``, checkpoints, ``fit``, or none of these."""


@dataclass(frozen=True, kw_only=True)
class StepEstimate:
    """The memory and time of a step in one way.

    Attributes
    ----------
    peak_bytes : int
        The most that is allocated on the device, with weights, gradients and the states of the optimizer.
    step_ms : float
        How long forward and backward take, in milliseconds, without the optimizer.
    low_ms, high_ms : float
        The range in which that is expected to be.
    host_bytes : int
        The bytes that move to host memory.
    """

    peak_bytes: int
    step_ms: float
    low_ms: float
    high_ms: float
    host_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The memory and time of a training step, and which way to run it.

    ``str()`` is a table of it. Bytes are those that PyTorch's allocator hands out: it reserves 1.0 to 1.4 times as
    much, depending on the model.

    Attributes
    ----------
    card : Card
        The card.
    memory_bytes : int
        The memory that the step may take: the budget that was given, or the card's memory beside a CUDA context.
    weights_bytes, gradients_bytes, optimizer_bytes : int
        Parameters and buffers; the gradients of those that are trained; the optimizer's states.
    saved_bytes : int
        The bytes that autograd saves in forward, without parameters and buffers, each storage once.
    plain : StepEstimate
        The step as it is.
    moved : StepEstimate or None
        With saved tensors moved as far as the memory demands, and nothing computed again: ``OffloadActivations``. If
        that does not fit, the least that it can do with. None if the model has no blocks.
    checkpointed : StepEstimate or None
        With each block in a checkpoint.
    fit_least : StepEstimate or None
        By ``fit`` in the least memory.
    fit : StepEstimate or None
        By ``fit`` in ``memory_bytes``; None if even the least does not fit.
    compute_ms_per_gib : float
        How long the plain step computes for each GiB that it saves.
    recompute_ms_per_gib : float or None
        How long checkpoints compute again for each GiB that they free.
    link_ms_per_gib : float
        How long a GiB takes over the link, out and back.
    free_bytes : int
        The bytes that can move beside the computation at no cost: those that the link carries in forward or in
        backward, whichever is shorter.
    way : str
        Which way to use: ``"plain"``, ``"move"``, ``"checkpoint"``, ``"fit"``, or ``"none"`` of them.
    why : str
        The reason, as a sentence.
    blocks : tuple of str
        The names of the blocks, as ``fit`` would choose them.
    flops : int
        The operations of a plain step; a product and a sum are two.
    dry_run_s : float
        How long the estimate took, in seconds.
    notes : tuple of str
        The assumptions made.
    """

    card: Card
    memory_bytes: int
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    saved_bytes: int
    plain: StepEstimate
    moved: StepEstimate | None
    checkpointed: StepEstimate | None
    fit_least: StepEstimate | None
    fit: StepEstimate | None
    compute_ms_per_gib: float
    recompute_ms_per_gib: float | None
    link_ms_per_gib: float
    free_bytes: int
    way: Advice
    why: str
    blocks: tuple[str, ...]
    flops: int
    dry_run_s: float
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return all fields as plain values, for JSON: sizes in bytes, times in milliseconds unless they end in _s."""
        return asdict(self)

    def __str__(self) -> str:
        return "\n".join([*_head(self), "", *_ways(self), "", *_rest(self)])


def _head(found: Estimate) -> list[str]:
    card = found.card
    fixed = [
        ("weights", found.weights_bytes),
        ("gradients", found.gradients_bytes),
        ("optimizer", found.optimizer_bytes),
        ("saved by autograd", found.saved_bytes),
    ]
    rough = "" if card.is_measured else "; times are rough: nobody has compared steps on this card"
    return [
        f"{card.name}: {human_bytes(found.memory_bytes)} for the step{rough}",
        *(f"  {name:<20}{human_bytes(nbytes):>11}" for name, nbytes in fixed),
    ]


def _ways(found: Estimate) -> list[str]:
    rows = [
        ("as it is", found.plain),
        ("moved (OffloadActivations)", found.moved),
        ("each block checkpointed", found.checkpointed),
        ("fit, in this memory", found.fit),
        ("fit, in the least memory", found.fit_least),
    ]
    lines = [f"  {'the step':<28}{'peak':>10}  {'forward and backward':<22}"]
    for name, step in rows:
        if step is not None:
            misfit = "" if step.peak_bytes <= found.memory_bytes else "  does not fit"
            lines.append(f"  {name:<28}{human_bytes(step.peak_bytes):>10}  {_range(step):<22}{misfit}".rstrip())
        elif name == "fit, in this memory":
            lines.append(f"  {name:<28}{'-':>10}  does not fit")
    return lines


def _range(step: StepEstimate) -> str:
    return f"{step.low_ms:,.0f} to {step.high_ms:,.0f} ms"


def _rest(found: Estimate) -> list[str]:
    again = found.recompute_ms_per_gib
    recompute = "" if again is None else f", to compute it again {_ms(again)} ms"
    lines = [
        f"  for each GiB saved: computing takes {_ms(found.compute_ms_per_gib)} ms, the link out and back "
        f"{_ms(found.link_ms_per_gib)} ms{recompute}",
        f"  moves at no cost: {human_bytes(found.free_bytes)}",
        "",
        f"use: {_NAMES[found.way]}. {found.why}",
    ]
    return [*lines, *(f"note: {note}" for note in found.notes)]


def _ms(value: float) -> str:
    return f"{value:.1f}" if value < 10 else f"{value:.0f}"


_NAMES = {
    "plain": "the step as it is, without torchoffload",
    "move": "OffloadActivations",
    "checkpoint": "a checkpoint around each block",
    "fit": "fit",
    "none": "something else",
}
