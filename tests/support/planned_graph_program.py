"""A process that trains a compiled perceptron by a plan. It prints a JSON object.

python planned_graph_program.py WAY MEMORY_BYTES     (TORCHINDUCTOR_CACHE_DIR says where the caches are)

WAY is "options", for compile_options, or "fit". "digest" is that of the gradients, "partitioned" how often a graph was
partitioned, "report" the lines on plans, and "phase" that of fit.
"""

import hashlib
import json
import sys

import torch
from torch import nn
from torch._functorch import partitioners

import torchoffload


def main(way: str, memory: int) -> None:
    partitioned = []
    choose = partitioners.choose_saved_values_set

    def counted(joint_graph, node_info, memory_budget=1):
        partitioned.append(memory_budget)
        return choose(joint_graph, node_info, memory_budget=memory_budget)

    partitioners.choose_saved_values_set = counted
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh()) for _ in "12"))
    if way == "fit":
        step = torch.compile(model)
        fitted = torchoffload.fit(step, memory, move=False, on_unfit="warn")
    else:
        step = torch.compile(model, options=torchoffload.compile_options(memory=memory))
    step(torch.ones(4, 16)).square().sum().backward()
    digest = hashlib.sha256(b"".join(each.grad.numpy().tobytes() for each in model.parameters()))
    report = fitted.report() if way == "fit" else torchoffload.report()
    lines = [line for line in report.splitlines() if "kept" in line or "compiled graph" in line]
    phase = fitted.phase if way == "fit" else ""
    print(json.dumps({
        "digest": digest.hexdigest(), "partitioned": len(partitioned), "report": lines, "phase": phase
    }))  # fmt: skip


main(sys.argv[1], int(sys.argv[2]))
