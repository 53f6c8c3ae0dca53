"""Device memory for one call, from torch's caching allocator."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["workspace"]


@functools.cache
def _made_of(device: int) -> tuple[Any, Any, Any]:
    import torch

    return torch.empty, torch.uint8, torch.device("cuda", device)


def workspace(nbytes: int, device: int) -> torch.Tensor:
    """Allocate `nbytes` on the current stream of `device`, aligned to 512 bytes; not initialised.

    Keep the tensor until the last kernel that uses it is enqueued on that stream, then drop it: the allocator hands
    the memory only to later work of the same stream, or of the same captured graph.
    """
    empty, uint8, where = _made_of(device)
    memory: torch.Tensor = empty(nbytes, dtype=uint8, device=where)
    return memory
