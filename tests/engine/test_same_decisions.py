"""Windows: the engine and the simulation of a step take the same decisions, in the same order."""

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings

pytest.importorskip("torchoffload._C_testing", reason="the simulated device is in the test build alone")

from simulated import simulated_device
from window_tapes import (
    Driver,
    Event,
    Model,
    Tape,
    engine_events,
    simulated_events,
    tapes,
    tapes_without_misses,
    testing,
)

ON_ONE_DEVICE = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@pytest.fixture(autouse=True)
def _simulation() -> Iterator[None]:
    with simulated_device("late"):
        yield
        testing.forget_learned()


@ON_ONE_DEVICE
@given(tape=tapes_without_misses())
def test_engine_and_simulation_decide_alike(tape):
    """Which copy is waited for, which record is reloaded, and when: between which two asks of the backward."""
    events = engine_events(tape)
    assert events == simulated_events(tape)
    assert not [event for event in events if event[0] == "reload"]


@ON_ONE_DEVICE
@given(tape=tapes())
def test_they_decide_alike_but_for_what_they_tell_their_windows(tape):
    """Any tape, plan and windows. A driver differs from the other in nothing but what Driver says."""
    assert engine_events(tape) == Model(tape, Driver.ENGINE).run()
    assert simulated_events(tape) == Model(tape, Driver.SIMULATION).run()


@ON_ONE_DEVICE
@given(tape=tapes())
def test_they_wait_and_reload_in_the_same_order(tape):
    """Whatever they tell their windows: only how early a record is reloaded can differ."""

    def copies(events: list[Event]) -> list[Event]:
        return [("wait" if what == "wait" else "reload", record) for what, record in events if what != "ask"]

    assert copies(engine_events(tape)) == copies(simulated_events(tape))


# ---- the differences, one each ----


def reloads_at(events: list[Event], record: int) -> list[Event]:
    """What is reloaded as the record is asked for the first time."""
    behind = events[events.index(("ask", record)) + 1 :]
    ask = next((place for place, (what, _) in enumerate(behind) if what == "ask"), len(behind))
    return behind[:ask]


def test_what_was_missed_counts_in_the_simulation_alone():
    """A window of two records, of which none is under way as the backward begins."""
    tape = Tape([[0], [1], [2]], [98, 99, 100], [False] * 3, [0, 0, 0], 200)
    assert reloads_at(engine_events(tape), 2) == [("reload", 2), ("reload ahead", 1), ("reload ahead", 0)]
    assert reloads_at(simulated_events(tape), 2) == [("reload", 2), ("reload ahead", 1)]


def test_the_simulation_looks_for_reloads_once_for_each_record():
    """Record 1 is asked for again between records 2 and 0. By then record 2 has left the window."""
    tape = Tape([[0], [1], [2], [1], [3]], [150, 99, 100, 101], [False] * 4, [0, 0, 0, 101], 199)
    assert reloads_at(engine_events(tape), 2) == [("reload ahead", 0)]
    assert reloads_at(simulated_events(tape), 2) == []
    assert reloads_at(simulated_events(tape), 0) == [("reload", 0)]


def test_what_is_kept_counts_in_the_engine_until_its_last_handle_has_died():
    """One operator saved records 1 and 2, and the second one stays. Both handles die as that operator has run."""
    tape = Tape([[0], [1, 2]], [98, 99, 100], [False, False, True], [0, 0, 0], 199)
    assert reloads_at(engine_events(tape), 1) == []
    assert reloads_at(simulated_events(tape), 1) == [("reload ahead", 0)]


def test_what_the_backward_passes_by_is_reloaded_again_by_the_engine_alone():
    """It asks for records 1 and 0 before 3 and 2, which are ahead by then. The window reaches from 1 to 2, not to 3."""
    tape = Tape(
        [[0], [1], [2], [3], [4]], [150, 151, 98, 99, 100], [False] * 5, [0, 0, 0, 0, 100], 197, (4, 1, 0, 3, 2)
    )
    assert reloads_at(engine_events(tape), 4) == [("reload ahead", 3), ("reload ahead", 2)]
    assert reloads_at(engine_events(tape), 3) == [("reload", 3)]
    assert reloads_at(simulated_events(tape), 4) == [("reload ahead", 3), ("reload ahead", 2)]
    assert reloads_at(simulated_events(tape), 3) == []
