"""Whether products of this thread are routed, which scopes and the process-wide switch leave to be asked; compilers."""

from __future__ import annotations

import threading
from typing import Any

from torch.utils import _python_dispatch as dispatch

from ...contract.spec import Contract

__all__ = ["Process", "active", "enabled", "run_uncompiled"]


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


def run_uncompiled(function: Any) -> bool:
    """Mark a function's code: called by itself it is run as it is, and not compiled. False where torch cannot."""
    try:
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
    except ImportError:
        return False
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return True
