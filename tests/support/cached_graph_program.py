"""A process that trains a small compiled model in a context: its gradients, what moved, and how often it partitioned.

python cached_graph_program.py DIRECTORY WINDOW_BYTES     (TORCHINDUCTOR_CACHE_DIR says where the caches are)
"""

import hashlib
import os
import sys

os.environ["TORCHOFFLOAD_TESTING"] = os.environ.get("TORCHOFFLOAD_TESTING", "1")

import torch
from torch._functorch import partitioners

import torchoffload
from models import Block


def main() -> None:
    directory, window_bytes = sys.argv[1], int(sys.argv[2])
    partitioned = []
    partition = partitioners.min_cut_rematerialization_partition

    def counted(joint_module, _joint_inputs, compiler="inductor", *, num_fwd_outputs, **keywords):
        partitioned.append(num_fwd_outputs)
        return partition(joint_module, _joint_inputs, compiler, num_fwd_outputs=num_fwd_outputs, **keywords)

    partitioners.min_cut_rematerialization_partition = counted
    torch.manual_seed(0)
    block = Block()
    step = torch.compile(block, fullgraph=True, options=torchoffload.compile_options())
    options = {"tier": "disk", "disk_dir": directory, "min_offload_size": 0, "learn": False}
    for _ in range(2):
        with torchoffload.OffloadActivations(offload_window_bytes=window_bytes, **options):
            loss = step(torch.ones(2, 16, 32)).square().sum()
        loss.backward()
    digest = hashlib.sha256(b"".join(p.grad.numpy().tobytes() for p in block.parameters()))
    print(digest.hexdigest(), torchoffload.stats().bytes_offloaded, len(partitioned))


main()
