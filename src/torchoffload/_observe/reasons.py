"""The reasons for which a saved tensor stays on its device, as ``report()`` explains them.

The compiled core decides and counts; its list of reasons is ``csrc/core/reasons.def``. This table has one entry
for each reason of that list, in the same order. ``tests/docs/test_reasons.py`` compares both with the table in
``docs/reasons.md``.
"""

from typing import NamedTuple

__all__ = ["REASONS", "Reason"]


class Reason(NamedTuple):
    """The text of ``report()`` about one reason.

    Attributes
    ----------
    meaning : str
        Which saved tensors stay for this reason; completes the line that gives their number and bytes.
    advice : str
        The change to make when this reason kept most of the bytes that could have moved. Full sentences.
    """

    meaning: str
    advice: str


REASONS = {
    "parameter": Reason(
        meaning="parameters, views of them, and buffers of the context's model",
        advice="Only parameters and buffers were saved. Enter the context around forward, with gradients enabled.",
    ),
    "small": Reason(
        meaning="smaller than min_offload_size",
        advice="Set min_offload_size lower, or use larger batches.",
    ),
    "device": Reason(
        meaning="on a device that this tier does not serve",
        advice='The host tier serves tensors of an accelerator, tier="disk" those of the CPU as well: move the model, '
        "or change tier.",
    ),
    "layout": Reason(
        meaning="without plain storage, such as sparse tensors",
        advice="Tensors of these layouts have no plain storage to move; there is nothing to change.",
    ),
    "marked": Reason(
        meaning="marked by never_offload()",
        advice="Remove the never_offload() calls for these tensors.",
    ),
    "in_backward": Reason(
        meaning="saved while backward ran",
        advice=(
            "Forward ran outside the context, or inside of a reentrant checkpoint: enter the context around forward "
            "and around the checkpoint."
        ),
    ),
    "planned": Reason(
        meaning="kept by the plan of a compiled graph",
        advice="The plan has room for these tensors. Give compile_options() or fit() less memory, and more of them "
        "move or are computed again.",
    ),
    "tier_full": Reason(
        meaning="budget_bytes, host memory or the disk was used up",
        advice=(
            'Raise budget_bytes (see host_memory()), let the rest go on to a disk (on_full="disk"), or free space in '
            "disk_dir."
        ),
    ),
    "resized": Reason(
        meaning="on a storage that was resized before or during its copy (FSDP2, compiled graphs)",
        advice="Something resizes these storages before they can be copied: enter the context inside of it.",
    ),
    "write_failed": Reason(
        meaning="the write to disk_dir failed",
        advice="See the warning for the reason, and set disk_dir to a directory with free space.",
    ),
    "pending": Reason(
        meaning="needed again before their copy was enqueued, since backward began right after",
        advice="Leave the context before backward, so that the last copies are enqueued.",
    ),
    "capturing": Reason(
        meaning="a CUDA graph was being captured",
        advice="Work that is captured into a CUDA graph is not offloaded; there is nothing to change.",
    ),
    "borrowed": Reason(
        meaning="in memory that others manage (CUDA graphs of torch.compile, DLPack, other processes)",
        advice='Such memory stays: compile without mode="reduce-overhead", or clone what another library gave.',
    ),
    "external_stream": Reason(
        meaning="saved on an ExternalStream that was no longer current when their copy could begin",
        advice="Leave the context before you leave the ExternalStream, or compute on a stream of PyTorch.",
    ),
    "lives_on": Reason(
        meaning="held by the program through backward: moving them frees nothing",
        advice="Whoever holds these tensors would have to let go of them before backward.",
    ),
    "needed_soon": Reason(
        meaning="needed again before they could be moved out and back",
        advice="Computing takes less time than the copies would: larger batches or layers would change that.",
    ),
    "tape_end": Reason(
        meaning="saved last, so backward begins with them",
        advice=(
            "All saved tensors that hooks see fit in the reload window: a smaller reload_window_bytes lets them move. "
            "If the step holds far more memory than that, report(holders=True) before backward tells what custom "
            "Functions keep on ctx, out of sight of all hooks."
        ),
    ),
    "small_copy": Reason(
        meaning="too small to be copied at the full rate of the link",
        advice="Larger batches make larger copies, and learn=False moves these tensors all the same.",
    ),
    "beyond_fraction": Reason(
        meaning="saved after the fraction that offload_modules was asked to move",
        advice="Give offload_modules a larger fraction.",
    ),
    "not_an_input": Reason(
        meaning="not the input of a chosen module (only_inputs)",
        advice="Choose the modules that are checkpointed, or leave only_inputs out.",
    ),
}
