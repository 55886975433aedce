"""Data parallelism with offloading: the same losses, gradients and weights, and no weight ever moves."""

import pytest
from processes import Processes

CHECKPOINTING = [None, "reentrant", "non-reentrant", "selective"]

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_ddp(processes: Processes, checkpointing: str | None):
    processes.run("data_parallel:ddp", checkpointing=checkpointing)


@pytest.mark.parametrize("options", [{"static_graph": True}, {"gradient_as_bucket_view": True}], ids=str)
def test_ddp_with_options(processes: Processes, options: dict):
    processes.run("data_parallel:ddp", **options)


def test_ddp_accumulates_over_micro_batches(processes: Processes):
    processes.run("data_parallel:ddp", micro_batches=3)


def test_ddp_with_learning(processes: Processes):
    processes.run("data_parallel:ddp_learning")


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat-params", "orig-params"])
def test_fsdp1(processes: Processes, use_orig_params: bool, checkpointing: str | None):
    processes.run("data_parallel:fsdp1", use_orig_params=use_orig_params, checkpointing=checkpointing)


@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat-params", "orig-params"])
@pytest.mark.parametrize("options", [{"strategy": "SHARD_GRAD_OP"}, {"mixed": True}], ids=str)
def test_fsdp1_with_options(processes: Processes, use_orig_params: bool, options: dict):
    processes.run("data_parallel:fsdp1", use_orig_params=use_orig_params, **options)


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("reshard", [True, False], ids=["reshard", "no-reshard"])
def test_fsdp2(processes: Processes, reshard: bool, checkpointing: str | None):
    processes.run("data_parallel:fsdp2", reshard_after_forward=reshard, checkpointing=checkpointing)


@pytest.mark.parametrize("reshard", [True, False], ids=["reshard", "no-reshard"])
@pytest.mark.parametrize("options", [{"mixed": True}, {"cpu_offload": True}, {"micro_batches": 2}], ids=str)
def test_fsdp2_with_options(processes: Processes, reshard: bool, options: dict):
    processes.run("data_parallel:fsdp2", reshard_after_forward=reshard, **options)
