"""Products for torch with gradients: the calls that a model makes.

Eager calls go straight to `isogemm`'s kernels; under torch.compile and function transforms they are the operators of
`torch.ops.isogemm`, with the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..api import products as api
from ..base import arguments
from ..contract.spec import ContractLike
from ..errors import DeviceError, DTypeError, LayoutError, OptionError, ShapeError
from ..quant.matrix import QuantizedMatrix
from . import operator
from .arguments import autocast, check_tensor, options
from .gemm.grouped_linear import call_grouped_linear, recalled
from .gemm.products import call_grouped, call_linear, call_product
from .gradient_buffers import check_no_ddp, check_no_hooks, check_no_tree
from .operator import Tensor
from .quant import ops as quantized

__all__ = ["addmm", "baddbmm", "bmm", "grouped", "grouped_linear", "linear", "mm"]


def mm(
    a: Tensor, b: Tensor, *, contract: ContractLike | None = None, grad_order: str = "leaf4096", out_dtype: Any = None
) -> Tensor:
    """a @ b for matrices.

    Parameters
    ----------
    a, b : tensor [m, k] and [k, n]
        float32, bfloat16 or float16 of any strides, on the CPU or a CUDA device. Under autocast, float32 becomes
        autocast's dtype.
    contract : Contract or str, optional
        Of the forward product; by default as in `isogemm.matmul`.
    grad_order : str
        Order of db = a.T @ dy. da = dy @ b.T is a chain. Both have the forward's arithmetic.
    out_dtype : torch.dtype, optional
        By default that of `a`.

    Returns
    -------
    tensor [m, n]

    Raises
    ------
    ShapeError, DTypeError, LayoutError, LimitError, ContractError, DeviceError
        Nothing was computed.

    Determinism
    -----------
    A row of the result and of da depends on that row alone. db is the same after rows of zeros.
    """
    return _product("mm", 2, (), a, b, 1.0, 0.0, contract, grad_order, out_dtype)


def bmm(
    a: Tensor, b: Tensor, *, contract: ContractLike | None = None, grad_order: str = "leaf4096", out_dtype: Any = None
) -> Tensor:
    """a[i] @ b[i] for stacks of matrices [batch, m, k] and [batch, k, n]; an expanded operand copies nothing.

    Parameters, errors and determinism as in `mm`, item by item.
    """
    return _product("bmm", 3, (), a, b, 1.0, 0.0, contract, grad_order, out_dtype)


def addmm(
    c: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    beta: float = 1.0,
    alpha: float = 1.0,
    contract: ContractLike | None = None,
    grad_order: str = "leaf4096",
    out_dtype: Any = None,
) -> Tensor:
    """alpha * a @ b + beta * c, with `c` broadcast to the product [m, n], in float32 and rounded once.

    Parameters, errors and determinism as in `mm`. dc is beta * dy, summed in `grad_order` where c was broadcast;
    `beta` = 0 never reads c. Autocast leaves c as it is.
    """
    return _product("addmm", 2, (c,), a, b, alpha, beta, contract, grad_order, out_dtype)


def baddbmm(
    c: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    beta: float = 1.0,
    alpha: float = 1.0,
    contract: ContractLike | None = None,
    grad_order: str = "leaf4096",
    out_dtype: Any = None,
) -> Tensor:
    """`addmm` on each item of stacks; `c` is broadcast to [batch, m, n]."""
    return _product("baddbmm", 3, (c,), a, b, alpha, beta, contract, grad_order, out_dtype)


def linear(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    *,
    contract: ContractLike | None = None,
    grad_order: str = "leaf4096",
    out_dtype: Any = None,
    main_grad: Tensor | None = None,
    bias_main_grad: Tensor | None = None,
    activations: str | None = None,
) -> Tensor:
    """x @ w.T + bias for x [..., k] and w [n, k].

    Parameters
    ----------
    x, w, bias : tensor [..., k], [n, k] and [n]
        Under autocast, x and w take autocast's dtype; the bias is added in float32 as it is. `w` may be a
        `isogemm.QuantizedMatrix` on x's device, to which no gradient goes.
    contract, grad_order, out_dtype
        As in `mm`: dx is a chain; dw = dy.T @ x and dbias = ones @ dy walk the rows in `grad_order`.
    main_grad, bias_main_grad : float32 tensor [n, k] and [n], optional
        The backward pass continues the walk over rows from these values and writes the sums back, with no rounding
        between micro-batches; w and bias then get no gradient of their own (``.grad`` stays as it was).
    activations : {"q8", "fp32", "same"}, optional
        For a quantized `w`, as in `isogemm.linear`.

    Returns
    -------
    tensor [..., n]

    Raises
    ------
    ShapeError, DTypeError, LayoutError, LimitError, ContractError, DeviceError
        As `isogemm.linear`, and for a buffer that does not fit.
    OptionError
        `main_grad` with hooks on the parameter, which would not be called; in the backward pass, with create_graph, or
        where the sum so far ends inside of a leaf.

    Determinism
    -----------
    With `main_grad`, micro-batches of whole leaves leave the bits of the whole batch, in any division; with
    ``grad_order="chain"`` micro-batches of whole blocks do (under ``fma``, of any size).
    """
    if type(w) is QuantizedMatrix:
        if main_grad is not None or bias_main_grad is not None:
            raise OptionError("main_grad", limit="weights that have a gradient", value="a quantized w", nearest="None")
        _check_tensors(x=x, bias=bias)
        text, order, dtype = options(contract, grad_order, out_dtype)
        return quantized.call(*autocast(x), w, bias, text, quantized.checked(activations), order, dtype)
    if activations is not None:
        raise OptionError("activations", limit="for a quantized w", value=activations, nearest="None")
    if main_grad is None and bias_main_grad is None:
        if operator.is_direct(x, w, bias):
            plain = contract if type(contract) is not str or contract else None
            return api.linear(x, w, bias, contract=plain, out_dtype=out_dtype)
        _check_tensors(x=x, w=w, bias=bias)
    else:
        _check_tensors(x=x, w=w, bias=bias)
        check_no_ddp()
    named = options(contract, grad_order, out_dtype)
    _check_buffer("main_grad", main_grad, w, grad_order)
    _check_buffer("bias_main_grad", bias_main_grad, bias, grad_order)
    x, w = autocast(x, w)
    return call_linear(x, w, bias, *named, main_grad, bias_main_grad)


def grouped(
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    *,
    contract: ContractLike | None = None,
    grad_order: str = "leaf4096",
    out_dtype: Any = None,
) -> list[Tensor]:
    """a[i] @ b[i] for lists of matrices whose sizes may differ: the experts of a mixture.

    Parameters, errors and determinism as in `mm`, item by item. The same tensor may occur often; autograd then adds its
    gradients up.
    """
    for name, items in (("a", a), ("b", b)):
        arguments.of_type(f"{name} of grouped", items, (list, tuple), "a list or a tuple of matrices", f"[{name}]")
    if len(a) != len(b):
        raise ShapeError("items in b", limit="as many as in a", value=len(b), nearest=len(a))
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        _check_dims(f"grouped, item {i},", 2, a=x, b=y)
    if not a:
        return []
    both = autocast(*a, *b)
    return call_grouped(list(both[: len(a)]), list(both[len(a) :]), *options(contract, grad_order, out_dtype))


def grouped_linear(
    x: Tensor,
    w: Tensor,
    counts: Tensor | Sequence[int],
    bias: Tensor | None = None,
    *,
    contract: ContractLike | None = None,
    grad_order: str = "leaf4096",
    out_dtype: Any = None,
) -> Tensor:
    """x[i:j] @ w[g].T + bias[g] for groups of rows: the experts of a mixture, as one tensor.

    Parameters
    ----------
    x : tensor [m, k]
        The rows of group 0, then those of group 1, and so on. float32, bfloat16 or float16, any strides.
    w : tensor [groups, n, k]
    counts : integer tensor [groups], or a sequence of int
        How many rows each group has, 0 or more; on any device. Hopper's tensor cores read those on the GPU there: one
        below 0 is 0, one of more rows than there are is cut. Else they are waited for, once in a call.
    bias : tensor [groups, n], optional
    contract, grad_order, out_dtype
        As in `linear`.

    Returns
    -------
    tensor [m, n]
        Rows behind the last group are zero: `x` may be longer than what `counts` adds up to, so that it can have one
        shape in all calls. Neither they nor their gradients are read.

    Raises
    ------
    ShapeError, DTypeError, LayoutError, LimitError, ContractError, DeviceError
        As `linear`; counts that the host reads below 0, or of more rows than there are; counts that have to be waited
        for while a graph is captured.

    Determinism
    -----------
    Results and gradients have the bits that `linear` gives each group alone, so a row and its dx depend on that row and
    its group's weight, whatever the other rows are. Of gradients of gradients that of x along dw is a chain.
    """
    known = recalled(x, w, bias, counts, contract, out_dtype)
    if known is not None:
        return known
    _check_dims("grouped_linear", 2, x=x)
    _check_dims("grouped_linear", 3, w=w)
    if bias is not None:
        _check_dims("grouped_linear", 2, bias=bias)
    if w.shape[2] != x.shape[1]:
        raise ShapeError("columns of x in grouped_linear", limit=w.shape[2], value=x.shape[1], nearest=w.shape[2])
    if bias is not None and bias.shape != w.shape[:2]:
        limit = list(w.shape[:2])
        raise ShapeError("shape of bias in grouped_linear", limit=limit, value=list(bias.shape), nearest=limit)
    counts = _counts(counts, len(w))
    x, w = autocast(x, w)
    found: Tensor = call_grouped_linear(x, w, bias, counts, *options(contract, grad_order, out_dtype), None, None)
    return found


def _counts(counts: Any, groups: int) -> Tensor:
    """Lengths of groups as a tensor."""
    if not isinstance(counts, torch.Tensor):
        arguments.of_type("counts", counts, (list, tuple), "integers, one for each group", "counts.tolist()")
        lengths = [arguments.whole("counts", n) for n in counts]
        if not all(abs(n) < 2**63 for n in lengths):
            raise ShapeError("counts", limit="at most the rows of x", value=lengths, nearest=[0] * len(lengths))
        counts = torch.tensor(lengths, dtype=torch.int64)
    if counts.dtype not in (torch.int32, torch.int64):
        raise DTypeError("counts", limit="int32 or int64", value=counts.dtype, nearest="counts.to(torch.int64)")
    if tuple(counts.shape) != (groups,):
        raise ShapeError("shape of counts", limit=[groups], value=list(counts.shape), nearest=[groups])
    return counts


def _product(
    what: str, ndim: int, c: tuple[Tensor, ...], a: Tensor, b: Tensor, alpha: float, beta: float, *rest: Any
) -> Tensor:
    """alpha * a @ b + beta * c of operands with `ndim` dimensions, where there is a c."""
    _check_dims(what, ndim, a=a, b=b)
    for x in c:
        _check_addend(what, x, a, b)
        alpha, beta = arguments.number("alpha", alpha), arguments.number("beta", beta)
    a, b = autocast(a, b)
    found: Tensor = call_product(c[0] if c else None, a, b, alpha, beta, *options(*rest))
    return found


def _check_dims(what: str, ndim: int, **operands: Tensor) -> None:
    for name, x in operands.items():
        if not isinstance(x, torch.Tensor):
            check_tensor(f"{name} of {what}", x)
        if x.is_nested:
            raise LayoutError(f"{name} of {what}", limit="a dense tensor", value="a nested tensor", nearest="padding")
        if x.dim() != ndim:
            nearest = "bmm or linear" if ndim == 2 else "mm, or x.expand"
            raise ShapeError(f"dimensions of {name} in {what}", limit=ndim, value=x.dim(), nearest=nearest)


def _check_addend(what: str, c: Any, a: Tensor, b: Tensor) -> None:
    check_tensor(f"c of {what}", c)
    shape = (*a.shape[:-1], b.shape[-1])
    found = () if c.is_nested else tuple(c.shape)
    short = len(found) > len(shape) or c.is_nested
    if short or any(x not in (1, y) for x, y in zip(found[::-1], shape[::-1], strict=False)):
        value = "a nested tensor" if c.is_nested else list(found)
        raise ShapeError(
            f"shape of c of {what}", limit=f"one that broadcasts to {list(shape)}", value=value, nearest=list(shape)
        )


def _check_tensors(**operands: Tensor | None) -> None:
    """Raise unless the operands of linear are tensors; calls that go straight to a kernel need not ask."""
    nearest = "torch.as_tensor; isogemm.linear, for inference, takes arrays and packed weights"
    for name, operand in operands.items():
        if not isinstance(operand, torch.Tensor) and (operand is not None or name != "bias"):
            check_tensor(f"{name} of linear", operand, nearest)


def _check_buffer(name: str, buffer: Tensor | None, of: Tensor | None, grad_order: str) -> None:
    """Raise unless a float32 buffer can take the gradient of a parameter."""
    if buffer is None:
        return
    if not isinstance(buffer, torch.Tensor) or buffer.is_nested:
        raise DTypeError(name, limit="a dense tensor", value=type(buffer).__name__, nearest="torch.zeros_like(w)")
    if of is None or buffer.shape != of.shape:
        value, nearest = list(buffer.shape), None if of is None else list(of.shape)
        raise ShapeError(f"shape of {name}", limit="that of its parameter", value=value, nearest=nearest)
    if buffer.dtype != torch.float32:
        raise DTypeError(f"dtype of {name}", limit="float32", value=buffer.dtype, nearest="torch.float32")
    if buffer.device != of.device:
        raise DeviceError(f"device of {name}", limit=of.device, value=buffer.device, nearest=of.device)
    if buffer.requires_grad:
        raise OptionError(name, limit="a plain buffer", value="requires_grad=True", nearest=f"{name}.detach()")
    if not buffer.is_contiguous():
        raise LayoutError(f"strides of {name}", limit="contiguous", value=buffer.stride(), nearest="torch.zeros_like")
    check_no_tree(name, grad_order)
    check_no_hooks(name, of)
