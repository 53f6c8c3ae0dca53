"""The short path for torch CUDA tensors: a call seen before is a look-up, an allocation and a launch.

The key holds all that a call's validation and its choice of a kernel look at, except the addresses; of those it holds
the alignment. What no key can hold is looked at in every call: whether gradients are recorded, whether a negation is
pending, whether `out` keeps clear of what is read. Everything else takes the long way, which fills the table.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from ...problem.product import Addresses
from .weight import DeviceWeight

__all__ = ["KINDS", "call", "forget", "learn", "ready", "remember", "span"]

KINDS: dict[type, None] = {}  # torch's tensor types, once one was seen: importing torch is not ours to do
_MOST = 8192
_entries: dict[tuple[Any, ...], Entry] = {}
_new = tuple.__new__  # a NamedTuple's own constructor is a Python function


class Entry(NamedTuple):
    """A launch and what its result is made of."""

    launch: Any
    device: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    like: dict[str, Any]  # dtype and device of the result, as torch's keywords
    spans: tuple[int, ...]  # bytes from the first to behind the last element of a, b, bias and out
    accumulate: bool


def call(kind: str, a: Any, b: Any, bias: Any, out: Any, options: tuple[Any, ...]) -> Any:
    """The product of a call like one before; None where there was none, and where the long way has to look.

    Parameters
    ----------
    kind : str
        The public function.
    a : torch tensor, of a type in `KINDS`
    b, bias, out : object
    options : (accumulate, ...)
        What else the call was given. Values that are equal have to mean the same.
    """
    try:
        if type(b) is DeviceWeight and kind == "linear":
            b, facts = b.tensor, b.facts
        elif type(b) in KINDS:
            facts = (b.shape, b.stride(), b.dtype, b.get_device())
        else:
            return None
        at_a, at_b, at_bias, at_out = a.data_ptr(), b.data_ptr(), 0, 0
        common = at_a | at_b | 128
        graded = a.requires_grad or b.requires_grad
        lazy = a.is_neg() or b.is_neg()
        key: tuple[Any, ...] = (
            kind, a.shape, a.stride(), a.dtype, a.get_device(), facts, options,
        )  # fmt: skip
        for x in (bias, out):
            if x is not None:
                if type(x) not in KINDS:
                    return None
                address = x.data_ptr()
                common |= address
                if x is out:
                    at_out = address
                if x is bias:
                    at_bias = address
                graded, lazy = graded or x.requires_grad, lazy or x.is_neg()
                key += (x is out, x.shape, x.stride(), x.dtype, x.get_device())
        entry = _entries.get((*key, common & -common))
    except (RuntimeError, TypeError):  # no address (a function transform), no strides (sparse), no hash
        return None
    if entry is None or lazy or not (at_a and at_b) or type(options[0]) is not bool or (graded and _grad_enabled()):
        return None
    launch, device, shape, strides, like, spans, accumulate = entry
    if out is None:
        try:
            out = _empty_strided(shape, strides, **like)
        except RuntimeError:  # no memory: the long way says so in our words
            return None
        at_out = out.data_ptr()
        if at_out & 127:  # not torch's own allocator
            return None
    else:
        end = at_out + spans[3]
        if not at_out or not (
            (end <= at_a or at_a + spans[0] <= at_out)
            and (end <= at_b or at_b + spans[1] <= at_out)
            and (end <= at_bias or at_bias + spans[2] <= at_out)
        ):
            return None
    if bias is not None and not at_bias:
        return None
    launch(_new(Addresses, (at_a, at_b, at_out, at_out if accumulate else 0, at_bias)), _raw_stream(device))
    return out


_grad_enabled: Any = None
_empty_strided: Any = None
_raw_stream: Any = None
_trace: Any = None  # what is under a trace takes the long way, which refuses it
_depth: Any = None


def learn(torch: Any) -> None:
    """Take what the short path needs of torch, which somebody has imported."""
    global _grad_enabled, _empty_strided, _raw_stream, _trace, _depth
    _grad_enabled, _empty_strided = torch.is_grad_enabled, torch.empty_strided
    _trace, _depth = torch._C._get_tracing_state, torch._C._len_torch_dispatch_stack
    _raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # a build without CUDA has none
    KINDS.update({torch.Tensor: None, torch.nn.Parameter: None})


def ready() -> bool:
    """Whether torch is there, and known."""
    if not KINDS and "torch" in sys.modules:
        learn(sys.modules["torch"])
    return bool(KINDS)


def forget() -> None:
    """Empty the table: after this, every call is looked at and planned anew."""
    _entries.clear()


def remember(kind: str, operands: tuple[Any, ...], options: tuple[Any, ...], result: Any, backend: Any) -> None:
    """Enter a call that took the long way, if it was one launch on the operands' own addresses.

    Parameters
    ----------
    operands : (a, b, bias, out)
        As given to the public call.
    options : tuple
        As `call` gets them.
    result : object
        What the call returned.
    backend : Executor
        With the trace of the call.
    """
    a, b, bias, out = operands
    if len(backend.trace) != 1 or backend.trace[0][0] is None or backend.trace[0][2] is None or not ready():
        return
    launch, product, at = backend.trace[0]
    packed = type(b) is DeviceWeight
    tensor = b.tensor if packed else b
    given = [x for x in (bias, out) if x is not None]
    if any(type(x) not in KINDS for x in (a, tensor, result, *given)):
        return
    where = (a.data_ptr(), tensor.data_ptr(), 0 if bias is None else bias.data_ptr(), result.data_ptr())
    if where != (at.a, at.b, at.bias, at.out) or at.c not in (0, at.out):
        return
    facts = (tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device())
    key: tuple[Any, ...] = (kind, a.shape, a.stride(), a.dtype, a.get_device(), facts, options)
    for x in given:
        key += (x is out, x.shape, x.stride(), x.dtype, x.get_device())
    if len(_entries) >= _MOST:
        _entries.clear()
    spans = tuple(0 if x is None else span(x) for x in (a, tensor, bias, result))
    like = {"dtype": result.dtype, "device": result.device}
    _entries[(*key, product.align)] = Entry(
        launch, a.get_device(), tuple(result.shape), result.stride(), like, spans, product.accumulate
    )


def span(x: Any) -> int:
    """Bytes from the first to behind the last element of a tensor."""
    steps = sum((d - 1) * s for d, s in zip(x.shape, x.stride(), strict=True))
    return int((steps + 1) * x.element_size())
