"""random_blocks.py: blocks made of random operators, such as recomputations get wrong, and what a step with them gives.

Each takes two tensors of one shape and returns another one of it: views and writes through them, buffers and attributes
that change, random numbers from several sources, Functions, checkpoints of the user's, parts without gradients, other
dtypes, and code that depends on values.
"""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH = 8
Tensor = torch.Tensor
Operator = Callable[["RandomBlock", Tensor, Tensor], Tensor]


class Scaled(torch.autograd.Function):
    """Saves its input and its output, and has a tensor as an attribute of its context."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        y = x * factor
        ctx.save_for_backward(x, y)
        ctx.factor, ctx.extra = factor, y.detach().abs().mean()
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        x, y = ctx.saved_tensors
        ctx.saved_tensors  # noqa: B018  (may be asked for twice)
        return grad * ctx.factor + 0.01 * grad * (x.cos() + y.sin()) * ctx.extra, None


class Clamped(torch.autograd.Function):
    """Writes to its input and saves it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.clamp_(min=0.01)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * (x > 0.01)


class Sorted(torch.autograd.Function):
    """Saves integers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        values, places = x.sort(-1)
        ctx.mark_non_differentiable(places)
        ctx.save_for_backward(places)
        return values, places

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Tensor:
        (places,) = ctx.saved_tensors
        return torch.zeros_like(grad).scatter_(-1, places, grad)


def writes_through_a_view(block: "RandomBlock", a: Tensor, b: Tensor) -> Tensor:
    t = a.clone()
    t[..., :3].mul_(0.5)
    return t


def adds_in_place(block: "RandomBlock", a: Tensor, b: Tensor) -> Tensor:
    return torch.sin(a).add_(b)


def activates_in_place(block: "RandomBlock", a: Tensor, b: Tensor) -> Tensor:
    return block.up(a).relu_()


def normalises_and_activates_in_place(block: "RandomBlock", a: Tensor, b: Tensor) -> Tensor:
    return block.batch_norm(a.reshape(-1, WIDTH)).relu_().view(a.shape) + b


def writes_to_a_flat_view(block: "RandomBlock", a: Tensor, b: Tensor) -> Tensor:
    t = a * 1.5
    t.view(-1).mul_(0.5)
    return t


def fills_what_was_empty(block: "RandomBlock", a: Tensor, b: Tensor) -> Tensor:
    t = torch.empty_like(a)
    t.copy_(b)
    return t * a


def fills_a_part(block: "RandomBlock", a: Tensor, b: Tensor) -> Tensor:
    t = torch.zeros_like(a)
    t[:, 0] = a[:, 0]
    return t + b


def masks_in_place(block: "RandomBlock", a: Tensor, b: Tensor) -> Tensor:
    return (a + 1).masked_fill_(b > 0, 0.1)


def computes_without_gradients(block: "RandomBlock", a: Tensor, b: Tensor) -> Tensor:
    with torch.no_grad():
        t = (a * 2).sin_()
        t.mul_(block.factors)
        t = t.view(-1)
        t[::2] = 0
    return t.view(a.shape) + b


def updates_a_buffer(block: "RandomBlock", a: Tensor, b: Tensor) -> Tensor:
    with torch.no_grad():
        block.average.mul_(0.9).add_(a.detach().reshape(-1, WIDTH).mean(0), alpha=0.1)
    return b * block.average


def counts_calls(block: "RandomBlock", a: Tensor, b: Tensor) -> Tensor:
    block.count += 1
    return a * block.count.rsqrt()


def rebinds_a_buffer(block: "RandomBlock", a: Tensor, b: Tensor) -> Tensor:
    block.average = block.average * 0.5 + 0.5
    return a * block.average


def rebinds_an_attribute(block: "RandomBlock", a: Tensor, b: Tensor) -> Tensor:
    block.factors = block.factors * 0.9 + 0.1
    return a * block.factors


def decides_by_a_value(block: "RandomBlock", a: Tensor, b: Tensor) -> Tensor:
    return a * 2 if float(a.detach().sum()) > 0 else a.sin()


def draws_from_python(block: "RandomBlock", a: Tensor, b: Tensor) -> Tensor:
    return a * random.random() + b


def draws_from_a_generator(block: "RandomBlock", a: Tensor, b: Tensor) -> Tensor:
    return a * torch.rand(a.shape, generator=torch.Generator(a.device).manual_seed(4), device=a.device)


def seeds_again(block: "RandomBlock", a: Tensor, b: Tensor) -> Tensor:
    torch.manual_seed(5)
    return a * torch.rand(WIDTH, device=a.device)


def draws_the_same_twice(block: "RandomBlock", a: Tensor, b: Tensor) -> Tensor:
    state = torch.get_rng_state()
    t = functional.dropout(a, 0.4)
    torch.set_rng_state(state)
    return t + functional.dropout(b, 0.4)


def fills_with_random_numbers(block: "RandomBlock", a: Tensor, b: Tensor) -> Tensor:
    return a / torch.empty_like(a).uniform_().clamp_(min=0.2)


def checkpoints(block: "RandomBlock", a: Tensor, b: Tensor) -> Tensor:
    result: Tensor = checkpoint(lambda t: block.down(torch.tanh(t)), a, use_reentrant=False)
    return result


def reads_before_writing(block: "RandomBlock", a: Tensor, b: Tensor) -> Tensor:
    t = a.detach().clone()
    early = t.exp()
    t.mul_(2)
    return early * b + t


def writes_to_a_transposed_view(block: "RandomBlock", a: Tensor, b: Tensor) -> Tensor:
    t = a.clone()
    t.transpose(0, 1)[0].zero_()
    return t


def transposes_in_place(block: "RandomBlock", a: Tensor, b: Tensor) -> Tensor:
    t = torch.sin(a)
    t.transpose_(0, 1)
    return t.transpose(0, 1) * b


def writes_past_versions(block: "RandomBlock", a: Tensor, b: Tensor) -> Tensor:
    t = torch.cos(a)
    t.data.mul_(0.5)
    return t.sin()


def is_complex(block: "RandomBlock", a: Tensor, b: Tensor) -> Tensor:
    z = torch.view_as_complex(torch.stack([a, b], -1)).conj()
    return (z * z).imag


def runs_under_autocast(block: "RandomBlock", a: Tensor, b: Tensor) -> Tensor:
    with torch.autocast(a.device.type, torch.bfloat16):
        return block.up(a).float()


def asks_for_a_gradient(block: "RandomBlock", a: Tensor, b: Tensor) -> Tensor:
    t = a.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(torch.sin(t).sum(), t)
    return gradient * b


OPERATORS: dict[str, Operator] = {
    "sin": lambda block, a, b: torch.sin(a),
    "gelu": lambda block, a, b: functional.gelu(a),
    "gate": lambda block, a, b: torch.sigmoid(a) * b,
    "mul": lambda block, a, b: a * b,
    "add": lambda block, a, b: a + b * 0.5,
    "where": lambda block, a, b: torch.where(a > b, a, b * 0.3),
    "linear": lambda block, a, b: block.up(a),
    "layer norm": lambda block, a, b: block.layer_norm(a),
    "batch norm": lambda block, a, b: block.batch_norm(a.reshape(-1, WIDTH)).view(a.shape),
    "dropout": lambda block, a, b: functional.dropout(a, 0.3, block.training),
    "rand like": lambda block, a, b: a * torch.rand_like(a),
    "bernoulli": lambda block, a, b: torch.bernoulli(torch.sigmoid(a.detach())) * b,
    "cat": lambda block, a, b: torch.cat([a[..., : WIDTH // 2], b[..., WIDTH // 2 :]], -1),
    "softmax": lambda block, a, b: a.softmax(-1),
    "cumsum": lambda block, a, b: a.cumsum(-1) * 0.2,
    "detach": lambda block, a, b: a.detach() * b,
    "sdpa": lambda block, a, b: functional.scaled_dot_product_attention(a, b, a),
    "unbind": lambda block, a, b: torch.stack([t.sin() for t in torch.unbind(a, 0)]),
    "fft": lambda block, a, b: torch.fft.irfft(torch.fft.rfft(a) * 1j, n=WIDTH),
    "double": lambda block, a, b: (a.double().sin() * 0.5).float(),
    "as_strided": lambda block, a, b: a.as_strided(a.shape, a.stride(), a.storage_offset()) * 0.7,
    "topk": lambda block, a, b: torch.zeros_like(a).scatter(-1, a.topk(3, -1)[1], a.topk(3, -1)[0]),
    "new tensor": lambda block, a, b: a.new_tensor([1.0, 2.0] * (WIDTH // 2)).mul_(0.3) * a,
    "scaled": lambda block, a, b: Scaled.apply(a, 1.25),
    "clamped": lambda block, a, b: Clamped.apply(a * 1.0),
    "sorted": lambda block, a, b: sum(Sorted.apply(a)) * 0.5,
    **{
        function.__name__: function
        for function in (
            writes_through_a_view, adds_in_place, activates_in_place, normalises_and_activates_in_place,
            writes_to_a_flat_view, fills_what_was_empty, fills_a_part, masks_in_place, computes_without_gradients,
            updates_a_buffer, counts_calls, rebinds_a_buffer, rebinds_an_attribute, decides_by_a_value,
            draws_from_python, draws_from_a_generator, seeds_again, draws_the_same_twice, fills_with_random_numbers,
            checkpoints, reads_before_writing, writes_to_a_transposed_view, transposes_in_place, writes_past_versions,
            is_complex, runs_under_autocast, asks_for_a_gradient,
        )
    },
}  # fmt: skip


class RandomBlock(nn.Module):
    """A block of random operators, the same ones in each call."""

    def __init__(self, seed: int, length: int) -> None:
        super().__init__()
        self.seed, self.length = seed, length
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layer_norm, self.batch_norm = nn.LayerNorm(WIDTH), nn.BatchNorm1d(WIDTH)
        self.register_buffer("average", torch.ones(WIDTH))
        self.register_buffer("count", torch.zeros(()))
        self.factors = torch.linspace(0.5, 1.5, WIDTH)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        choice = random.Random(self.seed)
        pool = [x] if other is None else [x, other]

        def pick() -> Tensor:
            return pool[max(0, len(pool) - 1 - int(choice.expovariate(0.7)))]

        for name in choice.choices(list(OPERATORS), k=self.length):
            made = OPERATORS[name](self, pick(), pick())
            pool.append(made)
        result = pool[-1]
        for each in choice.sample(pool, min(3, len(pool))):
            result = result + each * 0.3
        return result


class RandomNet(nn.Module):
    """Two random blocks that do the same, each called once or twice."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        choice = random.Random(seed * 7 + 1)
        length = choice.randrange(3, 22)
        self.times = choice.choice([1, 1, 2])
        self.shape = (2, choice.choice([1, 3]), WIDTH)
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(RandomBlock(seed, length) for _ in range(2))
        self.x = torch.randn(self.shape).requires_grad_()

    def forward(self, x: Tensor) -> Tensor:
        other = None
        for block in self.blocks:
            for _ in range(self.times):
                y = block(x, other)
                other, x = x, y / (1 + y.detach().abs().mean())
        return x


def outcome(net: RandomNet) -> dict[str, Any]:
    """What a step leaves: gradients, buffers, attributes, and the next random numbers."""
    torch.manual_seed(5)
    random.seed(5)
    loss = net(net.x).square().mean()
    loss.backward()
    found = {name: each.grad for name, each in net.named_parameters()} | {"x": net.x.grad, "loss": loss.detach()}
    found |= {name: each.clone() for name, each in net.named_buffers()}
    found |= {f"factors{number}": block.factors for number, block in enumerate(net.blocks)}  # type: ignore[union-attr]
    return found | {"random": torch.rand(2), "python": torch.tensor(random.random())}


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """The names of what is not the same to the bit."""

    def is_same(a: Tensor | None, b: Tensor | None) -> bool:
        if a is None or b is None:
            return a is b
        return a.shape == b.shape and bool(torch.equal(a.nan_to_num(7.25), b.nan_to_num(7.25)))

    return [name for name in one if not is_same(one[name], other[name])]
