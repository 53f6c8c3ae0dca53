"""Operations along rows as torch operators, and the way that each call takes.

For compiled code that records no gradient there is one operator for each operation, isogemm::rms_norm_forward and so
on, with nothing between it and the kernel: compiled code calls them one by one, so that what stands before a kernel is
the time of a small step. Operations that a device has one kernel for (`rope_pair`, `norm_rope_pair`, `add_rms_norm`)
are one operator too. While torch records gradients, all are one operator, isogemm::along_rows, which has one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ...errors import OptionError
from ..operator import (
    Reverse,
    apart,
    asked_for,
    check_no_ddp,
    check_no_hooks,
    define,
    define_forward,
    forward_alone,
    once,
    records,
    row_way,
)
from .direct import direct, fused
from .gradients import Grads, Recording
from .signature import signature
from .table import ROWS, differentiated, fake, schema

Pair = tuple[Tensor, Tensor]
OPERATORS: dict[str, Any] = {}
# Of an operation: eps, keepdim, interleaved or ""; compilers trace calls, and warn of a function with a cache.
_OPTION: dict[str, str] = {}


def along(kind: str, tensors: tuple[Any, ...], options: tuple[Any, ...]) -> Tensor:
    """An operation of `ROWS`, recorded for its gradients where torch records them.

    While torch.compile or a trace looks on, it is an operator that they do not look into, and so is its gradient.
    """
    way = row_way(kind, tensors)
    if way == "direct":
        return direct(kind, tensors, options)
    if way == "graph":
        return _Along.apply(kind, options, _buffers(tensors), *tensors)
    if way == "forward":
        return OPERATORS[kind](*tensors, *options)
    three = (*tensors, None, None)[:3]
    option, out_dtype = _OPTION[kind], options[-1] if options else None
    numbers = (options[0], False) if option == "eps" else (0.0, bool(option) and options[0])
    return along_rows(kind, *three, *_buffers(three), *numbers, out_dtype)


def together(kind: str, tensors: tuple[Any, ...], options: tuple[Any, ...]) -> Pair:
    """Both results of an operation of `FUSED`; on a device from one launch, where no gradient is recorded."""
    if _fits(kind, tensors) and not records(*tensors):
        found: Pair | None = fused(kind, tensors, options)
        if found is not None:
            return found
    made: Pair = OPERATORS[kind](*tensors, *options) if forward_alone() else FUSED[kind](along, tensors, options)
    return made


def _fits(kind: str, tensors: tuple[Any, ...]) -> bool:
    """Whether a device's kernel may have both: of a rotation, where the rows of both are alike."""
    x, y = tensors[:2]
    if not isinstance(x, Tensor) or not x.is_cuda:
        return False
    if kind == "add_rms_norm":
        return True
    return isinstance(y, Tensor) and y.dtype == x.dtype and y.dim() > 0 < x.dim() and y.shape[-1] == x.shape[-1]


def _buffers(tensors: Grads) -> Grads:
    """Of each operand the float32 buffer that takes its gradient, or None."""
    found = tuple([getattr(t, "main_grad", None) for t in tensors])
    for t, buffer in zip(tensors, found, strict=True):
        if buffer is not None:
            check_no_ddp()
            check_no_hooks("main_grad", t)
    return found


def _check_constants(needs: Sequence[bool]) -> None:
    """Raise where the angles of a rotation want gradients."""
    if any(needs[1:]):
        raise OptionError("cos and sin", limit="constants", value="requires_grad=True", nearest="cos.detach()")


def _asked_for(ctx: Any, buffers: Grads, tensors: Sequence[Any]) -> Grads:
    """Of each operand the buffer, where a backward pass goes on to its parameter."""
    places = [sum(x is not None for x in tensors[:i]) for i in range(len(buffers))]
    return tuple([asked_for(ctx, i, buffer) for i, buffer in zip(places, buffers, strict=True)])


class _Along(Reverse):
    @staticmethod
    def forward(ctx: Any, kind: str, options: tuple[Any, ...], buffers: Grads, *tensors: Tensor | None) -> Tensor:
        ctx.call = (kind, options, buffers)
        if kind == "rope":
            _check_constants(ctx.needs_input_grad[3:])
        ctx.save_for_backward(*tensors)
        return direct(kind, tensors, options)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        (kind, options, buffers), tensors = ctx.call, ctx.saved_tensors  # once: a checkpoint makes them anew
        of = Recording(kind, options, _asked_for(ctx, buffers, tensors), ctx.needs_input_grad[3:])
        return (None, None, None, *once(kind, differentiated(of, dy, *tensors), dy, *tensors))


_OPERANDS = "Tensor first, Tensor? second, Tensor? third"
_BUFFERS = "Tensor? buffer, Tensor? second_buffer, Tensor? third_buffer"
_WRITTEN = "Tensor(a!)? buffer, Tensor(b!)? second_buffer, Tensor(c!)? third_buffer"
_OPTIONS = "float eps, bool flag, ScalarType? out_dtype"


def _own(kind: str, eps: float, flag: bool, out_dtype: Any) -> tuple[Any, ...]:
    """An operation's options, of those that one operator has for all of them."""
    if kind == "embedding":
        return ()
    option = _OPTION[kind]
    return (eps, out_dtype) if option == "eps" else (flag, out_dtype) if option else (out_dtype,)


def _count(kind: str) -> int:
    return len(signature(kind).operands)


def _of_any(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """An operation's `direct` or `fake` with the arguments that one operator has for all of them."""
    return lambda kind, *given: call(kind, given[: _count(kind)], _own(kind, *given[6:]))


def _backward(kind: str, dy: Tensor, *given: Any) -> tuple[Tensor, ...]:
    """The gradients of the operands of `along_rows`, empty where there is none; a buffer takes what is its."""
    tensors, needs, buffers = given[:3], given[3], given[4:7]
    of = Recording(kind, _own(kind, *given[7:]), buffers, tuple(needs))
    found = (*differentiated(of, dy, *tensors[: _count(kind)]), None, None)
    made: list[Tensor] = []
    for grad, need in zip(found, needs, strict=False):
        made.append(apart(grad, dy, *tensors, *made) if need and grad is not None else dy.new_empty(0))
    return tuple(made)


def _fake_backward(kind: str, dy: Tensor, *given: Any) -> tuple[Tensor, ...]:
    return tuple([
        t.new_empty(t.shape) if need and buffer is None else dy.new_empty(0)
        for t, need, buffer in zip(given[:3], given[3], given[4:7], strict=True)
    ])  # fmt: skip


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.kind, tensors, ctx.buffers, ctx.rest = inputs[0], inputs[1:4], inputs[4:7], inputs[7:]
    if ctx.kind == "rope":
        _check_constants(ctx.needs_input_grad[1:4])
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    needs = list(ctx.needs_input_grad[1:4])
    tensors = ctx.saved_tensors
    asked = _asked_for(ctx, ctx.buffers, tensors)
    buffers = [buffer if need else None for buffer, need in zip(asked, needs, strict=True)]
    found = along_rows_backward(ctx.kind, dy, *tensors, needs, *buffers, *ctx.rest)
    found = once(ctx.kind, found, dy, *tensors)
    places = zip(found, needs, buffers, strict=True)
    return None, *[grad if need and buffer is None else None for grad, need, buffer in places], *[None] * 6


# `flag` is keepdim of a sum, interleaved of a rotation.
along_rows = define(
    "along_rows", f"(str kind, {_OPERANDS}, {_BUFFERS}, {_OPTIONS}) -> Tensor", _of_any(direct), _of_any(fake),
    setup=_setup, backward=_differentiate,
)  # fmt: skip
# Three results: an operator that writes into its arguments may not return a list.
along_rows_backward = define(
    "along_rows_backward",
    f"(str kind, Tensor dy, {_OPERANDS}, bool[] needs, {_WRITTEN}, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    _backward, _fake_backward,
)  # fmt: skip


def define_row(kind: str) -> None:
    """The operator of an operation of `ROWS`, which does not record."""
    count = _count(kind)

    def body(*given: Any) -> Tensor:
        return direct(kind, given[:count], given[count:])

    _OPTION[kind] = signature(kind).option
    OPERATORS[kind] = define_forward(
        kind, schema(kind), {"CPU": body, "CUDA": body}, lambda *given: fake(kind, given[:count], given[count:])
    )


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
