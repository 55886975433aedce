"""Hooks on tensors, on nodes and on modules in a fitted model: they see what they see stock, as often as stock."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as modules
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from devices import Device
from fitted_programs import LEAST, WIDTH, Loop, Mlp, Net, Way, assert_as_stock, net

pytestmark = pytest.mark.devices("disk", "cuda")
each_way = pytest.mark.parametrize("way", LEAST, ids=map(str, LEAST))


def halve(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * 0.5


def halve_all(gradients: Any) -> Any:
    return tuple(None if each is None else each * 0.5 for each in gradients)


class OnInput(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.register_hook(halve)
        return x * 0.9 + self.down(torch.sin(self.up(x)))


class OnIntermediate(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.sin(self.up(x))
        h.register_hook(halve)
        return x + self.down(h)


class OnView(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.view(-1, WIDTH)
        flat.register_hook(halve)
        return x + self.down(torch.sin(self.up(flat))).view(x.shape)


class BeforeNode(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.down(torch.sin(self.up(x)))
        x.grad_fn.register_prehook(halve_all)
        return y


class AfterNode(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.down(torch.sin(self.up(x)))
        x.grad_fn.register_hook(lambda inputs, outputs: halve_all(inputs))
        return y


class OnWeight(Mlp):
    """Registers a hook on its weight in each forward, and removes it in the next one."""

    handle: Any = None
    count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.handle is not None:
            self.handle.remove()
        self.handle = self.up.weight.register_hook(self.halve)
        return x + self.down(torch.sin(self.up(x)))

    def halve(self, gradient: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return gradient * 0.5


@each_way
@pytest.mark.parametrize("kind", [OnInput, OnIntermediate, OnView, BeforeNode, AfterNode])
def test_hooks_on_tensors_and_nodes(device_under_test: Device, way: Way, kind: type[nn.Module]):
    assert_as_stock(net(kind), device_under_test, way)


@each_way
def test_a_hook_on_a_weight_that_is_registered_in_forward_runs_once(device_under_test: Device, way: Way):
    def left(model: Any) -> dict[str, Any]:
        return {
            "calls": [block.count for block in model.blocks],
            "hooks": [len(block.up.weight._backward_hooks) for block in model.blocks],
        }

    assert_as_stock(net(OnWeight, extra=left), device_under_test, way)


class Retains(Mlp):
    """Keeps a tensor of its forward and asks for its gradient, as Grad-CAM does."""

    def __init__(self, *, input_too: bool) -> None:
        super().__init__()
        self.input_too = input_too

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.sin(self.up(x))
        self.seen = [h, x] if self.input_too else [h]
        for each in self.seen:
            each.retain_grad()
        return x + self.down(h)


@each_way
@pytest.mark.parametrize("input_too", [False, True])
def test_gradients_that_are_retained(device_under_test: Device, way: Way, input_too: bool):
    def retained(model: Any) -> dict[str, Any]:
        return {"retained": [each.grad for block in model.blocks for each in block.seen]}

    assert_as_stock(net(lambda: Retains(input_too=input_too), extra=retained), device_under_test, way)


class OnSeveral(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.sin(self.up(x))
        self.sums: list[float] = []

        def note(gradients: Any) -> None:
            self.sums.append(sum(float(each.sum()) for each in gradients if each is not None))

        torch.autograd.graph.register_multi_grad_hook((x, h), note)
        return x + self.down(h)


@each_way
def test_hooks_on_several_gradients(device_under_test: Device, way: Way):
    assert_as_stock(
        net(OnSeveral, extra=lambda model: {"sums": [block.sums for block in model.blocks]}), device_under_test, way
    )


@each_way
def test_backward_hooks_on_modules(device_under_test: Device, way: Way):
    def program(loop: Loop) -> None:
        sums: list[float] = []
        model = loop.make(Net)
        for block in model.blocks:
            block.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,))
            block.up.register_full_backward_hook(lambda module, inputs, outputs: sums.append(float(inputs[0].sum())))
            block.down.register_full_backward_pre_hook(lambda module, outputs: (outputs[0] * 0.5,))
        loop.train(model, extra=lambda model: {"sums": list(sums)})

    assert_as_stock(program, device_under_test, way)


@each_way
def test_forward_hooks_that_change_values(device_under_test: Device, way: Way):
    def program(loop: Loop) -> None:
        model = loop.make(Net)
        for block in model.blocks:
            block.register_forward_pre_hook(lambda module, args: (args[0] * 1.1,))
            block.register_forward_hook(lambda module, args, output: output * 0.9)
            block.up.register_forward_hook(lambda module, args, output: output * 1.2)
            block.up.register_forward_pre_hook(lambda module, args, kwargs: (args, kwargs), with_kwargs=True)
        loop.train(model)

    assert_as_stock(program, device_under_test, way)


@each_way
@pytest.mark.parametrize("lasts", [True, False])
def test_features_that_hooks_collect_for_the_loss(device_under_test: Device, way: Way, lasts: bool):
    """They are the tensors of forward, also after backward; the hooks may live for the forward alone."""

    def program(loop: Loop) -> None:
        features: dict[int, torch.Tensor] = {}
        model = loop.make(Net)

        def register() -> list[Any]:
            return [
                block.up.register_forward_hook(
                    lambda module, args, output, number=number: features.__setitem__(number, output)
                )
                for number, block in enumerate(model.blocks)
            ]

        if lasts:
            register()
        for _ in range(16):
            handles = [] if lasts else register()
            loss = model(loop.batch()).square().mean() + sum(each.abs().mean() for each in features.values())
            for handle in handles:
                handle.remove()
            before = dict(features)
            loss.backward()
            are_same = [features[number] is before[number] for number in range(4)]
            loop.ends_step(model, are_same=are_same, values=[each.detach().clone() for each in features.values()])
            model.zero_grad()

    assert_as_stock(program, device_under_test, way)


@each_way
def test_a_hook_that_counts_calls(device_under_test: Device, way: Way):
    def program(loop: Loop) -> None:
        calls: list[int] = []
        model = loop.make(Net)
        for block in model.blocks:
            block.up.register_forward_hook(lambda module, args, output: calls.append(1))
        loop.train(model, extra=lambda model: {"calls": len(calls)})

    assert_as_stock(program, device_under_test, way)


class Masked(nn.Module):
    """Layers with an argument that hooks give, as PEFT's batches of several adapters do."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.low, self.high = (
            nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8, bias=False), nn.Linear(8, WIDTH, bias=False),
        )  # fmt: skip

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        scale = torch.ones(x.shape[0], 1, 1, device=x.device) if mask is None else mask
        return self.base(x) + self.high(self.low(x)) * scale


class TwoMasked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Masked(), Masked()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.two(torch.tanh(self.one(x)))


@each_way
def test_hooks_on_inner_layers_for_the_forward_alone(device_under_test: Device, way: Way):
    def program(loop: Loop) -> None:
        model = loop.make(lambda: Net(TwoMasked))

        def call(model: Any, x: torch.Tensor) -> torch.Tensor:
            mask = (torch.arange(4, device=x.device) % 2).float().view(4, 1, 1)
            handles = [
                each.register_forward_pre_hook(
                    lambda module, args, kwargs: (args, kwargs | {"mask": mask}), with_kwargs=True
                )
                for each in model.modules()
                if isinstance(each, Masked)
            ]
            y: torch.Tensor = model(x)
            for handle in handles:
                handle.remove()
            return y

        loop.train(model, call=call)

    assert_as_stock(program, device_under_test, way)


class ExpertsLoss(Mlp):
    """Has a loss of its own: in an attribute, or appended to a list that it is given."""

    def forward(self, x: torch.Tensor, losses: list[torch.Tensor] | None = None) -> torch.Tensor:
        h = self.up(x)
        self.loss = torch.logsumexp(h, -1).square().mean()
        if losses is not None:
            losses.append(self.loss)
        return x + self.down(torch.sin(h))


class GivesList(Net):
    def __init__(self) -> None:
        super().__init__(ExpertsLoss)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        losses: list[torch.Tensor] = []
        for block in self.blocks:
            x = block(x, losses)
        return self.head(x).square().mean() + sum(losses)


@each_way
def test_a_blocks_own_loss_in_an_attribute(device_under_test: Device, way: Way):
    def call(model: Any, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).square().mean()
        return loss + 0.1 * sum(block.loss for block in model.blocks)

    assert_as_stock(net(ExpertsLoss, call=call), device_under_test, way)


@each_way
def test_a_blocks_own_loss_in_a_list_that_it_is_given(device_under_test: Device, way: Way):
    assert_as_stock(lambda loop: loop.train(loop.make(GivesList)), device_under_test, way)


# Hooks that others register on blocks, or on all modules, do not keep fit from its work.


def on_blocks(register: Callable[[nn.Module], Any]) -> Callable[[Any], list[Any]]:
    return lambda model: [register(block) for block in model.blocks]


ON_BLOCKS: dict[str, Callable[[Any], list[Any]]] = {
    "before": on_blocks(lambda block: block.register_forward_pre_hook(lambda *_: None)),
    "after": on_blocks(lambda block: block.register_forward_hook(lambda *_: None)),
    "after, prepended": on_blocks(lambda block: block.register_forward_hook(lambda *_: None, prepend=True)),
    "before all": lambda model: [modules.register_module_forward_pre_hook(lambda *_: None)],
    "after all": lambda model: [modules.register_module_forward_hook(lambda *_: None)],
}


class _Watches(TorchDispatchMode):
    """Notes the storages that come to be while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for each in tree_leaves(output):
            if isinstance(each, torch.Tensor):
                storage = each.untyped_storage()
                self._seen[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return output

    def held_bytes(self, model: nn.Module) -> int:
        of_model = {weight.untyped_storage()._cdata for weight in model.parameters()}
        return sum(
            nbytes for key, (reference, nbytes) in self._seen.items() if key not in of_model and not reference.expired()
        )


def bytes_at_loss(model: nn.Module, x: torch.Tensor) -> int:
    """The bytes that a forward made and that are alive at its end."""
    with _Watches() as watches:
        loss = model(x).square().mean()
    held = watches.held_bytes(model)
    loss.backward()
    model.zero_grad()
    return held


@each_way
@pytest.mark.parametrize("since", [0, 10])
@pytest.mark.parametrize("kind", ON_BLOCKS)
def test_hooks_that_are_registered_anew_in_each_step(device_under_test: Device, way: Way, kind: str, since: int):
    held: list[int] = []

    def program(loop: Loop) -> None:
        model = loop.make(Net)
        for step in range(24):
            handles = ON_BLOCKS[kind](model) if step >= since else []
            x = loop.batch()
            if step == 23:
                held.append(bytes_at_loss(model, x))
            model(x).square().mean().backward()
            for handle in handles:
                handle.remove()
            loop.ends_step(model)
            model.zero_grad()

    assert_as_stock(program, device_under_test, way)
    stock_bytes, _, fitted_bytes = held
    assert fitted_bytes < 0.6 * stock_bytes


@each_way
def test_flops_are_counted_around_the_forward(device_under_test: Device, way: Way):
    """The counter has hooks on all modules and a mode; in the first steps, or in all."""

    def program(loop: Loop) -> None:
        model = loop.make(Net)
        for step in range(20):
            with FlopCounterMode(display=False) if step < 6 or step > 15 else contextlib.nullcontext() as counter:
                loss = model(loop.batch()).square().mean()
            loss.backward()
            loop.ends_step(model, flops=None if counter is None else counter.get_total_flops())
            model.zero_grad()

    assert_as_stock(program, device_under_test, way)
