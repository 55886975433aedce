"""The function that TRL's trainers call, with TRL's own order and names of arguments.

TRL looks it up in its trainer modules, so it can be put in place before a trainer is made:

    from torchoffload.integrations import trl as offload
    trl.trainer.sft_trainer.get_act_offloading_ctx_manager = offload.get_act_offloading_ctx_manager
"""

from typing import Any, cast

from torch import nn

import torchoffload
from torchoffload import OffloadActivations
from torchoffload._options import check_bool

__all__ = ["get_act_offloading_ctx_manager"]


def get_act_offloading_ctx_manager(
    model: nn.Module,
    use_pin_memory: bool = True,
    use_streams: bool = True,
    min_offload_size: int | None = 1024,
    max_fwd_stash_size: int | None = 5,
    warn_if_no_head: bool = True,
    **options: Any,
) -> OffloadActivations:
    """``torchoffload.get_act_offloading_ctx_manager`` with the signature of ``trl.models.activation_offloading``.

    The defaults are TRL's, taken at their word: copies from 1 KiB on, and an offload window of 5 of the largest record.
    None for either chooses torchoffload's default, which is usually faster.

    Parameters
    ----------
    model : torch.nn.Module
        The model; its output head is exempt.
    use_pin_memory, use_streams, min_offload_size, max_fwd_stash_size, warn_if_no_head
        As in TRL and ``OffloadActivations``.
    **options
        The other keyword options of ``OffloadActivations``, such as ``tier="disk"``.

    Raises
    ------
    TypeError, ValueError
        A wrong argument.
    """
    check_bool("warn_if_no_head", warn_if_no_head)
    manager = torchoffload.get_act_offloading_ctx_manager(
        model,
        True,
        warn_if_no_head=warn_if_no_head,
        use_pin_memory=use_pin_memory,
        use_streams=use_streams,
        min_offload_size=min_offload_size,
        max_fwd_stash_size=max_fwd_stash_size,
        **options,
    )
    return cast("OffloadActivations", manager)
