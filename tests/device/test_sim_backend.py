"""The simulated device finds each kind of missing wait, in whatever order copies run, and passes right programs."""

from collections.abc import Iterator

import pytest

pytest.importorskip("torchoffload._C_testing", reason="the simulated device is in the test build alone")

from sim_program import NBYTES, Program, control, expect_race, read, run_in_thread, simulated_program
from simulated import RaceError, Simulation


@pytest.fixture(params=[("late", 0), ("early", 0), *[("seeded", seed) for seed in range(8)]], ids=str)
def simulation(request: pytest.FixtureRequest) -> Iterator[Simulation]:
    with simulated_program(*request.param) as running:
        yield running


# Right programs


def test_round_trips_that_reuse_source_buffer_and_slot_bring_the_bytes_back(simulation):
    program = Program()
    for value in range(1, 40):
        assert program.round_trip(slot=value % 2, value=value) == bytes([value]) * NBYTES


def test_many_records_in_flight_come_back_in_reverse_order(simulation):
    program = Program()
    offloaded = []
    for value in range(8):
        source = program.make_source(value)
        program.pack(source)
        program.next_operator()
        offloaded.append((source, program.copy_out(source, slot=value)))
    for source, point in offloaded:
        program.drop_source(source, point)
    for value in reversed(range(8)):
        buffer, reloaded = program.copy_in(value, offloaded[value][1])
        assert program.unpack(buffer, reloaded) == bytes([value]) * NBYTES


def test_copies_on_the_compute_stream_need_no_wait(simulation):
    program = Program()
    source = program.make_source(3)
    program.pack(source)
    program.next_operator()
    program.seam.copy_out(program.host.slot(0), source.address, NBYTES, program.compute_stream)
    assert program.host.bytes_at(0) == bytes([3]) * NBYTES
    source.free()
    buffer = program.seam.allocate(NBYTES, 0)
    program.seam.copy_in(buffer.address, program.host.slot(0), NBYTES, program.compute_stream)
    program.seam.saw_unpack(buffer.address, NBYTES, program.compute_stream)
    assert read(buffer.address) == bytes([3]) * NBYTES


def test_an_unpack_may_use_the_source_while_its_copy_is_in_flight(simulation):
    program = Program()
    source, offloaded = program.offload()
    program.seam.saw_unpack(source.address, NBYTES, program.compute_stream)
    program.drop_source(source, offloaded)


def test_two_records_of_one_storage_do_not_race_with_each_others_packs(simulation):
    program = Program()
    source = program.make_source()
    program.pack(source)
    program.next_operator()
    first = program.copy_out(source, 0)
    program.pack(source)  # for another tape, with the first copy in flight
    program.next_operator()
    second = program.copy_out(source, 1)
    program.seam.wait(program.compute_stream, first)
    program.drop_source(source, second)


def test_a_storage_packed_on_two_streams_is_copied_after_one_of_the_packs(simulation):
    program = Program()
    other = simulation.new_stream().stream
    source = program.make_source()
    block_users = (program.compute_stream, other)
    control.make_stream_wait_stream(other, program.compute_stream)
    points = []
    for stream in block_users:
        program.pack(source, stream)
    program.next_operator()
    for slot, stream in enumerate(block_users):
        points.append(program.copy_out(source, slot, packed_on=stream))
    program.seam.note_use(source, other)
    for point in points:
        program.seam.wait(program.compute_stream, point)
    source.free()


def test_a_host_wait_orders_everything_after_it(simulation):
    program = Program("compute waits for offload")
    source, offloaded = program.offload(value=9)
    program.seam.synchronize(offloaded)
    assert program.host.bytes_at(0) == bytes([9]) * NBYTES
    program.drop_source(source, offloaded)


def test_a_slot_may_be_handed_to_another_device_that_waits_for_its_guards(simulation):
    first, second = Program(device=0), Program(device=1)
    second.host = first.host
    first.round_trip(value=1)
    second.guards = first.guards
    with simulation.device(1):
        assert second.round_trip(value=2) == bytes([2]) * NBYTES


# Each missing wait


def test_r1_a_copy_inside_the_operator_that_packs(simulation):
    program = Program()
    source = program.make_source()
    program.pack(source)
    with expect_race(
        simulation,
        "operator writes source @ compute_stream[0]",
        "copy out reads source @ offload_stream[0]",
        "has not ended before",
    ):
        program.copy_out(source, 0)
    program.next_operator()


def test_r1_holds_with_copies_on_the_compute_stream(simulation):
    program = Program()
    source = program.make_source()
    program.pack(source)
    with expect_race(
        simulation,
        "operator writes source @ compute_stream[0]",
        "copy out reads source @ compute_stream[0]",
        "has not ended before",
    ):
        program.seam.copy_out(program.host.slot(0), source.address, NBYTES, program.compute_stream)


def test_r1_a_point_recorded_inside_the_operator_is_too_early(simulation):
    program = Program("offload waits for compute")
    source = program.make_source()
    program.pack(source)
    program.seam.wait(program.offload_stream, program.seam.record(program.compute_stream))
    program.next_operator()
    with expect_race(
        simulation, "operator writes source @ compute_stream[0]", "copy out reads source @ offload_stream[0]"
    ):
        program.copy_out(source, 0)


def test_r1_an_operator_ends_when_its_context_is_left(simulation):
    program = Program()
    source = program.make_source()
    program.pack(source)
    program.seam.saw_operators_end()
    program.copy_out(source, 0)


def test_r1_another_threads_operator_is_open_until_that_thread_says_otherwise(simulation):
    program = Program()
    source = program.make_source()
    program.pack(source)

    def copy_elsewhere() -> None:
        control.set_sequence_number(999)
        with expect_race(
            simulation,
            "operator writes source @ compute_stream[0]",
            "copy out reads source @ offload_stream[0]",
            "has not ended before",
        ):
            program.copy_out(source, 0)

    run_in_thread(copy_elsewhere)


def test_r2_offload_stream_does_not_wait_for_compute(simulation):
    with expect_race(
        simulation, "operator writes source @ compute_stream[0]", "copy out reads source @ offload_stream[0]"
    ):
        Program("offload waits for compute").round_trip()


def test_r2_offload_stream_waits_for_a_stream_that_is_not_the_packs(simulation):
    program = Program()
    side = simulation.new_stream().stream
    source = program.make_source()
    control.make_stream_wait_stream(side, program.compute_stream)
    program.pack(source, side)
    program.next_operator()
    with expect_race(
        simulation, "operator writes source @ compute_stream[0]#2", "copy out reads source @ offload_stream[0]"
    ):
        program.copy_out(source, 0)


def test_r3_source_freed_with_its_copy_in_flight(simulation):
    program = Program("compute waits for offload")
    with expect_race(
        simulation, "copy out reads source @ offload_stream[0]", "source memory is freed @ compute_stream[0]"
    ):
        program.round_trip()


def test_r3_source_packed_on_a_stream_that_its_allocator_was_not_told_of(simulation):
    program = Program()
    side = simulation.new_stream().stream
    source = program.make_source()
    control.make_stream_wait_stream(side, program.compute_stream)
    program.pack(source, side)
    program.next_operator()
    with expect_race(
        simulation, "operator writes source @ compute_stream[0]#2", "source memory is freed @ compute_stream[0]"
    ):
        source.free()
        program.seam.record(program.compute_stream)


def test_r3_note_use_makes_the_same_program_right(simulation):
    program = Program()
    side = simulation.new_stream().stream
    source = program.make_source()
    control.make_stream_wait_stream(side, program.compute_stream)
    program.pack(source, side)
    program.seam.note_use(source, side)
    program.next_operator()
    source.free()


def test_r3_buffer_unpacked_on_a_stream_that_its_allocator_was_not_told_of(simulation):
    program = Program()
    side = simulation.new_stream().stream
    source, offloaded = program.offload()
    buffer, reloaded = program.copy_in(0, offloaded)
    program.seam.wait(program.compute_stream, reloaded)
    program.unpack(buffer, reloaded, consumer=side)
    with expect_race(
        simulation, "unpack reads buffer @ compute_stream[0]#2", "buffer memory is freed @ compute_stream[0]"
    ):
        buffer.free()
        program.seam.record(program.compute_stream)
    program.drop_source(source, offloaded)


def test_r5_slot_written_while_it_is_read(simulation):
    program = Program()
    program.round_trip()
    program.guards[0] = program.guards[0][:1]  # without the reload's
    source = program.make_source()
    program.pack(source)
    program.next_operator()
    # The compute stream waited for that reload before the second pack: only a second buffer's reload is unordered.
    offloaded = program.copy_out(source, 0)
    program.copy_in(0, offloaded)
    second = program.make_source()
    program.pack(second)
    program.next_operator()
    with expect_race(simulation, "copy in reads slot @ reload_stream[0]", "copy out writes slot @ offload_stream[0]"):
        program.copy_out(second, 0)


def test_r5_slot_written_twice_by_two_devices(simulation):
    first, second = Program(device=0), Program(device=1)
    source = first.make_source()
    first.pack(source)
    first.next_operator()
    first.copy_out(source, 0)
    second.host = first.host
    with simulation.device(1):
        other = second.make_source()
        second.pack(other)
        second.next_operator()
        with expect_race(
            simulation, "copy out writes slot @ offload_stream[0]", "copy out writes slot @ offload_stream[1]"
        ):
            second.copy_out(other, 0)


def test_r6_buffer_written_before_its_memory_is_the_buffers(simulation):
    program = Program("reload waits for compute")
    _source, offloaded = program.offload()
    with expect_race(
        simulation, "buffer memory is allocated @ compute_stream[0]", "copy in writes buffer @ reload_stream[0]"
    ):
        program.copy_in(0, offloaded)


def test_r6_slot_read_before_it_is_written(simulation):
    program = Program("reload waits for offload")
    _source, offloaded = program.offload()
    with expect_race(simulation, "copy out writes slot @ offload_stream[0]", "copy in reads slot @ reload_stream[0]"):
        program.copy_in(0, offloaded)


def test_r7_consumer_reads_before_the_reload_has_ended(simulation):
    with expect_race(simulation, "copy in writes buffer @ reload_stream[0]", "unpack reads buffer @ compute_stream[0]"):
        Program("consumer waits for reload").round_trip()


def test_r7_the_stream_that_waited_is_not_the_consumer(simulation):
    program = Program()
    side = simulation.new_stream().stream
    _source, offloaded = program.offload()
    buffer, reloaded = program.copy_in(0, offloaded)
    program.seam.wait(program.compute_stream, reloaded)
    with expect_race(
        simulation, "copy in writes buffer @ reload_stream[0]", "unpack reads buffer @ compute_stream[0]#2"
    ):
        program.seam.saw_unpack(buffer.address, NBYTES, side)


def test_r9_buffer_dropped_with_its_reload_in_flight(simulation):
    program = Program()
    _source, offloaded = program.offload()
    buffer, _reloaded = program.copy_in(0, offloaded)
    with expect_race(
        simulation, "copy in writes buffer @ reload_stream[0]", "buffer memory is freed @ compute_stream[0]"
    ):
        buffer.free()
        program.seam.record(program.compute_stream)


def test_r13_host_memory_released_with_a_copy_in_flight(simulation):
    program = Program()
    _source, offloaded = program.offload()
    program.seam.wait(program.compute_stream, offloaded)  # orders a stream, not the host
    control.unregister_host_memory(program.host.address)
    with pytest.raises(RaceError, match=r'"copy out writes slot" on offload_.* "slot memory is released" on the host'):
        program.seam.record(program.compute_stream)
    simulation.clear_races()


def test_r13_host_memory_released_after_a_host_wait(simulation):
    program = Program()
    source = program.make_source()
    program.pack(source)
    program.next_operator()
    program.seam.synchronize(program.copy_out(source, 0))
    control.unregister_host_memory(program.host.address)


def test_a_copy_of_freed_memory(simulation):
    program = Program()
    source = program.make_source()
    address = source.address
    source.free()
    with pytest.raises(RaceError, match=r'"copy out reads source" on offload_stream.* memory that is not allocated'):
        program.seam.copy_out(program.host.slot(0), address, NBYTES, program.offload_stream)
    simulation.clear_races()
