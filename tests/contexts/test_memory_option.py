"""memory=: as much stays as there is room for, by what steps have taken, and not more."""

import contextlib
import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchoffload
from devices import Device
from gradients import Run, assert_same_gradients
from module_models import TOKENS, WIDTH, Stack, offload
from torchoffload._contexts import room as rooms

pytestmark = pytest.mark.devices("disk", "simulated-late")

MEMORY = 40 * Stack.SAVED_BYTES
STEPS = 16


def kept_in_all() -> int:
    return torchoffload.stats().bytes_kept.get("within_memory", 0)


class Memory:
    """A device on which a step takes ``base_bytes``, and what stays of what it saves."""

    def __init__(self, base_bytes: int) -> None:
        self.base_bytes = base_bytes
        self.forgotten = self.ooms = 0
        self._seen = kept_in_all()
        self._most = 0

    def total_bytes(self) -> int:
        return 2 * MEMORY

    def peak_bytes(self) -> int:
        """Of the steps since ``forget``. Asked for once a step."""
        now = kept_in_all()
        self._most = max(self._most, now - min(now, self._seen))
        self._seen = now
        return self.base_bytes + self._most

    def forget(self) -> None:
        self.forgotten += 1
        self._most = 0

    def oom_count(self) -> int:
        return self.ooms


@pytest.fixture(autouse=True)
def no_rooms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms, "_rooms", {})


def give_memory(monkeypatch: pytest.MonkeyPatch, base_bytes: int) -> Memory:
    memory = Memory(base_bytes)
    monkeypatch.setattr(rooms, "_DeviceMemory", lambda: memory)
    monkeypatch.setattr(rooms, "_ProcessMemory", lambda: memory)
    return memory


def kept_bytes(
    device: Device,
    given: dict[str, Any],
    *,
    as_modules: bool = False,
    tokens: Callable[[int], int] = lambda step: TOKENS,
    after_step: Callable[[int], None] = lambda step: None,
) -> list[int]:
    """Train, with the gradients of stock. Returns what stayed within the memory in each step."""
    kept: list[int] = []

    def program(run: Run) -> Any:
        model = run.module(Stack)
        handle = offload(run, device, model, "layers.*", **given) if as_modules else None
        for step in range(STEPS):
            x, before = run.leaf(tokens(step), WIDTH), kept_in_all()
            with contextlib.nullcontext() if as_modules else run.offload(**given):
                loss = model(x)
            if not run.stock:
                kept.append(kept_in_all() - before)
            loss.backward()
            run.check(gradient=x.grad)
            if not run.stock:
                after_step(step)
        if handle is not None:
            handle.remove()
        return model

    assert_same_gradients(program, device=device, min_moved_fraction=0.01)
    return kept


@pytest.mark.parametrize("as_modules", [False, True], ids=["context", "modules"])
@pytest.mark.parametrize("learn", [False, True], ids=["untaught", "taught"])
def test_what_steps_leave_of_the_memory_is_given_out(
    device_under_test: Device, as_modules: bool, learn: bool, monkeypatch: pytest.MonkeyPatch
):
    """With room for half of what a step saves the half that is saved last stays, and no step takes more than it may."""
    room_bytes = Stack.SAVED_BYTES // 2
    give_memory(monkeypatch, int(MEMORY * 0.96) - room_bytes)
    kept = kept_bytes(device_under_test, {"memory": MEMORY, "learn": learn}, as_modules=as_modules)
    assert kept[:3] == [0, 0, 0]
    assert all(0 < each <= room_bytes for each in kept[4:]), kept
    assert max(kept) > room_bytes * 0.7
    assert kept[-1] == kept[-2]


def test_with_room_for_all_nothing_moves(device_under_test: Device, monkeypatch: pytest.MonkeyPatch):
    give_memory(monkeypatch, MEMORY // 2)
    moved: list[int] = []
    kept = kept_bytes(
        device_under_test,
        {"memory": MEMORY},
        after_step=lambda step: moved.append(torchoffload.stats().bytes_offloaded),
    )
    assert kept[-1] == kept[4] > 0
    assert moved[0] > 0
    assert moved[4] == moved[-1], "nothing moves behind the first steps"


def test_what_took_too_much_has_less_from_then_on(device_under_test: Device, monkeypatch: pytest.MonkeyPatch):
    room_bytes = Stack.SAVED_BYTES // 2
    memory = give_memory(monkeypatch, int(MEMORY * 0.96) - room_bytes)

    def after_step(step: int) -> None:
        if step == 8:
            memory.base_bytes += MEMORY // 20  # something else of the program

    kept = kept_bytes(device_under_test, {"memory": MEMORY}, after_step=after_step)
    assert kept[8] > kept[-1]
    assert kept[-1] == kept[-2], "and no more is given out"
    assert memory.forgotten >= 2


def test_after_running_out_of_memory_less_stays(device_under_test: Device, monkeypatch: pytest.MonkeyPatch):
    memory = give_memory(monkeypatch, int(MEMORY * 0.96) - Stack.SAVED_BYTES)

    def after_step(step: int) -> None:
        memory.ooms += step == 8

    kept = kept_bytes(device_under_test, {"memory": MEMORY}, after_step=after_step)
    assert kept[8] > kept[10]


def test_a_larger_step_keeps_no_more_than_there_is_room_for(device_under_test: Device, monkeypatch: pytest.MonkeyPatch):
    """The bytes of the step before say where the end of a tape begins."""
    room_bytes = Stack.SAVED_BYTES // 2
    give_memory(monkeypatch, int(MEMORY * 0.96) - room_bytes)
    kept = kept_bytes(
        device_under_test, {"memory": MEMORY}, tokens=lambda step: TOKENS * 4 if step in (8, 9, 12) else TOKENS
    )
    assert max(kept) <= room_bytes
    assert kept[9] > 0


def test_several_calls_before_a_backward_are_no_step_by_themselves(
    device_under_test: Device, monkeypatch: pytest.MonkeyPatch
):
    """A call in the middle of a step shows nothing of the memory that the step will take."""
    memory = give_memory(monkeypatch, MEMORY // 2)
    asked = []
    monkeypatch.setattr(memory, "peak_bytes", lambda: asked.append(0) or MEMORY // 2)

    def program(run: Run) -> Any:
        model = run.module(Stack)
        for _ in range(3):
            losses = []
            for _ in range(4):
                with run.offload(memory=MEMORY):
                    losses.append(model(run.leaf(TOKENS, WIDTH)))
            del asked[1:]
            sum(losses).backward()
            del losses
        return model

    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.01)
    assert len(asked) == 1


def test_a_step_that_takes_more_than_there_is_with_everything_moved_is_told_of(
    device_under_test: Device, monkeypatch: pytest.MonkeyPatch
):
    give_memory(monkeypatch, 2 * MEMORY)
    with pytest.warns(UserWarning, match=r"memory=\d+ is less than a step takes"):
        assert set(kept_bytes(device_under_test, {"memory": MEMORY})) == {0}


@pytest.mark.parametrize(
    ("memory", "error"),
    [(0, ValueError), ("many", ValueError), (1.5, ValueError), (True, TypeError), ([1], TypeError)],
)
def test_what_is_no_amount(device_under_test: Device, memory: Any, error: type[Exception]):
    with pytest.raises(error, match="memory must be"):
        device_under_test.context(memory=memory)


def test_a_fraction_is_of_what_there_is(device_under_test: Device, monkeypatch: pytest.MonkeyPatch):
    room_bytes = Stack.SAVED_BYTES // 2
    give_memory(monkeypatch, int(MEMORY * 0.96) - room_bytes)
    assert max(kept_bytes(device_under_test, {"memory": 0.5})) > room_bytes * 0.7


def test_copies_and_texts_have_the_memory(device_under_test: Device):
    context = device_under_test.context(memory="1GiB")
    for other in (copy.copy(context), copy.deepcopy(context), pickle.loads(pickle.dumps(context))):
        assert other._room is context._room
        assert "memory='1GiB'" in repr(other)
    assert device_under_test.context(memory="2GiB")._room is not context._room


@pytest.mark.devices("disk")
def test_the_memory_of_a_process_is_what_linux_counts(device_under_test: Device):
    memory = rooms._ProcessMemory()
    memory.forget()
    before = memory.peak_bytes()
    held = torch.ones(64 << 20, dtype=torch.uint8)
    assert 60 << 20 <= memory.peak_bytes() - before <= 80 << 20
    del held
    memory.forget()
    assert memory.peak_bytes() - before <= 20 << 20
    assert memory.total_bytes() > 1 << 30
    assert memory.oom_count() == 0


class Wide(nn.Module):
    """Saves 32 MiB of what each layer is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).sin()
        return x.square().mean()


@pytest.mark.devices("cuda")
def test_on_cuda_what_is_reserved_stays_within_the_memory(device_under_test: Device):
    model, batch = Wide().cuda(), torch.randn(8192, 1024, device="cuda")

    def reserved_after(steps: int, **given: Any) -> int:
        torch.cuda.synchronize()
        torchoffload.trim()
        torch.cuda.empty_cache()
        for _ in range(steps):
            with torchoffload.OffloadActivations(**given) if given else contextlib.nullcontext():
                loss = model(batch)
            loss.backward()
            model.zero_grad(set_to_none=False)
        return torch.cuda.memory_reserved()

    most, least = reserved_after(4), reserved_after(4, learn=True)
    memory = int((least + most) / 2)
    torchoffload.reset_stats()
    assert reserved_after(16, memory=memory) <= memory
    stats = torchoffload.stats()
    assert stats.bytes_kept["within_memory"] > 0.2 * 12 * (64 << 20)
    assert stats.bytes_offloaded > 0
