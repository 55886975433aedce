"""test_wheels.py: what the tools for wheels take from a torch, and what they refuse. `.ci/run` builds and tries one."""

import importlib
import pathlib
import subprocess
import sys

import pytest

from places import ROOT


@pytest.fixture
def build_wheels(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("build_wheels")


@pytest.fixture
def try_wheels(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("try_wheels")


def run_tool(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "build_wheels.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_wheel_is_for_each_minor_release_of_torch_that_is_supported(build_wheels):
    assert build_wheels.all_minors() == ["2.9", "2.10", "2.11", "2.12", "2.13", "2.14", "2.15"]


@pytest.mark.parametrize(
    ("name", "unpacked"),
    [
        ("torch/version.py", True),
        ("torch/include/c10/core/Device.h", True),
        ("torch/lib/libc10.so", True),
        ("torch/lib/libc10_cuda.so", True),
        ("torch/lib/libtorch_cuda.so", False),
        ("torch/nn/functional.py", False),
    ],
)
def test_of_a_torch_only_headers_and_the_libraries_that_we_name_are_unpacked(build_wheels, name, unpacked):
    assert bool(build_wheels.TORCH_PARTS.fullmatch(name)) == unpacked


def test_a_torch_that_is_not_supported_is_refused_before_anything_is_downloaded():
    done = run_tool("--pythons", sys.executable, "--torches", "2.8")
    assert done.returncode != 0
    assert "not supported: torch 2.8; there are 2.9, 2.10, 2.11" in done.stderr


def test_an_interpreter_that_is_not_there_is_named(build_wheels):
    with pytest.raises(SystemExit, match=r"python9\.9 does not run: name the interpreters that are here"):
        build_wheels.version_of("python9.9")
    assert build_wheels.version_of(sys.executable) == f"{sys.version_info[0]}.{sys.version_info[1]}"


def test_a_wheel_says_which_python_it_is_for(try_wheels):
    wheel = pathlib.Path("torchoffload-0.1.0-cp312-cp312-manylinux_2_28_x86_64.whl")
    assert try_wheels.python_version(wheel) == "3.12"
    with pytest.raises(SystemExit, match="not for one release of CPython"):
        try_wheels.python_version(pathlib.Path("torchoffload-0.1.0-py3-none-any.whl"))
