"""RangeAllocator under random operation sequences, against a model that keeps a guard list per granule."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, precondition, rule

testing = pytest.importorskip("torchoffload._C_testing", reason="it is reached through the test build alone").testing

GRANULE = 512
STREAMS = st.integers(0, 3)
POINTS = st.lists(st.tuples(STREAMS, st.integers(0, 50)), max_size=4)


class Model(RuleBasedStateMachine):
    """Each granule of each block is used by one range, or free with the latest point of each stream that guards it."""

    ranges = Bundle("ranges")

    def __init__(self):
        super().__init__()
        self.allocator = testing.RangeAllocator(GRANULE)
        self.used = {}  # (block, granule) -> range
        self.guards = {}  # (block, granule) -> {stream: serial}, of free granules: what must at least be handed over
        self.block_granules = {}

    @rule(granules=st.integers(1, 40))
    def add_block(self, granules):
        block = self.allocator.add_block(granules * GRANULE)
        assert block not in self.block_granules
        self.block_granules[block] = granules
        self.guards |= {(block, granule): {} for granule in range(granules)}

    @rule(target=ranges, nbytes=st.integers(0, 20 * GRANULE))
    def acquire(self, nbytes):
        wanted = max(1, -(-nbytes // GRANULE))
        runs = self.free_runs()
        acquired = self.allocator.try_acquire(nbytes)
        fitting = sorted((length, block, first) for block, first, length in runs if length >= wanted)
        if acquired is None:
            assert not fitting
            return multiple()
        (block, offset, got_bytes), guards = acquired
        assert got_bytes == wanted * GRANULE
        assert fitting[0][1:] == (block, offset // GRANULE), "not the best fit"
        assert len({stream for stream, _ in guards}) == len(guards)
        for granule in range(offset // GRANULE, offset // GRANULE + wanted):
            assert (block, granule) not in self.used, "an overlap"
            for stream, serial in self.guards.pop((block, granule)).items():
                assert dict(guards).get(stream, 0) >= serial, "a guard was lost"
            self.used[block, granule] = acquired[0]
        return acquired[0]

    @rule(taken=consumes(ranges), guards=POINTS)
    def release(self, taken, guards):
        self.allocator.release(taken, guards)
        block, offset, nbytes = taken
        for granule in range(offset // GRANULE, (offset + nbytes) // GRANULE):
            del self.used[block, granule]
            self.guards[block, granule] = {}
            for stream, serial in guards:
                if serial > 0:
                    latest = self.guards[block, granule].get(stream, 0)
                    self.guards[block, granule][stream] = max(latest, serial)

    @rule(taken=ranges)
    def release_of_a_part_changes_nothing(self, taken):
        block, offset, nbytes = taken
        for wrong in [
            (block, offset, nbytes + GRANULE),
            (block, offset + GRANULE // 2, nbytes),
            (10**6, offset, nbytes),
        ]:
            with pytest.raises(RuntimeError, match="RangeAllocator"):
                self.allocator.release(wrong, [])

    @precondition(lambda self: self.allocator.idle_blocks())
    @rule(data=st.data())
    def remove_idle_block(self, data):
        idle = dict(self.allocator.idle_blocks())
        block = data.draw(st.sampled_from(sorted(idle)))
        for granule in range(self.block_granules.pop(block)):
            for stream, serial in self.guards.pop((block, granule)).items():
                assert dict(idle[block])[stream] >= serial, "a guard was lost"
        self.allocator.remove_block(block)

    @precondition(lambda self: self.used)
    @rule()
    def a_block_in_use_stays(self):
        with pytest.raises(RuntimeError, match="a block in use was removed"):
            self.allocator.remove_block(next(iter(self.used))[0])

    def free_runs(self):
        runs = []
        for block, granules in self.block_granules.items():
            first = 0
            for granule in range(granules + 1):
                if granule == granules or (block, granule) in self.used:
                    if granule > first:
                        runs.append((block, first, granule - first))
                    first = granule + 1
        return runs

    @invariant()
    def agrees_with_the_model(self):
        self.allocator.check_invariants()
        assert self.allocator.capacity_bytes == sum(self.block_granules.values()) * GRANULE
        assert self.allocator.used_bytes == len(self.used) * GRANULE
        assert self.allocator.free_bytes == len(self.guards) * GRANULE
        assert self.allocator.largest_free_bytes == max([run[2] for run in self.free_runs()], default=0) * GRANULE
        in_use = {block for block, _ in self.used}
        assert [block for block, _ in self.allocator.idle_blocks()] == sorted(self.block_granules.keys() - in_use)


Model.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestModel = Model.TestCase


def test_a_request_beyond_all_memory_does_not_wrap_around():
    allocator = testing.RangeAllocator(GRANULE)
    allocator.add_block(GRANULE)
    assert allocator.try_acquire(2**64 - 1) is None


def test_guards_of_one_stream_merge_to_the_latest():
    allocator = testing.RangeAllocator(GRANULE)
    allocator.add_block(2 * GRANULE)
    first, second = allocator.try_acquire(GRANULE)[0], allocator.try_acquire(GRANULE)[0]
    allocator.release(first, [(1, 5), (2, 0)])
    allocator.release(second, [(1, 3), (3, 7)])
    _, guards = allocator.try_acquire(2 * GRANULE)
    assert sorted(guards) == [(1, 5), (3, 7)]


def test_what_is_left_of_a_range_keeps_its_guards():
    allocator = testing.RangeAllocator(GRANULE)
    allocator.add_block(3 * GRANULE)
    whole = allocator.try_acquire(3 * GRANULE)[0]
    allocator.release(whole, [(1, 5)])
    for _ in range(3):
        assert allocator.try_acquire(GRANULE)[1] == [(1, 5)]


@pytest.mark.parametrize("nbytes", [0, GRANULE + 1])
def test_a_block_is_a_multiple_of_the_granularity(nbytes):
    with pytest.raises(RuntimeError, match="not a multiple of the granularity"):
        testing.RangeAllocator(GRANULE).add_block(nbytes)
