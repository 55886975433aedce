"""Tensor and sequence parallelism with offloading: the same losses, gradients and weights, and no weight ever moves."""

import pytest
from processes import Processes

CHECKPOINTING = [None, "reentrant", "non-reentrant", "selective"]

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
def test_tensor_parallel(processes: Processes, sequence: bool, checkpointing: str | None):
    processes.run("tensor_parallel:tensor_parallel", sequence=sequence, checkpointing=checkpointing)


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
def test_tensor_parallel_with_the_loss_in_shards(processes: Processes, sequence: bool):
    processes.run("tensor_parallel:tensor_parallel", sequence=sequence, loss=True)


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("shards", [1, 2])
def test_fsdp2_and_tensor_parallel(processes: Processes, shards: int, checkpointing: str | None):
    processes.run("tensor_parallel:sharded_tensor_parallel", shards=shards, sequence=True, checkpointing=checkpointing)


@pytest.mark.parametrize("options", [{"reshard_after_forward": False}, {"mixed": True}], ids=str)
def test_fsdp2_and_tensor_parallel_with_options(processes: Processes, options: dict):
    processes.run("tensor_parallel:sharded_tensor_parallel", shards=1, **options)
