"""gradients.py: the one numerics pattern of the suite.

A *program* is a function of a `Run`. It makes its inputs through the run, enters `run.offload()` where a user would
enter OffloadActivations, and hands what must be the same to `run.check`, or returns it. `assert_same_gradients` runs it
stock twice, then offloaded, compares every bit, and then asks the statistics whether anything moved at all.
"""

import contextlib
import dataclasses
import gc
import re
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch

import torchoffload
from devices import Device, private_device_names

Program = Callable[["Run"], Any]


class TestErr(Exception):
    """The test itself is wrong: not bit-stable without offloading, or it names nothing that should move."""

    __test__ = False


class Run:
    """One run of a program: stock, or offloaded.

    Attributes
    ----------
    device : torch.device
        Where the program makes its tensors.
    stock : bool
        True when `offload` and `noop` are empty contexts.
    foreign : list of torch.Tensor
        CPU tensors (32, 32) that belong to no simulated device; on "disk" they are ordinary ones.
    simulation : simulated.Simulation or None
        The running simulation, where the device is a simulated one.
    """

    def __init__(self, device: Device, *, stock: bool, context: Callable[..., Any] | None) -> None:
        self.device = device.torch_device
        self.simulation: Any = None
        self.stock = stock
        self.foreign = [torch.arange(1024.0).reshape(32, 32) / (1024 + i) for i in range(4)]
        self.observed: dict[str, list[Any]] = defaultdict(list)
        self._context = context or device.context
        self._generator = torch.Generator().manual_seed(1234)

    def reseed(self, seed: int) -> None:
        """What `tensor` and its kin give from here on depends on `seed` alone."""
        self._generator.manual_seed(seed)

    def offload(self, **options: Any) -> Any:
        return contextlib.nullcontext() if self.stock else self._context(**options)

    def noop(self) -> Any:
        return contextlib.nullcontext() if self.stock else torchoffload.NoOpManager()

    def tensor(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Random values in [-1, 1), the same in each run, on the device (bytes 0 or 1 for bool)."""
        if dtype.is_complex:
            values = torch.view_as_complex(torch.rand((*shape, 2), generator=self._generator) * 2 - 1).to(dtype)
        elif dtype.is_floating_point:
            values = (torch.rand(shape, generator=self._generator, dtype=torch.float64) * 2 - 1).to(dtype)
        else:
            values = torch.randint(0, 2, shape, generator=self._generator).to(dtype)
        on_device = torch.empty(shape, dtype=dtype, device=self.device)
        return on_device.copy_(values)

    def leaf(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A tensor that requires a gradient and is no nn.Parameter."""
        return self.tensor(*shape, dtype=dtype).requires_grad_()

    def parameter(self, *shape: int) -> torch.nn.Parameter:
        return torch.nn.Parameter(self.tensor(*shape))

    def module(self, make: Callable[[], torch.nn.Module]) -> torch.nn.Module:
        """`make()` with weights that are the same in each run, on the device."""
        torch.manual_seed(77)
        with torch.device(self.device):
            return make()

    def check(self, **values: Any) -> None:
        """Takes the bits of each value now: what happens to the tensor later does not matter."""
        for name, value in values.items():
            self.observed[name].append(fingerprint(value))

    @contextlib.contextmanager
    def raising(self, name: str, *, origin: bool = True) -> Iterator[None]:
        """Whatever is raised inside must be raised in every run, with the same type and the same text.

        ``origin=False`` leaves out where autograd says that a changed tensor came from. A tensor that was changed in
        place and then dropped by the program took the name of its last operator with it; without offloading the graph
        would hold the tensor itself, and know.
        """
        try:
            yield
        except Exception as error:
            text = describe(error)
            self.check(**{name: text if origin else re.sub(r", which is output \d+ of [\w:]+,", "", text)})
        else:
            self.check(**{name: "raised nothing"})


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def fingerprint(value: Any) -> Any:
    """Everything of a value that must be the same: of a tensor dtype, shape, strides, flags and bytes."""
    if isinstance(value, torch.Tensor):
        return _tensor_fingerprint(value.detach())
    if isinstance(value, list | tuple):
        return tuple(fingerprint(each) for each in value)
    if isinstance(value, dict):
        return {key: fingerprint(each) for key, each in value.items()}
    if isinstance(value, torch.nn.Module):
        return {name: fingerprint((p, p.grad)) for name, p in value.named_parameters()}
    return value


def _tensor_fingerprint(tensor: torch.Tensor) -> Any:
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        return ("sparse", fingerprint(tensor.indices()), fingerprint(tensor.values()))
    flags = (str(tensor.dtype), tuple(tensor.shape), tensor.stride(), tensor.is_conj(), tensor.is_neg())
    plain = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(
        tensor.resolve_conj().resolve_neg()
    )
    # As bytes: a NaN must equal itself, and 0.0 must not equal -0.0.
    return (*flags, plain.reshape(-1).view(torch.uint8).cpu().numpy().tobytes())


@dataclasses.dataclass(frozen=True)
class Live:
    """What torchoffload holds at this moment."""

    handles: int
    records: int
    slots: int

    @classmethod
    def now(cls) -> "Live":
        stats = torchoffload.stats()
        return cls(stats.live_handles, stats.live_records, stats.live_slots)

    def is_less_than(self, other: "Live") -> bool:
        return self.handles <= other.handles and self.records <= other.records and self.slots <= other.slots


@contextlib.contextmanager
def eager_collector() -> Iterator[None]:
    """The collector runs at nearly each allocation, those inside a pack among them."""
    before = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def settled(expected: Live, timeout_s: float = 5.0) -> Live:
    """What is alive once the collector ran and I/O under way has ended; waits only while it is not `expected`."""
    # A backward that failed leaves its tasks, and with them its graph, in the engine's queue until the next one.
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else []), *private_device_names()]
    for device in devices:
        torch.ones((), device=device, requires_grad=True).clone().backward()
    deadline = time.monotonic() + timeout_s
    while True:
        gc.collect()
        live = Live.now()
        if live == expected or time.monotonic() > deadline:
            return live
        torchoffload.trim()
        time.sleep(0.01)


def execute(
    program: Program, device: Device, *, stock: bool, context: Callable[..., Any] | None = None
) -> dict[str, Any]:
    """Runs `program` in the device's scope and returns all that it observed."""
    run = Run(device, stock=stock, context=context)
    torch.manual_seed(99)
    with device.scope() as run.simulation:
        try:
            run.check(result=program(run))
        except Exception as error:
            # Text only: the traceback would keep the program's frames, and with them its graph.
            run.check(exception=describe(error))
        if not stock:
            gc.collect()  # inside the scope, so that the simulated device sees what is freed
    return dict(run.observed)


def assert_same_gradients(
    program: Program,
    *,
    device: Device,
    context: Callable[..., Any] | None = None,
    moved_bytes: int | None = None,
    kept_reason: str | Collection[str] | None = None,
    min_moved_fraction: float = 0.9,
    may_raise: bool = False,
) -> Any:
    """Fails unless `program` does the same, bit for bit, with and without offloading, and moves what it should.

    Parameters
    ----------
    program : callable
        Takes a `Run`; what it returns and what it checks is compared.
    device : Device
        The device to run on.
    context : callable, optional
        Makes the context from the options that the program passes; the device's own by default.
    moved_bytes : int, optional
        Exactly this many bytes move. With 0, `kept_reason` must say why.
    kept_reason : str or collection of str, optional
        At least one record is kept for this reason (for each of them).
    min_moved_fraction : float
        Where `moved_bytes` is None: of all bytes but parameters' at least this fraction moves, and not none.
    may_raise : bool
        The program is expected to raise out of itself (the same in each run).

    Returns
    -------
    OffloadStats
        What the offloaded run counted.
    """
    reasons = [kept_reason] if isinstance(kept_reason, str) else list(kept_reason or ())
    if moved_bytes == 0 and not reasons:
        raise TestErr("a case that moves nothing must name the reason that the record was kept for")
    if moved_bytes is None and min_moved_fraction <= 0:
        raise TestErr("say how many bytes move: bit-equality alone is passed by moving nothing")
    stock = execute(program, device, stock=True)
    again = execute(program, device, stock=True)
    if stock != again:
        raise TestErr(f"not bit-stable without offloading: {differing(stock, again)}")
    if ("exception" in stock) != may_raise:
        raise TestErr(f"stock raised, and the test does not say so, or the reverse: {stock.get('exception')}")

    live = settled(Live.now(), timeout_s=0)
    torchoffload.reset_stats()
    offloaded = execute(program, device, stock=False, context=context)
    stats = torchoffload.stats()
    assert offloaded == stock, f"differs from stock: {differing(stock, offloaded)}"
    assert_moved(stats, moved_bytes, reasons, min_moved_fraction)
    left = settled(live)
    if left != live and left.is_less_than(live):  # what an earlier test had left has gone meanwhile: count again
        live = left
        assert execute(program, device, stock=False, context=context) == stock, "differs the second time"
        left = settled(live)
    assert left == live, "records, handles or slots outlive the program"
    return stats


def assert_moved(stats: Any, moved_bytes: int | None, reasons: list[str], min_moved_fraction: float) -> None:
    """Bit-equality alone is passed by moving nothing: this half of the pattern asks what moved."""
    kept = dict(stats.bytes_kept)
    if moved_bytes is not None:
        assert stats.bytes_offloaded == moved_bytes, f"moved {stats.bytes_offloaded}, not {moved_bytes}; kept {kept}"
    else:
        could_move = stats.bytes_offloaded + sum(n for reason, n in kept.items() if reason != "parameter")
        assert stats.bytes_offloaded > 0, f"nothing moved; kept {kept}"
        fraction = stats.bytes_offloaded / could_move
        assert fraction >= min_moved_fraction, f"only {fraction:.0%} of {could_move} bytes moved; kept {kept}"
    for reason in reasons:
        assert stats.records_kept.get(reason, 0) > 0, f"no record kept for {reason!r}; kept {dict(stats.records_kept)}"


def differing(expected: dict[str, Any], actual: dict[str, Any]) -> str:
    """Names what differs, in words short enough to read."""
    names = [name for name in sorted(expected.keys() | actual.keys()) if expected.get(name) != actual.get(name)]
    return "; ".join(f"{name}: {_short(expected.get(name))} != {_short(actual.get(name))}" for name in names)


def _short(value: Any) -> str:
    text = repr(_without_bytes(value))
    return text if len(text) <= 400 else text[:400] + "..."


def _without_bytes(value: Any) -> Any:
    if isinstance(value, bytes):
        return f"<{len(value)} bytes, hash {hash(value) & 0xFFFF:04x}>"
    if isinstance(value, list | tuple):
        return [_without_bytes(each) for each in value]
    if isinstance(value, dict):
        return {key: _without_bytes(each) for key, each in value.items()}
    return value


def settled_stats() -> Any:
    """The statistics once nothing is alive any more; for tests whose graphs have all gone."""
    settled(Live(0, 0, 0))
    return torchoffload.stats()
