"""Linear layers with quantized weights: which arithmetic, in which pieces; `isogemm.linear` comes here."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..backends import open_device
from ..base.arguments import one_of
from ..base.dtypes import FLOAT32
from ..contract.spec import Contract, ContractLike, Order, as_contract
from ..errors import OptionError
from ..operands.device_array import HOST
from ..planner.device import Device
from ..problem import settings
from ..problem.settings import Settings
from ..quant.matrix import QuantizedMatrix
from . import dispatch
from .operands import Operands

Array = NDArray[Any]

_host = open_device(HOST)

ACTIVATIONS = ("q8", "fp32", "same")
"""What activations become: blocks of 8-bit integers; float32; or what they are, weights rounded to their type."""


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
        result = np.empty((len(x), len(w)), np.float32) if out is None else out
        _host.quant.gemm(x, w.panels(), w.format, result)
        return result
    here = Operands()
    xx = here.view("x", x)
    here.note("w", w.place, moves=True)
    xbias, target = here.optional("bias", bias), here.optional("out", out)
    dispatch.check_linear(xx, w.shape, xbias)
    settings.check_operand("x", xx)  # no int8, as plain weights have it
    how, chosen = _choose(w, xx.dtype, contract, activations, out_dtype, here.device)
    dtype = chosen.out_dtype or xx.dtype
    shape = (*xx.shape[:-1], w.shape[0])
    w.check()
    if target is None:
        target = dispatch.allocate(here.device, shape, dtype)
    else:
        settings.check_out(target, shape, dtype, (("x", xx), ("w", w.rows), ("bias", xbias)))
    done = True
    if target.size:
        quant = here.device.quant
        done = quant.product(how, xx, w, target, xbias, chosen.contract)
        if not done:
            if how == "q8":  # of an empty K: nothing is summed
                chosen = Settings(Contract(), out_dtype=chosen.out_dtype)
            for rows, columns, weight in quant.pieces(how, xx, w):  # columns of a product do not know of each other
                part = None if xbias is None else xbias[columns]
                dispatch.run_rows(here.device, rows, weight, target[..., columns], part, chosen)
    result = here.result(target, out, x)
    if out is None and w._packed is not None and not isinstance(done, bool):  # one kernel's launch
        w._packed.remember(x, bias, options, result, done)
    return result


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
        one_of("activations", activations, ACTIVATIONS, "'q8'")
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
