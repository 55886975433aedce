"""Whose memory CUDA graph trees manage, read from PyTorch's own module; test_compile_graphs.py has the real ones."""

import pathlib
import subprocess
import sys
import threading
import types
import warnings

import pytest

from devices import require_cuda
from torchoffload._pytorch import graph_trees as _graph_trees


def trees(**managers: object) -> types.SimpleNamespace:
    containers = {index: types.SimpleNamespace(tree_manager=manager) for index, manager in enumerate(managers.values())}
    return types.SimpleNamespace(local=types.SimpleNamespace(tree_manager_containers=containers))


def test_the_pool_of_each_tree_is_found():
    manager = types.SimpleNamespace(cuda_graphs_thread_pool=(0, 7))
    assert _graph_trees.pools(trees(first=None, second=manager)) == [(1, (0, 7))]


def test_a_thread_of_the_programs_own_has_no_trees():
    from torch._inductor import cudagraph_trees

    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(_graph_trees.pools(cudagraph_trees)))
    thread.start()
    thread.join()
    assert found == [[]]


def test_trees_with_other_names_are_warned_of_once():
    _graph_trees._warn_of.cache_clear()
    unknown = trees(only=types.SimpleNamespace(other_name=(0, 7)))
    with pytest.warns(UserWarning, match="other CUDA graph trees than are known here .*cuda_graphs_thread_pool"):
        assert _graph_trees.pools(unknown) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _graph_trees.pools(unknown) == []


def test_this_torch_has_the_names_that_are_read():
    from torch._inductor import cudagraph_trees

    assert _graph_trees.pools(cudagraph_trees) == []
    assert cudagraph_trees.local.tree_manager_containers == {}
    assert hasattr(cudagraph_trees.TreeManagerContainer(0), "tree_manager")
    assert "cuda_graphs_thread_pool" in cudagraph_trees.CUDAGraphTreeManager.__init__.__code__.co_names


_ON_DISK_BEFORE_CUDA = """
import sys, torch, torchoffload
import torch._inductor.cudagraph_trees
x = torch.randn(512, 1024, requires_grad=True)
with torchoffload.OffloadActivations(tier="disk", disk_dir=sys.argv[1], min_offload_size=0, offload_window_bytes=0):
    y = x.sin().exp().sum()
y.backward()
torchoffload.report(), torchoffload.stats(), torchoffload.trim()
assert torchoffload.stats().records_offloaded == 2
assert not torch.cuda.is_initialized()
"""


@pytest.mark.cuda
def test_the_disk_tier_does_not_touch_cuda(tmp_path: pathlib.Path):
    """Also where CUDA graph trees are imported, whose pools are looked for: torch._dynamo.reset() imports them."""
    require_cuda()
    command = [sys.executable, "-c", _ON_DISK_BEFORE_CUDA, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-800:]
