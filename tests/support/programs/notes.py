"""notes.py: what a run of a program saw, and its bits."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.testing._internal.two_tensor import TwoTensor

from gradients import fingerprint


class Notes:
    """What one thread of a run saw, in order; each note is (step, bits)."""

    def __init__(self, device: torch.device) -> None:
        self.seen: list[tuple[str, Any]] = []
        self.done: Counter[str] = Counter()  # what ran without an error, by name
        self.raised: Counter[str] = Counter()
        self.finished_count = 0  # backwards that reached a leaf
        self.shared_gradient_count = 0  # gradients on the memory of a value: a later backward adds into them
        self.alive: list[str] = []  # values whose storages outlived the program
        # On CUDA bits are read at the end: each read waits for the device, and would hide a missing wait.
        self._is_late = device.type == "cuda"

    def note(self, step: str, value: Any) -> None:
        self.seen.append((step, _copied(value) if self._is_late else _bits(value)))

    def bits(self) -> list[tuple[str, Any]]:
        return [(step, _bits(value)) for step, value in self.seen]

    def count_shared_gradients(self, leaves: Iterable[torch.Tensor], values: Iterable[Any]) -> None:
        of_values = set().union(*map(_storages, values))
        self.shared_gradient_count += sum(not of_values.isdisjoint(_storages(leaf.grad)) for leaf in leaves)

    def join(self, other: "Notes") -> None:
        self.seen += other.seen
        self.done += other.done
        self.raised += other.raised
        self.finished_count += other.finished_count
        self.shared_gradient_count += other.shared_gradient_count


def plain_tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, TwoTensor):
        yield from plain_tensors(value.a)
        yield from plain_tensors(value.b)
    elif isinstance(value, torch.Tensor):
        yield value


def copy_gradients(leaves: Iterable[torch.Tensor]) -> None:
    """Each ``.grad`` that autograd may add into gets memory of its own."""
    with torch.inference_mode(False), torch.no_grad():
        for leaf in leaves:
            if type(leaf.grad) is torch.Tensor and not leaf.grad.requires_grad:
                leaf.grad = leaf.grad.clone()


def _storages(value: Any) -> set[int]:
    return {t.untyped_storage()._cdata for t in plain_tensors(value) if t.layout is torch.strided}


def _bits(value: Any) -> Any:
    if isinstance(value, TwoTensor):
        return ("two", tuple(value.shape), value.stride(), _bits(value.a), _bits(value.b))
    if isinstance(value, list | tuple):
        return tuple(_bits(each) for each in value)
    return fingerprint(value)


def _copied(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_copied(each) for each in value)
    if not isinstance(value, torch.Tensor):
        return value
    with torch.no_grad():
        copied = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device) if (
            type(value) is torch.Tensor and not value.is_conj() and not value.is_neg() and 0 not in value.stride()
        ) else None  # fmt: skip
        return value.detach().clone() if copied is None else copied.copy_(value.detach())


class Kept(list[torch.Tensor]):
    """What backwards kept for ever, noted as it comes: stock keeps the program's own tensor, which may change."""

    def __init__(self, notes: Notes) -> None:
        super().__init__()
        self.notes = notes

    def append(self, tensor: torch.Tensor) -> None:
        self.notes.note("kept", tensor)
        super().append(tensor)
