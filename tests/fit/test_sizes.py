"""What makes a new survey: steps that are larger, longer, or made of other blocks than those that were surveyed."""

import dataclasses
import types
from typing import Any

import pytest
import torch
from torch import nn

import torchoffload
from devices import Device
from fitted_models import Model, options_of
from planned_blocks import BLOCKS, WIDTH
from torchoffload._fit.model.sizes import argument_bytes, state_of_block

pytestmark = pytest.mark.devices("disk")


def step(model: nn.Module, batch: int = 4, call: Any = None) -> None:
    x = torch.randn(batch, 8, WIDTH)
    (model(x) if call is None else call(model, x)).square().mean().backward()
    model.zero_grad()


def settled(model: nn.Module, device: Device, batch: int = 4, call: Any = None) -> Any:
    """A fitted model in half of the memory."""
    handle = torchoffload.fit(model, 1 << 50, on_unfit="warn", **options_of(device))
    while handle.phase != "settled":
        step(model, batch, call)
    take_half(handle)
    while handle.phase != "settled":
        step(model, batch, call)
    return handle


def take_half(handle: Any) -> None:
    points = handle.frontier()
    handle.replan(int((points[0].memory_bytes + points[-1].memory_bytes) / 2 / 0.96) + 1)


@pytest.mark.parametrize("sizes", [(64,), (64, 8, 8), (64, 8), (8, 64, 8, 8, 8), (8, 8, 8, 64)])
def test_the_plan_is_for_the_largest_step_of_the_survey(device_under_test: Device, sizes: tuple[int, ...]):
    def block_bytes(sizes: tuple[int, ...]) -> int:
        torch.manual_seed(0)
        model = Model(BLOCKS["transformer"])
        with torchoffload.fit(model, 1 << 50, **options_of(device_under_test)) as handle:
            for number in range(40):
                step(model, sizes[number % len(sizes)])
            assert handle.phase == "settled"
            return max(call.backward_bytes for call in handle._driver.step.calls)

    assert block_bytes(sizes) == pytest.approx(block_bytes((64,)), rel=0.05)


@pytest.mark.parametrize("hides", ["dataclass", "namespace", "nested", "slots"])
def test_a_batch_in_an_object_has_a_size(device_under_test: Device, hides: str):
    @dataclasses.dataclass
    class Batch:
        x: torch.Tensor

    @dataclasses.dataclass(slots=True)
    class Slots:
        x: torch.Tensor

    makes = {
        "dataclass": Batch,
        "namespace": lambda x: types.SimpleNamespace(x=x),
        "nested": lambda x: types.SimpleNamespace(x=[{"y": Batch(x)}]),
        "slots": Slots,
    }
    assert argument_bytes(((makes[hides](torch.zeros(3, 5)),), {})) == 60

    class OfBatch(Model):
        def forward(self, batch: Any) -> torch.Tensor:
            return super().forward(batch.x[0]["y"].x if hides == "nested" else batch.x)

    model = OfBatch(BLOCKS["transformer"])
    with settled(model, device_under_test, call=lambda model, x: model(makes[hides](x))) as handle:
        assert handle._driver.largest_size == 4 * 8 * WIDTH * 4
        step(model, 16, lambda model, x: model(makes[hides](x)))
        assert handle.phase == "survey"


def test_arguments_are_counted_once_and_without_end():
    x = torch.zeros(10)
    loop: list[Any] = [x]
    loop.append(loop)
    assert argument_bytes(((loop,), {"x": None, "module": nn.Linear(3, 3)})) == 40


def freeze(model: Model) -> None:
    for block in model.net.blocks:
        block.up.weight.requires_grad_(False)


def more_calls(model: Model) -> None:
    model.net.times = 2


def with_lora(model: Model) -> None:
    for block in model.net.blocks:
        block.lora = nn.Linear(WIDTH, 2)


def to_eval(model: Model) -> None:
    model.eval()


@pytest.mark.parametrize("change", [freeze, more_calls, with_lora, to_eval])
def test_blocks_that_have_changed_are_surveyed(device_under_test: Device, change: Any):
    model = Model(BLOCKS["transformer"])
    with settled(model, device_under_test) as handle:
        kinds = set(handle._driver._kinds)
        change(model)
        for _ in range(2 * len(handle._driver.names)):  # one block a step is looked at
            step(model)
            if handle.phase == "survey":
                break
        assert handle.phase == "survey"
        for _ in range(16):
            step(model)
        assert handle.phase in ("settled", "least memory")
        assert kinds <= set(handle._driver._kinds), "what is known is not recorded again"
        for _ in range(10):
            step(model)
        assert handle.phase in ("settled", "least memory")


def test_autocast_that_is_switched_off_is_seen(device_under_test: Device):
    def under_autocast(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    model = Model(BLOCKS["transformer"])
    with settled(model, device_under_test, call=under_autocast) as handle:
        step(model, call=under_autocast)
        assert handle.phase == "settled"
        for _ in range(2):
            step(model)
        assert handle.phase == "survey"


def test_states_that_were_surveyed_are_no_news(device_under_test: Device):
    """As where the same model is trained with and without a gradient for its input, in turn."""
    model = Model(BLOCKS["transformer"])
    with settled(model, device_under_test) as handle:
        for number in range(40):
            model.train(number % 2 == 0)
            step(model)
        assert handle.phase in ("settled", "least memory")
        phases = set()
        for number in range(10):
            model.train(number % 2 == 0)
            step(model)
            phases.add(handle.phase)
        assert phases <= {"settled", "least memory"}


def test_a_block_that_is_another_one_in_each_step_is_not_surveyed_for_ever(device_under_test: Device):
    model = Model(BLOCKS["transformer"])
    with settled(model, device_under_test) as handle:
        phases = []
        for number in range(200):
            model.net.blocks[0].extra = nn.Linear(1, 1 + number)
            step(model)
            phases.append(handle.phase)
        assert set(phases[-10:]) <= {"settled", "least memory"}


def test_the_state_of_a_block_tells_what_it_is_called_with():
    block, x = nn.Linear(4, 4), torch.zeros(2, 4)
    state = state_of_block(block, ((x,), {}))
    assert state == state_of_block(block, ((torch.zeros(9, 4),), {})), "shapes are told of by sizes"
    assert state != state_of_block(block, ((x.double(),), {}))
    assert state != state_of_block(block, ((x.clone().requires_grad_(),), {}))
    with torch.autocast("cpu", torch.bfloat16):
        assert state != state_of_block(block, ((x,), {}))
    assert state != state_of_block(block.eval(), ((x,), {}))
    assert state != state_of_block(block.train().requires_grad_(False), ((x,), {}))


def test_a_fit_that_fails_leaves_nothing_behind(device_under_test: Device):
    """A TorchScript module takes no hooks, which shows in the middle of the work."""
    for options in (options_of(device_under_test), {"move": False}):
        model = Model(BLOCKS["transformer"])
        model.net.blocks[2] = torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
        with pytest.raises(RuntimeError, match="ScriptModule"):
            torchoffload.fit(model, "1GiB", blocks=list(model.net.blocks), **options)
        plain = [each for each in model.modules() if not isinstance(each, torch.jit.ScriptModule)]
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in plain)
        with torchoffload.fit(model, "1GiB", blocks=list(model.net.blocks)[:2], **options):
            pass
