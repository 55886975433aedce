"""timed_steps.py: training steps of layers that save their input, with times that are exact on the simulated device."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from devices import Device

WIDTH = 64
RECORD_BYTES = WIDTH * WIDTH * 4
COPY_S = 1e-3  # of a record over the simulated link
FORWARD_S, BACKWARD_S = 0.25e-3, 0.5e-3  # of a layer
LEAST_MEMORY = {"offload_window_bytes": 0, "reload_window_bytes": 0}


def advance(seconds: float) -> None:
    from torchoffload._C_testing import testing

    testing.advance(0, seconds)


class Layer(torch.autograd.Function):
    """Saves its input, and computes for a while both ways: on the way back once it has its input."""

    @staticmethod
    def forward(ctx, x, is_timed):
        ctx.is_timed = is_timed
        ctx.save_for_backward(x)
        if is_timed:
            advance(FORWARD_S)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        if ctx.is_timed:
            advance(BACKWARD_S)
        return grad * x, None


def forward(device: Device, layers: int) -> torch.Tensor:
    x = torch.ones(WIDTH, WIDTH, device=device.torch_device, requires_grad=True)
    for _ in range(layers):
        x = Layer.apply(x, device.is_simulated)
    return x.sum()


def step(device: Device, layers: int, **options: Any) -> None:
    with device.context(**options):
        loss = forward(device, layers)
    loss.backward()


@contextlib.contextmanager
def scope_with_a_link(device: Device) -> Iterator[Any]:
    """The device's scope, and on a simulated device a link on which a record's copy takes COPY_S."""
    with device.scope() as simulation:
        if not device.is_simulated:
            yield simulation
            return
        from torchoffload._C_testing import testing

        testing.set_link(0, RECORD_BYTES / COPY_S)
        try:
            yield simulation
        finally:
            testing.set_link(0, 0.0)
