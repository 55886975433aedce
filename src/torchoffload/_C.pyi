"""The compiled core. It is private: the public names are those of ``torchoffload``."""

from collections.abc import Callable, Iterable, Sequence
from types import CodeType
from typing import Any, final

import torch

built_with_cuda: bool  # whether the torch that this core was built for is a CUDA build

@final
class Context:
    """One offloading context: its options, and the tapes that it has open.

    It is light: a program may make a new one each step, and nothing piles up.
    """

    def __init__(
        self,
        *,
        tier: str,  # "host" | "disk"
        use_pin_memory: bool,
        use_streams: bool,
        max_fwd_stash_size: int | None,
        min_offload_size: int,  # in bytes; the tier's default is resolved
        offload_window_bytes: int | None,  # None: chosen from earlier steps
        reload_window_bytes: int | None,
        learn: bool,
        disk_dir: Sequence[bytes],  # absolute paths; none if no disk is used
        budget_bytes: int | None,  # None: the default of host_memory(), on disk none
        on_full: str,  # "keep" | "error" | "disk"
        warn: Callable[[str], None],  # called at most once per kind of warning, with the text
    ) -> None: ...
    def pack(self, tensor: torch.Tensor, /) -> object: ...
    def enter(self) -> None:
        """Enter on this thread.

        RuntimeError: there is no accelerator and tier is "host", or a context of another tier is open on this thread.
        """
    def exit(self) -> None:
        """Leave on this thread. RuntimeError: it was left more often than entered on this thread."""
    def exempt(self, tensor: torch.Tensor, /) -> None:
        """Never move anything on this tensor's storage under this context: a parameter or buffer of ``model``."""

    # For offload_modules:
    def restrict(self, fraction: float, only_inputs: bool, /) -> None:
        """Set the two options of ``offload_modules`` that the core carries out."""
    def set_module(self, number: int, /) -> int:
        """Count everything that this thread saves from here on for the module of this number.

        0 stands for saves outside of all chosen modules. Returns the number that was set before.
        """
    def admit(self, tensor: torch.Tensor, /) -> None:
        """Under ``only_inputs``, move tensors that this thread saves on this tensor's storage.

        This holds until the context is left on this thread, and for tensors that were saved since it was entered.
        """
    def forget_modules(self) -> None:
        """Set the counts of all modules to zero."""

def unpack(handle: object, /) -> torch.Tensor: ...
def pack_made(pack: Callable[[torch.Tensor], object], tensor: torch.Tensor, /) -> object:
    """Call a pack hook with a tensor that an operator has returned, and enqueue its copy at once.

    For code that sees operators from below autograd, as dispatch modes do: there this thread is inside an operator, and
    a packed tensor would wait until it is outside. Returns the hook's return value.
    """

def noop_pack(tensor: torch.Tensor, /) -> object:
    """Return a handle that holds the tensor, detached, on its device; ``unpack`` returns the tensor."""

def never_offload(tensor: torch.Tensor, /) -> None: ...
def note_saving_code(code: CodeType, /) -> None:
    """Let tensors that are saved while a frame of this code is the innermost one move with all of their storage."""

def stats() -> dict[str, Any]:
    """Return the totals since reset_stats(), and a list of rows under "tapes"; keys are fields of ``OffloadStats``."""

def module_rows(context: Context, /) -> list[dict[str, Any]]:
    """Return one row of counts for each number up to the largest that ``set_module`` was given, in order from 0.

    The keys are fields of ``ModuleStats``.
    """

def set_module_windows(context: Context, windows: Sequence[tuple[int, int, int]], /) -> None:
    """Give the modules of a context windows of their own, by the numbers of ``set_module``. Before it is entered.

    Each has the offload window of its forward, that from its end to the next module's beginning, and the reload window
    while backward asks for its saved tensors; in bytes. As a window becomes smaller, copies under way are waited for.
    """

def change_module_windows(context: Context, number: int, windows: tuple[int, int, int], /) -> None:
    """Change the windows of one module, from its next call on. IndexError: it was given none."""

def reset_stats() -> None: ...
def live_saves() -> list[tuple[torch.dtype, tuple[int, ...] | None, int, float]]:
    """Return the saved tensors that are alive, the newest first: dtype, shape, bytes, age in seconds.

    The shape is None and the bytes are 0 if asking the tensor for them would run Python code.
    """

def block_frontier(groups: Iterable[object], draws: Sequence[int], /) -> list[tuple[int, int, list[int], list[int]]]:
    """Return the best choices of kept and recomputed groups of a block, from the least bytes to the least time.

    ``groups`` have the attributes of ``_fit.block.graph.OperatorGroup``. Each choice is (bytes kept, nanoseconds
    computed again, the groups kept, the groups computed again). ``draws`` are the groups that draw random numbers, in
    the order of drawing. Empty: the block cannot be computed again.

    ValueError: a group of that number does not exist, or there are too many.
    """

def joint_plans(steps: Iterable[object], memory_bytes: int, /) -> list[dict[str, Any] | None]:
    """Return the plan of the least time within ``memory_bytes`` for each of several steps, which are planned at once.

    ``steps`` have the attributes of ``_fit.plan.step.Step``, and the plans are the fields of ``StepPlan``. Each call is
    (number of its way, numbers of the outputs that move, whether anything moves, its offload window, its reload
    window). None: nothing fits.

    ValueError: a number is not that of a kind or an output, a kind has no way, or a rate of the link is unknown.
    """

def least_joint_plan(step: object, window_bytes: int, /) -> dict[str, Any]:
    """Return the plan in which each call keeps the least bytes and all moves that can, with windows of this size.

    As ``joint_plans`` otherwise.
    """

def joint_plan_times(
    step: object, plans: Iterable[object], factors: Sequence[tuple[float, float, float]], /
) -> list[list[tuple[float, float]]]:
    """Return how long each plan, a ``_fit.plan.step.StepPlan``, takes in a step, and its time of computing again.

    Each of ``factors`` gives the step other times, as ``Step.with_times`` does: (pace, again, rate). The result has a
    list for each of them.

    ValueError: a plan is for a step of other calls, ways or outputs.
    """

def storage_addresses(value: object, /) -> set[int] | None:
    """Return the addresses of the storages of all tensors in a nest of tuples, lists and dicts.

    None: there is something in it that is neither a plain tensor, nor such a container, nor a value without tensors.
    """

class BlockActions:
    """The actions of a plan: for each counted operator of a block its name, its overload, a byte, and two masks.

    The masks have a bit for each storage that the operator makes. ``rewritten``: a later operator writes to it.
    ``held``: it is held, whether or not the operator is called again.
    """

    def __init__(
        self,
        operators: Sequence[tuple[str, ...]],
        actions: bytes,
        rewritten: Sequence[int],
        held: Sequence[int],
        keeps_if_left: bool,
        /,
    ) -> None: ...

class CopiedInput:
    """A copy of a tensor that a block is given. See ``input_copies.h``."""

    def __init__(self, original: torch.Tensor, /) -> None: ...
    @property
    def tensor(self) -> torch.Tensor:
        """The copy, without history; blocks that are given the same tensor share its memory."""

    @property
    def was_written(self) -> bool:
        """Whether somebody has written to the original since."""

class RecordedCall:
    """One call of a block, whose operators are recorded, and made again in backward. See ``recorded_call.h``."""

    def __init__(
        self,
        plan: BlockActions | None,
        inputs: set[int] | None,
        context: Context | None,
        observer: object,
        clock: Callable[[], Any] | None,
        verifies: bool,
        times_replay: bool,
        copies_inputs: bool,
    ) -> None: ...
    def listener(self) -> object:
        """Return the listener of the call, for a mode."""

    def pack_hook(self) -> Callable[[torch.Tensor], object]:
        """Return the pack hook of the call."""

    def finish(self) -> None:
        """Forget the storages and values that nothing needs: forward has ended."""

    def verify(self) -> list[tuple[int, int]]:
        """Make everything again. Return the storages that come out differently, each behind its last operator's number.

        The number is -1 for an operator that is not counted.
        """

    def settle(self, keeps_all: bool, /) -> None:
        """Hold all that was verified for good, or that alone which came out differently."""

    def storages(self) -> list[dict[str, Any]]:
        """Return a dict of facts for each storage."""

    def operators(self) -> list[dict[str, Any]]:
        """Return a dict of facts for each operator."""

    def moments(self) -> list[tuple[int, Any, Any]]:
        """Return the moments before and after each operator, with its number."""

    @property
    def left_at(self) -> int | None:
        """The number of the first operator that was another one than planned."""

    @property
    def counts(self) -> dict[str, int]:
        """How many replays there were, and how many operators they called."""

class OperatorMode:
    """The base of a mode that shows its operators to a listener. See ``operator_mode.h``."""

    def __init__(self, listener: object, /) -> None: ...
    def _begin(self) -> None:
        """Show the operators of this thread from now on."""

    def on_other(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any] | None, /
    ) -> Any:
        """Call an operator that has no C++ arguments, as an opaque region."""

def counting_listener() -> object:
    """Return the capsule of a listener that runs and counts the operators it is shown."""

def counted(listener: object, /) -> tuple[int, int]:
    """Return the operators and the opaque regions that a listener that counts was shown."""

def install_interpreter_delegate() -> None:
    """Hand operators to the listeners of modes without Python. See ``interpreter_delegate.h``."""

def remove_interpreter_delegate() -> None:
    """Hand operators to the listeners of modes by way of Python again."""

def operators_by_python() -> int:
    """Return how many operators came to a mode by way of Python, in this process."""

def opaque_method(function: Callable[..., Any], name: str, /) -> Any:
    """Return a method that calls ``function`` as an opaque region of the modes that are on. See ``operator_mode.h``."""

def start_profile() -> None:
    """Begin to record copies, waits and memory on each device whose backend can take times.

    RuntimeError: a CUDA graph is being captured.
    """

def stop_profile() -> list[tuple[str, list[tuple[str, float, float, int, int, int, bool, int, int, int]]]]:
    """Wait until the devices have come to the last recorded event, and return the name and the entries of each device.

    An entry has kind, begin_s, end_s, tape, record, nbytes, is_kept, offload_window_bytes, reload_window_bytes and
    device_bytes. Times are seconds since start_profile(); entries are in the order in which the host enqueued them.
    """

def trim() -> int:
    """Give idle pinned memory and idle ranges of spill files back to the system. Returns the bytes given back."""

def host_memory() -> dict[str, int | None]:
    """Return host memory in bytes: total, available, limit, limit_used, limit_inactive_file, default_budget.

    A value that does not exist or cannot be read is None.
    """

def accelerator_available() -> bool:
    """Return whether there is a device that tier="host" serves, in the test build also a simulated device."""

def backend_notes() -> list[str]:
    """Return lines for users on the devices that were used, such as that copies to one block the program."""
