"""The host memory of this machine and of the container, from which the default budget is computed."""

from dataclasses import dataclass

from torchoffload._core import core

__all__ = ["HostMemory", "host_memory"]


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Host memory in bytes, at the moment when ``host_memory()`` was called.

    Attributes
    ----------
    total_bytes, available_bytes : int
        The memory of the machine: MemTotal and MemAvailable of ``/proc/meminfo``, or the values of ``sysinfo(2)``.
    limit_bytes, limit_used_bytes, limit_inactive_file_bytes : int or None
        The memory limit of the control group (v1 or v2) of this process, the bytes that the group uses, and the part of
        these that is page cache which the kernel can drop. None if there is no limit.
    default_budget_bytes : int
        The budget that ``budget_bytes=None`` stands for. It is 0.8 x (min(available, limit - limit used + inactive
        file) / number of processes of this job on the machine + pinned memory that torchoffload holds in this process).
        The number of processes comes from the environment that the launcher sets; ``docs/environment.md`` lists the
        variables.
    """

    total_bytes: int
    available_bytes: int
    limit_bytes: int | None
    limit_used_bytes: int | None
    limit_inactive_file_bytes: int | None
    default_budget_bytes: int


def _known(value: int | None) -> int:
    if value is None:
        raise RuntimeError("the size of host memory is not known: neither sysinfo(2) nor /proc/meminfo could be read")
    return value


def host_memory() -> HostMemory:
    """Read the host memory of this machine and of the container that this process runs in.

    Returns
    -------
    HostMemory
        Sizes in bytes, read at this call.

    Raises
    ------
    RuntimeError
        Neither ``/proc/meminfo`` nor ``sysinfo(2)`` could be read.
    """
    seen = core.host_memory()
    return HostMemory(
        total_bytes=_known(seen["total"]),
        available_bytes=_known(seen["available"]),
        limit_bytes=seen["limit"],
        limit_used_bytes=seen["limit_used"],
        limit_inactive_file_bytes=seen["limit_inactive_file"],
        default_budget_bytes=_known(seen["default_budget"]),
    )
