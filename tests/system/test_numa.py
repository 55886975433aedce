"""Memory near a device: which NUMA node that is, read from made files, and pages put on a node."""

import ctypes
import mmap
import os

import pytest
from test_host_memory import make_tree

testing = pytest.importorskip("torchoffload._C_testing", reason="it is reached through the test build alone").testing

TWO_NODES = {
    "sys/devices/system/node/has_memory": "0-1\n",
    "sys/devices/system/node/node0/cpulist": "0-3,8-11\n",
    "sys/devices/system/node/node1/cpulist": "4-7,12-15\n",
}
GPU = "0000:1b:00.0"
NUMA_NODE = f"sys/bus/pci/devices/{GPU}/numa_node"
MPOL_PREFERRED, MPOL_F_ADDR = 1, 2
SYS_GET_MEMPOLICY = 239


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("0\n", [0]),
        ("0-3,8,10-11", [0, 1, 2, 3, 8, 10, 11]),
        ("", None),
        ("\n", None),
        ("3-1", None),
        ("1,", None),
        ("1;2", None),
        ("-1", None),
        ("0-99999", None),
        ("99999999999999999999", None),
    ],
)
def test_cpu_lists(text, cpus):
    assert testing.parse_cpu_list(text) == cpus


@pytest.mark.parametrize("address", [GPU, GPU.upper()])
@pytest.mark.parametrize("node", [0, 1])
def test_a_device_is_at_the_node_that_the_kernel_names(tmp_path, address, node):
    root = make_tree(tmp_path, TWO_NODES | {NUMA_NODE: f"{node}\n"})
    assert testing.node_of_pci_device(address, root) == node
    assert testing.cpus_of_node(node, root) == [cpu + 4 * node for cpu in (0, 1, 2, 3, 8, 9, 10, 11)]


@pytest.mark.parametrize("text", ["-1\n", "2\n", "x\n", "", "1x\n", "9999\n"])
def test_a_node_that_is_not_told_or_has_no_memory_is_none(tmp_path, text):
    assert testing.node_of_pci_device(GPU, make_tree(tmp_path, TWO_NODES | {NUMA_NODE: text})) is None


def test_a_device_that_is_not_listed_has_none(tmp_path):
    root = make_tree(tmp_path, TWO_NODES | {NUMA_NODE: "1\n"})
    assert testing.node_of_pci_device("0000:1c:00.0", root) is None


@pytest.mark.parametrize("nodes", ["0\n", ""])
def test_on_a_machine_of_one_node_none_is_better(tmp_path, nodes):
    files = {"sys/devices/system/node/has_memory": nodes, NUMA_NODE: "0\n"}
    assert testing.node_of_pci_device(GPU, make_tree(tmp_path, files)) is None


def test_a_node_without_cpus_has_none(tmp_path):
    assert testing.cpus_of_node(0, make_tree(tmp_path, {"sys/devices/system/node/node0/cpulist": "\n"})) is None
    assert testing.cpus_of_node(7, str(tmp_path)) is None


def test_pages_get_the_policy_or_the_refusal_is_told():
    memory = mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if not testing.prefer_node(address, len(memory), 0):
        pytest.skip("this system refuses mbind(2)")
    policy = ctypes.c_int(-1)
    libc = ctypes.CDLL(None, use_errno=True)
    asked = libc.syscall(SYS_GET_MEMPOLICY, ctypes.byref(policy), None, 0, ctypes.c_void_p(address), MPOL_F_ADDR)
    if asked != 0:
        pytest.skip(f"this system refuses get_mempolicy(2): {os.strerror(ctypes.get_errno())}")
    assert policy.value == MPOL_PREFERRED


@pytest.mark.parametrize("node", [-1, 1023, 1024])
def test_a_node_that_is_none_is_refused(node):
    memory = mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert not testing.prefer_node(address, len(memory), node)
