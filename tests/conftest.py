"""conftest.py: chooses the test build, registers the markers, and makes the device that a test runs on."""

import gc
import importlib.util
import os
import re
import sys
import zlib
from pathlib import Path

import pytest


def _test_build_exists() -> bool:
    """Asks the finders themselves: importlib.util.find_spec would import the package, and with it the release core."""
    package = importlib.util.find_spec("torchoffload")
    if package is None:
        return False
    name, where = "torchoffload._C_testing", package.submodule_search_locations
    return any(finder.find_spec(name, where) for finder in sys.meta_path if hasattr(finder, "find_spec"))


# Before anything imports torchoffload. TORCHOFFLOAD_TESTING=0 runs the suite on the release core, without simulation.
if "TORCHOFFLOAD_TESTING" not in os.environ and _test_build_exists():
    os.environ["TORCHOFFLOAD_TESTING"] = "1"

import torch  # noqa: E402
import torch._dynamo  # noqa: E402  (torch imports it by itself later, which would undo the freezing below)

from devices import (  # noqa: E402
    DEVICE_NAMES,
    REQUIRE_CUDA,
    SPILLED_NAME,
    Device,
    make_device,
    require_cuda,
    spill_everything,
)

# The suites that also run on the simulated device as one of PyTorch's: each so many-th of their tests, or all of them.
PRIVATE_SHARES = {"gradients": 4, "engine": 1, "faults": 1}
PRIVATE_IN_FULL = bool(os.environ.get("TORCHOFFLOAD_TEST_LONG"))
PART = os.environ.get("TORCHOFFLOAD_TEST_PART")  # as "2/4": one of four parts of the slow and the integrations' tests
SHARE = os.environ.get("TORCHOFFLOAD_TEST_SHARE")  # as "2/4": one of four shares of all tests
SPILLED_SUITES = {"gradients"}  # in which slots on one of the simulated devices go on to a disk


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("TORCHOFFLOAD_TESTING") == "1" and not torch.cuda.is_available():
        import private_device

        private_device.register()
    config.addinivalue_line("markers", "cuda: needs a CUDA device; skipped without one")
    config.addinivalue_line("markers", "two_gpus: needs two of them; left out, and not skipped, with one")
    config.addinivalue_line("markers", "devices(*names): run on these devices only")
    config.addinivalue_line("markers", "except_devices(*names): run on all devices but these")
    config.addinivalue_line("markers", "slow: takes more than about two seconds; left to `make test-slow`")
    config.addinivalue_line("markers", "xdist_group(name): with others of this name in one worker (pytest-xdist's)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out: set[pytest.Item] = set()
    if torch.cuda.device_count() == 1:
        left_out |= {item for item in items if item.get_closest_marker("two_gpus")}
    long = [item for item in items if item.get_closest_marker("slow") or item.path.parent.name == "integrations"]
    left_out |= _outside_of("TORCHOFFLOAD_TEST_PART", PART, long) | _outside_of("TORCHOFFLOAD_TEST_SHARE", SHARE, items)
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def _outside_of(variable: str, text: str | None, items: list[pytest.Item]) -> set[pytest.Item]:
    if text is None:
        return set()
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise pytest.UsageError(f"{variable} is a text such as 2/4, got {text!r}")
    return {item for item in items if zlib.crc32(item.nodeid.encode()) % int(found[2]) != int(found[1]) - 1}


@pytest.fixture(autouse=True, scope="module")
def _quick_collections():
    """What imports made lives until the end: with it frozen, a full collection takes 1 ms and not 100."""
    gc.collect()
    gc.freeze()


def _runs_on_private_device(metafunc: pytest.Metafunc, *, is_named: bool) -> bool:
    """A test of another suite runs on it if its marker names it."""
    share = PRIVATE_SHARES.get(metafunc.definition.path.parent.name)
    if share is None:
        return is_named
    return PRIVATE_IN_FULL or zlib.crc32(metafunc.definition.name.encode()) % share == 0


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device_under_test" not in metafunc.fixturenames:
        return
    marker = metafunc.definition.get_closest_marker("devices")
    without = metafunc.definition.get_closest_marker("except_devices")
    names = list(marker.args if marker else DEVICE_NAMES)
    if without:
        names = [name for name in names if name not in without.args]
    if "privateuseone" in names and not _runs_on_private_device(metafunc, is_named=marker is not None):
        names.remove("privateuseone")
    parameters = [pytest.param(name, marks=pytest.mark.cuda) if name == "cuda" else name for name in names]
    metafunc.parametrize("device_under_test", parameters, indirect=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if REQUIRE_CUDA and report.skipped and item.get_closest_marker("cuda") and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"TORCHOFFLOAD_REQUIRE_CUDA=1, and this test was skipped: {report.longrepr}"
    return report


@pytest.fixture(scope="session")
def spill_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for the whole run: spill files live as long as the process."""
    return tmp_path_factory.mktemp("spill")


@pytest.fixture
def device_under_test(request: pytest.FixtureRequest, spill_directory: Path) -> Device:
    spill_everything(request.param, spill_directory)
    spills = request.param == SPILLED_NAME and request.path.parent.name in SPILLED_SUITES
    return make_device(request.param, spill_directory, request.node.name, spills=spills)


@pytest.fixture(autouse=True, scope="session")
def _same_numerics():
    """One thread and fixed algorithms: results differ in bits only where offloading made them differ."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _cuda_where_it_is_needed(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("cuda"):
        require_cuda()


@pytest.fixture(autouse=True)
def _no_hooks_left_behind():
    yield
    left = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if left is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
    assert left is None, "the test left saved-tensor hooks in force"
