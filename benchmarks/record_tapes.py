"""Writes what one step of each workload does on this device, without waits of ours.

What is written is what tests/core/test_plan.py plans for.

    PYTHONPATH=build/gpu python3 benchmarks/record_tapes.py --workload A B C D --out tests/data/tapes

One JSON file a workload: the bytes of each record in the order of the saves, when its copy could start and when
backward asked for it first (seconds of compute, our own waits taken out), and the rates of the copies.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

import torchoffload
from hardware import hardware
from workloads import build_model, parse_workload, random_tokens

WARM_UP_STEPS = 3
TELLING_BYTES = 4 << 20  # smaller copies do not tell the link's rate


def rate(profile: torchoffload.Profile, kind: str) -> float:
    """Bytes per second of the copies that are large enough to tell."""
    copies = [entry for entry in profile.entries if entry.kind == kind and entry.nbytes >= TELLING_BYTES]
    seconds = sum(entry.duration_s for entry in copies)
    return sum(entry.nbytes for entry in copies) / seconds if seconds else 0.0


def tape_of(profile: torchoffload.Profile) -> dict[str, Any]:
    """Sum up one step's profile in the words of the plan."""
    records: dict[int, dict[str, Any]] = {}
    stalled_s, began_s, compute_s = 0.0, None, 0.0
    for entry in profile.entries:
        if entry.kind in ("window_wait", "reload_wait", "drop_wait"):
            stalled_s += entry.duration_s
        elif entry.kind in ("ready", "needed"):
            began_s = entry.begin_s - stalled_s if began_s is None else began_s
            pure_s = entry.begin_s - stalled_s - began_s
            compute_s = max(compute_s, pure_s)
            known = records.setdefault(entry.record, {"nbytes": entry.nbytes, "ready_s": pure_s, "needed_s": -1.0})
            known[f"{entry.kind}_s"] = round(pure_s, 7)
    out_rate, in_rate = rate(profile, "copy_out"), rate(profile, "copy_in")
    return {
        "compute_s": round(compute_s, 7),
        "stalled_s": round(stalled_s, 7),
        "out_bytes_per_s": round(out_rate),
        "in_bytes_per_s": round(in_rate),
        # Of the link, from the first copy's start to the last one's end.
        "out_share": round(profile.total.out.link_use(out_rate or None), 4),
        "in_share": round(profile.total.back.link_use(in_rate or None), 4),
        "records": [records[number] for number in sorted(records)],
    }


def record(text: str, device: torch.device) -> dict[str, Any]:
    """Train a few steps of a workload, and return the tape of one more."""
    workload = parse_workload(text)
    torch.manual_seed(0)
    model = build_model(workload, device, torch.bfloat16)
    tokens = random_tokens(workload, device)
    context = torchoffload.get_act_offloading_ctx_manager(model)

    def step() -> None:
        with context:
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()

    for _ in range(WARM_UP_STEPS):
        step()
    torch.cuda.synchronize(device)
    with torchoffload.profile() as profile:
        step()
    return {"workload": text, "hardware": hardware(device), **tape_of(profile)}


def main() -> None:
    """Record each workload, and write its tape."""
    parser = argparse.ArgumentParser(description="Record what a training step saves and when, for the plan's tests.")
    parser.add_argument("--workload", nargs="+", default=["A", "B", "C", "D"], help="as for train_step.py")
    parser.add_argument("--out", type=Path, required=True, help="directory for one JSON file a workload")
    arguments = parser.parse_args()

    arguments.out.mkdir(parents=True, exist_ok=True)
    for text in arguments.workload:
        tape = record(text, torch.device("cuda"))
        (arguments.out / f"{text.partition(':')[0]}.json").write_text(json.dumps(tape, indent=1) + "\n")
        seconds = f"{tape['compute_s']:.3f} s of compute, {tape['stalled_s']:.3f} s of waits"
        print(f"{text}: {len(tape['records'])} records, {seconds}; of the link {tape['out_share']}, {tape['in_share']}")
        print(torchoffload.report())
        torch.cuda.empty_cache()
        torchoffload.reset_stats()
        torchoffload.trim()


if __name__ == "__main__":
    main()
