"""Models whose tapes change from step to step, under contexts that learn: a known tape is used, another falls back."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import torchoffload
from devices import Device
from gradients import Run, assert_same_gradients
from models import tokens_and_labels, update
from models_experts import ExpertsConfig, ExpertsModel
from models_linear_attention import LinearAttentionModel
from models_video import VideoConfig, VideoTransformer, flow_matching_loss

testing = pytest.importorskip("torchoffload._C_testing", reason="it is reached through the test build alone").testing

UNTIMED = pytest.mark.devices("disk", "simulated-late", "simulated-early", "simulated-seeded")
SHAPE_LIMIT = 16  # of csrc/core/planning/learner.h


@pytest.fixture(autouse=True)
def _nothing_learned_before() -> Iterator[None]:
    testing.forget_learned()
    yield
    testing.forget_learned()


def learning(run: Run) -> Any:
    return run.offload(learn=True, offload_window_bytes=None, reload_window_bytes=None)


def end_kept(row: torchoffload.TapeStats) -> int:
    """Records of the tape's end that stayed: only a tape that went as a known one up to there has an end to keep."""
    return row.records_kept.get("tape_end", 0)


def rows_of(program: Callable[[Run], Any], device: Device, count: int) -> list[torchoffload.TapeStats]:
    stats = assert_same_gradients(program, device=device, min_moved_fraction=0.2)
    return list(stats.tapes[-count:])


@UNTIMED
@pytest.mark.parametrize("dispatch", ["index_add", "permutation"])
def test_loads_that_come_again_are_known(device_under_test: Device, dispatch: str):
    order = [0, 1, 0, 1, 2, 0]

    def program(run: Run):
        model = run.module(lambda: ExpertsModel(ExpertsConfig(dispatch=dispatch)))
        batches = [tokens_and_labels(run) for _ in range(3)]
        for batch in order:
            with learning(run):
                loss = model(*batches[batch])
            loss.backward()
            run.check(loss=loss, grads=model, counts=model.counts)
            model.zero_grad()

    rows = rows_of(program, device_under_test, len(order))
    kept = [end_kept(row) > 0 for row in rows]
    assert not kept[0]
    assert kept[2], "as the first"
    assert kept[3], "as the second"
    assert kept[5], "as the first"


@UNTIMED
def test_one_token_that_goes_elsewhere_in_the_last_layer_is_expected_anew_from_there(device_under_test: Device):
    """The tapes are the same up to the last mixture, so its end is not the end that was learned."""

    def program(run: Run):
        model = run.module(ExpertsModel)
        batch = tokens_and_labels(run)
        for step in range(4):
            with learning(run):
                loss = model(*batch)
            loss.backward()
            counts = model.counts
            run.check(loss=loss, grads=model, counts=counts)
            model.zero_grad()
            if step == 2:
                with torch.no_grad():
                    model.mixtures[-1].router.weight[0] += 0.05

    rows = rows_of(program, device_under_test, 4)
    known, changed = rows[2], rows[3]
    assert known.bytes_kept["tape_end"] > changed.bytes_kept["tape_end"] > 0
    assert changed.bytes_offloaded > known.bytes_offloaded


@pytest.mark.slow
@UNTIMED
def test_loads_that_change_at_each_step_are_forgotten_in_time(device_under_test: Device):
    def program(run: Run):
        model = run.module(ExpertsModel)
        loads = set()
        for _ in range(2 * SHAPE_LIMIT):
            with learning(run):
                loss = model(*tokens_and_labels(run))
            loss.backward()
            run.check(loss=loss)
            update(model)
            loads.add(str(model.counts))
        run.check(step=model)
        assert len(loads) > SHAPE_LIMIT, "the loads of too many steps were the same"

    rows_of(program, device_under_test, SHAPE_LIMIT)
    assert testing.shapes_learned() <= SHAPE_LIMIT


@UNTIMED
def test_layers_that_are_dropped_and_segments_of_other_lengths(device_under_test: Device):
    def program(run: Run):
        model = run.module(lambda: LinearAttentionModel(depth=4))
        blocks = list(model.blocks)
        for step, dropped in enumerate([None, 1, None, 3, None, 1, 0, None]):
            model.blocks = torch.nn.ModuleList(b for number, b in enumerate(blocks) if number != dropped)
            with learning(run):
                loss, _ = model(*tokens_and_labels(run, tokens=17 + 8 * (step % 2)))
            loss.backward()
            run.check(loss=loss, step=torch.nn.ModuleList(blocks))
            update(model)

    rows = rows_of(program, device_under_test, 8)
    assert end_kept(rows[0]) == 0
    assert end_kept(rows[2]) > 0


@UNTIMED
def test_buckets_of_resolutions(device_under_test: Device):
    shapes = [(3, 8), (1, 12), (3, 8), (1, 12), (5, 4), (3, 8)]

    def program(run: Run):
        model = run.module(VideoTransformer)
        for frames, size in shapes:
            with learning(run):
                loss = flow_matching_loss(run, model, frames, size)
            loss.backward()
            run.check(loss=loss, step=model)
            update(model)

    rows = rows_of(program, device_under_test, len(shapes))
    kept = [end_kept(row) > 0 for row in rows]
    assert not kept[0]
    assert kept[2:] == [True] * 4, "a resolution that is new is expected to be as the others, larger or smaller"


# ---- on a GPU, whose times are its own: of a size that its link notices ----


@pytest.mark.devices("cuda")
def test_loads_that_change_while_steps_are_timed(device_under_test: Device):
    config = ExpertsConfig(width=256, inner=512, experts=8, depth=3)

    def program(run: Run):
        model = run.module(lambda: ExpertsModel(config))
        batches = [tokens_and_labels(run, batch=4, tokens=512) for _ in range(3)]
        for step in range(12):
            with learning(run):
                loss = model(*batches[step % 3])
            loss.backward()
            run.check(loss=loss, counts=model.counts)
            if step > 5:
                update(model)
            else:
                model.zero_grad()
        run.check(step=model)

    with sdpa_kernel(SDPBackend.MATH):  # others' backwards add in no fixed order
        assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.1)


@pytest.mark.devices("cuda")
def test_video_of_two_resolutions_while_steps_are_timed(device_under_test: Device):
    config = VideoConfig(width=256, heads=8, depth=4)

    def program(run: Run):
        model = run.module(lambda: VideoTransformer(config))
        for step in range(12):
            with learning(run):
                loss = flow_matching_loss(run, model, *[(4, 32), (8, 16)][step % 2])
            loss.backward()
            run.check(loss=loss)
            update(model)
        run.check(step=model)

    with sdpa_kernel(SDPBackend.MATH):  # others' backwards add in no fixed order
        assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.1)
