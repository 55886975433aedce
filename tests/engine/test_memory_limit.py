"""The point of it all: under a memory limit that kills the plain run, the offloaded run finishes with the same result.

Run as a script, this file is the training run: ``test_memory_limit.py plain|offloaded DIRECTORY [LIMIT_BYTES]``.
"""

import hashlib
import json
import os
import resource
import subprocess
import sys

import pytest

MIB = 1 << 20
STEP_COUNT, LAYER_COUNT, ROW_COUNT, WIDTH = 3, 12, 1 << 16, 64
SAVED_BYTES = LAYER_COUNT * 2 * ROW_COUNT * WIDTH * 4  # the inputs of a linear layer and of a GELU, in each layer


def _train(label, directory):
    import torch

    import torchoffload

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU()) for _ in range(LAYER_COUNT)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = torch.randn(ROW_COUNT, WIDTH)
    for _ in range(STEP_COUNT):
        if label == "offloaded":
            with torchoffload.OffloadActivations(tier="disk", disk_dir=directory):
                loss = model(rows).square().mean()
        else:
            loss = model(rows).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    digest = hashlib.sha256(loss.detach().numpy().tobytes())
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()


def _peak_address_space_bytes():
    """VmPeak, or None where the kernel does not keep it."""
    with open("/proc/self/status", encoding="ascii") as status:
        sizes = [int(line.split()[1]) * 1024 for line in status if line.startswith("VmPeak:")]
    return sizes[0] if sizes else None


def _main(label, directory, limit_bytes=None):
    if limit_bytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (int(limit_bytes), int(limit_bytes)))
    digest = _train(label, directory)
    print(json.dumps({"digest": digest, "peak_bytes": _peak_address_space_bytes()}))


def _run(label, directory, limit_bytes=None):
    # One malloc arena, and freed blocks go back at once: a peak then repeats from run to run.
    environment = os.environ | {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(MIB), "OMP_NUM_THREADS": "1"}
    limit = [] if limit_bytes is None else [str(limit_bytes)]
    return subprocess.run(
        [sys.executable, __file__, label, str(directory), *limit],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )


def _result(child):
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout.splitlines()[-1])


@pytest.mark.slow
def test_where_the_plain_run_dies_of_memory_the_offloaded_run_finishes_with_the_same_result(tmp_path):
    plain = _result(_run("plain", tmp_path))
    offloaded = _result(_run("offloaded", tmp_path))
    if plain["peak_bytes"] is None:
        pytest.skip("this kernel keeps no VmPeak to derive a limit from")
    assert plain["peak_bytes"] - offloaded["peak_bytes"] > SAVED_BYTES / 2
    limit_bytes = (plain["peak_bytes"] + offloaded["peak_bytes"]) // 2

    dead = _run("plain", tmp_path, limit_bytes)
    assert dead.returncode != 0
    assert "allocate memory" in dead.stderr, dead.stderr

    survivor = _result(_run("offloaded", tmp_path, limit_bytes))
    assert survivor["digest"] == plain["digest"]
    assert survivor["peak_bytes"] <= limit_bytes


if __name__ == "__main__":
    _main(*sys.argv[1:])
