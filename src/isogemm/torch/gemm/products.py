"""The products as torch operators: isogemm::mm, addmm, bmm, baddbmm, linear, grouped and walk_.

An operator is what torch.compile, torch.export, vmap and dispatch modes see of a product. It has the same body as the
direct call (`product`, `linear`, `grouped`, `walk`). All take tensors of any strides and return new contiguous ones.

Gradients are sums in the order of a contract. For Y = X @ W.T + bias, with the forward's arithmetic throughout:

- dX = dY @ W walks N as a `chain`: a row of dX is a function of that row of dY, whatever the batch.
- dW = dY.T @ X walks the rows in `grad_order`, by default ``leaf4096``: rows of zeros change nothing, and with
  `main_grad` the walk continues from the float32 buffer, so that micro-batches of whole leaves have the bits of one
  batch.
- dbias = ones @ dY walks the rows in `grad_order` as well.

Products of matrices, Y = alpha * A @ B + beta * C: dA = alpha * dY @ B.T is a chain, dB = alpha * A.T @ dY is in
`grad_order`, dC is beta * dY, summed where C was broadcast. No atomics anywhere.

The same formulas serve `torch.autograd.Function` in eager mode and the operators while torch compiles or transforms;
they are made of these products themselves, so they can be differentiated again. Under vmap a batch dimension more is a
stack of products, with the bits of each alone.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch

from ...api import products as api
from ...backends import open_device
from ...base.dtypes import FLOAT32, TORCH
from ...contract.spec import Contract, ContractLike, Order, as_contract
from ...errors import OptionError
from ...operands.device_array import DeviceId
from .. import operator
from ..gradient_buffers import asked_for, written_between
from ..operator import Operator, Tensor, define, define_forward, refuse_meta, refuse_vmap
from ..routing.elementwise import subnormals_kept
from .buffers import advance


def resolved(contract: str, a: Tensor, b: Tensor) -> Contract:
    """The contract of a product: the one asked for, or the default of the operands' device and dtypes."""
    if contract:
        return as_contract(contract)
    if a.device.type != "cuda":
        return Contract()
    ordinal = torch.cuda.current_device() if a.device.index is None else a.device.index
    types = (TORCH.get(str(x.dtype), FLOAT32) for x in (a, b))
    return open_device(DeviceId(a.device.type, ordinal)).default(*types)


@lru_cache(maxsize=256)
def with_order(contract: Contract, order: str = "chain") -> Contract:
    """The contract of the same arithmetic with another order.

    Raises
    ------
    ContractError
        No such order, or a leaf that is no multiple of the arithmetic's block.
    """
    return Contract(contract.arithmetic, Order()) if order == "chain" else as_contract(f"{contract.arithmetic}/{order}")


def product(c: Tensor | None, a: Tensor, b: Tensor, alpha: float, beta: float, contract: str, out_dtype: Any) -> Tensor:
    """alpha * a @ b + beta * c for matrices or equally long stacks of them, outside the gradient's graph."""
    if torch.is_grad_enabled():
        with torch.no_grad():
            return product(c, a, b, alpha, beta, contract, out_dtype)
    if contract == "fma/chain" and a.is_cpu:
        contract = ""  # the default there, whose calls are the shortest
    if out_dtype is a.dtype:
        out_dtype = None  # likewise
    if alpha == 1 and (c is None or beta == 0) and a.dim() == b.dim() == 2:
        return api.matmul(a, b, contract=contract or None, out_dtype=out_dtype)
    return scaled(c, a, b, alpha, beta, contract or None, out_dtype)


def scaled(
    c: Tensor | None, a: Tensor, b: Tensor, alpha: float, beta: float, contract: ContractLike | None, out_dtype: Any
) -> Tensor:
    """`product` of tensors that no gradient is recorded of."""
    call = api.gemm if a.dim() == 2 else api.gemm_strided_batched
    options: dict[str, Any] = {"alpha": alpha, "contract": contract, "out_dtype": out_dtype}
    if c is None or beta == 0:
        return call(a, b, **options)
    if beta == 1 and c.dim() == 1 and c.shape[0] == b.shape[-1]:  # a bias: the same sum, and read once
        return call(a, b, bias=c, **options)
    return call(a, b, c.expand(*a.shape[:-1], b.shape[-1]), beta=beta, **options)


def linear(x: Tensor, w: Tensor, bias: Tensor | None, contract: str, out_dtype: Any) -> Tensor:
    """x @ w.T + bias, outside the gradient's graph."""
    if torch.is_grad_enabled():
        with torch.no_grad():
            return api.linear(x, w, bias, contract=contract or None, out_dtype=out_dtype)
    return api.linear(x, w, bias, contract=contract or None, out_dtype=out_dtype)


def grouped(a: list[Tensor], b: list[Tensor], contract: str, out_dtype: Any) -> list[Tensor]:
    """a[i] @ b[i], outside the gradient's graph; memory of their own, as an operator's results must have."""
    with torch.no_grad():
        # Allocated one by one: an operator may not return views of one allocation.
        outs = [x.new_empty(x.shape[0], y.shape[-1], dtype=out_dtype or wider(x, y)) for x, y in zip(a, b, strict=True)]
        return list(api.gemm_grouped(a, b, out=outs, contract=contract or None, out_dtype=out_dtype))


def walk(a: Tensor, b: Tensor, out: Tensor, contract: str) -> None:
    """The walk over K of a @ b, continued from the float32 values in `out`."""
    with torch.no_grad():
        api.matmul(a, b, out=out, contract=contract, accumulate=True)


def wider(a: Tensor, b: Tensor) -> Any:
    """The result's dtype where none is asked for."""
    return b.dtype if b.dtype is torch.float32 else a.dtype


def fit(x: Tensor, other: Tensor, contract: Contract) -> Tensor:
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


def _factors_back(ctx: Any, dy: Tensor, needs: tuple[bool, bool]) -> Any:
    """(dA, dB) of alpha * a @ b, or None where it is not needed."""
    (a, b), contract, order = ctx.saved_tensors, ctx.contract, ctx.grad_order
    da = db = None
    if needs[0]:
        da = call_product(None, fit(dy, b, contract), b.mT, ctx.alpha, 0.0, ctx.chain, order, a.dtype)
    if needs[1]:
        db = call_product(None, a.mT, fit(dy, a, contract), ctx.alpha, 0.0, ctx.rows, order, b.dtype)
    return da, db


def _sum_rows(dy: Tensor, ctx: Any, dtype: Any) -> Tensor:
    """ones [.., 1, m] @ dy [.., m, n], in the order of a weight's gradient.

    Under fma where the contract's arithmetic is not defined for the dtype of dy, as for a sum of sums.
    """
    ones = dy.new_ones(*dy.shape[:-2], 1, dy.shape[-2])
    defined = str(dy.dtype).removeprefix("torch.") in ctx.contract.operands
    contract = str(with_order(ctx.contract if defined else Contract(), ctx.grad_order))
    return call_product(None, ones, dy, 1.0, 0.0, contract, ctx.grad_order, dtype)


def _addend_back(ctx: Any, dy: Tensor) -> Tensor:
    """dC: beta * dy, summed over the dimensions in which C was broadcast."""
    (shape, dtype), scale = ctx.c, ctx.beta
    if scale == 0:  # C was not read
        return dy.new_zeros(shape, dtype=dtype)
    if dy.shape == shape:
        return _scaled(dy, scale).to(dtype)
    full = (*[1] * (dy.dim() - len(shape)), *shape)
    if dy.dim() == 3 and full[0] == 1 and dy.shape[0] != 1:
        if full[1] == 1 and dy.shape[1] != 1:  # one row for all items: one long walk over items and rows
            dy = dy.reshape(1, dy.shape[0] * dy.shape[1], dy.shape[-1])
        else:  # the batch is the sum's dimension
            rows, columns = dy.shape[1:]
            dy = dy.flatten(1).unsqueeze(0)
            dy = _sum_rows(dy, ctx, torch.float32).reshape(1, rows, columns)
    if full[-2] == 1 and dy.shape[-2] != 1:
        dy = _sum_rows(dy, ctx, torch.float32)
    if full[-1] == 1 and dy.shape[-1] != 1:
        dy = _sum_rows(dy.mT, ctx, torch.float32).mT
    return _scaled(dy, scale).reshape(shape).to(dtype)


def _scaled(dy: Tensor, scale: float) -> Tensor:
    if scale == 1:
        return dy
    with subnormals_kept(dy):
        return dy * scale


def _remember(ctx: Any, a: Tensor, b: Tensor, contract: str, grad_order: str) -> None:
    ctx.save_for_backward(a, b)
    remember_orders(ctx, a, b, contract, grad_order)


def remember_orders(ctx: Any, a: Tensor, b: Tensor, contract: str, grad_order: str) -> None:
    """The forward product's contract, and those of its gradients: `ctx.chain` of dA, `ctx.rows` of dB."""
    ctx.grad_order = grad_order
    key = (contract, grad_order, a.dtype, b.dtype, a.device)
    found = _orders.get(key)
    if found is None:
        chosen = resolved(contract, a, b)  # an order that cannot be: say so before the forward pass returns
        found = _orders[key] = (chosen, str(with_order(chosen)), str(with_order(chosen, grad_order)))
    ctx.contract, ctx.chain, ctx.rows = found


_orders: dict[tuple[Any, ...], tuple[Contract, str, str]] = {}


def _setup_product(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    c, a, b, ctx.alpha, ctx.beta, contract, order, _ = inputs
    _remember(ctx, a, b, contract, order)
    ctx.c = None if c is None else (c.shape, c.dtype)


def _product_back(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    dc = _addend_back(ctx, dy) if ctx.needs_input_grad[0] else None
    return (dc, *_factors_back(ctx, dy, ctx.needs_input_grad[1:3]), *[None] * 5)


def _setup_linear(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, bias, contract, order, _, ctx.main_grad, ctx.bias_main_grad = inputs
    written_between(ctx.main_grad, ctx.bias_main_grad)
    _remember(ctx, x, w, contract, order)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _linear_back(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x, w = ctx.saved_tensors
    contract, order = ctx.contract, ctx.grad_order
    dx = dw = db = None
    count = math.prod(x.shape[:-1])  # not -1, which nothing says where a row is empty; Size.numel() is one size alone
    rows, flat = dy.reshape(count, w.shape[0]), x.reshape(count, w.shape[1])
    if ctx.needs_input_grad[0]:
        dx = call_product(None, fit(rows, w, contract), w, 1.0, 0.0, ctx.chain, order, x.dtype).reshape(x.shape)
    rows = fit(rows, flat, contract)
    if ctx.needs_input_grad[1]:
        buffer = asked_for(ctx, 1, ctx.main_grad)
        if buffer is None:
            dw = call_product(None, rows.mT, flat, 1.0, 0.0, ctx.rows, order, w.dtype)
        else:
            accumulate(rows.mT, flat, buffer, ctx.rows)
    if ctx.needs_input_grad[2]:
        buffer = asked_for(ctx, 2, ctx.bias_main_grad)
        if buffer is None:
            db = _sum_rows(rows, ctx, ctx.bias_dtype).reshape(-1)
        else:
            accumulate(rows.new_ones(1, rows.shape[0]), rows, buffer.unsqueeze(0), ctx.rows)
    return dx, dw, db, *[None] * 5


def accumulate(a: Tensor, b: Tensor, out: Tensor, contract: str) -> None:
    """`walk` as part of a backward pass.

    Raises
    ------
    OptionError
        The pass is recorded itself, or begins in the middle of a leaf.
    """
    refuse_recorded()
    (_continue if operator.watched(a, b, out) == "direct" else walk_op)(a, b, out, contract)


def _continue(a: Tensor, b: Tensor, out: Tensor, contract: str) -> None:
    """`walk`, from the beginning of a leaf."""
    advance(out, a.shape[1], contract)
    walk(a, b, out, contract)


def refuse_recorded() -> None:
    """Raise where a backward pass that writes to buffers is recorded itself."""
    if torch.is_grad_enabled():
        raise OptionError(
            "main_grad with create_graph=True", limit="one derivative: a buffer is not part of a graph",
            value="a second one", nearest="main_grad=None",
        )  # fmt: skip


def _setup_grouped(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    contract, order, _, *tensors = inputs
    a, b = _halves(tensors)
    ctx.save_for_backward(*tensors)
    ctx.contract, ctx.grad_order = resolved(contract, a[0], b[0]) if a else Contract(), order
    with_order(ctx.contract, order)
    ctx.needs = (any(x.requires_grad for x in a), any(x.requires_grad for x in b))


def _grouped_grads(ctx: Any, dys: Any) -> tuple[list[Any], list[Any]]:
    contract, order = ctx.contract, ctx.grad_order
    a, b = _halves(ctx.saved_tensors)
    dys = [fit(dy, x, contract) for dy, x in zip(dys, a, strict=True)]
    da: list[Any] = [None] * len(a)
    db: list[Any] = [None] * len(a)
    if ctx.needs[0]:
        da = call_grouped(dys, [x.mT for x in b], str(with_order(contract)), order, a[0].dtype)
    if ctx.needs[1]:
        db = call_grouped([x.mT for x in a], dys, str(with_order(contract, order)), order, b[0].dtype)
    return da, db


def _grouped_back(ctx: Any, *dys: Tensor) -> tuple[Any, ...]:
    da, db = _grouped_grads(ctx, dys)
    needs = ctx.needs_input_grad[3:]
    return None, None, None, *[g if need else None for g, need in zip((*da, *db), needs, strict=True)]


def _halves(tensors: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The items of a, and those of b behind them."""
    half = len(tensors) // 2
    return list(tensors[:half]), list(tensors[half:])


def _lead(x: Tensor, dim: int | None, size: int) -> Tensor:
    """The batch dimension first; a tensor that has none gets one of stride 0."""
    return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)


def _stacked(
    info: Any, in_dims: Any, c: Tensor | None, a: Tensor, b: Tensor, alpha: float, beta: float, *options: Any
) -> tuple[Tensor, int]:
    """vmap of a product: a stack of products, or one stack of all items of the stacks."""
    size = info.batch_size
    a, b = _lead(a, in_dims[1], size), _lead(b, in_dims[2], size)
    if c is not None:
        c = _lead(c, in_dims[0], size)
        c = c.reshape(size, *[1] * (a.dim() - c.dim()), *c.shape[1:])  # missing dimensions go behind the batch's
    if a.dim() == 3:
        return _by_operator(c, a, b, alpha, beta, *options), 0
    if c is not None:
        c = c.expand(size, *a.shape[1:-1], b.shape[-1]).flatten(0, 1)
    found = _by_operator(c, a.flatten(0, 1), b.flatten(0, 1), alpha, beta, *options)
    return found.unflatten(0, (size, a.shape[1])), 0


def _stacked_linear(
    info: Any, in_dims: Any, x: Tensor, w: Tensor, bias: Tensor | None, contract: str, order: str, out_dtype: Any,
    *buffers: Tensor | None,
) -> Any:  # fmt: skip
    if any(buffer is not None for buffer in buffers):
        refuse_vmap("linear with main_grad", "call it outside vmap: one buffer has one order of writers")()
    size = info.batch_size
    x = _lead(x, in_dims[0], size)
    if in_dims[1] is None and (bias is None or in_dims[2] is None):
        return linear_op(x, w, bias, contract, order, out_dtype), 0
    w, shape = _lead(w, in_dims[1], size), x.shape
    c = None if bias is None else _lead(bias, in_dims[2], size).unsqueeze(1)
    y = _by_operator(c, x.reshape(size, -1, shape[-1]), w.mT, 1.0, 1.0, contract, order, out_dtype)
    return y.reshape(*shape[:-1], w.shape[1]), 0


def _by_operator(c: Tensor | None, a: Tensor, b: Tensor, alpha: float, beta: float, *options: Any) -> Tensor:
    flat = a.dim() == 2
    if c is None:
        return (mm_op if flat else bmm_op)(a, b, alpha, *options)
    return (addmm_op if flat else baddbmm_op)(c, a, b, alpha, beta, *options)


def _fake_product(
    c: Tensor | None, a: Tensor, b: Tensor, alpha: float, beta: float, contract: str, order: str, out_dtype: Any
) -> Tensor:
    refuse_meta(a, b, c)
    with_order(resolved(contract, a, b), order)  # an unknown contract or order is an error while tracing
    torch._check(a.shape[-1] == b.shape[-2], lambda: f"inner dimensions differ: {tuple(a.shape)} and {tuple(b.shape)}")
    return a.new_empty(*a.shape[:-1], b.shape[-1], dtype=out_dtype or wider(a, b))


def _fake_linear(
    x: Tensor, w: Tensor, bias: Tensor | None, contract: str, order: str, out_dtype: Any, *buffers: Tensor | None
) -> Tensor:
    refuse_meta(x, bias)
    return _fake_product(None, x, w.mT, 1.0, 0.0, contract, order, out_dtype)


def _fake_grouped(a: list[Tensor], b: list[Tensor], *options: Any) -> list[Tensor]:
    return [_fake_product(None, x, y, 1.0, 0.0, *options) for x, y in zip(a, b, strict=True)]


def _fake_walk(a: Tensor, b: Tensor, out: Tensor, contract: str) -> None:
    torch._check(a.shape[1] == b.shape[0], lambda: f"inner dimensions differ: {tuple(a.shape)} and {tuple(b.shape)}")


def _without_c(function: Any) -> Any:
    """A function of a product for operators that have neither C nor beta."""
    return lambda a, b, alpha, *options: function(None, a, b, alpha, 0.0, *options)


def _without_order(function: Any) -> Any:
    """A function for an operator that has no order of gradients, of which there are none."""
    return lambda *given: function(*given[:-1], "chain", given[-1])


def _product(c: Tensor | None, a: Tensor, b: Tensor, alpha: float, beta: float, *options: Any) -> Tensor:
    return product(c, a, b, alpha, beta, options[0], options[2])


def _linear(x: Tensor, w: Tensor, bias: Tensor | None, contract: str, order: str, out_dtype: Any, *_: Any) -> Tensor:
    return linear(x, w, bias, contract, out_dtype)


def _forward_product(*given: Any) -> Tensor:
    found: Tensor = product_forward_op(*given[:6], given[7])
    return found


def _forward_linear(*given: Any) -> Tensor:
    found: Tensor = linear_forward_op(*given[:4], given[5])
    return found


_OPTIONS = 'str contract="", str grad_order="leaf4096", ScalarType? out_dtype=None'
_MM = f"(Tensor a, Tensor b, float alpha=1.0, {_OPTIONS}) -> Tensor"
_ADDMM = f"(Tensor c, Tensor a, Tensor b, float alpha=1.0, float beta=1.0, {_OPTIONS}) -> Tensor"
_LINEAR = f"(Tensor x, Tensor w, Tensor? bias, {_OPTIONS}, Tensor? main_grad=None, Tensor? bias_main_grad=None)"
# No defaults: a gradient of lists has to have the structure of the arguments, of which the dispatcher drops defaults.
_LISTS = "(Tensor[] a, Tensor[] b, str contract, str grad_order, ScalarType? out_dtype) -> Tensor[]"

mm_op, bmm_op = (
    define(
        name, _MM, _without_c(_product), _without_c(_fake_product),
        setup=lambda ctx, inputs, output: _setup_product(ctx, (None, *inputs[:3], 0.0, *inputs[3:]), output),
        backward=lambda ctx, dy: (*_factors_back(ctx, dy, ctx.needs_input_grad[:2]), *[None] * 4),
        forward=_without_c(_forward_product),
        vmap=lambda info, dims, a, b, alpha, *rest: _stacked(info, (None, *dims), None, a, b, alpha, 0.0, *rest),
    )
    for name in ("mm", "bmm")
)  # fmt: skip
addmm_op, baddbmm_op = (
    define(
        name, _ADDMM, _product, _fake_product,
        setup=_setup_product, backward=_product_back, forward=_forward_product, vmap=_stacked,
    )
    for name in ("addmm", "baddbmm")
)  # fmt: skip
linear_op = define(
    "linear", f"{_LINEAR} -> Tensor", _linear, _fake_linear,
    setup=_setup_linear, backward=_linear_back, forward=_forward_linear, vmap=_stacked_linear,
)  # fmt: skip
grouped_op = define(
    "grouped", _LISTS, lambda a, b, contract, order, out_dtype: grouped(a, b, contract, out_dtype), _fake_grouped,
    setup=lambda ctx, inputs, output: _setup_grouped(ctx, (*inputs[2:], *inputs[0], *inputs[1]), output),
    backward=lambda ctx, dys: (*_grouped_grads(ctx, dys), None, None, None),
    vmap=refuse_vmap("grouped", "bmm, or one longer list"),
)  # fmt: skip
walk_op = define(
    "walk_", "(Tensor a, Tensor b, Tensor(a!) out, str contract) -> ()", _continue, _fake_walk,
    vmap=refuse_vmap("walk_", "a loop over the batch, which has an order"),
)  # fmt: skip
product_forward_op = define_forward(
    "product",
    "(Tensor? c, Tensor a, Tensor b, float alpha, float beta, str contract, ScalarType? out_dtype) -> Tensor",
    {"CompositeExplicitAutograd": product}, _without_order(_fake_product), vmap=_without_order(_stacked),
)  # fmt: skip
linear_forward_op = define_forward(
    "linear", "(Tensor x, Tensor w, Tensor? bias, str contract, ScalarType? out_dtype) -> Tensor",
    {"CompositeExplicitAutograd": linear}, _without_order(_fake_linear), vmap=_without_order(_stacked_linear),
)  # fmt: skip

call_product = Operator(
    "Product", slice(3), _product, _by_operator,
    _forward_product, _setup_product, _product_back,
)  # fmt: skip
call_linear = Operator(
    "Linear", slice(3), _linear, linear_op,
    _forward_linear, _setup_linear, _linear_back,
)  # fmt: skip
_call_grouped = Operator(
    "Grouped", slice(3, None),
    lambda contract, order, out_dtype, *both: tuple(grouped(*_halves(both), contract, out_dtype)),
    lambda contract, order, out_dtype, *both: tuple(grouped_op(*_halves(both), contract, order, out_dtype)), None,
    _setup_grouped, _grouped_back, refuse_vmap("grouped", "bmm, or one longer list"),
)  # fmt: skip


def call_grouped(a: list[Tensor], b: list[Tensor], *options: Any) -> list[Tensor]:
    """a[i] @ b[i] by the shortest way that the call allows; options are contract, grad_order and out_dtype."""
    return list(_call_grouped(*options, *a, *b))
