"""`python -m torchoffload.selftest`: it passes if offloading is right, and else it says so and exits with 1."""

import itertools
import os
import re
import subprocess
import sys
from typing import Any

import pytest
import torch

import torchoffload
from devices import Device
from torchoffload import selftest
from torchoffload._selftest import comparison
from torchoffload._selftest.cases import CASES, NotHadError, Run
from torchoffload._selftest.comparison import Outcome, compare

CPU = torch.device("cpu")
needs_test_build = pytest.mark.skipif(
    os.environ.get("TORCHOFFLOAD_TESTING") != "1", reason="mutants are in the test build alone"
)


@pytest.fixture
def run_it(capsys, tmp_path):
    """Run the command; returns its exit status, and its text."""

    def run(*arguments: str) -> tuple[int, str]:
        status = selftest.main([*arguments, "--disk-dir", str(tmp_path)])
        return status, capsys.readouterr().out

    return run


def outcomes_in(text: str) -> dict[str, str]:
    found = re.findall(r"^  (pass|FAIL|none)  (.{32})", text, flags=re.MULTILINE)
    return {title.strip(): outcome for outcome, title in found}


def test_it_passes_on_the_cpu_with_a_disk(run_it):
    status, text = run_it("--device", "cpu")
    assert status == 0
    assert text.startswith("```text\ntorchoffload.selftest on cpu, tier disk\n")
    assert text.endswith("```\n")
    assert torch.__version__ in text
    outcomes = outcomes_in(text)
    assert len(outcomes) == len(CASES)
    assert [title for title, outcome in outcomes.items() if outcome != "pass"] == ["a side stream"]
    assert "none  a side stream                     the CPU has no streams" in text
    assert re.search(r"^  disk +\d+\.\d GB/s out, \d+\.\d GB/s in$", text, flags=re.MULTILINE)


@pytest.mark.devices("privateuseone", "cuda")
def test_it_passes_on_an_accelerator_which_it_finds_by_itself(device_under_test: Device, run_it):
    with device_under_test.scope():
        status, text = run_it()
    assert status == 0, text
    assert f"torchoffload.selftest on {device_under_test.torch_device}:0, tier host" in text
    assert set(outcomes_in(text).values()) == {"pass"}
    rates = re.findall(r"^  (.+?) +\d+\.\d GB/s out, \d+\.\d GB/s in$", text, flags=re.MULTILINE)
    assert rates == ["page-locked memory", "plain host memory"]


@pytest.mark.devices("privateuseone")
def test_a_missing_wait_fails_and_the_exit_status_is_1(device_under_test: Device, run_it):
    from simulated import mutant

    with device_under_test.scope() as simulation:
        with mutant("ConsumerWaitsForReload"):
            status, text = run_it("--no-link", "--only", "layers")
        simulation.clear_races()
    assert status == 1
    assert outcomes_in(text) == {"layers": "FAIL"}
    assert "raises RuntimeError: race:" in text
    assert "0 passed, 1 failed, 0 gave no answer" in text


@needs_test_build
def test_a_missing_check_fails_with_the_first_difference(run_it):
    from simulated import mutant

    with mutant("VersionCheckedAtUnpack"):
        status, text = run_it("--no-link", "--only", "written", "--device", "cpu")
    assert status == 1
    assert "FAIL  written after saving              differs from stock (value 0: 'no error' and not 'one of" in text


def test_it_runs_as_a_module(tmp_path):
    command = [sys.executable, "-m", "torchoffload.selftest", "--device", "cpu", "--no-link", "--only", "layers"]
    command += ["--disk-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "1 passed, 0 failed, 0 gave no answer" in done.stdout
    assert done.stderr == ""


def test_if_nothing_can_be_compared_the_exit_status_is_1(run_it):
    status, text = run_it("--no-link", "--only", "side stream", "--device", "cpu")
    assert status == 1
    assert "0 passed, 0 failed, 1 gave no answer" in text


# --- How a case comes out ---


@pytest.fixture
def compared(tmp_path):
    """Compare a case on the CPU."""

    def context(**options: Any) -> Any:
        chosen = {"tier": "disk", "disk_dir": str(tmp_path), "min_offload_size": 0, "offload_window_bytes": 0}
        return torchoffload.OffloadActivations(**(chosen | options))

    def run(case: Any) -> comparison.Result:
        return compare(case, CPU, context, torchoffload.fit)

    return run


def moving(run: Run) -> torch.Tensor:
    x = run.leaf(16, 16)
    with run.offload():
        y = x.sin().exp()
    y.sum().backward()
    assert x.grad is not None
    return x.grad


def test_a_bit_that_differs_is_found(compared):
    def case(run: Run) -> Any:
        gradient = moving(run)
        if run.fit is not None:
            gradient.view(torch.int32)[0, 3] ^= 1
        return gradient

    result = compared(case)
    assert result.outcome is Outcome.FAILED
    assert result.text == "differs from stock (value 0, float32 (16, 16) of strides (16, 1): 1 of 1024 bytes)"


def test_another_form_of_a_tensor_is_found(compared):
    def case(run: Run) -> Any:
        gradient = moving(run)
        return gradient if run.fit is None else gradient.t()

    assert "differs from stock (value 0: float32 (16, 16) of strides (1, 16) and not" in compared(case).text


def test_a_case_that_moves_nothing_fails_with_the_reasons(compared):
    def case(run: Run) -> Any:
        weight = torch.nn.Parameter(run.tensor(16, 16))
        with run.offload():
            y = weight.sin()
        y.sum().backward()
        return weight.grad

    result = compared(case)
    assert result.outcome is Outcome.FAILED
    assert result.text == "nothing moved; kept: parameter 1"


def test_an_error_that_stock_has_not_is_a_failure(compared):
    def case(run: Run) -> Any:
        if run.fit is not None:
            raise ValueError("wrong\nmore lines")
        return moving(run)

    result = compared(case)
    assert (result.outcome, result.text) == (Outcome.FAILED, "raises ValueError: wrong")


def test_a_graph_that_is_left_behind_fails(compared):
    left = []

    def case(run: Run) -> Any:
        gradient = moving(run)
        x = run.leaf(16, 16)
        with run.offload():
            left.append(x.sin())
        return gradient

    assert compared(case).text == "1 records outlive their graphs"


def test_stock_that_fails_or_is_not_the_same_twice_gives_no_answer(compared):
    def failing(run: Run) -> Any:
        raise NotImplementedError("no such operator")

    def lacking(run: Run) -> Any:
        raise NotHadError("it has no streams")

    numbers = itertools.count()
    results = [compared(case) for case in (failing, lacking, lambda run: next(numbers))]
    assert {result.outcome for result in results} == {Outcome.NO_ANSWER}
    assert [result.text for result in results] == [
        "stock raises NotImplementedError: no such operator",
        "it has no streams",
        "stock itself is not the same twice (value 0: 1 and not 0)",
    ]


# --- The command line ---


def refused(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as leaving:
        selftest.main(arguments)
    assert leaving.value.code == 2
    text: str = capsys.readouterr().err
    return text


def test_help_says_what_it_does_and_how_long_it_takes(capsys):
    with pytest.raises(SystemExit) as leaving:
        selftest.main(["--help"])
    assert leaving.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "It takes two minutes at most" in text
    for option in ("--device", "--disk-dir", "--no-link", "--only"):
        assert option in text


def test_a_device_that_is_not_there_is_refused(capsys):
    assert "PyTorch has no device 'xpu:7' here, but" in refused(capsys, "--device", "xpu:7")


def test_an_unknown_case_is_refused_with_the_names(capsys):
    assert "no case has 'xyz' in its name: layers, convolutions" in refused(capsys, "--only", "xyz")


def test_a_missing_directory_is_refused(capsys, tmp_path):
    assert "there is no directory" in refused(capsys, "--disk-dir", str(tmp_path / "gone"))


def test_it_says_so_where_offloading_is_switched_off(capsys, monkeypatch):
    monkeypatch.setenv("TORCHOFFLOAD_DISABLE", "1")
    assert "TORCHOFFLOAD_DISABLE=1 is set, so nothing would move: unset it" in refused(capsys)
