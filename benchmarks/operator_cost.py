"""The host's time, in ns, for a mode that sees each operator: ``python benchmarks/operator_cost.py``.

A chain of operators on a small matrix, on the CPU, with one thread and without the garbage collector, so that the
host's work for an operator is most of what it takes. Stock, under a mode in Python that passes each operator on, and
under a mode of ours whose listener counts, by the way through Python and by the one without.
"""

import argparse
import contextlib
import gc
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchoffload._core import core
from torchoffload._pytorch.operator_mode import OperatorMode, obstacle


class InPython(TorchDispatchMode):
    """Passes each operator on."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def make_chain(operators: int) -> tuple[Callable[[], torch.Tensor], int]:
    """Return a function that calls about so many operators, with gradients, and how many they are."""
    weights = [torch.randn(16, 16, requires_grad=True) for _ in range(max(1, operators // 4))]
    x = torch.randn(8, 16)

    def chain() -> torch.Tensor:
        y = x
        for weight in weights:
            y = torch.nn.functional.silu(torch.mm(y, weight) * 0.5) + 1.0
        return y

    return chain, 4 * len(weights)


def by_listener() -> AbstractContextManager[Any]:
    """Return a mode that counts."""
    return OperatorMode(core.counting_listener())


def time_calls(call: Callable[[], object], calls: int) -> float:
    """Return the ns of this thread that one call takes, of so many."""
    started = time.thread_time_ns()
    for _ in range(calls):
        call()
    return (time.thread_time_ns() - started) / calls


def measure(ways: dict[str, Callable[[], AbstractContextManager[Any]]], args: argparse.Namespace) -> dict[str, float]:
    """Return the ns an operator in each way: the least of all rounds, in which the ways take turns."""
    chain, operators = make_chain(args.operators)
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(args.rounds):
        for way, enter in ways.items():
            if way == "through Python":
                core.remove_interpreter_delegate()
            elif obstacle() is None:
                core.install_interpreter_delegate()
            with enter():
                chain()
                taken[way].append(time_calls(chain, args.calls) / operators)
    return {way: min(times) for way, times in taken.items()}


def entering(enter: Callable[[], AbstractContextManager[Any]], calls: int) -> float:
    """Return the ns that making, entering and leaving a mode take."""

    def once() -> None:
        with enter():
            pass

    return statistics.median(time_calls(once, calls) for _ in range(5))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--operators", type=int, default=24, help="operators of one call of the chain")
    parser.add_argument("--calls", type=int, default=300, help="calls of the chain in a round")
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    ways: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "stock": contextlib.nullcontext,
        "mode in Python": InPython,
        "through Python": by_listener,
        "without Python": by_listener,
    }
    if (fault := obstacle()) is not None:
        print(fault)
        del ways["without Python"]
    gc.disable()
    taken = measure(ways, args)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} thread; ns an operator, least of {args.rounds} rounds")
    for way, nanoseconds in taken.items():
        print(f"{way:16} {nanoseconds:8.0f}  +{nanoseconds - taken['stock']:.0f}")
    print(f"making, entering and leaving a mode: {entering(by_listener, args.calls):.0f} ns")


if __name__ == "__main__":
    main()
