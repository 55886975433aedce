"""Host memory, as the budget sees it."""

from dataclasses import dataclass

from torchoffload._core import core

__all__ = ["HostMemory", "host_memory"]


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Bytes of host memory.

    Attributes
    ----------
    total_bytes, available_bytes : int
        Of the machine: MemTotal and MemAvailable of ``/proc/meminfo``, or what ``sysinfo(2)`` says.
    limit_bytes, limit_used_bytes, limit_inactive_file_bytes : int or None
        Of the control group (v1 or v2) that this process is in: its limit, what it uses, and the part of that which
        is page cache it can drop. None without a limit.
    default_budget_bytes : int
        What ``budget_bytes=None`` means: 0.8 x (min(available, limit - used + inactive file) / the processes of
        this job on the machine + the pinned memory that torchoffload holds in this process). The launcher's
        environment tells how many processes there are: ``docs/api.md`` lists the variables.
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
    """Read the memory of this machine, and of the container that this process is in.

    Raises
    ------
    RuntimeError
        Linux does not tell.
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
