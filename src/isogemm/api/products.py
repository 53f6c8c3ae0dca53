"""The public products: validated here and in `isogemm.problem.settings`, computed where the operands lie.

Every function takes NumPy arrays (bfloat16 through ml_dtypes), torch tensors of the CPU or of a CUDA device, and
anything else that `isogemm.operands.views` can view without a copy, and returns the kind it was given. CUDA work is
enqueued on torch's current stream of the operands' device. Each output element is a function of one row of op(A), one
column of op(B), their dtypes and the contract alone: not of m, n, strides, form, batch or thread count.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, cast

import numpy as np

from ..backends import open_device
from ..base.arguments import beta_of_c
from ..base.dtypes import BFLOAT16, FLOAT16, FLOAT32
from ..contract.modes import contract_of
from ..contract.spec import ContractLike, as_contract
from ..errors import OptionError
from ..operands.device_array import HOST
from ..operands.prepared import MatrixList
from ..operands.shapes import are_rows, are_stacks, fits
from ..operands.tensors import uncompiled
from ..operands.views import to_float32
from ..planner.device import LISTS
from ..problem.settings import PLAIN
from ..quant.matrix import QuantizedMatrix
from . import dispatch, short
from .dispatch import Options

_SMALL = 2**26  # elements; results below are allocated without asking how much memory there is
_ndarray, _empty = np.ndarray, np.empty
_host = open_device(HOST)
_Packed: Any = _host.packed
_again, _learn = cast(Any, _host).again, cast(Any, _host).learn
_LINEAR, _PRODUCT, _LINEAR_INTO, _INTO = range(4)  # forms of a call, for `_again`
_TENSORS = short.KINDS
_LETTERS = frozenset("NT")


@uncompiled
def matmul(
    a: Any,
    b: Any,
    *,
    contract: ContractLike | None = None,
    mode: str | None = None,
    out: Any = None,
    out_dtype: Any = None,
    accumulate: bool = False,
    cast: str | None = None,
) -> Any:
    """a @ b with the shapes of `numpy.matmul`: 1-D operands and broadcast batch dimensions included.

    Parameters
    ----------
    a, b : array [..., m, k] and [..., k, n], or [k]
        float32, bfloat16 or float16, of any strides; broadcasting copies nothing. On a CPU also int8 with int8: the
        exact product in int32, for K up to 131071.
    contract : Contract or str, optional
        What the bits are. By default ``fma/chain``, and on a CUDA device for two operands of one 16-bit type the
        chain of its tensor cores, ``tensor_core:sm90/chain`` on Hopper; for int8, ``exact/chain``.
    mode : {"default", "tf32", "tf32x3", "ieee", "pedantic"}, optional
        A contract by the name that BLAS libraries have for it; see `isogemm.contract.modes`.
    out : array, optional
        Where the result goes; returned. Shares no memory with an operand.
    out_dtype : dtype, optional
        The result's; by default that of the operands, float32 where one of them or `accumulate` is. Rounded to once.
    accumulate : bool
        The walk over K starts from the float32 values in `out`.
    cast : {"float32"}, optional
        Operands of float64, and lists of numbers, are copied and rounded to float32 first; by default they are refused.

    Returns
    -------
    array
        `out`, or a new one: a tensor if an operand is one, else an ndarray (0-d for two 1-D operands). On a CUDA
        device an array of the operand's library, which it takes through DLPack (CuPy, JAX), or else a torch tensor
        (Numba, which reads it as one of its own). On a CPU likewise, or else an ndarray (JAX's bfloat16).

    Raises
    ------
    ShapeError, DTypeError, LayoutError, AliasError, LimitError, OptionError, ContractError, DeviceError
        Nothing was computed or written.

    Determinism
    -----------
    An element depends on its row, its column, the dtypes and the contract. Each product of a broadcast has
    the bits that it has alone.
    """
    form = _PRODUCT if out is None else _INTO
    if (
        contract is mode is out_dtype is cast is None
        and accumulate is False
        and type(a) is type(b) is _ndarray
        and (out is None or type(out) is _ndarray)
    ):
        found = _again(form, a, b, out)
        if found is not None:
            return found
        if out is None and b.ndim == 2 and are_rows(a, b.shape[0]):
            return matmul(a.reshape(-1, a.shape[-1]), b).reshape(*a.shape[:-1], b.shape[1])
        if out is None and a.ndim > 3 and are_stacks(a, b):
            (m, k), n = a.shape[-2:], b.shape[-1]
            return matmul(a.reshape(-1, m, k), b.reshape(-1, k, n)).reshape(*a.shape[:-1], n)
    if contract is not None or mode is not None:
        contract = contract if mode is None else contract_of(mode, contract)
        if _is_default(contract, a, b):
            return matmul(a, b, out=out, out_dtype=out_dtype, accumulate=accumulate, cast=cast)
    if cast is not None:
        a, b = (to_float32(name, x, cast) for name, x in (("a", a), ("b", b)))
    if (
        type(a) is _ndarray
        and type(b) is _ndarray
        and (out is None or type(out) is _ndarray)
        and contract is None
        and out_dtype is None
        and accumulate is False
        and a.ndim == b.ndim
        and a.ndim in (2, 3)
    ):
        dtype = a.dtype
        (*stack, m, k), (*other, rows, n) = a.shape, b.shape
        if (
            k == rows
            and stack == other
            and dtype is b.dtype
            and (dtype is FLOAT32 or dtype is BFLOAT16 or dtype is FLOAT16)
            and 0 < prod(stack) * m * n <= _SMALL
            and a.flags.aligned
            and b.flags.aligned
            and (not stack or (stack[0] > 1 and b.strides[0]))
        ):
            if out is None:
                out = _empty((*stack, m, n), dtype)
            elif not fits(out, dtype, (*stack, m, n), a, b):
                return dispatch.matmul(a, b, contract, out, out_dtype, accumulate)
            (_host.gemm_batched if stack else _host.gemm)(a, b, out, PLAIN)
            _learn(form, a, b, out)
            return out
    elif type(a) in _TENSORS:
        found = short.call("matmul", a, b, None, out, (accumulate, contract, out_dtype))
        if found is not None:
            return found
    return dispatch.matmul(a, b, contract, out, out_dtype, accumulate)


@uncompiled
def linear(
    x: Any,
    w: Any,
    bias: Any = None,
    *,
    contract: ContractLike | None = None,
    mode: str | None = None,
    out: Any = None,
    out_dtype: Any = None,
    activations: str | None = None,
    cast: str | None = None,
) -> Any:
    """x @ w.T + bias: a linear layer with its weights as checkpoints store them.

    Parameters
    ----------
    x : array [..., k]
        Activations with any leading dimensions and strides.
    w : array [n, k], PackedWeight or QuantizedMatrix
        Weights, the result of `isogemm.pack`, or quantized blocks. bfloat16 or float16 weights go with float32
        activations.
    bias : array [n], optional
        Added in float32 before the one rounding to the result's dtype.
    contract, mode, out, out_dtype, cast
        As in `matmul`.
    activations : {"q8", "fp32", "same"}, optional
        For a quantized `w`. ``q8``: quantized in blocks of 8-bit integers, with exact integer products (the contract
        ``int32``); the default for float32. ``fp32``: x in float32, times ``w.dequantize()``. ``same``: x as it is,
        times ``w.dequantize(x.dtype)``; the default for bfloat16 and float16.

    Returns
    -------
    array [..., n]
        `out`, or a new one, of the dtype that `matmul` gives it.

    Raises
    ------
    ShapeError, DTypeError, LayoutError, AliasError, LimitError, OptionError, ContractError, DeviceError, FormatError
        Nothing was computed or written.

    Determinism
    -----------
    A row of `x` gives the same bits alone, in any batch, and with packed or plain weights.
    """
    form = _LINEAR if out is None else _LINEAR_INTO
    if (
        contract is mode is cast is out_dtype is activations is None
        and type(x) is _ndarray
        and (out is None or type(out) is _ndarray)
        and (bias is None or type(bias) is _ndarray)
        and (type(w) is _ndarray or type(w) is _Packed)
    ):
        found = _again(form, x, w, out, bias)
        if found is not None:
            return found
        if out is None and len(w.shape) == 2 and are_rows(x, w.shape[1]):
            return linear(x.reshape(-1, x.shape[-1]), w, bias).reshape(*x.shape[:-1], w.shape[0])
    if contract is not None or mode is not None:
        contract = contract if mode is None else contract_of(mode, contract)
        if _is_default(contract, x, w):
            return linear(x, w, bias, out=out, out_dtype=out_dtype, activations=activations, cast=cast)
    if cast is not None:
        x, w, bias = (to_float32(name, each, cast) for name, each in (("x", x), ("w", w), ("bias", bias)))
    if activations is not None or type(w) is QuantizedMatrix:
        return _quantized(x, w, bias, contract, out_dtype, out, activations)
    if (
        type(x) is _ndarray
        and (out is None or type(out) is _ndarray)
        and contract is None
        and out_dtype is None
        and x.ndim == 2
        and (bias is None or (type(bias) is _ndarray and bias.dtype is FLOAT32 and bias.flags.carray))
        and ((type(w) is _ndarray and w.ndim == 2 and w.flags.aligned) or type(w) is _Packed)
    ):
        dtype = x.dtype
        (m, k), (n, columns) = x.shape, w.shape
        if (
            k == columns
            and dtype is w.dtype
            and (dtype is FLOAT32 or dtype is BFLOAT16 or dtype is FLOAT16)
            and (bias is None or bias.shape == (n,))
            and 0 < m * n <= _SMALL
            and x.flags.aligned
        ):
            if out is None:
                out = _empty((m, n), dtype)
            elif not fits(out, dtype, (m, n), x, w if type(w) is _ndarray else x, x if bias is None else bias):
                return dispatch.linear(x, w, bias, contract, out_dtype, out)
            _host.gemm(x, w.T if type(w) is _ndarray else w, out, PLAIN, bias=bias)
            _learn(form, x, w, out, bias)
            return out
    elif type(x) in _TENSORS:
        found = short.call("linear", x, w, bias, out, (False, contract, out_dtype))
        if found is not None:
            return found
    return dispatch.linear(x, w, bias, contract, out_dtype, out)


def _is_default(contract: ContractLike | None, a: Any, b: Any) -> bool:
    """Whether a contract is what two arrays have without one."""
    arrays = type(a) is _ndarray and (type(b) is _ndarray or type(b) is _Packed)
    return arrays and (contract is None or as_contract(contract) == _host.default(a.dtype, b.dtype))


def _is_product(
    axes: int, a: Any, b: Any, c: Any, bias: Any, out_dtype: Any, beta: Any, mode: Any, accumulate: Any, alpha: Any
) -> bool:
    """Whether two arrays of so many axes are multiplied, and nothing else is asked for."""
    return (
        c is bias is out_dtype is beta is mode is None
        and accumulate is False
        and type(alpha) is float
        and alpha == 1
        and type(a) is type(b) is _ndarray
        and a.ndim == b.ndim == axes
    )


def _quantized(x: Any, w: Any, bias: Any, contract: Any, out_dtype: Any, out: Any, activations: str | None) -> Any:
    from . import quantized

    if not isinstance(w, QuantizedMatrix):
        raise OptionError("activations", limit="with a QuantizedMatrix", value=repr(activations), nearest="quantize(w)")
    return quantized.linear(x, w, bias, contract, out_dtype, out, activations)


@uncompiled
def gemm(
    a: Any,
    b: Any,
    c: Any = None,
    *,
    alpha: float = 1.0,
    beta: float | None = None,
    trans_a: str = "N",
    trans_b: str = "N",
    bias: Any = None,
    out: Any = None,
    out_dtype: Any = None,
    contract: ContractLike | None = None,
    mode: str | None = None,
    accumulate: bool = False,
) -> Any:
    """alpha * op(a) @ op(b) + beta * c + bias, for matrices.

    Each step is rounded to float32 in the order written (product, alpha, beta * c, bias), then once to the
    result's dtype. Steps with alpha = 1, beta = 0 or no bias do not happen: ``beta=0`` never reads `c`.

    Parameters
    ----------
    a, b : array [m, k] and [k, n], or their transposes
    c : array [m, n], optional
        Of the result's dtype or float32. Left alone unless it is also `out`.
    alpha, beta : float
        Rounded to float32. `beta` is 0 where there is no `c`; with `c` it has to be given, unless `accumulate`.
    trans_a, trans_b : {"N", "T", "C"}
        op(a) is `a` or its transpose; C is T for real types.
    bias : array [n], optional
    out, out_dtype, contract, mode
        As in `matmul`. `out` may be `c` itself.
    accumulate : bool
        The walk over K starts from the float32 `c` (from `out` when `c` is None); beta has to be 0. The
        result is float32 unless `out_dtype` says otherwise.

    Returns
    -------
    array [m, n]

    Raises
    ------
    ShapeError, DTypeError, LayoutError, AliasError, LimitError, OptionError, ContractError, DeviceError
        Nothing was computed or written.

    Determinism
    -----------
    As `matmul`; the four transpositions agree.
    """
    if (
        _is_product(2, a, b, c, bias, out_dtype, beta, mode, accumulate, alpha)
        and type(trans_a) is type(trans_b) is str
        and _LETTERS.issuperset((trans_a, trans_b))
    ):
        return matmul(a if trans_a == "N" else a.T, b if trans_b == "N" else b.T, contract=contract, out=out)
    beta = 0.0 if beta is None and c is None else beta_of_c(beta, accumulate)
    contract = contract if mode is None else contract_of(mode, contract)
    given = Options(contract, alpha, beta, out_dtype, accumulate, trans_a, trans_b)
    return _products("gemm", a, b, c, bias, out, given)


@uncompiled
def gemm_strided_batched(
    a: Any,
    b: Any,
    c: Any = None,
    *,
    alpha: float = 1.0,
    beta: float | None = None,
    trans_a: str = "N",
    trans_b: str = "N",
    bias: Any = None,
    out: Any = None,
    out_dtype: Any = None,
    contract: ContractLike | None = None,
    mode: str | None = None,
    accumulate: bool = False,
) -> Any:
    """`gemm` on each item i of a[i], b[i], c[i], out[i]: base + i * stride, where a stride of 0 broadcasts.

    Parameters
    ----------
    a, b, c, out : array [batch, rows, columns]
        A stride of 0 (`numpy.broadcast_to`) gives every item the same matrix; not in `out`.
    alpha, beta, trans_a, trans_b, bias, out_dtype, contract, mode, accumulate
        As in `gemm`, the same for all items.

    Returns
    -------
    array [batch, m, n]

    Raises
    ------
    ShapeError, DTypeError, LayoutError, AliasError, LimitError, OptionError, ContractError, DeviceError
        Nothing was computed or written.

    Determinism
    -----------
    Each item has the bits that `gemm` gives it alone.
    """
    if (
        _is_product(3, a, b, c, bias, out_dtype, beta, mode, accumulate, alpha)
        and a.shape[0] == b.shape[0]
        and type(trans_a) is type(trans_b) is str
        and trans_a == trans_b == "N"
    ):
        return matmul(a, b, contract=contract, out=out)
    beta = 0.0 if beta is None and c is None else beta_of_c(beta, accumulate)
    contract = contract if mode is None else contract_of(mode, contract)
    given = Options(contract, alpha, beta, out_dtype, accumulate, trans_a, trans_b)
    return _products("gemm_strided_batched", a, b, c, bias, out, given)


@uncompiled
def gemm_batched(
    a: Any,
    b: Any,
    c: Any = None,
    *,
    alpha: float = 1.0,
    beta: float | None = None,
    trans_a: str = "N",
    trans_b: str = "N",
    bias: Any = None,
    out: Any = None,
    out_dtype: Any = None,
    contract: ContractLike | None = None,
    mode: str | None = None,
    accumulate: bool = False,
) -> Any:
    """`gemm` on each of a list of products of one size: the array of pointers.

    Parameters
    ----------
    a, b, c, out : list of arrays [rows, columns], PointerArray, or array [batch, rows, columns]
        Items may lie anywhere and have strides of their own; the same matrix may occur often in a, b and c.
    alpha, beta, trans_a, trans_b, bias, out_dtype, contract, mode, accumulate
        As in `gemm`, the same for all items.

    Returns
    -------
    list of arrays [m, n], or array [batch, m, n]
        `out`; without it an array when a and b are arrays, else a list.

    Raises
    ------
    ShapeError, DTypeError, LayoutError, AliasError, LimitError, OptionError, ContractError, DeviceError
        Nothing was computed or written.

    Determinism
    -----------
    Each item has the bits that `gemm` gives it alone.
    """
    beta = 0.0 if beta is None and c is None else beta_of_c(beta, accumulate)
    contract = contract if mode is None else contract_of(mode, contract)
    given = Options(contract, alpha, beta, out_dtype, accumulate, trans_a, trans_b)
    lists = any(isinstance(x, list | tuple | MatrixList) for x in (a, b, c, out))
    form = "gemm_batched" if lists else "gemm_strided_batched"
    return _products(form, a, b, c, bias, out, given)


@uncompiled
def gemm_grouped(
    a: Sequence[Any],
    b: Sequence[Any],
    c: Sequence[Any] | None = None,
    *,
    alpha: float = 1.0,
    beta: float | None = None,
    trans_a: str = "N",
    trans_b: str = "N",
    bias: Any = None,
    out: Sequence[Any] | None = None,
    out_dtype: Any = None,
    contract: ContractLike | None = None,
    mode: str | None = None,
    accumulate: bool = False,
) -> Any:
    """`gemm` on each of a list of products whose sizes may differ: the experts of a mixture, for example.

    Parameters
    ----------
    a, b, c, out : list of arrays [rows, columns], or array [groups, rows, columns]
        m, n and k may differ from item to item; any of them may be 0.
    alpha, beta, trans_a, trans_b, bias, out_dtype, contract, mode, accumulate
        As in `gemm`, the same for all items; a bias needs the same n in all.

    Returns
    -------
    list of arrays [m_i, n_i]

    Raises
    ------
    ShapeError, DTypeError, LayoutError, AliasError, LimitError, OptionError, ContractError, DeviceError
        Nothing was computed or written.

    Determinism
    -----------
    Each item has the bits that `gemm` gives it alone.
    """
    beta = 0.0 if beta is None and c is None else beta_of_c(beta, accumulate)
    contract = contract if mode is None else contract_of(mode, contract)
    given = Options(contract, alpha, beta, out_dtype, accumulate, trans_a, trans_b)
    return _products("gemm_grouped", a, b, c, bias, out, given)


def _products(form: str, a: Any, b: Any, c: Any, bias: Any, out: Any, given: Options) -> Any:
    """A call seen before, or the long way."""
    lists, alpha, beta = form in LISTS, given.alpha, given.beta
    if c is None and (_TENSORS if lists else type(a) in _TENSORS) and type(alpha) is type(beta) is float and beta == 0:
        found = (short.call_items if lists else short.call)(form, a, b, bias, out, given.key)
        if found is not None:
            return found
    return (dispatch.items if lists else dispatch.uniform)(form, a, b, c, bias, out, given)
