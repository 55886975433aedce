"""Changes between forward and backward: a recomputation is of the values of forward, or it is refused."""

import contextlib
import contextvars
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import torchoffload
from devices import Device
from fitted_programs import LEAST, WAYS, WIDTH, Function, Loop, Mlp, Net, Program, Way, assert_as_stock, function, net

pytestmark = pytest.mark.devices("disk", "cuda")
each_way = pytest.mark.parametrize("way", LEAST, ids=map(str, LEAST))


# Tensors that are no parameters and no buffers.


class HasTensor(Mlp):
    """Adds, or multiplies with, a tensor that is an ordinary attribute."""

    multiplies = False

    def __init__(self) -> None:
        super().__init__()
        self.shift = torch.ones(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        h = h * self.shift if self.multiplies else h + self.shift
        return x + self.down(torch.tanh(h))


class Multiplies(HasTensor):
    multiplies = True


def raise_shift(model: Any, _step: int) -> None:
    for block in model.blocks:
        block.shift.add_(0.1)


@each_way
def test_a_tensor_attribute_that_is_written_to_before_backward(device_under_test: Device, way: Way):
    assert_as_stock(net(HasTensor, between=raise_shift), device_under_test, way)


@each_way
def test_a_tensor_attribute_that_autograd_saved_is_autograds_own_error(device_under_test: Device, way: Way):
    assert_as_stock(
        net(Multiplies, between=raise_shift), device_under_test, way, stock_raises=True, is_computed_again=False
    )


@each_way
def test_a_tensor_of_a_closure_that_is_written_to_before_backward(device_under_test: Device, way: Way):
    def program(loop: Loop) -> None:
        shift = torch.ones((), device=loop.device)
        model = loop.make(lambda: Net(lambda: Mlp(lambda block, h: h + shift)))
        loop.train(model, between=lambda model, step: shift.add_(0.1))

    assert_as_stock(program, device_under_test, way)


class Bias:
    """An object that holds a tensor."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class TakesBias(Mlp):
    def forward(self, x: torch.Tensor, bias: Any = None) -> torch.Tensor:
        value = bias["value"] if isinstance(bias, dict) else bias.value
        return x + self.down(torch.tanh(self.up(x) + value))


class GivesBias(Net):
    """Gives its blocks an object, or a dict, whose tensor it writes to between them."""

    def __init__(self, holder: Callable[[torch.Tensor], Any]) -> None:
        super().__init__(TakesBias)
        self.holder = holder

    def through(self, x: torch.Tensor) -> torch.Tensor:
        value = torch.zeros(WIDTH, device=x.device)
        for block in self.blocks:
            x = block(x, self.holder(value))
            value.add_(0.5)
        return x


@pytest.mark.parametrize("holder", [Bias, lambda value: {"value": value}], ids=["object", "dict"])
@each_way
def test_an_argument_whose_tensor_is_written_to_between_blocks(device_under_test: Device, way: Way, holder):
    assert_as_stock(lambda loop: loop.train(loop.make(lambda: GivesBias(holder))), device_under_test, way)


class AddsInPlace(Net):
    def through(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x += block(x)
        return x


class ReadsOnly(Mlp):
    """Reads its input, of which autograd saves nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.sin(self.up(x * 0.9)))


COPIED = "writes to arguments of a {} after its forward, as x += block(x) does: a call that is computed again holds"


class CastNormed(Mlp):
    """Normalizes as transformers of low precision do: in float32, so that autograd saves nothing of the input."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        h = x.float()
        h = (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        h = self.up(h)
        return self.down(torch.sin(h if mask is None else h + mask))


@pytest.mark.parametrize("way", WAYS, ids=map(str, WAYS))
@pytest.mark.parametrize("block", [ReadsOnly, CastNormed])
def test_a_residual_stream_that_is_added_to_in_place_is_copied(device_under_test: Device, way: Way, block):
    """Nothing shows that a block's input will be written to later, so the first step copies the inputs, and learns."""
    program = net(block, depth=4)

    def in_place(loop: Loop) -> None:
        model = loop.make(lambda: AddsInPlace(block))
        if block is CastNormed:
            model.bfloat16()
        loop.train(model, call=lambda model, x: model(x.to(model.head.weight.dtype)))

    outcome = assert_as_stock(in_place, device_under_test, way)
    assert COPIED.format(block.__name__) in outcome.reports[0]
    assert "after its forward" not in assert_as_stock(program, device_under_test, way).reports[0]


class GivesMask(AddsInPlace):
    """Gives all blocks one large mask, and frees the first one of its inputs of gradients."""

    def through(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(128, 8, WIDTH, device=x.device, dtype=x.dtype)
        x = x.detach()
        for block in self.blocks:
            x += block(x, mask)
            mask.add_(0.01)
        return x


@each_way
def test_a_large_mask_and_an_input_without_gradients_that_are_written_to_between_blocks(
    device_under_test: Device, way: Way
):
    def program(loop: Loop) -> None:
        model = loop.make(lambda: GivesMask(CastNormed)).bfloat16()
        loop.train(model, shape=(128, 8, WIDTH), call=lambda model, x: model(x.to(model.head.weight.dtype)))

    outcome = assert_as_stock(program, device_under_test, way)
    assert COPIED.format("CastNormed") in outcome.reports[0]


class SharesMask(Net):
    def through(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(128, 8, WIDTH, device=x.device, dtype=x.dtype)
        for block in self.blocks:
            x = x + block(x, mask)
        return x


@pytest.mark.devices("cpu")
@pytest.mark.parametrize("compiles", [False, True])
def test_a_batch_of_a_large_data_set_is_not_copied_with_all_of_it(compiles: bool):
    data = torch.randn(400, 8, WIDTH, dtype=torch.bfloat16)
    model = nn.Sequential(*(CastNormed() for _ in range(3))).bfloat16()
    if compiles:
        for block in model:
            block.compile(backend="aot_eager")
    fitted = torchoffload.fit(model, 1 << 40, move=False, blocks=CastNormed)
    shape = [[data.nbytes]] * 2
    for step in range(3):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler:
            model(data[step : step + 4]).square().mean().backward()
        assert not [each for each in profiler.events() if each.name == "aten::copy_" and each.input_shapes[:2] == shape]
    fitted.remove()


@pytest.mark.devices("cpu")
def test_blocks_that_are_given_the_same_tensor_share_its_copy():
    """The first step of the survey copies the inputs that autograd does not save; many layers may be given one mask."""
    model = SharesMask(CastNormed, depth=8)
    fitted = torchoffload.fit(model, 1 << 40, move=False, blocks=CastNormed)
    shape = [[128 * 8 * WIDTH * 4]] * 2
    for expected in (1, 0):  # of the first step and of the next one
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler:
            model(torch.randn(128, 8, WIDTH)).square().mean().backward()
        copies = [each for each in profiler.events() if each.name == "aten::copy_" and each.input_shapes[:2] == shape]
        assert len(copies) == expected
    fitted.remove()


@each_way
def test_a_residual_stream_that_autograd_saved_is_autograds_own_error(device_under_test: Device, way: Way):
    assert_as_stock(
        lambda loop: loop.train(loop.make(AddsInPlace)), device_under_test, way, stock_raises=True,
        is_computed_again=False,
    )  # fmt: skip


class Temperature(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("temperature", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x) + self.temperature))


def cool(model: Any, _step: int = 0) -> None:
    for block in model.blocks:
        block.temperature.mul_(0.9)


@each_way
def test_a_schedule_whose_buffer_is_updated_before_backward(device_under_test: Device, way: Way):
    assert_as_stock(net(Temperature, between=cool), device_under_test, way)


@each_way
def test_a_schedule_whose_buffer_is_updated_after_each_of_two_forwards(device_under_test: Device, way: Way):
    def program(loop: Loop) -> None:
        model = loop.make(lambda: Net(Temperature))
        for _ in range(14):
            losses = []
            for _ in range(2):
                losses.append(model(loop.batch()).square().mean())
                cool(model)
            for loss in losses:
                loss.backward()
            loop.ends_step(model)
            model.zero_grad()

    assert_as_stock(program, device_under_test, way)


class SharesCount(Mlp):
    """All blocks read one buffer, and the last of them writes to it."""

    is_last = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.sin(self.up(x)) * self.count.add(1).log()
        if self.is_last:
            self.count.add_(1)
        return x + self.down(h)


class SharedCount(Net):
    def __init__(self) -> None:
        super().__init__(SharesCount)
        count = torch.ones(())
        for block in self.blocks:
            block.register_buffer("count", count)
        self.blocks[-1].is_last = True


@each_way
def test_a_buffer_of_all_blocks_that_the_last_one_writes_to(device_under_test: Device, way: Way):
    assert_as_stock(lambda loop: loop.train(loop.make(SharedCount)), device_under_test, way)


# Random numbers and what else Python draws.


class DrawsOwn(Mlp):
    """Draws from generators of its own, which are made at the first call."""

    def __init__(self, make: Callable[[torch.device], Any], draw: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.make, self.draw, self.generator = make, draw, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.generator is None:
            self.generator = self.make(x.device)
        h = self.up(x)
        return x + self.down(torch.sin(h) * self.draw(self.generator, h))


def decide(generator: torch.Generator, h: torch.Tensor) -> float:
    drawn = torch.empty((), device=h.device).uniform_(generator=generator)
    return 2.0 if float(drawn) > 0.5 else 1.0


OWN_GENERATORS = {
    "NumPy": (lambda device: numpy.random.default_rng(0), lambda generator, h: float(generator.random())),
    "Python": (lambda device: random.Random(0), lambda generator, h: generator.random()),
    "PyTorch": (
        lambda device: torch.Generator(device).manual_seed(1),
        lambda generator, h: torch.rand(h.shape, generator=generator, device=h.device),
    ),
    "PyTorch, that decides": (lambda device: torch.Generator(device).manual_seed(1), decide),
}


@pytest.mark.parametrize("kind", OWN_GENERATORS)
@each_way
def test_generators_of_a_blocks_own(device_under_test: Device, way: Way, kind: str):
    assert_as_stock(net(lambda: DrawsOwn(*OWN_GENERATORS[kind])), device_under_test, way)


@pytest.mark.parametrize(
    "use",
    [
        lambda block, h: torch.sin(h) * random.random(),
        lambda block, h: torch.sin(h) * float(numpy.random.rand()),  # noqa: NPY002
        lambda block, h: h.sin() * (0.5 if random.random() < 0.5 else 1.0),
    ],
    ids=["random", "NumPy's", "a branch"],
)
@each_way
def test_what_python_draws_is_drawn_once(device_under_test: Device, way: Way, use: Function):
    assert_as_stock(function(use), device_under_test, way)


def twice_the_same(block: Any, h: torch.Tensor) -> torch.Tensor:
    """Dropout with one mask in two places, as invertible networks have it."""
    state = torch.get_rng_state()
    h = functional.dropout(torch.sin(h), 0.3)
    torch.set_rng_state(state)
    return functional.dropout(torch.tanh(h), 0.3)


def seeded(block: Any, h: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        h = functional.dropout(torch.sin(h), 0.3)
    return functional.dropout(torch.tanh(h), 0.3)


@pytest.mark.parametrize("use", [twice_the_same, seeded])
@each_way
def test_random_states_that_a_block_sets(device_under_test: Device, way: Way, use: Function):
    assert_as_stock(function(use), device_under_test, way)


@each_way
def test_a_seed_that_is_set_before_backward(device_under_test: Device, way: Way):
    assert_as_stock(
        function(
            lambda block, h: functional.dropout(torch.sin(h), 0.3) * (torch.initial_seed() % 7 + 1),
            between=lambda model, step: torch.manual_seed(step + 3),
        ),
        device_under_test,
        way,
    )


# Modes, switches and contexts that end before backward.

SCALE = contextvars.ContextVar("scale", default=1.0)


class Local(threading.local):
    scale = 1.0


LOCAL = Local()


@contextlib.contextmanager
def context_variable() -> Iterator[None]:
    token = SCALE.set(3.0)
    yield
    SCALE.reset(token)


@contextlib.contextmanager
def thread_local() -> Iterator[None]:
    LOCAL.scale = 3.0
    yield
    LOCAL.scale = 1.0


@contextlib.contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def other_thread_count() -> Iterator[None]:
    count = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(count)


@contextlib.contextmanager
def precision_of_a_backend() -> Iterator[None]:
    """After it PyTorch refuses to tell the precision of all backends."""
    before = torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.conv.fp32_precision
    torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.conv.fp32_precision = "tf32", "bf16"
    yield
    torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.conv.fp32_precision = before


@contextlib.contextmanager
def precision_of_all_backends() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision(before)


class SinBecomesCos(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return (torch.cos if func is torch.sin else func)(*args, **(kwargs or {}))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.view(4, 8, 4, 8).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        h = functional.scaled_dot_product_attention(q, k, v)
        return x + self.out(h.transpose(1, 2).reshape(x.shape))


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(torch.tanh(self.a(x)))


def convolutions(loop: Loop) -> None:
    model = loop.make(lambda: nn.Sequential(*(Convolutions() for _ in range(4))))
    loop.train(model, shape=(2, 16, 12, 12), around=lambda: torch.backends.mkldnn.flags(enabled=False))


def in_a_device_context(loop: Loop) -> None:
    model = loop.make(lambda: Net(lambda: Mlp(lambda block, h: torch.sin(h) + torch.arange(WIDTH))))
    loop.train(model, around=lambda: loop.device)


CONTEXTS: dict[str, Program] = {
    "a context variable": function(lambda block, h: h.sin() * SCALE.get(), around=context_variable),
    "a thread-local": function(lambda block, h: h.sin() * LOCAL.scale, around=thread_local),
    "the default dtype": function(
        lambda block, h: h.sin() * torch.full((1,), 1 / 3, device=h.device).to(h.dtype), around=default_dtype
    ),
    "the number of threads": function(lambda block, h: h.sin(), around=other_thread_count, shape=(64, 64, WIDTH)),
    "the precision of a backend": function(lambda block, h: h.sin(), around=precision_of_a_backend),
    "the precision of all backends": function(lambda block, h: h.sin(), around=precision_of_all_backends),
    "the kernel of attention": net(Attention, around=lambda: sdpa_kernel(SDPBackend.MATH)),
    "oneDNN": convolutions,
    "a function mode": function(lambda block, h: torch.sin(h), around=SinBecomesCos),
    "a device": in_a_device_context,
}


@pytest.mark.parametrize("context", CONTEXTS)
@each_way
def test_contexts_around_the_forward_alone(device_under_test: Device, way: Way, context: str):
    assert_as_stock(CONTEXTS[context], device_under_test, way)


@each_way
def test_the_default_dtype_of_backward_is_another_one(device_under_test: Device, way: Way):
    def program(loop: Loop) -> None:
        model = loop.make(lambda: Net(lambda: Mlp(lambda block, h: h.sin() * torch.full((), 1 / 3, device=h.device))))
        for _ in range(12):
            loss = model(loop.batch()).square().mean()
            with default_dtype():
                loss.backward()
            loop.ends_step(model)
            model.zero_grad()

    assert_as_stock(program, device_under_test, way)


@each_way
def test_a_model_that_is_put_to_evaluation_before_backward(device_under_test: Device, way: Way):
    assert_as_stock(
        net(
            lambda: Mlp(lambda block, h: functional.dropout(h.sin(), 0.3, block.training)),
            between=lambda model, step: model.eval(),
            after=lambda model, step: model.train(),
        ),
        device_under_test,
        way,
    )


def autocast(loop: Loop, *, calls: int = 1, caches: bool = True, backward_inside: bool = False) -> None:
    model = loop.make(Net)
    for _ in range(14):
        x = loop.batch()
        with torch.autocast(loop.device.type, torch.bfloat16, cache_enabled=caches):
            loss = sum(model(x + number).float().square().mean() for number in range(calls))
            if backward_inside:
                loss.backward()
        if not backward_inside:
            loss.backward()
        loop.ends_step(model)
        model.zero_grad()


@pytest.mark.parametrize(
    "given",
    [{}, {"calls": 2}, {"caches": False}, {"backward_inside": True}],
    ids=["once", "two calls", "no cache", "backward inside"],
)
@each_way
def test_autocast(device_under_test: Device, way: Way, given: dict[str, Any]):
    assert_as_stock(lambda loop: autocast(loop, **given), device_under_test, way)


class CastsBefore(Net):
    """Uses weights of its blocks before and after them: autocast has their casts in its cache."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.through(functional.linear(self.first(x), self.blocks[0].up.weight))
        return self.head(functional.linear(x, self.blocks[3].up.weight))


@each_way
def test_autocast_has_cast_a_weight_before_its_block(device_under_test: Device, way: Way):
    def program(loop: Loop) -> None:
        loop.train(loop.make(CastsBefore), around=lambda: torch.autocast(loop.device.type, torch.bfloat16))

    assert_as_stock(program, device_under_test, way)


# Modules that change, or that keep something, from call to call.


class Scales(Mlp):
    """Has an argument that a hook may give, which changes a value and no operator."""

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x) * scale))


class HasScales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Scales()
        object.__setattr__(self, "other", nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.inner(x))


@each_way
def test_hooks_that_change_a_number_for_the_forward_alone(device_under_test: Device, way: Way):
    def program(loop: Loop) -> None:
        model = loop.make(lambda: Net(HasScales))

        def call(model: Any, x: torch.Tensor) -> torch.Tensor:
            handles = [
                block.inner.register_forward_pre_hook(
                    lambda module, args, kwargs: (args, kwargs | {"scale": 0.25}), with_kwargs=True
                )
                for block in model.blocks
            ]
            y: torch.Tensor = model(x)
            for handle in handles:
                handle.remove()
            return y

        loop.train(model, call=call)

    assert_as_stock(program, device_under_test, way)


@each_way
def test_a_submodule_that_is_exchanged_for_the_forward_alone(device_under_test: Device, way: Way):
    def call(model: Any, x: torch.Tensor) -> torch.Tensor:
        own = [block.inner.up for block in model.blocks]
        for block in model.blocks:
            block.inner.up = block.other
        y: torch.Tensor = model(x)
        for block, up in zip(model.blocks, own, strict=True):
            block.inner.up = up
        return y

    assert_as_stock(net(HasScales, call=call), device_under_test, way)


class Caches(Mlp):
    """Reads a table of the sequence's length, which the first call with that length makes."""

    def __init__(self, tables: dict[int, torch.Tensor] | None) -> None:
        super().__init__()
        self.tables = {} if tables is None else tables

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        if length not in self.tables:
            self.tables[length] = torch.arange(length, device=x.device)[:, None].sin().expand(length, WIDTH) * 1.0
        return x + self.down(torch.sin(self.up(x) * self.tables[length]))


@pytest.mark.parametrize("is_shared", [True, False])
@each_way
def test_tables_that_are_made_at_the_first_call_of_a_length(device_under_test: Device, way: Way, is_shared: bool):
    def program(loop: Loop) -> None:
        tables: dict[int, torch.Tensor] = {}
        model = loop.make(lambda: Net(lambda: Caches(tables if is_shared else None)))
        for length in [8] * 20 + [6, 7, 5, 8, 4, 8]:
            model(loop.batch(4, length, WIDTH)).square().mean().backward()
            loop.ends_step(model)
            model.zero_grad()

    assert_as_stock(program, device_under_test, way)


@each_way
def test_a_branch_by_data_and_a_counter_that_is_read(device_under_test: Device, way: Way):
    class Counts(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.up(x)
            if h.detach().sum() > 0:
                h = h * 1.5
            self.steps += 1
            return x + self.down(torch.sin(h) * self.steps.rsqrt())

    assert_as_stock(
        net(Counts, steps=20, call=lambda model, x: model(x).square().mean() + model(x + 1).square().mean()),
        device_under_test,
        way,
    )


class Quantises(nn.Module):
    """A vector quantiser that updates its book of codes through ``.data``."""

    def __init__(self) -> None:
        super().__init__()
        codes = torch.linspace(-1, 1, WIDTH * 16).view(WIDTH, 16)
        self.register_buffer("codes", codes)
        self.register_buffer("sizes", torch.zeros(16))
        self.register_buffer("mean", codes.clone())

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        flat = x.reshape(-1, WIDTH)
        distance = flat.pow(2).sum(1, keepdim=True) - 2 * flat @ self.codes + self.codes.pow(2).sum(0, keepdim=True)
        nearest = distance.argmin(1)
        hot = functional.one_hot(nearest, 16).type(flat.dtype)
        code = functional.embedding(nearest.view(x.shape[:-1]), self.codes.transpose(0, 1))
        self.sizes.data.mul_(0.9).add_(hot.sum(0), alpha=0.1)
        self.mean.data.mul_(0.9).add_((flat.transpose(0, 1) @ hot).detach(), alpha=0.1)
        self.codes.data.copy_(self.mean / (self.sizes + 1e-5).unsqueeze(0))
        return x + (code - x).detach(), (code.detach() - x).pow(2).mean()


class Quantised(Mlp):
    def __init__(self, *, normalises: bool) -> None:
        super().__init__()
        self.quantiser = Quantises()
        self.norm = nn.BatchNorm1d(WIDTH) if normalises else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.up(x).flatten(0, 1)).view(x.shape)
        h, self.distance = self.quantiser(h)
        return x + self.down(torch.sin(h) * (1 + self.quantiser.codes.mean()))


def quantised_loss(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).square().mean()
    return loss + sum(block.distance for block in model.blocks)


@pytest.mark.parametrize("normalises", [False, True])
@pytest.mark.parametrize("calls", [1, 2])
@each_way
def test_codes_that_are_updated_through_data(device_under_test: Device, way: Way, normalises: bool, calls: int):
    def call(model: Any, x: torch.Tensor) -> torch.Tensor:
        return sum(quantised_loss(model, x + number) for number in range(calls))

    assert_as_stock(net(lambda: Quantised(normalises=normalises), call=call), device_under_test, way)


class ReadsData(Mlp):
    """Reads ``weight.data``, as weight standardisation does, beside a BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.up(x).flatten(0, 1)).view(x.shape)
        return x + self.down(torch.sin(h) * self.up.weight.data.abs().mean())


@each_way
def test_weight_data_that_is_read_beside_a_batch_norm(device_under_test: Device, way: Way):
    assert_as_stock(net(ReadsData), device_under_test, way)


class Normalises(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.norm(self.up(x).flatten(0, 1)).view(x.shape)))


class SharesNorm(Net):
    def __init__(self) -> None:
        super().__init__(Normalises)
        for block in self.blocks:
            block.norm = self.blocks[0].norm


def in_both_modes(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.eval()
    loss = model(x).square().mean()
    model.train()
    return loss + model(x).square().mean()


NORMS: dict[str, Program] = {
    "once": net(Normalises),
    "twice": net(Normalises, call=lambda model, x: model(x).square().mean() + model(x + 1).square().mean()),
    "in both modes": net(Normalises, call=in_both_modes),
    "shared": lambda loop: loop.train(loop.make(SharesNorm)),
}


@pytest.mark.parametrize("kind", NORMS)
@each_way
def test_batch_norm(device_under_test: Device, way: Way, kind: str):
    assert_as_stock(NORMS[kind], device_under_test, way)


@each_way
def test_statistics_that_are_refreshed_before_backward_raise_no_version(device_under_test: Device, way: Way):
    def program(loop: Loop) -> None:
        model = loop.make(lambda: Net(Normalises))
        for _ in range(14):
            model.eval()
            loss = model(loop.batch()).square().mean()
            model.train()
            with torch.no_grad():
                model(loop.batch())
            loss.backward()
            loop.ends_step(model)
            model.zero_grad()

    assert_as_stock(program, device_under_test, way)


# Blocks whose first calls do something else.


class FirstCall(Mlp):
    """Does something with a buffer that depends on how often it was called."""

    def __init__(self, update: Callable[[Any, torch.Tensor], None]) -> None:
        super().__init__()
        self.update, self.calls = update, 0
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.up(x))
        self.calls += 1
        with torch.no_grad():
            self.update(self, h.detach().mean((0, 1)))
        return x + self.down(torch.tanh(h - self.mean))


def sets_at_first(block: Any, mean: torch.Tensor) -> None:
    block.mean.copy_(mean if block.calls == 1 else block.mean + 0.1 * (mean - block.mean))


def warms_up(block: Any, mean: torch.Tensor) -> None:
    if block.calls <= 3:
        block.mean.lerp_(mean, 1 / block.calls)


def at_every_third(block: Any, mean: torch.Tensor) -> None:
    if block.calls % 3 == 0:
        block.mean.mul_(0.9).add_(mean, alpha=0.1)


def sometimes_out_of_place(block: Any, mean: torch.Tensor) -> None:
    if block.calls % 3 == 0:
        block.mean.copy_(0.9 * block.mean + 0.1 * mean)


@pytest.mark.parametrize("update", [sets_at_first, warms_up, at_every_third, sometimes_out_of_place])
@each_way
def test_buffers_that_are_written_to_in_some_calls(device_under_test: Device, way: Way, update):
    assert_as_stock(net(lambda: FirstCall(update), steps=24), device_under_test, way)


class ActNorm(Mlp):
    """Sets its scale and shift, which are parameters, from the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        self.register_buffer("is_set", torch.tensor(False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        if self.training and not self.is_set:
            with torch.no_grad():
                self.shift.data.copy_(-h.mean((0, 1)))
                self.scale.data.copy_(1 / (h.std((0, 1)) + 1e-6))
                self.is_set.fill_(True)
        return x + self.down(torch.tanh((h + self.shift) * self.scale))


class RunningScale(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("top", torch.tensor(float("inf")))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.up(x))
        now = h.detach().abs().amax()
        if self.top == float("inf"):
            self.top.copy_(now)
        else:
            self.top.copy_(self.top + 0.1 * (now - self.top))
        return x + self.down(torch.tanh(h / self.top))


class Codebook(Mlp):
    """A book of codes that the first batch initialises, and that all calls move."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("book", torch.zeros(8, WIDTH))
        self.register_buffer("is_ready", torch.tensor(False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        flat = h.detach().flatten(0, -2)
        if not self.is_ready:
            self.book.data.copy_(flat[:8])
            self.is_ready.data.fill_(True)
        near = torch.cdist(flat, self.book).argmin(-1)
        quantised = self.book[near].view(h.shape)
        hot = functional.one_hot(near, 8).to(flat.dtype)
        self.book.data.lerp_(hot.t() @ flat / len(flat), 0.05)
        return x + torch.tanh(h + (quantised - h).detach()) * h


class FakeQuantised(Mlp):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.quantise = make()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.quantise(torch.tanh(self.up(x))))


def observed() -> nn.Module:
    return torch.ao.quantization.FakeQuantize(observer=torch.ao.quantization.MovingAverageMinMaxObserver)


FIRST_CALLS: dict[str, Callable[[], nn.Module]] = {
    "ActNorm": ActNorm,
    "a running scale": RunningScale,
    "a book of codes": Codebook,
    "fake quantisation": lambda: FakeQuantised(observed),
    "fused fake quantisation": lambda: FakeQuantised(torch.ao.quantization.FusedMovingAvgObsFakeQuantize),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", FIRST_CALLS)
@each_way
def test_blocks_whose_first_call_does_something_else(device_under_test: Device, way: Way, kind: str):
    assert_as_stock(net(FIRST_CALLS[kind], steps=24), device_under_test, way)


# State that lasts from step to step.


class Stateful(Mlp):
    """Keeps its hidden state for the next call: in a buffer or an attribute, by a write or by a new value."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.mix, self.how = nn.Linear(2 * WIDTH, WIDTH), how
        if how == "buffer":
            self.register_buffer("state", torch.zeros(4, 8, WIDTH))
        else:
            self.state = torch.zeros(4, 8, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.mix(torch.cat([x, self.state], -1)))
        with torch.no_grad():
            if self.how == "new":
                self.state = h.detach()
            elif self.how == "attached":
                self.state = h
            else:
                self.state.copy_(h)
        return x + h


def states(model: Any) -> dict[str, Any]:
    return {"states": [block.state for block in model.blocks]}


@pytest.mark.parametrize("how", ["buffer", "attribute", "new"])
@each_way
def test_hidden_states_that_last(device_under_test: Device, way: Way, how: str):
    assert_as_stock(net(lambda: Stateful(how), extra=states), device_under_test, way)


@each_way
def test_truncated_backpropagation_through_time(device_under_test: Device, way: Way):
    def program(loop: Loop) -> None:
        model = loop.make(lambda: Net(lambda: Stateful("attached")))
        for _ in range(14):
            for block in model.blocks:
                block.state = block.state.detach()
            loss = sum(model(loop.batch()).square().mean() for _ in range(3))
            loss.backward()
            loop.ends_step(model, loss=loss.detach())
            model.zero_grad()

    assert_as_stock(program, device_under_test, way)


# Weights that change between forward and backward.


def average(model: Any, averaged: dict[str, torch.Tensor]) -> None:
    for name, weight in model.named_parameters():
        averaged.setdefault(name, weight.detach().clone()).lerp_(weight.data, 0.1)


@each_way
def test_averages_of_weights_that_are_updated_before_backward(device_under_test: Device, way: Way):
    averaged: dict[str, torch.Tensor] = {}

    def program(loop: Loop) -> None:
        averaged.clear()
        loop.train(loop.make(Net), between=lambda model, step: average(model, averaged))

    assert_as_stock(program, device_under_test, way)


@each_way
def test_averages_that_are_swapped_in_for_an_evaluation_before_backward(device_under_test: Device, way: Way):
    def swap_and_back(model: Any, _step: int) -> None:
        own = [weight.data for weight in model.parameters()]
        for weight in model.parameters():
            weight.data = weight.data * 0.9
        with torch.no_grad():
            model(torch.ones(2, 2, WIDTH, device=own[0].device))
        for weight, data in zip(model.parameters(), own, strict=True):
            weight.data = data

    assert_as_stock(net(Mlp, between=swap_and_back), device_under_test, way)


class ReadsBias(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.sin(self.up(x)) * self.down.bias.detach().cos())


class TiesWeights(Net):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.up = self.blocks[0].up


OPTIMISED: dict[str, Callable[[], nn.Module]] = {
    "plain": Net,
    "tied": TiesWeights,
    "a bias that is read": lambda: Net(ReadsBias),
}


@pytest.mark.parametrize("kind", OPTIMISED)
@each_way
def test_an_optimizer_that_steps_in_backward(device_under_test: Device, way: Way, kind: str):
    def program(loop: Loop) -> None:
        model = loop.make(OPTIMISED[kind])
        optimizers = {weight: torch.optim.SGD([weight], lr=0.05, momentum=0.9) for weight in model.parameters()}

        def step(weight: torch.Tensor) -> None:
            optimizers[weight].step()
            weight.grad = None

        for weight in model.parameters():
            weight.register_post_accumulate_grad_hook(step)
        loop.train(model, optimizer=False)

    assert_as_stock(program, device_under_test, way)


@pytest.mark.parametrize("way", WAYS, ids=map(str, WAYS))
def test_blocks_of_several_kinds_in_one_model(device_under_test: Device, way: Way):
    makes = [HasTensor, Temperature, Normalises, lambda: FirstCall(at_every_third), lambda: Stateful("new")]

    def make() -> nn.Module:
        kinds = iter(makes * 2)
        return Net(lambda: next(kinds)(), depth=len(makes) * 2)

    assert_as_stock(lambda loop: loop.train(loop.make(make)), device_under_test, way)
