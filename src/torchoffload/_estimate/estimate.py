"""``estimate``: the memory and time that a training step would take, and which way to run it."""

import difflib
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchoffload._contexts.amounts import parse_amount
from torchoffload._contexts.options import check_module
from torchoffload._estimate.cards import Card, find_card
from torchoffload._estimate.dry_step import Blocks, Setting, Trace, dry_step
from torchoffload._estimate.optimizers import Optimizer, find_optimizer
from torchoffload._estimate.planned import seconds_of_step, step_of, without_recomputation
from torchoffload._estimate.rates import seconds_of
from torchoffload._estimate.result import Advice, Estimate, StepEstimate
from torchoffload._fit.choosing.choice import SHARE_THAT_STAYS, choose_blocks
from torchoffload._fit.choosing.dry_run import DryRunError
from torchoffload._fit.choosing.named_blocks import blocks_of, computing
from torchoffload._fit.choosing.structure import find_blocks, innermost_blocks
from torchoffload._fit.plan.step import Step, StepPlan, least_plan, plan_step
from torchoffload._modules.selection import Selector
from torchoffload._observe.units import human_bytes

__all__ = ["Traces", "estimate", "room_of", "tell", "traces_of"]

_GIB = 1 << 30
_CONTEXT_BYTES = 600 << 20
"""The memory of a CUDA context and of the workspaces of cuBLAS on a card."""
_RESERVED = 1.1
"""A step fits if so many times its allocated bytes are there, since the allocator reserves more: 1.0 to 1.43 times as
much were measured."""
_RESERVED_BY_FIT = 1.04
"""The same of plans, which fit makes for the reserved bytes, with expandable segments."""
_HARDLY_LONGER = 1.03
"""A way of fewer parts is advised if it takes at most so many times as long as fit."""
_RANGE, _ROUGH_RANGE = (0.85, 1.4), (0.65, 1.8)
"""From which part to how many times the estimated time a step is expected to take, on a card that was measured and on
others. On the H200 every measured step is in the first, also those by fit (tests/estimate/test_measured.py)."""

_DTYPES = {
    "bfloat16": torch.bfloat16, "bf16": torch.bfloat16, "float16": torch.float16, "fp16": torch.float16,
    "half": torch.float16, "float32": torch.float32, "fp32": torch.float32,
}  # fmt: skip


def estimate(
    model: nn.Module,
    *inputs: Any,
    gpu: str | Card = "RTX 4090",
    optimizer: str | float | None = "adamw",
    loss: Callable[[Any], torch.Tensor] | None = None,
    dtype: torch.dtype | str | None = None,
    autocast: torch.dtype | str | None = None,
    memory: float | str | None = None,
    host_memory: int | str = "64GiB",
    blocks: Selector | Sequence[Selector] | None = None,
    keep_gradients: bool = False,
    limit_s: float = 300.0,
    **more_inputs: Any,
) -> Estimate:
    """Estimate the memory and time of a training step on a card, and which way to run it.

    Forward and backward of a copy of the model run on the CPU with tensors that have no memory. No GPU is needed, and
    the model and its inputs may be on the meta device. The model stays as it is: parameters, gradients, buffers,
    attributes, hooks, and random number generators. Operators of Triton and custom ones are not seen.

    Bytes are counted and have no fitted constant. Times are computed from data sheets and from efficiencies that were
    tuned on an H200, so they come as a range.

    Parameters
    ----------
    model : nn.Module
        The model, in training mode.
    *inputs, **more_inputs
        The arguments of its call. Tensors need the right shapes, and no values.
    gpu : str or Card, default "RTX 4090"
        The card, by name or by its figures.
    optimizer : str, float or None, default "adamw"
        The optimizer, or the bytes that it keeps for each number of the parameters.
    loss : callable, optional
        From the output of the model to a tensor of one element. Default: the ``loss`` of the output, else its sum.
    dtype : torch.dtype or str, optional
        The dtype assumed for floating-point parameters, buffers and inputs. Default: their own.
    autocast : torch.dtype or str, optional
        The dtype that forward runs under autocast to. Default: no autocast. One inside of the model's own forward
        counts if it is for the device type of the inputs, here "cpu".
    memory : int, float, str, optional
        The memory for the step: bytes, a text such as ``"20GiB"``, or a fraction of the card's memory. Default: the
        card's memory without 0.6 GiB for a CUDA context.
    host_memory : int or str, default "64GiB"
        The most that may move to host memory. torchoffload takes 0.8 of a machine's free memory unless told otherwise.
    blocks : selector or sequence of selectors, optional
        The blocks, as ``fit`` takes them. Default: as ``fit`` chooses them.
    keep_gradients : bool, default False
        Whether gradients are kept between steps, as with ``zero_grad(set_to_none=False)`` or when they are accumulated.
    limit_s : float, default 300
        How long one of the dry runs may take, in seconds.

    Returns
    -------
    Estimate
        The numbers; ``print`` shows a table of them.

    Raises
    ------
    TypeError, ValueError
        An argument is wrong; the message names the right ones.
    RuntimeError
        The model cannot run without data; the message says why, and names a remedy.

    Examples
    --------
    >>> with torch.device("meta"):
    ...     model = LlamaForCausalLM(config).bfloat16()
    ...     tokens = torch.zeros(1, 4096, dtype=torch.long)
    >>> print(torchoffload.estimate(model, input_ids=tokens, labels=tokens, gpu="RTX 4090"))
    """
    check_module("model", model)
    card, keeper = find_card(gpu), find_optimizer(optimizer)
    _check_inputs(model, inputs, more_inputs)
    if loss is not None and not callable(loss):
        raise TypeError(f"loss must be a function of the model's output, got {type(loss).__name__}")
    if not isinstance(keep_gradients, bool):
        raise TypeError(f"keep_gradients must be True or False, got {type(keep_gradients).__name__}")
    card_bytes = int(card.memory_gib * _GIB)
    memory_bytes = room_of(card) if memory is None else _bytes("memory", memory, card_bytes)
    setting = Setting(
        dtype=_dtype("dtype", dtype),
        autocast=_dtype("autocast", autocast),
        loss=loss,
        keeps_gradients=keep_gradients,
        limit_s=limit_s,
    )
    host_bytes = _bytes("host_memory", host_memory, None)
    traces = traces_of(computing(model), inputs, more_inputs, setting, blocks)
    return tell(traces, card, keeper, memory_bytes, host_bytes)


def room_of(card: Card) -> int:
    """Return the bytes of a card that a step may take."""
    return max(1, int(card.memory_gib * _GIB) - _CONTEXT_BYTES)


def _bytes(name: str, given: float | str, total_bytes: int | None) -> int:
    """Return an amount in bytes; a fraction is one of ``total_bytes``."""
    amount = parse_amount(given)
    if amount.nbytes is None and total_bytes is None:
        raise ValueError(f'{name} must be an amount, such as "64GiB": a machine that is not there has no total')
    nbytes = amount.in_bytes(lambda: total_bytes or 1)
    if not amount.has_unit and nbytes < 1 << 20:
        raise ValueError(f'{name}={given} means {nbytes} bytes; did you mean "{given}GiB"?')
    return nbytes


def _dtype(name: str, given: object) -> torch.dtype | None:
    if given is None or (isinstance(given, torch.dtype) and given.is_floating_point):
        return given
    if not isinstance(given, (str, torch.dtype)):
        raise TypeError(f"{name} must be a floating-point dtype or its name, got {type(given).__name__}")
    text = str(given).removeprefix("torch.")
    if text in _DTYPES:
        return _DTYPES[text]
    near = difflib.get_close_matches(text, _DTYPES, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"{name}: {text!r} is no floating-point dtype.{hint} Choose from {', '.join(_DTYPES)}.")


_OPTIONS = tuple(
    name for name, each in inspect.signature(estimate).parameters.items() if each.kind is each.KEYWORD_ONLY
)


def _check_inputs(model: nn.Module, inputs: Sequence[Any], more_inputs: Mapping[str, Any]) -> None:
    """Raise TypeError if forward does not take the arguments; a misspelled option comes as one of them."""
    signature = inspect.signature(model.forward)
    taken = [each.name for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
    for name in more_inputs:
        if name not in taken:
            near = difflib.get_close_matches(name, _OPTIONS, n=1, cutoff=0.75)
            if near:
                raise TypeError(f"estimate got an unknown option: {name} (did you mean {near[0]}?)")
    try:
        signature.bind(*inputs, **more_inputs)
    except TypeError as error:
        raise TypeError(
            f"estimate: these inputs are not what {type(model).__name__}.forward takes: {error}. Give it the arguments "
            f"of the model's call; its own options are {', '.join(_OPTIONS)}."
        ) from None


@dataclass(frozen=True, kw_only=True)
class Traces:
    """The dry steps of a model, from which estimates for any card follow.

    Attributes
    ----------
    plain, checkpointed, moved : Trace
        The step with its blocks as they are, in checkpoints, and in checkpoints whose inputs move. The last two are
        None if there are no blocks.
    blocks : tuple of str
        The names of the blocks.
    trained : list of Tensor
        Tensors like the parameters that are trained, on the meta device.
    notes : tuple of str
        The assumptions made.
    dry_run_s : float
        How long it took, in seconds.
    """

    plain: Trace
    checkpointed: Trace | None
    moved: Trace | None
    blocks: tuple[str, ...]
    trained: list[torch.Tensor]
    notes: tuple[str, ...]
    dry_run_s: float


def traces_of(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    setting: Setting,
    blocks: Selector | Sequence[Selector] | None = None,
) -> Traces:
    """Run the dry steps of a model. RuntimeError if it cannot run without data."""
    began = time.perf_counter()

    def dry(names: Sequence[str], do: Blocks) -> Trace:
        try:
            return dry_step(model, args, kwargs, setting, blocks=names, do=do)
        except DryRunError as error:
            raise RuntimeError(
                f"torchoffload.estimate: the model cannot run without data: {error}\n"
                "What to do: give it inputs from which it computes without looking at values, estimate the part of it "
                "that takes the memory, such as its decoder, or replace what reads values. On the device, "
                "torchoffload.fit measures, and needs no dry run."
            ) from None

    plain = dry((), Blocks.PLAIN)
    names = _blocks(model, blocks, plain)
    notes = list(plain.notes)
    if not model.training:
        notes.append("the model is in eval mode: dropout and batch normalization save other tensors in training")
    if any(isinstance(each, nn.RNNBase) for each in model.modules()):
        notes.append("recurrent layers: cuDNN saves more than is counted here, and their time is not known")
    if plain.guess_count:
        notes.append(f"numbers that only data would tell were guessed, {plain.guess_count} times")
    return Traces(
        plain=plain,
        checkpointed=dry(names, Blocks.CHECKPOINTED) if names else None,
        moved=dry(names, Blocks.MOVED) if names else None,
        blocks=tuple(names),
        trained=[
            torch.empty(each.shape, dtype=setting.dtype or each.dtype, device="meta")
            for each in model.parameters()
            if each.requires_grad
        ],
        notes=tuple(notes),
        dry_run_s=time.perf_counter() - began,
    )


def _blocks(model: nn.Module, wanted: Selector | Sequence[Selector] | None, plain: Trace) -> list[str]:
    names = {module: name for name, module in model.named_modules()}
    if wanted is not None:
        return [names[each.module] for each in blocks_of(model, wanted)]
    plain.tree.fixed_bytes = plain.weights_bytes + plain.gradients_bytes
    also = [[names[each] for each in found] for found in (find_blocks(model), innermost_blocks(model))]
    chosen = choose_blocks(plain.tree, share_that_stays=SHARE_THAT_STAYS, also=also).modules
    return [str(each) for each in chosen]


def tell(traces: Traces, card: Card, optimizer: Optimizer, memory_bytes: int, host_bytes: int) -> Estimate:
    """Return the estimate of a step on a card."""
    return _Telling(card, optimizer, memory_bytes, host_bytes, traces).tell()


class _Telling:
    """An estimate for one card under way."""

    def __init__(self, card: Card, optimizer: Optimizer, memory_bytes: int, host_bytes: int, traces: Traces) -> None:
        self._card, self._memory_bytes, self._host_bytes, self._traces = card, memory_bytes, host_bytes, traces
        plain = traces.plain
        self._state_bytes = optimizer.state_bytes(traces.trained)
        self._fixed_bytes = plain.weights_bytes + plain.gradients_bytes + self._state_bytes
        self._other_bytes = self._fixed_bytes + optimizer.scratch_bytes(traces.trained)
        self._range = _RANGE if card.is_measured else _ROUGH_RANGE

    def tell(self) -> Estimate:
        card, traces, plain = self._card, self._traces, self._traces.plain
        plain_s = seconds_of_step(plain, card)
        found_plain = self._told(plain.peak_bytes, plain_s)
        found_checkpointed = found_moved = found_least = found_fit = None
        again_ms = None
        if traces.checkpointed is not None and traces.moved is not None:
            checkpointed_s = max(seconds_of_step(traces.checkpointed, card), plain_s)
            found_checkpointed = self._told(traces.checkpointed.peak_bytes, checkpointed_s)
            freed = (plain.loss_bytes - traces.checkpointed.loss_bytes) / _GIB
            again_ms = 1e3 * (checkpointed_s - plain_s) / freed if freed > 0 else None
            divided = plain.divided(set(traces.blocks))
            step = step_of(
                divided,
                traces.moved,
                card,
                other_bytes=self._other_bytes - self._state_bytes,
                host_bytes=self._host_bytes,
            )
            found_moved = self._planned(without_recomputation(step), or_least=True)
            found_least = self._plan(least_plan(step), step)
            found_fit = self._planned(step, or_least=False)
        saved_gib = plain.saved_bytes / _GIB
        forward_s = sum(seconds_of(each.cost, card) for each in plain.operators if not each.is_backward)
        link_bytes_per_s = card.link_gb_per_s * 1e9
        free = min(plain.saved_bytes, int(link_bytes_per_s * min(forward_s, max(0.0, plain_s - forward_s))))
        way, why = _advice(
            found_plain,
            found_moved,
            found_checkpointed,
            found_fit,
            found_least,
            memory_bytes=self._memory_bytes,
            fixed_bytes=self._fixed_bytes,
        )
        return Estimate(
            card=card,
            memory_bytes=self._memory_bytes,
            weights_bytes=plain.weights_bytes,
            gradients_bytes=plain.gradients_bytes,
            optimizer_bytes=self._state_bytes,
            saved_bytes=plain.saved_bytes,
            plain=found_plain,
            moved=found_moved,
            checkpointed=found_checkpointed,
            fit_least=found_least,
            fit=found_fit,
            compute_ms_per_gib=1e3 * plain_s / saved_gib if saved_gib else 0.0,
            recompute_ms_per_gib=again_ms,
            link_ms_per_gib=2e3 * _GIB / link_bytes_per_s,
            free_bytes=free,
            way=way,
            why=why,
            blocks=traces.blocks,
            flops=sum(each.cost.flops for each in plain.operators),
            dry_run_s=traces.dry_run_s,
            notes=(*traces.notes, *self._notes()),
        )

    def _told(self, step_bytes: int, seconds: float, host_bytes: int = 0) -> StepEstimate:
        """Return the estimate from the most that forward and backward take without the optimizer's states."""
        step_ms = 1e3 * seconds
        return StepEstimate(
            peak_bytes=max(step_bytes + self._state_bytes, self._other_bytes),
            step_ms=step_ms,
            low_ms=step_ms * self._range[0],
            high_ms=step_ms * self._range[1],
            host_bytes=host_bytes,
        )

    def _plan(self, plan: StepPlan, step: Step) -> StepEstimate:
        # The planner's step counts a block's own values twice if nothing of the block moves or is computed again.
        peak_bytes = min(step.peak_bytes(plan), self._traces.plain.peak_bytes)
        return self._told(peak_bytes, plan.step_s, plan.moved_bytes)

    def _planned(self, step: Step, *, or_least: bool) -> StepEstimate | None:
        room_bytes = int(self._memory_bytes / _RESERVED_BY_FIT) - self._state_bytes
        if max(self._traces.plain.peak_bytes, self._other_bytes - self._state_bytes) <= room_bytes:
            return self._told(self._traces.plain.peak_bytes, seconds_of_step(self._traces.plain, self._card))
        plan = plan_step(step, room_bytes)
        if plan is not None:
            return self._plan(plan, step)
        return self._plan(least_plan(step), step) if or_least else None

    def _notes(self) -> list[str]:
        dtypes = {each.cost.dtype for each in self._traces.plain.operators if each.cost.flops}
        if self._card.has_bfloat16 or torch.bfloat16 not in dtypes:
            return []
        return [f"{self._card.name} has no bfloat16: the times are those of float32. Use float16 with a GradScaler"]


def _advice(
    plain: StepEstimate,
    moved: StepEstimate | None,
    checkpointed: StepEstimate | None,
    fit: StepEstimate | None,
    least: StepEstimate | None,
    *,
    memory_bytes: int,
    fixed_bytes: int,
) -> tuple[Advice, str]:
    room = human_bytes(memory_bytes)
    if plain.peak_bytes * _RESERVED <= memory_bytes:
        return "plain", f"It fits: {human_bytes(plain.peak_bytes)} of {room}. Nothing makes it faster."
    if fixed_bytes > memory_bytes:
        return "none", (
            f"Weights, gradients and the optimizer take {human_bytes(fixed_bytes)}, more than {room}, before anything "
            "is saved: shard them (FSDP), train fewer of them (LoRA), or use an optimizer that keeps less."
        )
    if fit is None or moved is None or checkpointed is None:
        needed = "" if least is None else f": even fit needs {human_bytes(least.peak_bytes)}"
        return "none", f"It does not fit in {room}{needed}. Take a smaller batch or shorter sequences."
    why = (
        f"The step as it is needs {human_bytes(plain.peak_bytes)} of {room}"
        f"{', and as much again as the allocator reserves' if plain.peak_bytes <= memory_bytes else ''}. "
    )
    others: list[tuple[Advice, str, StepEstimate]] = [
        ("move", "moving", moved),
        ("checkpoint", "checkpoints", checkpointed),
    ]
    texts = []
    for way, name, step in others:
        fits = step.peak_bytes <= memory_bytes
        if fits and step.step_ms <= _HARDLY_LONGER * fit.step_ms:
            times = f"{step.step_ms / plain.step_ms:.2f} times the plain step's time"
            return way, f"{why}With {name} it takes {times}, and fit would hardly be faster."
        texts.append(f"{name} {step.step_ms / plain.step_ms:.2f}" if fits else f"{name} does not fit")
    return "fit", f"{why}In it fit takes {fit.step_ms / plain.step_ms:.2f} times its time; {', '.join(texts)}."
