"""Models, amounts of memory and plan files at the edges: each works, or is an error that says what to change."""

import itertools
import json
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchoffload
from devices import Device
from fitted_models import Model, options_of
from gradients import Run, execute
from planned_blocks import BLOCKS, WIDTH
from torchoffload._contexts.amounts import parse_amount
from torchoffload._fit.block.graph import MOST_OPERATORS

pytestmark = pytest.mark.devices("disk")
STEPS = 18


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("40GiB", 40 << 30), (" 40 GB ", 40 * 10**9), ("1.5kib", 1536), ("0.1TB", 10**11), (1 << 70, 1 << 62),
        ("9" * 400 + "GiB", 1 << 62),
    ],
)  # fmt: skip
def test_amounts_of_memory(text: Any, nbytes: int):
    assert parse_amount(text).nbytes == nbytes


def test_the_message_shows_what_was_given():
    for given in ("0GiB", "0.4B"):
        with pytest.raises(ValueError, match=f"got '{given}'"):
            parse_amount(given)


class NeverCalled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(BLOCKS["transformer"]() for _ in range(2))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x)


def of_blocks(count: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*(BLOCKS["transformer"]() for _ in range(count)))


MODELS: dict[str, tuple[Callable[[], nn.Module], int, dict[str, Any]]] = {
    "one block": (of_blocks(1), 4, {}),
    "no parameters": (lambda: nn.Sequential(nn.Tanh(), nn.Tanh()), 4, {}),
    "nothing to save": (lambda: nn.Sequential(nn.Flatten(), nn.Unflatten(1, (8, WIDTH))), 4, {}),
    "blocks of empty batches": (lambda: nn.Sequential(*(BLOCKS["dropouts"]() for _ in range(3))), 0, {}),
    "blocks that are never called": (NeverCalled, 4, {"blocks": "blocks.*"}),
    "all frozen": (lambda: of_blocks(2)().requires_grad_(False), 4, {}),
    "memory beyond any": (of_blocks(2), 4, {"memory": 1 << 70}),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("memory", ["all", "least"])
def test_odd_models_have_the_bits_of_stock(device_under_test: Device, name: str, memory: str):
    make, count, options = MODELS[name]

    def program(run: Run) -> None:
        model = run.module(make)
        given = {"memory": 1 << 50} | options_of(device_under_test) | options
        handle = None if run.stock else torchoffload.fit(model, **given)
        for step in range(2 * STEPS):
            x = run.tensor(count, 8, WIDTH).requires_grad_()
            model(x).square().sum().backward()
            run.check(input=x.grad, gradients=[each.grad for each in model.parameters()])
            model.zero_grad()
            if handle is not None and memory == "least" and step == STEPS:
                handle.replan(max(1, int(handle.frontier()[0].memory_bytes / 0.96) + 1))
        if handle is not None:
            assert handle.phase == "settled"
            assert "What the blocks do" in handle.report()
            handle.remove()

    stock = execute(program, device_under_test, stock=True)
    assert "exception" not in stock
    assert execute(program, device_under_test, stock=False) == stock


def test_steps_of_no_time_have_a_report(device_under_test: Device, monkeypatch: pytest.MonkeyPatch):
    """As a clock that stands still would tell. One that goes back tells of times below zero."""
    for moments in (itertools.repeat(0.0), itertools.count(0, -1)):
        model = Model(BLOCKS["transformer"])
        with torchoffload.fit(model, 1 << 50, **options_of(device_under_test)) as handle:
            monkeypatch.setattr(handle._driver.meter, "now", moments.__next__)
            for _ in range(STEPS):
                model(torch.randn(4, 8, WIDTH)).backward()
            assert handle.phase == "settled"
            assert handle.plan.predicted_s >= 0
            assert "Time against memory" in handle.report()


class Long(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(MOST_OPERATORS // 2 + 1):
            x = torch.sin(x) + 1
        return x


def test_a_block_of_too_many_operators_is_not_computed_again(device_under_test: Device):
    model = nn.Sequential(Long(), nn.Linear(8, 8))
    x = torch.randn(2, 8, requires_grad=True)
    model(x).sum().backward()
    expected, x.grad = x.grad, None
    with torchoffload.fit(model, 1 << 50, blocks=Long, **options_of(device_under_test)) as handle:
        while handle.phase != "settled":
            x.grad = None
            model(x).sum().backward()
            assert torch.equal(x.grad, expected)
        assert "too many" in handle.report() or f"more than {MOST_OPERATORS} operators" in handle.report()


def test_a_block_of_many_operators_is_planned_in_little_time(device_under_test: Device):
    class Many(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for number in range(400):
                x = torch.sin(x[: 64 - number % 7].repeat(2, 1)[:64]) + 1
            return x

    model = nn.Sequential(Many(), nn.Linear(8, 8))
    with torchoffload.fit(model, 1 << 50, blocks=Many, **options_of(device_under_test)) as handle:
        longest_s = 0.0
        for _ in range(STEPS):
            begin = time.perf_counter()
            model(torch.randn(64, 8, requires_grad=True)).sum().backward()
            longest_s = max(longest_s, time.perf_counter() - begin)
        assert handle.phase == "settled"
        assert longest_s < 20


@pytest.fixture
def plan_text(device_under_test: Device) -> str:
    model = of_blocks(3)()
    with torchoffload.fit(model, 1 << 50, **options_of(device_under_test)) as handle:
        for _ in range(STEPS):
            model(torch.randn(4, 8, WIDTH, requires_grad=True)).square().mean().backward()
        handle.save(device_under_test.directory / "plan.json")
    return (device_under_test.directory / "plan.json").read_text()


def test_a_damaged_plan_file_is_an_error(device_under_test: Device, plan_text: str):
    path, model = device_under_test.directory / "damaged.json", of_blocks(3)()
    damaged = [plan_text[:length] for length in range(0, len(plan_text), len(plan_text) // 13)]
    damaged += [plan_text.replace('"way": 1', '"way": 7'), plan_text.replace("sha", "shb").replace("0.", "1.", 1)]
    damaged += ["[]", "null", "[" * 100_000, '{"format": "torchoffload plan 3"}', "\0"]
    for text in damaged:
        if text != plan_text:
            path.write_text(text)
            with pytest.raises(ValueError, match=r"no file that Fitted\.save\(\) .*wrote .*fit without it"):
                torchoffload.fit(model, plan=path, **options_of(device_under_test))
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="no file that"):
        torchoffload.fit(model, plan=path, **options_of(device_under_test))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_plan_file_of_another_version_says_so(device_under_test: Device, plan_text: str):
    path = device_under_test.directory / "older.json"
    path.write_text(json.dumps(json.loads(plan_text) | {"format": "torchoffload plan 2"}))
    with pytest.raises(ValueError, match="its format is 'torchoffload plan 2', and this version's is"):
        torchoffload.fit(of_blocks(3)(), plan=path, **options_of(device_under_test))


def test_a_plan_file_of_another_model_is_an_error_or_has_the_bits_of_stock(device_under_test: Device, plan_text: str):
    """A model whose blocks have the same names and do something else leaves the plan."""
    path = device_under_test.directory / "plan.json"
    with pytest.raises(ValueError, match="a block '2', which this model does not have"):
        torchoffload.fit(of_blocks(2)(), plan=path, **options_of(device_under_test))

    def program(run: Run) -> None:
        model = run.module(lambda: nn.Sequential(*(BLOCKS["dropouts"]() for _ in range(3))))
        if not run.stock:
            torchoffload.fit(model, plan=path, **options_of(device_under_test))
        for _ in range(3):
            model(run.tensor(4, 8, WIDTH).requires_grad_()).square().mean().backward()
            run.check(gradients=[each.grad for each in model.parameters()])

    assert execute(program, device_under_test, stock=False) == execute(program, device_under_test, stock=True)
