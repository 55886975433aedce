"""The scenarios of waits, guards and notes, R2 to R9: on the simulated device, where one that is missing is a race."""

import torch
from scenario import AMPLE_BYTES, Stage, another_thread_inside, race, scenario

import torchoffload

# ---- offload ----


@scenario(
    "OffloadWaitsForCompute",
    wrong=race("operator writes source @ compute_stream[0]", "copy out reads source @ offload_stream[0]"),
)
def a_tensor_is_copied_while_its_operator_may_run(stage: Stage) -> None:
    x = stage.leaf()
    with stage.context():
        y = x.sin()
    y.sum().backward()
    assert torch.equal(x.grad, x.detach().cos())


@scenario(
    "OffloadWaitsForAllocation",
    wrong=race("something fills source @ compute_stream[0]#2", "copy out reads source @ offload_stream[0]"),
)
def a_function_fills_what_it_saves_on_a_stream_of_its_own(stage: Stage) -> None:
    side = stage.simulation.new_stream()

    class Overlapped(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: torch.Tensor) -> torch.Tensor:
            side.wait_stream(stage.main)
            with stage.simulation.stream(side):
                doubled = x * 2
            stage.simulation.fill(doubled, side)
            ctx.save_for_backward(doubled)
            return x.clone()

        @staticmethod
        def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
            (doubled,) = ctx.saved_tensors
            return gradient * doubled

    x = stage.leaf()
    with stage.context():
        y = Overlapped.apply(x)
        stage.next_operator()  # its copy is enqueued
        stage.main.wait_stream(side)  # before anything uses it
    y.sum().backward()
    assert torch.equal(x.grad, 2 * x.detach())


@scenario(
    "ComputeWaitsForOffload",
    wrong=race("copy out reads source @ offload_stream[0]", "source memory is freed @ compute_stream[0]"),
)
def a_full_window_gives_up_sources_that_nobody_else_holds(stage: Stage) -> None:
    x = stage.leaf()
    with stage.context():
        h = x
        for _ in range(4):
            h = h.sin()
    h.sum().backward()


@scenario(
    "OffloadWaitsForGuards",
    wrong=race("copy in reads slot @ reload_stream[0]", "copy out writes slot @ offload_stream[0]"),
)
def a_stream_that_knows_nothing_of_a_reload_packs_into_its_slot(stage: Stage) -> None:
    first, last = stage.leaf(), stage.leaf()
    with stage.context(reload_window_bytes=AMPLE_BYTES):
        from_first, from_last = first.sin(), last.sin()
    from_last.sum().backward()  # loads the first record ahead
    del from_first, from_last  # which nobody asks for
    side = stage.simulation.new_stream()
    with stage.simulation.stream(side):
        x = stage.leaf()
        with stage.context():
            y = x.sin()
    del y


@scenario(
    "ReloadWaitsForReload",
    wrong=race("copy in reads slot @ compute_stream[0]", "copy out writes slot @ compute_stream[0]#3"),
)
def a_slot_that_two_streams_read_is_guarded_by_the_later(stage: Stage) -> None:
    second, third = stage.simulation.new_stream(), stage.simulation.new_stream()
    x = stage.leaf()
    with stage.context(use_streams=False):
        y = x.sin()
    second.wait_stream(stage.main)
    torch.autograd.grad(y.sum(), x, retain_graph=True)  # reads the slot on the first stream
    with stage.simulation.stream(second):
        torch.autograd.grad(y.sum(), x)  # reads it again, and knows nothing of that
    with stage.simulation.stream(third):
        third.wait_stream(second)
        z = stage.leaf()
        with stage.context(use_streams=False):
            w = z.sin()
    del w


@scenario(
    "SlotGuardedByOffload",
    wrong=race("copy out writes slot @ offload_stream[0]", "copy out writes slot @ offload_stream[1]"),
)
def a_slot_dropped_in_flight_goes_to_another_device(stage: Stage) -> None:
    x = stage.leaf()
    with stage.context(offload_window_bytes=AMPLE_BYTES):
        y = x.sin()
    del y
    _pack_on_device_1(stage)


@scenario(
    "SlotGuardedByReload",
    wrong=race("copy in reads slot @ reload_stream[0]", "copy out writes slot @ offload_stream[1]"),
)
def a_slot_that_was_read_goes_to_another_device(stage: Stage) -> None:
    x = stage.leaf()
    with stage.context():
        y = x.sin()
    y.sum().backward()
    _pack_on_device_1(stage)


def _pack_on_device_1(stage: Stage) -> None:
    with stage.simulation.device(1):
        elsewhere = stage.leaf()
        with stage.context():
            y = elsewhere.sin()
    del y


def _drop_as_it_is_copied(stage: Stage) -> None:
    """A record's last handle dies on another thread while its copy is being enqueued."""
    graphs = []
    with stage.context(offload_window_bytes=AMPLE_BYTES):
        graphs.append((stage.leaf() * 2).sin())
        with another_thread_inside("copy_out", graphs.clear):
            stage.next_operator()


@scenario(
    "SlotGuardedByCopyInVain",
    wrong=race("copy out writes slot @ offload_stream[0]", "copy out writes slot @ offload_stream[1]"),
)
def the_slot_of_a_copy_in_vain_goes_to_another_device(stage: Stage) -> None:
    _drop_as_it_is_copied(stage)
    _pack_on_device_1(stage)


@scenario(
    "SourceBusyUntilCopyInVain",
    wrong=race("copy out reads source @ offload_stream[0]", "source memory is freed @ compute_stream[0]"),
)
def a_record_dies_while_its_copy_is_enqueued(stage: Stage) -> None:
    _drop_as_it_is_copied(stage)


@scenario(
    "SlotGuardedByEachReload",
    wrong=race("copy in reads slot @ compute_stream[0]#2", "slot memory is released @ the host"),
)
def two_threads_reload_a_record_at_once(stage: Stage) -> None:
    second = stage.simulation.new_stream()
    x = stage.leaf()
    with stage.context(use_streams=False):
        h = x * 2
        outputs = [h.sin(), h.cos()]
        del h

    def on_the_second() -> None:
        second.wait_stream(stage.main)
        with stage.simulation.stream(second):
            torch.autograd.grad(outputs[1].sum(), x, retain_graph=True)

    with another_thread_inside("copy_in", on_the_second):
        torch.autograd.grad(outputs[0].sum(), x, retain_graph=True)
    outputs.clear()
    torchoffload.trim()  # the slot's memory goes back to the system


# ---- reload ----


@scenario(
    "ReloadWaitsForCompute",
    wrong=race("buffer memory is allocated @ compute_stream[0]", "copy in writes buffer @ reload_stream[0]"),
)
def a_buffer_takes_memory_that_compute_may_still_use(stage: Stage) -> None:
    x = stage.leaf()
    with stage.context():
        y = x.sin()
    y.sum().backward()


@scenario(
    "ReloadWaitsForOffload",
    wrong=race("copy out writes slot @ offload_stream[0]", "copy in reads slot @ reload_stream[0]"),
)
def backward_runs_on_a_stream_that_knows_nothing_of_the_copy_out(stage: Stage) -> None:
    x = stage.leaf()
    side = stage.simulation.new_stream()
    with stage.context():
        y = x.sin()
        side.wait_stream(stage.main)  # y is there; the copy of x is enqueued at the exit only
    with stage.simulation.stream(side):
        y.sum().backward()


@scenario(
    "ConsumerWaitsForReload",
    wrong=race("copy in writes buffer @ reload_stream[0]", "unpack reads buffer @ compute_stream[0]"),
)
def backward_reads_what_is_being_reloaded(stage: Stage) -> None:
    x = stage.leaf()
    with stage.context():
        y = x.sin()
    y.sum().backward()
    assert torch.equal(x.grad, x.detach().cos())


_RACES_WITH_RELOAD = race("copy in writes buffer @ reload_stream[0]", "unpack reads buffer @ compute_stream[0]#2")


@scenario("LaterConsumerWaitsForReload", wrong=_RACES_WITH_RELOAD)
def one_reload_serves_two_streams(stage: Stage) -> None:
    side = stage.simulation.new_stream()
    x = stage.leaf()
    with stage.context():
        y, z = x.sin(), x.cos()
    side.wait_stream(stage.main)

    def look() -> None:
        _first = y.grad_fn._saved_self
        with stage.simulation.stream(side):
            _again = z.grad_fn._saved_self

    stage.in_backward(look)


@scenario("ConsumerWaitsForWeak", wrong=_RACES_WITH_RELOAD)
def what_one_stream_still_holds_is_handed_to_another(stage: Stage) -> None:
    side = stage.simulation.new_stream()
    x = stage.leaf()
    with stage.context():
        y = x.sin()
    side.wait_stream(stage.main)
    saved = y.grad_fn._saved_self
    with stage.simulation.stream(side):
        again = y.grad_fn._saved_self
    assert saved.data_ptr() == again.data_ptr()


# ---- memory that a copy in flight touches ----


@scenario(
    "DroppedSourceWaitsForOffload",
    wrong=race("copy out reads source @ offload_stream[0]", "source memory is freed @ compute_stream[0]"),
)
def a_graph_is_dropped_with_its_copy_out_in_flight(stage: Stage) -> None:
    with stage.context(offload_window_bytes=AMPLE_BYTES):
        h = stage.leaf() * 2
        y = h.sin()
        del h
        stage.next_operator()
        del y


@scenario(
    "DroppedBufferWaitsForReload",
    wrong=race("copy in writes buffer @ reload_stream[0]", "buffer memory is freed @ compute_stream[0]"),
)
def a_graph_is_dropped_with_a_copy_in_in_flight(stage: Stage) -> None:
    first, last = stage.leaf(), stage.leaf()
    with stage.context(reload_window_bytes=AMPLE_BYTES):
        from_first, from_last = first.sin(), last.sin()
    from_last.sum().backward()
    del from_first


@scenario(
    "TrimWaitsForGuards",
    wrong=race("copy out writes slot @ offload_stream[0]", "slot memory is released @ the host"),
)
def memory_is_given_back_with_a_dropped_copy_in_flight(stage: Stage) -> None:
    x = stage.leaf()
    with stage.context(offload_window_bytes=AMPLE_BYTES):
        y = x.sin()
    del y
    assert torchoffload.trim() > 0


@scenario(
    "NoteUseAtPack",
    wrong=race("operator writes source @ compute_stream[0]#2", "source memory is freed @ compute_stream[0]"),
)
def a_tensor_of_one_stream_is_saved_and_given_up_on_another(stage: Stage) -> None:
    side = stage.simulation.new_stream()
    x = stage.leaf()
    h = x * 2
    side.wait_stream(stage.main)
    with stage.simulation.stream(side), stage.context():
        y = h.sin()
        del h  # without us the graph would hold it until the streams have met again
        stage.next_operator()
        y = y.sum()
    stage.main.wait_stream(side)
    y.backward()


@scenario(
    "NoteUseAtJoin",
    wrong=race("operator writes source @ compute_stream[0]#2", "source memory is freed @ compute_stream[0]"),
)
def a_tensor_is_saved_again_on_another_stream(stage: Stage) -> None:
    side = stage.simulation.new_stream()
    x = stage.leaf()
    h = x * 2
    with stage.context():
        y = h.sin()
        side.wait_stream(stage.main)
        with stage.simulation.stream(side):
            z = h.cos()
            stage.next_operator()
            z = z.sum()
        del h
    stage.main.wait_stream(side)
    (y.sum() + z).backward()


@scenario(
    "NoteUseAtUnpack",
    wrong=race("unpack reads buffer @ compute_stream[0]#2", "buffer memory is freed @ compute_stream[0]"),
)
def what_one_stream_loaded_ahead_is_used_on_another(stage: Stage) -> None:
    side = stage.simulation.new_stream()
    x = stage.leaf()
    with stage.context(reload_window_bytes=AMPLE_BYTES):
        h = x.sin()
        y = h.sin()
    (of_h,) = torch.autograd.grad(y.sum(), h)  # loads x ahead
    side.wait_stream(stage.main)
    with stage.simulation.stream(side):
        torch.autograd.grad(h, x, of_h)
