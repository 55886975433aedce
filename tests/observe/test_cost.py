"""The line of report() on what a GiB costs: the time that the step computes for it, beside that of the link."""

import pytest

import torchoffload
from devices import Device
from timed_steps import BACKWARD_S, FORWARD_S, LEAST_MEMORY, RECORD_BYTES, scope_with_a_link, step
from torchoffload._observe.cost import CostOfGib, cost_line

GIB = 1 << 30


def cost(computing_s: float, saved_bytes: int = 4 * GIB, rate: float = 2 * GIB / 0.039) -> CostOfGib | None:
    return CostOfGib.measured(computing_s, saved_bytes, rate, rate)


def test_a_step_that_computes_for_less_than_the_link_takes_is_to_be_checkpointed():
    found = cost(0.048)
    assert found is not None
    text = cost_line(found)
    assert "computes 12 ms for each GiB that it saves, and the link takes 39 ms" in text
    assert "checkpoint the blocks, or use fit" in text


def test_a_step_that_computes_for_longer_may_move():
    found = cost(0.4)
    assert found is not None
    assert "moving all of it costs next to nothing" in cost_line(found)


def test_a_fitted_model_gets_no_advice():
    found = cost(0.048)
    assert found is not None
    assert cost_line(found, is_fitted=True).endswith("out and back.")


@pytest.mark.parametrize(
    "unknown", [{"computing_s": 0.0}, {"computing_s": 1.0, "saved_bytes": 1 << 20}, {"computing_s": 1.0, "rate": 0.0}]
)
def test_nothing_is_said_of_what_was_not_measured(unknown: dict):
    assert cost(**unknown) is None


@pytest.mark.devices("simulated-late", "simulated-early")
def test_a_profile_tells_what_was_saved_and_how_long_it_computed_without_the_waits(device_under_test: Device):
    with scope_with_a_link(device_under_test), torchoffload.profile() as profile:
        step(device_under_test, 4, **LEAST_MEMORY)
    assert profile.total.saved_bytes == profile.tapes[0].saved_bytes == 4 * RECORD_BYTES
    # The first entry is of the first copy, which may start after two layers; the last one to be asked for is the first.
    assert profile.total.computing_s == pytest.approx(2 * FORWARD_S + 3 * BACKWARD_S)


@pytest.mark.devices("simulated-late")
def test_the_report_says_it_after_a_profile_of_a_large_step(device_under_test: Device, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torchoffload._observe.cost._LEAST_BYTES", 1)
    torchoffload.reset_stats()
    with scope_with_a_link(device_under_test), torchoffload.profile():
        step(device_under_test, 4, **LEAST_MEMORY)
        text = torchoffload.report()
    assert "for each GiB" not in text  # the profile is still open
    assert "for each GiB that it saves, and the link takes" in torchoffload.report()
    torchoffload.reset_stats()
