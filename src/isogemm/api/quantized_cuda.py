"""Linear layers with quantized weights on a CUDA device: kernels where there are, else floats and their products."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..backends.cuda.quant import family as quant_choose
from ..backends.cuda.quant import orders as quant_orders
from ..backends.cuda.quant.copy import DeviceCopy, Run
from ..base.dtypes import FLOAT32
from ..contract.spec import as_contract
from ..errors import ContractError
from ..operands import cuda as interop_cuda
from ..planner.device import Device
from ..problem.settings import Settings
from . import dispatch

if TYPE_CHECKING:
    from ..quant.matrix import QuantizedMatrix

__all__ = ["remember", "run"]

Array = NDArray[Any]

PIECE = 2**27  # dequantized elements at a time


def remember(
    x: Any, w: QuantizedMatrix, bias: Any, out: Any, options: tuple[Any, ...], result: Any, run: Run | None
) -> None:
    """Enter a call that was one kernel's."""
    if run is not None and out is None and w._packed is not None:
        w._packed.remember(x, bias, options, result, run)


def run(
    device: Device, how: str, x: Array, w: QuantizedMatrix, out: Array, bias: Array | None, chosen: Settings
) -> Run | None:
    """x @ w.T + bias into out, all views of device memory.

    Returns
    -------
    Run or None
        The kernel's launch, where one kernel did it all.
    """
    from .quantized import matrices

    copy = w._packed
    assert copy is not None
    if not out.size:
        return None
    if copy.packed is None or not x.shape[-1]:
        _floats(device, how, x, copy, out, bias, chosen)
        return None
    pairs = list(matrices(x, out))
    added = None if bias is None else interop_cuda.tensor(bias).contiguous()
    found = [_kernel(how, rows, into, copy, added, chosen) for rows, into in pairs]
    if all(call is not None for call in found):
        for call, (rows, into) in zip(found, pairs, strict=True):
            _call(call, rows, into, added)
        return found[0] if len(pairs) == 1 else None
    if how == "q8":
        for rows, into in pairs:
            quant_orders.integers(
                copy, interop_cuda.tensor(rows), interop_cuda.tensor(into), added, as_contract(str(chosen.contract))
            )
    else:
        _floats(device, how, x, copy, out, bias, chosen)
    return None


def _kernel(how: str, x: Array, out: Array, copy: DeviceCopy, bias: Any, chosen: Settings) -> Run | None:
    """The kernel for matrices x [m, k] and out [m, n], if one has the contract."""
    contract, assert_packed = chosen.contract, copy.packed
    assert assert_packed is not None
    if contract.order.kind != "chain":
        return None
    path = how
    if how == "same" and x.dtype == FLOAT32:
        path = "fp32"
    if contract.arithmetic != {"q8": "int32", "fp32": "fma"}.get(path, contract.arithmetic):
        return None
    if path == "same" and contract.arithmetic == "fma":
        return None
    case = quant_choose.Case(
        path, copy.format, x.dtype.name, out.dtype.name, None if bias is None else quant_choose.name_of(bias),
        len(x), *copy.shape,
    )  # fmt: skip
    return quant_choose.choose(case, assert_packed, contract.arithmetic, copy.place.ordinal)


def _call(run: Run | None, x: Array, out: Array, bias: Any) -> None:
    """Rows that begin at multiples of 16 bytes, and contiguous results: kernels count on these."""
    assert run is not None
    given, into = interop_cuda.tensor(x), interop_cuda.tensor(out)
    if not given.is_contiguous() or given.data_ptr() % 16:
        given = given.clone(memory_format=_contiguous())
    if into.is_contiguous():
        run(given, into, bias)
    else:
        made = into.new_empty(into.shape)
        run(given, made, bias)
        into.copy_(made)


def _contiguous() -> Any:
    import torch

    return torch.contiguous_format


def _floats(
    device: Device, how: str, x: Array, copy: DeviceCopy, out: Array, bias: Array | None, chosen: Settings
) -> None:
    """The product with weights of floats, under any contract that such a product has."""
    if how == "q8":
        if x.shape[-1]:
            raise ContractError(
                f"integer products of {copy.format} weights", limit="formats of blocks", value=str(chosen.contract),
                nearest="activations='fp32'",
            )  # fmt: skip
        chosen = Settings.checked(dispatch.DEFAULT, out_dtype=chosen.out_dtype)  # nothing is summed
    dtype = FLOAT32 if how == "fp32" else x.dtype
    if x.dtype != dtype:
        x = interop_cuda.from_tensor("x", interop_cuda.tensor(x).float())[0]
    n, k = copy.shape
    rows = max(1024, PIECE // max(1, k) // 1024 * 1024)
    for first in range(0, n, rows):  # columns of a product do not know of each other
        here = slice(first, min(n, first + rows))
        weight = interop_cuda.from_tensor("w", copy.dequantize(np.dtype(dtype).name, here))[0]
        part = None if bias is None else bias[here]
        dispatch.run_rows(device, x, weight.T, out[..., here], part, chosen)
