"""Device memory for one call, from torch's caching allocator."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from ....errors import LimitError

if TYPE_CHECKING:
    import torch


@functools.cache
def _made_of(device: int) -> tuple[Any, Any, Any, type[Exception]]:
    import torch

    return torch.empty, torch.uint8, torch.device("cuda", device), torch.OutOfMemoryError


def workspace(nbytes: int, device: int) -> torch.Tensor:
    """Allocate `nbytes` on the current stream of `device`, aligned to 512 bytes; not initialised.

    Keep the tensor until the last kernel that uses it is enqueued on that stream, then drop it: the allocator hands
    the memory only to later work of the same stream, or of the same captured graph.

    Raises
    ------
    LimitError
        There is not enough.
    """
    empty, uint8, where, full = _made_of(device)
    try:
        memory: torch.Tensor = empty(nbytes, dtype=uint8, device=where)
    except full as error:
        raise LimitError(
            f"memory for sums on cuda:{device}", limit="what is free", value=f"{nbytes} bytes", nearest="fewer rows"
        ) from error
    return memory
