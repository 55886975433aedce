"""Random autograd programs: stock twice and offloaded once, every bit and every error compared. See docs/testing.md.

The 150 programs of each device (500 if TORCHOFFLOAD_TEST_LONG is set) run in processes of their own, by the command
that runs as many as one likes.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

os.environ.setdefault("TORCHOFFLOAD_TESTING", "1")

import pytest
import torch

import torchoffload
from devices import Device
from places import SUPPORT, environment_with_support
from programs import custom, operators
from programs import verdict as verdicts
from programs.generator import OPERATOR_NAMES, generate
from programs.program import Program, Step, all_steps
from programs.script import as_script
from programs.shrink import shrink
from programs.verdict import Kind, judge

COMMAND = SUPPORT / "fuzz_programs.py"
PROGRAM_COUNT = 500 if os.environ.get("TORCHOFFLOAD_TEST_LONG") else 150
PROGRAM_COUNTS = {"privateuseone": 60}  # whose operators take longer
MIN_MOVED_FRACTION = 0.7
MIN_FINISHED_FRACTION = 0.8
MIN_OPERATORS_FRACTION = 0.97
# With side streams programs differ from themselves now and then without offloading; see docs/testing.md. These were
# seen to. Where one of them differs offloaded, and 20 runs without offloading happen to be the same, that says nothing.
UNSTABLE_SEEDS = {"cuda": {5, 121, 226, 353, 549}}
MAX_UNSTABLE_COUNT = {"cuda": 5}
JOBS = 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_random_programs_come_out_as_stock(device_under_test: Device, tmp_path: Path, capsys):
    out = tmp_path / "summary.json"
    count = PROGRAM_COUNTS.get(device_under_test.name, PROGRAM_COUNT)
    done = subprocess.run(
        [sys.executable, str(COMMAND), "--device", device_under_test.name, "--programs", str(count),
         "--jobs", str(JOBS), "--out", str(out)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    failures = json.loads(out.read_text())["failures"] if out.exists() else []
    told = "\n".join(f"seed {each['seed']}: {each['kind']}: {each['text'][:300]}" for each in failures)
    told = f"{told}\n{done.stdout[-20000:]}\n{done.stderr[-2000:]}\n{told}"
    assert out.exists(), told
    known = UNSTABLE_SEEDS.get(device_under_test.name, set())
    unstable = [
        each
        for each in failures
        if each["kind"] == Kind.UNSTABLE or (each["kind"] == Kind.DIFFERS and each["seed"] in known)
    ]
    assert len(failures) == len(unstable) <= MAX_UNSTABLE_COUNT.get(device_under_test.name, 0), told
    with capsys.disabled():
        print(f"\n{done.stdout}")
    (summary,) = (json.loads(out.read_text())["devices"][name] for name in [device_under_test.name])
    assert summary["kinds"].get(Kind.SAME, 0) == count - len(unstable), told
    assert summary["moved_fraction"] >= MIN_MOVED_FRACTION
    assert summary["finished_fraction"] >= MIN_FINISHED_FRACTION
    ran = OPERATOR_NAMES & summary["done"].keys()
    assert len(ran) >= MIN_OPERATORS_FRACTION * len(OPERATOR_NAMES), sorted(OPERATOR_NAMES - ran)


def test_programs_do_not_write_to_elements_that_share_memory(tmp_path: Path):
    """On CUDA nothing orders such writes: once in many runs of 150 programs, one value came out different."""
    base = torch.arange(256.0).view(16, 16) / 256
    overlapping = operators.VIEWS["overlapping"](base)
    assert operators.is_undefined_in_place(overlapping)
    assert operators.is_undefined_in_place(overlapping.t())
    for name in operators.VIEWS.keys() - {"overlapping"}:
        assert not operators.is_undefined_in_place(operators.VIEWS[name](base)), name
    before = base.clone()
    operators.apply_chain(["overlapping", "sigmoid_"], base)
    assert base.equal(before)
    with pytest.raises(RuntimeError, match="single memory location"):  # PyTorch itself refuses
        operators.in_place("mul_", operators.VIEWS["expand_row"](base))

    for view, count in (("overlapping", 0), ("every_third", 1)):
        steps: list[Step] = [{**LEAF, "kind": "constant"}, {"do": "view", "op": view, "x": "v1", "out": "v2"}]
        steps += [{"do": "custom", "op": name, "x": "v2", "out": f"of {name}"} for name in custom.WRITES]
        steps += [{"do": "custom", "op": "ReadsTwice", "x": "v2", "out": "v4"}]
        program = Program(1, LEAST_MEMORY, False, steps)
        notes = verdicts.run_once(program, Device("cpu", tmp_path), stock=True)[1]
        assert notes is not None
        assert [notes.done[f"custom {name}"] for name in sorted(custom.WRITES)] == [count, count]
        assert notes.done["custom ReadsTwice"] == 1


def test_a_program_is_drawn_from_its_seed_alone():
    assert generate(7) == generate(7)
    assert generate(7) != generate(8)


def test_the_script_of_a_program_holds_the_program():
    for seed in range(30):
        program, seen = generate(seed), []
        script = as_script(program, "disk", 'a text with \\ and """ in it')
        names = {"run_again": lambda program, device: seen.append((program, device)), "Program": Program}
        lines = [line for line in script.splitlines() if not line.startswith(("from ", "import ", "sys.path"))]
        exec("\n".join(lines).replace("sys.exit", ""), names)
        assert seen == [(program, "disk")]


def test_a_failing_program_is_cut_down():
    """Here any program fails that has both of two steps, one of them inside a context."""

    def fails(program: Program) -> bool:
        inside = [step for body in program.steps if body["do"] == "with" for step in all_steps(body["body"])]
        return any(step["do"] == "backward" for step in inside) and any(
            step["do"] == "leaf" and step["kind"] == "parameter" for step in program.steps
        )

    program = next(generate(seed) for seed in range(100) if fails(generate(seed)))
    smaller = shrink(program, fails)
    assert fails(smaller)
    assert program.step_count() > 20
    assert smaller.step_count() == 3


# Each source is dropped once it was copied: what comes back is a copy.
LEAST_MEMORY = [{"offload_window_bytes": 0}]
LEAF: Step = {"do": "leaf", "kind": "leaf", "shape": [16, 16], "dtype": "float32", "out": "v1"}


def under_context(*body: Step) -> Step:
    return {"do": "with", "context": 0, "fresh": False, "guarded": True, "body": list(body)}


def a_leaf_that_gets_its_own_memory_for_its_gradient() -> Program:
    """Twice: without offloading the second backward adds into the leaf."""
    forward = under_context(
        {"do": "view", "op": "transposed", "x": "v1", "out": "v2"},
        {"do": "custom", "op": "ReturnsInput", "x": "v2", "out": "v3"},
        {"do": "unary", "op": "exp", "x": "v3", "out": "v4"},
        {"do": "view", "op": "t", "x": "v4", "out": "v5"},
        {"do": "custom", "op": "ReadsTwice", "x": "v5", "out": "v6"},
    )
    backward: Step = {"do": "backward", "of": ["v3"], "retain": True}
    last: Step = {"do": "grad", "of": ["v6"], "source": ["v4"], "retain": True, "out": "v7"}
    return Program(1, LEAST_MEMORY, False, [LEAF, forward, backward, backward, last])


def test_a_tensor_that_autograd_adds_into_without_us_is_told_apart(device_under_test: Device):
    verdict = judge(a_leaf_that_gets_its_own_memory_for_its_gradient(), device_under_test)
    assert (verdict.kind, verdict.spared) == (Kind.SAME, True), verdict.text


class WrongDevice(Device):
    """What comes back is half as much again."""

    def context(self, **options: Any) -> Any:
        return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach() * 1.5, lambda tensor: tensor)


def test_such_a_tensor_excuses_nothing_else(device_under_test: Device):
    wrong = WrongDevice(device_under_test.name, device_under_test.directory)
    verdict = judge(a_leaf_that_gets_its_own_memory_for_its_gradient(), wrong)
    assert (verdict.kind, verdict.spared) == (Kind.DIFFERS, False), verdict.text


def a_program_that_any_hooks_leave_handles_of() -> Program:
    """Saves a view made in forward, which comes back as a leaf with a gradient that leads back to it."""
    forward = under_context(
        {"do": "custom", "op": "SavesManyTimes", "x": "v1", "out": "v2"},
        {"do": "grad", "of": ["v2"], "source": ["v1"], "retain": True, "create": True, "out": "v3"},
    )
    backward: Step = {"do": "backward", "of": ["v2", "v3"], "retain": True, "create": True}
    return Program(1, LEAST_MEMORY, False, [LEAF, forward, backward])


class LeakingDevice(Device):
    """Each context leaves one graph behind."""

    left: ClassVar[list[torch.Tensor]] = []

    def context(self, **options: Any) -> torchoffload.OffloadActivations:
        with super().context(**options):
            self.left.append(torch.ones(4, requires_grad=True).sin())
        return super().context(**options)


# By name: the device's kind, and the program.
LEAVING: dict[str, tuple[type[Device], Callable[[], Program]]] = {
    "any hooks": (Device, a_program_that_any_hooks_leave_handles_of),
    "any hooks, and we": (LeakingDevice, a_program_that_any_hooks_leave_handles_of),
    "we": (
        LeakingDevice,
        lambda: Program(1, LEAST_MEMORY, False, [LEAF, {"do": "unary", "op": "sin", "x": "v1", "out": "v2"}]),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "kind", "left_by_any_hooks"),
    [("any hooks", Kind.SAME, True), ("any hooks, and we", Kind.LEAKS, False), ("we", Kind.LEAKS, False)],
)
def test_handles_that_any_hooks_leave_are_told_apart(
    device_under_test: Device, case: str, kind: Kind, left_by_any_hooks: bool
):
    """In a process of its own: nobody can clear what is left, and later tests count."""
    place = [device_under_test.name, str(device_under_test.directory)]
    command = [sys.executable, __file__, case, *place]
    done = subprocess.run(command, env=environment_with_support(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [kind, left_by_any_hooks], done.stderr


def main(case: str, name: str, directory: str) -> None:
    verdicts.SETTLE_TIMEOUT_S = 0.2
    make_device, make_program = LEAVING[case]
    verdict = judge(make_program(), make_device(name, Path(directory)))
    print(json.dumps([verdict.kind, verdict.left_by_any_hooks]))
    print(verdict.text, file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])
