"""Learning the order of several tapes: micro-batches, whose ends are reloaded before their backwards begin."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import torchoffload
from autograd_threads import await_autograd
from devices import Device
from functions import SavesInput
from gradients import Run, assert_same_gradients

testing = pytest.importorskip("torchoffload._C_testing", reason="it is reached through the test build alone").testing

SIMULATED = pytest.mark.devices("simulated-late", "simulated-early", "simulated-seeded", "privateuseone")

WIDTH = 64
RECORD_BYTES = WIDTH * WIDTH * 4
LENGTH = 12
WINDOW = 3  # records each way
WINDOWS = {"offload_window_bytes": WINDOW * RECORD_BYTES, "reload_window_bytes": WINDOW * RECORD_BYTES}


@pytest.fixture(autouse=True)
def _nothing_learned_before():
    testing.forget_learned()
    yield
    testing.forget_learned()


def reloaded_ahead(run: Run) -> int:
    """Records that were reloaded of tapes whose backwards are still to come: all others have ended."""
    if run.device.type == "privateuseone":
        await_autograd("privateuseone")  # whose thread may still have a graph that has gone
    stats = torchoffload.stats()
    ended = stats.tapes[: len(stats.tapes) - stats.live_tapes]
    return stats.records_reloaded - stats.passed_by - sum(tape.records_reloaded - tape.passed_by for tape in ended)


def run_schedule(run: Run, schedule: str, **options: Any) -> list[int]:
    """Forwards and backwards in the order told, as in "F0 F1 B0 B1". How many records each backward finds under way."""
    losses, inputs, found = {}, {}, []
    for event in schedule.split():
        number = int(event[1:])
        if event[0] == "F":
            x = inputs[number] = run.leaf(WIDTH, WIDTH)
            with run.offload(**({"learn": True} | WINDOWS | options)):
                for _ in range(LENGTH):
                    x = SavesInput.apply(x)
                losses[number] = x.sum()
        else:
            found.append(reloaded_ahead(run))
            losses.pop(number).backward()
            run.check(**{f"grad{number}": inputs[number].grad})
    return found


def found_under_way(device: Device, schedules: list[str], **options: Any) -> list[list[int]]:
    found: list[list[int]] = []

    def program(run: Run) -> None:
        found[:] = [run_schedule(run, schedule, **options) for schedule in schedules]

    assert_same_gradients(program, device=device, min_moved_fraction=0.3)
    return found


# Behind a forward the whole window is under way; behind another backward all of it but for that one's last record,
# whose place is free only after the last saved tensor was asked for. A tape's end that is still in the offload window
# is not reloaded: it is still here where its backward begins at once.
AFTER_FORWARD, AFTER_BACKWARD = WINDOW, WINDOW - 1


@SIMULATED
@pytest.mark.parametrize(
    ("schedule", "found"),
    [
        pytest.param("F0 F1 F2 F3 B0 B1 B2 B3", [AFTER_FORWARD, AFTER_BACKWARD, AFTER_BACKWARD, 0], id="gpipe"),
        pytest.param("F0 F1 F2 F3 B3 B2 B1 B0", [0] + [AFTER_BACKWARD] * 3, id="gpipe-last-first"),
        pytest.param("F0 F1 F2 B0 F3 B1 F4 B2 B3 B4", [AFTER_FORWARD] * 3 + [AFTER_BACKWARD, 0], id="1f1b"),
        pytest.param("F0 F1 B0 F2 B1 F3 B2 B3", [AFTER_FORWARD] * 3 + [0], id="1f1b-depth-of-two"),
        pytest.param("F0 F1 F2 F3 B2 B3 B0 B1", [AFTER_FORWARD, 0] + [AFTER_BACKWARD] * 2, id="interleaved"),
        pytest.param("F0 B0 F1 B1", [0, 0], id="accumulation"),
    ],
)
def test_the_next_backwards_end_is_under_way_from_the_second_step_on(device_under_test, schedule, found):
    first, second, third = found_under_way(device_under_test, [schedule] * 3)
    assert first == [0] * len(found)
    assert second == third == found


@SIMULATED
def test_an_order_that_changes_is_left_at_once_and_learned_anew(device_under_test):
    forward, backward = "F0 F1 F2 F3 B0 B1 B2 B3", "F0 F1 F2 F3 B0 B2 B1 B3"
    found = found_under_way(device_under_test, [forward, forward, backward, backward, backward])
    assert found[2] == [AFTER_FORWARD, AFTER_BACKWARD, 0, 0], "what came for B1 went back to its slots as B2 began"
    assert found[3] == found[4] == [AFTER_FORWARD, AFTER_BACKWARD, AFTER_BACKWARD, 0]
    assert torchoffload.stats().passed_by == AFTER_BACKWARD


@SIMULATED
def test_steps_that_take_turns_are_all_known(device_under_test):
    critic, generator = "F0 F1 B1 B0", "F0 F1 F2 B2 B1 B0"
    *_, first, second, third = found_under_way(device_under_test, [critic, critic, generator] * 3)
    assert first == second == [0, AFTER_BACKWARD]
    # The second tape has kept its end, since the latest known step has its backward there: none of it has to come.
    assert third == [0, 0, AFTER_BACKWARD]
    assert torchoffload.stats().passed_by == 0


@SIMULATED
def test_nothing_comes_ahead_of_a_backward_if_a_known_step_has_a_forward_there(device_under_test):
    two, three = "F0 F1 B0 B1", "F0 F1 F2 B1 B0 B2"
    *_, shorter, longer = found_under_way(device_under_test, [two, three] * 2)
    assert shorter == [0, 0], "the first one's end comes only if that backward is certain; the other's is still here"
    assert longer == [AFTER_FORWARD, AFTER_BACKWARD, 0]
    assert torchoffload.stats().passed_by == AFTER_FORWARD, (
        "in the first longer step, as only the shorter one was known"
    )


@SIMULATED
def test_a_step_without_a_backward_in_between_changes_nothing(device_under_test):
    schedule = "F0 F1 F2 B0 B1 B2"
    found = found_under_way(device_under_test, [schedule, "F0 F1", schedule])
    assert found == [[0, 0, 0], [], [AFTER_FORWARD, AFTER_BACKWARD, 0]]


@SIMULATED
def test_learn_false_expects_nothing(device_under_test):
    found = found_under_way(device_under_test, ["F0 F1 F2 B0 B1 B2"] * 3, learn=False)
    assert found == [[0, 0, 0]] * 3


@SIMULATED
def test_no_window_reloads_nothing_ahead(device_under_test):
    found = found_under_way(device_under_test, ["F0 F1 F2 B0 B1 B2"] * 3, reload_window_bytes=0)
    assert found == [[0, 0, 0]] * 3


@pytest.mark.slow
@pytest.mark.devices("disk", "simulated-late", "simulated-seeded", "privateuseone", "cuda")
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(orders=st.lists(st.permutations(["F0", "F1", "F2", "F3", "B0", "B1", "B2", "B3"]), min_size=2, max_size=4))
def test_any_orders_in_any_steps_come_out_as_stock(device_under_test, orders):
    def legal(events: list[str]) -> str:
        """Each forward before its backward."""
        for number in range(4):
            forward, backward = events.index(f"F{number}"), events.index(f"B{number}")
            if backward < forward:
                events[forward], events[backward] = events[backward], events[forward]
        return " ".join(events)

    found_under_way(device_under_test, [legal(list(order)) for order in orders])
