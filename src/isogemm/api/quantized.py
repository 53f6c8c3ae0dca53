"""Linear layers with quantized weights: which arithmetic, in which pieces; `isogemm.linear` comes here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base import arguments as given
from ..base.dtypes import FLOAT32
from ..contract.spec import Contract, ContractLike, Order, as_contract
from ..errors import OptionError, ShapeError
from ..operands.device_array import HOST
from ..planner.device import Device
from ..problem import settings as problem
from ..problem.settings import Settings
from ..quant.matrix import QuantizedMatrix
from . import dispatch
from .operands import Operands

__all__ = ["ACTIVATIONS", "linear", "matrices"]

Array = NDArray[Any]

ACTIVATIONS = ("q8", "fp32", "same")
"""What activations become: blocks of 8-bit integers; float32; or what they are, weights rounded to their type."""

# Rows up to which weights are dequantized in registers; above, pieces feed the products' own kernels. One thread on
# Zen 4: 90 against 60 GFLOP/s at 33 rows, 95 against 85 at 128, level at 256, 95 against 101 at 512.
# Weights rounded to 16 bits first: 5 times as fast at one row, level at 100.
_FEW, _FEW_ROUNDED = 256, 64
_PIECE = 2**21  # dequantized elements at a time: they stay in the last cache, and few pieces pack x anew


def linear(
    x: Any,
    w: QuantizedMatrix,
    bias: Any,
    contract: ContractLike | None,
    out_dtype: Any,
    out: Any,
    activations: str | None,
) -> Any:
    """x @ w.T + bias for a quantized w.

    - ``q8``: the contract ``int32``, see `isogemm.contract.int32`.
    - ``fp32``: the product of x, widened to float32, and ``w.dequantize()``.
    - ``same``: the product of x and ``w.dequantize(x.dtype)``.
    """
    options = (contract, out_dtype, activations)
    if w._packed is not None:
        found = w._packed.known(x, bias, out, options)
        if found is not None:
            return found
    elif contract is None and activations is None and out_dtype is None and bias is None and _is_plain(x, w, out):
        from ..backends.cpu.quant import linear as quant_linear

        result = np.empty((len(x), len(w)), np.float32) if out is None else out
        quant_linear.gemm(x, w.panels(), w.format, result)
        return result
    here = Operands()
    xx = here.view("x", x)
    here.note("w", w.place)
    xbias, target = here.optional("bias", bias), here.optional("out", out)
    problem.check_operand("x", xx)
    n, k = w.shape
    if xx.ndim == 0 or xx.shape[-1] != k:
        raise ShapeError(
            "columns of x and w",
            limit="equal: x [..., k] and w [n, k]",
            value=f"x {list(xx.shape)} and w {[n, k]}",
            nearest=f"x {[*xx.shape[:-1], k]}",
        )
    if xbias is not None:
        problem.check_bias(xbias, n)
    how, chosen = _choose(w, xx.dtype, contract, activations, out_dtype, here.device)
    dtype = chosen.out_dtype or xx.dtype
    shape = (*xx.shape[:-1], n)
    w.check()
    if target is None:
        target = dispatch.allocate(here.device, shape, dtype)
    else:
        problem.check_out(target, shape, dtype, (("x", xx), ("w", w.rows), ("bias", xbias)))
    if here.place is not HOST:
        from . import quantized_cuda

        run = quantized_cuda.run(here.device, how, xx, w, target, xbias, chosen)
        result = here.result(target, out, x)
        quantized_cuda.remember(x, w, bias, out, options, result, run)
        return result
    if target.size:
        if how == "q8":
            _integers(xx, w, target, xbias, chosen)
        else:
            _floats(here.device, xx, w, target, xbias, chosen, FLOAT32 if how == "fp32" else xx.dtype)
    return here.result(target, out, x)


def _is_plain(x: Any, w: QuantizedMatrix, out: Any) -> bool:
    """Whether nothing has to be chosen or checked: plain host matrices of float32, and an integer product."""
    if type(x) is not np.ndarray or x.dtype is not FLOAT32 or x.ndim != 2 or not x.flags.aligned:
        return False
    n, k = w.shape
    if x.shape[1] != k or not w.format.activations or not x.size or not n:
        return False
    if out is None:
        return True
    return bool(
        type(out) is np.ndarray
        and out.dtype is FLOAT32
        and out.shape == (len(x), n)
        and out.flags.carray
        and not np.may_share_memory(out, x)
        and not np.may_share_memory(out, w.rows)
    )


def _choose(
    w: QuantizedMatrix, dtype: np.dtype[Any], contract: ContractLike | None, activations: str | None, out: Any,
    device: Device,
) -> tuple[str, Settings]:  # fmt: skip
    """What activations become, and the settings, from what was asked; each may decide the other."""
    if activations is not None:
        given.one_of("activations", activations, ACTIVATIONS, "'q8'")
    asked = None if contract is None else as_contract(contract)
    integers = bool(w.format.activations)
    if activations is None:
        by_contract = asked is not None and asked.arithmetic == "int32"
        by_default = asked is None and integers and dtype == FLOAT32
        activations = "q8" if by_contract or by_default else "same"
    if activations == "q8":
        if not integers:
            raise OptionError(
                f"activations='q8' with {w.format} weights", limit="a format with an integer product", value="'q8'",
                nearest="'fp32'",
            )  # fmt: skip
        asked = asked or Contract("int32", Order())
    if asked is not None and (asked.arithmetic == "int32") != (activations == "q8"):
        raise OptionError(
            f"activations with the contract {asked}", limit="'q8' with int32, and int32 with 'q8'",
            value=repr(activations), nearest="'fp32'" if activations == "q8" else "'q8'",
        )  # fmt: skip
    if activations == "q8":
        return "q8", dispatch.settings(dispatch.Options(asked, out_dtype=out), device, _NOTHING, _NOTHING)
    wide = _NOTHING if activations == "fp32" else np.empty(0, dtype)
    chosen = dispatch.settings(dispatch.Options(asked, out_dtype=out), device, np.empty(0, dtype), wide)
    chosen.result_dtype(dtype, wide.dtype)  # refuses a contract that these types do not have
    return activations, chosen


_NOTHING: Array = np.empty(0, np.float32)


def _integers(x: Array, w: QuantizedMatrix, out: Array, bias: Array | None, chosen: Settings) -> None:
    """``int32``: the chain by kernels, other orders by their definition."""
    from ..backends.cpu.quant import linear as quant_linear

    for rows, into in matrices(x, out):
        if chosen.contract.order.kind == "chain":
            quant_linear.gemm(rows, w.panels(), w.format, into, bias)
        else:
            _by_definition(rows, w, into, bias, chosen)


def matrices(x: Array, out: Array) -> Iterator[tuple[Array, Array]]:
    """x [..., k] and out [..., n] as matrices: one pair where one row stride walks each, else several."""
    rows, into = (x[None, :], out[None, :]) if x.ndim == 1 else (x, out)
    merged, target = (rows, into) if rows.ndim == 2 else (dispatch.merge(rows, 1), dispatch.merge(into, 1))
    if merged is not None and target is not None:
        yield merged, target
    else:
        for i in np.ndindex(x.shape[:-2]):
            yield x[i], out[i]


def _by_definition(x: Array, w: QuantizedMatrix, out: Array, bias: Array | None, chosen: Settings) -> None:
    from ..contract import int32, reference
    from ..formats.reference import decode

    acc = int32.evaluate(x, decode(w.rows, w.format), str(chosen.contract))
    out[...] = reference.epilogue(acc, bias=bias, out_dtype=out.dtype)


def _floats(
    device: Device, x: Array, w: QuantizedMatrix, out: Array, bias: Array | None, chosen: Settings, dtype: np.dtype[Any]
) -> None:
    """Weights as floats, some rows at a time: columns of a product do not know of each other."""
    n, k = w.shape
    plain_chain = chosen.contract.arithmetic == "fma" and chosen.contract.order.kind == "chain"
    panels = w.format.activations and w.layout == "panels"
    few = _FEW if dtype == FLOAT32 else _FEW_ROUNDED
    if panels and plain_chain and out.size <= few * n and _rounds_to(dtype):
        from ..backends.cpu.quant import linear as quant_linear

        for some, into in matrices(x, out):
            quant_linear.gemm_floats(some, w.panels(), w.format, into, bias, dtype)
        return
    if not w.format.quantized:
        plain = w.array()
        if plain.flags.aligned and (plain.dtype == dtype or dtype == x.dtype == FLOAT32):  # widened exactly, in place
            dispatch.run_rows(device, x, plain.T, out, bias, chosen)
            return
    rows = max(32, _PIECE // max(1, k) // 32 * 32)
    if panels and dtype == FLOAT32:
        _transposed(device, x, w, out, bias, chosen, rows)
        return
    room = np.empty((min(n, rows), k), dtype)
    for first in range(0, n, rows):
        part = w[first : first + rows]
        weight = room[: len(part)]
        part.dequantize_into(weight)
        here = slice(first, first + len(part))
        dispatch.run_rows(device, x, weight.T, out[..., here], None if bias is None else bias[here], chosen)


def _rounds_to(dtype: np.dtype[Any]) -> bool:
    from ..backends.cpu.quant.linear import rounds_to

    return rounds_to(dtype)


def _transposed(
    device: Device, x: Array, w: QuantizedMatrix, out: Array, bias: Array | None, chosen: Settings, columns: int
) -> None:
    """Weights as float32 [k, n], some columns at a time, from the panels."""
    from ..backends.cpu.quant import linear as quant_linear

    n, k = w.shape
    room = np.empty((k, columns), np.float32)
    for first in range(0, n, columns):
        here = slice(first, min(n, first + columns))
        width = here.stop - first
        quant_linear.values(w.panels(), w.format, k, first, room[:, : -(-width // 16) * 16])
        part = None if bias is None else bias[here]
        dispatch.run_rows(device, x, room[:, :width], out[..., here], part, chosen)
