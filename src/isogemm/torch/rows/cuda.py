"""Operations along rows of CUDA tensors: a call seen before goes straight to its launch, others are checked first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...backends.cuda.rows import run as rows
from ...errors import DTypeError, ShapeError
from ...operands.tensors import is_traced
from .checks import check_eps, check_row, check_rows, check_same, check_table, dtype_of, integers

__all__ = ["FORWARD", "add_rms_norm", "alike", "norm_rope_pair", "on_gpu", "quick", "rope_pair"]

is_compiling, is_grad_enabled = torch.compiler.is_compiling, torch.is_grad_enabled
_transforms, _forward_ad = torch._C._are_functorch_transforms_active, torch.autograd.forward_ad


def on_gpu(x: Any) -> bool:
    """Whether `x` is a tensor on a CUDA device."""
    return isinstance(x, Tensor) and x.is_cuda


def quick(kind: str, x: Any, y: Any, options: tuple[Any, ...]) -> Any:
    """The result of a call of two operands like one before, where nothing is recorded; else None."""
    if is_compiling() or is_grad_enabled() or not isinstance(x, Tensor) or not x.is_cuda:
        return None
    if _transforms() or _forward_ad._current_level >= 0 or is_traced():  # which ask for words, or for an operator
        return None
    return rows.known_two(kind, x, y, options)


def alike(q: Tensor, k: Any) -> bool:
    """Whether rows of two tensors fit one kernel."""
    return isinstance(k, Tensor) and k.dtype == q.dtype and k.dim() > 0 < q.dim() and k.shape[-1] == q.shape[-1]


def _norm(kind: str) -> Callable[..., Tensor]:
    biased = f"{kind} with a bias alone"

    def forward(x: Tensor, weight: Any = None, bias: Any = None, *, eps: float, out_dtype: Any = None) -> Tensor:
        options, tag = (eps, out_dtype), kind
        if bias is None:
            found = rows.known_one(kind, x, options) if weight is None else rows.known_two(kind, x, weight, options)
        else:
            tag = biased if weight is None else kind
            found = rows.known(tag, (x, bias) if weight is None else (x, weight, bias), options)
        if found is not None:
            return found
        check_rows("x", x)
        check_eps(eps)
        check_row("weight", weight, x)
        check_row("bias", bias, x)
        outs = [(x.shape, dtype_of(x, out_dtype))]
        return rows.run(kind, (x, None, weight, bias), options, outs, tag=tag, eps=eps)

    return forward


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Any, *, eps: float, out_dtype: Any = None
) -> tuple[Tensor, Tensor]:
    """``h = x + residual`` in residual's dtype, and its rms_norm: (norm, h)."""
    operands, options = (x, residual, weight, None), (eps, out_dtype)
    given = operands[:2] if weight is None else operands[:3]
    found: tuple[Tensor, Tensor] | None = rows.known("add_rms_norm", given, options)
    if found is not None:
        return found
    check_rows("x", x)
    check_eps(eps)
    check_same("residual", residual, x)
    check_row("weight", weight, x)
    outs = [(x.shape, dtype_of(residual, out_dtype)), (x.shape, residual.dtype)]
    found = rows.run("add_rms_norm", operands, options, outs, eps=eps)
    assert found is not None
    return found


def _alone(kind: str) -> Callable[..., Tensor]:
    def forward(x: Tensor, *, out_dtype: Any = None) -> Tensor:
        options = (out_dtype,)
        found = rows.known_one(kind, x, options)
        if found is not None:
            return found
        check_rows("x", x)
        return rows.run(kind, (x,), options, [(x.shape, dtype_of(x, out_dtype))])

    return forward


def _reduction(kind: str) -> Callable[..., Tensor]:
    def forward(x: Tensor, *, keepdim: bool, out_dtype: Any = None) -> Tensor:
        options = (bool(keepdim), out_dtype)
        found = rows.known_one(kind, x, options)
        if found is not None:
            return found
        check_rows("x", x)
        shape = (*x.shape[:-1], 1) if keepdim else x.shape[:-1]
        return rows.run(kind, (x,), options, [(shape, dtype_of(x, out_dtype))])

    return forward


def _two(kind: str, name: str) -> Callable[..., Tensor]:
    def forward(x: Tensor, y: Tensor, *, out_dtype: Any = None) -> Tensor:
        options = (out_dtype,)
        found = rows.known_two(kind, x, y, options)
        if found is not None:
            return found
        check_rows("x", x)
        check_same(name, y, x)
        like = y if kind == "add" else x
        return rows.run(kind, (x, y), options, [(x.shape, dtype_of(like, out_dtype))])

    return forward


def _turned(
    kind: str, xs: tuple[Any, Any], tables: tuple[Any, Any], weights: tuple[Any, Any], interleaved: bool, eps: float,
    out_dtype: Any,
) -> Any:  # fmt: skip
    """One rotated tensor, or two, from one launch; None where no kernel fits."""
    operands, options = (*xs, *tables, *weights), (bool(interleaved), eps, out_dtype)
    x = check_rows("x" if xs[1] is None else "q", xs[0])
    check_eps(eps)
    if x.shape[-1] % 2:
        n = x.shape[-1]
        raise ShapeError("last dimension of x", limit="an even number", value=n, nearest=n + 1)
    for name, t, weight in (("q", xs[0], weights[0]), ("k", xs[1], weights[1])):
        if t is None:
            continue
        check_rows(name, t, x.device)
        if t.shape[-1] != x.shape[-1] or t.dtype != x.dtype:
            kinds = [str(v.dtype) + str(tuple(v.shape)) for v in (t, x)]
            raise ShapeError(
                f"rows of {name}", limit="the length and dtype of those of q", value=kinds[0], nearest=kinds[1]
            )
        check_row("weight" if xs[1] is None else f"weight of {name}", weight, t)
        for table, angles in zip(("cos", "sin"), tables, strict=True):
            check_table(table, angles, t)
    if xs[1] is not None and (weights[0] is None) != (weights[1] is None):
        return None
    if weights[0] is not None and weights[1] is not None and weights[0].dtype != weights[1].dtype:
        return None
    outs = [(t.shape, dtype_of(x, out_dtype)) for t in xs if t is not None]
    return rows.run(kind, operands, options, outs, interleaved=interleaved, eps=eps)


def _rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, out_dtype: Any = None) -> Tensor:
    found = rows.known("rope", (x, cos, sin), (bool(interleaved), 0.0, out_dtype))
    if found is not None:
        return found
    found = _turned("rope", (x, None), (cos, sin), (None, None), interleaved, 0.0, out_dtype)
    if found is None:  # leading dimensions that are too many for one launch
        parts = [_rope(a, *_at(x, i, cos, sin), interleaved=interleaved, out_dtype=out_dtype) for i, a in enumerate(x)]
        return torch.stack(parts)
    return found


def _at(x: Tensor, i: int, *tables: Tensor) -> list[Tensor]:
    """Tables for ``x[i]``."""
    return [t if t.dim() < x.dim() else t[min(i, len(t) - 1)] for t in tables]


def rope_pair(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, out_dtype: Any = None) -> Any:
    """Both rotated; None where no kernel fits."""
    found = rows.known("rope_pair", (q, k, cos, sin), (bool(interleaved), 0.0, out_dtype))
    if found is not None:
        return found
    return _turned("rope_pair", (q, k), (cos, sin), (None, None), interleaved, 0.0, out_dtype)


def norm_rope_pair(
    q: Tensor, k: Tensor, q_weight: Any, k_weight: Any, cos: Tensor, sin: Tensor, *, eps: float, interleaved: bool,
    out_dtype: Any = None,
) -> Any:  # fmt: skip
    """Both normalised, rounded and rotated; None where no kernel fits."""
    given = (q, k, cos, sin) if q_weight is None else (q, k, cos, sin, q_weight, k_weight)
    found = rows.known("norm_rope_pair", given, (bool(interleaved), eps, out_dtype))
    if found is not None:
        return found
    return _turned("norm_rope_pair", (q, k), (cos, sin), (q_weight, k_weight), interleaved, eps, out_dtype)


def _embedding(weight: Tensor, ids: Tensor) -> Tensor:
    """Ids out of range are torch's to report, on the device: looking at them here would wait for it."""
    index = integers("ids", ids, weight.device)
    if weight.dim() != 2:
        raise ShapeError(
            "shape of weight", limit="(rows, n)", value=tuple(weight.shape), nearest="weight.reshape(-1, n)"
        )
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise DTypeError("dtype of weight", limit="float32, bfloat16 or float16", value=weight.dtype, nearest="float32")
    index = index if index.dtype in (torch.int32, torch.int64) else index.to(torch.int64)
    return torch.embedding(weight, index)


FORWARD: dict[str, Callable[..., Any]] = {
    "rms_norm": _norm("rms_norm"),
    "layer_norm": _norm("layer_norm"),
    "softmax": _alone("softmax"),
    "log_softmax": _alone("log_softmax"),
    "silu": _alone("silu"),
    "sigmoid": _alone("sigmoid"),
    "exp": _alone("exp"),
    "sum": _reduction("sum"),
    "mean": _reduction("mean"),
    "silu_mul": _two("silu_mul", "y"),
    "add": _two("add", "residual"),
    "rope": _rope,
    "embedding": _embedding,
}
