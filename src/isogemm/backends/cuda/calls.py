"""The short path for torch CUDA tensors: a call seen before is a look-up, an allocation and a launch.

The key holds all that a call's validation and its choice of a kernel look at, except the addresses; of those it holds
the alignment. What no key can hold is looked at in every call: whether gradients are recorded, whether a negation is
pending, whether `out` keeps clear of what is read. Everything else takes the long way, which fills the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from ...base.seen import Seen
from ...operands.device_array import DeviceId
from ...operands.prepared import PreparedWeight
from ...operands.tensors import KINDS, ready, when_seen
from ...problem.product import Addresses

__all__ = ["KINDS", "DeviceWeight", "call", "ready", "remember", "span"]

_entries: Seen[SeenCall] = Seen(8192)
_new = tuple.__new__  # a NamedTuple's own constructor is a Python function


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class DeviceWeight(PreparedWeight):
    """A weight w [n, k] on a CUDA device: a reference, not a copy.

    The kernels read weights as checkpoints store them, so there is nothing to rearrange; what is prepared is all that
    a call would ask the tensor. Values written into `w` later are seen; `w` may not be resized.
    """

    shape: tuple[int, int]  # n and k
    tensor: Any  # the weight, detached
    facts: tuple[Any, ...]  # what a call's key says of the weight

    def __repr__(self) -> str:
        return f"DeviceWeight({self.n} x {self.k}, {self.dtype}, {self.tensor.device})"

    @property
    def place(self) -> DeviceId:
        """The weight's device."""
        return DeviceId("cuda", self.tensor.get_device())

    @property
    def array(self) -> Any:
        """The tensor."""
        return self.tensor

    @property
    def dtype(self) -> Any:
        """Element type of the weight."""
        return self.tensor.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the weight."""
        return int(self.tensor.nbytes)


class SeenCall(NamedTuple):
    """A launch and what its result is made of."""

    launch: Any  # a relay: what it holds may be replaced by a faster kernel with the same bits
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
    launch.now(_new(Addresses, (at_a, at_b, at_out, at_out if accumulate else 0, at_bias)), _raw_stream(device))
    return out


_grad_enabled: Any = None
_empty_strided: Any = None
_raw_stream: Any = None


@when_seen
def _learn(torch: Any) -> None:
    """Take what the short path needs of torch, which somebody has imported."""
    global _grad_enabled, _empty_strided, _raw_stream
    _grad_enabled, _empty_strided = torch.is_grad_enabled, torch.empty_strided
    _raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # a build without CUDA has none


def remember(kind: str, operands: tuple[Any, ...], options: tuple[Any, ...], result: Any, device: Any) -> None:
    """Enter a call that took the long way, if it was one launch on the operands' own addresses.

    `operands` and `options` are as `call` gets them, `result` is what the call returned, `device` has its trace.
    """
    a, b, bias, out = operands
    if len(device.trace) != 1 or device.trace[0][0] is None or device.trace[0][2] is None or not ready():
        return
    launch, product, at = device.trace[0]
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
    spans = tuple(0 if x is None else span(x) for x in (a, tensor, bias, result))
    like = {"dtype": result.dtype, "device": result.device}
    seen = SeenCall(launch, a.get_device(), tuple(result.shape), result.stride(), like, spans, product.accumulate)
    _entries.keep((*key, product.align), seen)


def span(x: Any) -> int:
    """Bytes from the first to behind the last element of a tensor."""
    steps = sum((d - 1) * s for d, s in zip(x.shape, x.stride(), strict=True))
    return int((steps + 1) * x.element_size())
