"""Operations along rows as torch operators, and the way that each call takes.

For compiled code there is one operator for each operation, isogemm::rms_norm_forward and so on, with nothing between it
and the kernel: compiled code calls them one by one, so that what stands before a kernel is the time of a small step.
Operations that a device has one kernel for (`rope_pair`, `norm_rope_pair`, `add_rms_norm`) are one operator too, where
torch records no gradients. Where it does, an operation is one of those of `isogemm.torch.rows.differentiable`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from ..operator import Reverse, define_forward, forward_alone, is_compiling, records, row_way
from .differentiable import WithGradient
from .direct import direct, fused
from .gradients import Grads, check_order
from .signature import dtype_of, signature
from .table import ROWS, fake, schema

Pair = tuple[Tensor, Tensor]
OPERATORS: dict[str, Any] = {}  # without gradients
_DIFFERENTIABLE: dict[str, WithGradient] = {}


def along(kind: str, tensors: tuple[Any, ...], options: tuple[Any, ...], order: str = "chain") -> Tensor:
    """An operation of `ROWS`, recorded for its gradients where torch records them; `order` is that of sums over rows.

    While torch.compile or a trace looks on, it is an operator that they do not look into, and so is its gradient.
    """
    if order != "chain" and not is_compiling():  # compiled code is told where its gradients are made
        check_order(order)
    way = row_way(kind, tensors)
    if way == "direct":
        return direct(kind, tensors, options)
    if way == "graph":
        return _Along.apply(kind, options, order, _DIFFERENTIABLE[kind].buffers(tensors, order), *tensors)
    options = _as_operators_take(options)
    if way == "forward":
        found: Tensor = OPERATORS[kind](*tensors, *options)
        return found
    return _DIFFERENTIABLE[kind](tensors, options, order)


def _as_operators_take(options: tuple[Any, ...]) -> tuple[Any, ...]:
    """``out_dtype``, the last, as one of torch's."""
    return options if not options or options[-1] is None else (*options[:-1], dtype_of(None, options[-1]))


def together(kind: str, tensors: tuple[Any, ...], options: tuple[Any, ...], order: str = "chain") -> Pair:
    """Both results of an operation of `FUSED`; on a device from one launch, where no gradient is recorded."""
    if order != "chain" and not is_compiling():
        check_order(order)
    if _fits(kind, tensors) and not records(*tensors):
        found: Pair | None = fused(kind, tensors, options)
        if found is not None:
            return found
    if not forward_alone():
        return FUSED[kind](partial(along, order=order), tensors, options)
    made: Pair = OPERATORS[kind](*tensors, *_as_operators_take(options))
    return made


def _fits(kind: str, tensors: tuple[Any, ...]) -> bool:
    """Whether a device's kernel may have both: of a rotation, where the rows of both are alike."""
    x, y = tensors[:2]
    if not isinstance(x, Tensor) or not x.is_cuda:
        return False
    if kind == "add_rms_norm":
        return True
    return isinstance(y, Tensor) and y.dtype == x.dtype and y.dim() > 0 < x.dim() and y.shape[-1] == x.shape[-1]


class _Along(Reverse):
    @staticmethod
    def forward(
        ctx: Any, kind: str, options: tuple[Any, ...], order: str, buffers: Grads, *tensors: Tensor | None
    ) -> Tensor:
        ctx.call = (kind, options, order, buffers)
        _DIFFERENTIABLE[kind].check(ctx.needs_input_grad[4:], order)
        ctx.save_for_backward(*tensors)
        return direct(kind, tensors, options)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        kind, options, order, buffers = ctx.call
        needs, of = ctx.needs_input_grad[4:], _DIFFERENTIABLE[kind]
        found = of.back(ctx, dy, needs, buffers, options, order, by_operator=is_compiling())
        return None, None, None, None, *found


def define_row(kind: str) -> None:
    """The operators of an operation of `ROWS`."""
    count, (operands, options) = len(signature(kind).operands), schema(kind)

    def body(*given: Any) -> Tensor:
        return direct(kind, given[:count], given[count:])

    OPERATORS[kind] = define_forward(
        kind, f"({operands}{options}) -> Tensor", {"CPU": body, "CUDA": body},
        lambda *given: fake(kind, given[:count], given[count:]),
    )  # fmt: skip
    _DIFFERENTIABLE[kind] = WithGradient(kind, OPERATORS[kind])


for _kind in ROWS:
    define_row(_kind)


Step = Callable[[str, tuple[Any, ...], tuple[Any, ...]], Tensor]


def _add_rms_norm(step: Step, tensors: tuple[Any, ...], options: tuple[Any, ...]) -> Pair:
    x, residual, weight = tensors
    h = step("add", (x, residual), (None,))
    return step("rms_norm", (h, weight), options), h


def _rope_pair(step: Step, tensors: tuple[Any, ...], options: tuple[Any, ...]) -> Pair:
    q, k, *tables = tensors
    return step("rope", (q, *tables), options), step("rope", (k, *tables), options)


def _norm_rope_pair(step: Step, tensors: tuple[Any, ...], options: tuple[Any, ...]) -> Pair:
    q, k, q_weight, k_weight, *tables = tensors
    q, k = (step("rms_norm", (x, weight), (options[0], None)) for x, weight in ((q, q_weight), (k, k_weight)))
    return _rope_pair(step, (q, k, *tables), options[1:])


# Several operations that a device has one kernel for, made of their parts: the bits are those of the parts.
FUSED: dict[str, Callable[[Step, tuple[Any, ...], tuple[Any, ...]], Pair]] = {
    "add_rms_norm": _add_rms_norm,
    "rope_pair": _rope_pair,
    "norm_rope_pair": _norm_rope_pair,
}


def _define_fused(kind: str, tensors: str, options: str) -> None:
    count = tensors.count("Tensor")

    def body(*given: Any) -> Pair:
        found: Pair | None = fused(kind, given[:count], given[count:]) if _fits(kind, given) else None
        return FUSED[kind](direct, given[:count], given[count:]) if found is None else found

    def shown(x: Tensor, y: Tensor, *rest: Any) -> Pair:
        first = y if kind == "add_rms_norm" else x
        second = y.dtype if kind == "add_rms_norm" else rest[-1] or y.dtype
        return x.new_empty(x.shape, dtype=rest[-1] or first.dtype), y.new_empty(y.shape, dtype=second)

    OPERATORS[kind] = define_forward(
        kind, f"({tensors}, {options}, ScalarType? out_dtype) -> (Tensor, Tensor)", {"CPU": body, "CUDA": body}, shown
    )


_define_fused("add_rms_norm", "Tensor x, Tensor residual, Tensor? weight", "float eps")
_define_fused("rope_pair", "Tensor q, Tensor k, Tensor cos, Tensor sin", "bool interleaved")
_define_fused(
    "norm_rope_pair", "Tensor q, Tensor k, Tensor? q_weight, Tensor? k_weight, Tensor cos, Tensor sin",
    "float eps, bool interleaved",
)  # fmt: skip
