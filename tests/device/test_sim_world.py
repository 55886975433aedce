"""The simulated device as a world: when copies run, whose memory is whose, what is written down and what is refused."""

import contextlib
import gc
from collections.abc import Iterator

import pytest

pytest.importorskip("torchoffload._C_testing", reason="the simulated device is in the test build alone")

import torch

from sim_program import NBYTES, Program, control, fill, forget_programs, read, run_in_thread, simulated_program
from simulated import MODES, RaceError, Simulation, mutant, mutant_names, seam_log, simulated_device


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def simulation(mode: str) -> Iterator[Simulation]:
    with simulated_program(mode) as running:
        yield running


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    forget_programs()


# What the modes do


def test_late_copies_run_only_when_something_waits_for_them():
    with simulated_device("late") as simulation:
        program = Program()
        sources = [program.make_source(value) for value in (1, 2)]
        for source in sources:
            program.pack(source)
        program.next_operator()
        points = [program.copy_out(source, slot) for slot, source in enumerate(sources)]
        assert program.host.bytes_at(0) == bytes(NBYTES)
        program.seam.wait(program.reload_stream, points[1])
        assert program.host.bytes_at(0) == bytes(NBYTES)
        program.seam.wait(program.compute_stream, points[0])
        assert program.host.bytes_at(0) == bytes([1]) * NBYTES
        assert program.host.bytes_at(1) == bytes(NBYTES)
        program.seam.synchronize(points[1])
        assert program.host.bytes_at(1) == bytes([2]) * NBYTES
        assert simulation.queued_count() == 1  # reload_stream's own wait: nobody asked for it


def test_early_copies_run_at_once():
    with simulated_device("early") as simulation:
        program = Program()
        _source, _ = program.offload(value=5)
        assert program.host.bytes_at(0) == bytes([5]) * NBYTES
        assert simulation.queued_count() == 0


def seeded_history(seed: int) -> list[bool]:
    with simulated_device("seeded", seed=seed):
        program = Program()
        sources = [program.make_source(1) for _ in range(8)]
        for source in sources:
            program.pack(source)
        program.next_operator()
        history = []
        for slot, source in enumerate(sources):
            program.copy_out(source, slot)
            history += [program.host.bytes_at(index)[0] == 1 for index in range(8)]
        return history


def test_a_seed_gives_one_order_and_seeds_differ():
    assert seeded_history(1) == seeded_history(1)
    assert len({tuple(seeded_history(seed)) for seed in range(10)}) > 3


def test_late_mode_shows_a_missing_wait_in_the_bytes_too():
    with simulated_device("late") as simulation:
        program = Program("consumer waits for reload")
        with contextlib.suppress(RaceError):
            program.round_trip()
        buffer = program.seam.allocate(NBYTES, 64)
        assert set(read(buffer.address)) == {0xFF}
        simulation.clear_races()


def test_a_freed_block_is_poisoned_and_handed_to_the_next_of_its_size_on_its_stream(simulation):
    side = simulation.new_stream()
    first = control.allocate(NBYTES)
    address = first.address
    fill(address, 1)
    first.free()
    with simulation.stream(side):
        elsewhere = control.allocate(NBYTES)
    assert elsewhere.address != address
    second = control.allocate(NBYTES)
    assert second.address == address
    assert read(address) == b"\xff" * NBYTES


def test_a_block_that_a_queue_still_uses_is_withheld():
    with simulated_device("late"):
        program = Program()
        source, offloaded = program.offload(value=4)
        program.seam.note_use(source, program.offload_stream)
        address = source.address
        source.free()
        assert program.make_source().address != address
        program.seam.synchronize(offloaded)
        assert program.host.bytes_at(0) == bytes([4]) * NBYTES


# The world


def test_tensors_made_inside_belong_to_the_device_and_others_to_none():
    before = torch.ones(100)
    with simulated_device(devices=2) as simulation:
        inside = torch.ones(100)
        assert simulation.device_index_of(inside) == 0
        assert simulation.device_index_of(inside[10:]) == 0
        assert simulation.device_index_of(before) is None
        assert inside.untyped_storage().data_ptr() % 512 == 0
        with simulation.device(1):
            assert simulation.device_index_of(torch.ones(3)) == 1
        with simulation.stream(simulation.new_stream(1)):
            assert simulation.device_index_of(torch.ones(3)) == 1
        assert simulation.device_index_of(torch.ones(3)) == 0
        run_in_thread(lambda: _assert_on_device_0(simulation))
    assert simulation.device_index_of(inside) is None
    assert torch.equal(inside, before)
    inside.untyped_storage().resize_(8000)
    inside.resize_(0)


def _assert_on_device_0(simulation: Simulation) -> None:
    assert simulation.device_index_of(torch.ones(3)) == 0


def test_blocks_may_outlive_their_simulation_and_die_in_another():
    with simulated_device():
        tensor = torch.arange(1000)
    with simulated_device() as simulation:
        assert tensor.sum() == 499500
        assert simulation.device_index_of(tensor) is None
        del tensor
        assert simulation.allocated_bytes() == 0


def test_memory_statistics_count_blocks_in_use():
    gc.collect()
    with simulated_device() as simulation:
        tensor = torch.empty(1000, dtype=torch.uint8)
        assert simulation.allocated_bytes() == 1024
        del tensor
        assert simulation.allocated_bytes() == 0
        assert simulation.peak_bytes() == 1024


def test_a_buffer_has_the_address_modulo_that_was_asked_for(simulation):
    for modulo in (0, 1, 64, 511):
        assert control.Seam(0).allocate(100, modulo).address % 512 == modulo


def test_a_race_that_was_swallowed_is_raised_at_the_end(mode):
    with (
        pytest.raises(RaceError, match="unpack reads buffer"),
        simulated_device(mode),
        contextlib.suppress(RaceError),
    ):
        Program("consumer waits for reload").round_trip()


def test_a_race_found_in_a_free_is_raised_at_the_next_call_and_once(mode):
    with simulated_device(mode) as simulation:
        program = Program()
        source, _ = program.offload()
        source.free()
        assert len(simulation.races) == 1
        with pytest.raises(RaceError):
            program.seam.record(program.compute_stream)
        program.seam.record(program.compute_stream)
        simulation.clear_races()


def test_points_and_memory_of_an_earlier_simulation_are_harmless(mode):
    with simulated_device("late"):
        program = Program()
        source, offloaded = program.offload(value=6)
    assert program.host.bytes_at(0) == bytes([6]) * NBYTES  # what was queued ran at the end
    program.seam.wait(program.compute_stream, offloaded)
    buffer, reloaded = program.copy_in(0, offloaded)  # at rest: everything runs at once
    assert program.unpack(buffer, reloaded) == bytes([6]) * NBYTES
    with simulated_device(mode):
        program.seam.wait(program.compute_stream, offloaded)
        program.seam.synchronize(reloaded)
        source.free()
        buffer.free()


def test_what_is_remembered_stays_bounded(simulation):
    program = Program()
    kept = program.make_source()
    counts = []
    for _ in range(3):
        for _ in range(50):
            program.round_trip()
            program.pack(kept)
            program.next_operator()
        counts.append(control.access_count())
    assert counts[2] == counts[1]


def test_a_wrong_use_is_refused(simulation):
    seam = control.Seam(0)
    with pytest.raises(RuntimeError, match="running already"):
        control.start_simulation("late", 0, 1)
    with pytest.raises(ValueError, match="was never recorded"):
        seam.wait(seam.offload_stream, (seam.current_stream, 10**9))
    with pytest.raises(ValueError, match="not a simulated stream"):
        seam.record(10**6)
    with pytest.raises(ValueError, match="operators cannot run on offload_stream"):
        control.set_current_stream(seam.offload_stream)
    with pytest.raises(RuntimeError, match="do not complete in the background"):
        seam.status((seam.current_stream, 0))
    with pytest.raises(ValueError, match="no simulated device 7"):
        control.make_compute_stream(7)


def test_a_mode_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match='"late", "early" or "seeded"'):
        control.start_simulation("sometimes", 0, 1)
    assert not control.simulation_is_running()


def test_autograd_runs_on_it_and_a_block_died_before_its_next_owner(mode):
    with simulated_device(mode) as simulation:
        weight = torch.randn(64, 64, requires_grad=True)
        for _ in range(3):
            (torch.randn(8, 64) @ weight).relu().sum().backward()
        assert torch.isfinite(weight.grad).all()
        assert simulation.peak_bytes() > 0


# The log and the mutants


def test_the_seam_log_names_streams_by_role_and_points_by_order():
    with simulated_device() as simulation:
        Program().round_trip()
        program = Program()
        with seam_log() as lines:
            program.round_trip()
            side = simulation.new_stream().stream
            program.seam.wait(side, program.seam.record(program.compute_stream))
    assert lines == [
        "record compute_stream[0]@1",
        "wait offload_stream[0] <- compute_stream[0]@1",
        "copy_out offload_stream[0] 4096",
        "record offload_stream[0]@1",
        "wait compute_stream[0] <- offload_stream[0]@1",
        "allocate compute_stream[0] 4096",
        "record compute_stream[0]@2",
        "wait reload_stream[0] <- compute_stream[0]@2",
        "wait reload_stream[0] <- offload_stream[0]@1",
        "copy_in reload_stream[0] 4096",
        "record reload_stream[0]@1",
        "wait compute_stream[0] <- reload_stream[0]@1",
        "record compute_stream[0]@3",
        "wait compute_stream[0]#2 <- compute_stream[0]@3",
    ]


def test_one_program_is_logged_alike_in_every_mode():
    logs = []
    for mode in MODES:
        with simulated_device(mode), seam_log() as lines:
            Program().round_trip()
            Program().round_trip()
        logs.append(lines)
    assert logs[0] == logs[1] == logs[2]


def test_a_point_from_before_the_log_is_called_so():
    with simulated_device():
        seam = control.Seam(0)
        point = seam.record(seam.offload_stream)
        with seam_log() as lines:
            seam.wait(seam.current_stream, point)
            seam.synchronize((seam.offload_stream, 0))
    assert lines == [
        "wait compute_stream[0] <- offload_stream[0]@before",
        "synchronize offload_stream[0]@beginning",
    ]


def test_mutants_have_names_and_are_set_one_at_a_time():
    assert "OffloadWaitsForCompute" in mutant_names()
    assert len(set(mutant_names())) == len(mutant_names())
    assert all(mutant_names())
    for name in mutant_names():
        with mutant(name):
            pass
    with pytest.raises(ValueError, match="no mutant is called Nonsense"):
        control.set_mutant("Nonsense")
