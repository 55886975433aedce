"""A case, run twice as stock and once offloaded: the same bits, and bytes that moved."""

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from torchoffload._observe.stats import reset_stats, stats
from torchoffload._selftest.cases import NotHadError, Run

__all__ = ["Outcome", "Result", "compare", "deterministic"]

_SEED = 99
_MOST_WAIT_S = 5.0


class Outcome(Enum):
    """How a case came out.

    ``NO_ANSWER``: stock fails on the device, or its bits are not the same twice, so that nothing can be compared.
    """

    PASSED = "pass"
    FAILED = "FAIL"
    NO_ANSWER = "none"


@dataclass(frozen=True)
class Result:
    """The outcome of a case.

    Attributes
    ----------
    outcome : Outcome
        How it came out.
    text : str
        The reason, unless it passed.
    moved_bytes : int
        The bytes that moved.
    taken_s : float
        How long its three runs took.
    """

    outcome: Outcome
    text: str
    moved_bytes: int
    taken_s: float


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Have PyTorch take algorithms that compute the same bits each time, if it has them."""
    was, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warned)


def _records_beyond(count: int) -> int:
    """Return how many records live beyond so many, once autograd's thread has dropped the graph of the last backward.

    It may do so after the backward has returned, or has raised.
    """
    deadline = time.monotonic() + _MOST_WAIT_S
    while (more := stats().live_records - count) > 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    return more


def compare(
    case: Callable[[Run], Any],
    device: torch.device,
    context: Callable[..., Any],
    fit: Callable[..., Any],
) -> Result:
    """Run a case as stock twice, and offloaded.

    Parameters
    ----------
    case : callable
        The case.
    device : torch.device
        The device of its tensors.
    context, fit : callable
        As for ``Run``.
    """
    began = time.perf_counter()
    moved_bytes = 0

    def result(outcome: Outcome, text: str = "") -> Result:
        return Result(outcome, text, moved_bytes, time.perf_counter() - began)

    try:
        expected, again = _bits_of(case, Run(device)), _bits_of(case, Run(device))
    except NotHadError as error:
        return result(Outcome.NO_ANSWER, str(error))
    except Exception as error:
        return result(Outcome.NO_ANSWER, f"stock raises {_in_a_line(error)}")
    if where := _difference(expected, again):
        return result(Outcome.NO_ANSWER, f"stock itself is not the same twice ({where})")
    gc.collect()
    live = stats().live_records
    reset_stats()
    try:
        offloaded = _bits_of(case, Run(device, context, fit))
    except Exception as error:
        return result(Outcome.FAILED, f"raises {_in_a_line(error)}")
    gc.collect()
    seen = stats()
    moved_bytes = seen.bytes_offloaded
    if where := _difference(expected, offloaded):
        return result(Outcome.FAILED, f"differs from stock ({where})")
    if not moved_bytes:
        kept = ", ".join(f"{reason} {count}" for reason, count in seen.records_kept.items() if count)
        return result(Outcome.FAILED, f"nothing moved; kept: {kept or 'nothing was saved'}")
    if (more := _records_beyond(live)) > 0:
        return result(Outcome.FAILED, f"{more} records outlive their graphs")
    return result(Outcome.PASSED)


def _in_a_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _bits_of(case: Callable[[Run], Any], run: Run) -> list[Any]:
    """Return the values that a case returns: of each tensor its form, and its bytes on the CPU."""
    torch.manual_seed(_SEED)
    leaves, _ = tree_flatten(case(run))
    return [_bits(leaf.detach()) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def _bits(tensor: torch.Tensor) -> tuple[Any, ...]:
    on_cpu = tensor.cpu().contiguous().view(-1)
    return (tensor.dtype, tuple(tensor.shape), tensor.stride(), on_cpu.view(torch.uint8))


def _difference(expected: list[Any], actual: list[Any]) -> str:
    """Return the place and the kind of the first difference; empty if there is none."""
    if len(expected) != len(actual):
        return f"{len(actual)} values and not {len(expected)}"
    for number, (one, other) in enumerate(zip(expected, actual, strict=True)):
        if not isinstance(one, tuple) or not isinstance(other, tuple):
            if isinstance(one, tuple) or isinstance(other, tuple) or one != other:
                return f"value {number}: {_short(other)} and not {_short(one)}"
            continue
        *form, bits = one
        *other_form, other_bits = other
        if form != other_form:
            return f"value {number}: {_form(other_form)} and not {_form(form)}"
        if not torch.equal(bits, other_bits):
            count = int((bits != other_bits).sum())
            return f"value {number}, {_form(form)}: {count} of {bits.numel()} bytes"
    return ""


def _form(form: list[Any]) -> str:
    dtype, shape, strides = form
    return f"{dtype} {shape} of strides {strides}".removeprefix("torch.")


def _short(value: Any) -> str:
    return "a tensor" if isinstance(value, tuple) else repr(value)[:200]
