"""The process of one offloader: one model, its batch, and the steps that are measured.

The parent (``turns.py``) tells it what to run, one call at a time, so that several such processes can take turns on one
device. Each owns its caches and pools for as long as it lives.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import peers
from hardware import hardware
from offloaders import OFFLOADERS, OURS, STOCK, MakeContext, Offloader, Options
from peers import CannotRun
from saved_bytes import SavedBytes
from workloads import Workload, build_model, random_tokens

PLAIN_STEP_COUNT = 3
VERIFIED_STEP_COUNT = 2

Step = dict[str, Any]


class Trainer:
    """One model with its batch, and the step that is measured."""

    def __init__(self, workload: Workload, device: torch.device) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model = build_model(workload, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
        self.tokens = random_tokens(workload, device)
        self.state_bytes = self.allocated_bytes()  # weights, gradients, and the batch of token numbers

    @property
    def is_on_cuda(self) -> bool:
        """Whether there is an allocator to ask and a device to wait for."""
        return self.device.type == "cuda"

    def allocated_bytes(self) -> int:
        """Tell the allocator's bytes in use; 0 on a CPU, whose memory this benchmark does not measure."""
        return torch.cuda.memory_allocated(self.device) if self.is_on_cuda else 0

    def synchronize(self) -> None:
        """Wait on the host for all that was asked of the device."""
        if self.is_on_cuda:
            torch.cuda.synchronize(self.device)

    def step(self, make_context: MakeContext, encloses_backward: bool = False) -> Step:
        """Run forward and backward into zeroed gradients, and measure."""
        self.model.zero_grad(set_to_none=False)
        self.synchronize()
        if self.is_on_cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        start = time.perf_counter()
        with make_context():
            loss = self._forward()
            if encloses_backward:
                at_loss_bytes = self.allocated_bytes() - self.state_bytes
                loss.backward()
        if not encloses_backward:
            at_loss_bytes = self.allocated_bytes() - self.state_bytes
            loss.backward()
        self.synchronize()
        seconds = time.perf_counter() - start
        peak_bytes = torch.cuda.max_memory_allocated(self.device) - self.state_bytes if self.is_on_cuda else 0
        return {"ms": 1000 * seconds, "at_loss_bytes": at_loss_bytes, "peak_bytes": peak_bytes, "loss": loss.detach()}

    def _forward(self) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=self.tokens, labels=self.tokens).loss
        return loss

    def gradient_norm(self) -> float:
        """Tell the norm over all gradients, summed in 32 bits."""
        norms = [
            torch.linalg.vector_norm(parameter.grad, dtype=torch.float32)
            for parameter in self.model.parameters()
            if parameter.grad is not None
        ]
        return torch.linalg.vector_norm(torch.stack(norms)).item()

    def outcome(self, loss: torch.Tensor) -> dict[str, torch.Tensor]:
        """Collect what has to be the same: the loss and every gradient."""
        gradients = {name: parameter.grad for name, parameter in self.model.named_parameters()}
        return {"loss": loss, **{name: gradient for name, gradient in gradients.items() if gradient is not None}}


def different_bits(outcome: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> list[str]:
    """Names of the tensors that are not the reference's, bit for bit."""
    if outcome.keys() != reference.keys():
        return sorted(outcome.keys() ^ reference.keys())

    def bits(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous().view(-1).view(torch.uint8)

    return [
        name for name, mine in outcome.items() if not torch.equal(bits(mine), bits(reference[name].to(mine.device)))
    ]


class Session:
    """What the parent may ask for. ``run`` names a row: the offloader's, or ``torchoffload@PEER``."""

    def __init__(self, name: str, workload: Workload, options: Options) -> None:
        self.name = name
        self.options = options
        self.offloader: Offloader = OFFLOADERS[name]
        device = torch.device("cpu" if options.tier == "disk" else "cuda")
        if self.offloader.needs_cuda and device.type != "cuda":
            raise CannotRun("needs a CUDA device")
        self.trainer = Trainer(workload, device)
        self.contexts: dict[str, MakeContext] = {}
        self._cache_is_empty = False  # the next step has to take its memory anew

    def facts(self) -> dict[str, Any]:
        """Say what this runs on."""
        device, package = self.trainer.device, self.offloader.package
        version = peers.version_of(package, peers.search_path(self.options.peers)) if package else None
        return {
            "state_bytes": self.trainer.state_bytes,
            "device_bytes": torch.cuda.mem_get_info(device)[1] if self.trainer.is_on_cuda else 0,
            "package": f"{package} {version}" if version else None,
            "hardware": hardware(device),
        }

    def begin(self) -> list[Step]:
        """Run plain steps, then the first with the offloader, which pays for what is taken once."""
        steps = [self._step(STOCK, "plain", plain=True) for _ in range(PLAIN_STEP_COUNT)]
        self.add_run(self.name, self.options)
        if self.name != STOCK:
            steps.append(self._step(self.name, "first"))
        return steps

    def add_run(self, run: str, options: Options) -> None:
        """Make the context of a row, or make it anew."""
        self.contexts[run] = self.offloader.make(self.trainer.model, options)

    def prove(self, run: str, reference_path: Path, writes: bool) -> list[str]:
        """Names of the tensors that differ from the reference's file, which ``writes`` has this one write first.

        In the deterministic mode: outside of it PyTorch's flash attention sums in no fixed order.
        """
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
        different: set[str] = set()
        for number in range(VERIFIED_STEP_COUNT):
            step = self.trainer.step(self.contexts[run], self.offloader.encloses_backward)
            outcome = self.trainer.outcome(step["loss"])
            if writes and number == 0:
                torch.save(outcome, reference_path)
            else:
                different |= set(different_bits(outcome, torch.load(reference_path, mmap=True, map_location="cpu")))
        torch.use_deterministic_algorithms(False)
        return sorted(different)

    def observe(self) -> dict[str, Any]:
        """Count what a plain forward saves, and measure the link: what bounds every offloader."""
        saved = SavedBytes(self.trainer.model)
        self.trainer.step(saved.hooks)
        seen: dict[str, Any] = {"saved": {"unique_bytes": saved.unique, "summed_bytes": saved.summed}}
        if self.trainer.is_on_cuda:
            seen["link_bytes_per_s"] = _link_rates(self.trainer.device)
        return seen

    def take_turn(self, run: str, phase: str, count: int) -> dict[str, Any]:
        """Run ``count`` steps, after one that counts for nothing where this process gave its memory back."""
        if self._cache_is_empty and phase == "timed":
            self._step(run, "untimed")
        if self.offloader.package == OURS:
            _torchoffload().reset_stats()
        steps = [self._step(run, phase) for _ in range(count)]
        result: dict[str, Any] = {"steps": steps}
        if self.trainer.is_on_cuda:
            result["reserved_bytes"] = torch.cuda.memory_reserved(self.trainer.device)
        if self.offloader.package == OURS:
            result |= _torchoffload_facts()
        return result

    def give_back(self, pinned: bool) -> None:
        """Leave the others the device's memory, but for weights and gradients; ``pinned``: torchoffload's slots too."""
        if pinned and self.offloader.package == OURS:
            _torchoffload().trim()
        if self.trainer.is_on_cuda:
            torch.cuda.empty_cache()
        self._cache_is_empty = True

    def _step(self, run: str, phase: str, plain: bool = False) -> Step:
        context = OFFLOADERS[STOCK].make(self.trainer.model, self.options) if plain else self.contexts[run]
        before = _moved_bytes() if self.offloader.package == OURS else None
        step = self.trainer.step(context, self.offloader.encloses_backward and not plain)
        self._cache_is_empty = False
        step |= {"phase": phase, "loss": step["loss"].item(), "grad_norm": self.trainer.gradient_norm()}
        if before is not None:
            moved = _moved_bytes()
            step |= {name: moved[name] - before[name] for name in moved}
        return step


def serve(connection: Connection, name: str, workload: Workload, options: Options) -> None:
    """Answer the parent's calls until it hangs up.

    A call is (method of Session, arguments), its answer ("done", value), or what kind of failure it was and a text.
    """
    _import_early(name)
    session = None
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        try:
            session = session or Session(name, workload, options)
            answer = ("done", getattr(session, method)(**arguments))
        except CannotRun as error:
            answer = ("cannot run", str(error))
        except Exception as error:  # whatever a peer raises is its row's text
            traceback.print_exc()
            answer = ("failed", f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
        connection.send(answer)


def _import_early(name: str) -> None:
    """Import what takes long while all processes start; what is missing is told when it is asked for."""
    with contextlib.suppress(ImportError):
        importlib.import_module("transformers.models.llama.modeling_llama")
        if OFFLOADERS[name].package == OURS:
            _torchoffload()


def _torchoffload() -> Any:
    import torchoffload

    return torchoffload


def _torchoffload_facts() -> dict[str, Any]:
    """What torchoffload tells of the turn just taken: all its statistics, and the report's text."""
    return {"stats": dataclasses.asdict(_torchoffload().stats()), "report": _torchoffload().report()}


def _moved_bytes() -> dict[str, int]:
    """Bytes that torchoffload has moved each way since the last reset."""
    stats = _torchoffload().stats()
    return {"bytes_out": stats.bytes_offloaded, "bytes_in": stats.bytes_reloaded}


def _link_rates(device: torch.device) -> dict[str, float]:
    """Bytes a second of large copies through pinned memory, each way: the rate that no offloader can pass."""
    size_bytes, repeat_count = 256 << 20, 10
    pinned = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    on_device = torch.empty(size_bytes, dtype=torch.uint8, device=device)
    rates = {}
    for name, target, source in (("out", pinned, on_device), ("in", on_device, pinned)):
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(repeat_count):
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)
        rates[name] = size_bytes * repeat_count / (time.perf_counter() - start)
    return rates
