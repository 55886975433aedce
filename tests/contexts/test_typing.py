"""What a type checker tells of a call before it runs: mypy over right and wrong calls of the public functions."""

import re
import subprocess
import sys

import pytest

import torchoffload
from places import ROOT

# Each line with a mark is wrong, for the reason that the mark has a part of; mypy must find these and no others.
CALLS = """
import torch
import torchoffload
from torchoffload.integrations.trl import install

model = torch.nn.Linear(2, 2)

torchoffload.OffloadActivations(tier="disk", on_full="error", disk_dir="/var/tmp", budget_bytes=1 << 30)
torchoffload.OffloadActivations(on_full="disk", disk_dir=["/var/tmp", "/tmp"], budget_bytes=1 << 30)
torchoffload.OffloadActivations(tier="dsik")  # wrong: expected "Literal['host', 'disk']"
torchoffload.OffloadActivations(teir="disk")  # wrong: expected "Never"
torchoffload.OffloadActivations(on_full="raise")  # wrong: expected "Literal['keep', 'error', 'disk']"
torchoffload.OffloadActivations(budget_bytes=1e9)  # wrong: incompatible type "float"
torchoffload.OffloadOptions(tier="dsik")  # wrong: expected "Literal['host', 'disk']"
torchoffload.OffloadOptions(teir="disk")  # wrong: Unexpected keyword argument "teir"

torchoffload.get_act_offloading_ctx_manager(model, tier="disk", warn_if_no_head=False)
torchoffload.get_act_offloading_ctx_manager(model, tier="dsik")  # wrong: expected "Literal['host', 'disk']"
torchoffload.get_act_offloading_ctx_manager(model, teir="disk")  # wrong: Unexpected keyword argument "teir"
torchoffload.get_act_offloading_ctx_manager(model, True, False)  # wrong: expected "Never"

torchoffload.offload_modules(model, "layers.*", fraction=0.5, tier="disk")
torchoffload.offload_modules(model, "layers.*", tier="dsik")  # wrong: expected "Literal['host', 'disk']"
torchoffload.offload_modules(model, "layers.*", teir="disk")  # wrong: Unexpected keyword argument "teir"
torchoffload.offload_modules(model, "layers.*", memory="40GiB")  # wrong: Unexpected keyword argument "memory"
torchoffload.OffloadActivations(model=model, memory="40GiB")  # wrong: expected "Never"

torchoffload.fit(model, "40GiB", tier="disk", on_unfit="warn")
torchoffload.fit(model, "40GiB", tier="dsik")  # wrong: expected "Literal['host', 'disk']"
torchoffload.fit(model, "40GiB", teir="disk")  # wrong: Unexpected keyword argument "teir"
torchoffload.fit(model, "40GiB", reload_window_bytes=0)  # wrong: Unexpected keyword argument "reload_window_bytes"
torchoffload.fit(model, "40GiB", on_unfit="raise")  # wrong: expected "Literal['error', 'warn']"

install(tier="disk", learn=False)
install(tier="dsik")  # wrong: expected "Literal['host', 'disk']"
install(teir="disk")  # wrong: Unexpected keyword argument "teir"

with torchoffload.OffloadActivations(tier="disk") as context, torchoffload.NoOpManager() as nothing:
    context.options.tier = "host"  # wrong: read-only
    options: torchoffload.OffloadOptions = context.options
    head: torchoffload.NoOpManager = nothing
"""

# torch's own sources are not read: it takes mypy half a minute, and what is looked at here is not in them.
CONFIGURATION = f"""
[mypy]
strict = true
mypy_path = {ROOT / "src"}
[mypy-torch.*,accelerate.*,transformers.*,trl.*]
follow_imports = skip
ignore_missing_imports = true
[mypy-torchoffload.*]
ignore_errors = true
"""


def test_mypy_finds_each_wrong_option_and_nothing_else(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "calls.py").write_text(CALLS)
    (tmp_path / "mypy.ini").write_text(CONFIGURATION)
    command = [sys.executable, "-m", "mypy", "--config-file=mypy.ini", "calls.py"]
    told = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    errors = re.findall(r"^calls\.py:(\d+): error: (.*)$", told.stdout, flags=re.MULTILINE)
    marks = {
        number: mark[1]
        for number, line in enumerate(CALLS.splitlines(), 1)
        if (mark := re.search("# wrong: (.*)", line))
    }
    assert {int(number) for number, _ in errors} == set(marks), told.stdout + told.stderr
    assert [text for number, text in errors if marks[int(number)] not in text] == []


def test_entering_gives_the_context(tmp_path):
    offloading = torchoffload.OffloadActivations(tier="disk", disk_dir=tmp_path)
    with offloading as context, torchoffload.NoOpManager() as nothing:
        assert context is offloading
        assert isinstance(nothing, torchoffload.NoOpManager)
