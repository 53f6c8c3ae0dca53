"""Operations along rows as torch operators, for compiled code that records no gradient: isogemm::rms_norm_forward, ...

One operator for each operation, with a kernel for each device and nothing between: compiled code calls them one by one,
so that what stands before a kernel is the time of a small step. Those that have one kernel for several operations
(`rope_pair`, `norm_rope_pair`, `add_rms_norm`) are one operator too. While torch records gradients, `row_gradients`
uses another operator, which has one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..operator import define_forward
from . import cpu as row_calls
from . import cuda as row_cuda

__all__ = ["OPERATORS", "add_rms_norm", "norm_rope_pair", "rope_pair"]

Pair = tuple[Tensor, Tensor]
_HOST, _CUDA = row_calls.HOST, row_cuda.FORWARD

# What stands before `ScalarType? out_dtype`, and the name of the option in it, if there is one.
_KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "rms_norm": ("Tensor x, Tensor? weight, float eps", ("eps",)),
    "layer_norm": ("Tensor x, Tensor? weight, Tensor? bias, float eps", ("eps",)),
    "softmax": ("Tensor x", ()),
    "log_softmax": ("Tensor x", ()),
    "silu": ("Tensor x", ()),
    "sigmoid": ("Tensor x", ()),
    "exp": ("Tensor x", ()),
    "sum": ("Tensor x, bool keepdim", ("keepdim",)),
    "mean": ("Tensor x, bool keepdim", ("keepdim",)),
    "silu_mul": ("Tensor x, Tensor y", ()),
    "add": ("Tensor x, Tensor y", ()),
    "rope": ("Tensor x, Tensor cos, Tensor sin, bool interleaved", ("interleaved",)),
}


def _body(forward: Callable[..., Tensor], options: tuple[str, ...]) -> Callable[..., Tensor]:
    """`forward` with its options by place, as a dispatcher hands them over."""
    if not options:
        return lambda *given: forward(*given[:-1], out_dtype=given[-1])
    name = options[0]
    return lambda *given: forward(*given[:-2], out_dtype=given[-1], **{name: given[-2]})


def _fake(kind: str) -> Callable[..., Tensor]:
    def fake(x: Tensor, *rest: Any) -> Tensor:
        like = rest[0] if kind == "add" else x
        shape = tuple(x.shape)
        if kind in ("sum", "mean"):
            shape = (*shape[:-1], 1) if rest[0] else shape[:-1]
        return x.new_empty(shape, dtype=rest[-1] or like.dtype)

    return fake


def _define(kind: str, arguments: str, options: tuple[str, ...]) -> Any:
    schema = f"({arguments}, ScalarType? out_dtype) -> Tensor"
    bodies = {"CPU": _body(_HOST[kind], options), "CUDA": _body(_CUDA[kind], options)}
    return define_forward(kind, schema, bodies, _fake(kind))


OPERATORS: dict[str, Any] = {kind: _define(kind, *about) for kind, about in _KINDS.items()}
OPERATORS["embedding"] = define_forward(
    "embedding",
    "(Tensor weight, Tensor ids) -> Tensor",
    {"CPU": _HOST["embedding"], "CUDA": _CUDA["embedding"]},
    lambda weight, ids: weight.new_empty((*ids.shape, weight.shape[1])),
)


def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, out_dtype: Any) -> Pair:
    h = _HOST["add"](x, residual, out_dtype=None)
    return _HOST["rms_norm"](h, weight, eps=eps, out_dtype=out_dtype), h


def _add_rms_norm_cuda(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, out_dtype: Any) -> Pair:
    return row_cuda.add_rms_norm(x, residual, weight, eps=eps, out_dtype=out_dtype)


def _fake_add_rms_norm(x: Tensor, residual: Tensor, weight: Any, eps: float, out_dtype: Any) -> Pair:
    shape = x.shape
    return x.new_empty(shape, dtype=out_dtype or residual.dtype), x.new_empty(shape, dtype=residual.dtype)


def _rope_pair(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, out_dtype: Any) -> Pair:
    rope = (_CUDA if q.is_cuda else _HOST)["rope"]
    turned = [rope(x, cos, sin, interleaved=interleaved, out_dtype=out_dtype) for x in (q, k)]
    return turned[0], turned[1]


def _rope_pair_cuda(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, out_dtype: Any) -> Pair:
    if row_cuda.alike(q, k):
        found: Pair | None = row_cuda.rope_pair(q, k, cos, sin, interleaved=interleaved, out_dtype=out_dtype)
        if found is not None:
            return found
    return _rope_pair(q, k, cos, sin, interleaved, out_dtype)


def _fake_pair(q: Tensor, k: Tensor, *rest: Any) -> Pair:
    return q.new_empty(q.shape, dtype=rest[-1] or q.dtype), k.new_empty(k.shape, dtype=rest[-1] or k.dtype)


def _norm_rope_pair(
    q: Tensor, k: Tensor, q_weight: Any, k_weight: Any, cos: Tensor, sin: Tensor, eps: float, interleaved: bool,
    out_dtype: Any,
) -> Pair:  # fmt: skip
    norm = (_CUDA if q.is_cuda else _HOST)["rms_norm"]
    q, k = (norm(x, weight, eps=eps, out_dtype=None) for x, weight in ((q, q_weight), (k, k_weight)))
    return _rope_pair(q, k, cos, sin, interleaved, out_dtype)


def _norm_rope_pair_cuda(
    q: Tensor, k: Tensor, q_weight: Any, k_weight: Any, cos: Tensor, sin: Tensor, eps: float, interleaved: bool,
    out_dtype: Any,
) -> Pair:  # fmt: skip
    if row_cuda.alike(q, k):
        found: Pair | None = row_cuda.norm_rope_pair(
            q, k, q_weight, k_weight, cos, sin, eps=eps, interleaved=interleaved, out_dtype=out_dtype
        )
        if found is not None:
            return found
    return _norm_rope_pair(q, k, q_weight, k_weight, cos, sin, eps, interleaved, out_dtype)


_END = "ScalarType? out_dtype) -> (Tensor, Tensor)"
add_rms_norm: Any = define_forward(
    "add_rms_norm",
    f"(Tensor x, Tensor residual, Tensor? weight, float eps, {_END}",
    {"CPU": _add_rms_norm, "CUDA": _add_rms_norm_cuda},
    _fake_add_rms_norm,
)
rope_pair: Any = define_forward(
    "rope_pair",
    f"(Tensor q, Tensor k, Tensor cos, Tensor sin, bool interleaved, {_END}",
    {"CPU": _rope_pair, "CUDA": _rope_pair_cuda},
    _fake_pair,
)
norm_rope_pair: Any = define_forward(
    "norm_rope_pair",
    "(Tensor q, Tensor k, Tensor? q_weight, Tensor? k_weight, Tensor cos, Tensor sin, float eps, bool interleaved, "
    + _END,
    {"CPU": _norm_rope_pair, "CUDA": _norm_rope_pair_cuda},
    _fake_pair,
)
