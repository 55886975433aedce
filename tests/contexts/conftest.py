"""conftest.py of the contexts: the factory's context, on a tier that is everywhere."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torchoffload import get_act_offloading_ctx_manager


@pytest.fixture
def offload(tmp_path: Path) -> Callable[..., Any]:
    """Makes the factory's context on the disk tier: it needs no accelerator."""

    def make(model, **options):
        chosen = {"tier": "disk", "disk_dir": tmp_path, "min_offload_size": 0} | options
        return get_act_offloading_ctx_manager(model, **chosen)

    return make
