"""The short paths for torch tensors, which `isogemm.api.products` asks before it goes the long way.

A backend's `recall` has the product, or None where the long way has to look; torch numbers accelerators from 0, and
gives the CPU no number.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ..backends import accelerator, backend
from ..operands.device_array import HOST
from ..operands.tensors import KINDS, is_traced, when_seen, wrote

__all__ = ["KINDS", "call", "call_items"]

_host, _device, _items = backend(HOST.kind).recall, accelerator().recall, accelerator().recall_items


def call(kind: str, a: Any, b: Any, bias: Any, out: Any, options: tuple[Any, ...]) -> Any:
    """The product, or None where the long way has to look; `a` is a tensor of a type in `KINDS`."""
    if _trace() is not None or _forward_ad._current_level >= 0 or (_depth() and is_traced()):
        return None
    found = (_device if a.get_device() >= 0 else _host)(kind, a, b, bias, out, options)
    if out is not None and found is not None:
        wrote(out)
    return found


def call_items(form: str, a: Any, b: Any, bias: Any, out: Any, options: tuple[Any, ...]) -> Any:
    """`call` for lists."""
    if _forward_ad._current_level >= 0:
        return None
    found = _items(form, a, b, bias, out, options)
    if out is not None and found is not None:
        wrote(out)
    return found


# What is under a trace, or may be part of a forward-mode gradient, takes the long way, which refuses it.
_trace: Any = None
_depth: Any = None
_forward_ad: Any = SimpleNamespace(_current_level=-1)


@when_seen
def _learn(torch: Any) -> None:
    global _trace, _depth, _forward_ad
    _trace, _depth = torch._C._get_tracing_state, torch._C._len_torch_dispatch_stack
    _forward_ad = torch.autograd.forward_ad
