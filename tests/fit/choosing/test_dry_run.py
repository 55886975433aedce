"""A dry run tells what a call would save, byte for byte, and leaves no trace; or it says why it cannot tell."""

import contextlib
import copy
import gc
import logging
import random
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import distributed, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from own_process import assert_prints_right
from planned_blocks import BLOCKS, WIDTH
from torchoffload._fit.choosing.collector import storages_in
from torchoffload._fit.choosing.dry_run import DryRunError, dry_run
from torchoffload._fit.choosing.fake_copy import FakeCopy


def real_saves(model: nn.Module, *args: Any, **kwargs: Any) -> int:
    """What a call of the model really saves, in bytes, each storage once."""
    own = {storage._cdata for storage in storages_in([*model.parameters(), *model.buffers()])}
    found: dict[int, int] = {}
    held = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        for storage in storages_in(tensor):
            held.append(storage)
            if storage._cdata not in own:
                found[storage._cdata] = storage.nbytes()
        return tensor.detach()

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        model(*args, **kwargs)
    return sum(found.values())


def dry_saves(model: nn.Module, *args: Any, **kwargs: Any) -> int:
    tree = dry_run(model, args, kwargs)
    return tree.total_bytes(set(tree.saves))


def inputs() -> torch.Tensor:
    return torch.randn(4, 8, WIDTH)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(8)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 3 * ctx.saved_tensors[0] ** 2


class CallsFunction(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Cube.apply(self.norm(self.layer(x)))


class AsksWhetherAllAreFinite(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        return torch.exp(h) if torch.isfinite(h).all() else torch.sin(torch.exp(h))


class AsksWhetherAnyIsNan(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        return torch.sin(torch.exp(h)) if torch.isnan(h).any() else torch.exp(h)


class HalvesUntilSmall(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        while h.norm() > 1e6:
            h = h / 2
        return torch.exp(h)


class Checkpointed(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda y: torch.exp(self.layer(y)), self.layer(x), use_reentrant=False)


class Parametrized(Base):
    def __init__(self) -> None:
        super().__init__()
        parametrizations.weight_norm(self.layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.exp(self.layer(x))


class Tied(Base):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, WIDTH)
        self.other.weight = self.layer.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.exp(self.other(torch.exp(self.layer(x))))


TOLD = {each.__name__: each for each in (
    CallsFunction, AsksWhetherAllAreFinite, AsksWhetherAnyIsNan, HalvesUntilSmall, Checkpointed, Parametrized, Tied,
)}  # fmt: skip


@pytest.mark.parametrize("name", TOLD)
def test_what_a_dry_run_tells_is_what_a_call_saves(name: str):
    torch.manual_seed(0)
    model, x = TOLD[name](), inputs()
    assert dry_saves(model, x) == real_saves(model, x) > 0


@pytest.mark.parametrize("block", sorted(set(BLOCKS) - {"reads numbers"}))
def test_it_tells_the_bytes_of_ordinary_blocks(block: str):
    torch.manual_seed(0)
    model, x = nn.Sequential(BLOCKS[block](), BLOCKS[block]()), inputs()
    assert dry_saves(model, x) == real_saves(model, x) > 0


def test_it_tells_the_bytes_of_a_call_under_autocast():
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)), inputs()
    with torch.autocast("cpu", torch.bfloat16):
        assert dry_saves(model, x) == real_saves(model, x)


def test_the_casts_that_autocast_remembers_stay_its():
    """A second cast would be another node of the graph, and gradients would be added in another order."""
    model, x = nn.Linear(WIDTH, WIDTH), torch.randn(4, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        cast = torch.mm(x, model.weight).grad_fn.next_functions[1][0]
        dry_run(model, (x,), {})
        assert torch.is_autocast_cache_enabled()
        assert torch.mm(x, model.weight).grad_fn.next_functions[1][0] is cast


class Leaves(nn.Module):
    """A forward that leaves traces wherever it can."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(8)
        self.calls, self.seen, self.cache = 0, [torch.ones(3)], {"kept": torch.ones(2)}
        self.generator = torch.Generator()
        self.plain = torch.ones(WIDTH)

    def forward(self, x: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        self.calls += 1
        h = functional.dropout(self.norm(self.layer(x)), 0.5)
        self.seen.append(h.detach())
        self.cache["last"] = h
        self.cache["kept"].add_(1)
        self.plain.mul_(2)
        self.last = h
        x.mul_(2)
        state["count"] += 1
        state["tensors"].append(h)
        if random.random() < 2 and numpy.random.rand() < 2:  # noqa: NPY002
            torch.manual_seed(1)
        warnings.warn("called", UserWarning, stacklevel=1)
        return h * torch.rand(8, WIDTH) * torch.rand(8, WIDTH, generator=self.generator)


def test_a_dry_run_leaves_no_trace():
    model, x = Leaves(), inputs()
    model.layer.weight.grad = torch.ones(WIDTH, WIDTH)
    told: list[str] = []
    model.register_forward_hook(lambda *_: told.append("forward"))
    model.layer.register_forward_pre_hook(lambda *_: told.append("forward pre"))
    model.layer.register_full_backward_hook(lambda *_: told.append("backward"))
    model.layer.weight.register_hook(lambda *_: told.append("gradient"))
    state: dict[str, Any] = {"count": 0, "tensors": []}
    attributes = {key: value for key, value in vars(model).items() if not isinstance(value, torch.Generator)}
    before = copy.deepcopy({key: value for key, value in attributes.items() if not key.startswith("_")})
    tensors = {name: each.clone() for name, each in model.state_dict().items()}
    versions = [each._version for each in [*model.parameters(), *model.buffers(), x, model.plain]]
    arguments, generator = x.clone(), model.generator.get_state()
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].copy()  # noqa: NPY002
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert dry_run(model, (x, state), {}).saves
    assert not warned
    assert not told
    assert set(vars(model)) == set(attributes) | {"generator"}
    assert (model.calls, len(model.seen), set(model.cache)) == (0, 1, {"kept"})
    assert torch.equal(model.cache["kept"], before["cache"]["kept"])
    assert all(torch.equal(each, tensors[name]) for name, each in model.state_dict().items())
    assert versions == [each._version for each in [*model.parameters(), *model.buffers(), x, model.plain]]
    assert state == {"count": 0, "tensors": []}
    assert torch.equal(x, arguments)
    assert torch.equal(model.generator.get_state(), generator)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert numpy.array_equal(numpy.random.get_state()[1], states[2])  # noqa: NPY002
    assert torch.equal(model.layer.weight.grad, torch.ones(WIDTH, WIDTH))


def test_nothing_holds_the_model_or_the_arguments_afterwards():
    model, x = TOLD["CallsFunction"](), inputs()
    dry_run(model, (x,), {})
    of_model, of_x = weakref.ref(model), weakref.ref(x)
    del model, x
    gc.collect()
    assert of_model() is None
    assert of_x() is None


def test_it_takes_no_memory():
    """A layer of 4 PiB: nobody could make it, or what it saves."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1 << 25, 1 << 25), nn.GELU())
    x = torch.empty(1 << 20, 1 << 25, device="meta")
    assert dry_saves(model, x) == 2 * 4 * (1 << 45)


class ReadsNumPy(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * float(x.numpy().sum())


class HasALock(Base):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.lock:
            return self.layer(x)


class HasAnotherForward(Base):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

        def forward(x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return self.layer(x)

        self.forward = forward


class CallsTheModelItself(Base):
    """By a closure, which a copy shares."""

    def __init__(self) -> None:
        super().__init__()
        self.run = [lambda x: self.layer(x)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run[0](x)


class Scripted(Base):
    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.script = torch.jit.script(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.script(x)


class TakesForever(Base):
    """And catches what would end it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        while True:
            try:
                x = self.layer(x)
            except Exception:
                x = inputs()


class Communicates(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        distributed.all_reduce(x, group=self.group())
        return self.layer(x)

    def group(self) -> Any:
        if not distributed.is_initialized():
            distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        return distributed.group.WORLD


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "reads NumPy": (ReadsNumPy, "numpy|Numpy|NumPy"),
    "has a lock": (HasALock, "lock"),
    "another forward": (HasAnotherForward, "forward of another object"),
    "calls the model": (CallsTheModelItself, "refers to the model"),
    "TorchScript": (Scripted, "TorchScript"),
    "takes forever": (TakesForever, "took more than"),
    "communicates": (Communicates, "communicates"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_cannot_be_told_is_an_error_that_says_why(why: str):
    make, text = REFUSED[why]
    model, x = make(), inputs()
    states = torch.get_rng_state()
    began = time.monotonic()
    try:
        with pytest.raises(DryRunError, match=text):
            dry_run(model, (x,), {}, limit_s=0.3)
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()
    assert time.monotonic() - began < 60
    assert getattr(model, "count", 0) == 0
    assert torch.is_autocast_cache_enabled()
    assert torch.equal(torch.get_rng_state(), states)


class Sees(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("it was called")


@pytest.mark.parametrize(("device", "dropout"), [("cuda:0", 0.0), ("cpu", 0.5)])
def test_a_copied_recurrent_layer_fills_no_table_of_cudnns(device: str, dropout: float):
    """Neither with a tensor without data, nor with a seed that the next real call would have drawn."""

    def fake(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
        meta = tensor.detach().to("meta")
        # An nn.Parameter of a fake tensor is a fake tensor that says so.
        return nn.Parameter(FakeTensor(mode, meta, torch.device(device)), tensor.requires_grad)

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LSTM(WIDTH, WIDTH, 2, dropout=0.5))
    copied = FakeCopy(model, ((), {}), fake).model
    assert isinstance(copied, nn.Sequential)
    assert copied[1].dropout == dropout
    assert model[1].dropout == 0.5


def test_a_model_of_transformers_that_was_called_before_gives_its_hidden_states_to_its_head():
    """Hooks collect them, which transformers registers in the first call, and which are not copied."""
    transformers = pytest.importorskip("transformers")
    config = transformers.SegformerConfig(
        hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 2, 4], decoder_hidden_size=16
    )
    model = transformers.SegformerForSemanticSegmentation(config).train()
    x = torch.randn(1, 3, 64, 64)
    before = dry_saves(model, pixel_values=x)
    model(pixel_values=x)
    assert dry_saves(model, pixel_values=x) == before > 0
    assert model(pixel_values=x, output_hidden_states=True).hidden_states is not None


class AsksForTheAddress(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = x.data_ptr()
        return torch.exp(self.layer(x))


def test_code_that_reads_memory_by_its_address_is_given_none():
    """Kernels that are called without the dispatcher would read or write at the address 0."""
    with pytest.raises(DryRunError, match="Cannot access data pointer"):
        dry_saves(AsksForTheAddress(), inputs())


class ComparesAddresses(nn.LSTM):
    """Asks for addresses as recurrent layers do on a GPU, whose weights cuDNN wants in one piece."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        self.addresses = {each.data_ptr() for each in (*self._flat_weights, torch.empty_like(x))}
        return super().forward(x)[0]


class Recurrent(nn.Module):
    def __init__(self, *, asks: bool) -> None:
        super().__init__()
        self.layers = ComparesAddresses(WIDTH, WIDTH, batch_first=True)
        self.other = AsksForTheAddress() if asks else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(self.layers(x))


def test_recurrent_layers_may_compare_addresses():
    assert dry_saves(Recurrent(asks=False), inputs()) > 0
    with pytest.raises(DryRunError, match="Cannot access data pointer"):
        dry_saves(Recurrent(asks=True), inputs())


@pytest.mark.parametrize("fused", ["before", "within"])
def test_fused_kernels_of_torchscript_are_given_no_tensors_without_data(fused: str, tmp_path: Path):
    assert_prints_right(Path(__file__).parents[2] / "support" / "fused_torchscript.py", fused, tmp_path)


class RunsFakes(nn.Module):
    """Calls an operator that fails on fake tensors, and one of the program's own fakes that fails as well."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(4, 36, 20, dtype=torch.bfloat16))
        self.fails_itself = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails_itself:
            with FakeTensorMode() as mode:
                wrong = [mode.from_tensor(torch.ones(2, 3)) for _ in range(2)]
                with contextlib.suppress(RuntimeError):
                    torch.mm(*wrong)
        ends = torch.tensor([4, 8, 12, 16], dtype=torch.int32, device=x.device)
        return torch._grouped_mm(x, self.experts, offs=ends)


@pytest.mark.parametrize("fails_itself", [False, True])
def test_an_operator_that_fails_in_a_dry_run_is_not_logged_as_an_error_of_the_programs(fails_itself: bool):
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addHandler(handler)
    model = RunsFakes()
    model.fails_itself = fails_itself
    try:
        with pytest.raises(DryRunError, match="stride"):
            dry_run(model, (torch.randn(16, 36, dtype=torch.bfloat16),), {})
        assert not logger.filters
        assert [each.args for each in records] == [(torch.ops.aten.mm.default,)] * fails_itself
    finally:
        logger.removeHandler(handler)


def test_a_dry_run_is_not_tried_where_others_would_see_it():
    model, x = TOLD["CallsFunction"](), inputs()
    with Sees(), pytest.raises(DryRunError, match="dispatch mode"):
        dry_run(model, (x,), {})
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        with pytest.raises(DryRunError, match="hooks on all modules"):
            dry_run(model, (x,), {})
    finally:
        handle.remove()


def test_hooks_that_are_pushed_outside_get_nothing():
    def pack(tensor: torch.Tensor) -> torch.Tensor:
        raise AssertionError("it was called")

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        assert dry_run(TOLD["CallsFunction"](), (inputs(),), {}).saves
