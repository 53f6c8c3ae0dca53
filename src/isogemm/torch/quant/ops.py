"""Products with quantized weights as torch operators: isogemm::quantized_linear and isogemm::quantized_weight.

torch passes tensors and numbers to an operator, so a quantized weight goes as ``blocks``: on the CPU the bytes of its
rows, uint8 [n, row bytes]; on a CUDA device the kernels' own copy, uint8 [bytes]. The matrix that stands behind them
keeps what backends made of it; it is found again by their address.

Gradients go to x and bias, not to w: dx = dy @ ``w.dequantize()``, a chain over the columns of y. The weights are
float32 there where they were in the forward product (and for integer products, whose rounding of x has no derivative
and is passed over), else of the type of x.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import numpy as np
import torch

from ...api import products as api
from ...api.quantized import ACTIVATIONS
from ...base import arguments
from ...contract.spec import Contract, as_contract
from ...errors import LayoutError, ShapeError
from ...formats.blocks import format_of
from ...formats.stored import Unmarked
from ...operands.tensors import to_tensor
from ...quant.matrix import QuantizedMatrix
from ..gemm.products import call_product, resolved, with_order
from ..operator import Operator, Tensor, define, define_forward, refuse_meta, refuse_vmap, way

_alive: weakref.WeakValueDictionary[tuple[Any, ...], QuantizedMatrix] = weakref.WeakValueDictionary()


def blocks_of(w: QuantizedMatrix) -> Tensor:
    """A matrix as a tensor over its own memory, the same one every time.

    torch has no read-only tensors. Those over a file that `isogemm.quant.load` mapped are private: a write changes this
    process's pages. Memory that is read-only otherwise (bytes, a mapping of mode "r") is copied, once.
    """
    _make_blocks(w)
    return w._tensor


def _make_blocks(w: QuantizedMatrix) -> int:
    """Make it where there is none, before a compiler looks at the matrix: nothing of this is traced."""
    if w._tensor is None:
        there = w._packed
        if there is None and w.strides[0] < 0:
            raise LayoutError(
                "rows of a quantized weight as a torch tensor", limit="in ascending order",
                value=f"rows {w.strides[0]} bytes apart",
                nearest="QuantizedMatrix.from_bytes(np.ascontiguousarray(w.rows), shape=w.shape, format=w.format)",
            )  # fmt: skip
        if there is None:
            w._own()
        # In inference mode autograd could never save it; inside a transform it would be a tensor of that transform.
        with torch.inference_mode(False), torch._C._DisableFuncTorch():
            w._show(torch.from_numpy(np.asarray(Unmarked(w.rows))) if there is None else there.tensor)
        _alive[_key(w._tensor, w.format.name, *w.shape)] = w
    return 0


# As torch.compiler.assume_constant_result, which would import the whole compiler: as much time as torch itself takes.
_make_blocks._dynamo_marked_constant = True  # type: ignore[attr-defined]


def matrix_of(blocks: Tensor, fmt: str, n: int, k: int) -> QuantizedMatrix:
    """The matrix whose blocks these are; one that was never seen lives as long as the tensor.

    Such a one is looked at first where it is on the host; on a device scales are taken to be finite. Raises ShapeError,
    LayoutError, FormatError or LimitError: they are not those of such a matrix.
    """
    key = _key(blocks, fmt, n, k)
    found = _alive.get(key)
    if found is None:
        if blocks.is_cuda:
            found = QuantizedMatrix.adopt(blocks.detach(), shape=(n, k), format=fmt)
        else:
            found = QuantizedMatrix.from_bytes(blocks.detach().numpy(), shape=(n, k), format=fmt)
        if blocks.is_inference() and not blocks.is_cuda:
            found = found.in_place()
        found._show(blocks.detach())
        blocks._isogemm_matrix = found  # not a cycle: the matrix holds another tensor of the same memory
        _alive[key] = found
    if blocks.is_inference():  # torch counts no writes into it, so nothing that is made of its bytes is kept
        found.forget()
    return found


def _key(blocks: Tensor, fmt: str, n: int, k: int) -> tuple[Any, ...]:
    layout = blocks.shape, blocks.stride()  # w[:n] and w[::2] begin at the same byte
    # torch counts writes: what was made of older bytes is not found again. Tensors that somebody made of one memory
    # have counts of their own, and storages.
    written = 0 if blocks.is_inference() else blocks._version
    storage = blocks.untyped_storage()._cdata
    return blocks.data_ptr(), storage, layout, blocks.get_device(), fmt, n, k, written


def product(x: Tensor, w: QuantizedMatrix, bias: Tensor | None, contract: str, activations: str, out_dtype: Any) -> Any:
    """x @ w.T + bias, outside the gradient's graph."""
    with torch.no_grad():
        return api.linear(x, w, bias, contract=contract or None, activations=activations or None, out_dtype=out_dtype)


def _forward(
    x: Tensor, blocks: Tensor, bias: Tensor | None, format: str, n: int, k: int, contract: str, activations: str,
    *rest: Any,
) -> Tensor:  # fmt: skip
    """`rest` is the gradient's order, where an operator has one, and the result's dtype."""
    return product(x, matrix_of(blocks, format, n, k), bias, contract, activations, rest[-1])


def _weight(blocks: Tensor, format: str, n: int, k: int, dtype: Any) -> Tensor:
    found = matrix_of(blocks, format, n, k).dequantize(dtype)
    return found if isinstance(found, torch.Tensor) else to_tensor(found)


def _fake_forward(
    x: Tensor, blocks: Tensor, bias: Tensor | None, format: str, n: int, k: int, contract: str, activations: str,
    *rest: Any,
) -> Tensor:  # fmt: skip
    if len(rest) > 1:
        with_order(Contract(), rest[0])
    refuse_meta(x, blocks, bias)
    if x.dim() == 0 or x.shape[-1] != k:
        raise ShapeError(
            "columns of x and w", limit="equal: x [..., k] and w [n, k]", value=f"x {list(x.shape)} and k {k}",
            nearest=f"x [..., {k}]",
        )  # fmt: skip
    if contract:
        as_contract(contract)
    checked(activations or None)
    return x.new_empty(*x.shape[:-1], n, dtype=x.dtype if rest[-1] is None else rest[-1])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, blocks, bias, ctx.format, ctx.n, ctx.k, contract, activations, ctx.grad_order, _ = inputs
    ctx.save_for_backward(blocks)
    ctx.x = (x.shape, x.dtype)
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.wide = _is_wide(ctx.format, x.dtype, contract, activations)
    forward = as_contract(contract) if contract else None
    integer = forward is None or forward.arithmetic == "int32"
    # Of the products that make the gradients: the device's default where the forward pass had none, or integers.
    ctx.arithmetic = "fma" if ctx.wide and integer else "" if integer or forward is None else forward.arithmetic


def _is_wide(fmt: str, dtype: Any, contract: str, activations: str) -> bool:
    """Whether the forward product has its weights in float32."""
    if activations:
        return activations != "same" or dtype == torch.float32
    integers = bool(format_of(fmt).activations) and (not contract or as_contract(contract).arithmetic == "int32")
    return dtype == torch.float32 or (bool(contract) and integers)


def _backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    (blocks,) = ctx.saved_tensors
    shape, dtype = ctx.x
    dx = db = None
    rows = dy.reshape(math.prod(shape[:-1]), ctx.n)
    narrow = torch.float32 if ctx.wide else dtype
    if ctx.needs_input_grad[0]:
        w = weight_op(blocks, ctx.format, ctx.n, ctx.k, narrow)
        chain = f"{ctx.arithmetic}/chain" if ctx.arithmetic else ""
        dx = call_product(None, rows.to(narrow), w, 1.0, 0.0, chain, ctx.grad_order, dtype).reshape(shape)
    if ctx.needs_input_grad[2]:
        rows = rows.to(narrow)
        ones = rows.new_ones(1, rows.shape[0])
        order = f"{ctx.arithmetic or resolved('', ones, rows).arithmetic}/{ctx.grad_order}"
        db = call_product(None, ones, rows, 1.0, 0.0, order, ctx.grad_order, ctx.bias_dtype).reshape(-1)
    return dx, None, db, *[None] * 7


def _vmap(name: str) -> Any:
    """More rows of x; a weight or a bias for each item is another product."""

    def rule(info: Any, in_dims: Any, x: Tensor, blocks: Tensor, bias: Tensor | None, *rest: Any) -> Any:
        if any(dim is not None for dim in in_dims[1:3]):
            refuse_vmap("a quantized weight or its bias", "one weight and one bias for all items")()
        op = getattr(torch.ops.isogemm, name)
        return op(x.movedim(in_dims[0], 0), blocks, bias, *rest), 0

    return rule


def _without_gradient(*given: Any) -> Tensor:
    found: Tensor = linear_forward_op(*given[:-2], given[-1])
    return found


_X = "Tensor x, Tensor blocks, Tensor? bias, str format, int n, int k, str contract, str activations"
linear_op = define(
    "quantized_linear", f"({_X}, str grad_order, ScalarType? out_dtype) -> Tensor", _forward, _fake_forward,
    setup=_setup, backward=_backward, forward=_without_gradient, vmap=_vmap("quantized_linear"),
)  # fmt: skip
linear_forward_op = define_forward(
    "quantized_linear", f"({_X}, ScalarType? out_dtype) -> Tensor", {"CompositeExplicitAutograd": _forward},
    _fake_forward, vmap=_vmap("quantized_linear_forward"),
)  # fmt: skip
weight_op = define(
    "quantized_weight", "(Tensor blocks, str format, int n, int k, ScalarType dtype) -> Tensor", _weight,
    lambda blocks, format, n, k, dtype: blocks.new_empty(n, k, dtype=dtype),
)  # fmt: skip

call_blocks = Operator("QuantizedLinear", slice(3), _forward, linear_op, _without_gradient, _setup, _backward)


def call(x: Tensor, w: QuantizedMatrix, bias: Tensor | None, *rest: Any) -> Any:
    """The product by the shortest way; `rest` is contract, activations, grad_order and out_dtype, as text."""
    if way(x, bias) == "direct":
        return product(x, w, bias, rest[0], rest[1], rest[3])
    return call_blocks(x, blocks_of(w), bias, w.format.name, *w.shape, *rest)


def checked(activations: Any) -> str:
    """What activations become, as text; empty for the default."""
    return "" if activations is None else arguments.one_of("activations", activations, ACTIVATIONS, "'q8'")
