"""The scenarios of the other checks: order of one operator, versions, resized storages, budgets, failing disks."""

import errno
import gc
import subprocess
import sys
import time
import weakref

import torch
from scenario import AMPLE_BYTES, NBYTES, NUMEL, Stage, race, scenario, testing

import torchoffload
from places import SUPPORT
from simulated import simulated_device

RIGHT_GRADIENT = "the right gradient"


def gradient_name(gradient: torch.Tensor, values: torch.Tensor) -> str:
    if torch.equal(gradient, values.cos()):
        return RIGHT_GRADIENT
    return "a gradient at zeros" if torch.equal(gradient, torch.ones(NUMEL)) else "another gradient"


def _error_of_backward(y: torch.Tensor, needle: str) -> str:
    """`needle` if backward raises an error that says so."""
    try:
        y.sum().backward()
    except RuntimeError as error:
        if needle in str(error):
            return f"raised: {needle}"
        raise
    return "raised nothing"


# ---- R1 ----


@scenario(
    "CopyNotInsideItsOperator",
    wrong=race(
        "operator writes source @ compute_stream[0]",
        "copy out reads source @ offload_stream[0]",
        "has not ended before",
    ),
)
def an_operator_saves_its_noise_before_it_fills_it(stage: Stage) -> None:
    x = stage.leaf(first=-0.5)
    with stage.context():
        y = torch.nn.functional.rrelu(x, training=True)
    y.sum().backward()


@scenario("CopyNotInsideOneAroundIt", right=RIGHT_GRADIENT, wrong="another gradient")
def a_finalizer_runs_operators_between_two_packs_of_one(stage: Stage) -> str:
    """The simulated device knows by the sequence number that an operator has ended, and so finds no race here."""
    x, other = stage.leaf(first=-0.5), stage.leaf()

    def step() -> None:
        with torch.enable_grad():  # pack hooks run without
            (other * 2).sin().sum().backward()

    torch.manual_seed(0)
    (expected,) = torch.autograd.grad(torch.nn.functional.rrelu(x * 3, training=True).sum(), x)
    torch.manual_seed(0)
    with stage.context():
        source = x * 2
        weakref.finalize(source.untyped_storage(), step).atexit = False
        y = source.sin()
        del source
        z = torch.nn.functional.rrelu(x * 3, training=True)  # its first pack has the source dropped
    (gradient,) = torch.autograd.grad(z.sum(), x)
    del y
    return RIGHT_GRADIENT if torch.equal(gradient, expected) else "another gradient"


@scenario("DropsArePutOff", right="it has seen 2 waits of 2", wrong="it has seen 1 waits of 2")
def a_finalizer_looks_at_what_the_copy_has_come_to_that_drops_it(stage: Stage) -> str:
    seen: list[int] = []
    x = stage.leaf()
    with stage.context(offload_window_bytes=2 * NBYTES):
        first, second, large = x * 2, x * 3, torch.cat([x, x])
        note = weakref.finalize(first.untyped_storage(), lambda: seen.append(torchoffload.stats().window_waits))
        note.atexit = False
        outputs = [first.sin(), second.sin(), large.sin()]
        del first, second, large
        stage.next_operator()  # the copy of the large one makes room for itself, with two waits
        waits = torchoffload.stats().window_waits
    del outputs
    return f"it has seen {seen[0]} waits of {waits}"


# ---- versions ----

_CHANGED = "modified by an inplace operation"


@scenario("VersionCheckedAtUnpack", right=f"raised: {_CHANGED}", wrong="raised nothing")
def a_saved_tensor_is_changed_before_backward(stage: Stage) -> str:
    x = stage.leaf()
    with stage.context():
        h = x + 0
        y = h.sin()
        h += 1
    return _error_of_backward(y, _CHANGED)


# ---- R10 ----


def _resize_and_refill(tensor: torch.Tensor, fill: float | None) -> list[torch.Tensor]:
    """Other memory for the storage, unseen by its version. Returns what took the memory it had."""
    storage = tensor.untyped_storage()
    storage.resize_(0)
    taken = torch.empty(NUMEL)
    storage.resize_(NBYTES)
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tensor):
        tensor.fill_(float("nan") if fill is None else fill)
    return [taken]


@scenario("ResizeCheckedAtEnqueue", right="0 moved: the right gradient", wrong="1 moved: the right gradient")
def a_storage_is_given_back_before_its_copy_is_enqueued(stage: Stage) -> str:
    """What was resized to nothing would be a copy from nowhere; resized and large again, it is one for nothing."""
    x = stage.leaf()
    before = torchoffload.stats().records_offloaded
    with stage.context():
        h = x + 0
        values = h.detach().clone()
        y = h.sin()
        taken = _resize_and_refill(h, None)
        stage.next_operator()
        moved_count = torchoffload.stats().records_offloaded - before
    del taken
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(h):
        h.copy_(values)  # in time for backward, as FSDP2 does
    y.sum().backward()
    return f"{moved_count} moved: {gradient_name(x.grad, values)}"


_OF_OTHER_BYTES = "a gradient at what it held no more"


@scenario("ResizeCheckedInFlight", right="a gradient at zeros", wrong=_OF_OTHER_BYTES)
def a_storage_is_given_back_with_its_copy_in_flight(stage: Stage) -> str:
    x = stage.leaf()
    with stage.context(offload_window_bytes=NBYTES):
        h = x + 0
        y = h.sin()
        stage.next_operator()
        taken = _resize_and_refill(h, 0.0)
        # The program gives memory back that it cannot know to be in use, so this race is its own.
        assert stage.simulation.races == [
            race("copy out reads source @ offload_stream[0]", "source memory is freed @ compute_stream[0]")
        ]
        stage.simulation.clear_races()
        z = stage.leaf().sin().exp()  # the window is full: the first copy is waited for
        stage.next_operator()
    del taken
    y.sum().backward()
    del z
    name = gradient_name(x.grad, torch.zeros_like(x))
    return "a gradient at zeros" if name == RIGHT_GRADIENT else _OF_OTHER_BYTES


@scenario("ResizeSeesAllocation", right="a gradient at zeros", wrong=_OF_OTHER_BYTES)
def a_storage_gets_other_memory_at_the_same_address_with_its_copy_in_flight(stage: Stage) -> str:
    x = stage.leaf()
    with stage.context(offload_window_bytes=NBYTES):
        h = x + 0
        y = h.sin()
        stage.next_operator()
        address = h.data_ptr()
        h.untyped_storage().resize_(0)
        h.untyped_storage().resize_(NBYTES)
        assert h.data_ptr() == address
        stage.simulation.clear_races()  # as above
        z = stage.leaf().sin().exp()  # the window is full: the first copy is waited for
        stage.next_operator()
    stage.simulation.clear_races()
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(h):
        h.zero_()
    y.sum().backward()
    del z
    name = gradient_name(x.grad, torch.zeros_like(x))
    return "a gradient at zeros" if name == RIGHT_GRADIENT else _OF_OTHER_BYTES


# ---- R11 ----


@scenario(
    "PassedByReturnsToOffloaded", right="2 passed by, 0 bytes held", wrong=f"0 passed by, {2 * NBYTES} bytes held"
)
def backward_takes_another_branch_than_was_loaded_ahead(stage: Stage) -> str:
    branches = [stage.leaf() for _ in range(8)]
    with stage.context(reload_window_bytes=2 * NBYTES):
        outputs = [x.sin() for x in branches]
    gradients = torch.autograd.grad(outputs[7].sum(), branches[7])  # loads 6 and 5 ahead
    gradients += torch.autograd.grad(outputs[2].sum(), branches[2])  # once is not yet gone on
    gradients += torch.autograd.grad(outputs[1].sum(), branches[1])  # 0 has no place while 6 and 5 have theirs
    held_before = stage.simulation.allocated_bytes()
    del outputs[5:7]
    held = held_before - stage.simulation.allocated_bytes() - 2 * NBYTES  # the outputs themselves
    asked = [branches[7], *branches[2:0:-1]]
    assert all(torch.equal(gradient, x.detach().cos()) for gradient, x in zip(gradients, asked, strict=True))
    return f"{torchoffload.stats().passed_by} passed by, {held} bytes held"


# ---- budget and disk ----


@scenario("BudgetHonoured", right="1 moved, 2 kept", wrong="3 moved, 0 kept")
def three_tensors_meet_a_budget_for_one(stage: Stage) -> str:
    leaves = [stage.leaf() for _ in range(3)]
    with stage.context(budget_bytes=NBYTES):
        outputs = [x.sin() for x in leaves]
    stats = torchoffload.stats()
    sum(y.sum() for y in outputs).backward()
    return f"{stats.records_offloaded} moved, {stats.records_kept.get('tier_full', 0)} kept"


@scenario("FailedWriteKeepsRecord", right=RIGHT_GRADIENT, wrong="a gradient at zeros", on_disk=True)
def the_disk_refuses_a_write(stage: Stage) -> str:
    x = stage.leaf()
    testing.inject_io_fault("pwrite", errno=errno.EIO)
    with stage.context():
        y = x.sin()
    (gradient,) = torch.autograd.grad(y.sum(), x)
    return gradient_name(gradient, x.detach())


_UNREADABLE = "a saved tensor could not be read back"


@scenario("FailedReadRaises", right=f"raised: {_UNREADABLE}", wrong="raised nothing", on_disk=True)
def the_disk_refuses_a_read(stage: Stage) -> str:
    x = stage.leaf()
    with stage.context():
        y = x.sin()
    testing.inject_io_fault("pread", errno=errno.EIO)
    return _error_of_backward(y, _UNREADABLE)


@scenario("UnwrittenSourceStays", right=RIGHT_GRADIENT, wrong="a gradient at zeros", on_disk=True)
def backward_uses_a_source_whose_write_fails_later(stage: Stage) -> str:
    x = stage.leaf()
    testing.inject_io_fault("pwrite", errno=errno.EIO, delay_us=100_000)
    with stage.context(offload_window_bytes=AMPLE_BYTES):
        h = x + 0
        y = h.sin()
        del h
    torch.autograd.grad(y.sum(), x, retain_graph=True)  # with the write in flight
    time.sleep(0.3)
    for _ in range(3):
        (gradient,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    return gradient_name(gradient, x.detach())


@scenario("IoMemoryHeldUntilDone", right="untouched", wrong="written to", on_disk=True)
def a_graph_is_dropped_while_the_disk_reads_for_it(stage: Stage) -> str:
    with simulated_device():  # for its allocator alone, which hands freed memory to the next one of its size
        leaves = [stage.leaf() for _ in range(5)]
        with stage.context(reload_window_bytes=AMPLE_BYTES):
            outputs = [x.sin() for x in leaves]
        testing.inject_io_fault("pread", delay_us=50_000)
        torch.autograd.grad(outputs.pop().sum(), leaves[-1])  # two threads read, and go on with the others
        del outputs[1:]
        takers = [torch.full((NBYTES + 512,), 7, dtype=torch.uint8) for _ in leaves]
        torch.autograd.grad(outputs[0].sum(), leaves[0])  # the last of the reads, so that none is under way
        return "untouched" if all((taker == 7).all() for taker in takers) else "written to"


# ---- locks ----


@scenario(
    "DeallocQueuedInsideOperation",
    wrong="RuntimeError: torchoffload ledger: a record was used after its release",
)
def the_collector_runs_as_a_record_is_joined(stage: Stage) -> None:
    """As it may in an allocator that is written in Python: what is joined has one handle, which is garbage."""
    side = stage.simulation.new_stream()
    gc.collect()
    gc.disable()
    h = stage.leaf() * 2
    with stage.context():
        garbage = [h.sin()]
        garbage.append(garbage)
        del garbage
        stage.next_operator()
        side.wait_stream(stage.main)
        testing.set_seam_hook(lambda call: gc.collect() if call == "note_use" else None)
        try:
            with stage.simulation.stream(side):
                y = h.cos()
        finally:
            testing.set_seam_hook(None)
            gc.enable()
    stage.main.wait_stream(side)
    y.sum().backward()


# ---- streams from outside ----


@scenario(
    "StreamsMayBeDestroyed",
    wrong="race: compute_stream[0]#2 is used after its owner destroyed it",
)
def a_window_is_drained_after_the_stream_that_filled_it_is_gone(stage: Stage) -> None:
    external = stage.simulation.external_stream()
    with stage.simulation.stream(external):
        x = stage.leaf()
        with stage.context(offload_window_bytes=AMPLE_BYTES):
            y = x.sin()
    stage.simulation.destroy(external)
    with stage.context():
        z = stage.leaf().sin()
    del y, z


# ---- what is held, and for how long ----


@scenario("PartCountsItsStorage", right="nothing is held", wrong="all of the storage is held")
def a_slice_is_in_flight_whose_storage_is_larger_than_the_window(stage: Stage) -> str:
    x = stage.leaf()
    with stage.context(offload_window_bytes=8 * NBYTES):
        big = torch.ones(64, NUMEL)
        y = x * big[5]
        del big
        stage.next_operator()
        held_bytes = stage.simulation.allocated_bytes()
    y.sum().backward()
    return "all of the storage is held" if held_bytes >= 64 * NBYTES else "nothing is held"


@scenario("DroppedEngineAwaitsOperations", right="it is there", wrong="it is gone", on_disk=True)
def a_directory_is_left_while_a_call_uses_its_engine(stage: Stage) -> str:
    """In a process of its own, which ends before the call goes on: with the mutant it would use freed memory."""
    name = "an_engine_is_there_for_the_call_that_uses_it"
    command = [sys.executable, str(SUPPORT / "lifetime_programs.py"), name, str(stage.directory)]
    command += [mutant] if (mutant := testing.mutant_in_force()) else []
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return "it is gone" if "it is gone" in done.stdout else "it is there"
