"""Whether products of this thread are routed: what scopes and the process-wide switch leave to be asked."""

from __future__ import annotations

import threading
from typing import Any

from torch.utils import _python_dispatch as dispatch

from ..contract.spec import Contract

__all__ = ["Process", "active", "enabled"]


class Process:
    """What `isogemm.torch.enable` has registered."""

    lock = threading.Lock()
    library: Any = None
    options: tuple[bool, bool] = (True, True)  # rows, attention
    contract: Contract | None = None
    stance: Any = None  # torch's compiler's, which knows the one before


def active() -> bool:
    """Whether products of this thread are routed now: inside `invariant`, or after `enable`."""
    return Process.library is not None or any(
        getattr(mode, "routes_products", False) for mode in dispatch._get_current_dispatch_mode_stack()
    )


def enabled() -> bool:
    """Whether `enable` is in force."""
    return Process.library is not None
