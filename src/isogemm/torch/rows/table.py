"""Operations along rows as torch has them: one row each, beside `isogemm.contract.rows.OPERATIONS`.

The contract's table says what an operation is and which operands and results it has; from that come the checks of a
call, the operator's schema and its fake kernel. A row here adds its gradient, and the operators of aten's that are
routed to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..routing.elementwise import subnormals_kept
from . import gradients
from .gradients import Grads, Recording
from .signature import OPTION_TYPES, signature


class Along(NamedTuple):
    """What torch adds to one operation."""

    gradient: Callable[..., Grads]  # ``gradient(recording, dy, *operands)``, of each operand
    # operators of torch's, with their overloads, that are this along any dimensions: elements where the operation has
    # as many results as elements, else reductions
    aten: tuple[str, ...] = ()


ROWS: dict[str, Along] = {
    "rms_norm": Along(gradients.norm),
    "layer_norm": Along(gradients.norm),
    "softmax": Along(gradients.softmax, ("_softmax",)),
    "log_softmax": Along(gradients.softmax, ("_log_softmax",)),
    "sum": Along(gradients.total, ("sum", "sum.dim_IntList")),
    "mean": Along(gradients.total, ("mean", "mean.dim")),
    "silu_mul": Along(gradients.silu_mul),
    "silu": Along(gradients.silu),
    "sigmoid": Along(gradients.sigmoid),
    "exp": Along(gradients.exp),
    "add": Along(gradients.add),
    "rope": Along(gradients.rope),
    "embedding": Along(gradients.embedding),
}


def schema(kind: str) -> tuple[str, str]:
    """Operands and options as an operator's schema has them: the operation's own option, then ``out_dtype``."""
    operands, option, *_ = signature(kind)
    named = ", ".join(f"Tensor{'?' if extent == 'row' else ''} {name}" for name, extent in operands)
    return named, OPTION_TYPES[option] + ("" if kind == "embedding" else ", ScalarType? out_dtype")


def summed(kind: str) -> list[int]:
    """Operands whose gradients are sums over rows, which a buffer of a parameter may take."""
    if kind == "embedding":
        return [0]
    return [i for i, (_, extent) in enumerate(signature(kind).operands) if extent == "row"]


def fake(kind: str, tensors: tuple[Any, ...], options: tuple[Any, ...]) -> Tensor:
    """An empty result for operands that may have no memory."""
    x, about = tensors[0], signature(kind)
    if kind == "embedding":
        return x.new_empty((*tensors[1].shape, x.shape[1]))
    shape = tuple(x.shape)
    if about.reduces:
        shape = (*shape[:-1], 1) if options[0] else shape[:-1]
    return x.new_empty(shape, dtype=options[-1] or tensors[about.like].dtype)


def differentiated(of: Recording, dy: Tensor, *tensors: Tensor | None) -> Grads:
    """The gradient of each operand; none where a buffer takes it."""
    with torch.no_grad(), subnormals_kept(dy):
        return ROWS[of.kind].gradient(of, dy.resolve_neg(), *tensors)  # autograd negates some gradients lazily
