"""torch's own tensor subclasses: jagged attention, DTensor of every placement, masked and strided nested tensors."""

import functools
from collections.abc import Iterator
from typing import Any, Self

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.masked import masked_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import return_and_correct_aliasing

from devices import Device
from functions import Save
from gradients import Run, assert_same_gradients

# ---- jagged and strided nested tensors ----

LENGTHS = (3, 7, 5)
HEADS, HEAD_WIDTH = 2, 16
VALUES_BYTES = sum(LENGTHS) * HEADS * HEAD_WIDTH * 4


def parts_of(run: Run) -> list[torch.Tensor]:
    return [run.leaf(length, HEADS * HEAD_WIDTH) for length in LENGTHS]


@pytest.mark.except_devices("privateuseone")  # it has strided tensors only
def test_attention_over_a_jagged_tensor(device_under_test: Device):
    def program(run: Run):
        parts = parts_of(run)
        weights = [run.parameter(HEADS * HEAD_WIDTH, HEADS * HEAD_WIDTH) for _ in range(3)]
        with run.offload():
            x = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
            heads = [(x @ weight).unflatten(-1, [HEADS, HEAD_WIDTH]).transpose(1, 2) for weight in weights]
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                y = F.scaled_dot_product_attention(*heads)
            y = y.transpose(1, 2).flatten(-2).sin()
        torch.cat(y.unbind()).sum().backward()
        return [part.grad for part in parts], [weight.grad for weight in weights]

    assert_same_gradients(program, device=device_under_test, kept_reason="parameter")


def test_a_jagged_tensor_keeps_its_lengths_and_its_cached_bounds(device_under_test: Device):
    def program(run: Run):
        values = run.leaf(sum(LENGTHS), 16)
        offsets = torch.tensor([0, 3, 10, 15], device=run.device)
        bounds = {"min_seqlen": 2, "max_seqlen": 6}
        with run.offload():
            lengths = torch.tensor([2, 6, 4], device=run.device)
            x = torch.nested.nested_tensor_from_jagged(values, offsets=offsets, lengths=lengths, **bounds)
            y = (x.sin() * x).exp()
        saved = y.grad_fn._saved_result
        run.check(
            same=[saved.offsets() is y.offsets(), saved.lengths() is y.lengths(), saved.shape == y.shape],
            bounds=[saved._get_min_seqlen(), saved._get_max_seqlen()],
        )
        y.values().sum().backward()
        return values.grad

    # The values, their sine, and the result; offsets and lengths stay the very objects.
    assert_same_gradients(program, device=device_under_test, moved_bytes=3 * sum(LENGTHS) * 16 * 4)


def test_the_mask_of_a_jagged_dropout_moves(device_under_test: Device):
    def program(run: Run):
        values, offsets = run.leaf(sum(LENGTHS), 16), torch.tensor([0, 3, 10, 15], device=run.device)
        mask = run.tensor(sum(LENGTHS), 16, dtype=torch.bool)
        with run.offload():
            mask = torch.nested.nested_tensor_from_jagged(mask, offsets=offsets)
            y = Save.apply(values, lambda unpacked: unpacked.values().float(), mask)
        y.sum().backward()
        return values.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=sum(LENGTHS) * 16)


@pytest.mark.except_devices("privateuseone")  # it has strided tensors only
def test_a_strided_nested_tensor_stays(device_under_test: Device):
    def program(run: Run):
        parts, weight = parts_of(run), run.parameter(HEADS * HEAD_WIDTH, HEADS * HEAD_WIDTH)
        with run.offload():
            x = torch.nested.as_nested_tensor(parts)
            y = F.gelu(F.linear(x, weight))
            z = torch.nested.to_padded_tensor(y, 0.0).sin()
        z.sum().backward()
        return [part.grad for part in parts], weight.grad

    # What is saved of the padded one is a tensor as any other: as many rows for each part as the longest has.
    stats = assert_same_gradients(
        program, device=device_under_test, min_moved_fraction=0.1, kept_reason=["layout", "parameter"]
    )
    assert stats.bytes_offloaded >= len(LENGTHS) * max(LENGTHS) * HEADS * HEAD_WIDTH * 4


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors is in prototype stage")
def test_a_masked_tensor_stays(device_under_test: Device):
    """It has no protocol that says what is inside of it."""

    def program(run: Run):
        values = run.tensor(32, 32)
        x = masked_tensor(values, values > 0, requires_grad=True)
        with run.offload():
            y = (x.sin() * x).exp()
        y.sum().backward()
        return x.grad.get_data().nan_to_num(), x.grad.get_mask()

    assert_same_gradients(program, device=device_under_test, moved_bytes=0, kept_reason="layout")


# ---- protocols of every kind ----


class Quirky(torch.Tensor):
    """An inner tensor that may be missing, names in the order of the day, and attributes that are no tensors."""

    scale: torch.Tensor | None

    @staticmethod
    def __new__(cls, values: torch.Tensor, scale: torch.Tensor | None, note: Any) -> Self:
        return torch.Tensor._make_wrapper_subclass(
            cls, values.shape, values.stride(), dtype=values.dtype, device=values.device
        )

    def __init__(self, values: torch.Tensor, scale: torch.Tensor | None, note: Any) -> None:
        self.values_inside, self.scale, self.note = values, scale, note

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        names = ["values_inside"] if self.scale is None else ["scale", "values_inside"]
        return names, {"note": self.note}

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], meta: dict[str, Any], size: Any, stride: Any) -> "Quirky":
        return Quirky(inner["values_inside"], inner.get("scale"), meta["note"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = args[0]
        out = Quirky(func(first.values_inside, *args[1:], **(kwargs or {})), first.scale, first.note)
        return return_and_correct_aliasing(func, args, kwargs or {}, out)


@pytest.mark.parametrize("has_scale", [False, True])
def test_a_wrapper_with_an_inner_tensor_that_may_be_missing(device_under_test: Device, has_scale: bool):
    def program(run: Run):
        x, note = run.leaf(32, 32), object()
        inside = Quirky(run.tensor(32, 32), run.tensor(32) if has_scale else None, note)

        def look(*unpacked: Quirky) -> torch.Tensor:
            run.check(
                notes=[each.note is note for each in unpacked],
                scales=[each.scale for each in unpacked],
                strides=[each.stride() for each in unpacked],
            )
            return unpacked[0].values_inside * unpacked[1].values_inside

        with run.offload():
            y = Save.apply(x, look, inside, inside.t())
        y.sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=(32 * 32 + 32 * has_scale) * 4)


# ---- DTensor ----

ON_THE_CPU = pytest.mark.devices("disk", "simulated-late", "simulated-early", "simulated-seeded")
RANKS = 4


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """The second of four ranks; collectives give what this rank has."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=RANKS)
    yield init_device_mesh("cpu", (RANKS,))
    dist.destroy_process_group()


def looked_at(run: Run, unpacked: DTensor) -> torch.Tensor:
    run.check(
        kind=type(unpacked).__name__,
        placements=str(unpacked.placements),
        shape=tuple(unpacked.shape),
        stride=unpacked.stride(),
        local=unpacked.to_local(),
    )


PLACEMENTS = {
    "replicate": (Replicate(), (10, 32), 10),
    "partial": (Partial(), (10, 32), 10),
    "uneven": (Shard(0), (3, 32), 3),
    "columns": (Shard(1), (10, 8), 10),
}


@ON_THE_CPU
@pytest.mark.parametrize(("placement", "local", "rows"), PLACEMENTS.values(), ids=PLACEMENTS)
def test_a_dtensor_of_each_placement_comes_back(
    device_under_test: Device, mesh: DeviceMesh, placement: Any, local: tuple[int, int], rows: int
):
    def program(run: Run):
        x = run.leaf(4)
        sharded = DTensor.from_local(
            run.tensor(*local), mesh, [placement], run_check=False, shape=torch.Size((10, 32)), stride=(32, 1)
        )
        with run.offload():
            y = Save.apply(x, functools.partial(looked_at, run), sharded)
        y.sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=local[0] * local[1] * 4)


@ON_THE_CPU
def test_a_forward_that_redistributes(device_under_test: Device, mesh: DeviceMesh):
    def program(run: Run):
        local = run.leaf(8, 32)
        weight = nn.Parameter(DTensor.from_local(run.tensor(32, 32), mesh, [Replicate()], run_check=False))
        with run.offload():
            x = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
            y = (x @ weight).sin().redistribute(placements=[Replicate()])
            z = (y.exp() @ weight.t()).redistribute(placements=[Shard(1)]).sin()
        z.to_local().sum().backward()
        return local.grad, weight.grad.to_local()

    # This rank's x and its product; the gathered exp, and a quarter of the last product, a column each.
    moved_bytes = (2 * 8 * 32 + 32 * 32 + 32 * 8) * 4
    assert_same_gradients(program, device=device_under_test, moved_bytes=moved_bytes, kept_reason="parameter")


@ON_THE_CPU
def test_a_tensor_parallel_mlp_moves_each_local_tensor_once(device_under_test: Device, mesh: DeviceMesh):
    def program(run: Run):
        model = run.module(
            lambda: nn.Sequential(nn.Linear(32, 64, bias=False), nn.ReLU(), nn.Linear(64, 32, bias=False))
        )
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        x = run.leaf(8, 32)
        for _ in range(2):
            with run.offload(model=model):
                loss = model(x.sin()).square().sum()
            loss.backward()
            run.check(loss=loss, gradient=x.grad)
        return [parameter.grad.to_local() for parameter in model.parameters()]

    # In each step: x, its sine, ReLU's result (this rank's 16 columns, saved by ReLU and by the linear after it), and
    # what is squared.
    moved_bytes = 2 * (3 * 8 * 32 + 8 * 64 // RANKS) * 4
    assert_same_gradients(program, device=device_under_test, moved_bytes=moved_bytes, kept_reason="parameter")


@ON_THE_CPU
def test_a_wrapper_inside_a_dtensor(device_under_test: Device, mesh: DeviceMesh):
    def program(run: Run):
        x = run.leaf(4)
        inner = TwoTensor(run.tensor(32, 32), run.tensor(32, 32))
        nested = DTensor.from_local(inner, mesh, [Replicate()], run_check=False)

        def look(unpacked: DTensor) -> None:
            local = unpacked.to_local()
            run.check(kinds=[type(unpacked).__name__, type(local).__name__], halves=[local.a, local.b])

        with run.offload():
            y = Save.apply(x, look, nested)
        y.sum().backward()
        return x.grad

    assert_same_gradients(program, device=device_under_test, moved_bytes=2 * 32 * 32 * 4)
