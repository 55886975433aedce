"""Ranks whose blocks communicate with each other, and their joint decisions."""

import contextlib
import datetime
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from torchoffload._pytorch.tensor_subclasses import plain_tensors

__all__ = ["Agreement", "communicated", "counts_of_groups", "wait_for", "wait_for_all"]

_TIMEOUT = datetime.timedelta(minutes=10)
_NO_AGREEMENT = (
    "torchoffload.fit: ranks whose blocks communicate with each other could not agree on a plan ({error}). All of them "
    "have to call fit, and then the model with gradients, equally often. If they do not, give fit group=None on all."
)


def counts_of_groups() -> dict[Any, int]:
    """Return how many collectives each group of ranks has called so far."""
    if not dist.is_available() or not dist.is_initialized():
        return {}
    counts = {}
    world: Any = dist.distributed_c10d._world
    for group in world.pg_map:
        try:
            counts[group] = int(group._get_sequence_number_for_group())
        except RuntimeError:  # the backend does not count, or the group is not set up yet
            continue
    return counts


def communicated(before: dict[Any, int]) -> tuple[Any, ...]:
    """Return the groups that have called collectives since ``counts_of_groups`` returned ``before``."""
    return tuple(group for group, count in counts_of_groups().items() if before.get(group, 0) != count)


def wait_for(value: Any) -> None:
    """Wait for the writes of functional collectives to the tensors in ``value``."""
    if dist.is_available() and dist.is_initialized():
        for leaf in tree_leaves(value):
            if isinstance(leaf, torch.Tensor):
                for tensor in plain_tensors(leaf.detach()):
                    torch.ops._c10d_functional.wait_tensor(tensor)


def wait_for_all(value: Any) -> None:
    """Wait for the writes of a collective that has returned ``value``, be it functional or one of c10d."""
    wait_for(value)
    leaves = tree_leaves(value)
    handles = [leaf for leaf in leaves if isinstance(leaf, torch.ScriptObject)]
    devices = {leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)} - {torch.device("cpu")}
    for device in devices if handles else ():
        torch.get_device_module(device).synchronize(device)
    # NCCL gives an empty handle for a collective on the current stream, and to wait for that is a crash. So a handle is
    # waited for on a CPU only, and elsewhere the device.
    if handles and not devices:
        for handle in handles:
            handle.wait()  # type: ignore[attr-defined]


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Have errors of torch.distributed name the remedy."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(_NO_AGREEMENT.format(error=error)) from error


class Agreement:
    """Values that ranks agree on over connections of the hosts, so that no device is waited for.

    If blocks communicate in several groups, such as the rows and the columns of a mesh, values go through one group
    after the other, in the same order on all ranks, and so reach all of them.

    Parameters
    ----------
    groups : iterable of ProcessGroup
        The groups, in the order in which the blocks communicate in them. All ranks of a group have to come here.
    """

    def __init__(self, groups: Iterable[Any]) -> None:
        self.groups = tuple(groups)
        with _explained():
            self._on_hosts = [
                dist.new_group(
                    dist.get_process_group_ranks(group),
                    backend="gloo",
                    timeout=_TIMEOUT,
                    use_local_synchronization=True,
                )
                for group in self.groups
            ]

    @staticmethod
    def among(asked: Any, seen: list[Any], known: "Agreement | None") -> "Agreement | None":
        """Return the agreement of the groups in which blocks were seen to communicate, or of the one asked for.

        Parameters
        ----------
        asked : ProcessGroup or "auto" or None
            The groups that the user asks for.
        seen : list of ProcessGroup
            The groups that were seen.
        known : Agreement or None
            The one that there is.
        """
        groups = tuple(seen if asked == "auto" else [] if asked is None else [asked])
        return known if not groups or (known is not None and known.groups == groups) else Agreement(groups)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks; some of them may be there more than once."""
        values = [value]
        for group in self._on_hosts:
            received: list[Any] = [None] * dist.get_world_size(group)
            with _explained():
                dist.all_gather_object(received, values, group=group)
            values = [each for values_of_rank in received for each in values_of_rank]
        return values

    def largest(self, *values: float) -> list[float]:
        """Return for each value the largest one of all ranks, as a float."""
        both = torch.tensor(values, dtype=torch.float64, device="cpu")
        for group in self._on_hosts:
            with _explained():
                dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
        return both.tolist()

    def check_same(self, value: Any) -> None:
        """RuntimeError unless all ranks have the same value."""
        if any(each != value for each in self.gather(value)):
            raise RuntimeError(
                "torchoffload.fit: ranks whose blocks communicate with each other have made different plans. Give fit "
                "the same arguments on all of them, and use the same versions of torch and torchoffload."
            )
