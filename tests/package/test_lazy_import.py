"""The import of torchoffload: what only `fit` needs is imported when `fit` is asked for."""

import subprocess
import sys

import pytest

_WITHOUT_FIT = """
import sys
import torch
import torchoffload

def is_loaded():
    return any(name.startswith("torchoffload._fit") for name in sys.modules)

assert not is_loaded()
assert set(torchoffload.__all__) <= set(dir(torchoffload))
torchoffload.offload_modules(torch.nn.Sequential(torch.nn.Tanh()), "0", tier="disk").remove()
with torchoffload.OffloadActivations(tier="disk"):
    torch.ones(2, requires_grad=True).sin().sum().backward()
assert not is_loaded()
assert not hasattr(torchoffload, "fits")
{asks}
assert is_loaded()
"""


@pytest.mark.parametrize(
    "asks",
    [
        "from torchoffload import fit, Fitted, FitPlan, FrontierPoint",
        "assert torchoffload.fit is torchoffload.fit and torchoffload.fit.__name__ == 'fit'",
        "from torchoffload import *; fit, Fitted",
        "torchoffload.fit(torch.nn.Sequential(torch.nn.Tanh()), '1GiB', tier='disk')",
    ],
)
def test_the_modules_of_fit_are_imported_when_it_is_asked_for(asks: str):
    subprocess.run([sys.executable, "-c", _WITHOUT_FIT.format(asks=asks)], check=True)
