"""world.py: one process of a group as a case sees it, and the numerics pattern of the cases.

`assert_trains_the_same` is `assert_same_gradients` in each process at once, and looks at each saved tensor: one that is
on the memory of a weight, as the model has it at that moment, whole or in shards, has to be kept as a parameter.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import torchoffload
from devices import Device
from gradients import Program, Run, assert_same_gradients
from llama import Llama, Shape
from torchoffload._pytorch.tensor_subclasses import plain_tensors

SHAPE = Shape(hidden=40, intermediate=72, layers=2, heads=4, kv_heads=2, vocabulary=100)
BATCH, TOKENS = 2, 24
STEPS = 2


class World:
    """One process of a group.

    Attributes
    ----------
    rank, size : int
        Its place, and how many there are.
    device : Device
        The disk tier's with gloo, CUDA with NCCL.
    """

    def __init__(self, rank: int, size: int, device: Device) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self._models: tuple[nn.Module, ...] = ()
        self._weights_seen = 0
        self._meshes: dict[tuple[tuple[int, ...], tuple[str, ...]], DeviceMesh] = {}

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cuda", self.rank) if self.device.name == "cuda" else torch.device("cpu")

    def mesh(self, *shape: int, names: tuple[str, ...]) -> DeviceMesh:
        """Made once a shape: a mesh makes process groups, which are never given back."""
        key = (shape, names)
        if key not in self._meshes:
            self._meshes[key] = init_device_mesh(self.device.torch_device.type, shape, mesh_dim_names=names)
        return self._meshes[key]

    def watch(self, *models: nn.Module) -> None:
        """What is on the memory of a parameter of these must not move."""
        self._models = models

    def assert_trains_the_same(self, program: Program, *, sees_weights: bool = True, **expectations: Any) -> Any:
        """As ``assert_same_gradients``; and no weight moves.

        Parameters
        ----------
        sees_weights : bool
            Weights are among what is saved: not so where checkpoints hide it all.

        Returns
        -------
        dict
            ``bytes_offloaded``, and ``kept``: how many records were kept, by reason.
        """
        self._weights_seen = 0
        stats = assert_same_gradients(program, device=self.device, context=self._watched_context, **expectations)
        self._models = ()
        assert self._weights_seen > 0 or not sees_weights, "no weight was saved"
        dist.barrier()
        return {"bytes_offloaded": stats.bytes_offloaded, "kept": dict(stats.records_kept)}

    def _watched_context(self, **options: Any) -> torchoffload.OffloadActivations:
        context = self.device.context(**options)
        pack = context.pack_hook

        def watched_pack(tensor: torch.Tensor) -> Any:
            expected = len(weight_storages(self._models) & set(storages(tensor)))
            before = kept_parameters()
            handle = pack(tensor)
            assert kept_parameters() - before >= expected, f"a weight moves: {tensor.shape}, {type(tensor)}"
            self._weights_seen += expected
            return handle

        context.pack_hook = watched_pack
        return context


def kept_parameters() -> int:
    return torchoffload.stats().records_kept.get("parameter", 0)


def storages(tensor: torch.Tensor) -> list[int]:
    """Of the tensor, or of what is inside of a wrapper: the storages that have memory."""
    storages = [plain.untyped_storage() for plain in plain_tensors(tensor.detach())]
    return [storage._cdata for storage in storages if storage.nbytes() > 0]


def weight_storages(models: Iterable[nn.Module]) -> set[int]:
    return {storage for model in models for parameter in model.parameters() for storage in storages(parameter)}


def make_llama(run: Run, shape: Shape = SHAPE, *part: int, **options: Any) -> nn.Module:
    """A Llama, or a stage of one, with the same weights in each process and each run."""
    return run.module(lambda: Llama(shape, *part, **options))


def batch_of(run: Run, seed: int, batch: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels that depend on ``seed`` alone."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(SHAPE.vocabulary, (batch, TOKENS + 1), generator=generator).to(run.device)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def local_values(model: nn.Module) -> dict[str, tuple[torch.Tensor, torch.Tensor | None]]:
    """This process's part of each parameter, and of its gradient."""

    def local(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    return {name: (local(p), local(p.grad)) for name, p in model.named_parameters()}
