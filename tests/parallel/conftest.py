"""conftest.py of the parallel tests: two processes for each file, by gloo on CPUs or by NCCL on two GPUs."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from processes import Processes


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With several workers, one of them runs all tests of a file: each would start processes of its own."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


@pytest.fixture(scope="module", params=["gloo", pytest.param("nccl", marks=[pytest.mark.cuda, pytest.mark.two_gpus])])
def processes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """Two processes, kept from one test to the next."""
    if not dist.is_available() or (request.param == "gloo" and not dist.is_gloo_available()):
        pytest.skip("this torch has no torch.distributed, or none with gloo")
    started = Processes(request.param, 2, tmp_path_factory.mktemp(request.param))
    yield started
    started.close()
