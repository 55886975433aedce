"""conftest.py: trainers say much, count on the time of day, and look for what is installed: not here."""

import os
from pathlib import Path

import pytest

# Before a trainer's package is imported: no network, no progress bars, no threads of tokenizers.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """New names of options that older versions do not have are no news here."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.filterwarnings("ignore::FutureWarning"))
