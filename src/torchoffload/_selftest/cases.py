"""Small programs, each of which has the same gradients with and without offloading, bit for bit.

A program is a function of a ``Run``. It makes its tensors through the run, enters ``run.offload()`` where a user would
enter ``OffloadActivations``, and returns the values to compare. It takes operators that every device has, and no
float64, which some have not.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import backward
from torch.utils.checkpoint import checkpoint

__all__ = ["CASES", "NotHadError", "Run"]

_SEED = 20
_WIDTH = 64
_ROWS = 32
_WORDS = 48
_STEPS = 3
_FIT_STEPS = 12


class NotHadError(Exception):
    """The device lacks what a program needs; the text says what."""


class Run:
    """One run of a program: stock, or offloaded.

    Parameters
    ----------
    device : torch.device
        The device of the program's tensors.
    context : callable or None
        Makes a context from options; None for a stock run.
    fit : callable or None
        ``torchoffload.fit``, with the options of the tier; None for a stock run.
    """

    def __init__(
        self, device: torch.device, context: Callable[..., Any] | None = None, fit: Callable[..., Any] | None = None
    ) -> None:
        self.device = device
        self.fit = fit
        self._context = context
        self._generator = torch.Generator().manual_seed(_SEED)

    def offload(self, **options: Any) -> Any:
        """Return a context that offloads, with more options than those by default; or one that does nothing."""
        return contextlib.nullcontext() if self._context is None else self._context(**options)

    def tensor(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return random values in [-1, 1), the same in each run, on the device."""
        return (torch.rand(shape, generator=self._generator) * 2 - 1).to(dtype).to(self.device)

    def leaf(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return such a tensor that requires a gradient."""
        return self.tensor(*shape, dtype=dtype).requires_grad_()

    def words(self, *shape: int) -> torch.Tensor:
        """Return random numbers of words, the same in each run, on the device."""
        return torch.randint(0, _WORDS, shape, generator=self._generator).to(self.device)

    def module(self, make: Callable[[], nn.Module]) -> Any:
        """Return a new module on the device, with the same weights in each run."""
        return make().to(self.device)


class Block(nn.Module):
    """Causal attention and a feed-forward network, each behind a norm and beside a residual connection."""

    def __init__(self, width: int = _WIDTH, head_count: int = 4) -> None:
        super().__init__()
        self.head_count = head_count
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.attention_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        heads = (batch, length, self.head_count, width // self.head_count)
        q, k, v = (each.view(heads).transpose(1, 2) for each in self.qkv(self.attention_norm(x)).chunk(3, dim=-1))
        scores = (q @ k.transpose(-1, -2)) / heads[-1] ** 0.5
        hidden = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        attended = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v
        x = x + self.attention_out(attended.transpose(1, 2).reshape(batch, length, width))
        out: torch.Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return out


class Transformer(nn.Module):
    """A small language model."""

    def __init__(self, block_count: int = 3, *, checkpoints: bool = False) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        self.embedding = nn.Embedding(_WORDS, _WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(block_count))
        self.head = nn.Linear(_WIDTH, _WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        out: torch.Tensor = self.head(x)
        return out


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(_WIDTH, 2 * _WIDTH), nn.GELU(), nn.LayerNorm(2 * _WIDTH), nn.Linear(2 * _WIDTH, _WIDTH), nn.Tanh()
    )


def _gradients(module: nn.Module) -> list[torch.Tensor | None]:
    return [each.grad for each in module.parameters()]


def layers(run: Run) -> Any:
    """Linear layers, a norm and activations."""
    model, x = run.module(_mlp), run.leaf(_ROWS, _WIDTH)
    with run.offload():
        loss = model(x).square().mean()
    backward(loss)
    return loss, x.grad, _gradients(model)


def convolutions(run: Run) -> Any:
    """Convolutions and pooling."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 3))

    model, x = run.module(make), run.leaf(2, 3, 16, 16)
    with run.offload():
        loss = model(x).square().mean()
    backward(loss)
    return loss, x.grad, _gradients(model)


def in_place_operators(run: Run) -> Any:
    """Operators that write to their argument, before and after it was saved."""
    x, weight = run.leaf(_ROWS, _WIDTH), run.leaf(_WIDTH, _WIDTH)
    with run.offload():
        y = (x * 2).relu_()
        z = (y @ weight).sigmoid_()
        z = z * y
        w = (z + 1).add_(z).tanh_().clone()
        w[:, 0] = 0
    backward(w.sum())
    return w, x.grad, weight.grad


def written_after_saving(run: Run) -> Any:
    """A saved tensor that is written to: the same error as stock."""
    x = run.leaf(_ROWS, _WIDTH)
    with run.offload():
        z = x.sin().cos()
        y = x.exp()
        y.add_(1)
    backward(z.sum(), retain_graph=True)
    try:
        backward(y.sum())
    except RuntimeError as error:
        return str(error), x.grad
    return "no error", x.grad


def views(run: Run) -> Any:
    """Transposed, sliced, expanded and split tensors, and several views of one buffer."""
    x, weight = run.leaf(_ROWS, 3 * _WIDTH), run.leaf(1, _WIDTH)
    with run.offload():
        q, k, v = (x * 1.5).chunk(3, dim=-1)
        scores = torch.softmax(q @ k.t(), dim=-1) @ v
        every_other = scores[:, ::2] * scores[:, 1::2]
        wide = weight.expand(_ROWS, _WIDTH) * scores
        turned = wide.t().contiguous().view(-1).sin().view(_WIDTH, _ROWS).t()
        loss = (turned * turned).sum() + every_other.exp().sum()
    backward(loss)
    return loss, x.grad, weight.grad


def dtypes(run: Run) -> Any:
    """Tensors in bfloat16 and float16, of odd sizes, and one element."""
    results = []
    for dtype in (torch.bfloat16, torch.float16):
        x, scale = run.leaf(_ROWS - 1, _WIDTH + 1, dtype=dtype), run.leaf(1, dtype=dtype)
        with run.offload():
            y = (x * scale).sin() * x.exp()
        backward(y.sum())
        results.append((y, x.grad, scale.grad))
    return results


def autocast(run: Run) -> Any:
    """A model under autocast to bfloat16."""
    model, x = run.module(_mlp), run.leaf(_ROWS, _WIDTH)
    with run.offload(), torch.autocast(run.device.type, torch.bfloat16):
        loss = model(x).square().mean()
    backward(loss)
    return loss, x.grad, _gradients(model)


def dropout_and_checkpoint(run: Run) -> Any:
    """Checkpoints of both kinds around layers with dropout."""
    results = []
    for use_reentrant in (False, True):
        model = run.module(lambda: nn.Sequential(_mlp(), nn.Dropout(0.3), _mlp()))
        x = run.leaf(_ROWS, _WIDTH)
        with run.offload():
            y = checkpoint(model, x, use_reentrant=use_reentrant)
            loss = (y * x).square().mean()
        backward(loss)
        results.append((loss, x.grad, _gradients(model)))
    return results


def two_forwards_before_backward(run: Run) -> Any:
    """Two forwards of one model, then their backwards in the order of the forwards."""
    model = run.module(_mlp)
    inputs = [run.leaf(_ROWS, _WIDTH), run.leaf(_ROWS, _WIDTH)]
    losses = []
    for x in inputs:
        with run.offload():
            losses.append(model(x).square().mean())
    for loss in losses:
        backward(loss)
    return losses, [x.grad for x in inputs], _gradients(model)


def retain_graph(run: Run) -> Any:
    """Three backwards of one graph, with another step in between."""
    model, x = run.module(_mlp), run.leaf(_ROWS, _WIDTH)
    with run.offload():
        loss = model(x).square().mean()
    backward(loss, retain_graph=True)
    with run.offload():
        other = model(x.detach()).sum()
    backward(other)
    backward(loss, retain_graph=True)
    backward(loss)
    return loss, x.grad, _gradients(model)


def gradients_of_gradients(run: Run) -> Any:
    """A backward through a backward."""
    x = run.leaf(_ROWS, _WIDTH)
    with run.offload():
        y = (x.sin() * x.exp()).sum()
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        z = gradient.square().sum()
    backward(z)
    return y, gradient, x.grad


def accumulated_micro_batches(run: Run) -> Any:
    """Gradients of several micro-batches, and a graph that is dropped without a backward."""
    model = run.module(_mlp)
    for number in range(4):
        with run.offload():
            loss = model(run.tensor(_ROWS, _WIDTH)).square().mean()
        if number != 2:
            backward(loss)
        del loss
    return _gradients(model)


def a_side_stream(run: Run) -> Any:
    """A forward on another stream than the backward's, joined by the program."""
    if run.device.type == "cpu":
        raise NotHadError("the CPU has no streams")
    here = torch.accelerator.current_stream(run.device)
    try:
        side = torch.Stream(run.device)
    except (RuntimeError, NotImplementedError) as error:
        raise NotHadError(f"it has no streams: {_first_line(error)}") from None
    if side == here:
        raise NotHadError("it has one stream only")
    x, weight = run.leaf(_ROWS, _WIDTH), run.leaf(_WIDTH, _WIDTH)
    for _ in range(2):
        side.wait_stream(here)
        with _on_stream(side, here), run.offload():
            y = ((x @ weight).sin() * x).exp()
        here.wait_stream(side)
        with run.offload():
            loss = (y * y).mean()
        backward(loss)
        for each in (x, y):  # their memory is used on both
            each.record_stream(side)
            each.record_stream(here)
    return loss, x.grad, weight.grad


@contextlib.contextmanager
def _on_stream(stream: Any, before: Any) -> Iterator[None]:
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


def transformer_trained(run: Run) -> Any:
    """A small transformer, trained by AdamW, with an evaluation after each step."""
    return _train(run, Transformer)


def transformer_with_checkpoints(run: Run) -> Any:
    """The same with each block in a checkpoint."""
    return _train(run, lambda: Transformer(checkpoints=True))


def transformer_that_learns_windows(run: Run) -> Any:
    """The same with the options by default, under which contexts learn from one step to the next."""
    return _train(run, Transformer, learn=True, offload_window_bytes=None, step_count=2 * _STEPS)


def _train(run: Run, make: Callable[[], nn.Module], step_count: int = _STEPS, **options: Any) -> Any:
    model = run.module(make)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(step_count):
        words = run.words(2, 33)
        with run.offload(**options):
            loss = _loss(model, words)
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses.append((loss.detach(), _loss(model.eval(), words)))
        model.train()
    return losses, list(model.parameters())


def _loss(model: Any, words: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())


def transformer_under_fit(run: Run) -> Any:
    """The same under ``torchoffload.fit``, first in much memory and then in the least that a step takes."""
    model = run.module(lambda: Transformer(4))
    handle = None if run.fit is None else run.fit(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2 * _FIT_STEPS):
        backward(_loss(model, run.words(2, 33)))
        optimizer.step()
        optimizer.zero_grad()
        if handle is not None and step == _FIT_STEPS:
            handle.replan(_with_margin(handle.frontier()[0].memory_bytes))
    if handle is not None:
        if handle.phase != "settled":
            raise RuntimeError(f"fit has not settled: {handle.phase}")
        handle.remove()
    return list(model.parameters())


def _with_margin(nbytes: int) -> int:
    return int(nbytes / 0.9) + 1


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]


CASES: tuple[Callable[[Run], Any], ...] = (
    layers,
    convolutions,
    in_place_operators,
    written_after_saving,
    views,
    dtypes,
    autocast,
    dropout_and_checkpoint,
    two_forwards_before_backward,
    retain_graph,
    gradients_of_gradients,
    accumulated_micro_batches,
    a_side_stream,
    transformer_trained,
    transformer_with_checkpoints,
    transformer_that_learns_windows,
    transformer_under_fit,
)
