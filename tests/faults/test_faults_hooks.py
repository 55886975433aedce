"""Exceptions that come out of a hook, or through one: Ctrl-C in forward and in backward, and wrappers that fail.

As in test_faults.py each program trains on afterwards, and what was cut off must show in no gradient and leave nothing
behind.
"""

import contextlib
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from devices import Device
from functions import Save
from gradients import Run, assert_same_gradients

DEPTH = 4
NBYTES = 64 * 64 * 4
STEPS = 3


def chain(x: torch.Tensor) -> torch.Tensor:
    for _ in range(DEPTH):
        x = x.sigmoid()
    return x


def loss(x: torch.Tensor) -> torch.Tensor:
    return chain(x).sum()


# ---- KeyboardInterrupt ----


@pytest.fixture(autouse=True)
def _ctrl_c_raises_keyboard_interrupt() -> Iterator[None]:
    """Also where SIGINT was ignored when Python started, as it is in the background of a shell without job control."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt(*unpacked: torch.Tensor) -> None:
    signal.raise_signal(signal.SIGINT)


def test_ctrl_c_in_forward(device_under_test: Device):
    def program(run: Run) -> Any:
        x, context = run.leaf(64, 64), run.offload()
        for _ in range(STEPS):
            saved = []

            def interrupted(x: torch.Tensor) -> None:
                saved.append(x.sigmoid())
                loss(x)
                interrupt()

            with pytest.raises(KeyboardInterrupt), context:
                interrupted(x)
            with context:
                y = loss(x) + saved.pop().sum()
            y.backward()
            run.check(gradient=x.grad)
        return x.grad

    assert_same_gradients(program, device=device_under_test)


def interrupt_inside(device: Device) -> Callable[..., None]:
    """Ctrl-C in the middle of a backward.

    On CUDA that runs on a thread of its own, and Python gives signals to the main one, which sees them once backward is
    over: there the interrupt is raised where it should come.
    """

    def raise_it(*unpacked: torch.Tensor) -> None:
        raise KeyboardInterrupt

    return raise_it if device.name == "cuda" else interrupt


def test_ctrl_c_in_backward_and_backward_again(device_under_test: Device):
    def program(run: Run) -> Any:
        x, context = run.leaf(64, 64), run.offload()
        for _ in range(STEPS):
            look = [interrupt_inside(device_under_test)]
            with context:
                y = x.sigmoid().sigmoid()
                y = loss(Save.apply(y, lambda *unpacked: look[0](*unpacked), y))
            with pytest.raises(KeyboardInterrupt):
                y.backward(retain_graph=True)
            look[0] = lambda *unpacked: None
            y.backward()
            run.check(gradient=x.grad)
        return x.grad

    assert_same_gradients(program, device=device_under_test)


@pytest.mark.parametrize("reload_window_bytes", [0, DEPTH * NBYTES])
def test_ctrl_c_in_backward_and_the_graph_dropped(device_under_test: Device, reload_window_bytes: int):
    """With a window, what the rest of the backward would have asked for is on its way back."""

    def program(run: Run) -> Any:
        x, context = run.leaf(64, 64), run.offload(reload_window_bytes=reload_window_bytes)
        for _ in range(STEPS):
            with context:
                middle = chain(x)
                y = loss(Save.apply(middle, interrupt_inside(device_under_test), middle))
            with pytest.raises(KeyboardInterrupt):
                y.backward()
            del middle, y
            with context:
                y = loss(x)
            y.backward()
            run.check(gradient=x.grad)
        return x.grad

    assert_same_gradients(program, device=device_under_test)


@pytest.mark.devices("cuda")
def test_a_signal_while_the_device_thread_runs_backward_comes_after_it(device_under_test: Device):
    def program(run: Run) -> Any:
        x, context = run.leaf(64, 64), run.offload()
        for _ in range(STEPS):
            with context:
                middle = chain(x)
                y = loss(Save.apply(middle, interrupt, middle))
            with pytest.raises(KeyboardInterrupt):
                y.backward()
            run.check(gradient=x.grad)
        return x.grad

    assert_same_gradients(program, device=device_under_test)


# ---- wrappers that fail to come apart, or to come back together ----


class Planted(Exception):
    """What a wrapper raises while it is told to."""


class Brittle(TwoTensor):
    """A wrapper that fails in one of its methods while `failing` names it."""

    failing: str | None = None

    def __tensor_flatten__(self) -> Any:
        if Brittle.failing == "flatten":
            raise Planted("flatten")
        names, metadata = super().__tensor_flatten__()
        return [*names, "missing"] if Brittle.failing == "missing" else names, metadata

    @staticmethod
    def __tensor_unflatten__(inner_tensors: Any, *metadata: Any) -> TwoTensor:
        if Brittle.failing == "unflatten":
            raise Planted("unflatten")
        if Brittle.failing == "interrupted":
            raise KeyboardInterrupt
        return TwoTensor.__tensor_unflatten__(inner_tensors, *metadata)


@pytest.fixture(autouse=True)
def _nothing_fails():
    yield
    Brittle.failing = None


@contextlib.contextmanager
def failing(name: str, error: type[BaseException]) -> Iterator[None]:
    Brittle.failing = name
    with pytest.raises(error):
        yield
    Brittle.failing = None


def save(x: torch.Tensor, wrapped: torch.Tensor) -> torch.Tensor:
    return Save.apply(x, lambda each: each.a * each.b, wrapped)


@pytest.mark.parametrize(("name", "error"), [("flatten", Planted), ("missing", AttributeError)])
def test_a_wrapper_that_does_not_come_apart_ends_the_step_and_no_other(
    device_under_test: Device, name: str, error: type[BaseException]
):
    """One that names an inner tensor that it lacks fails when the others are packed: they are let go."""

    def program(run: Run) -> Any:
        x, context = run.leaf(64, 64), run.offload()
        for _ in range(STEPS):
            wrapped = Brittle(run.tensor(64, 64), run.tensor(64, 64))
            if not run.stock:
                with failing(name, error), context:
                    save(x, wrapped)
            with context:
                y = save(x, wrapped)
            y.sum().backward()
            run.check(gradient=x.grad)
        return x.grad

    assert_same_gradients(program, device=device_under_test)


@pytest.mark.parametrize(("name", "error"), [("unflatten", Planted), ("interrupted", KeyboardInterrupt)])
def test_a_wrapper_that_does_not_come_together_fails_a_backward_and_not_the_next(
    device_under_test: Device, name: str, error: type[BaseException]
):
    def program(run: Run) -> Any:
        x, context = run.leaf(64, 64), run.offload()
        for _ in range(STEPS):
            wrapped = Brittle(run.tensor(64, 64), run.tensor(64, 64))
            with context:
                y = save(x, wrapped)
            if not run.stock:
                with failing(name, error):
                    y.sum().backward(retain_graph=True)
            y.sum().backward()
            run.check(gradient=x.grad)
        return x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=STEPS * 2 * NBYTES)
