"""One operator that saves all of a tape at once, as a model does that is compiled as a whole."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import timed_steps
import torchoffload

testing = pytest.importorskip("torchoffload._C_testing", reason="it is reached through the test build alone").testing

CHOSEN: dict[str, Any] = {"learn": True, "offload_window_bytes": None, "reload_window_bytes": None}
LAYERS = 40
WIDTH = 512  # a MiB a record: the arena then has chunks to give back


@pytest.fixture(autouse=True)
def _nothing_learned_before() -> Iterator[None]:
    testing.forget_learned()
    torchoffload.reset_stats()
    yield
    testing.forget_learned()


class Whole(torch.autograd.Function):
    """All layers of a model, in one region: it saves as its forward ends."""

    @staticmethod
    def forward(ctx, x):
        saved = [x + layer for layer in range(LAYERS)]
        timed_steps.advance(LAYERS * timed_steps.FORWARD_S)
        ctx.save_for_backward(*saved)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        assert len(ctx.saved_tensors) == LAYERS
        timed_steps.advance(LAYERS * timed_steps.BACKWARD_S)
        return grad


def step(device: Any, **options: Any) -> None:
    with device.context(**(CHOSEN | options)):
        x = torch.ones(WIDTH, WIDTH, requires_grad=True)
        loss = Whole.apply(x).sum()
    loss.backward()


@pytest.mark.devices("simulated-late", "simulated-seeded")
def test_what_stays_in_every_step_leaves_no_pinned_memory_held(device_under_test):
    torchoffload.trim()
    before_bytes = torchoffload.stats().pinned_bytes
    with timed_steps.scope_with_a_link(device_under_test):
        step(device_under_test)
        assert torchoffload.stats().pinned_bytes >= before_bytes + (LAYERS - 4 << 20)
        for _ in range(8):
            step(device_under_test)
        stats = torchoffload.stats()
        assert stats.tapes[-1].records_kept == {"needed_soon": LAYERS}
        assert stats.tapes[-1].bytes_at_once == LAYERS << 20
        assert stats.pinned_bytes == before_bytes
        assert "options=torchoffload.compile_options()" in torchoffload.report()


@pytest.mark.devices("simulated-late")
def test_what_moves_again_grows_the_pinned_memory_again(device_under_test):
    with timed_steps.scope_with_a_link(device_under_test):
        for _ in range(9):
            step(device_under_test)
        step(device_under_test, learn=False)
    assert torchoffload.stats().tapes[-1].records_offloaded == LAYERS
