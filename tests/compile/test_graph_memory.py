"""The predicted peaks of compiled graphs: beside the memory that inductor's code takes on a CPU, and each other."""

import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import nop
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

import torchoffload
from models import Block, TinyGpt
from torchoffload._compile import joint_plan, operators, planned, rewrite
from torchoffload._compile.joint_graph import JointGraph
from torchoffload._compile.joint_plan import Room, plan_graph
from torchoffload._fit.machine.link import LinkRates

ANY_MEMORY = 1 << 40
pytestmark = [pytest.mark.slow]


@pytest.fixture(autouse=True)
def _compiled_here() -> Iterator[None]:
    """Neither a graph nor a plan of another test is found again."""
    planned._noted.clear()
    with torch._functorch.config.patch(enable_autograd_cache=False), torch._inductor.config.patch(fx_graph_cache=False):
        yield


# ---- models of several kinds, with their data ----


class GatedBlock(nn.Module):
    """The MLP of a Llama: it makes values of backward alone, such as those of SiLU's derivative."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate, self.up = nn.Linear(width, 4 * width, bias=False), nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))


class GatedLanguageModel(nn.Module):
    """Its logits are larger than all else, and it returns them beside the loss if asked to."""

    def __init__(self, width: int = 64, vocabulary: int = 4096, *, returns_logits: bool = False) -> None:
        super().__init__()
        self.returns_logits = returns_logits
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(GatedBlock(width) for _ in range(2))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        loss = functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())
        return (loss, logits) if self.returns_logits else loss


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm_first, self.norm_second = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inside = functional.relu(self.norm_first(self.first(x)))
        return functional.relu(x + self.norm_second(self.second(inside)))


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.blocks = nn.ModuleList(Residual(32) for _ in range(4))
        self.head = nn.Linear(32, 10)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x.mean((2, 3))), labels)


class MixerBlock(nn.Module):
    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.norm_tokens, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.over_tokens = nn.Sequential(nn.Linear(tokens, 2 * tokens), nn.GELU(), nn.Linear(2 * tokens, tokens))
        self.over_width = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.over_tokens(self.norm_tokens(x).transpose(1, 2)).transpose(1, 2)
        return x + self.over_width(self.norm(x))


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 128, 4, 4)
        self.blocks = nn.ModuleList(MixerBlock(64, 128) for _ in range(4))
        self.head = nn.Linear(128, 10)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x.mean(1)), labels)


class EncoderAndDecoder(nn.Module):
    """As T5: each block of the decoder reads the output of the encoder, whose blocks share a bias."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, width)
        self.bias = nn.Parameter(torch.randn(4, 32, 32))
        self.encoder = nn.ModuleList(EncoderBlock(width) for _ in range(2))
        self.decoder = nn.ModuleList(DecoderBlock(width) for _ in range(2))

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x, y = self.embedding(tokens), self.embedding(labels)
        for block in self.encoder:
            x = block(x, self.bias)
        for block in self.decoder:
            y = block(y, x)
        return functional.cross_entropy((y @ self.embedding.weight.t()).flatten(0, 1), labels.flatten())


class EncoderBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.RMSNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = GatedBlock(width)

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        attended = (q @ k.transpose(2, 3) + bias).softmax(-1) @ v
        return self.mlp(x + self.out(attended.transpose(1, 2).flatten(2)))


class DecoderBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.query, self.both = nn.RMSNorm(width), nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.mlp = GatedBlock(width)

    def forward(self, y: torch.Tensor, encoded: torch.Tensor) -> torch.Tensor:
        key, value = self.both(encoded).chunk(2, -1)
        return self.mlp(y + (self.query(self.norm(y)) @ key.transpose(1, 2)).softmax(-1) @ value)


def tokens(vocabulary: int = 64, batch: int = 4, length: int = 32) -> torch.Tensor:
    return torch.randint(vocabulary, (batch, length))


def images() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, 3, 32, 32), torch.randint(10, (8,))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[torch.Tensor, ...]]]] = {
    "gpt": (functools.partial(TinyGpt, 3), lambda: (tokens(batch=16), tokens(batch=16))),
    "gated language model": (GatedLanguageModel, lambda: (tokens(4096, length=128),)),
    "encoder and decoder": (EncoderAndDecoder, lambda: (tokens(), tokens())),
    "convolutions": (Convolutions, images),
    "mixer": (Mixer, images),
}


def made(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    make, draw = MODELS[name]
    return make(), draw()


def joint_graph(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module, data: tuple[torch.Tensor, ...], **options: str
) -> JointGraph:
    """The joint graph of a model, as inductor has it partitioned; no code is made."""

    class Captured(Exception):
        pass

    found: list[JointGraph] = []

    def capture(joint: JointGraph, _room: Room) -> None:
        found.append(joint)
        raise Captured

    torch._dynamo.reset()
    with monkeypatch.context() as patch:
        patch.setattr(joint_plan, "plan_graph", capture)
        with pytest.raises(Exception, match="Captured"):
            torch.compile(model, options=torchoffload.compile_options(memory=ANY_MEMORY, **options))(*data)
    return found[0]


# ---- more memory ----


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("rate", [None, 1e10])
def test_more_memory_is_never_slower(name: str, rate: float | None, monkeypatch: pytest.MonkeyPatch):
    """And the peak is within the memory wherever that of any plan is."""
    joint = joint_graph(monkeypatch, *made(name))
    link = None if rate is None else LinkRates(rate, rate, 1e-6)
    room = functools.partial(Room, link=link, least_moved_bytes=256, reload_window_bytes=0)
    stock, least = plan_graph(joint, room(ANY_MEMORY)), plan_graph(joint, room(1))
    span = stock.predicted_peak_bytes - least.predicted_peak_bytes
    assert span > 0
    amounts = [least.predicted_peak_bytes + span * part // 8 for part in range(10)]
    found = [plan_graph(joint, room(amount)) for amount in amounts]
    assert all(plan.fits and plan.predicted_peak_bytes <= amount for plan, amount in zip(found, amounts, strict=True))
    for plan, amount in zip(found, amounts, strict=True):
        is_least = plan.predicted_peak_bytes == least.predicted_peak_bytes
        assert is_least or plan.predicted_peak_bytes + plan.doubt_bytes <= amount
        assert (plan.doubt_bytes > 0) == any(piece.again or piece.moved_bytes for piece in plan.pieces)
    times = [plan.predicted_s for plan in found]
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in itertools.pairwise(times))
    assert times[-1] == stock.predicted_s == stock.stock_s


# ---- peaks ----


def peak_bytes(model: nn.Module, step: Callable[[], None]) -> int:
    """The most bytes that a step allocates on the CPU at once, in its second call.

    The gradients of the first call are freed before the profile begins. The profiler looks up the size of a freed block
    by its address, and remembers addresses of former profiles, so a block from before would count with a wrong size.
    """
    step()
    model.zero_grad(set_to_none=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    alive = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        most = max(most, alive)
    return most


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["gated language model", "convolutions", "mixer"])
def test_predicted_peaks_are_those_of_inductors_code(name: str):
    """PyTorch's own plan, and one that computes much again, to within a tenth of all but the inputs."""
    model, data = made(name)
    fixed = sum(each.nbytes for each in (*model.parameters(), *model.buffers(), *data))

    def measured(memory: int) -> tuple[joint_plan.GraphPlan, int]:
        torch._dynamo.reset()
        planned._noted.clear()
        step = torch.compile(model, options=torchoffload.compile_options(memory=memory, link_bytes_per_s=1e9))

        peak = peak_bytes(model, lambda: step(*data).backward())
        (notes,) = planned._noted.values()
        (plan,) = notes.plans
        model.zero_grad(set_to_none=True)
        return plan, peak

    stock, peak = measured(ANY_MEMORY)
    assert stock.predicted_peak_bytes - fixed == pytest.approx(peak, rel=0.1)
    plan, peak = measured(int(fixed + 0.8 * (stock.predicted_peak_bytes - fixed)))
    assert sum(len(piece.again) for piece in plan.pieces) > 0
    assert plan.predicted_peak_bytes - fixed == pytest.approx(peak, rel=0.1)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["gpt", "encoder and decoder", "mixer"])
def test_predicted_peaks_hold_if_values_move(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The link is much slower than planned: then the waits that are planned hold the peak. Some values are views."""
    monkeypatch.setattr(JointGraph, "is_planable", lambda _joint, _piece: False)
    model, data = made(name)
    fixed = sum(each.nbytes for each in (*model.parameters(), *model.buffers(), *data))
    context = torchoffload.OffloadActivations(tier="disk", disk_dir=tmp_path, min_offload_size=1024, learn=False)

    def measured(memory: int) -> tuple[joint_plan.GraphPlan, int]:
        torch._dynamo.reset()
        planned._noted.clear()
        step = torch.compile(model, options=torchoffload.compile_options(memory=memory, link_bytes_per_s=1e12))

        def run() -> None:
            with context:
                loss = step(*data)
            loss.backward()

        peak = peak_bytes(model, run)
        (notes,) = planned._noted.values()
        (plan,) = notes.plans
        model.zero_grad(set_to_none=True)
        return plan, peak

    least, peak = measured(1)
    assert peak <= 1.12 * (least.predicted_peak_bytes - fixed)
    plan, peak = measured((least.predicted_peak_bytes + least.stock_peak_bytes) // 2)
    assert plan.releases
    assert plan.predicted_peak_bytes + plan.doubt_bytes <= plan.memory_bytes
    assert peak <= plan.predicted_peak_bytes + plan.doubt_bytes - fixed


@pytest.mark.parametrize("name", ["convolutions", "convolutions in their layout", "complex"])
def test_plans_move_the_values_that_can_move(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Not images, if inductor may choose their layout later, nor values that wait for their conjugation."""
    counts = []
    move = rewrite.move_saved_values
    monkeypatch.setattr(rewrite, "move_saved_values", lambda *given: counts.append(move(*given)) or counts[-1])
    monkeypatch.setattr(JointGraph, "is_planable", lambda _joint, _piece: False)
    if name == "complex":
        weight = torch.randn(32, 32, requires_grad=True)
        function, data = conjugated, (torch.randn(32, 32), weight)
        backend = functools.partial(torchoffload.partition_fn, memory=1, link_bytes_per_s=1e12)
        given = {"backend": aot_autograd(fw_compiler=nop, bw_compiler=nop, partition_fn=backend)}
    else:
        function, data = made("convolutions")
        options = torchoffload.compile_options(memory=1, link_bytes_per_s=1e12)
        given = {"options": options | ({} if name == "convolutions" else {"layout_optimization": False})}
    torch._dynamo.reset()
    planned._noted.clear()
    context = torchoffload.OffloadActivations(tier="disk", disk_dir=tmp_path, min_offload_size=1, learn=False)
    with context, pytest.warns(UserWarning, match="is too little"):
        loss = torch.compile(function, **given)(*data)
    loss.backward()
    (notes,) = planned._noted.values()
    (plan,) = notes.plans
    assert [len(plan.releases)] == [count for count, _ in counts]
    assert sum(piece.moved_bytes for piece in plan.pieces) == counts[0][1]
    assert (len(plan.releases) > 0) == (name == "convolutions in their layout")


def conjugated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    z = torch.complex(x @ weight, x)
    z = (z * z.conj() + z.exp()) @ torch.complex(weight, weight)
    return torch.view_as_real(z).sin().sum()


@pytest.mark.filterwarnings("ignore")  # one byte is too little
@pytest.mark.parametrize("is_dynamic", [False, True])
@pytest.mark.parametrize("memory", [None, 1])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_views_of_one_value_move_as_one(
    backend: str, memory: int | None, is_dynamic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Queries, keys and values are parts of one product."""
    packed: list[fx.Node] = []
    move = rewrite.move_saved_values

    def moved(forward: fx.GraphModule, *others: Any) -> tuple[int, int]:
        found = move(forward, *others)
        packed[:] = [node.args[0] for node in forward.graph.find_nodes(op="call_function", target=operators.pack)]
        return found

    monkeypatch.setattr(rewrite, "move_saved_values", moved)
    monkeypatch.setattr(JointGraph, "is_planable", lambda _joint, _piece: False)
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Block(32) for _ in range(4))), torch.randn(8, 32, 32)
    sizes = (8, 5) if is_dynamic else (8,)

    def gradients(**given: Any) -> list[torch.Tensor | None]:
        torch._dynamo.reset()
        model.zero_grad(set_to_none=True)
        step = torch.compile(lambda x: model(x).square().mean(), dynamic=is_dynamic, **given)
        for size in sizes:
            step(x[:size]).backward()
        return [parameter.grad for parameter in model.parameters()]

    options = {} if memory is None else {"memory": memory, "link_bytes_per_s": 1e12}
    if backend == "inductor":
        stock, ours = {}, {"options": torchoffload.compile_options(**options)}
    else:
        partition_fn = functools.partial(torchoffload.partition_fn, **options)
        stock = {"backend": aot_autograd(fw_compiler=nop, bw_compiler=nop)}
        ours = {"backend": aot_autograd(fw_compiler=nop, bw_compiler=nop, partition_fn=partition_fn)}
    expected = gradients(**stock)
    with torchoffload.OffloadActivations(tier="disk", disk_dir=tmp_path, min_offload_size=1, learn=False):
        found = gradients(**ours)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    storages = [rewrite.storage_of(node.meta["val"]) for node in packed]
    assert len(set(storages)) == len(storages) > 3
    packed_bytes = {rewrite.hint(node.meta["val"].untyped_storage().nbytes()) for node in packed}
    assert packed_bytes & {3 * x[:size].nbytes for size in sizes}


def test_logits_are_behind_the_blocks(monkeypatch: pytest.MonkeyPatch):
    """Although backward makes values for the last block behind them, which come later in the graph."""
    model, data = made("gated language model")
    joint = joint_graph(monkeypatch, model, data)
    logits = max((group for group in joint.groups if group.number in joint.saved), key=lambda group: group.nbytes)
    assert tuple(logits.maker.meta["val"].shape)[-1] == 4096
    names = [piece.name.rpartition(".")[2] for piece in joint.pieces]
    assert names == ["", "0", "1", ""]
    assert logits.piece == 3


def test_values_that_are_fused_away_take_no_memory(monkeypatch: pytest.MonkeyPatch):
    """The loss is in float32 and has several values as large as the logits. One, the logits' gradient, is there."""
    model, data = made("gated language model")
    joint = joint_graph(monkeypatch, model.bfloat16(), data)
    logits_bytes = data[0].numel() * 4096 * 2
    forward, backward = joint.forward(joint.stock, ()), joint.backward(joint.stock, ())
    assert logits_bytes <= forward.peak_bytes < 1.5 * logits_bytes
    assert logits_bytes <= backward.peak_bytes < 1.9 * logits_bytes  # the gradient takes the place of the logits


def test_memory_that_forward_has_returned_is_not_written_to(monkeypatch: pytest.MonkeyPatch):
    _, data = made("gated language model")
    lost = joint_graph(monkeypatch, GatedLanguageModel(returns_logits=True), data)
    kept = joint_graph(monkeypatch, GatedLanguageModel(), data)
    logits_bytes = data[0].numel() * 4096 * 4
    returned, own = (joint.backward(joint.stock, ()).peak_bytes for joint in (lost, kept))
    assert returned - own > 0.8 * logits_bytes


# ---- bits ----


def test_inductors_code_for_any_memory_is_that_of_stock():
    model, data = made("gpt")

    def gradients(options: dict) -> list[torch.Tensor | None]:
        torch._dynamo.reset()
        model.zero_grad(set_to_none=True)
        torch.compile(model, options=options)(*data).backward()
        return [parameter.grad for parameter in model.parameters()]

    stock = gradients({})
    ours = gradients(torchoffload.compile_options(memory=ANY_MEMORY))
    torch.testing.assert_close(ours, stock, rtol=0, atol=0)
