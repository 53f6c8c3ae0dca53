"""What a CUDA device has: the kernels of its four columns, and what it remembers of them."""

from __future__ import annotations

import sys

from .driver import machine
from .gemm import choose

__all__ = ["forget"]


def forget() -> None:
    """Forget choosers, verdicts and calls seen before, so that new tables and records are read."""
    choose.forget()
    machine.forget()
    for name in ("calls", "gemm.list_calls", "quant.copy"):  # where they are loaded
        module = sys.modules.get(f"{__package__}.{name}")
        if module is not None:
            module.forget()
