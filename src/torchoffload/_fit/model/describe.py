"""The report on a fitted model: its plan in words, the frontier of memory and time, and a picture of that."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torchoffload._fit.model.snapshot import Snapshot
from torchoffload._fit.plan.step import CallPlan, Step, StepPlan, least_plan, plan_step
from torchoffload._fit.plan.trials import Trial
from torchoffload._observe.cost import CostOfGib, cost_line
from torchoffload._observe.units import human_bytes

__all__ = ["FrontierPoint", "describe", "frontier", "plot"]

_GIB = 1 << 30
_OPERATORS_SHOWN = 6


@dataclass(frozen=True)
class FrontierPoint:
    """The step in one amount of memory, as predicted.

    Attributes
    ----------
    memory_bytes : int
        The most memory that is allocated on the device.
    step_s : float
        Forward and backward together, in seconds.
    recompute_s : float
        How much of it is spent on computing again, in seconds.
    kept_bytes, moved_bytes : int
        The bytes that the blocks keep on the device, and the bytes that they move.
    """

    memory_bytes: int
    step_s: float
    recompute_s: float
    kept_bytes: int
    moved_bytes: int


def _point(step: Step, plan: StepPlan) -> FrontierPoint:
    return FrontierPoint(step.peak_bytes(plan), plan.step_s, plan.recompute_s, plan.kept_bytes, plan.moved_bytes)


def _surveyed(fitted: Snapshot) -> Step:
    if fitted.step is None:
        why = fitted.why_over or "it takes the first training steps, three as a rule"
        raise RuntimeError(f"the survey is not done: {why}")
    return fitted.step


def _stock(step: Step) -> StepPlan:
    """Return the plan of a step in which nothing is moved or computed again."""
    plan = plan_step(step, 2**60)
    assert plan is not None
    return plan


def frontier(fitted: Snapshot, count: int) -> tuple[FrontierPoint, ...]:
    """Return points from the least memory to that of a step in which nothing is moved or computed again."""
    if not isinstance(count, int) or isinstance(count, bool) or count < 2:
        raise ValueError(f"count must be a whole number of at least 2, got {count!r}")
    step = _surveyed(fitted)
    least, stock = least_plan(step), _stock(step)
    low, high = map(step.peak_bytes, (least, stock))
    points: list[FrontierPoint] = []
    for number in range(count):
        plan = plan_step(step, low + (high - low) * number // (count - 1))
        if plan is not None and (not points or plan.step_s < points[-1].step_s):
            points.append(_point(step, plan))
    return tuple(points)


def _ms(seconds: float | None) -> str:
    return "not measured" if seconds is None else f"{seconds * 1e3:.1f} ms"


def _runs(names: Sequence[str], texts: Sequence[str | None]) -> Iterator[str]:
    """Yield one line for neighbouring calls with the same text: the names of the first and the last, and the text.

    Calls without a text get no line.
    """
    first = 0
    for number in range(1, len(texts) + 1):
        if number == len(texts) or texts[number] != texts[first]:
            name = names[first] if number == first + 1 else f"{names[first]} to {names[number - 1]}"
            if texts[first] is not None:
                yield f"  {name}: {texts[first]}"
            first = number


def _operators(fitted: Snapshot, step: Step, kind: int, outputs: list[int]) -> str:
    made, operators = step.kinds[kind].outputs, fitted.operators[kind]
    counts = Counter(
        str(operators[number]).removeprefix("aten.").removesuffix(".default")
        for output in outputs
        for number in made[output].operators[:1]
        if number < len(operators)
    )
    shown = [f"{name} ({count})" if count > 1 else name for name, count in counts.most_common(_OPERATORS_SHOWN)]
    return ", ".join(shown) + (", ..." if len(counts) > _OPERATORS_SHOWN else "")


def _call_text(fitted: Snapshot, step: Step, planned: CallPlan, kind_number: int) -> str | None:
    """Return the plan of a call of a block, in words; None if it saves nothing."""
    kind = step.kinds[kind_number]
    way = kind.ways[planned.way]
    moved = sum(kind.outputs[output].nbytes for output in planned.moved)
    kept = [output for output in way.kept if output not in planned.moved]
    kept_bytes = sum(kind.outputs[output].nbytes for output in kept)
    obstacle = fitted.obstacles.get(kind_number)
    if way.is_plain:
        saved_bytes = kept_bytes + moved + way.input_bytes
        if saved_bytes == 0 and obstacle is None:
            return None
        does = f"all that is saved {'moves' if planned.moves else 'stays'}, {human_bytes(saved_bytes)}"
        return does + (f"; it cannot be computed again: {obstacle}" if obstacle else "")
    parts = [f"computes again in {_ms(way.recompute_s)}"]
    if planned.moved:
        parts.append(f"moves {human_bytes(moved)} of {_operators(fitted, step, kind_number, list(planned.moved))}")
    if planned.moves:
        parts.append(f"moves its input, {human_bytes(way.input_bytes)}")
    if kept:
        parts.append(f"keeps {human_bytes(kept_bytes)} of {_operators(fitted, step, kind_number, kept)}")
    return "; ".join(parts)


def _tried(trial: Trial) -> str:
    taken = "out of memory" if trial.has_failed else _ms(trial.step_s)
    reserved = f", {human_bytes(trial.reserved_bytes)} reserved" if trial.reserved_bytes else ""
    return f"{_ms(trial.plan.step_s)} and {human_bytes(trial.peak_bytes)} predicted, {taken}{reserved}"


def _more_memory_lines(fitted: Snapshot, step: Step, settled: Trial) -> list[str]:
    """Return the gain of more memory, in words."""
    is_plain = all(trial.is_plain for trial in (settled, *(trial for _, trial in fitted.others)))
    if is_plain and settled.peak_bytes <= fitted.room_bytes:
        return ["The step fits as it is: nothing moves and nothing is computed again, so you can leave fit out."]
    more = plan_step(step, fitted.room_bytes + _GIB)
    if more is None:
        return []
    gained = _ms(max(0.0, settled.plan.step_s - more.step_s))
    return [f"One more GiB would save {gained} a step." if gained != _ms(0.0) else "More memory would save no time."]


def describe(fitted: Snapshot) -> str:
    """Return the report of a fitted model."""
    shared = f", shared by {fitted.sharer_count} fitted models" if fitted.sharer_count > 1 else ""
    has_less = fitted.device_bytes < fitted.memory_bytes
    had = f", of which the device had {human_bytes(fitted.device_bytes)}" if has_less else ""
    lines = [
        f"torchoffload.fit: {fitted.model_name}, {fitted.block_count} blocks, within "
        f"{human_bytes(fitted.memory_bytes)}{had}{shared}"
    ]
    if fitted.allocator:
        lines[0] += f"; {fitted.allocator}"
    step, settled = fitted.step, fitted.settled
    notes = [f"Note: {note}" for note in fitted.notes]
    if step is None or settled is None:
        trials = "plans are being tried"
        doing = "the first steps are being measured" if step is None else trials
        if step is None and not fitted.has_been_called:
            doing = f"no call of this {fitted.model_name} with gradients was seen yet, and its steps will be measured"
        why = fitted.why_over or f"{doing}, which takes some training steps"
        return "\n".join([*lines, f"  There is no plan yet: {why}.", *notes])
    plan, stock = settled.plan, _stock(step)
    peak = human_bytes(step.peak_bytes(plan))
    reserved = f", {human_bytes(settled.reserved_bytes)} reserved" if settled.reserved_bytes else ""
    lines += [
        f"  predicted: {_ms(plan.step_s)} for forward and backward, at most {peak} allocated",
        f"  measured: {_ms(settled.step_s)}{reserved}",
        f"  of it {_ms(plan.recompute_s)} is computing again; {human_bytes(plan.moved_bytes)} move, "
        f"{human_bytes(plan.kept_bytes)} stay; windows have at most {human_bytes(plan.window_bytes)}",
        f"  with nothing moved or computed again: {_ms(stock.step_s)}, "
        f"{human_bytes(step.peak_bytes(stock))} (predicted)",
    ]
    lines += _cost_lines(step, stock)
    lines.append("What the blocks do:")
    calls = zip(plan.calls, settled.step.calls, strict=True)
    lines += _runs(fitted.names, [_call_text(fitted, settled.step, planned, call.kind) for planned, call in calls])
    lines.append("Time against memory, predicted:")
    for point in frontier(fitted, 8):
        ratio = point.step_s / stock.step_s if stock.step_s else 1.0
        lines.append(f"  {human_bytes(point.memory_bytes):>10}  {_ms(point.step_s):>10}  {ratio:.2f}")
    lines += _more_memory_lines(fitted, step, settled)
    if fitted.trials:
        lines.append(f"Plans that were tried: {'; '.join(map(_tried, fitted.trials))}.")
    for name, trial in fitted.others:
        lines.append(
            f"Steps that begin with {name or fitted.model_name} have a plan of their own, which was not tried: "
            f"{trial.again_count} of {len(trial.step.calls)} calls of blocks are computed again, at most "
            f"{human_bytes(trial.plan.peak_bytes)} allocated (predicted)."
        )
    if fitted.left_plan_count:
        lines.append(
            f"{fitted.left_plan_count} calls of blocks called other operators than planned: what came after these was "
            "computed again, so it took longer and the gradients are right."
        )
    return "\n".join([*lines, *notes])


def _cost_lines(step: Step, stock: StepPlan) -> list[str]:
    """Return the line on the cost of a GiB, if the link was measured."""
    if not step.may_move:
        return []
    rates = step.out_bytes_per_s, step.in_bytes_per_s
    cost = CostOfGib.measured(stock.step_s, stock.kept_bytes, *rates)
    return [] if cost is None else [f"  {cost_line(cost, is_fitted=True)}"]


def plot(fitted: Snapshot, path: str | os.PathLike[str]) -> None:
    """Write a picture of time against memory."""
    points = frontier(fitted, 24)
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plot_frontier needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(
        [point.memory_bytes / _GIB for point in points], [point.step_s * 1e3 for point in points],
        marker=".", color="tab:blue", label="least time, predicted",
    )  # fmt: skip
    step = _surveyed(fitted)
    stock = _point(step, _stock(step))
    axes.plot(
        stock.memory_bytes / _GIB, stock.step_s * 1e3, "s", color="tab:gray", label="nothing moved or computed again"
    )
    settled = fitted.settled
    if settled is not None:
        taken = settled.plan.step_s if settled.step_s is None else settled.step_s
        axes.plot(settled.step.peak_bytes(settled.plan) / _GIB, taken * 1e3, "*", markersize=12, color="tab:red",
                  label="chosen, " + ("predicted" if settled.step_s is None else "measured"))  # fmt: skip
    axes.axvline(
        fitted.memory_bytes / _GIB, linestyle="--", color="tab:gray", linewidth=1, label="memory that was given"
    )
    axes.set_xlabel("device memory at the peak [GiB]")
    axes.set_ylabel("forward and backward [ms]")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path)
