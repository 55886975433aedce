"""CUDA memory from other places than the default pool: a MemPool, expandable segments, cudaMallocAsync."""

import contextlib
import gc
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import torchoffload
from devices import Device
from gradients import Run, assert_same_gradients
from models import TinyGpt, tokens_and_labels, update
from places import TESTS, environment_with_support

pytestmark = [pytest.mark.cuda, pytest.mark.devices("cuda")]

ROWS = 512  # a record of `chain`: 512 x 512 floats, 1 MiB
RECORD_BYTES = ROWS * ROWS * 4


def chain(x: torch.Tensor) -> torch.Tensor:
    """Eight records: the result of each operator, which the next does not save."""
    for step in range(8):
        x = x.tanh() if step % 2 else x.sigmoid()
    return x


def overwrite_free_memory(count: int = 16) -> None:
    """Takes every block that was freed, of the pool in force, and writes over it."""
    garbage = [torch.full((ROWS, ROWS), float("nan"), device="cuda") for _ in range(count)]
    del garbage


def active_bytes(pool: torch.cuda.MemPool) -> int:
    return sum(segment["allocated_size"] for segment in pool.snapshot())


# ---- a MemPool around forward, backward or both ----

Where = Callable[[torch.cuda.MemPool], Any]


def in_pool(pool: torch.cuda.MemPool) -> Any:
    return torch.cuda.use_mem_pool(pool)


def outside(_pool: torch.cuda.MemPool) -> Any:
    return contextlib.nullcontext()


PLACES = {"both": (in_pool, in_pool), "forward": (in_pool, outside), "backward": (outside, in_pool)}


@pytest.mark.parametrize(("forward", "backward"), PLACES.values(), ids=PLACES)
def test_training_with_a_mem_pool(device_under_test: Device, forward: Where, backward: Where):
    def program(run: Run):
        model, pool = run.module(lambda: TinyGpt(depth=2)), torch.cuda.MemPool()
        for _ in range(3):
            with forward(pool), run.offload():
                loss = model(*tokens_and_labels(run))
            overwrite_free_memory()
            with backward(pool):
                loss.backward()
                overwrite_free_memory()
            run.check(loss=loss, step=model)
            update(model)
        return model

    assert_same_gradients(program, device=device_under_test)


@pytest.mark.parametrize(("forward", "backward"), PLACES.values(), ids=PLACES)
def test_a_mem_pool_of_each_step_is_deleted_after_it(device_under_test: Device, forward: Where, backward: Where):
    def program(run: Run):
        x = run.leaf(ROWS, ROWS)
        for _ in range(4):
            pool = torch.cuda.MemPool()
            with forward(pool), run.offload(offload_window_bytes=0):
                y = chain(x)
            with backward(pool):
                y.sum().backward()
            run.check(gradient=x.grad)
            del y, pool
            overwrite_free_memory()
        return x.grad

    # The results of a chain, in each of four steps.
    assert_same_gradients(program, device=device_under_test, moved_bytes=4 * 8 * RECORD_BYTES)


@pytest.mark.parametrize("window_bytes", [0, None], ids=["least", "default"])
def test_a_mem_pool_is_deleted_while_its_tensors_are_alive_and_offloaded(
    device_under_test: Device, window_bytes: int | None
):
    """Sources, and buffers that backward keeps, outlive the pool that they came from."""

    def program(run: Run):
        x, kept = run.leaf(ROWS, ROWS), []
        for _ in range(3):
            pool = torch.cuda.MemPool()
            with torch.cuda.use_mem_pool(pool):
                with run.offload(offload_window_bytes=window_bytes):
                    y = chain(x)
                kept.append(y.grad_fn._saved_result)
            del pool
            gc.collect()
            overwrite_free_memory()
            y.sum().backward()
            del y
            run.check(gradient=x.grad)
        return x.grad, kept

    assert_same_gradients(program, device=device_under_test)


def test_activations_leave_their_mem_pool(device_under_test: Device):
    def held_at_the_loss(run: Run) -> int:
        x, pool = run.leaf(ROWS, ROWS), torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool), run.offload(offload_window_bytes=0):
            loss = chain(x).sum()
        held = active_bytes(pool)
        loss.backward()
        del loss
        gc.collect()
        assert active_bytes(pool) == 0, "the pool's memory came back"
        return held

    stock = held_at_the_loss(Run(device_under_test, stock=True, context=None))
    torchoffload.reset_stats()
    offloaded = held_at_the_loss(Run(device_under_test, stock=False, context=None))
    assert torchoffload.stats().bytes_offloaded == 8 * RECORD_BYTES
    assert stock - offloaded >= 8 * RECORD_BYTES


def test_the_pool_of_a_mem_pool_is_used_by_forward_on_a_side_stream(device_under_test: Device):
    def program(run: Run):
        x, pool, side = run.leaf(ROWS, ROWS), torch.cuda.MemPool(), torch.cuda.Stream()
        for _ in range(3):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side), torch.cuda.use_mem_pool(pool), run.offload(offload_window_bytes=0):
                torch.cuda._sleep(20_000_000)
                y = chain(x)
                overwrite_free_memory()
            torch.cuda.current_stream().wait_stream(side)
            y.sum().backward()
            run.check(gradient=x.grad)
        return x.grad

    assert_same_gradients(program, device=device_under_test)


# ---- the whole process on another allocator ----

ALLOCATORS = {"expandable": "expandable_segments:True", "async": "backend:cudaMallocAsync"}
CORE_CASES = [
    "gradients/test_gradients_order.py",
    "gradients/test_gradients_windows.py",
    "gradients/test_gradients_threads.py",
    "engine/test_foreign_memory.py",
]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("options", ALLOCATORS.values(), ids=ALLOCATORS)
def test_the_core_cases_on_another_allocator(options: str):
    """Chosen once for a process, so the cases run in one of their own."""
    # Older versions know the second name alone.
    environment = os.environ | {"PYTORCH_ALLOC_CONF": options, "PYTORCH_CUDA_ALLOC_CONF": options}
    command = [sys.executable, "-m", "pytest", "-q", "-k", "cuda", "-p", "no:cacheprovider", *CORE_CASES]
    done = subprocess.run(command, cwd=TESTS, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


PROFILED_ON_A_PLUGGABLE_ALLOCATOR = """
import sys, torch, torchoffload
from autograd_threads import await_autograd
from torch.cuda.memory import CUDAPluggableAllocator, change_current_allocator
allocator = CUDAPluggableAllocator(sys.argv[1], "give", "take")
change_current_allocator(allocator)
x = torch.ones(512, 512, device="cuda", requires_grad=True)
with torchoffload.profile() as profile, torchoffload.OffloadActivations(min_offload_size=0, offload_window_bytes=0):
    y = x.sin().exp()
y.sum().backward()
assert torch.equal(x.grad, x.detach().cos() * x.detach().sin().exp())
assert torchoffload.stats().bytes_offloaded > 0
await_autograd("cuda")
print("done")
"""

PLUGGABLE_ALLOCATOR = """
#include <cuda_runtime_api.h>
#include <sys/types.h>
extern "C" void* give(ssize_t size, int device, cudaStream_t stream) {
  void* memory = nullptr;
  return cudaMalloc(&memory, size) == cudaSuccess ? memory : nullptr;
}
extern "C" void take(void* memory, ssize_t size, int device, cudaStream_t stream) { cudaFree(memory); }
"""


def test_a_profile_on_an_allocator_that_keeps_no_account(tmp_path: Path):
    """A CUDAPluggableAllocator raises where it is asked how much is allocated."""
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    source, library = tmp_path / "allocator.cu", tmp_path / "allocator.so"
    source.write_text(PLUGGABLE_ALLOCATOR)
    subprocess.run([nvcc, "-shared", "-Xcompiler", "-fPIC", str(source), "-o", str(library)], check=True, timeout=300)
    command = [sys.executable, "-c", PROFILED_ON_A_PLUGGABLE_ALLOCATOR, str(library)]
    environment = environment_with_support()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "done", done.stderr[-2000:]
