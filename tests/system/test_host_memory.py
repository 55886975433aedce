"""Host memory: the parsers on made files, the whole on made trees and on the real machine."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

testing = pytest.importorskip("torchoffload._C_testing", reason="it is reached through the test build alone").testing

GIB = 1 << 30
NO_LIMIT_V1 = 9223372036854771712

MEMINFO = """MemTotal:       32000000 kB
MemFree:         1000000 kB
MemAvailable:   20000000 kB
Buffers:            1234 kB
HugePages_Total:       0
"""
CGROUP2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
CGROUP1_MOUNTS = (
    "31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n"
    "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
)


def make_tree(root, files):
    for path, text in files.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return str(root)


def v2_group(path, limit, used, inactive_file=0):
    folder = f"sys/fs/cgroup{path}"
    return {
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.current": f"{used}\n",
        f"{folder}/memory.stat": f"anon 5\nfile 7\ninactive_anon 3\ninactive_file {inactive_file}\nactive_file 9\n",
    }


def v1_group(path, limit, used, inactive_file=0):
    folder = f"sys/fs/cgroup/memory{path}"
    return {
        f"{folder}/memory.limit_in_bytes": f"{limit}\n",
        f"{folder}/memory.usage_in_bytes": f"{used}\n",
        f"{folder}/memory.stat": f"inactive_file 1\nhierarchical_memory_limit 2\ntotal_inactive_file {inactive_file}\n",
    }


def v2_tree(root, group, *groups):
    files = {"proc/meminfo": MEMINFO, "proc/self/cgroup": f"0::{group}\n", "proc/self/mountinfo": CGROUP2_MOUNT}
    for made in groups:
        files |= made
    return testing.read_host_memory(make_tree(root, files))


def limits(memory):
    return memory.limit_bytes, memory.limit_used_bytes, memory.limit_inactive_file_bytes


def test_available_comes_from_meminfo_in_bytes(tmp_path):
    memory = testing.read_host_memory(make_tree(tmp_path, {"proc/meminfo": MEMINFO}))
    assert memory.available_bytes == 20000000 * 1024
    assert limits(memory) == (None, None, None)


def test_version_2_limit_of_the_own_group(tmp_path):
    memory = v2_tree(tmp_path, "/job", v2_group("/job", 8 * GIB, 3 * GIB, GIB))
    assert limits(memory) == (8 * GIB, 3 * GIB, GIB)


def test_version_2_max_is_no_limit(tmp_path):
    memory = v2_tree(tmp_path, "/job", v2_group("/job", "max", 3 * GIB))
    assert limits(memory) == (None, None, None)


def test_version_2_the_group_that_leaves_least_room_counts_wherever_it_is(tmp_path):
    memory = v2_tree(
        tmp_path,
        "/a/b/c",
        v2_group("/a/b/c", "max", GIB),
        v2_group("/a/b", 16 * GIB, 15 * GIB),
        v2_group("/a", 8 * GIB, 4 * GIB),
    )
    assert limits(memory) == (16 * GIB, 15 * GIB, 0)


def test_a_container_that_sees_its_group_at_the_mount_point_finds_the_limit_there(tmp_path):
    memory = v2_tree(tmp_path, "/docker/0123", v2_group("", 4 * GIB, GIB))
    assert limits(memory) == (4 * GIB, GIB, 0)


def test_a_mount_of_a_group_is_seen_from_that_group(tmp_path):
    files = {
        "proc/self/cgroup": "4:memory:/docker/0123/inner\n",
        "proc/self/mountinfo": CGROUP1_MOUNTS.replace("0:32 / ", "0:32 /docker/0123 "),
        **v1_group("/inner", 4 * GIB, GIB),
        **v1_group("", 8 * GIB, 2 * GIB),
    }
    assert limits(testing.read_host_memory(make_tree(tmp_path, files))) == (4 * GIB, GIB, 0)


def test_version_1_reads_the_hierarchy_of_the_memory_controller(tmp_path):
    files = {
        "proc/self/cgroup": "5:cpu,cpuacct:/other\n4:memory:/job\n1:name=systemd:/\n0::/\n",
        "proc/self/mountinfo": CGROUP1_MOUNTS,
        **v1_group("/job", 6 * GIB, 2 * GIB, GIB),
        **v1_group("", NO_LIMIT_V1, 9 * GIB),
    }
    assert limits(testing.read_host_memory(make_tree(tmp_path, files))) == (6 * GIB, 2 * GIB, GIB)


def test_version_1_without_a_limit(tmp_path):
    files = {
        "proc/self/cgroup": "4:memory:/job\n",
        "proc/self/mountinfo": CGROUP1_MOUNTS,
        **v1_group("/job", NO_LIMIT_V1, 2 * GIB),
    }
    assert limits(testing.read_host_memory(make_tree(tmp_path, files))) == (None, None, None)


def test_without_mountinfo_the_usual_places_are_read(tmp_path):
    two = make_tree(tmp_path / "two", {"proc/self/cgroup": "0::/job\n", **v2_group("/job", GIB, 5)})
    one = make_tree(tmp_path / "one", {"proc/self/cgroup": "4:memory:/job\n", **v1_group("/job", GIB, 5)})
    assert testing.read_host_memory(two).limit_bytes == GIB
    assert testing.read_host_memory(one).limit_bytes == GIB


@pytest.mark.parametrize(
    "text", ["", "rubbish\n", "MemAvailable: lots kB\n", "MemAvailable:\n", "MemAvailable: -1 kB\n"]
)
def test_a_bad_meminfo_leaves_its_field_absent(tmp_path, text):
    memory = testing.read_host_memory(make_tree(tmp_path, {"proc/meminfo": text}))
    assert memory.available_bytes is None
    assert memory.total_bytes > 0, "sysinfo tells it"


@pytest.mark.parametrize("damage", ["memory.max", "memory.current"])
@pytest.mark.parametrize("text", ["", "rubbish", "-5\n", "99999999999999999999999\n", "12 34\n"])
def test_a_bad_group_file_leaves_the_limit_absent(tmp_path, damage, text):
    group = v2_group("/job", GIB, 5)
    group[f"sys/fs/cgroup/job/{damage}"] = text
    assert limits(v2_tree(tmp_path, "/job", group)) == (None, None, None)


def test_a_bad_stat_leaves_only_its_field_absent(tmp_path):
    group = v2_group("/job", GIB, 5)
    group["sys/fs/cgroup/job/memory.stat"] = "inactive_file many\n"
    assert limits(v2_tree(tmp_path, "/job", group)) == (GIB, 5, None)


@given(st.text())
def test_no_text_makes_a_parser_fail(text):
    testing.parse_field(text, "MemAvailable")
    testing.parse_limit(text)
    testing.parse_mountinfo(text)
    testing.parse_group(text, 1)
    testing.parse_group(text, 2)


def test_a_field_is_not_taken_for_a_longer_one():
    assert testing.parse_field("inactive_file_x 1\ninactive_file 2\n", "inactive_file") == 2
    assert testing.parse_field("total_inactive_file 1\n", "inactive_file") is None


def test_mounts_with_optional_fields_are_parsed():
    assert testing.parse_mountinfo(CGROUP2_MOUNT + CGROUP1_MOUNTS) == [
        (2, "/sys/fs/cgroup", "/"),
        (1, "/sys/fs/cgroup/memory", "/"),
    ]


def budget(local_world_size=1, held_bytes=0, **fields):
    memory = testing.HostMemory()
    for name, value in fields.items():
        setattr(memory, name, value)
    return testing.default_budget_bytes(memory, local_world_size, held_bytes)


def test_the_budget_is_four_fifths_of_the_least_room_shared_by_the_machine_s_processes():
    assert budget(available_bytes=10 * GIB) == 8 * GIB
    assert budget(available_bytes=10 * GIB, local_world_size=4) == 2 * GIB
    assert budget(available_bytes=10 * GIB, limit_bytes=8 * GIB, limit_used_bytes=4 * GIB) == pytest.approx(3.2 * GIB)
    limit = {"limit_bytes": 8 * GIB, "limit_used_bytes": 4 * GIB, "limit_inactive_file_bytes": GIB}
    assert budget(available_bytes=10 * GIB, **limit) == 4 * GIB
    assert budget(**limit) == 4 * GIB
    assert budget(available_bytes=GIB, **limit) == pytest.approx(0.8 * GIB)


def test_the_budget_is_never_negative_and_needs_nothing_to_be_known():
    assert budget(limit_bytes=GIB, limit_used_bytes=2 * GIB) == 0
    assert budget(limit_bytes=GIB, limit_used_bytes=5, limit_inactive_file_bytes=2 * GIB) == pytest.approx(0.8 * GIB)
    assert budget(total_bytes=10 * GIB) == 8 * GIB
    assert budget() == 0
    assert budget(available_bytes=10 * GIB, local_world_size=0) == 8 * GIB


@pytest.mark.parametrize("processes", [1, 2, 8])
@pytest.mark.parametrize("is_alone", [True, False], ids=["one-grows", "all-grow"])
def test_what_is_held_does_not_make_the_budget_grow(processes, is_alone):
    """All processes together stay within four fifths of what was available before, in however many chunks they grow."""
    held_bytes = 0
    for _ in range(2000):
        all_held_bytes = held_bytes * (1 if is_alone else processes)
        seen = {"available_bytes": 100 * GIB - all_held_bytes, "limit_bytes": 200 * GIB, "limit_used_bytes": 90 * GIB}
        seen["limit_used_bytes"] += all_held_bytes
        limit_bytes = budget(local_world_size=processes, held_bytes=held_bytes, **seen)
        held_bytes = max(held_bytes, min(held_bytes + GIB // 4, limit_bytes))
    least_bytes = 80 * GIB / processes
    assert (held_bytes if is_alone else processes * held_bytes) <= 80 * GIB
    assert held_bytes >= 0.99 * least_bytes


def test_the_real_machine():
    memory = testing.read_host_memory()
    assert memory.total_bytes == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < memory.available_bytes <= memory.total_bytes
    with open("/proc/meminfo") as meminfo:
        available_kib = next(int(line.split()[1]) for line in meminfo if line.startswith("MemAvailable"))
    assert memory.available_bytes == pytest.approx(available_kib * 1024, rel=0.2)
    if memory.limit_bytes is not None:
        assert memory.limit_used_bytes > 0
    assert 0 < testing.default_budget_bytes(memory) <= 0.8 * memory.available_bytes
