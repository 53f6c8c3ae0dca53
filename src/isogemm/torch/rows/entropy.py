"""Cross entropy of rows of scores, and its gradient: nothing as large as the scores lies between them.

The bits are those of the parts but for the sign of zeros: ``-log_softmax(x)[target]`` in float32, rounded once, and
the gradient that the parts have. What is kept of a row for the backward pass is its largest score and the sum of its
exponentials.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...base import arguments
from ...base.dtypes import FLOAT32
from ...errors import LimitError, OptionError, ShapeError
from ...operands import memory
from ...operands.tensors import rounded
from ..device import column
from ..operator import Reverse, define, define_forward, is_compiling, once, row_way
from .direct import launched
from .signature import dtype_of, integers, on_device, on_host

_FLOAT32 = torch.float32
_INTS = 2**63
_MOST = 2**24  # classes that float32, in which the host's kernels have them, tells apart

Pair = tuple[Tensor, Tensor]


def cross_entropy(x: Any, target: Any, ignore_index: int, out_dtype: Any) -> Tensor:
    """See `isogemm.torch.reductions.cross_entropy`."""
    ignore_index = arguments.whole("ignore_index", ignore_index)
    if not -_INTS <= ignore_index < _INTS:
        nearest = min(max(ignore_index, -_INTS), _INTS - 1)
        raise OptionError("ignore_index", limit="-2**63 to 2**63 - 1", value=ignore_index, nearest=nearest)
    given = x, target, ignore_index, None if out_dtype is None else dtype_of(None, out_dtype)
    way = row_way("cross_entropy", (x, target))
    if way == "graph":
        found: Tensor = _CrossEntropy.apply(*given)
        return found
    if way == "forward":
        return _forward_operator(*given)
    return (_forward if way == "direct" else _operator)(*given)[0]


def _forward(x: Any, target: Any, ignore_index: int, out_dtype: Any) -> Pair:
    """The losses of rows; and of each the largest score, and the sum of exponentials."""
    dtype, target = _checked(x, target, ignore_index, out_dtype)
    if x.is_cuda:
        outs = [(target.shape, dtype), ((*target.shape, 2), _FLOAT32)]
        operands, options = (x, None, target, None), (ignore_index, dtype)  # as the kernel has them
        made: Pair = launched("cross_entropy", operands, options, outs, ignore_index=ignore_index)
        return made
    found, out = memory.empty((*target.shape, 3), FLOAT32)
    column("rows", "cpu").run("cross_entropy", on_host("x", x, x), out, _classes(target, ignore_index).numpy())
    return rounded(found[..., 0], dtype), found[..., 1:].contiguous()


def _backward(dy: Tensor, x: Tensor, target: Tensor, sums: Tensor, ignore_index: int) -> Tensor:
    """The gradient of x."""
    target, dy = target.to(torch.int64), dy.resolve_neg()  # autograd negates some gradients lazily
    if x.is_cuda:
        operands, options, outs = (x, dy, target, sums), (ignore_index, x.dtype), [(x.shape, x.dtype)]
        made: Tensor = launched("cross_entropy_back", operands, options, outs, ignore_index=ignore_index)
        return made
    with torch.no_grad():
        rows, _ = on_host("x", x, x), on_host("dy", dy, dy)
        given = torch.cat([sums, dy.float().unsqueeze(-1), _classes(target, ignore_index)], -1)
        dx, out = memory.empty(tuple(x.shape), rows.dtype)
        column("rows", "cpu").run("cross_entropy_back", rows, out, given.numpy())
    return dx


def _classes(target: Tensor, ignore_index: int) -> Tensor:
    """float32 [..., 1], -1 for what is ignored, as the host's kernels have them."""
    return torch.where(target == ignore_index, -1, target).to(_FLOAT32).unsqueeze(-1)


def _checked(x: Any, target: Any, ignore_index: int, out_dtype: Any) -> tuple[Any, Tensor]:
    """The dtype of the losses, and int64 classes, of operands that fit. Classes on a device are looked at there."""
    there = isinstance(x, Tensor) and x.is_cuda
    shape = tuple((on_device if there else on_host)("x", x, x).shape)
    if not shape:
        raise ShapeError("dimensions of x", limit="at least 1", value=0, nearest="x.reshape(1)")
    target = integers("target", target, x.device).to(torch.int64)
    if tuple(target.shape) != shape[:-1]:
        limit, value = "that of x without its last dimension", tuple(target.shape)
        raise ShapeError("shape of target", limit=limit, value=value, nearest=shape[:-1])
    if not there:
        check_classes(target, shape[-1], ignore_index)
    return dtype_of(x, out_dtype), target


def check_classes(target: Tensor, n: int, ignore_index: int) -> None:
    """Raise unless classes on the host are of `n`, or ignored."""
    if n > _MOST:
        raise LimitError("elements of a row", limit=f"at most {_MOST}, on a CPU", value=n, nearest=_MOST)
    named = target[target != ignore_index]
    if not named.numel():
        return
    least, most = int(named.min()), int(named.max())
    if least < 0 or most >= n:
        bad, limit = least if least < 0 else most, f"0 to {n - 1}, or ignore_index, {ignore_index}"
        nearest = min(max(bad, 0), n - 1) if n else ignore_index
        raise OptionError("target", limit=limit if n else f"ignore_index, {ignore_index}", value=bad, nearest=nearest)


class _CrossEntropy(Reverse):
    @staticmethod
    def forward(ctx: Any, x: Tensor, target: Tensor, ignore_index: int, out_dtype: Any) -> Tensor:
        loss, sums = _forward(x, target, ignore_index, out_dtype)
        ctx.ignore_index = ignore_index
        ctx.save_for_backward(x, target, sums)
        return loss

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return _gradients(ctx, dy, _back_operator if is_compiling() else _backward)


def _gradients(ctx: Any, dy: Tensor, call: Callable[..., Tensor]) -> tuple[Any, ...]:
    x, target, sums = ctx.saved_tensors
    return *once("cross_entropy", [call(dy, x, target, sums, ctx.ignore_index)], dy, x), None, None, None


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Pair) -> None:
    x, target, ctx.ignore_index, _ = inputs
    ctx.save_for_backward(x, target, output[1])


def _differentiate(ctx: Any, dy: Tensor, _: Any) -> tuple[Any, ...]:
    return _gradients(ctx, dy, _back_operator)


def _fake(x: Tensor, target: Tensor, ignore_index: int, out_dtype: Any) -> Pair:
    return x.new_empty(target.shape, dtype=out_dtype or x.dtype), x.new_empty((*target.shape, 2), dtype=_FLOAT32)


def _loss(*given: Any) -> Tensor:
    return _forward(*given)[0]


_OPERANDS = "(Tensor x, Tensor target, int ignore_index, ScalarType? out_dtype)"
_operator = define(
    "cross_entropy", f"{_OPERANDS} -> (Tensor, Tensor)", _forward, _fake, setup=_setup, backward=_differentiate
)
_forward_operator = define_forward(
    "cross_entropy", f"{_OPERANDS} -> Tensor", {"CPU": _loss, "CUDA": _loss}, lambda *given: _fake(*given)[0]
)
_back_operator = define(
    "cross_entropy_backward", "(Tensor dy, Tensor x, Tensor target, Tensor sums, int ignore_index) -> Tensor",
    _backward, lambda dy, x, *_: x.new_empty(x.shape),
)  # fmt: skip
