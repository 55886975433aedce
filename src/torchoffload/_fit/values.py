"""What a recorded call of a block looks at in the values of its storages: whether they change, and how they code."""

from typing import Any

import torch

from torchoffload._core import core

__all__ = ["LinkShares", "Values", "bytes_of"]


class Values:
    """Sums over the bytes of storages, which tell whether somebody has written to them."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, int]] = {}

    def note(self, number: int, storage: torch.UntypedStorage) -> None:
        """Take the bytes that a storage has now for those that it is to have."""
        self._known[number] = _sums(storage)

    def have_changed(self, number: int, storage: torch.UntypedStorage) -> bool:
        """Return whether the bytes are others than were noted. What was not noted is noted now."""
        now = _sums(storage)
        return self._known.setdefault(number, now) != now


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return the bytes of a storage as a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _sums(storage: torch.UntypedStorage) -> tuple[int, int]:
    if storage.device.type == "meta" or storage.data_ptr() == 0:  # the latter has no memory, as a zero tensor's
        return 0, 0
    with torch.no_grad():
        every = bytes_of(storage)
        words = every[: every.numel() // 4 * 4].view(torch.int32)
        if words.numel() == 0:
            words = every
        return int(words.sum(dtype=torch.int64)), int(words[::2].sum(dtype=torch.int64))


class LinkShares:
    """The parts of storages' bytes that the link carries, if they move under a context.

    Parameters
    ----------
    pack : callable
        The pack hook in force. Unless it is that of a context of torchoffload, nothing moves coded.

    Attributes
    ----------
    known : dict of int to float
        By the number of the storage, where it is less than 1.
    """

    def __init__(self, pack: Any) -> None:
        context = getattr(pack, "__self__", None)
        self._context = context if isinstance(context, core.Context) else None
        self.known: dict[int, float] = {}

    def note(self, number: int, tensor: torch.Tensor) -> None:
        """Look at a storage, by a tensor that has all of it or a part."""
        share = 1.0 if self._context is None else self._context.link_share(tensor)
        if share < 1:
            self.known[number] = share
        else:
            self.known.pop(number, None)
