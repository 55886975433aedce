"""SpillFile: what is written comes back, leaves memory, and every failure says where and why."""

import ctypes
import errno
import fcntl
import mmap
import os
import random
import resource
import stat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchoffload._contexts.options import is_in_ram

testing = pytest.importorskip("torchoffload._C_testing", reason="it is reached through the test build alone").testing

KIB = 1 << 10
MIB = 1 << 20


@pytest.fixture(autouse=True)
def _system_calls_that_work():
    testing.clear_io_faults()
    yield
    testing.clear_io_faults()


@pytest.fixture(params=["direct", "cached"])
def spill_file(request, tmp_path):
    """One of each way to do I/O; a refused O_DIRECT shows at the first transfer."""
    file = testing.SpillFile(str(tmp_path))
    if request.param == "cached":
        refuse_direct_io(file)
    elif not file.uses_direct_io:
        pytest.skip("this file system has no O_DIRECT")
    return file


def refuse_direct_io(file):
    testing.inject_io_fault("pwrite", errno=errno.EINVAL, times=1)
    slot = acquire(file, 1)
    assert file.write(slot, b"x") == ""
    file.release(slot)
    testing.clear_io_faults()
    assert not file.uses_direct_io


def acquire(file, nbytes):
    file.grow(nbytes)
    return file.try_acquire(nbytes)[0]


def descriptors(directory):
    """The open descriptors of spill files in `directory`."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:  # the listing's own
            continue
        if target.startswith(str(directory)):
            found.append(int(fd))
    return found


def resident_bytes(fd):
    """How much of a file is in memory."""
    size = os.fstat(fd).st_size
    with mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE) as mapped:
        pages = (ctypes.c_ubyte * (size // mmap.PAGESIZE))()
        first_byte = ctypes.c_char.from_buffer(mapped)
        address = ctypes.addressof(first_byte)
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), pages) == 0
        del first_byte
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


@pytest.mark.parametrize("nbytes", [0, 1, 511, 4096, 4097, 3 * MIB + 5, 4 * MIB, 9 * MIB + 1])
def test_what_is_written_comes_back(spill_file, nbytes):
    source = random.Random(nbytes).randbytes(nbytes)
    slot = acquire(spill_file, nbytes)
    assert spill_file.write(slot, source) == ""
    assert spill_file.read(slot, nbytes) == (source, "")


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 300 * KIB), max_size=20), st.integers(0, 2**32))
def test_slots_do_not_touch_each_other(tmp_path_factory, sizes, seed):
    file = testing.SpillFile(str(tmp_path_factory.mktemp("spill")))
    rng = random.Random(seed)
    written = []
    for nbytes in sizes:
        slot, source = acquire(file, nbytes), rng.randbytes(nbytes)
        assert file.write(slot, source) == ""
        written.append((slot, source))
        if rng.random() < 0.3:
            file.release(written.pop(rng.randrange(len(written)))[0])
        if rng.random() < 0.2:
            file.trim()
        file.check_invariants()
    for slot, source in written:
        assert slot.offset % 4096 == slot.nbytes % 4096 == 0
        assert file.read(slot, len(source)) == (source, "")


def test_the_file_is_unlinked_private_and_closed_on_exec(tmp_path):
    before = os.listdir(tmp_path)
    file = testing.SpillFile(str(tmp_path))
    assert os.listdir(tmp_path) == before == []
    opened = descriptors(tmp_path)
    assert opened
    for fd in opened:
        assert stat.S_IMODE(os.fstat(fd).st_mode) == 0o600
        assert os.fstat(fd).st_nlink == 0
        assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    del file
    assert descriptors(tmp_path) == []


def test_written_and_read_bytes_leave_memory(spill_file, tmp_path):
    if is_in_ram(str(tmp_path)):
        pytest.skip("the directory rests in memory")
    nbytes = 8 * MIB
    slot = acquire(spill_file, nbytes)
    fd = descriptors(tmp_path)[0]
    assert spill_file.write(slot, os.urandom(nbytes)) == ""
    assert resident_bytes(fd) == 0
    assert spill_file.read(slot, nbytes)[1] == ""
    assert resident_bytes(fd) == 0


def test_disk_is_reserved_when_the_file_grows(tmp_path):
    file = testing.SpillFile(str(tmp_path))
    file.grow(3 * MIB)
    assert file.capacity_bytes == 3 * MIB
    assert os.fstat(descriptors(tmp_path)[0]).st_blocks * 512 >= 3 * MIB


def test_trim_waits_for_the_guards_and_gives_the_disk_back(tmp_path):
    file = testing.SpillFile(str(tmp_path))
    fd = descriptors(tmp_path)[0]
    first, kept, last = (acquire(file, 5 * MIB) for _ in range(3))
    assert file.write(kept, b"kept" * MIB) == ""
    file.release(first, [(3, 1)])
    file.release(last, [(3, 2), (4, 5)])
    assert file.trim() == 10 * MIB
    assert sorted(file.waited) == [(3, 1), (3, 2), (4, 5)]
    assert file.capacity_bytes == 5 * MIB
    assert os.fstat(fd).st_size == 10 * MIB
    assert os.fstat(fd).st_blocks * 512 < 6 * MIB
    assert file.read(kept, 4 * MIB) == (b"kept" * MIB, "")
    again = acquire(file, 5 * MIB)
    assert os.fstat(fd).st_size == 10 * MIB, "the hole is used first"
    assert file.write(again, b"x" * 5 * MIB) == ""
    assert file.read(kept, 4 * MIB) == (b"kept" * MIB, "")
    file.check_invariants()


def test_a_hole_that_cannot_be_punched_is_not_counted_as_given_back(tmp_path):
    file = testing.SpillFile(str(tmp_path))
    first, kept = acquire(file, 5 * MIB), acquire(file, 5 * MIB)
    file.release(first)
    testing.inject_io_fault("punch_hole", errno=errno.EOPNOTSUPP)
    assert file.trim() == 0
    assert file.write(kept, b"x") == ""


def test_a_full_disk_is_a_full_store_that_names_the_directory_and_the_bytes(tmp_path):
    file = testing.SpillFile(str(tmp_path))
    testing.inject_io_fault("reserve", errno=errno.ENOSPC)
    with pytest.raises(
        testing.StoreFull, match=f"cannot reserve 8192 bytes .* in '{tmp_path}': No space left on device"
    ):
        file.grow(5000)
    assert (file.capacity_bytes, file.grow_count) == (0, 0)


def test_a_disk_without_room_for_a_chunk_gives_what_is_needed(tmp_path):
    file = testing.SpillFile(str(tmp_path))
    testing.inject_io_fault("reserve", max_bytes=64 * KIB)
    file.grow(5000)
    assert file.capacity_bytes == 8192


def test_a_file_size_limit_is_a_full_store(tmp_path):
    file = testing.SpillFile(str(tmp_path))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * KIB, before[1]))
    try:
        with pytest.raises(testing.StoreFull, match="File too large"):
            file.grow(MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    slot = acquire(file, MIB)
    assert file.write(slot, b"x" * MIB) == ""


def test_interrupted_and_short_transfers_are_continued(spill_file):
    source = os.urandom(MIB + 5)
    slot = acquire(spill_file, len(source))
    for call in ("pwrite", "pread"):
        testing.inject_io_fault(call, errno=errno.EINTR, after=1, times=3, max_bytes=64 * KIB)
    assert spill_file.write(slot, source) == ""
    assert spill_file.read(slot, len(source)) == (source, "")
    assert testing.io_call_count("pwrite") >= 16 + 3
    assert testing.io_call_count("pread") >= 16 + 3


def test_a_transfer_cut_where_direct_io_cannot_go_on_falls_back_to_the_page_cache(tmp_path):
    file = testing.SpillFile(str(tmp_path))
    source = os.urandom(100_001)
    slot = acquire(file, len(source))
    testing.inject_io_fault("pwrite", max_bytes=1001)
    assert file.write(slot, source) == ""
    assert not file.uses_direct_io
    testing.inject_io_fault("pread", max_bytes=777)
    assert file.read(slot, len(source)) == (source, "")


def test_direct_reads_that_are_refused_fall_back_to_the_page_cache(tmp_path):
    file = testing.SpillFile(str(tmp_path))
    if not file.uses_direct_io:
        pytest.skip("this file system has no O_DIRECT")
    slot = acquire(file, 4096)
    assert file.write(slot, b"y" * 4096) == ""
    testing.inject_io_fault("pread", errno=errno.EINVAL, times=1)
    assert file.read(slot, 4096) == (b"y" * 4096, "")
    assert not file.uses_direct_io


def test_a_failed_write_says_where_how_far_and_why(spill_file):
    slot = acquire(spill_file, 256 * KIB)
    testing.inject_io_fault("pwrite", errno=errno.EIO, after=1, max_bytes=64 * KIB)
    failure = spill_file.write(slot, b"x" * 256 * KIB)
    assert failure.startswith(f"write of 262144 bytes at offset {slot.offset} of the spill file in '/")
    assert failure.endswith("failed after 65536 bytes: Input/output error")
    testing.clear_io_faults()
    assert spill_file.write(slot, b"x" * 256 * KIB) == "", "the next one works"


def test_a_failed_read_says_where_how_far_and_why(spill_file):
    acquire(spill_file, 4096)
    slot = acquire(spill_file, 256 * KIB)
    assert spill_file.write(slot, b"x" * 256 * KIB) == ""
    testing.inject_io_fault("pread", errno=errno.EIO, after=2, max_bytes=64 * KIB)
    _, failure = spill_file.read(slot, 256 * KIB)
    assert failure.startswith(f"read of 262144 bytes at offset {slot.offset} of the spill file in '/")
    assert failure.endswith("failed after 131072 bytes: Input/output error")


def test_a_file_that_was_cut_off_is_a_failed_read(spill_file, tmp_path):
    slot = acquire(spill_file, MIB)
    assert spill_file.write(slot, b"x" * MIB) == ""
    os.ftruncate(descriptors(tmp_path)[0], slot.offset + 64 * KIB)
    _, failure = spill_file.read(slot, MIB)
    assert failure.endswith("failed after 65536 bytes: end of file")


def test_a_failed_write_back_is_a_failed_write(tmp_path):
    file = testing.SpillFile(str(tmp_path))
    refuse_direct_io(file)
    slot = acquire(file, 4096)
    testing.inject_io_fault("write_back", errno=errno.EIO)
    assert file.write(slot, b"x").endswith("Input/output error")
    testing.inject_io_fault("write_back", errno=errno.ENOSYS)
    assert file.write(slot, b"x") == "", "fdatasync serves where sync_file_range is missing"


def test_a_transfer_beyond_its_slot_is_our_bug(tmp_path):
    file = testing.SpillFile(str(tmp_path))
    slot = acquire(file, 4096)
    with pytest.raises(RuntimeError, match="4097 bytes in a slot of 4096"):
        file.write(slot, b"x" * 4097)


@pytest.mark.parametrize(("make", "reason"), [("missing", "No such file"), ("file", "Not a directory")])
def test_a_directory_that_cannot_be_used_is_named(tmp_path, make, reason):
    path = tmp_path / make
    if make == "file":
        path.write_text("")
    with pytest.raises(RuntimeError, match=f"cannot make a spill file in '{path}': {reason}"):
        testing.SpillFile(str(path))


def test_memory_backed_directories_are_recognised():
    assert not is_in_ram("/proc")
    assert not is_in_ram("/no such directory")
    with open("/proc/mounts") as mounts:
        for kind, where in ((line.split()[2], line.split()[1]) for line in mounts):
            if where == "/dev/shm":
                assert is_in_ram(where) == (kind == "tmpfs")


def test_a_forked_child_leaves_its_parent_s_file_alone(tmp_path):
    file = testing.SpillFile(str(tmp_path))
    slot, idle = acquire(file, 4096), acquire(file, 8 * MIB)
    assert file.write(slot, b"p" * 4096) == ""
    file.release(idle)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            assert "belongs to its parent" in file.write(slot, b"c" * 4096)
            assert "belongs to its parent" in file.read(slot, 4096)[1]
            assert file.try_acquire(1) is None
            with pytest.raises(testing.StoreFull, match="belongs to its parent"):
                file.grow(1)
            file.release(slot)
            assert file.trim() == 0
            mine = testing.SpillFile(str(tmp_path))
            assert mine.write(acquire(mine, 5), b"child") == ""
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert file.read(slot, 4096) == (b"p" * 4096, "")
