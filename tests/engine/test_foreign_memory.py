"""Memory that came from another library: its owner hears at once of the last reference's end, and knows no stream."""

import pytest
import torch

from devices import Device
from functions import Save
from gradients import Run, assert_same_gradients


def through_dlpack(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory with a deleter of DLPack's, which holds `tensor`."""
    return torch.from_dlpack(tensor.detach())


@pytest.mark.except_devices("privateuseone")  # which DLPack does not know
@pytest.mark.parametrize("offload_window_bytes", [0, 1 << 20])
def test_memory_of_another_library_stays_on_a_device(device_under_test: Device, offload_window_bytes: int):
    """On the disk tier it moves: what I/O touches is held until it is done, whoever owns it."""

    def program(run: Run):
        x, w = run.tensor(32, 32), run.leaf(32, 32)
        with run.offload(offload_window_bytes=offload_window_bytes):
            shared = through_dlpack(x)
            y = (shared * w).sin()
            y = Save.apply(y, lambda unpacked: run.check(unpacked=unpacked), shared[3:, 5:])
            del shared
        y.sum().backward()
        return w.grad

    kept = {} if device_under_test.name == "disk" else {"kept_reason": "borrowed"}
    assert_same_gradients(program, device=device_under_test, min_moved_fraction=0.2, **kept)


@pytest.mark.devices("simulated-late")
def test_the_owner_of_borrowed_memory_hears_of_its_end_with_the_graph(device_under_test: Device):
    with device_under_test.scope() as simulation:
        w = torch.ones(32, 32, requires_grad=True)
        held_bytes = simulation.allocated_bytes()
        with device_under_test.context():
            y = (through_dlpack(torch.ones(32, 32)) * w).sum()
        assert simulation.allocated_bytes() >= held_bytes + 4096
        y.backward()
        w.grad = None
        del y
        assert simulation.allocated_bytes() == held_bytes
