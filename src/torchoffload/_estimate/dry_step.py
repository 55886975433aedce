"""A dry step: forward and backward of a copy of a model without memory, which shows the bytes held at each moment.

As in the dry run by which ``fit`` chooses blocks, tensors are fake, and nothing of the run is left. They are on the
CPU, so no GPU is needed, but the operators are those that a GPU would run.
"""

import weakref
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.checkpoint import checkpoint

from torchoffload._estimate.kernels import GpuKernels, kernels_of_a_gpu
from torchoffload._estimate.operators import Cost, cost_of
from torchoffload._fit.choosing.answers import Answers
from torchoffload._fit.choosing.call_tree import CallTree, ModuleCall
from torchoffload._fit.choosing.collector import Collector, storages_in
from torchoffload._fit.choosing.dry_run import Modes, leaving_nothing
from torchoffload._fit.choosing.fake_copy import FakeCopy
from torchoffload._fit.choosing.leftovers import DryMode

__all__ = ["Blocks", "Moment", "Operator", "Setting", "Trace", "dry_step"]

_GRANULE = 512  # the allocator of CUDA rounds sizes up to this


class Blocks(Enum):
    """The treatment of the blocks in a step."""

    PLAIN = "as they are"
    CHECKPOINTED = "each in a checkpoint"
    MOVED = "each in a checkpoint whose inputs move"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a step is run.

    Attributes
    ----------
    dtype : torch.dtype or None
        The dtype assumed for floating-point parameters, buffers and inputs; None: their own.
    autocast : torch.dtype or None
        The dtype of the autocast around forward, if there is one.
    loss : callable or None
        From the output of the model to the loss.
    keeps_gradients : bool
        Whether gradients are there before backward.
    limit_s : float
        How long the run may take, in seconds.
    """

    dtype: torch.dtype | None = None
    autocast: torch.dtype | None = None
    loss: Callable[[Any], torch.Tensor] | None = None
    keeps_gradients: bool = False
    limit_s: float = 300.0


@dataclass(frozen=True, slots=True)
class Operator:
    """One call of an operator.

    Attributes
    ----------
    operator : OpOverload
        The operator.
    cost : Cost
        The cost of the call.
    is_backward : bool
        Whether it ran in backward.
    call : ModuleCall or int or None
        The innermost call of a module that it belongs to; once blocks are known, the number of the call of a block, or
        None outside of them.
    reads, makes, writes : frozenset of int
        The storages that it reads, makes, and writes to without having made them.
    """

    operator: Any
    cost: Cost
    is_backward: bool
    call: ModuleCall | int | None
    reads: frozenset[int]
    makes: frozenset[int]
    writes: frozenset[int]


@dataclass(slots=True)
class Moment:
    """One call of a block.

    Attributes
    ----------
    name : str
        The name of the block.
    inputs, saved : set of int
        The storages of its arguments, and those that autograd saved in it.
    forward_bytes, backward_bytes : int
        The most on the device while its forward runs, and from the begin of its backward to the next one's.
    """

    name: str
    inputs: set[int] = field(default_factory=set)
    saved: set[int] = field(default_factory=set)
    forward_bytes: int = 0
    backward_bytes: int = 0


@dataclass(kw_only=True)
class Trace:
    """The result of a dry step. All storages are numbers, and all sizes are bytes.

    Attributes
    ----------
    operators : list of Operator
        In the order of their calls.
    calls : list of Moment
        The calls of blocks, in the order of forward.
    nbytes : dict of int to int
        The size of each storage.
    state : frozenset of int
        The storages of parameters and buffers.
    saved : set of int
        The storages that autograd saved in forward, without parameters and buffers.
    weights_bytes, gradients_bytes : int
        Parameters and buffers; the gradients that backward has made.
    loss_bytes, peak_bytes : int
        The bytes held as backward begins, and the most at any time.
    between_bytes : int
        The most between the forward of the last block and the backward of the first that has one.
    guess_count : int
        How often forward asked for a number that only data would tell.
    tree : CallTree
        The calls of all modules, by name, with their saved storages.
    notes : list of str
        The assumptions made.
    """

    operators: list[Operator] = field(default_factory=list)
    calls: list[Moment] = field(default_factory=list)
    nbytes: dict[int, int] = field(default_factory=dict)
    state: frozenset[int] = frozenset()
    saved: set[int] = field(default_factory=set)
    weights_bytes: int = 0
    gradients_bytes: int = 0
    loss_bytes: int = 0
    peak_bytes: int = 0
    between_bytes: int = 0
    guess_count: int = 0
    tree: CallTree = field(default_factory=lambda: CallTree(ModuleCall(None)))
    notes: list[str] = field(default_factory=list)

    @property
    def saved_bytes(self) -> int:
        """The bytes of all that autograd saved, each storage once."""
        return sum(map(self.nbytes.__getitem__, self.saved))

    def divided(self, blocks: Collection[Hashable]) -> "Trace":
        """Return the same step, whose operators belong to the calls of these blocks, the outermost ones."""
        calls: list[Moment] = []
        numbers: dict[ModuleCall, int] = {}
        waiting: list[tuple[ModuleCall, int | None]] = [(self.tree.root, None)]
        while waiting:
            call, number = waiting.pop()
            if number is None and call.module in blocks:
                number = len(calls)
                calls.append(Moment(str(call.module), set(call.inputs), self.tree.saved_in(call)))
            if number is not None:
                numbers[call] = number
            waiting += [(inner, number) for inner in reversed(call.calls)]
        operators = [
            replace(each, call=numbers.get(each.call) if isinstance(each.call, ModuleCall) else each.call)
            for each in self.operators
        ]
        return replace(self, operators=operators, calls=calls)


class _Ledger:
    """The storages that are alive, and the most that they ever took. Each has a number for as long as it lives."""

    def __init__(self) -> None:
        self.now = self.peak = self._peak_since = 0
        self.nbytes: dict[int, int] = {}
        self._alive: dict[int, tuple[int, weakref.ref[Any]]] = {}  # by address

    def of(self, storage: torch.UntypedStorage) -> int:
        """Return the number of a storage, which counts as allocated from now on."""
        address = storage._cdata
        if address in self._alive:
            return self._alive[address][0]
        number, nbytes = len(self.nbytes), -(-storage.nbytes() // _GRANULE) * _GRANULE

        def drop(_: Any) -> None:
            self._alive.pop(address, None)
            self.now -= nbytes

        self._alive[address] = number, weakref.ref(storage, drop)
        self.nbytes[number] = storage.nbytes()
        self.now += nbytes
        self.peak, self._peak_since = max(self.peak, self.now), max(self._peak_since, self.now)
        return number

    def peak_since(self) -> int:
        """Return the most since the last call."""
        peak, self._peak_since = self._peak_since, self.now
        return peak


class _Reload(torch.autograd.Function):
    """Makes the tensor that comes back for one that was moved."""

    @staticmethod
    def forward(_ctx: Any, _source: torch.Tensor, size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype)

    @staticmethod
    def backward(_ctx: Any, *_grads: Any) -> tuple[None, ...]:
        return None, None, None, None


class _Moved(NamedTuple):
    """A tensor that was moved."""

    size: Any
    stride: Any
    dtype: torch.dtype
    requires_grad: bool

    def again(self) -> torch.Tensor:
        source = torch.empty(0, requires_grad=self.requires_grad)  # no leaf, as the tensor it stands for
        return _Reload.apply(source, self.size, self.stride, self.dtype)  # type: ignore[no-any-return,no-untyped-call]


class _Inputs:
    """The arguments of a block, which stay, or move but for parameters and buffers."""

    def __init__(self, arguments: Any, state: Mapping[int, Any], *, moves: bool) -> None:
        moved: dict[int, _Moved] = {}

        def pack(tensor: torch.Tensor) -> Any:
            if not moves or any(each._cdata in state for each in storages_in(tensor)):
                return tensor
            if id(tensor) not in moved:
                moved[id(tensor)] = _Moved(tensor.size(), tensor.stride(), tensor.dtype, tensor.requires_grad)
            return moved[id(tensor)]

        self._kept = tree_map_only(torch.Tensor, pack, arguments)

    def again(self) -> Any:
        """Return the arguments."""
        back: dict[int, torch.Tensor] = {}

        def unpack(moved: _Moved) -> torch.Tensor:
            if id(moved) not in back:
                back[id(moved)] = moved.again()
            return back[id(moved)]

        return tree_map(lambda each: unpack(each) if isinstance(each, _Moved) else each, self._kept, is_leaf=_is_moved)


def _is_moved(value: Any) -> bool:
    return isinstance(value, _Moved)


class _Run:
    """One dry step under way."""

    def __init__(self, copy: FakeCopy, blocks: Blocks, setting: Setting) -> None:
        self._copy, self._blocks, self._setting = copy, blocks, setting
        self.trace = Trace()
        self._ledger = _Ledger()
        self._state: dict[int, Any] = {}  # storages of parameters and buffers, by address
        self._call: ModuleCall | int | None = None
        self._latest: int | None = None  # the call of a block whose backward has begun last
        self._is_backward = False

    # ---- Storages

    def _numbers(self, tensors: Iterator[torch.Tensor] | Sequence[torch.Tensor]) -> frozenset[int]:
        return frozenset(self._ledger.of(each) for each in storages_in(list(tensors)))

    def _note(self, operator: Any, args: Any, kwargs: Any, output: Any) -> None:
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        addresses = {each.untyped_storage()._cdata for each in given if each.layout is torch.strided}
        outputs = [each for each in tree_leaves(output) if isinstance(each, torch.Tensor)]
        made = [each for each in outputs if each.untyped_storage()._cdata not in addresses]
        written = [
            value
            for argument, value in zip(operator._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, torch.Tensor)
        ]
        called = Operator(
            operator=operator,
            cost=cost_of(operator, args, kwargs, given, made, written),
            is_backward=self._is_backward,
            call=self._label,
            reads=self._numbers(given),
            makes=self._numbers(made),
            writes=self._numbers(written),
        )
        self.trace.operators.append(called)
        if self._does_nothing and not self._is_backward:
            self._collector.note_operator((args, kwargs), output)

    @property
    def _does_nothing(self) -> bool:
        return self._blocks is Blocks.PLAIN

    @property
    def _label(self) -> ModuleCall | int | None:
        return self._collector.innermost if self._does_nothing and not self._is_backward else self._call

    def _save(self, tensor: torch.Tensor) -> tuple[ModuleCall | int | None, torch.Tensor]:
        if not self._is_backward:
            self._collector.note_save(tensor)
        return self._label, tensor.detach()

    def _use(self, saved: tuple[ModuleCall | int | None, torch.Tensor]) -> torch.Tensor:
        self._begin_backward_of(saved[0])
        return saved[1]

    # ---- Blocks

    def _watch(self, module: nn.Module, name: str) -> None:
        plain = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._call is not None or self._is_backward or not torch.is_grad_enabled():
                return plain(*args, **kwargs)
            ledger, number = self._ledger, len(self.trace.calls)
            inputs = {ledger.of(each) for each in storages_in((args, kwargs)) if each._cdata not in self._state}
            moment = Moment(name, inputs=inputs)
            self.trace.calls.append(moment)
            before = ledger.peak_since()
            self._call = number
            try:
                output = self._run_block(plain, number, args, kwargs)
            finally:
                self._call = None
            moment.forward_bytes = max(before, ledger.peak_since())
            return output

        module.forward = forward

    def _run_block(self, plain: Callable[..., Any], number: int, args: Any, kwargs: Any) -> Any:
        fresh = [(args, kwargs)]
        kept = _Inputs((args, kwargs), self._state, moves=self._blocks is Blocks.MOVED)

        # The inputs are no arguments of the checkpoint: if one tensor is given twice, two would come back, and modules
        # such as nn.MultiheadAttention ask whether they are the same.
        def run() -> Any:
            if not fresh:
                self._begin_backward_of(number)
            given, keywords = fresh.pop() if fresh else kept.again()
            with GpuKernels():  # also if it is computed again
                return plain(*given, **keywords)

        return checkpoint(run, use_reentrant=False, preserve_rng_state=False)

    def _begin_backward_of(self, number: ModuleCall | int | None) -> None:
        """Note that backward has come to a block; None: that it is outside of blocks."""
        if not self._is_backward or number == self._call:
            return
        self._call = number
        if not isinstance(number, int) or number == self._latest:
            return
        self._end_segment()
        self._latest = number

    def _end_segment(self) -> None:
        """Give the memory since the latest block's backward began to it."""
        peak = self._ledger.peak_since()
        if self._latest is None:
            self.trace.between_bytes = max(self.trace.between_bytes, peak)
        else:
            moment = self.trace.calls[self._latest]
            moment.backward_bytes = max(moment.backward_bytes, peak)

    # ---- The step

    def step(self, originals: set[int], blocks: Sequence[str]) -> Trace:
        model, trace, ledger, setting = self._copy.model, self.trace, self._ledger, self._setting
        for storage in storages_in([*model.parameters(), *model.buffers()]):
            self._state[storage._cdata] = storage
        trace.state = frozenset(map(ledger.of, self._state.values()))
        trace.weights_bytes = ledger.now
        self._collector = Collector(model, ledger)
        modules = dict(model.named_modules())
        if self._does_nothing:
            self._collector.watch({module: name for name, module in modules.items()})
        for name in blocks:
            self._watch(modules[name], name)
        args, kwargs = self._copy.arguments
        for storage in storages_in((args, kwargs)):
            ledger.of(storage)
        answers = Answers(self._note, originals, setting.limit_s)
        trained = [each for each in model.parameters() if each.requires_grad]
        with self._copy.mode:
            if setting.keeps_gradients:
                for each in trained:
                    each.grad = torch.empty_like(each)
                    ledger.of(each.grad.untyped_storage())
            with answers, kernels_of_a_gpu():
                with saved_tensors_hooks(self._save, self._use):
                    with torch.autocast("cpu", setting.autocast, enabled=setting.autocast is not None):
                        output = model(*args, **kwargs)
                        loss = self._loss_of(output)
                    del output, args, kwargs
                trace.loss_bytes = ledger.now
                trace.between_bytes = ledger.peak_since()
                self._is_backward, self._call = True, None
                loss.backward()  # type: ignore[no-untyped-call]
                del loss
                self._end_segment()
        gradients = [each.grad for each in trained if each.grad is not None]
        trace.gradients_bytes = sum(each.nbytes for each in gradients)
        trace.nbytes, trace.peak_bytes = ledger.nbytes, ledger.peak
        trace.guess_count, trace.tree = answers.guess_count, self._collector.tree()
        trace.saved = set(trace.tree.saves)
        return trace

    def _loss_of(self, output: Any) -> torch.Tensor:
        if self._setting.loss is not None:
            loss = self._setting.loss(output)
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                raise ValueError("the loss function must return a tensor of one element")
            return loss.sum()
        own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if isinstance(own, torch.Tensor):
            return own.sum()
        tensors = [each for each in tree_leaves(_plain(output)) if _is_tensor(each) and each.requires_grad]
        if not tensors:
            raise ValueError("the model returns no tensor that needs a gradient: is it in training mode, and unfrozen?")
        if len(tensors) > 1 or tensors[0].numel() > 1:
            self.trace.notes.append("the model returns no loss, and none was given: the sum of its output is taken")
        total: torch.Tensor = tensors[0].float().sum()
        return total


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _plain(output: Any) -> Any:
    return dict(output) if isinstance(output, Mapping) else output


def dry_step(
    model: nn.Module,
    args: Any,
    kwargs: Any,
    setting: Setting,
    *,
    blocks: Sequence[str] = (),
    do: Blocks = Blocks.PLAIN,
) -> Trace:
    """Return the memory and the operators of a model's step, moment by moment.

    Parameters
    ----------
    model : nn.Module
        The model. It is not called, and stays as it is.
    args, kwargs : tuple, dict
        The arguments of its call.
    setting : Setting
        How the step is run.
    blocks : sequence of str
        The names of the blocks.
    do : Blocks
        The treatment of the blocks.

    Raises
    ------
    DryRunError
        The step cannot run without data, takes too long, or would do more than compute.
    """
    return leaving_nothing(model, lambda modes: _run(model, args, kwargs, setting, blocks, do, modes))


def _run(
    model: nn.Module, args: Any, kwargs: Any, setting: Setting, blocks: Sequence[str], do: Blocks, modes: Modes
) -> Trace:
    copy = FakeCopy(model, (args, kwargs), _maker(setting))
    modes.append(weakref.ref(copy.mode))
    originals = {storage._cdata for storage in storages_in([*model.parameters(), *model.buffers()])}
    for parameter in copy.model.parameters():
        parameter.grad = None
    return _Run(copy, do, setting).step(originals, blocks)


def _maker(setting: Setting) -> Callable[[DryMode, torch.Tensor], torch.Tensor]:
    """Return how fake tensors are made: on the CPU, whatever the device is, and of the dtype that is wanted."""

    def make(mode: DryMode, tensor: torch.Tensor) -> torch.Tensor:
        dtype = tensor.dtype
        if setting.dtype is not None and dtype.is_floating_point:
            dtype = setting.dtype
        with mode:
            fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype, device="cpu")
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, requires_grad=tensor.requires_grad)
        return fake.requires_grad_(tensor.requires_grad)

    return make
