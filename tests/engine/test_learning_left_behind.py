"""A graph that is kept alive for long (a rollout, an evaluation's forward) stops no step from being recognised."""

from collections.abc import Iterator
from typing import Any

import pytest

import torchoffload
from functions import SavesInput
from gradients import Run, assert_same_gradients

testing = pytest.importorskip("torchoffload._C_testing", reason="it is reached through the test build alone").testing

SIMULATED = pytest.mark.devices("simulated-late", "simulated-early", "simulated-seeded", "privateuseone")
CHOSEN: dict[str, Any] = {"learn": True, "offload_window_bytes": None, "reload_window_bytes": None}


@pytest.fixture(autouse=True)
def _nothing_learned_before() -> Iterator[None]:
    testing.forget_learned()
    yield
    testing.forget_learned()


class Steps:
    """Drives a TapeOrder: forwards and backwards in the order told, as in "F0 F1 B0 B1"; a backward ends its tape."""

    def __init__(self) -> None:
        self.order = testing.TapeOrder()
        self.alive: dict[str, int] = {}
        self._count = 0

    def open(self, name: str) -> None:
        self.alive[name] = self.order.opened(self._count)
        self._count += 1

    def run(self, schedule: str) -> list[bool]:
        """Was each backward expected?"""
        expected = []
        for event in schedule.split():
            if event[0] == "F":
                self.open(event[1:])
            else:
                number = self.alive.pop(event[1:])
                expected.append(self.order.backward_began(number))
                self.order.gone(number)
        return expected


GPIPE = "F0 F1 F2 B0 B1 B2"


def test_a_tape_that_is_kept_is_left_behind_after_a_few_steps():
    steps = Steps()
    steps.open("kept")
    found = [all(steps.run(GPIPE)) for _ in range(9)]
    assert found == [False] * 4 + [True] * 5
    assert steps.order.left_behind_count() == 1


def test_where_a_step_is_known_a_tape_that_is_kept_costs_two():
    steps = Steps()
    steps.run(GPIPE)
    assert all(steps.run(GPIPE))
    steps.open("kept")
    found = [all(steps.run(GPIPE)) for _ in range(5)]
    assert found == [False, False, True, True, True]


def test_the_backward_of_a_tape_that_was_left_behind_is_no_event_of_a_step():
    steps = Steps()
    steps.run(GPIPE)
    steps.open("kept")
    for _ in range(4):
        steps.run(GPIPE)
    assert steps.run("F0 F1") == []
    assert steps.run("Bkept") == [False]
    assert steps.run("F2 B0 B1 B2") == [True] * 3
    assert steps.order.left_behind_count() == 0


@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param("F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5", id="1f1b"),
        pytest.param("F0 F1 F2 F3 B2 B3 F4 F5 B4 B5 B0 B1", id="interleaved"),
        pytest.param("F0 F1 F2 F3 F4 B4 F5 B5 F6 B6 F7 B7 B0 B1 B2 B3", id="interleaved-last-stage"),
        pytest.param("F0 F1 B1 F2 B2 F3 B3 B0", id="nested"),
    ],
)
def test_a_pipelines_step_is_one_step(schedule):
    steps = Steps()
    steps.run(schedule)
    assert all(steps.run(schedule))
    assert all(steps.run(schedule))
    assert steps.order.left_behind_count() == 0


def test_a_step_goes_on_as_the_latest_known_one_that_it_has_gone_as_so_far():
    steps = Steps()
    critic, generator = "F0 F1 B1 B0", "F0 F1 F2 B2 B1 B0"
    steps.run(critic)
    assert steps.run(critic) == [True, True]
    assert steps.run(generator) == [False, False, False]
    assert steps.run(critic) == [False, True], "the latest known step has a forward where this one's backward began"
    assert steps.run(critic) == [True, True]
    assert steps.run(generator) == [False, True, True]
    assert steps.run("F0 F1 B0 B1") == [False, False]


def test_the_eight_latest_steps_are_known():
    steps = Steps()
    orders = [" ".join([f"F{n}" for n in range(length)] + [f"B{n}" for n in range(length)]) for length in range(1, 11)]
    for order in orders:
        steps.run(order)
    assert steps.run(orders[1])[1:] == [False], "two others came behind it than are known"
    assert all(steps.run(orders[3])[1:])


def forward(run: Run, layers: int) -> Any:
    x = run.leaf(64, 64)
    with run.offload(**CHOSEN):
        hidden = x
        for _ in range(layers):
            hidden = SavesInput.apply(hidden)
        return x, hidden.sum()


@SIMULATED
def test_steps_beside_a_kept_graph_learn_as_steps_do(device_under_test):
    """Two micro-batches, whose second one's own backward is not next: only one of both keeps its end."""
    kept_by_step: list[list[int]] = []

    def program(run):
        kept_by_step.clear()
        rollout, held = forward(run, 7)
        for _ in range(10):
            (x, first), (y, second) = forward(run, 20), forward(run, 20)
            if not run.stock:
                kept_by_step.append([row.records_kept.get("tape_end", 0) for row in torchoffload.stats().tapes[-2:]])
            first.backward()
            second.backward()
            run.check(x=x.grad, y=y.grad)
        held.backward()
        run.check(rollout=rollout.grad)

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.1)
    assert kept_by_step[-1] == [0, 0], "the next backward is the first one's, and its own comes after another forward"


@SIMULATED
def test_pinned_memory_is_fitted_beside_a_kept_graph(device_under_test):
    """After steps that have fitted it: what the kept graph holds would else pin the first chunk, which is large."""
    torchoffload.trim()  # the memory of other devices, which pinned_bytes counts as well

    def program(run):
        for _ in range(5):
            _, loss = forward(run, 20)
            loss.backward()
            del loss
        rollout, held = forward(run, 7)
        for _ in range(14):
            x, loss = forward(run, 20)
            loss.backward()
            run.check(x=x.grad)
            del x, loss
        stats = torchoffload.stats()
        if not run.stock:
            assert testing.tapes_left_behind() == 1
            assert stats.pinned_bytes <= 2 * stats.peak_slot_bytes + (2 << 20)
        held.backward()
        run.check(rollout=rollout.grad)

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.1)
    assert testing.tapes_left_behind() == 0
