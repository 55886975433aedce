"""plot_memory(): a picture of the device memory over one training step, without and with offloading."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchoffload._contexts.disabling import disabled
from torchoffload._devices import accelerator, meter_for
from torchoffload._observe.stats import stats
from torchoffload._warnings import warn_user

__all__ = ["plot_memory"]

_GIB = 1 << 30
_PLAIN, _OFFLOADED = "plain", "offloaded"
_COLORS = {_PLAIN: "tab:gray", _OFFLOADED: "tab:blue"}


def memory_bytes(device: torch.device) -> int:
    """Return the bytes that are allocated on an accelerator, or for the CPU the resident memory of this process."""
    return meter_for(device).used_bytes()[0]


@dataclass
class Course:
    """The course of device memory over one step.

    Attributes
    ----------
    memory_bytes : list of int
        Device memory in bytes after each operator.
    backward_begins : int or None
        The number of operators that ran before the first one of backward; None if there was no backward.
    is_complete : bool
        False if the step ran out of memory.
    """

    memory_bytes: list[int] = field(default_factory=list)
    backward_begins: int | None = None
    is_complete: bool = True


class _Sampler(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Reads device memory after each operator, including the operators of backward and of recomputation."""

    def __init__(self, device: torch.device, course: Course) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device, self._course = device, course

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # Autograd detaches more often while saved-tensor hooks are in force. Leaving detach out makes both courses
        # count the same operators.
        if func is not torch.ops.aten.detach.default:
            if self._course.backward_begins is None and torch._C._current_graph_task_id() != -1:
                self._course.backward_begins = len(self._course.memory_bytes)
            self._course.memory_bytes.append(memory_bytes(self._device))
        return result


def sample(step: Callable[[], object], device: torch.device, warm_up_steps: int, *, may_run_out: bool) -> Course:
    """Run ``step`` ``warm_up_steps + 1`` times, and return the course of the last run.

    If a run is out of memory and ``may_run_out`` is set, the course of that run is returned instead.
    """
    for _ in range(warm_up_steps + 1):
        course = Course()
        try:
            with _Sampler(device, course):
                step()
        except torch.OutOfMemoryError:
            if not may_run_out:
                raise
            course.is_complete = False
            break
    return course


def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("torchoffload.plot_memory needs matplotlib: pip install matplotlib") from error
    return Figure


def _draw(axes: Any, name: str, course: Course) -> None:
    gibibytes = [nbytes / _GIB for nbytes in course.memory_bytes]
    color = _COLORS[name]
    note = "" if course.is_complete else ", then out of memory"
    axes.plot(gibibytes, label=f"{name}: {max(gibibytes, default=0.0):.2f} GiB at most{note}", color=color)
    axes.fill_between(range(len(gibibytes)), gibibytes, color=color, alpha=0.15)
    if course.backward_begins is not None:
        axes.axvline(course.backward_begins, color=color, linestyle=":", linewidth=1)


def plot_memory(
    step: Callable[[], object],
    path: str | os.PathLike[str],
    *,
    device: torch.device | str | None = None,
    warm_up_steps: int = 2,
) -> None:
    """Draw device memory over one training step, without and with offloading.

    ``step`` first runs several times with all contexts disabled (``TORCHOFFLOAD_DISABLE``), then equally often with
    offloading. In the last run of each kind, memory is read after every operator. The horizontal axis counts operators,
    which are the same in both runs, and a dotted line marks the beginning of backward. A step that runs out of memory
    without offloading is drawn up to that operator.

    Parameters
    ----------
    step : callable
        Runs one whole training step: forward inside ``OffloadActivations``, backward, and the rest. It takes no
        arguments, is called ``2 * (warm_up_steps + 1)`` times, and really trains its model.
    path : str or os.PathLike
        The file to write. Its suffix chooses the format, such as ``.png`` or ``.svg``.
    device : torch.device or str, optional
        The device whose memory is drawn. Default: the accelerator's current device, or the CPU if there is none. For
        the CPU it is the resident memory of the process, in which freed memory shows only after the C library gave it
        back to the system; see docs/profiling.md.
    warm_up_steps : int, default 2
        The number of steps of each kind that run before the one that is drawn. Optimizers allocate their state in the
        first step, and the contexts learn.

    Raises
    ------
    ImportError
        matplotlib is not installed.
    ValueError
        ``warm_up_steps`` is negative.
    torch.OutOfMemoryError
        The device ran out of memory with offloading.

    Notes
    -----
    Regions of ``torch.compile`` run uncompiled meanwhile, since memory is read after each single operator.

    Examples
    --------
    >>> def step():
    ...     with torchoffload.OffloadActivations():
    ...         loss = model(batch).loss
    ...     loss.backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    >>> torchoffload.plot_memory(step, "memory.png")
    """
    figure_class = _figure_class()
    if warm_up_steps < 0:
        raise ValueError(f"torchoffload: warm_up_steps must be at least 0, got {warm_up_steps}")
    looked_at = torch.device(device) if device is not None else _default_device()
    with disabled():
        plain = sample(step, looked_at, warm_up_steps, may_run_out=True)
    moved_before = stats().records_offloaded
    offloaded = sample(step, looked_at, warm_up_steps, may_run_out=False)
    if stats().records_offloaded == moved_before:
        warn_user("torchoffload.plot_memory: nothing was offloaded in these steps; report() says why.")

    figure = figure_class(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, course in ((_PLAIN, plain), (_OFFLOADED, offloaded)):
        _draw(axes, name, course)
    axes.set(title=f"Memory over one training step, {looked_at}", xlabel="operators run", ylabel="GiB")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path, dpi=120)


def _default_device() -> torch.device:
    return accelerator() or torch.device("cpu")
