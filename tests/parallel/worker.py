"""worker.py: one process of a group: runs the cases that it is told to, and replies with what came of each.

python worker.py BACKEND RANK SIZE RENDEZVOUS_FILE REPLIES_FILE
"""

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import sys
import traceback
import warnings
from pathlib import Path

os.environ.setdefault("TORCHOFFLOAD_TESTING", "1")
HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "support"), str(HERE.parents[1] / "benchmarks")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from world import World  # noqa: E402

from devices import Device  # noqa: E402


def main() -> None:
    backend, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    rendezvous, replies_path = Path(sys.argv[4]), Path(sys.argv[5])
    faulthandler.enable()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    warnings.filterwarnings("ignore", message=".*does not have a deterministic implementation")
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend,
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=size,
        device_id=torch.device("cuda", rank) if backend == "nccl" else None,
    )
    spill = rendezvous.with_name(f"spill-{rank}")
    spill.mkdir()
    world = World(rank, size, Device("disk" if backend == "gloo" else "cuda", spill))
    gc.collect()
    gc.freeze()  # what imports made lives until the end: a full collection takes 1 ms then, and not 150
    with replies_path.open("w") as replies:
        for line in sys.stdin:
            replies.write(json.dumps(answer(world, json.loads(line))) + "\n")
            replies.flush()
    with contextlib.suppress(Exception):
        dist.destroy_process_group()


def answer(world: World, message: dict) -> dict:
    file, function = message["case"].split(":")
    try:
        return {"result": getattr(importlib.import_module(file), function)(world, **message["arguments"])}
    except BaseException:
        return {"error": traceback.format_exc()}


if __name__ == "__main__":
    main()
