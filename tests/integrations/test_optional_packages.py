"""Without a trainer's package: what can be imported, and what the error says."""

import subprocess
import sys

import pytest

PACKAGES = ("transformers", "trl", "lightning", "pytorch_lightning", "accelerate")


def python(code: str) -> str:
    """What a fresh interpreter prints in which none of the packages can be imported."""
    without = f"import sys; sys.modules.update(dict.fromkeys({PACKAGES!r}))\n"
    done = subprocess.run([sys.executable, "-c", without + code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("module", "package"),
    [("transformers", "transformers"), ("lightning", "lightning"), ("accelerate", "accelerate")],
)
def test_an_integration_without_its_package_says_what_to_install(module: str, package: str):
    text = python(
        f"try:\n    import torchoffload.integrations.{module}\nexcept ImportError as error:\n    print(error)\n"
    )
    assert text == f"torchoffload.integrations.{module} needs {package}: pip install {package}"


def test_trls_function_needs_no_trl_and_installing_does():
    text = python(
        "from torchoffload.integrations.trl import get_act_offloading_ctx_manager, install\n"
        "import torch\n"
        "made = get_act_offloading_ctx_manager(torch.nn.Linear(2, 2), warn_if_no_head=False, tier='disk')\n"
        "print(type(made).__name__)\n"
        "try:\n    install()\nexcept ImportError as error:\n    print(error)\n"
    )
    assert text.splitlines() == [
        "OffloadActivations",
        "torchoffload.integrations.trl needs trl: pip install trl",
    ]


def test_the_package_of_integrations_imports_none_of_them():
    code = "import torchoffload.integrations, sys; print([name for name in sys.argv[1:] if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code, *PACKAGES, "peft", "datasets", "torchoffload.integrations.trl"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"
