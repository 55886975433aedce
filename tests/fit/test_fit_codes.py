"""fit with compress=: what the link carries of each output is seen in a recorded call, and plans reckon with it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import torchoffload
from devices import Device
from gradients import Run, assert_same_gradients
from planned_blocks import record
from torchoffload._fit.block.record import BlockRecord
from torchoffload._fit.model.plan_file import read_plan

pytest.importorskip("torchoffload._C_testing", reason="the simulated device is in the test build alone")

from torchoffload import _C_testing

testing = _C_testing.testing
pytestmark = pytest.mark.devices("simulated-late", "simulated-seeded")

WIDTH = 64
BFLOAT16, WIDENED = 385 / 512, 385 / 1024  # of a block without exceptions


@pytest.fixture(autouse=True)
def codes_are_as_on_cuda() -> Iterator[None]:
    testing.forget_learned()
    testing.code_as_on_cuda(True)
    yield
    testing.code_as_on_cuda(False)
    testing.forget_learned()


class Normed(nn.Module):
    """A block in bfloat16 that begins with a normalisation in float32, as language models have them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False, dtype=torch.bfloat16)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        normed = wide * wide.square().mean(-1, keepdim=True).add(1e-6).rsqrt()
        return x + self.down(functional.gelu(self.up(normed.bfloat16())))


def inputs() -> torch.Tensor:
    return torch.rand(32, WIDTH).add(1).bfloat16()


def recorded(device: Device, block: nn.Module, **options: Any) -> BlockRecord:
    with device.scope(), device.context(**options):
        return record(block, inputs())


def share_of(found: BlockRecord, operator: str) -> float:
    """Of what the first call of an operator has made."""
    call = next(call for call in found.operators if str(call.operator) == f"aten.{operator}")
    return found.link_share_of(call.makes)


def counted(found: BlockRecord) -> set[int]:
    """What operators have made that count: others are casts of the block's input."""
    return {storage for call in found.operators for storage in call.makes}


@pytest.mark.parametrize("compress", [True, "auto"])
def test_what_the_link_carries_of_each_storage_is_seen(device_under_test: Device, compress: Any):
    found = recorded(device_under_test, Normed(), compress=compress, learn=True)
    assert found.link_share_of(found.saved & found.made - counted(found)) < BFLOAT16, "the input, widened"
    assert share_of(found, "mul.Tensor") == 1, "a product of float32"
    assert BFLOAT16 <= share_of(found, "mm.default") < 0.9
    assert found.link_share_of(found.inputs) == BFLOAT16
    assert found.link_share_of([]) == 1


def test_random_bits_have_no_code(device_under_test: Device):
    class Noise(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.randint(-(2**15), 2**15, x.shape, dtype=torch.int16).view(torch.bfloat16).clone() * x

    found = recorded(device_under_test, Noise(), compress=True)
    assert share_of(found, "clone.default") == 1


def test_a_write_in_place_counts(device_under_test: Device):
    class Writes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            wide = (x * 1).float()
            wide += 2**-20
            return wide.sin()

    found = recorded(device_under_test, Writes(), compress=True, learn=True)
    assert share_of(found, "_to_copy.default") == 1


@pytest.mark.parametrize(
    "options",
    [{}, {"compress": "auto", "learn": False}, {"compress": "auto", "use_pin_memory": False, "learn": True}],
)
def test_where_nothing_is_coded_the_link_carries_all(device_under_test: Device, options: dict[str, Any]):
    assert recorded(device_under_test, Normed(), **options).link_shares == {}


def test_without_learning_float32_is_not_coded(device_under_test: Device):
    found = recorded(device_under_test, Normed(), compress=True, learn=False)
    assert found.link_share_of(counted(found)) < 1, "bfloat16 is"
    assert found.link_share_of(found.made - counted(found)) == 1


def test_where_the_device_cannot_code_the_link_carries_all(device_under_test: Device):
    testing.refuse_coding("the self-test failed")
    try:
        assert recorded(device_under_test, Normed(), compress=True, learn=True).link_shares == {}
    finally:
        testing.refuse_coding("")


def test_outside_of_a_context_the_link_carries_all(device_under_test: Device):
    with device_under_test.scope():
        assert record(Normed(), inputs()).link_shares == {}


class Model(nn.Module):
    """Returns a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Normed() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


def shares_of(step: Any) -> set[float]:
    return {output.link_share for kind in step.kinds for output in kind.outputs}


@pytest.mark.parametrize("compress", [False, True])
def test_plans_know_what_is_coded_and_gradients_are_those_of_stock(
    device_under_test: Device, compress: bool, tmp_path: Path
):
    def program(run: Run) -> None:
        model = run.module(Model)
        handle = None if run.stock else torchoffload.fit(model, 1 << 50, min_offload_size=0, compress=compress)
        train(run, model)
        if handle is not None:
            handle.replan(int(handle.frontier()[0].memory_bytes / 0.96) + 1)
        train(run, model)
        if handle is not None:
            assert handle.plan.moved_bytes > 0, handle.report()
            check_plan(handle)
            handle.remove()

    def check_plan(handle: Any) -> None:
        step = handle._driver.settled.step
        assert (min(shares_of(step)) < 0.5) == compress
        assert {kind.input_link_share < 0.9 for kind in step.kinds} == {compress}
        handle.save(tmp_path / "plan.json")
        assert read_plan(tmp_path / "plan.json").step.kinds == step.kinds

    stats = assert_same_gradients(program, device=device_under_test, min_moved_fraction=1e-9)
    assert (stats.records_coded > 0) == compress


def train(run: Run, model: nn.Module) -> None:
    for step in range(20):
        model.zero_grad()
        run.reseed(step)
        model(run.tensor(32, WIDTH).bfloat16()).backward()
        run.check(gradients={name: each.grad for name, each in model.named_parameters()})
