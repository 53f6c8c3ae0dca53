"""Gradients by contract: which sums a backward pass takes, and in which order.

For Y = X @ W.T + bias, with the forward's arithmetic throughout:

- dX = dY @ W walks N as a `chain`: a row of dX is a function of that row of dY, whatever the batch.
- dW = dY.T @ X walks the rows in `grad_order`, by default ``leaf4096``: rows of zeros change nothing, and with
  `main_grad` the walk continues from the float32 buffer, so that micro-batches of whole leaves have the bits of one
  batch.
- dbias = ones @ dY walks the rows in `grad_order` as well.

Products of matrices, Y = alpha * A @ B + beta * C: dA = alpha * dY @ B.T is a chain, dB = alpha * A.T @ dY is in
`grad_order`, dC is beta * dY, summed where C was broadcast. No atomics anywhere.

The same formulas serve `torch.autograd.Function` in eager mode and the operators while torch compiles or transforms;
they are made of these products themselves, so they can be differentiated again.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from ...contract.spec import Contract
from ...errors import OptionError
from .. import ops
from ..ops import Tensor, resolved, with_order
from ..routing.elementwise import subnormals_kept

__all__ = ["grouped", "linear", "product", "refused"]


def _is_direct(*tensors: Tensor | None) -> bool:
    return not torch.compiler.is_compiling() and ops.is_plain(*tensors)


def _way(*tensors: Tensor | None) -> str:
    """How a product of these is called: direct, with a graph for its gradients, or as an operator that torch sees."""
    if torch.compiler.is_compiling():
        return "operator"
    records = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    if ops.is_plain(*tensors):
        return "graph" if records else "direct"
    _refuse_tangents(tensors)
    # torch.func's transforms differentiate a Function, not an operator; what a vmap hides cannot be seen from here.
    return "graph" if torch.is_grad_enabled() and ops.differentiates() else "operator"


def _refuse_tangents(tensors: tuple[Tensor | None, ...]) -> None:
    if torch.autograd.forward_ad._current_level < 0:
        return
    for x in tensors:
        if x is not None and torch.autograd.forward_ad.unpack_dual(x).tangent is not None:
            ops.refuse_forward_mode()


def product(
    c: Tensor | None,
    a: Tensor,
    b: Tensor,
    alpha: float = 1.0,
    beta: float = 0.0,
    contract: str = "",
    grad_order: str = "leaf4096",
    out_dtype: Any = None,
) -> Tensor:
    """alpha * a @ b + beta * c by the shortest way that the call allows: direct, with gradients, or as an operator."""
    if ops.is_direct(a, b, c):
        return ops.product(c, a, b, alpha, beta, contract, out_dtype)
    if _way(c, a, b) == "graph":
        return _function(_Product)(c, a, b, alpha, beta, contract, grad_order, out_dtype)
    return _product(c, a, b, alpha, beta, contract, grad_order, out_dtype)


def _product(c: Tensor | None, a: Tensor, b: Tensor, alpha: float, beta: float, *options: Any) -> Tensor:
    contract, grad_order, out_dtype = options
    if _is_direct(c, a, b):
        return ops.product(c, a, b, alpha, beta, contract, out_dtype)
    if ops.forward_alone():
        return ops.product_forward_op(c, a, b, alpha, beta, contract, out_dtype)
    flat = a.dim() == 2
    if c is None:
        return (ops.mm_op if flat else ops.bmm_op)(a, b, alpha, contract, grad_order, out_dtype)
    return (ops.addmm_op if flat else ops.baddbmm_op)(c, a, b, alpha, beta, contract, grad_order, out_dtype)


def linear(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    contract: str = "",
    grad_order: str = "leaf4096",
    out_dtype: Any = None,
    main_grad: Tensor | None = None,
    bias_main_grad: Tensor | None = None,
) -> Tensor:
    """x @ w.T + bias by the shortest way that the call allows."""
    options = (contract, grad_order, out_dtype)
    call = _function(_Linear) if _way(x, w, bias) == "graph" else _linear
    return call(x, w, bias, *options, main_grad, bias_main_grad)


def _linear(x: Tensor, w: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
    if _is_direct(x, w, bias):
        return ops.linear(x, w, bias, options[0], options[2])
    if ops.forward_alone():
        return ops.linear_forward_op(x, w, bias, options[0], options[2])
    return ops.linear_op(x, w, bias, *options)


def grouped(
    a: list[Tensor], b: list[Tensor], contract: str = "", grad_order: str = "leaf4096", out_dtype: Any = None
) -> list[Tensor]:
    """a[i] @ b[i] by the shortest way that the call allows."""
    if _way(*a, *b) == "graph":
        return list(_function(_Grouped)(contract, grad_order, out_dtype, *a, *b))
    return _grouped(a, b, contract, grad_order, out_dtype)


def _grouped(a: list[Tensor], b: list[Tensor], contract: str, grad_order: str, out_dtype: Any) -> list[Tensor]:
    if _is_direct(*a, *b):
        return ops.grouped(a, b, contract, out_dtype)
    return list(ops.grouped_op(a, b, contract, grad_order, out_dtype))


def _walk(a: Tensor, b: Tensor, out: Tensor, contract: str) -> None:
    if _is_direct(a, b, out):
        ops.walk(a, b, out, contract)
    else:
        ops.walk_op(a, b, out, contract)


def _fit(x: Tensor, other: Tensor, contract: Contract) -> Tensor:
    """`x` in a dtype that the contract multiplies with `other`: itself, float32 (exact), or rounded to that of `other`.

    Only a gradient of another dtype than the operands', which `out_dtype` makes, is ever changed.
    """
    if x.dtype is other.dtype:  # which the contract multiplied in the forward pass
        return x
    names = contract.operands
    if (
        contract.arithmetic == "fma"
        and torch.float32 in (x.dtype, other.dtype)
        and str(x.dtype).removeprefix("torch.") in names
    ):
        return x
    return x.to(torch.float32 if "float32" in names else other.dtype)


def _grads_of(a: Tensor, b: Tensor, dy: Tensor, alpha: float, ctx: Any, needs: tuple[bool, bool]) -> Any:
    """(dA, dB) of alpha * a @ b, or None where it is not needed."""
    contract, order = ctx.contract, ctx.grad_order
    da = db = None
    if needs[0]:
        da = product(None, _fit(dy, b, contract), b.mT, alpha, 0.0, ctx.chain, order, a.dtype)
    if needs[1]:
        db = product(None, a.mT, _fit(dy, a, contract), alpha, 0.0, ctx.rows, order, b.dtype)
    return da, db


def _sum_rows(dy: Tensor, ctx: Any, dtype: Any) -> Tensor:
    """ones [.., 1, m] @ dy [.., m, n], in the order of a weight's gradient.

    Under fma where the contract's arithmetic is not defined for the dtype of dy, as for a sum of sums.
    """
    ones = dy.new_ones(*dy.shape[:-2], 1, dy.shape[-2])
    defined = str(dy.dtype).removeprefix("torch.") in ctx.contract.operands
    contract = str(with_order(ctx.contract if defined else Contract(), ctx.grad_order))
    return product(None, ones, dy, 1.0, 0.0, contract, ctx.grad_order, dtype)


def _sum_to(dy: Tensor, shape: Any, scale: float, ctx: Any, dtype: Any) -> Tensor:
    """scale * dy, summed over the dimensions in which C, of that shape, was broadcast."""
    if scale == 0:  # C was not read
        return dy.new_zeros(shape, dtype=dtype)
    if dy.shape == shape:
        return _scaled(dy, scale).to(dtype)
    full = (*[1] * (dy.dim() - len(shape)), *shape)
    if dy.dim() == 3 and full[0] == 1 and dy.shape[0] != 1:
        if full[1] == 1 and dy.shape[1] != 1:  # one row for all items: one long walk over items and rows
            dy = dy.reshape(1, -1, dy.shape[-1])
        else:  # the batch is the sum's dimension
            dy = dy.flatten(1).unsqueeze(0)
            dy = _sum_rows(dy, ctx, torch.float32).reshape(1, *full[1:2], -1)
    if full[-2] == 1 and dy.shape[-2] != 1:
        dy = _sum_rows(dy, ctx, torch.float32)
    if full[-1] == 1 and dy.shape[-1] != 1:
        dy = _sum_rows(dy.mT, ctx, torch.float32).mT
    return _scaled(dy, scale).reshape(shape).to(dtype)


def _scaled(dy: Tensor, scale: float) -> Tensor:
    if scale == 1:
        return dy
    with nullcontext() if dy.is_cuda else subnormals_kept():
        return dy * scale


def _remember(ctx: Any, a: Tensor, b: Tensor, contract: str, grad_order: str) -> None:
    ctx.save_for_backward(a, b)
    ctx.grad_order = grad_order
    key = (contract, grad_order, a.dtype, b.dtype, a.device)
    found = _orders.get(key)
    if found is None:
        chosen = resolved(contract, a, b)  # an order that cannot be: say so before the forward pass returns
        found = _orders[key] = (chosen, str(with_order(chosen)), str(with_order(chosen, grad_order)))
    ctx.contract, ctx.chain, ctx.rows = found


_orders: dict[tuple[Any, ...], tuple[Contract, str, str]] = {}


class _Product(ops.Reverse):
    """alpha * a @ b + beta * c."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        c: Tensor | None, a: Tensor, b: Tensor, alpha: float, beta: float, contract: str, order: str, out_dtype: Any
    ) -> Tensor:
        return _product(c, a, b, alpha, beta, contract, order, out_dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        c, a, b, ctx.alpha, ctx.beta, contract, order, _ = inputs
        _remember(ctx, a, b, contract, order)
        ctx.c = None if c is None else (c.shape, c.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        a, b = ctx.saved_tensors
        dc = None
        if ctx.needs_input_grad[0]:
            dc = _sum_to(dy, ctx.c[0], ctx.beta, ctx, ctx.c[1])
        return (dc, *_grads_of(a, b, dy, ctx.alpha, ctx, ctx.needs_input_grad[1:3]), *[None] * 5)


class _Linear(ops.Reverse):
    """x @ w.T + bias."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        contract: str,
        order: str,
        out_dtype: Any,
        main_grad: Tensor | None,
        bias_main_grad: Tensor | None,
    ) -> Tensor:
        return _linear(x, w, bias, contract, order, out_dtype, main_grad, bias_main_grad)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, w, bias, contract, order, _, main_grad, bias_main_grad = inputs
        _remember(ctx, x, w, contract, order)
        ctx.main_grad, ctx.bias_main_grad = main_grad, bias_main_grad
        ctx.bias_dtype = None if bias is None else bias.dtype

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, w = ctx.saved_tensors
        contract, order = ctx.contract, ctx.grad_order
        dx = dw = db = None
        rows, flat = dy.reshape(-1, w.shape[0]), x.reshape(-1, w.shape[1])
        if ctx.needs_input_grad[0]:
            dx = product(None, _fit(rows, w, contract), w, 1.0, 0.0, ctx.chain, order, x.dtype).reshape(x.shape)
        rows, leaf = _fit(rows, flat, contract), ctx.rows
        if ctx.needs_input_grad[1]:
            if ctx.main_grad is None:
                dw = product(None, rows.mT, flat, 1.0, 0.0, leaf, order, w.dtype)
            else:
                _accumulate(rows.mT, flat, ctx.main_grad, leaf)
        if ctx.needs_input_grad[2]:
            if ctx.bias_main_grad is None:
                db = _sum_rows(rows, ctx, ctx.bias_dtype).reshape(-1)
            else:
                _accumulate(rows.new_ones(1, rows.shape[0]), rows, ctx.bias_main_grad.unsqueeze(0), leaf)
        return dx, dw, db, *[None] * 5


def _accumulate(a: Tensor, b: Tensor, out: Tensor, contract: str) -> None:
    if torch.is_grad_enabled():
        raise OptionError(
            "main_grad with create_graph=True",
            limit="one derivative: a buffer is not part of a graph",
            value="a second one",
            nearest="main_grad=None",
        )
    _walk(a, b, out, contract)


class _Grouped(ops.Reverse):
    """a[i] @ b[i] of flat arguments: the items of a, then those of b."""

    @staticmethod
    def forward(contract: str, order: str, out_dtype: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        half = len(tensors) // 2
        return tuple(_grouped(list(tensors[:half]), list(tensors[half:]), contract, order, out_dtype))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        contract, order, _, *tensors = inputs
        half = len(tensors) // 2
        _remember_lists(ctx, tensors[:half], tensors[half:], contract, order)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        return refused("grouped", "bmm, or one longer list")

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Any, ...]:
        da, db = _grouped_grads(ctx, list(dys))
        needs = ctx.needs_input_grad[3:]
        return None, None, None, *[g if need else None for g, need in zip((*da, *db), needs, strict=True)]


def refused(what: str, nearest: str) -> Any:
    """Refuse a product under vmap."""
    raise OptionError(f"vmap over {what}", limit="mm, addmm, bmm, baddbmm and linear", value=what, nearest=nearest)


def _remember_lists(ctx: Any, a: list[Tensor], b: list[Tensor], contract: str, order: str) -> None:
    ctx.save_for_backward(*a, *b)
    ctx.contract, ctx.grad_order = resolved(contract, a[0], b[0]) if a else Contract(), order
    with_order(ctx.contract, order)
    ctx.needs = (any(x.requires_grad for x in a), any(x.requires_grad for x in b))


def _grouped_grads(ctx: Any, dys: list[Tensor]) -> tuple[list[Any], list[Any]]:
    saved, contract, order = list(ctx.saved_tensors), ctx.contract, ctx.grad_order
    half = len(saved) // 2
    a, b = saved[:half], saved[half:]
    dys = [_fit(dy, x, contract) for dy, x in zip(dys, a, strict=True)]
    da: list[Any] = [None] * half
    db: list[Any] = [None] * half
    if ctx.needs[0]:
        da = grouped(dys, [x.mT for x in b], str(with_order(contract)), order, a[0].dtype)
    if ctx.needs[1]:
        db = grouped([x.mT for x in a], dys, str(with_order(contract, order)), order, b[0].dtype)
    return da, db


def _eager(function: Any) -> Any:
    """The same Function in torch's older form, whose call is 30 us shorter; torch.func needs the newer."""

    def forward(ctx: Any, *inputs: Any) -> Any:
        output = function.forward(*inputs)
        function.setup_context(ctx, inputs, output)
        return output

    body = {"forward": staticmethod(forward), "backward": staticmethod(function.backward), "__doc__": function.__doc__}
    return type(function.__name__, (ops.Reverse,), body)


_EAGER = {function: _eager(function) for function in (_Product, _Linear, _Grouped)}


def _function(function: Any) -> Any:
    """How to call a Function here."""
    return function.apply if torch._C._are_functorch_transforms_active() else _EAGER[function].apply


# The operators' gradients: the same functions, with the operators' arguments in their places.


def _setup_mm(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, alpha, contract, order, out_dtype = inputs
    _Product.setup_context(ctx, (None, a, b, alpha, 0.0, contract, order, out_dtype), output)


def _backward_mm(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    a, b = ctx.saved_tensors
    return (*_grads_of(a, b, dy, ctx.alpha, ctx, ctx.needs_input_grad[:2]), *[None] * 4)


def _setup_grouped(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    a, b, contract, order, _ = inputs
    _remember_lists(ctx, a, b, contract, order)


def _backward_grouped(ctx: Any, dys: list[Tensor]) -> tuple[Any, ...]:
    return *_grouped_grads(ctx, dys), None, None, None


for _op, _setup, _backward in (
    (ops.mm_op, _setup_mm, _backward_mm),
    (ops.bmm_op, _setup_mm, _backward_mm),
    (ops.addmm_op, _Product.setup_context, _Product.backward),
    (ops.baddbmm_op, _Product.setup_context, _Product.backward),
    (ops.linear_op, _Linear.setup_context, _Linear.backward),
    (ops.grouped_op, _setup_grouped, _backward_grouped),
):
    torch.library.register_autograd(_op, _backward, setup_context=_setup)
