"""Gradients of operations along rows, in pinned orders.

Everything is float32 until the one rounding to the operand's dtype. Sums along rows, exp and sigmoid are those of
`isogemm.contract.rows`; what torch itself computes here are single sums, products and quotients of elements, which are
correctly rounded and know no order; roots are NumPy's. Sums over rows are products with a row of ones under ``fma`` and
the order of the call, from +0 or from the buffer that takes them. On a device most are kernels, with the bits of the
formulas.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...api.products import matmul
from ...base import arguments
from ...base.dtypes import FLOAT32
from ...contract.spec import Contract, as_contract
from ...errors import ContractError, ShapeError
from ...operands.memory import empty
from ...operands.tensors import memory
from ..device import column
from ..gemm.buffers import advance
from .direct import direct, launched

Grads = tuple[Tensor | None, ...]
_FLOAT32 = torch.float32


class Recording(NamedTuple):
    """A call whose gradients are wanted: of each operand the buffer that takes its gradient, and whether it has one.

    `order` is that of sums over rows.
    """

    kind: str
    options: tuple[Any, ...]
    buffers: Grads
    needs: tuple[bool, ...]
    order: str

    def buffer(self, place: int, like: Tensor) -> Tensor | None:
        """The float32 buffer of an operand. Raises ShapeError: it has not the operand's shape."""
        found = self.buffers[place]
        if found is not None and (found.shape != like.shape or found.dtype is not _FLOAT32):
            value = f"{found.dtype} {tuple(found.shape)}"
            limit, nearest = "float32, the parameter's shape", tuple(like.shape)
            raise ShapeError("main_grad", limit=limit, value=value, nearest=nearest)
        if found is not None:
            torch.autograd.graph.increment_version(found)  # kernels write behind torch's back
        return found


@cache
def summing(order: str) -> Contract:
    """The contract of sums over rows in an order.

    Raises
    ------
    ContractError
        It is none of ``chain``, ``leafL`` and ``treeN``.
    """
    found = as_contract(f"fma/{order}")
    if found.order.kind == "lanes":
        raise ContractError("grad_order", limit="chain, leafL or treeN", value=order, nearest="leaf4096")
    return found


def check_order(order: Any) -> None:
    """Raise DTypeError or ContractError unless `summing` knows the order."""
    arguments.of_type("grad_order", order, str, "chain, leafL or treeN", "leaf4096")
    summing(order)


def softmax_back(p: Tensor, dy: Tensor) -> Tensor:
    """``p * (dy - sum(p * dy))`` for the result p, in float32."""
    return p * (dy - over_row("sum", p * dy))


def log_softmax_back(p: Tensor, dy: Tensor) -> Tensor:
    """``dy - p * sum(dy)`` for p, the exponential of the result, in float32."""
    return dy - p * over_row("sum", dy)


def norm_back(g: Tensor, h: Tensor, r: Tensor, *, centered: bool) -> Tensor:
    """``(g - h * mean(g * h)) * r``, `centered` with ``g - mean(g)``: g is ``dy * weight``, h is x normalized by r."""
    return ((g - over_row("mean", g) if centered else g) - h * over_row("mean", g * h)) * r


def scattered(ids: Tensor, dy: Tensor, count: int, dtype: Any, buffer: Tensor | None = None) -> Tensor:
    """[count, n]: rows of dy added, in ascending order in float32, to those of their ids; from +0, or in the buffer."""
    n = dy.shape[-1]
    if dy.is_cuda:
        total = dy.new_zeros(count, n, dtype=dtype) if buffer is None else buffer
        if dy.numel():  # ids sorted, equal ones in their order, so that each row of the table is one chain
            found, order = torch.sort(ids.reshape(-1).to(torch.int64), stable=True)
            column("row_sums", dy.device.type).table(found, order, dy, total, start=buffer is not None)
        return total
    total = torch.zeros(count, n, dtype=_FLOAT32, device="cpu") if buffer is None else buffer
    rows = dy.float().reshape(ids.numel(), n)
    np.add.at(memory("sums", total), memory("ids", ids.reshape(-1)), memory("dy", rows))
    return total.to(dtype)


def over_row(kind: str, x: Tensor, out_dtype: Any = None) -> Tensor:
    """The sum or mean of each row, kept as a dimension."""
    return direct(kind, (x,), (True, out_dtype))


def _inverse_root(square: Tensor, eps: float) -> Tensor:
    """``1 / sqrt(square + eps)``, by NumPy: torch's square root is not correctly rounded everywhere."""
    with np.errstate(all="ignore"):
        return torch.from_numpy(np.float32(1) / np.sqrt(square.numpy() + np.float32(eps)))


def _over_rows(of: Recording, place: int, like: Tensor | None, terms: Any) -> Tensor | None:
    """The sum of [..., n] over all rows as the gradient of operand `place`, or into that operand's buffer.

    `terms` are a tensor on the host, and on a device what `columns` takes: a term's number, x, dy and stats.
    """
    if like is None or not of.needs[place]:
        return None
    buffer, contract = of.buffer(place, like), summing(of.order)
    shape = (terms[2] if like.is_cuda else terms).shape
    count = math.prod(shape[:-1])
    if buffer is not None:
        advance(buffer, count, str(contract))
    if like.is_cuda:
        total = torch.empty(like.shape, dtype=like.dtype, device=like.device) if buffer is None else buffer
        sums = column("row_sums", like.device.type)
        sums.columns(*terms, total, order=contract.order, start=buffer is not None)
        return total if buffer is None else None
    flat, ones = terms.reshape(count, shape[-1]), torch.ones(1, count, dtype=_FLOAT32, device="cpu")
    if buffer is not None:
        matmul(ones, flat, out=buffer.unsqueeze(0), accumulate=True, contract=contract)
        return None
    found: Tensor = matmul(ones, flat, contract=contract).reshape(-1).to(like.dtype)
    return found


def _kernel(kind: str, operands: tuple[Tensor, ...], count: int, eps: float = 0.0) -> list[Tensor] | None:
    """`count` results like the first operand by a kernel of the host; None where one is not float32, or not dense."""
    if not all(x.dtype is _FLOAT32 and x.is_contiguous() for x in operands):
        return None
    made = [empty(tuple(operands[0].shape), FLOAT32) for _ in range(count)]
    arrays = [memory("operand", x) for x in operands] + [array for _, array in made]
    n = operands[0].shape[-1]
    column("row_gradients", "cpu").run(kind, arrays, operands[0].numel() // max(n, 1), n, eps)
    return [tensor for tensor, _ in made]


def norm(of: Recording, dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None = None) -> Grads:
    """`norm_back` of ``r = 1 / sqrt(mean(d**2) + eps)``, ``h = d * r``: d is x, or ``x - mean(x)`` in layer_norm."""
    eps, centered = of.options[0], of.kind == "layer_norm"
    if dy.is_cuda:
        outs = [(x.shape, x.dtype), ((*x.shape[:-1], 2), _FLOAT32)]  # 1 / root and mean of each row
        dx, stats = launched(f"{of.kind}_back", (x, dy, weight), (eps,), outs, eps=eps)
        dw = _over_rows(of, 1, weight, (2 if centered else 1, x, dy, stats))
        db = _over_rows(of, 2, bias, (0, x, dy, None))
    else:
        dx, terms = (weight is not None and _kernel(f"{of.kind}_back", (dy, x, weight), 2, eps)) or _of_norm(
            dy.float(), x, weight, eps, centered
        )
        dw = None if weight is None else _over_rows(of, 1, weight, terms)
        db = _over_rows(of, 2, bias, dy.float())
    return (dx, dw, db) if centered else (dx, dw)


def _of_norm(dy: Tensor, x: Tensor, weight: Tensor | None, eps: float, centered: bool) -> tuple[Tensor, Tensor]:
    """dx, and ``dy * h``, whose sum over rows is the gradient of the weight."""
    d = x.float()
    d = d - over_row("mean", d) if centered else d
    r = _inverse_root(over_row("mean", d * d), eps)
    h = d * r
    return norm_back(dy if weight is None else dy * weight.float(), h, r, centered=centered).to(x.dtype), dy * h


def softmax(of: Recording, dy: Tensor, x: Tensor) -> Grads:
    """`softmax_back`, and `log_softmax_back`."""
    if dy.is_cuda:
        return (launched(f"{of.kind}_back", (x, dy), (), [(x.shape, x.dtype)]),)
    p = direct("softmax", (x,), (_FLOAT32,))
    return ((softmax_back if of.kind == "softmax" else log_softmax_back)(p, dy.float()).to(x.dtype),)


def total(of: Recording, dy: Tensor, x: Tensor) -> Grads:
    """dy for every element of its row; for a mean ``dy / n``, a tensor: of a number, torch takes the reciprocal."""
    dy = dy.float() if of.options[0] else dy.float().unsqueeze(-1)
    if of.kind == "mean":
        dy = dy / torch.full((), max(x.shape[-1], 1), dtype=_FLOAT32, device=x.device)
    return (dy.to(x.dtype).expand(x.shape),)


def silu_mul(of: Recording, dy: Tensor, x: Tensor, y: Tensor) -> Grads:
    """``s = sigmoid(x)``, ``dx = (dy * y) * (s * (1 + x * (1 - s)))``, ``dy * (x * s)`` for y."""
    if dy.is_cuda:
        found: Grads = launched("silu_mul_back", (x, y, dy), (), [(x.shape, x.dtype), (x.shape, y.dtype)])
        return found
    if (both := _kernel("silu_mul_back", (dy, x, y), 2)) is not None:
        return tuple(both)
    wide, dy = x.float(), dy.float()
    s = direct("sigmoid", (wide,), (None,))
    return ((dy * y.float()) * _slope(wide, s)).to(x.dtype), (dy * (wide * s)).to(y.dtype)


def silu(of: Recording, dy: Tensor, x: Tensor) -> Grads:
    """``s = sigmoid(x)``, ``dy * (s * (1 + x * (1 - s)))``."""
    wide = x.float()
    return ((dy.float() * _slope(wide, direct("sigmoid", (wide,), (None,)))).to(x.dtype),)


def _slope(x: Tensor, s: Tensor) -> Tensor:
    """The derivative of ``x * s``, s being sigmoid(x)."""
    return s * (1 + x * (1 - s))


def sigmoid(of: Recording, dy: Tensor, x: Tensor) -> Grads:
    """``s = sigmoid(x)``, ``dy * (s * (1 - s))``."""
    s = direct("sigmoid", (x,), (_FLOAT32,))
    return ((dy.float() * (s * (1 - s))).to(x.dtype),)


def exp(of: Recording, dy: Tensor, x: Tensor) -> Grads:
    """``dy * exp(x)``."""
    return ((dy.float() * direct("exp", (x,), (_FLOAT32,))).to(x.dtype),)


def add(of: Recording, dy: Tensor, x: Tensor, y: Tensor) -> Grads:
    """dy for both."""
    return dy.float().to(x.dtype), dy.float().to(y.dtype)


def rope(of: Recording, dy: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> Grads:
    """Turned back: the same with -sin."""
    return direct("rope", (dy, cos, -sin), (of.options[0], x.dtype)), None, None


def embedding(of: Recording, dy: Tensor, weight: Tensor, ids: Tensor) -> Grads:
    """Rows of dy `scattered` to the rows of the table that they came from."""
    buffer = of.buffer(0, weight)
    found = scattered(ids, dy, len(weight), weight.dtype, buffer)
    return (found if buffer is None else None), None
