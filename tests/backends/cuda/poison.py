"""Results that a call allocates are NaNs until its kernels write them: a recycled block may hold the right bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

__all__ = ["poisoned"]

WORD = {2: 0x7FBE, 4: 0x7FC0BEEF}  # NaNs that no kernel returns


def filled(make: Callable[..., Any]) -> Callable[..., Any]:
    """`make`, and its CUDA tensors of floating point or of bytes are poisoned."""
    import torch

    words = {2: torch.int16, 4: torch.int32}

    def made(*args: Any, **options: Any) -> Any:
        x = make(*args, **options)
        if x.is_cuda and x.numel() and not torch.compiler.is_compiling():
            with torch.no_grad():
                if x.dtype is torch.uint8:
                    x.fill_(0xFF)
                elif x.is_floating_point() and x.element_size() in words:
                    x.view(words[x.element_size()]).fill_(WORD[x.element_size()])
        return x

    return made


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch.empty and its kin give on a GPU, workspaces included, holds NaNs. To be imported by a test module."""
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        from isogemm.backends.cuda.attention import meet
        from isogemm.backends.cuda.attention import run as attention
        from isogemm.backends.cuda.gemm.grouped import run as grouped
        from isogemm.backends.cuda.rows import run as rows

        grouped._learn()
        attention._load()
        rows._learn()
        for module, name in (
            (torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (attention, "_empty"),
            (grouped, "_memory"), (rows, "_like"), (rows, "_strided"), (meet, "workspace"),
        ):  # fmt: skip
            monkeypatch.setattr(module, name, filled(getattr(module, name)))
