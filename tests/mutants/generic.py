"""The scenarios of the generic backend, on the simulated device as one of PyTorch's. Its copies are late."""

import torch
from checks import RIGHT_GRADIENT, gradient_name
from scenario import AMPLE_BYTES, NBYTES, Stage, race, scenario, testing

import torchoffload


@scenario(
    "GenericStreamWaits",
    wrong=race("source memory is allocated @ compute_stream[0]", "copy out reads source @ side_stream[0]"),
    on_private=True,
)
def no_stream_waits_for_another(stage: Stage) -> None:
    x = stage.leaf()
    with stage.context():
        y = (x + 0).sin()
    y.sum().backward()
    assert torch.equal(x.grad, x.detach().cos())


@scenario(
    "GenericHostWaits",
    wrong=race("copy out writes slot @ side_stream[0]", "slot memory is released @ the host"),
    on_private=True,
)
def memory_goes_back_to_the_devices_allocator_with_a_dropped_copy_in_flight(stage: Stage) -> None:
    x = stage.leaf()
    with stage.context(offload_window_bytes=AMPLE_BYTES):
        y = x.sin()
    del y
    assert torchoffload.trim() > 0


@scenario(
    "GenericDiskWaits",
    right=RIGHT_GRADIENT,
    wrong=race("copy out writes slot @ side_stream[0]", "copy in reads slot @ side_stream[0]"),
    on_private=True,
)
def a_slot_is_written_to_a_disk_before_its_copy_out_has_run(stage: Stage) -> str:
    first, second = stage.leaf(), stage.leaf(5.0)
    options = {"on_full": "disk", "disk_dir": str(stage.directory), "budget_bytes": 0}
    with stage.context(offload_window_bytes=NBYTES, **options):
        y = first.sin()
        z = second.sin().exp()  # there is room for its bytes once the disk has the first slot's
        stage.next_operator()  # the window is full now: the first copy has run when its source is dropped
    (gradient,) = torch.autograd.grad(y.sum(), first)
    del z
    return gradient_name(gradient.cpu(), first.detach().cpu())


@scenario(
    "GenericNotesUse",
    right="1 stream is noted",
    wrong=race("copy out reads source @ side_stream[0]", "source memory is freed @ compute_stream[0]"),
    on_private=True,
)
def a_tensor_of_one_stream_is_saved_on_another(stage: Stage) -> str:
    x = stage.leaf()
    h = x + 0
    side = stage.simulation.new_stream()
    side.wait_stream(stage.main)
    with stage.context(offload_window_bytes=AMPLE_BYTES), stage.simulation.stream(side):
        y = h.sin()
        stage.next_operator()
    count = testing.private_user_count(h.untyped_storage().data_ptr())
    del y
    return "1 stream is noted" if count == 1 else f"{count} streams are noted"


@scenario("GenericSeesRefill", right="a gradient at zeros", wrong="a gradient of other bytes", on_private=True)
def a_storage_is_filled_again_at_the_same_address_with_its_copy_in_flight(stage: Stage) -> str:
    x = stage.leaf()
    with stage.context(offload_window_bytes=NBYTES):
        h = x + 0
        y = h.sin()
        stage.next_operator()
        address = h.data_ptr()
        h.untyped_storage().resize_(0)
        h.untyped_storage().resize_(NBYTES)
        assert h.data_ptr() == address
        stage.simulation.clear_races()  # the program's own: a storage is resized while a copy reads it
        z = stage.leaf().sin().exp()  # the window is full: the first copy is waited for
        stage.next_operator()
    stage.simulation.clear_races()
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(h):
        h.zero_()
    y.sum().backward()
    del z
    name = gradient_name(x.grad.cpu(), torch.zeros(x.shape))
    return "a gradient at zeros" if name == RIGHT_GRADIENT else "a gradient of other bytes"
