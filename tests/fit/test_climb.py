"""The climb: from the survey's own plan to the fastest one that the memory holds, in few steps and without failures."""

import dataclasses
import random

import pytest

from simulated_steps import MIB, SimulatedDevice
from torchoffload._fit.plan.beliefs import Beliefs
from torchoffload._fit.plan.climb import SPARE_BYTES, Climb, Room, allowed_bytes, first_plan, next_below
from torchoffload._fit.plan.step import Step, StepPlan, plan_step, survey_plan
from torchoffload._fit.plan.trials import Trial

TOLD = {
    "allocated_bytes": MIB,
    "reserved_bytes": MIB,
    "ended_bytes": MIB,
    "grown_bytes": 0,
    "waits_for_memory": False,
}
STEPS = 9  # of twelve, three are the survey's


class Climbed:
    """What came of a climb on a simulated device."""

    def __init__(
        self, device: SimulatedDevice, reserved_bytes: int, *, is_capped: bool, first_step: float = 1.0,
        stuck_bytes: int | None = None, has_workspaces: bool = False,
    ) -> None:  # fmt: skip
        if is_capped:
            device.cap_bytes = reserved_bytes
        own = survey_plan(device.step)
        self.room = Room(
            reserved_bytes, int(reserved_bytes * 0.96), is_measured=True, stuck_bytes=stuck_bytes,
            has_workspaces=has_workspaces,
        )  # fmt: skip
        self.climb = Climb(device.step, own, self.room, STEPS)
        self.own = self.climb.own
        self.slowest, self.steps, self.over, self.most_reserved = 0.0, 0, 0, 0
        while (trial := self.climb.take_next()) is not None:
            if not device.runs(trial):
                self.climb.note_failure()
                self.steps += 1
                break
            self.over += device.reserved_bytes(trial) > reserved_bytes
            self.most_reserved = max(self.most_reserved, device.reserved_bytes(trial))
            factor = first_step  # of the time, as memory is reserved in it
            ended_bytes = device.backward_reserved_bytes(trial)
            while True:
                self.steps += 1
                step_s = device.step_s(trial)
                if trial is not self.own:
                    self.slowest = max(self.slowest, step_s / (self.own.step_s or step_s))
                taken_s, factor = factor * step_s, 1.0
                if self.climb.note_step(
                    taken_s, allocated_bytes=device.allocated_bytes(trial),
                    reserved_bytes=device.reserved_bytes(trial),
                    ended_bytes=ended_bytes, grown_bytes=0, waits_for_memory=False,
                ):  # fmt: skip
                    break
                ended_bytes = device.reserved_bytes(trial)  # with what was reserved behind backward
        best = self.climb.best
        assert best is not None
        self.best: Trial = best


def amounts(device: SimulatedDevice) -> list[int]:
    """Amounts of memory between what the survey has reserved and what all takes."""
    low = device.own_reserved_bytes()
    plan = plan_step(device.step, 1 << 60)
    assert plan is not None
    high = max(low, device.reserved_bytes(Trial(device.step, plan)))
    return [int(low * 1.001), int(low + 0.3 * (high - low)), int(low + 0.7 * (high - low)), int(high * 1.1)]


@pytest.mark.parametrize("seed", range(60))
def test_a_climb_keeps_to_the_memory_and_is_never_slower_than_the_survey(seed: int):
    rng = random.Random(seed)
    device = SimulatedDevice.random(rng)
    for reserved_bytes in amounts(device):
        climbed = Climbed(device, reserved_bytes, is_capped=True)
        assert device.ooms == 0
        assert device.reserved_bytes(climbed.best) <= reserved_bytes
        assert climbed.steps <= STEPS
        assert climbed.slowest <= 1.3
        assert (climbed.best.step_s or 0.0) <= (climbed.own.step_s or 0.0)


def test_a_climb_takes_what_there_is():
    """In most cases the plan that is settled on is nearly as fast as the best one that the memory holds."""
    ratios = []
    for seed in range(40):
        device = SimulatedDevice.random(random.Random(1000 + seed))
        reserved_bytes = amounts(device)[2]
        climbed = Climbed(device, reserved_bytes, is_capped=True)
        most = (reserved_bytes - device.offset_bytes) / device.growth / device.peak_error
        best = plan_step(device.true, int(min(most, reserved_bytes * 0.96)))
        assert best is not None
        ratios.append(device.true_s(climbed.best) / best.step_s)
    ratios.sort()
    assert ratios[len(ratios) // 2] <= 1.03, ratios
    assert ratios[int(len(ratios) * 0.9)] <= 1.12, ratios


@pytest.mark.parametrize("seed", range(30))
def test_where_what_is_reserved_jumps_nothing_is_followed_that_exceeds_it(seed: int):
    """The factor of each plan is its own, between 1 and 1.5: a plan may fail, and the one that is followed does not."""
    rng = random.Random(2000 + seed)
    device = SimulatedDevice.random(rng, jitter=0.2)
    for reserved_bytes in amounts(device)[1:]:
        device.ooms = 0
        climbed = Climbed(device, reserved_bytes, is_capped=True)
        assert device.ooms <= 1
        assert device.reserved_bytes(climbed.best) <= reserved_bytes
        assert climbed.slowest <= 1.3


@pytest.mark.parametrize("seed", range(20))
def test_on_a_larger_device_no_plan_is_settled_on_that_reserves_more_than_given(seed: int):
    device = SimulatedDevice.random(random.Random(3000 + seed), jitter=0.2)
    for reserved_bytes in amounts(device)[1:]:
        climbed = Climbed(device, reserved_bytes, is_capped=False)
        assert device.ooms == 0
        assert device.reserved_bytes(climbed.best) <= reserved_bytes
        assert climbed.steps <= STEPS


@pytest.mark.parametrize("pieces", [0.02, 0.08, 0.12])
def test_on_a_full_device_that_gets_pages_back_more_is_tried(monkeypatch: pytest.MonkeyPatch, pieces: float):
    """Where there is room the allocator reserves up to 1.43 times what is allocated, and less would do."""
    monkeypatch.setattr("torchoffload._fit.plan.climb._PIECES_BYTES", 64 * MIB)  # of steps of some hundred MiB
    ratios = []
    for seed in range(40):
        found = []
        for stuck_bytes in (None, 0):
            device = SimulatedDevice.random(random.Random(5000 + seed))
            device.pieces = pieces
            own = Trial(device.step, survey_plan(device.step))
            needed_bytes = int(device.allocated_bytes(own) * (1 + device.pieces)) + device.offset_bytes
            for part in (1.001, 1.15, 1.3):
                climbed = Climbed(device, int(part * needed_bytes), is_capped=True, stuck_bytes=stuck_bytes)
                assert device.ooms == 0
                assert climbed.slowest <= 1.3
                found.append(device.true_s(climbed.best))
        ratios += [with_pages / without for without, with_pages in zip(found[:3], found[3:], strict=True)]
    assert max(ratios) <= 1.06, ratios
    assert sum(ratios) / len(ratios) <= 0.97, ratios


@pytest.mark.parametrize("seed", range(20))
def test_the_time_that_it_takes_to_reserve_memory_changes_nothing(seed: int):
    found = []
    for factor in (1.0, 5.0):
        device = SimulatedDevice.random(random.Random(4000 + seed))
        climbed = Climbed(device, amounts(device)[2], is_capped=True, first_step=factor)
        found.append((climbed.best.does, climbed.best.step_s, climbed.steps))
    assert found[0] == found[1]


@pytest.mark.parametrize("seed", range(20))
def test_memory_is_left_free_for_workspaces_if_the_survey_has_left_as_much(seed: int):
    """A tenth, less what reserved bytes differ by between plans that are predicted to allocate as much."""
    device = SimulatedDevice.random(random.Random(5000 + seed))
    for amount in amounts(device):
        climbed = Climbed(device, amount, is_capped=False, has_workspaces=True)
        own_bytes = device.reserved_bytes(climbed.own)
        assert climbed.most_reserved <= max(own_bytes, amount / 1.1 * 1.04)


def test_the_first_plan_is_that_of_the_survey():
    device = SimulatedDevice.random(random.Random(5))
    climb = Climb(device.step, survey_plan(device.step), Room(1 << 60, 1 << 60, is_measured=True), STEPS)
    first = climb.take_next()
    assert first is not None
    assert first is climb.own
    assert first.plan.calls == survey_plan(device.step).calls


@pytest.mark.parametrize("is_measured", [True, False])
def test_the_plan_of_the_survey_is_tried_only_if_pieces_have_room_beside_it(is_measured: bool):
    """A ResNet-50's was predicted to allocate 3.5 GiB, and ran out of memory in 3.7 GiB."""
    device = SimulatedDevice.random(random.Random(5))
    own, least = survey_plan(device.step, 64 * MIB), survey_plan(device.step)
    peak_bytes = device.step.peak_bytes(own)
    assert device.step.peak_bytes(least) < 0.96 * peak_bytes

    def first(reserved_bytes: int, allocated_bytes: int) -> StepPlan | None:
        return first_plan(device.step, Room(reserved_bytes, allocated_bytes, is_measured), own, ran_bytes=0)

    assert first(int(peak_bytes * 1.11), peak_bytes) == own
    assert first(int(peak_bytes * 1.09), peak_bytes) == (least if is_measured else own)
    assert first(int(peak_bytes * 1.11), peak_bytes - 1) == least
    # If windows make no difference, as where the optimizer takes the most, the faster plan is tried.
    step = dataclasses.replace(device.step, other_bytes=2 * peak_bytes)
    room = Room(int(peak_bytes * 2.02), 2 * peak_bytes, is_measured)
    assert first_plan(step, room, own, ran_bytes=0) == own


def test_workspaces_have_room_beside_the_first_plan_also_beside_large_weights():
    """On an H200 a convolution found no room for 110 MiB under the survey's plan, whose windows had 216 MiB."""
    device = SimulatedDevice.random(random.Random(5))
    own, least = survey_plan(device.step, 64 * MIB), survey_plan(device.step)
    peak_bytes = device.step.peak_bytes(own)

    def first(part: float, more_bytes: int, *, has_workspaces: bool) -> StepPlan | None:
        step = device.step.with_more(more_bytes)
        of_survey = dataclasses.replace(own, peak_bytes=peak_bytes + more_bytes)
        room = Room(int((peak_bytes + more_bytes) * part), 1 << 60, is_measured=True, has_workspaces=has_workspaces)
        found = first_plan(step, room, of_survey, ran_bytes=0)
        return None if found is None else dataclasses.replace(found, peak_bytes=found.peak_bytes - more_bytes)

    assert first(1.22, 0, has_workspaces=True) == own
    assert first(1.18, 0, has_workspaces=False) == own
    assert first(1.18, 0, has_workspaces=True) == least
    more_bytes = 100 * peak_bytes  # beside them the windows are a small part of the peak
    assert first(1.01, more_bytes, has_workspaces=False) == own
    assert first(1.01, more_bytes, has_workspaces=True) == least


def test_a_plan_of_the_survey_that_is_known_to_fit_is_the_first_one_again():
    """As after a replan(): whether pieces have room beside it was seen."""
    device = SimulatedDevice.random(random.Random(5))
    own = survey_plan(device.step, 64 * MIB)
    peak_bytes = device.step.peak_bytes(own)
    room = Room(int(peak_bytes * 1.05), peak_bytes, is_measured=True)
    ran = Trial(device.step, own, 2.0, peak_bytes, int(peak_bytes * 1.04))
    less = dataclasses.replace(room, reserved_bytes=int(peak_bytes * 1.03) - SPARE_BYTES)
    assert first_plan(device.step, room, own, ran_bytes=0, known=[ran]) == own
    assert first_plan(device.step, less, own, ran_bytes=0, known=[ran]) != own
    for unknown in (
        dataclasses.replace(ran, step_s=None), dataclasses.replace(ran, has_failed=True),
        dataclasses.replace(ran, allocated_bytes=0), dataclasses.replace(ran, plan=survey_plan(device.step)),
    ):  # fmt: skip
        assert first_plan(device.step, room, own, ran_bytes=0, known=[unknown]) != own


@pytest.mark.parametrize("has_failed", [False, True])
def test_a_plan_of_the_survey_that_is_known_not_to_fit_is_not_the_first_one_again(has_failed: bool):
    device = SimulatedDevice.random(random.Random(5))
    own = survey_plan(device.step, 64 * MIB)
    peak_bytes = device.step.peak_bytes(own)
    room = Room(int(peak_bytes * 1.2), int(peak_bytes * 1.15), is_measured=True)
    assert first_plan(device.step, room, own, ran_bytes=0) == own
    ran = Trial(device.step, own, None if has_failed else 2.0, peak_bytes, int(peak_bytes * 1.4), has_failed=has_failed)
    assert first_plan(device.step, room, own, ran_bytes=0, known=[ran]) == survey_plan(device.step)


@pytest.mark.parametrize("pieces", [None, 0.05])
@pytest.mark.parametrize("is_known", [True, False])
def test_what_an_optimizer_reserves_is_there_for_blocks(
    monkeypatch: pytest.MonkeyPatch, pieces: float | None, is_known: bool
):
    """What an optimizer allocates is not known if the loop resets PyTorch's peaks, and is no plan's in any case."""
    monkeypatch.setattr("torchoffload._fit.plan.climb._PIECES_BYTES", 64 * MIB)  # of steps of some hundred MiB

    class WithOptimizer(SimulatedDevice):
        def allocated_bytes(self, trial: Trial) -> int:
            return int(trial.plan.peak_bytes * self.peak_error)

        optimizer_bytes = 0

        def reserved_bytes(self, trial: Trial) -> int:
            return max(super().reserved_bytes(trial), self.optimizer_bytes)

        def backward_reserved_bytes(self, trial: Trial) -> int:
            return super().reserved_bytes(trial)

    ratios = []
    for seed in range(40):
        for part in (1.04, 1.2, 1.5, 2.0):
            device = WithOptimizer.random(random.Random(6000 + seed))
            device.pieces = pieces
            blocks_bytes = device.reserved_bytes(Trial(device.step, survey_plan(device.step)))
            device.optimizer_bytes = int(1.5 * blocks_bytes)
            if is_known:
                device.step = dataclasses.replace(device.step, other_bytes=device.optimizer_bytes)
            room_bytes = int(part * device.optimizer_bytes)
            climbed = Climbed(device, room_bytes, is_capped=True, stuck_bytes=None if pieces is None else 0)
            assert device.ooms == 0
            assert climbed.slowest <= 1.3
            # What was reserved for the optimizer is used.
            ratio = device.growth if pieces is None else 1 + pieces
            best = plan_step(device.true.of_blocks, int((room_bytes - device.offset_bytes) / ratio / 1.04))
            assert best is not None
            ratios.append(device.true_s(climbed.best) / best.step_s)
    ratios.sort()
    assert ratios[len(ratios) // 2] <= 1.02, ratios
    assert ratios[int(len(ratios) * 0.9)] <= 1.1, ratios


@pytest.mark.parametrize(
    ("second", "found_bytes"),
    [
        ({"ended_bytes": 900 * MIB, "grown_bytes": 0}, 500 * MIB),
        ({"ended_bytes": 900 * MIB, "grown_bytes": 30 * MIB}, 530 * MIB),
        ({"ended_bytes": 500 * MIB, "grown_bytes": -30 * MIB}, 500 * MIB),
        ({"ended_bytes": 510 * MIB, "grown_bytes": 400 * MIB}, 900 * MIB),
        ({"ended_bytes": 900 * MIB, "grown_bytes": 0, "allocated_bytes": 101 * MIB}, 650 * MIB),
    ],
    ids=["optimizer", "pieces", "given back", "emptied in the loop", "more is allocated"],
)
def test_what_was_reserved_behind_backward_is_not_reserved_for_backward(second: dict[str, int], found_bytes: int):
    device = SimulatedDevice.random(random.Random(3))
    climb = Climb(device.step, survey_plan(device.step), Room(1 << 60, 1 << 60, is_measured=True), STEPS)
    own = climb.take_next()
    assert own is not None
    for told in ({"ended_bytes": 500 * MIB, "grown_bytes": 400 * MIB}, second):
        climb.note_step(1.0, **{**TOLD, "reserved_bytes": 900 * MIB, **told})
    assert (own.backward_reserved_bytes, own.reserved_bytes) == (found_bytes, 900 * MIB)


@pytest.mark.parametrize("patience", [1, 8])
def test_a_climb_ends_if_many_steps_in_a_row_are_too_small_to_tell_anything(patience: int):
    device = SimulatedDevice.random(random.Random(3))
    room = Room(1 << 60, 1 << 60, is_measured=True)
    climb = Climb(device.step, survey_plan(device.step), room, STEPS, patience=patience)
    climb.take_next()
    most = 12 * patience
    assert not any(climb.note_step(0.1, **TOLD, share=0.4) for _ in range(most))
    assert not climb.note_step(1.0, **TOLD)
    assert not any(climb.note_step(0.1, **TOLD, share=0.4) for _ in range(most))
    assert climb.note_step(0.1, **TOLD, share=0.4)
    assert climb.met_small_steps
    assert climb.take_next() is None
    assert climb.best is climb.own


def test_a_plan_that_met_small_steps_alone_tells_nothing_of_bytes():
    ran = of_bytes(600 * MIB, 700 * MIB)
    small = dataclasses.replace(of_bytes(0, 100 * MIB, beyond=650 * MIB), step_s=None)
    assert allowed_bytes(ROOM, [ran, small]) == allowed_bytes(ROOM, [ran])


@pytest.mark.parametrize(("times", "is_tried"), [(1.0, False), (1.05, False), (0.95, False), (1.2, True), (4.0, True)])
def test_a_plan_that_failed_ends_the_trials_only_of_a_room_that_is_about_as_large(times: float, is_tried: bool):
    device = SimulatedDevice.random(random.Random(3))
    own = survey_plan(device.step)
    peak_bytes = device.step.peak_bytes(own)
    more = plan_step(device.step, int(1.2 * peak_bytes))
    assert more is not None
    room = Room(2 * peak_bytes, 2 * peak_bytes, is_measured=True)
    ran = Trial(device.step, own, 1.0, peak_bytes, peak_bytes, room_bytes=room.reserved_bytes)
    failed = Trial(device.step, more, has_failed=True, room_bytes=room.reserved_bytes)
    other = Room(int(times * room.reserved_bytes), int(times * room.reserved_bytes), is_measured=True)
    climb = Climb(device.step, own, other, STEPS, [ran, failed], own_reserved_bytes=peak_bytes)
    assert climb.own is ran
    assert (climb.take_next() is not None) == is_tried
    assert (failed in climb.trials) != is_tried


def test_a_plan_that_failed_in_one_memory_has_failed_there_even_if_it_ran_in_more():
    """As after a replan() for more memory, and another one for as much as before."""
    device = SimulatedDevice.random(random.Random(3))
    own = survey_plan(device.step)
    peak_bytes = device.step.peak_bytes(own)
    more = plan_step(device.step, int(1.2 * peak_bytes))
    assert more is not None
    small, large = (Room(int(times * peak_bytes), int(times * peak_bytes), is_measured=True) for times in (2.0, 4.0))
    ran = Trial(device.step, own, 1.0, peak_bytes, peak_bytes, room_bytes=small.reserved_bytes)
    failed = Trial(device.step, more, has_failed=True, room_bytes=small.reserved_bytes)
    climb = Climb(device.step, own, large, STEPS, [ran, failed])
    assert [each is failed for each in climb.elsewhere] == [True]
    again = Trial(device.step, more, 0.5, peak_bytes, peak_bytes, peak_bytes, room_bytes=large.reserved_bytes)
    for known in ([ran, again, failed], [failed, again, ran]):
        climb = Climb(device.step, own, small, STEPS, known)
        assert climb.take_next() is None
        assert climb.best is ran


def test_a_plan_that_fails_after_it_has_settled_has_failed_in_the_memory_of_then():
    device = SimulatedDevice.random(random.Random(3))
    plan = plan_step(device.step, 1 << 60)
    assert plan is not None
    settled = Trial(device.step, plan, 1.0, MIB, MIB, room_bytes=1000 * MIB)
    assert next_below([settled], settled, 2000 * MIB) is not None
    assert (settled.has_failed, settled.room_bytes) == (True, 2000 * MIB)
    for times, is_to_try_anew in ((1.0, False), (1.09, False), (1.2, True)):
        room = Room(int(times * 2000 * MIB), 1 << 60, is_measured=True)
        assert room.is_to_try_anew(settled) == is_to_try_anew


def test_a_plan_whose_step_was_not_timed_is_tried_again():
    device = SimulatedDevice.random(random.Random(3))
    room = Room(1 << 60, 1 << 60, is_measured=True)
    climb = Climb(device.step, survey_plan(device.step), room, STEPS)
    climb.take_next()
    assert [climb.note_step(2.0, **TOLD) for _ in range(2)] == [False, True]
    second = climb.take_next()
    assert second is not None
    assert not climb.note_step(1.0, **TOLD)
    assert any(climb.note_step(0.1, **TOLD, share=0.4) for _ in range(13))
    anew = Climb(device.step, survey_plan(device.step), room, STEPS, climb.trials).take_next()
    assert anew is not None
    assert anew.does == second.does


def test_a_plan_that_failed_where_there_was_much_more_ends_no_trials():
    device = SimulatedDevice.random(random.Random(3))
    own = survey_plan(device.step)
    peak_bytes = device.step.peak_bytes(own)
    full = plan_step(device.step, 1 << 60)
    assert full is not None
    failed = Trial(device.step, full, has_failed=True, room_bytes=10 * peak_bytes)
    ran = Trial(device.step, own, 1.0, peak_bytes, peak_bytes, room_bytes=10 * peak_bytes)
    room = Room(int(1.5 * peak_bytes), int(1.5 * peak_bytes), is_measured=True)
    climb = Climb(device.step, own, room, STEPS, [ran, failed], own_reserved_bytes=peak_bytes)
    assert failed in climb.trials
    assert climb.take_next() is not None


def test_the_bytes_that_the_survey_reserved_where_there_was_more_say_nothing():
    device = SimulatedDevice.random(random.Random(7))
    for stuck_bytes in (None, 0):
        room = Room(1000 * MIB, 960 * MIB, is_measured=True, stuck_bytes=stuck_bytes)
        for reserved_bytes, known_bytes in ((999 * MIB, 999 * MIB), (1001 * MIB, 0)):
            climb = Climb(device.step, survey_plan(device.step), room, STEPS, own_reserved_bytes=reserved_bytes)
            assert climb.own.reserved_bytes == known_bytes


def test_on_a_full_device_the_last_plan_that_is_tried_spends_no_time_on_large_pieces():
    """If pages are given back, a plan that spends no time on large pieces is tried after those that do."""
    asked: list[bool] = []

    class Asked(Climb):
        def _plans(self, step: Step, memory_bytes: int, *, leaves_room: bool) -> list[StepPlan]:
            asked.append(leaves_room)
            return []

    device = SimulatedDevice.random(random.Random(7))
    for stuck_bytes, expected in ((None, [True]), (0, [True, False])):
        asked.clear()
        room = Room(1 << 40, 1 << 40, is_measured=True, stuck_bytes=stuck_bytes)
        climb = Asked(device.step, survey_plan(device.step), room, STEPS)
        own = climb.take_next()
        assert own is not None
        while not climb.note_step(1.0, **TOLD):
            pass
        assert climb.take_next() is None
        assert asked == expected


NO_BLOCKS = Step(kinds=(), calls=(), fixed={"weights": 50 * MIB})


def of_bytes(
    allocated_bytes: int, reserved_bytes: int, *, beyond: int = 0, step: Step = NO_BLOCKS, has_failed: bool = False,
    waits_for_memory: bool = False,
) -> Trial:  # fmt: skip
    """Return a trial of which only the bytes are known: it was predicted to take so many beyond those that it took."""
    plan = dataclasses.replace(survey_plan(NO_BLOCKS), peak_bytes=allocated_bytes + beyond)
    return Trial(
        step, plan, 1.0, allocated_bytes, reserved_bytes, reserved_bytes, has_failed=has_failed,
        waits_for_memory=waits_for_memory,
    )  # fmt: skip


ROOM = Room(1000 * MIB, 960 * MIB, is_measured=True)


def test_the_next_plan_takes_what_is_left_even_if_more_is_reserved_than_ever_seen():
    assert allowed_bytes(ROOM, [of_bytes(100 * MIB, 100 * MIB)]) == 100 * MIB + int((900 - 4) * MIB / 1.5)


def test_the_growth_between_two_plans_tells_of_the_next():
    ran = [of_bytes(100 * MIB, 100 * MIB), of_bytes(700 * MIB, 700 * MIB)]
    assert 930 * MIB <= allowed_bytes(ROOM, ran) <= 960 * MIB
    ran = [of_bytes(100 * MIB, 100 * MIB), of_bytes(600 * MIB, 750 * MIB)]
    assert allowed_bytes(ROOM, ran) == pytest.approx(600 * MIB + (250 - 30) * MIB / 1.45, rel=1e-6)


def test_a_growth_that_cannot_be_is_not_believed():
    """As if the loop has emptied the cache between the steps of the first plan, behind an optimizer."""
    ran = [of_bytes(100 * MIB, 590 * MIB), of_bytes(600 * MIB, 750 * MIB)]
    assert allowed_bytes(ROOM, ran) == pytest.approx(600 * MIB + (250 - 30) * MIB / 1.5, rel=1e-6)


def test_behind_a_plan_that_failed_the_next_takes_half_of_what_was_added():
    ran = [of_bytes(500 * MIB, 500 * MIB), of_bytes(800 * MIB, 0, has_failed=True)]
    assert allowed_bytes(ROOM, ran) == 650 * MIB
    ran = [of_bytes(500 * MIB, 500 * MIB), of_bytes(800 * MIB, 1001 * MIB)]
    assert allowed_bytes(ROOM, ran) == 650 * MIB


def test_on_a_full_device_a_plan_needs_no_more_than_it_allocates_and_some_pieces():
    full = dataclasses.replace(ROOM, stuck_bytes=20 * MIB)
    ran = [of_bytes(500 * MIB, 900 * MIB)]
    needed_bytes = int(500 * MIB * 1.1) + (256 + 20) * MIB
    assert full.needed_bytes(ran[0]) == needed_bytes < ROOM.needed_bytes(ran[0]) == 900 * MIB
    assert allowed_bytes(full, ran) == pytest.approx(500 * MIB + (1000 * MIB - needed_bytes * 1.04) / 1.5, rel=1e-6)
    assert full.needed_bytes(of_bytes(500 * MIB, 510 * MIB)) == 510 * MIB
    assert full.needed_bytes(of_bytes(0, 900 * MIB)) == 900 * MIB  # what it allocates is not known


def test_on_a_full_device_a_plan_that_has_reserved_all_is_followed_by_one_that_allocates_as_much():
    """Pages are given back: the bytes that it has reserved do not tell what another plan may allocate."""
    ran = [of_bytes(600 * MIB, 990 * MIB)]
    assert allowed_bytes(dataclasses.replace(ROOM, stuck_bytes=60 * MIB), ran) == 600 * MIB
    assert allowed_bytes(dataclasses.replace(ROOM, stuck_bytes=84 * MIB), ran) == 600 * MIB
    assert allowed_bytes(dataclasses.replace(ROOM, stuck_bytes=85 * MIB), ran) < 600 * MIB  # pieces have no room
    assert allowed_bytes(ROOM, ran) < 600 * MIB


def test_what_the_largest_plan_was_predicted_to_allocate_beyond_what_it_took_is_not_granted_again():
    full = dataclasses.replace(ROOM, stuck_bytes=84 * MIB)
    ran = of_bytes(600 * MIB, 990 * MIB, beyond=50 * MIB)
    assert full.has_pages_for(ran)
    assert 600 * MIB <= allowed_bytes(full, [ran]) < 640 * MIB < ran.peak_bytes


def test_an_estimate_says_nothing_about_how_fast_reserved_bytes_grow():
    full = dataclasses.replace(ROOM, stuck_bytes=0)
    ran = [of_bytes(100 * MIB, 200 * MIB), of_bytes(500 * MIB, 900 * MIB)]
    needed_bytes = int(500 * MIB * 1.1) + 256 * MIB
    assert allowed_bytes(full, ran) == pytest.approx(500 * MIB + (1000 * MIB - needed_bytes * 1.04) / 1.5, rel=1e-6)


@pytest.mark.parametrize(
    ("reserved_bytes", "stuck_bytes", "holds", "is_to_try_anew"),
    [
        (1000 * MIB, 0, True, False),
        (1100 * MIB, None, False, False),
        (1100 * MIB, 0, False, True),
        (1100 * MIB, 300 * MIB, False, False),
    ],
)
def test_a_plan_that_reserved_more_than_there_is_now_may_do_with_less(
    reserved_bytes: int, stuck_bytes: int | None, holds: bool, is_to_try_anew: bool
):
    """As after a replan() for less memory, for which the rest of the device was taken away."""
    room = dataclasses.replace(ROOM, stuck_bytes=stuck_bytes)
    ran = of_bytes(500 * MIB, reserved_bytes)
    assert (room.holds(ran), room.is_to_try_anew(ran)) == (holds, is_to_try_anew)
    failed = of_bytes(500 * MIB, reserved_bytes, has_failed=True)
    assert (room.holds(failed), room.is_to_try_anew(failed)) == (False, False)


def test_a_plan_that_may_do_with_less_is_tried_anew():
    device = SimulatedDevice.random(random.Random(7))
    own = Trial(device.step, survey_plan(device.step))
    allocated_bytes = device.allocated_bytes(own)
    ran = dataclasses.replace(own, step_s=2.0, allocated_bytes=allocated_bytes, reserved_bytes=4 * allocated_bytes)
    room = Room(3 * allocated_bytes, 3 * allocated_bytes, is_measured=True, stuck_bytes=0)
    climb = Climb(device.step, own.plan, room, STEPS, [ran], own_reserved_bytes=4 * allocated_bytes)
    assert climb.own.step_s is None
    assert climb.take_next() is climb.own
    assert climb.own.reserved_bytes == 0  # of what it takes in this room nothing is known
    without = dataclasses.replace(room, stuck_bytes=None)
    assert Climb(device.step, own.plan, without, STEPS, [ran], own_reserved_bytes=4 * allocated_bytes).own is ran


def test_a_plan_that_waited_for_memory_is_followed_by_one_that_takes_less():
    ran = [of_bytes(500 * MIB, 500 * MIB), of_bytes(900 * MIB, 1000 * MIB, waits_for_memory=True)]
    assert allowed_bytes(ROOM, ran) <= int(900 * MIB * 0.94)


@pytest.mark.parametrize(
    ("stuck_bytes", "least_room", "steps"), [(None, 1.5, 1), (0, 1.0, 1), (0, 1.5, 2)], ids=["never", "scarce", "ample"]
)
def test_a_plan_that_waits_for_memory_in_its_first_step_gets_a_second_one_if_there_is_ample(
    monkeypatch: pytest.MonkeyPatch, stuck_bytes: int | None, least_room: float, steps: int
):
    monkeypatch.setattr("torchoffload._fit.plan.climb._PIECES_BYTES", 0)
    device = SimulatedDevice.random(random.Random(3))
    room = Room(1 << 60, 1 << 60, is_measured=True)
    climb = Climb(device.step, survey_plan(device.step), room, STEPS)

    def note(trial: Trial) -> bool:
        return climb.note_step(
            device.step_s(trial), allocated_bytes=device.allocated_bytes(trial),
            reserved_bytes=device.reserved_bytes(trial), ended_bytes=0, grown_bytes=0, waits_for_memory=True,
        )  # fmt: skip

    own = climb.take_next()
    assert own is climb.own
    assert [note(own), note(own)] == [False, True]  # the survey's own plan is known to run
    other = climb.take_next()
    assert other is not None
    full = int(device.allocated_bytes(other) * least_room)
    climb.room = Room(full, full, is_measured=True, stuck_bytes=stuck_bytes)
    assert [note(other) for _ in range(steps)] == [*[False] * (steps - 1), True]
    assert other.waits_for_memory


def test_a_step_in_which_pinned_memory_is_resized_is_not_timed():
    device = SimulatedDevice.random(random.Random(3))
    room = Room(1 << 60, 1 << 60, is_measured=True)

    def taken(resizes: list[bool], steps: int = STEPS) -> tuple[list[bool], float | None]:
        climb = Climb(device.step, survey_plan(device.step), room, steps)
        own = climb.take_next()
        assert own is not None
        done = [
            climb.note_step(3.0 if resizes_host else 1.0, **TOLD, resizes_host=resizes_host) for resizes_host in resizes
        ]
        return done, own.step_s

    assert taken([False, False]) == ([False, True], 1.0)
    assert taken([True, False]) == ([False, True], 1.0)
    assert taken([False, True, False]) == ([False, False, True], 1.0)
    assert taken([True, True, True, True]) == ([False, False, False, True], 3.0)  # maybe each of its steps does it
    assert taken([False, True], steps=2) == ([False, True], 3.0)  # no steps are left


def test_where_nothing_is_measured_all_that_may_be_allocated_is_allowed_at_once():
    room = Room(1000 * MIB, 960 * MIB, is_measured=False)
    assert allowed_bytes(room, [of_bytes(100 * MIB, 0)]) == 960 * MIB


def test_bytes_that_are_left_free_are_those_of_the_latest_call():
    device = SimulatedDevice.random(random.Random(5))
    whole = Room(1000 * MIB, 960 * MIB, is_measured=True)
    climb = Climb(device.step, survey_plan(device.step), whole, STEPS)
    own = climb.take_next()
    assert own is not None
    own.allocated_bytes, own.reserved_bytes = 400 * MIB, 500 * MIB
    for nbytes in (100 * MIB, 300 * MIB):  # as many more are reserved for them as for those of the plan
        assert climb.leaves_free(nbytes)
        assert climb.room == Room(1000 * MIB - nbytes * 5 // 4, 960 * MIB - nbytes, is_measured=True)
    room = climb.room
    assert not climb.leaves_free(400 * MIB)  # the plan that runs has no room beside them
    assert climb.room == room


def test_several_models_that_climb_share_what_is_left():
    room = Room(1000 * MIB, 960 * MIB, is_measured=True, sharers=3)
    assert allowed_bytes(room, [of_bytes(100 * MIB, 100 * MIB)]) == pytest.approx(
        100 * MIB + 896 * MIB / 3 / 1.5, rel=1e-6
    )


@pytest.mark.parametrize("seed", range(10))
def test_what_is_timed_tells_how_all_plans_were_predicted_wrongly(seed: int):
    device = SimulatedDevice.random(random.Random(4000 + seed))
    low = device.step.peak_bytes(survey_plan(device.step))
    plans = [survey_plan(device.step)]
    plans += [found for part in (1.1, 1.4, 2.0) if (found := plan_step(device.step, int(low * part))) is not None]
    beliefs = Beliefs(device.step)
    beliefs.learn([(plan, plan.timed_as(device.true).step_s) for plan in plans])
    known = plans[0], plans[0].timed_as(device.true).step_s
    for plan in plans:
        least_s, best_s, most_s = beliefs.predicted_s(plan, known)
        true_s = plan.timed_as(device.true).step_s
        assert best_s == pytest.approx(true_s, rel=0.15)
        assert least_s <= best_s <= most_s


def test_without_steps_that_were_timed_the_survey_is_believed():
    device = SimulatedDevice.random(random.Random(6))
    best = Beliefs(device.step).best
    assert (best.again, best.rate, best.pace) == (1.0, 1.0, 1.0)
