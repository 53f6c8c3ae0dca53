"""Whether products of this thread are routed, and torch's stacks of modes: one more, one less, or none."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _python_dispatch as dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from ...contract.spec import Contract


class Process:
    """What `isogemm.torch.enable` has registered."""

    lock = threading.Lock()
    library: Any = None
    options: tuple[bool, bool] = (True, True)  # rows, attention
    contract: Contract | None = None
    stance: Any = None  # the compiler's stance that `enable` has set, a context that puts back the one before


def active() -> bool:
    """Whether products of this thread are routed now: inside `invariant`, or after `enable`."""
    return Process.library is not None or any(
        getattr(mode, "routes_products", False) for mode in dispatch._get_current_dispatch_mode_stack()
    )


def enabled() -> bool:
    """Whether `enable` is in force."""
    return Process.library is not None


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
