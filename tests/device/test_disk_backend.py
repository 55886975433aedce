"""DiskBackend: streams, points and failures, with a disk made slow or broken on purpose."""

import ctypes
import errno
import os
import random
import threading
import time

import pytest

testing = pytest.importorskip("torchoffload._C_testing", reason="it is reached through the test build alone").testing

KIB = 1 << 10


@pytest.fixture(autouse=True)
def _system_calls_that_work():
    testing.clear_io_faults()
    yield
    testing.clear_io_faults()


@pytest.fixture
def backend(tmp_path):
    return testing.DiskBackend(str(tmp_path))


class Memory:
    """Bytes with an address."""

    def __init__(self, content):
        self.nbytes = len(content)
        self.buffer = ctypes.create_string_buffer(content, self.nbytes)
        self.address = ctypes.addressof(self.buffer)

    @property
    def content(self):
        return self.buffer.raw


def offload(backend, content, slot=None):
    """A slot, the source that must stay until the point, and the point."""
    source = Memory(content)
    if slot is None:
        slot, guards = backend.acquire(source.nbytes)
        for guard in guards:
            backend.wait(backend.offload_stream, guard)
    backend.copy_out(slot, source.address, source.nbytes, backend.offload_stream)
    return slot, source, backend.record(backend.offload_stream)


def reload(backend, slot, nbytes, after):
    backend.wait(backend.reload_stream, after)
    target = Memory(b"\xff" * nbytes)
    backend.copy_in(target.address, slot, nbytes, backend.reload_stream)
    return target, backend.record(backend.reload_stream)


def test_bytes_go_out_and_come_back(backend):
    contents = [os.urandom(nbytes) for nbytes in (1, 4096, 100_001, 1 << 20)]
    offloaded = [offload(backend, content) for content in contents]
    reloaded = [reload(backend, slot, source.nbytes, point) for slot, source, point in offloaded]
    for content, (target, point) in zip(contents, reloaded, strict=True):
        backend.wait(backend.host, point)
        assert backend.failure(point) == ""
        assert target.content == content


def test_streams_have_ids_of_their_own(backend, tmp_path):
    other = testing.DiskBackend(str(tmp_path))
    streams = [made for each in (backend, other) for made in (each.host, each.offload_stream, each.reload_stream)]
    assert len(set(streams)) == 6


def test_points_count_the_copies_submitted_and_the_host_s_are_always_reached(backend):
    assert backend.record(backend.offload_stream) == (backend.offload_stream, 0)
    assert backend.record(backend.host) == (backend.host, 0)
    kept = [offload(backend, b"x") for _ in range(3)]
    assert [point for _, _, point in kept] == [(backend.offload_stream, serial) for serial in (1, 2, 3)]
    assert backend.is_reached(backend.record(backend.host))
    backend.synchronize(kept[-1][2])
    assert all(backend.is_reached(point) for _, _, point in kept)


def test_submitting_returns_before_the_disk_is_done(backend):
    testing.inject_io_fault("pwrite", delay_us=100_000)
    _, source, point = offload(backend, b"x" * 4096)
    assert not backend.is_reached(point)
    backend.synchronize(point)
    assert backend.is_reached(point)
    assert source.nbytes == 4096


def test_a_point_is_reached_only_when_all_before_it_are_done(tmp_path):
    """The first copy is far longer than the second, and each has a thread."""
    backend = testing.DiskBackend(str(tmp_path), thread_count=2)
    slots = [backend.acquire(nbytes)[0] for nbytes in (256 * KIB, 4 * KIB)]
    testing.inject_io_fault("pwrite", delay_us=5_000, max_bytes=8 * KIB)
    _, long_source, long_point = offload(backend, b"l" * 256 * KIB, slots[0])
    _, short_source, short_point = offload(backend, b"s" * 4 * KIB, slots[1])
    while not backend.is_reached(short_point):
        time.sleep(0.001)
    assert backend.is_reached(long_point)
    assert (long_source.nbytes, short_source.nbytes) == (256 * KIB, 4 * KIB)


def test_a_reload_waits_for_the_offload_it_was_told_to_run_after(backend):
    testing.inject_io_fault("pwrite", delay_us=50_000)
    content = os.urandom(64 * KIB)
    slot, _source, point = offload(backend, content)
    target, reloaded = reload(backend, slot, 64 * KIB, point)
    backend.synchronize(reloaded)
    assert backend.is_reached(point)
    assert target.content == content


def test_what_is_submitted_later_waits_too(tmp_path):
    """As on any stream: not the next copy alone runs after the point."""
    backend = testing.DiskBackend(str(tmp_path), thread_count=3)
    quick, *_ = backend.acquire(4096)
    _, source, point = offload(backend, b"q" * 4096, quick)
    backend.synchronize(point)
    testing.inject_io_fault("pwrite", delay_us=50_000)
    slot, slow_source, slow = offload(backend, b"s" * 4096)
    first = reload(backend, slot, 4096, slow)
    second_target = Memory(b"\xff" * 4096)
    backend.copy_in(second_target.address, quick, 4096, backend.reload_stream)
    time.sleep(0.01)
    assert second_target.content == b"\xff" * 4096
    backend.synchronize(backend.record(backend.reload_stream))
    assert (first[0].content, second_target.content) == (b"s" * 4096, b"q" * 4096)
    assert source.nbytes == slow_source.nbytes


@pytest.mark.parametrize("round_number", range(5))
def test_two_copies_of_one_stream_into_one_slot_keep_their_order(tmp_path, round_number):
    backend = testing.DiskBackend(str(tmp_path), thread_count=4)
    slot, _ = backend.acquire(64 * KIB)
    testing.inject_io_fault("pwrite", delay_us=300, max_bytes=8 * KIB)
    sources = [offload(backend, bytes([byte]) * (64 * KIB if byte == 0 else 4 * KIB), slot)[1] for byte in range(8)]
    testing.inject_io_fault("pwrite", delay_us=0)
    target, point = reload(backend, slot, 64 * KIB, backend.record(backend.offload_stream))
    backend.synchronize(point)
    assert target.content == b"\x07" * 4 * KIB + b"\x00" * 60 * KIB
    assert len(sources) == 8


def test_a_failure_belongs_to_its_point_and_is_told_as_often_as_asked(backend):
    slot, _ = backend.acquire(4096)
    testing.inject_io_fault("pwrite", errno=errno.EIO)
    _, _source, failed = offload(backend, b"x" * 4096, slot)
    backend.synchronize(failed)
    testing.clear_io_faults()
    _, _other, fine = offload(backend, b"x" * 4096, slot)
    backend.synchronize(fine)
    for _ in range(2):
        assert "Input/output error" in backend.failure(failed)
    assert backend.failure(fine) == ""


def test_a_failure_that_nobody_asks_for_any_more_is_forgotten(backend):
    slot, _ = backend.acquire(4096)
    testing.inject_io_fault("pwrite", errno=errno.EIO, times=1000, delay_us=20_000)
    kept = [offload(backend, b"x" * 4096, slot) for _ in range(3)]
    points = [point for _, _, point in kept]
    backend.forget(points[1])  # before it is done
    backend.synchronize(points[2])
    backend.forget(points[2])  # after
    backend.forget((backend.host, 0))
    assert [bool(backend.failure(point)) for point in points] == [True, False, False]


def test_a_failed_read_is_told(backend):
    slot, _source, point = offload(backend, b"x" * 4096)
    backend.synchronize(point)
    testing.inject_io_fault("pread", errno=errno.EIO)
    _target, reloaded = reload(backend, slot, 4096, point)
    backend.synchronize(reloaded)
    assert "read of 4096 bytes at offset 0" in backend.failure(reloaded)


def test_copies_on_the_host_s_stream_are_done_on_return(backend):
    slot, _ = backend.acquire(4096)
    source, target = Memory(b"h" * 4096), Memory(b"\xff" * 4096)
    backend.copy_out(slot, source.address, 4096, backend.host)
    backend.copy_in(target.address, slot, 4096, backend.host)
    point = backend.record(backend.host)
    assert target.content == source.content
    assert point == (backend.host, 2)
    assert backend.is_reached(point)
    assert backend.failure(point) == ""
    testing.inject_io_fault("pread", errno=errno.EIO)
    backend.copy_in(target.address, slot, 4096, backend.host)
    assert "Input/output error" in backend.failure(backend.record(backend.host))


def test_waits_for_what_was_not_submitted_and_for_strangers_are_our_bugs(backend):
    with pytest.raises(RuntimeError, match="not submitted"):
        backend.wait(backend.host, (backend.offload_stream, 1))
    with pytest.raises(RuntimeError, match="not submitted"):
        backend.wait(backend.reload_stream, (backend.offload_stream, 1))
    with pytest.raises(RuntimeError, match="none of its own"):
        backend.wait(backend.host, (10**6, 1))


@pytest.mark.parametrize("modulo", [0, 64, 176, 511])
@pytest.mark.parametrize("nbytes", [1, 4096, 10_000_001])
def test_memory_has_the_address_that_was_asked_for(backend, nbytes, modulo):
    kept = [backend.allocate(nbytes, modulo) for _ in range(3)]
    for memory in kept:
        assert memory.address % 512 == modulo
        ctypes.memset(memory.address, 1, nbytes)


def test_no_bytes_need_no_memory(backend):
    assert backend.allocate(0, 64).address == 0


def test_trim_waits_for_the_copies_that_guard_a_slot(backend):
    testing.inject_io_fault("pwrite", delay_us=50_000)
    slot, source, point = offload(backend, b"x" * 4096)
    backend.release(slot, [point])
    assert backend.trim() > 0
    assert backend.is_reached(point)
    assert source.nbytes == 4096


def test_threads_start_with_the_first_copy_and_take_no_signals(tmp_path):
    backend = testing.DiskBackend(str(tmp_path), thread_count=2)
    before = set(os.listdir("/proc/self/task"))
    slot, _source, point = offload(backend, b"x")
    backend.synchronize(point)
    started = set(os.listdir("/proc/self/task")) - before
    assert len(started) == 2
    for task in started:
        with open(f"/proc/self/task/{task}/status") as status:
            fields = dict(line.split(":", 1) for line in status)
        assert fields["Name"].strip() == "offload-io"
        blocked = int(fields["SigBlk"], 16)
        assert all(blocked & 1 << (number - 1) for number in (2, 10, 15))  # SIGINT, SIGUSR1, SIGTERM
    assert slot.nbytes == 4096


def test_many_hosts_and_random_copies(tmp_path):
    backend = testing.DiskBackend(str(tmp_path), thread_count=3)
    testing.inject_io_fault("pwrite", delay_us=200)
    wrong = []
    lock = threading.Lock()  # in the engine, the GIL: acquiring a slot and submitting its copy are one operation

    def host(seed):
        rng = random.Random(seed)
        for _ in range(40):
            content = rng.randbytes(rng.randrange(1, 64 * KIB))
            with lock:
                slot, source, point = offload(backend, content)
                if rng.random() < 0.3:
                    backend.release(slot, [point])
                    slot = None
            if slot is None:
                backend.synchronize(point)
                continue
            with lock:
                target, reloaded = reload(backend, slot, source.nbytes, point)
                backend.release(slot, [reloaded])
            backend.synchronize(reloaded)
            if target.content != content:
                wrong.append((seed, point))

    threads = [threading.Thread(target=host, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_forked_child_is_told_so_and_a_new_backend_works(backend, tmp_path):
    slot, _source, point = offload(backend, b"x" * 4096)
    testing.inject_io_fault("pwrite", delay_us=50_000)
    _, _late_source, late = offload(backend, b"x" * 4096, slot)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            for attempt in (
                lambda: backend.copy_in(0, slot, 4096, backend.reload_stream),
                lambda: backend.synchronize(late),
            ):
                with pytest.raises(RuntimeError, match="forked after offloading to disk had begun"):
                    attempt()
            testing.clear_io_faults()
            mine = testing.DiskBackend(str(tmp_path))
            _, _mine_source, mine_point = offload(mine, b"child")
            mine.synchronize(mine_point)
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    backend.synchronize(late)
    assert backend.is_reached(point)
