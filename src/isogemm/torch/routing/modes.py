"""torch's stacks of modes on this thread: one mode more, one less wherever it lies, or none for a while."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _python_dispatch as dispatch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["aside", "pushed", "removed"]


class pushed:
    """A dispatch mode on this thread's stack, without the process-wide flags that ``with mode`` sets as well."""

    def __init__(self, mode: TorchDispatchMode) -> None:
        self.mode = mode

    def __enter__(self) -> None:
        dispatch._push_mode(self.mode)

    def __exit__(self, *_: object) -> None:
        removed(self.mode, torch._C._len_torch_dispatch_stack, dispatch._pop_mode, dispatch._push_mode)


class aside:
    """No dispatch mode on this thread meanwhile: what a replaced call computes inside is its own."""

    def __enter__(self) -> None:
        self.modes: list[Any] = []
        while torch._C._len_torch_dispatch_stack():
            self.modes.append(dispatch._pop_mode())

    def __exit__(self, *_: object) -> None:
        while self.modes:
            dispatch._push_mode(self.modes.pop())


def removed(mode: Any, length: Callable[[], int], pop: Callable[[], Any], push: Callable[[Any], None]) -> None:
    """Take one mode off a stack of this thread, wherever it lies: two generators need not leave in order."""
    above = []
    while length():
        top = pop()
        if top is mode:
            break
        above.append(top)
    for other in reversed(above):
        push(other)
