"""Learning: what one training step teaches the next, on disk, on the simulated device and on a GPU."""

import contextlib
from typing import Any

import pytest
import torch

import torchoffload
from devices import Device
from functions import SavesInput
from gradients import assert_same_gradients

testing = pytest.importorskip("torchoffload._C_testing", reason="it is reached through the test build alone").testing


# ---- whole steps, where no time is told ----

UNTIMED = pytest.mark.devices("disk", "simulated-late", "simulated-early", "simulated-seeded", "privateuseone")
WIDTH = 64
RECORD_BYTES = WIDTH * WIDTH * 4


def chain(run, x, length):
    for _ in range(length):
        x = SavesInput.apply(x)
    return x


@pytest.fixture(autouse=True)
def _nothing_learned_before():
    testing.forget_learned()
    yield
    testing.forget_learned()


def learning(run, **options):
    """The program's context, with learning, and with windows that are chosen."""
    chosen = {"learn": True, "offload_window_bytes": None, "reload_window_bytes": None}
    return run.offload(**(chosen | options))


def rows_of(program: Any, device: Device, count: int) -> list[torchoffload.TapeStats]:
    """Runs `program` as stock and offloaded, and returns what its last tapes did, the oldest first."""
    stats = assert_same_gradients(program, device=device, min_moved_fraction=0.01)
    return list(stats.tapes[-count:])


def steps(
    device: Device, lengths: list[int], widths: list[int] | None = None, **options: Any
) -> list[torchoffload.TapeStats]:
    """Steps over chains of these lengths, and of records of these widths, in contexts that learn. One row each."""

    def program(run):
        for length, width in zip(lengths, widths or [WIDTH] * len(lengths), strict=True):
            x = run.leaf(width, width)
            with learning(run, **options):
                loss = chain(run, x, length).sum()
            loss.backward()
            run.check(grad=x.grad)

    return rows_of(program, device, len(lengths))


@UNTIMED
def test_the_second_step_keeps_the_end(device_under_test):
    rows = steps(device_under_test, [20, 20, 20])
    assert [row.records_offloaded for row in rows] == [20, 16, 16]
    assert [row.records_kept.get("tape_end", 0) for row in rows] == [0, 4, 4]


@UNTIMED
def test_another_length_is_learned_beside_the_first(device_under_test):
    rows = steps(device_under_test, [20, 12, 20, 12], widths=[64, 32, 64, 32])
    assert [row.records_kept.get("tape_end", 0) for row in rows] == [0, 0, 4, 4]


def test_no_window_keeps_nothing(device_under_test):
    rows = steps(device_under_test, [10, 10, 10], reload_window_bytes=0)
    assert all(row.records_kept == {} for row in rows)


@UNTIMED
def test_kept_bytes_stay_within_the_window(device_under_test):
    rows = steps(
        device_under_test, [20, 20], offload_window_bytes=3 * RECORD_BYTES, reload_window_bytes=3 * RECORD_BYTES
    )
    assert rows[1].bytes_kept == {"tape_end": 3 * RECORD_BYTES}
    assert torchoffload.stats().peak_reload_window_bytes <= 3 * RECORD_BYTES


def test_learn_false_learns_nothing(device_under_test):
    rows = steps(device_under_test, [10, 10, 10], learn=False)
    assert all(row.records_kept == {} for row in rows)
    assert testing.shapes_learned() == 0


@UNTIMED
def test_two_forwards_before_their_backwards_keep_no_end(device_under_test):
    def program(run):
        for _ in range(3):
            inputs = [run.leaf(WIDTH, WIDTH) for _ in range(2)]
            losses = []
            for x in inputs:
                with learning(run):
                    losses.append(chain(run, x, 12).sum())
            for loss in losses:
                loss.backward()
            run.check(**{f"grad{i}": x.grad for i, x in enumerate(inputs)})

    rows = rows_of(program, device_under_test, 6)
    assert sum(row.records_kept.get("tape_end", 0) for row in rows) <= 4 * 3, "one tape's end at a time"


@UNTIMED
def test_what_the_program_holds_is_kept_from_its_third_tape_on(device_under_test):
    def program(run):
        table = run.tensor(WIDTH, WIDTH)
        for _ in range(4):
            x = run.leaf(WIDTH, WIDTH)
            with learning(run, reload_window_bytes=0):
                loss = (chain(run, x, 3) * table).sum()
            loss.backward()
            run.check(grad=x.grad)

    rows = rows_of(program, device_under_test, 4)
    assert [row.records_kept.get("lives_on", 0) for row in rows] == [0, 0, 1, 1]


@UNTIMED
def test_a_graph_that_is_dropped_leaves_nothing_kept(device_under_test):
    def program(run):
        for is_used in (True, True, False, True):
            x = run.leaf(WIDTH, WIDTH)
            with learning(run):
                loss = chain(run, x, 20).sum()
            if is_used:
                loss.backward()
                run.check(grad=x.grad)
            del loss

    rows = rows_of(program, device_under_test, 4)
    assert [row.records_kept.get("tape_end", 0) for row in rows] == [0, 4, 4, 4], "the dropped one gave its share back"


@UNTIMED
def test_a_step_that_a_spent_budget_ends_teaches_nothing_wrong(device_under_test):
    """The record that is refused was told to the Learner, and is none of the tape."""

    def program(run):
        refused = contextlib.nullcontext() if run.stock else pytest.raises(RuntimeError, match="budget_bytes")
        with refused, learning(run, on_full="error", budget_bytes=8 * RECORD_BYTES):
            chain(run, run.leaf(WIDTH, WIDTH), 9)
        del refused  # and with the error the graph
        assert testing.shapes_learned() == 0
        for _ in range(3):
            x = run.leaf(WIDTH, WIDTH)
            with learning(run):
                loss = chain(run, x, 9).sum()
            loss.backward()
            run.check(grad=x.grad)

    rows = rows_of(program, device_under_test, 3)
    assert [row.records_kept.get("tape_end", 0) for row in rows] == [0, 4, 4]


@UNTIMED
def test_a_tape_may_keep_all_of_it(device_under_test):
    def program(run):
        for _ in range(3):
            x = run.leaf(WIDTH, WIDTH)
            with learning(run):
                loss = chain(run, x, 3).sum()
            loss.backward()
            run.check(grad=x.grad)

    rows = rows_of(program, device_under_test, 3)
    assert [row.records_offloaded for row in rows] == [3, 0, 0]


def test_retained_graphs_go_on_working(device_under_test):
    def program(run):
        for _ in range(3):
            x = run.leaf(WIDTH, WIDTH)
            with learning(run):
                loss = chain(run, x, 20).sum()
            for _ in range(3):
                loss.backward(retain_graph=True)
            run.check(grad=x.grad)

    rows_of(program, device_under_test, 3)


def test_a_write_after_the_save_is_stocks_error_for_what_is_kept_too(device_under_test):
    def program(run):
        for step in range(3):
            x = run.leaf(WIDTH, WIDTH)
            with learning(run):
                hidden = chain(run, x, 19)
                loss = SavesInput.apply(hidden).sum()
            if step == 2:
                with torch.no_grad():
                    hidden.add_(1)
            with run.raising(f"step {step}") if step == 2 else contextlib.nullcontext():
                loss.backward()

    rows_of(program, device_under_test, 3)


@UNTIMED
def test_bytes_away_are_what_the_device_memory_is_smaller_by(device_under_test):
    def program(run):
        x = run.leaf(WIDTH, WIDTH)
        with learning(run, offload_window_bytes=0, reload_window_bytes=0):
            loss = chain(run, x, 20).sum()
        loss.backward()
        run.check(grad=x.grad)

    (row,) = rows_of(program, device_under_test, 1)
    assert row.bytes_away == 19 * RECORD_BYTES, "all but the input, which the program holds"


# ---- with times ----

TURN_S = 1e-6
SIMULATED = pytest.mark.devices("simulated-late", "simulated-early", "simulated-seeded")  # whose times are exact


class Tick(torch.autograd.Function):
    """Computes for a while, on the way forward and on the way back, on the simulated device."""

    @staticmethod
    def forward(ctx, x, forward_s, backward_s):
        ctx.backward_s = backward_s
        testing.advance(0, forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        testing.advance(0, ctx.backward_s)
        return grad, None, None


@pytest.fixture
def _link():
    """Copies of the chain's records take 1 ms."""
    testing.set_link(0, RECORD_BYTES / 1e-3)
    yield
    testing.set_link(0, 0.0)


def timed_steps(device: Device, count: int, layer_s: float, **options: Any) -> list[torchoffload.TapeStats]:
    """Chains of 20 layers that compute for `layer_s` forward, twice that backward, and a loss that returns at once."""

    def program(run):
        for _ in range(count):
            x = run.leaf(WIDTH, WIDTH)
            with learning(run, **options):
                hidden = x
                for _ in range(20):
                    hidden = SavesInput.apply(hidden)
                    hidden = Tick.apply(hidden, layer_s, 2 * layer_s)
                loss = Tick.apply(SavesInput.apply(hidden), TURN_S, TURN_S).sum()
            loss.backward()
            run.check(grad=x.grad)

    return rows_of(program, device, count)


@SIMULATED
@pytest.mark.usefixtures("_link")
def test_what_is_needed_before_it_could_be_back_stays_from_the_third_step_on(device_under_test):
    rows = timed_steps(device_under_test, 4, layer_s=5e-3)
    assert [row.records_kept.get("needed_soon", 0) for row in rows] == [0, 0, 1, 1]


@SIMULATED
@pytest.mark.usefixtures("_link")
def test_where_everything_hides_a_window_of_one_record_will_do(device_under_test):
    timed_steps(device_under_test, 4, layer_s=5e-3)
    torchoffload.reset_stats()
    rows = timed_steps(device_under_test, 4, layer_s=5e-3)
    assert rows[-1].records_kept["tape_end"] == 1


@SIMULATED
@pytest.mark.usefixtures("_link")
def test_a_step_that_is_not_timed_sets_no_timed_point(device_under_test):
    from simulated import seam_log

    timed_steps(device_under_test, 6, layer_s=5e-3)
    with seam_log() as lines:
        timed_steps(device_under_test, 1, layer_s=5e-3)
    assert lines
    assert not [line for line in lines if line.startswith("record_timed")]


@SIMULATED
def test_reloads_go_on_at_saved_tensors_that_are_not_ours(device_under_test):
    """The kept end fills the window of one record, and dies before a NoOp region's saved tensor is asked for."""
    reloads_by_then: list[int] = []

    class Asks(SavesInput):
        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            reloads_by_then.append(sum(tape.records_reloaded for tape in torchoffload.stats().tapes[-1:]))
            return grad * x

    def program(run):
        reloads_by_then.clear()
        for _ in range(3):
            x = run.leaf(WIDTH, WIDTH)
            with learning(run, offload_window_bytes=RECORD_BYTES, reload_window_bytes=RECORD_BYTES):
                hidden = chain(run, x, 5)
                with run.noop():
                    hidden = Asks.apply(hidden)
                loss = SavesInput.apply(hidden).sum()
            loss.backward()
            run.check(grad=x.grad)

    rows = rows_of(program, device_under_test, 3)
    assert rows[-1].bytes_kept == {"tape_end": RECORD_BYTES}
    assert reloads_by_then[-1] == 1


@SIMULATED
@pytest.mark.usefixtures("_link")
def test_a_timed_tape_that_stays_alive_is_not_timed_for_ever(device_under_test):
    from simulated import seam_log

    def step(run, length):
        x = run.leaf(WIDTH, WIDTH)
        with learning(run):
            return chain(run, x, length).sum()

    def program(run):
        for _ in range(2):
            held = step(run, 20)  # the second is timed, and its backward never comes
        for number in range(80):
            step(run, 3 + number % 5).backward()
            with seam_log() if number > 70 else contextlib.nullcontext([]) as lines:
                step(run, 20).backward()
            assert not [line for line in lines if line.startswith("record_timed")]
        held.backward()

    rows_of(program, device_under_test, 1)


# ---- on a GPU, whose times are its own ----


@pytest.mark.devices("cuda")
def test_steps_on_a_gpu_are_the_same_while_they_are_learned(device_under_test):
    """Eight steps: two are timed, and what is kept changes with them."""

    def program(run):
        for _ in range(8):
            x = run.leaf(2048, 2048)
            with learning(run):
                hidden = x
                for _ in range(12):
                    hidden = torch.tanh(hidden @ hidden.t() / 2048)
                loss = hidden.log_softmax(-1).sum()
            loss.backward()
            run.check(grad=x.grad)
            torch.cuda.synchronize()

    rows = rows_of(program, device_under_test, 8)
    assert rows[0].records_kept == {}
    assert rows[-1].records_kept["needed_soon"] >= 1


@pytest.mark.devices("cuda")
def test_bytes_away_are_what_the_loss_has_less_on_a_gpu(device_under_test):
    def at_loss(context):
        x = torch.ones(1024, 1024, device="cuda", requires_grad=True)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        with context:
            loss = chain(None, x, 20).sum()
        held = torch.cuda.memory_allocated() - before
        loss.backward()
        return held

    plain = at_loss(contextlib.nullcontext())
    offloaded = at_loss(device_under_test.context(learn=False))
    away = torchoffload.stats().tapes[-1].bytes_away
    assert away > 0
    assert plain - offloaded == away
