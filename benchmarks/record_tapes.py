"""Writes what one step of each workload does on this device, without waits of ours: what tests/test_plan.py plans for.

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

from hardware import hardware
from workloads import build_model, parse_workload, random_tokens

WARM_UP_STEPS = 3
TELLING_BYTES = 4 << 20  # smaller copies do not tell the link's rate
WAITS = ("window_wait", "reload_wait")
MOMENTS = ("ready", "needed")


def tape_of(entries: list[tuple[Any, ...]]) -> dict[str, Any]:
    """Sum up one step's timeline, as core.stop_profile() gives it, in the words of the plan."""
    records: dict[int, dict[str, Any]] = {}
    copies: dict[str, list[float]] = {"copy_out": [0.0, 0.0], "copy_in": [0.0, 0.0]}
    stalled_s, began_s, compute_s = 0.0, None, 0.0
    for kind, begin_s, end_s, _tape, record, nbytes, *_ in entries:
        if kind in WAITS:
            stalled_s += end_s - begin_s
        elif kind in copies:
            if nbytes >= TELLING_BYTES:
                copies[kind][0] += nbytes
                copies[kind][1] += end_s - begin_s
        elif kind in MOMENTS:
            began_s = begin_s - stalled_s if began_s is None else began_s
            pure_s = begin_s - stalled_s - began_s
            compute_s = max(compute_s, pure_s)
            known = records.setdefault(record, {"nbytes": nbytes, "ready_s": pure_s, "needed_s": -1.0})
            known["ready_s" if kind == "ready" else "needed_s"] = round(pure_s, 7)
    shares = {}
    for kind, (nbytes, seconds) in copies.items():
        spans = [(begin_s, end_s) for name, begin_s, end_s, *_ in entries if name == kind]
        elapsed_s = max(end_s for _, end_s in spans) - min(begin_s for begin_s, _ in spans) if spans else 0.0
        moved = sum(entry[5] for entry in entries if entry[0] == kind)
        shares[kind] = moved / (nbytes / seconds) / elapsed_s if seconds else 0.0
    rates = {name: nbytes / seconds if seconds else 0.0 for name, (nbytes, seconds) in copies.items()}
    return {
        "compute_s": round(compute_s, 7),
        "stalled_s": round(stalled_s, 7),
        "out_bytes_per_s": round(rates["copy_out"]),
        "in_bytes_per_s": round(rates["copy_in"]),
        # Of the link, from the first copy's start to the last one's end.
        "out_share": round(shares["copy_out"], 4),
        "in_share": round(shares["copy_in"], 4),
        "records": [records[number] for number in sorted(records)],
    }


def record(text: str, device: torch.device) -> dict[str, Any]:
    """Train a few steps of a workload, and return the tape of one more."""
    import torchoffload
    from torchoffload._core import core

    workload = parse_workload(text)
    torch.manual_seed(0)
    model = build_model(workload, device, torch.bfloat16)
    tokens = random_tokens(workload, device)
    context = torchoffload.get_act_offloading_ctx_manager(model)
    for number in range(WARM_UP_STEPS + 1):
        if number == WARM_UP_STEPS:
            torch.cuda.synchronize(device)
            core.start_profile()
        with context:
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
    ((_, entries),) = core.stop_profile()
    return {"workload": text, "hardware": hardware(device), **tape_of(entries)}


def main() -> None:
    """Record each workload, and write its tape."""
    parser = argparse.ArgumentParser(description="Record what a training step saves and when, for the plan's tests.")
    parser.add_argument("--workload", nargs="+", default=["A", "B", "C", "D"], help="as for train_step.py")
    parser.add_argument("--out", type=Path, required=True, help="directory for one JSON file a workload")
    arguments = parser.parse_args()

    import torchoffload

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
