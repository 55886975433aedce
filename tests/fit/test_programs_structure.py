"""Blocks of all shapes: their arguments, outputs, Functions, graphs and backward passes; bits as stock under fit."""

import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from devices import Device
from fitted_programs import LEAST, WAYS, WIDTH, Function, Loop, Mlp, Net, Program, Way, assert_as_stock, function, net

pytestmark = pytest.mark.devices("disk", "cuda")
each_way = pytest.mark.parametrize("way", LEAST, ids=map(str, LEAST))


class Calls(Mlp):
    """Calls a function of the test's with itself and its arguments."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, *args: Any) -> Any:
        return self.call(self, *args)


# Inputs and outputs.


@dataclasses.dataclass
class Graph:
    h: torch.Tensor
    e: torch.Tensor
    extra: dict[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(slots=True)
class Slots:
    h: torch.Tensor
    e: torch.Tensor


class Pair(NamedTuple):
    h: torch.Tensor
    e: torch.Tensor


class Chains(Net):
    """Gives each block the output of the one before, whatever that is."""

    def __init__(self, call: Callable[..., Any], begin: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__(lambda: Calls(call))
        self.begin = begin

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = self.begin(self.first(x), x)
        for block in self.blocks:
            output = block(state)
            state = state if output is None else output
        h, e = (state["h"], state["e"]) if isinstance(state, dict) else (state.h, state.e)
        return self.head(h).square().mean() + e.square().mean()


def anew(make: Callable[[torch.Tensor, torch.Tensor], Any]) -> Callable[..., Any]:
    def call(block: Any, state: Any) -> Any:
        h, e = (state["h"], state["e"]) if isinstance(state, dict) else (state.h, state.e)
        return make(h + block.down(torch.sin(block.up(h))) * e, e + torch.cos(block.up(e)))

    return call


def in_dict(block: Any, state: dict[str, Any]) -> dict[str, Any]:
    state["e"] = state["e"] + torch.sin(block.up(state["h"]))
    state["h"] = state["h"] + block.down(torch.tanh(state["h"])) * state["e"]
    state.setdefault("seen", []).append(state["h"].detach().mean())
    return state


def in_object(block: Any, state: Graph) -> Graph:
    in_object_without_output(block, state)
    return state


def in_object_without_output(block: Any, state: Graph) -> None:
    state.e = state.e + torch.sin(block.up(state.h))
    state.h = state.h + block.down(torch.tanh(state.h)) * state.e
    state.extra["n"] = state.extra.get("n", 0) + 1


def as_dict(h: torch.Tensor, e: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"h": h, "e": e}


STRUCTURES: dict[str, tuple[Callable[..., Any], Callable[[torch.Tensor, torch.Tensor], Any]]] = {
    "a named tuple": (anew(Pair), Pair),
    "a dataclass": (anew(Graph), Graph),
    "a dataclass with slots": (anew(Slots), Slots),
    "a dict": (anew(as_dict), as_dict),
    "a dict that is changed": (in_dict, as_dict),
    "an object that is changed": (in_object, Graph),
    "an object that is changed, and no output": (in_object_without_output, Graph),
}


@each_way
@pytest.mark.parametrize("kind", STRUCTURES)
def test_structures_that_blocks_take_and_return(device_under_test: Device, way: Way, kind: str):
    assert_as_stock(lambda loop: loop.train(loop.make(lambda: Chains(*STRUCTURES[kind]))), device_under_test, way)


def in_place(block: Any, x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    return y.add_(block.down(torch.sin(block.up(y * 1.0))))


@each_way
@pytest.mark.parametrize(
    ("call", "is_computed_again"),
    [(lambda block, x: x, False), (lambda block, x: x[:, :], False), (in_place, True),
     (lambda block, x: x.detach() + block.down(torch.sin(block.up(x.detach()))), True)],
    ids=["the input", "a view of it", "a clone that was written to", "of detached inputs"],
)  # fmt: skip
def test_outputs(device_under_test: Device, way: Way, call: Callable[..., Any], is_computed_again: bool):
    assert_as_stock(net(lambda: Calls(call)), device_under_test, way, is_computed_again=is_computed_again)


def generator(block: Any, x: torch.Tensor) -> Iterator[torch.Tensor]:
    h = block.up(x)
    yield torch.sin(h)
    yield x + block.down(torch.tanh(h))


class OfGenerators(Net):
    def through(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            a, c = block(x)
            x = a * 0.1 + c
        return x


@each_way
def test_blocks_that_are_generators_run_after_their_call(device_under_test: Device, way: Way):
    assert_as_stock(
        lambda loop: loop.train(loop.make(lambda: OfGenerators(lambda: Calls(generator)))),
        device_under_test,
        way,
        is_computed_again=False,
    )


# Custom Functions.


class OnContext(torch.autograd.Function):
    """Keeps tensors as attributes of its context, too, which no hooks see."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        y = torch.exp(-x * x)
        ctx.save_for_backward(x, y, y * 2)
        ctx.factor, ctx.total, ctx.hidden = factor, y.sum(), y
        return y * factor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, _, z = ctx.saved_tensors
        return gradient * ctx.factor * -x * z + 0 * ctx.total + 0 * ctx.hidden, None


class Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * 2 * (1 + 0 * ctx.saved_tensors[0])


class Sorts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        values, order = x.sort(-1)
        ctx.mark_non_differentiable(order)
        ctx.save_for_backward(order)
        return values, order

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: Any) -> Any:
        (order,) = ctx.saved_tensors
        return torch.zeros_like(gradient).scatter_(-1, order, gradient)


class Maps(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> Any:
        return torch.exp(x), x.cos()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs, *output)

    @staticmethod
    def backward(ctx: Any, one: torch.Tensor, other: torch.Tensor) -> Any:
        x, exponential, _ = ctx.saved_tensors
        return one * exponential - other * x.sin()


class ReadsTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        of_x = gradient @ ctx.saved_tensors[1].t() if ctx.needs_input_grad[0] else None
        return of_x, ctx.saved_tensors[0].flatten(0, 1).t() @ gradient.flatten(0, 1)


class SavesIfNeeded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if ctx.needs_input_grad[1]:
            ctx.save_for_backward(x)
        ctx.weight = weight.detach().clone()
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        of_weight = (gradient * ctx.saved_tensors[0]).sum((0, 1)) if ctx.needs_input_grad[1] else None
        return gradient * ctx.weight, of_weight


FUNCTIONS: dict[str, Function] = {
    "attributes of the context": lambda block, h: OnContext.apply(h, 1.5),
    "in place": lambda block, h: torch.sin(Dirty.apply(h * 1.0)),
    "not differentiable": lambda block, h: Sorts.apply(h)[0] * (Sorts.apply(h)[1] % 2),
    "under vmap": lambda block, h: sum(torch.func.vmap(Maps.apply)(h)) * 0.1,
    "saved tensors read twice": lambda block, h: ReadsTwice.apply(torch.tanh(h), block.up.weight),
    "saves what is needed": lambda block, h: SavesIfNeeded.apply(h, block.down.bias),
}


@each_way
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_custom_functions(device_under_test: Device, way: Way, kind: str):
    assert_as_stock(function(FUNCTIONS[kind]), device_under_test, way)


# What stands in a block.


def to_padded(block: Any, h: torch.Tensor) -> torch.Tensor:
    nested = torch.nested.as_nested_tensor([h[0], h[1]], layout=torch.jagged)
    padded = torch.nested.to_padded_tensor(nested.sin() * nested, 0.0)
    return functional.pad(padded, (0, 0, 0, 0, 0, 2))


def quantised(block: Any, h: torch.Tensor) -> torch.Tensor:
    fake = torch.fake_quantize_per_tensor_affine(h, 0.05, 0, -128, 127)
    return fake.sin() + torch.quantize_per_tensor(h.detach(), 0.1, 0, torch.qint8).dequantize()


def conjugated(block: Any, h: torch.Tensor) -> torch.Tensor:
    z = torch.complex(h, h.cos())
    return torch.exp(z.conj()).imag + (z.conj() * z).real


def eye(h: torch.Tensor) -> torch.Tensor:
    return torch.eye(WIDTH, device=h.device)


OPERATORS: dict[str, Function] = {
    "jvp": lambda block, h: torch.func.jvp(torch.sin, (h,), (h * 2,))[1],
    "functional_call": lambda block, h: torch.func.functional_call(
        block.down, {"weight": block.up.weight * 2, "bias": block.down.bias}, (torch.sin(h),)
    ),
    "complex": lambda block, h: torch.fft.irfft(
        torch.fft.rfft(h) * torch.exp(1j * torch.arange(17, device=h.device)).conj(), n=WIDTH
    ),
    "conjugate": conjugated,
    "sparse": lambda block, h: torch.sparse.mm(eye(h).to_sparse(), h.flatten(0, 1).T).T.view_as(h).sin(),
    "sparse rows": lambda block, h: (eye(h).to_sparse_csr() @ h.flatten(0, 1).T).T.view_as(h).sin(),
    "nested": to_padded,
    "fake quantisation": lambda block, h: torch.fake_quantize_per_tensor_affine(h, 0.05, 0, -128, 127).sin(),
    "dropout": lambda block, h: functional.dropout(torch.sin(h), 0.2),
    "in place": lambda block, h: torch.relu_(torch.sin(h).mul_(2)),
}


@each_way
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", OPERATORS)
def test_operators(device_under_test: Device, way: Way, kind: str):
    assert_as_stock(function(OPERATORS[kind]), device_under_test, way)


@each_way
def test_gradients_by_torch_func_inside_of_a_block(device_under_test: Device, way: Way):
    program = function(lambda block, h: torch.func.grad(lambda t: torch.sin(t).sum())(h))
    assert_as_stock(program, device_under_test, way, is_computed_again=False)


@each_way
@pytest.mark.devices("disk")
@pytest.mark.filterwarnings("ignore")
def test_quantised_tensors(device_under_test: Device, way: Way):
    assert_as_stock(function(quantised), device_under_test, way)


class Recurs(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.inner, self.out = kind(WIDTH, WIDTH, 2, batch_first=True, dropout=0.2), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(self.inner(x)[0])


class Embeds(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(50, WIDTH, **options), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.sin(self.out(self.table(torch.arange(32, device=x.device).view(4, 8))))


class Convolves(nn.Module):
    """As torchvision's residual networks: each normalisation is followed by an activation in place."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv1d(8, 8, 3, padding=1, bias=False), nn.Conv1d(8, 8, 1, bias=False)
        self.norm, self.other_norm, self.relu = nn.BatchNorm1d(8), nn.BatchNorm1d(8), nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.other_norm(self.b(self.relu(self.norm(self.a(x)))))
        return self.relu(h + x)


class TurnsInPlace(nn.Module):
    """Changes the shape of a tensor in place, and asks for its size afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.across, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(8, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x).transpose_(1, 2)
        z = self.across(h * 2.0)
        return x + self.down(torch.tanh(torch.sin(z * (1.0 / h.size(1)))[:, :8]))


@torch.jit.script
def bias_dropout_add(x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    return residual + torch.nn.functional.dropout(x + bias, p=0.1, training=True)


@torch.jit.script
def gated(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(y)


def scripted(block: Any, x: torch.Tensor) -> torch.Tensor:
    return bias_dropout_add(block.down(torch.tanh(block.up(x))), block.down.bias, x)


def tries(block: Any, x: torch.Tensor) -> torch.Tensor:
    h = torch.tanh(block.up(x))
    try:
        return x * torch.sigmoid(block.down(h))
    except Exception:
        return x * 0


def catches_all(block: Any, x: torch.Tensor) -> torch.Tensor:
    try:
        return torch.tanh(block.up(x)) * torch.sigmoid(block.down(x))
    except:  # noqa: E722 (as old code has it)
        return x


MODULES: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: Recurs(nn.LSTM),
    "GRU": lambda: Recurs(nn.GRU),
    "RNN": lambda: Recurs(nn.RNN),
    "an encoder's layer": lambda: nn.TransformerEncoderLayer(WIDTH, 4, 64, 0.1, batch_first=True),
    "an embedding": Embeds,
    "a sparse embedding": lambda: Embeds(sparse=True),
    "an embedding of bounded norm": lambda: Embeds(max_norm=1.0),
    "residual convolutions": Convolves,
    "a shape that changes in place": TurnsInPlace,
    "a scripted function at the end": lambda: Calls(scripted),
    "a scripted function alone": lambda: Calls(lambda block, x: gated(block.up(x), block.down(x))),
    "a block that catches exceptions": lambda: Calls(tries),
    "a block that catches all": lambda: Calls(catches_all),
}


@pytest.fixture(scope="module", autouse=True)
def _scripted_functions_have_been_profiled():
    """The first calls of a scripted function run differently from the later ones."""
    for _ in range(8):
        x = torch.ones(4, 8, WIDTH, requires_grad=True)
        (gated(x * 1, x * 2) + bias_dropout_add(x * 1, x[0, 0] * 1, x * 1)).sum().backward()


@each_way
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", MODULES)
def test_modules(device_under_test: Device, way: Way, kind: str):
    assert_as_stock(net(MODULES[kind]), device_under_test, way)


class SymmetricWeight(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).T


PARAMETRIZATIONS: dict[str, Callable[[nn.Module], Any]] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "weight_norm by hooks": torch.nn.utils.weight_norm,
    "spectral_norm by hooks": torch.nn.utils.spectral_norm,
}


@each_way
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("kind", PARAMETRIZATIONS)
def test_parametrized_weights(device_under_test: Device, way: Way, kind: str):
    def make() -> nn.Module:
        model = Net()
        for block in model.blocks:
            PARAMETRIZATIONS[kind](block.up)
        return model

    assert_as_stock(lambda loop: loop.train(loop.make(make)), device_under_test, way)


@each_way
@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("backward_inside", [False, True])
def test_parametrized_weights_that_are_cached(device_under_test: Device, way: Way, calls: int, backward_inside: bool):
    def make() -> nn.Module:
        model = Net()
        for block in model.blocks:
            parametrize.register_parametrization(block.up, "weight", SymmetricWeight())
        return model

    def program(loop: Loop) -> None:
        model = loop.make(make)
        for _ in range(14):
            x = loop.batch()
            with parametrize.cached():
                loss = sum(model(x * (number + 1)).square().mean() for number in range(calls))
                if backward_inside:
                    loss.backward()
            if not backward_inside:
                loss.backward()
            loop.ends_step(model)
            model.zero_grad()

    assert_as_stock(program, device_under_test, way)


@each_way
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_of_the_users_inside_of_a_block(device_under_test: Device, way: Way, reentrant: bool):
    def call(block: Any, x: torch.Tensor) -> torch.Tensor:
        h = checkpoint(lambda t: functional.dropout(torch.sin(block.up(t)), 0.2), x, use_reentrant=reentrant)
        return x + block.down(torch.tanh(h))

    assert_as_stock(net(lambda: Calls(call)), device_under_test, way)


# Graphs and backward passes.


def penalty(loop: Loop) -> None:
    model = loop.make(Net)
    for _ in range(14):
        x = loop.batch().requires_grad_()
        y = model(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        loss = y.square().mean() + (slope.norm(2, -1) - 1).square().mean()
        loss.backward()
        loop.ends_step(model, loss=loss.detach(), of_input=x.grad)
        model.zero_grad()


def third_derivative(loop: Loop) -> None:
    model = loop.make(lambda: Net(depth=2))
    for _ in range(12):
        x = loop.batch(2, 2, WIDTH).requires_grad_()
        y = model(x).sum()
        for _ in range(3):
            (slope,) = torch.autograd.grad(y, x, create_graph=True)
            y = slope.square().sum()
        y.backward()
        loop.ends_step(model, of_input=x.grad)
        model.zero_grad()


def retained(loop: Loop) -> None:
    model = loop.make(Net)
    for _ in range(14):
        loss = model(loop.batch()).square().mean()
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        some = torch.autograd.grad(loss, [model.blocks[2].up.weight, model.blocks[1].down.bias], retain_graph=True)
        loss.backward()
        loop.ends_step(model, some=some)
        model.zero_grad()


def several_forwards(loop: Loop) -> None:
    model = loop.make(Net)
    kept = None
    for step in range(30):
        losses = [model(loop.batch(2 + number, 8, WIDTH)).square().mean() for number in range(3)]
        for loss in losses if step % 2 else losses[::-1]:
            loss.backward()
        if step % 3 == 0:
            model(loop.batch())
        if step % 3 == 1:
            kept = model(loop.batch())
        loop.ends_step(model, kept=None if kept is None else kept.detach())
        model.zero_grad()


def other_thread(loop: Loop) -> None:
    model = loop.make(Net)
    for _ in range(14):
        loss = model(loop.batch()).square().mean()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        loop.ends_step(model)
        model.zero_grad()


def with_anomaly_detection(loop: Loop) -> None:
    with torch.autograd.set_detect_anomaly(True):
        loop.train(loop.make(Net))


def frozen(loop: Loop) -> None:
    def make() -> nn.Module:
        model = Net()
        for module in [model.first, *model.blocks[:2]]:
            module.requires_grad_(False)
        return model

    loop.train(loop.make(make))


def freezing(loop: Loop) -> None:
    def freeze(model: Any, step: int) -> None:
        for number, block in enumerate(model.blocks):
            block.requires_grad_((step + number) % 3 != 0)

    loop.train(loop.make(Net), after=freeze, steps=24)


def adapted(loop: Loop) -> None:
    """Gradients of gradients of weights, through ``functional_call``."""
    model = loop.make(lambda: Net(depth=3))
    for _ in range(12):
        weights = dict(model.named_parameters())
        x = loop.batch()
        loss = torch.func.functional_call(model, weights, (x,)).square().mean()
        slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        faster = {name: weight - 0.1 * slope for (name, weight), slope in zip(weights.items(), slopes, strict=True)}
        torch.func.functional_call(model, faster, (x * 2,)).square().mean().backward()
        loop.ends_step(model)
        model.zero_grad()


def adversarial(loop: Loop) -> None:
    """Two fitted models; the one is frozen while the other learns, and one backward goes through both."""
    makes, judges = loop.make(lambda: Net(depth=3)), loop.make(lambda: Net(depth=3))
    for _ in range(24):
        real, noise = loop.batch(), loop.batch()
        judges.requires_grad_(True)
        fake = functional.pad(makes(noise), (0, 24))
        mixed = (0.3 * real + 0.7 * fake.detach()).requires_grad_()
        (slope,) = torch.autograd.grad(judges(mixed).sum(), mixed, create_graph=True)
        loss = judges(fake.detach()).mean() - judges(real).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()
        loss.backward()
        loop.ends_step(judges)
        judges.zero_grad()
        judges.requires_grad_(False)
        (-judges(fake).mean()).backward()
        loop.ends_step(makes, judges)
        makes.zero_grad()


def without_early_stop(loop: Loop) -> None:
    with set_checkpoint_early_stop(False):
        loop.train(loop.make(lambda: Net(lambda: Mlp(lambda block, h: functional.dropout(torch.sin(h), 0.2)))))


def slope_of_energy(block: Any, h: torch.Tensor) -> torch.Tensor:
    """A step down an energy, as in energy-based layers and inner optimisation."""
    for _ in range(2):
        (slope,) = torch.autograd.grad(torch.tanh(block.down(torch.sin(h))).sum(), h, create_graph=True)
        h = h - 0.1 * slope
    return h


def fixed_slope(block: Any, h: torch.Tensor) -> torch.Tensor:
    """A step without a gradient of its own, in another number of operators."""
    start = h.detach().requires_grad_()
    (slope,) = torch.autograd.grad(torch.tanh(block.down(torch.sin(start))).sum(), start)
    return torch.sin(h) - 0.1 * slope


def inner_backward(block: Any, h: torch.Tensor) -> torch.Tensor:
    start = h.detach().requires_grad_()
    torch.autograd.backward(torch.cos(torch.sin(start)).sum(), inputs=[start])
    assert start.grad is not None
    return torch.sin(h) * start.grad


def in_blocks(function: Any, which: tuple[int, ...] = (0, 1, 2, 3)) -> Program:
    def program(loop: Loop) -> None:
        made = itertools.count()
        loop.train(loop.make(lambda: Net(lambda: Mlp(function if next(made) % 4 in which else None))), steps=24)

    return program


class Forces(Net):
    """Returns an energy and its gradient, as a potential does."""

    def forward(self, x: torch.Tensor) -> Any:
        x = x.requires_grad_()
        energy = super().forward(x).square().sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return energy, force


def forces(loop: Loop) -> None:
    model = loop.make(Forces)
    for _ in range(24):
        energy, force = model(loop.batch())
        (energy.square() + force.square().mean()).backward()
        loop.ends_step(model, force=force.detach())
        model.zero_grad()


class ForceHead(nn.Module):
    """Asks in its forward for a gradient through blocks that were called before."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mlp() for _ in range(2))

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> Any:
        for block in self.blocks:
            h = block(h)
        energy = h.square().sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return energy, self.blocks[1](force)


class InParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.force = Net(), ForceHead()
        self.net.head = nn.Linear(WIDTH, WIDTH)


def forces_in_parts(loop: Loop) -> None:
    model = loop.make(InParts)
    for _ in range(24):
        x = loop.batch().requires_grad_()
        energy, force = model.force(x, model.net(x))
        (energy + force.square().mean()).backward()
        loop.ends_step(model, force=force.detach())
        model.zero_grad()


class Trains(Net):
    """Has its backward in its own forward."""

    def forward(self, x: torch.Tensor) -> Any:
        loss = super().forward(x).square().mean()
        loss.backward()
        return loss.detach()


def backward_in_forward(loop: Loop) -> None:
    model = loop.make(lambda: Trains(lambda: Mlp(slope_of_energy)))
    for _ in range(24):
        loss = model(loop.batch())
        loop.ends_step(model, loss=loss)
        model.zero_grad()


PASSES: dict[str, Program] = {
    "a gradient inside of each block": in_blocks(slope_of_energy),
    "a gradient inside of the first block": in_blocks(slope_of_energy, (0,)),
    "a gradient without a graph inside of blocks": in_blocks(fixed_slope, (0, 2)),
    "a backward inside of blocks": in_blocks(inner_backward, (0, 2)),
    "energy and forces": forces,
    "energy and forces in parts": forces_in_parts,
    "a backward in the model's forward": backward_in_forward,
    "a gradient penalty": penalty,
    "a third derivative": third_derivative,
    "retained graphs": retained,
    "several forwards": several_forwards,
    "a backward in another thread": other_thread,
    "anomaly detection": with_anomaly_detection,
    "frozen blocks": frozen,
    "freezing and thawing": freezing,
    "meta-learning": adapted,
    "adversarial networks": adversarial,
    "no early stop": without_early_stop,
}


# What has no plan that takes less: a model that is one block, and one that is another in each step.
NOT_AGAIN = ("freezing and thawing", "a third derivative")


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("way", WAYS, ids=map(str, WAYS))
@pytest.mark.parametrize("kind", PASSES)
def test_backward_passes(device_under_test: Device, way: Way, kind: str):
    assert_as_stock(PASSES[kind], device_under_test, way, is_computed_again=kind not in NOT_AGAIN)


@each_way
@pytest.mark.parametrize("stays", [True, False])
def test_an_exception_in_a_backward_hook(device_under_test: Device, way: Way, stays: bool):
    """A step that fails in the middle of backward leaves nothing that the next one trips over."""

    class Stop(Exception):
        pass

    def program(loop: Loop) -> None:
        model = loop.make(Net)

        def fail(gradient: torch.Tensor) -> None:
            raise Stop

        for step in range(20):
            handle = model.blocks[1].register_forward_hook(
                lambda module, args, output, step=step: output.register_hook(fail) and None if step % 3 == 2 else None
            )
            with contextlib.suppress(Stop):
                model(loop.batch()).square().mean().backward()
            if not stays:
                model.zero_grad()
            handle.remove()
            loop.ends_step(model)
            model.zero_grad()

    assert_as_stock(program, device_under_test, way)
