"""Gradients are the same, and the windows are kept, for every pair of windows."""

import itertools

import pytest
import torch

from devices import Device
from gradients import Run, assert_same_gradients
from models import TinyGpt, mlp, tokens_and_labels, update

# Bytes. A record of the programs below has 2048 to 8192.
WINDOWS = {"least": 0, "less-than-one": 1000, "a-few": 20_000, "all": 1 << 30, "default": None}
PAIRS = list(itertools.product(WINDOWS, WINDOWS))


def options_of(pair: tuple[str, str]) -> dict[str, int | None]:
    return {"offload_window_bytes": WINDOWS[pair[0]], "reload_window_bytes": WINDOWS[pair[1]]}


def pair_id(pair: tuple[str, str]) -> str:
    return f"{pair[0]}-out-{pair[1]}-in"


@pytest.mark.parametrize("pair", PAIRS, ids=pair_id)
def test_training_under_every_pair_of_windows(device_under_test: Device, pair: tuple[str, str]):
    def program(run: Run):
        model = run.module(lambda: TinyGpt(depth=3))
        for _ in range(2):
            with run.offload(**options_of(pair)):
                loss = model(*tokens_and_labels(run))
            loss.backward()
            run.check(step=model)
            update(model)

    stats = assert_same_gradients(program, device=device_under_test)
    offload_window_bytes, reload_window_bytes = (WINDOWS[name] for name in pair)
    if offload_window_bytes is not None:
        largest_record_bytes = 2 * 16 * 4 * 32 * 4
        assert stats.peak_offload_window_bytes <= max(offload_window_bytes, largest_record_bytes)
    if reload_window_bytes is not None:
        assert stats.peak_reload_window_bytes <= reload_window_bytes


@pytest.mark.parametrize("pair", [p for p in PAIRS if p[0] in ("least", "a-few")], ids=pair_id)
def test_backward_in_another_order_than_forward_under_windows(device_under_test: Device, pair: tuple[str, str]):
    """Reloads go from the tape's end to its start; this consumer goes from start to end, then all over again."""

    def program(run: Run):
        model, x = mlp(run), run.leaf(16, 32)
        with run.offload(**options_of(pair)):
            losses = [model(x * step).square().sum() for step in range(1, 7)]
        for index in (0, 1, 4, 2, 5, 3):
            losses[index].backward(retain_graph=True)
            run.check(gradient=x.grad)
        for loss in losses:
            loss.backward()
        return model, x.grad

    assert_same_gradients(program, device=device_under_test)


@pytest.mark.parametrize("pair", [p for p in PAIRS if p[0] in ("least", "a-few")], ids=pair_id)
def test_interleaved_graphs_and_dropped_ones_under_windows(device_under_test: Device, pair: tuple[str, str]):
    def program(run: Run):
        model, x = mlp(run), run.leaf(16, 32)
        context, alive = run.offload(**options_of(pair)), []
        for step in range(8):
            with context:
                alive.append(model(x * (step + 1)).exp().sum())
            if step % 3 == 2:
                alive.pop(0).backward()
            if step % 4 == 3:
                alive.pop()  # dropped, perhaps with copies in flight
        while alive:
            alive.pop().backward()
        return model, x.grad

    assert_same_gradients(program, device=device_under_test)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_stash_size_counts_records(device_under_test: Device, count: int):
    def program(run: Run):
        x = run.leaf(32, 32)
        for _ in range(2):
            with run.offload(max_fwd_stash_size=count):
                y = x
                for _ in range(12):
                    y = y.exp().neg()
            y.sum().backward()
        return x.grad

    stats = assert_same_gradients(program, device=device_under_test, moved_bytes=2 * 12 * 4096)
    assert stats.peak_offload_window_bytes <= count * stats.bytes_offloaded  # the largest record ever seen counts


def test_least_memory_reloads_everything_once(device_under_test: Device):
    def program(run: Run):
        x = run.leaf(32, 32)
        with run.offload(offload_window_bytes=0, reload_window_bytes=0):
            y = x
            for _ in range(10):
                y = y.sigmoid()
        y.sum().backward()
        return x.grad

    stats = assert_same_gradients(program, device=device_under_test, moved_bytes=10 * 4096)
    assert stats.bytes_reloaded == 10 * 4096
    assert stats.records_reloaded == 10
    assert stats.peak_reload_window_bytes == 0


def test_records_that_the_consumer_passed_by_give_their_memory_up(device_under_test: Device):
    """The branch in the tape's middle is not taken: some of it is reloaded ahead, and passed by, and right later."""

    def program(run: Run):
        x = run.leaf(32, 32)

        def branch(y):
            for _ in range(8):
                y = y.sigmoid()
            return y

        # What is on a disk is not reloaded ahead until it is in host memory.
        with run.offload(offload_window_bytes=0, reload_window_bytes=3 * 4096, on_full="keep"):
            first = branch(x)
            skipped = branch(x)
            last = branch(first)
        last.sum().backward(retain_graph=True)
        run.check(gradient=x.grad)
        skipped.sum().backward()
        last.sum().backward()
        return x.grad

    stats = assert_same_gradients(program, device=device_under_test, moved_bytes=24 * 4096)
    assert stats.passed_by >= 2


@pytest.mark.parametrize("reload_window_bytes", [0, 4096, 20_000, None])
def test_a_record_that_every_layer_shares_is_reloaded_once_and_sends_none_back(
    device_under_test: Device, reload_window_bytes: int | None
):
    """Rotary tables are saved first and asked for by all: the place of a consumer is its save, not the record."""
    layer_count = 12

    def program(run: Run):
        x, shared = run.leaf(32, 32), run.tensor(32, 32)
        with run.offload(offload_window_bytes=0, reload_window_bytes=reload_window_bytes):
            y = x
            for _ in range(layer_count):
                y = (y * shared).sin()
        y.sum().backward()
        return x.grad

    stats = assert_same_gradients(program, device=device_under_test)
    assert stats.passed_by == 0
    assert stats.records_reloaded == stats.records_offloaded == layer_count + 1


def test_asking_far_ahead_once_sends_nothing_back(device_under_test: Device):
    """As a checkpoint asks for its input before what was saved behind that: what is on its way comes next after all."""

    def program(run: Run):
        leaves = [run.leaf(32, 32) for _ in range(8)]
        with run.offload(offload_window_bytes=0, reload_window_bytes=2 * 4096):
            outputs = [x.sin() for x in leaves]
        for number in (7, 0, 6, 5, 4, 3, 2, 1):  # behind 7 come 6 and 5, which 0 leaves where they are
            run.check(gradient=torch.autograd.grad(outputs[number].sum(), leaves[number]))

    stats = assert_same_gradients(program, device=device_under_test, moved_bytes=8 * 4096)
    assert stats.passed_by == 0
    assert stats.records_reloaded == 8
