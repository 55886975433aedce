"""A process that trains a compiled perceptron by a plan: a digest of its gradients, and how often it partitioned.

python planned_graph_program.py MEMORY_BYTES     (TORCHINDUCTOR_CACHE_DIR says where the caches are)
"""

import hashlib
import sys

import torch
from torch import nn
from torch._functorch import partitioners

import torchoffload


def main() -> None:
    partitioned = []
    choose = partitioners.choose_saved_values_set

    def counted(joint_graph, node_info, memory_budget=1):
        partitioned.append(memory_budget)
        return choose(joint_graph, node_info, memory_budget=memory_budget)

    partitioners.choose_saved_values_set = counted
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
    step = torch.compile(model, options=torchoffload.compile_options(memory=int(sys.argv[1])))
    step(torch.ones(4, 16)).square().sum().backward()
    digest = hashlib.sha256(b"".join(each.grad.numpy().tobytes() for each in model.parameters()))
    print(digest.hexdigest(), len(partitioned))


main()
