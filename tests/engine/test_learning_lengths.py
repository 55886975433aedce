"""Learning where each step may have another length: the same share stays, and no step holds more than its first did."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import timed_steps
import torchoffload
from devices import Device
from functions import SavesInput
from gradients import assert_same_gradients

testing = pytest.importorskip("torchoffload._C_testing", reason="it is reached through the test build alone").testing

UNTIMED = pytest.mark.devices("disk", "simulated-late", "simulated-early", "simulated-seeded", "privateuseone")
SIMULATED = pytest.mark.devices("simulated-late", "simulated-early", "simulated-seeded")
CHOSEN: dict[str, Any] = {"learn": True, "offload_window_bytes": None, "reload_window_bytes": None}
LAYERS = 20
LENGTHS = [64 + 7 * number % 23 for number in range(46)]  # 23 lengths in turn, twice


@pytest.fixture(autouse=True)
def _nothing_learned_before() -> Iterator[None]:
    testing.forget_learned()
    yield
    testing.forget_learned()


def kept_of_steps(device: Device, lengths: list[int], reason: str = "tape_end") -> list[int]:
    """Chains of the same layers, over records of these lengths. How many of each one's records were kept."""

    def program(run):
        for length in lengths:
            hidden = x = run.leaf(length, 256)
            with run.offload(**CHOSEN):
                for _ in range(LAYERS):
                    hidden = SavesInput.apply(hidden)
                loss = hidden.sum()
            loss.backward()
            run.check(grad=x.grad)

    stats = assert_same_gradients(program, device=device, min_moved_fraction=0.01)
    return [row.records_kept.get(reason, 0) for row in stats.tapes[-len(lengths) :]]


@UNTIMED
def test_23_lengths_in_turn_keep_what_one_length_does(device_under_test):
    assert len(set(LENGTHS)) == 23
    one_length = kept_of_steps(device_under_test, [64] * 10)
    testing.forget_learned()
    assert kept_of_steps(device_under_test, LENGTHS)[:10] == one_length
    assert testing.structures_learned() == 1


@SIMULATED
def test_23_lengths_in_turn_learn_times_as_one_length_does(device_under_test):
    def kept(widths: list[int]) -> list[dict[str, int]]:
        testing.forget_learned()
        torchoffload.reset_stats()
        with timed_steps.scope_with_a_link(device_under_test):
            for width in widths:
                seconds_of = width * width / timed_steps.WIDTH**2
                step_of_width(device_under_test, width, seconds_of)
        return [dict(row.records_kept) for row in torchoffload.stats().tapes[-len(widths) :]]

    one_width = kept([64] * 8)
    widths = [64, *(64 + 3 * number for number in range(1, 23))]
    many = kept(widths)
    assert one_width[3] == one_width[4]
    assert "needed_soon" in one_width[3]
    assert all(row == one_width[3] for row in many[3:]), many


def step_of_width(device: Device, width: int, share: float) -> None:
    """Twelve layers whose compute grows as their bytes, and a loss that is asked for at once."""
    with device.context(**CHOSEN):
        x = torch.ones(width, width, device=device.torch_device, requires_grad=True)
        hidden = x
        for _ in range(12):
            hidden = Computes.apply(hidden, share * 3e-3)
        loss = Computes.apply(hidden, share * 1e-6).sum()
    loss.backward()


class Computes(torch.autograd.Function):
    """Saves its input, and computes for a while both ways."""

    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        ctx.save_for_backward(x)
        timed_steps.advance(seconds)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        timed_steps.advance(ctx.seconds)
        return grad * x, None


# ---- what a step holds on the device ----


class Watch(torch.autograd.Function):
    """Saves its input, and notes what the device holds, on both ways."""

    @staticmethod
    def forward(ctx, x, held):
        ctx.held = held
        ctx.save_for_backward(x)
        out = x + 1
        held.append(testing.allocated_bytes(0))
        return out

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        ctx.held.append(testing.allocated_bytes(0))
        return grad * x, None


def peaks(lengths: list[int], *, logits: int = 0, learn: bool = True) -> list[int]:
    """Steps of 40 records of these lengths, and where asked for one of so many times their size. The peak of each."""
    found = []
    for length in lengths:
        held: list[int] = []
        x = torch.ones(length * 256, requires_grad=True)
        with torchoffload.OffloadActivations(min_offload_size=0, learn=learn):
            hidden = x
            for _ in range(40):
                hidden = Watch.apply(hidden, held)
            if logits:
                hidden = hidden.repeat(logits)
            loss = Watch.apply(hidden, held).sum()
            del hidden
        loss.backward()
        del loss, x
        found.append(max(held))
    return found


@pytest.mark.parametrize("logits", [0, 3, 30])
@pytest.mark.devices("simulated-late", "simulated-seeded")
def test_no_later_step_of_a_length_holds_more_than_its_first_would(device_under_test, logits):
    lengths = [64 + 7 * number % 23 for number in range(30)]
    with timed_steps.scope_with_a_link(device_under_test):
        first = {length: peaks([length], logits=logits, learn=False)[0] for length in set(lengths)}
        for length, peak in zip(lengths, peaks(lengths, logits=logits), strict=True):
            assert peak <= first[length]
        testing.forget_learned()
        for peak in peaks([64] * 8, logits=logits):
            assert peak <= first[64]


@pytest.mark.parametrize("learn", [True, False])
@pytest.mark.devices("simulated-late")
def test_what_the_process_saw_before_makes_no_window_larger(device_under_test, learn):
    """A large record of another tape, once: the windows of later tapes are those of their own records."""
    with device_under_test.scope():
        alone = peaks([64] * 3, learn=learn)
        testing.forget_learned()
        large = torch.ones(100 * 64 * 256, requires_grad=True)
        with torchoffload.OffloadActivations(min_offload_size=0, learn=learn):
            loss = SavesInput.apply(large).sum()
        loss.backward()
        del large, loss
        later = peaks([64] * 3, learn=learn)
        assert all(peak <= before for peak, before in zip(later, alone, strict=True)), (later, alone)
