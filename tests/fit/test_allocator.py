"""What fit does about PyTorch's CUDA allocator."""

import types
from typing import Any

import pytest
import torch

import torchoffload
from devices import Device
from fitted_models import Model, options_of
from planned_blocks import BLOCKS, WIDTH
from torchoffload._fit.machine import allocator
from torchoffload._fit.machine.allocator import prepare_allocator, stuck_bytes

CUDA = torch.device("cuda", 0)
MIB = 1 << 20


class Allocator:
    """Stands for the CUDA allocator of PyTorch: what it is asked, and what it is told."""

    def __init__(self, patch: pytest.MonkeyPatch, *, supports: bool = True, fraction: float = 1.0) -> None:
        self.told: list[str] = []
        self.settings, self.backend = "", "native"
        self.is_expanding = False  # as its snapshots say
        self.segments: list[dict[str, Any]] = []
        for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING"):
            patch.delenv(name, raising=False)
        patch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: self.settings, raising=False)
        patch.setattr(torch._C, "_accelerator_setAllocatorSettings", self.told.append, raising=False)
        patch.setattr(torch.cuda.memory, "get_allocator_backend", lambda: self.backend)
        patch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _device: fraction)
        patch.setattr(allocator, "_makes_expandable", lambda _device: supports)
        patch.setattr(allocator, "_is_pluggable", lambda: False)
        patch.setattr(allocator, "_snapshot", self.snapshot)

    def snapshot(self) -> dict[str, Any]:
        return {"segments": self.segments, "allocator_settings": {"expandable_segments": self.is_expanding}}


def test_segments_are_made_expandable(monkeypatch: pytest.MonkeyPatch):
    of_torch = Allocator(monkeypatch)
    assert prepare_allocator(CUDA, "expandable") == "the allocator's segments are expandable"
    assert of_torch.told == ["expandable_segments:True"]


def test_the_allocator_is_left_as_it_is_where_the_user_wants_it(monkeypatch: pytest.MonkeyPatch):
    of_torch = Allocator(monkeypatch)
    assert "as it was" in prepare_allocator(CUDA, "as it is")
    assert not of_torch.told


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING"])
def test_what_the_environment_says_is_left_alone(monkeypatch: pytest.MonkeyPatch, name: str):
    of_torch = Allocator(monkeypatch)
    monkeypatch.setenv(name, "max_split_size_mb:512")
    assert f"{name} is set" in prepare_allocator(CUDA, "expandable")
    assert not of_torch.told


def test_what_the_program_has_set_is_left_alone(monkeypatch: pytest.MonkeyPatch):
    of_torch = Allocator(monkeypatch)
    of_torch.settings = "expandable_segments:False"
    assert "it was set to 'expandable_segments:False'" in prepare_allocator(CUDA, "expandable")
    of_torch.settings, of_torch.backend = "", "cudaMallocAsync"
    assert "its backend is 'cudaMallocAsync'" in prepare_allocator(CUDA, "expandable")
    of_torch.backend = "native"
    monkeypatch.setattr(allocator, "_is_pluggable", lambda: True)
    assert "the program has its own" in prepare_allocator(CUDA, "expandable")
    assert not of_torch.told


def test_a_memory_fraction_is_no_place_for_expandable_segments(monkeypatch: pytest.MonkeyPatch):
    of_torch = Allocator(monkeypatch, fraction=0.5)
    assert "a memory fraction is set" in prepare_allocator(CUDA, "expandable")
    assert not of_torch.told


def test_a_platform_without_expandable_segments_is_told_of(monkeypatch: pytest.MonkeyPatch):
    of_torch = Allocator(monkeypatch, supports=False)
    assert "this platform has no expandable segments" in prepare_allocator(CUDA, "expandable")
    assert of_torch.told == ["expandable_segments:True", "expandable_segments:False"]


def test_a_cpu_has_no_such_allocator(monkeypatch: pytest.MonkeyPatch):
    of_torch = Allocator(monkeypatch)
    assert prepare_allocator(torch.device("cpu"), "expandable") == ""
    assert not of_torch.told


def segment(
    total: int, allocated: int, *, is_expandable: bool, pool: tuple[int, int] = (0, 0), address: int = 0
) -> dict[str, Any]:
    return {
        "device": 0, "address": address, "total_size": total, "allocated_size": allocated,
        "is_expandable": is_expandable, "segment_pool_id": pool,
    }  # fmt: skip


def test_what_cannot_be_given_back_is_what_is_free_beside_something_and_in_the_pools_of_graphs(
    monkeypatch: pytest.MonkeyPatch,
):
    of_torch = Allocator(monkeypatch)
    of_torch.segments = [segment(100, 60, is_expandable=False), segment(50, 0, is_expandable=False)]
    assert stuck_bytes(CUDA) is None  # segments are not expandable
    of_torch.is_expanding = True
    assert stuck_bytes(CUDA) == 40  # there is none at the moment, and a new one would be expandable
    monkeypatch.setattr(allocator, "_makes_expandable", lambda _device: False)
    assert stuck_bytes(CUDA) is None  # the platform has none
    of_torch.segments.append(segment(1000, 10, is_expandable=True))
    assert stuck_bytes(CUDA) == 40
    of_torch.segments += [
        segment(300, 0, is_expandable=True, pool=(0, 1)), segment(20, 5, is_expandable=False, pool=(0, 1))
    ]  # fmt: skip
    assert stuck_bytes(CUDA) == 40 + 300 + 15
    of_torch.is_expanding = False  # the program has switched it off
    assert stuck_bytes(CUDA) is None
    of_torch.is_expanding, of_torch.backend = True, "cudaMallocAsync"
    assert stuck_bytes(CUDA) is None
    assert stuck_bytes(torch.device("cpu")) is None


def test_a_second_fit_finds_what_the_first_has_set_though_settings_cannot_be_asked_for(
    monkeypatch: pytest.MonkeyPatch,
):
    """Before torch 2.13 nothing tells the settings of run time but a snapshot."""
    of_torch = Allocator(monkeypatch)
    monkeypatch.delattr(torch._C, "_accelerator_getAllocatorSettings")
    for _ in range(2):
        assert prepare_allocator(CUDA, "expandable") == "the allocator's segments are expandable"
        of_torch.is_expanding = True
        monkeypatch.setattr(allocator, "_makes_expandable", lambda _device: False)  # its tensors find holes
    assert of_torch.told == ["expandable_segments:True"]


class Memory:
    """Stands for the memory of small tensors: holes in segments that are there, and then a new segment."""

    def __init__(self, patch: pytest.MonkeyPatch, *, holes: int, is_expandable: bool, room: int = 9) -> None:
        self.segments = [segment(2 * MIB, MIB, is_expandable=False, address=(2 * number + 1) * MIB)
                         for number in range(holes)]  # fmt: skip
        self.places = [each["address"] for each in self.segments]
        self.is_expandable, self.room = is_expandable, room
        patch.setattr(torch.cuda, "empty_cache", lambda: None)
        patch.setattr(torch, "empty", self.empty)
        patch.setattr(allocator, "_snapshot", lambda: {"segments": self.segments})

    def empty(self, nbytes: int, *, dtype: torch.dtype, device: torch.device) -> Any:
        assert (nbytes, dtype, device) == (MIB, torch.uint8, CUDA)
        if self.room == 0:
            raise torch.OutOfMemoryError
        self.room -= 1
        if not self.places:
            self.segments.append(segment(2 * MIB, MIB, is_expandable=self.is_expandable, address=1 << 40))
            self.places.append(1 << 40)
        address = self.places.pop(0)
        return types.SimpleNamespace(data_ptr=lambda: address)


@pytest.mark.parametrize("holes", [0, 3])
@pytest.mark.parametrize("is_expandable", [False, True])
def test_a_new_segment_tells_whether_segments_are_expandable(
    monkeypatch: pytest.MonkeyPatch, holes: int, is_expandable: bool
):
    memory = Memory(monkeypatch, holes=holes, is_expandable=is_expandable)
    assert allocator._makes_expandable(CUDA) == is_expandable
    assert len(memory.segments) == holes + 1


def test_without_memory_for_a_new_segment_segments_do_not_count_as_expandable(monkeypatch: pytest.MonkeyPatch):
    Memory(monkeypatch, holes=3, is_expandable=True, room=2)
    assert not allocator._makes_expandable(CUDA)


def test_if_nothing_is_cached_segments_do_not_count_as_expandable(monkeypatch: pytest.MonkeyPatch):
    memory = Memory(monkeypatch, holes=1, is_expandable=True)
    memory.places = [1 << 50]  # in no segment, as with PYTORCH_NO_CUDA_MEMORY_CACHING
    assert not allocator._makes_expandable(CUDA)


def test_an_expandable_segment_that_is_there_tells_it_as_well(monkeypatch: pytest.MonkeyPatch):
    memory = Memory(monkeypatch, holes=0, is_expandable=True, room=0)
    memory.segments.append(segment(2 * MIB, MIB, is_expandable=True))
    assert allocator._makes_expandable(CUDA)


@pytest.mark.devices("disk")
def test_another_word_is_refused(device_under_test: Device):
    options: dict[str, Any] = options_of(device_under_test)
    with pytest.raises(ValueError, match='allocator must be "expandable" or "as it is"'):
        torchoffload.fit(Model(BLOCKS["transformer"]), "1GiB", allocator="growing", **options)


@pytest.mark.devices("cuda")
def test_the_report_tells_of_the_allocator(device_under_test: Device):
    model = Model(BLOCKS["transformer"]).cuda()
    with torchoffload.fit(model, "1GiB") as handle:
        model(torch.randn(4, 8, WIDTH, device="cuda")).backward()
        assert "the allocator" in handle.report().splitlines()[0]
