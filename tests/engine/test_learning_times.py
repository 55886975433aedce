"""The times of one step, from which the next one's plan is made."""

import pytest
import torch

import torchoffload
from devices import Device
from timed_steps import RECORD_BYTES, WIDTH, Layer, forward, scope_with_a_link

BIG = 32  # the last record is so many times as large as the others
# All copies are on their way when backward begins, so it uses the sources, and nothing is copied in.
OPTIONS = {"offload_window_bytes": 100 * RECORD_BYTES, "reload_window_bytes": 4 * RECORD_BYTES}


@pytest.mark.devices("simulated-late", "simulated-early", "simulated-seeded")
def test_a_step_in_which_nothing_came_back_is_learned_from(device_under_test: Device):
    from torchoffload._C_testing import testing

    def step() -> dict[str, int]:
        torchoffload.reset_stats()
        with device_under_test.context(learn=True, **OPTIONS):
            x = torch.ones(WIDTH, WIDTH, requires_grad=True)
            for _ in range(8):
                x = Layer.apply(x, True)
            loss = Layer.apply(x.repeat(BIG, 1), True).sum()
        loss.backward()
        return dict(torchoffload.stats().bytes_kept)

    with scope_with_a_link(device_under_test):
        testing.forget_learned()
        _, untimed, timed = (step() for _ in range(3))
        testing.forget_learned()
    assert "needed_soon" not in untimed
    assert timed["needed_soon"] >= BIG * RECORD_BYTES


@pytest.mark.devices("simulated-late")
def test_entries_of_tapes_that_are_gone_are_forgotten_while_others_are_timed(device_under_test: Device):
    """Eight graphs wait for their backwards, and ever new sizes have their times taken: some tape is always timed."""
    from torchoffload._C_testing import testing

    with scope_with_a_link(device_under_test):
        testing.forget_learned()
        context = device_under_test.context(learn=True)
        waiting: list[torch.Tensor] = []
        held: list[int] = []
        for number in range(320):
            with context:
                waiting.append(forward(device_under_test, 2 + number // 4 % 40))
            if len(waiting) > 8:
                waiting.pop(0).backward()
            held.append(testing.held_timeline_entries())
        while waiting:
            waiting.pop().backward()
        testing.forget_learned()
    assert sum(count == 0 for count in held) < 10
    assert max(held) < 4_000  # and 40,000 were made
