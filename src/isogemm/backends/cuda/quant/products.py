"""Linear layers with quantized weights on a CUDA device: kernels where there are, else floats and their products."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....base.dtypes import FLOAT32, torch_name
from ....contract.spec import Contract
from ....errors import ContractError
from ....operands import cuda as arrays
from ....operands.shapes import matrices
from ....problem.product import alignment
from . import family, orders
from .case import QuantCase
from .copy import DeviceCopy, adopt, upload
from .family import QuantRun

__all__ = ["adopt", "pieces", "product", "upload"]

Array = NDArray[Any]

PIECE = 2**27  # dequantized elements at a time


def product(how: str, x: Array, w: Any, out: Array, bias: Array | None, contract: Contract) -> QuantRun | bool:
    """x @ w.T + bias into out, all views of device memory, by kernels that read the blocks; `how`: q8, fp32 or same.

    The kernel's launch, where one kernel did it all; whether it is done, else.

    Raises
    ------
    ContractError
        Integer products that no kernel has: floats could not stand in for them.
    """
    copy: DeviceCopy = w._packed
    if copy.packed is None or not x.shape[-1]:
        if how == "q8" and x.shape[-1]:
            raise ContractError(
                f"integer products of {copy.format} weights", limit="formats of blocks", value=str(contract),
                nearest="activations='fp32'",
            )  # fmt: skip
        return False
    pairs = list(matrices(x, out))
    added = None if bias is None else _placed(arrays.tensor(bias))
    asked = (_kernel(how, rows, into, copy, added, contract) for rows, into in pairs)
    found = [run for run in asked if run is not None]
    if len(found) == len(pairs):
        for run, (rows, into) in zip(found, pairs, strict=True):
            _call(run, rows, into, added)
        return found[0] if len(pairs) == 1 else True
    if how == "q8":
        for rows, into in pairs:
            orders.integers(copy, arrays.tensor(rows), arrays.tensor(into), added, contract)
    return how == "q8"


def _kernel(how: str, x: Array, out: Array, copy: DeviceCopy, bias: Any, contract: Contract) -> QuantRun | None:
    """The kernel for matrices x [m, k] and out [m, n], if one has the contract."""
    packed = copy.packed
    if packed is None or contract.order.kind != "chain":
        return None
    path = how
    if how == "same" and x.dtype == FLOAT32:
        path = "fp32"
    if contract.arithmetic != {"q8": "int32", "fp32": "fma"}.get(path, contract.arithmetic):
        return None
    if path == "same" and contract.arithmetic == "fma":
        return None
    case = QuantCase(
        path, copy.format, x.dtype.name, out.dtype.name, None if bias is None else torch_name(bias.dtype),
        len(x), *copy.shape, contract.arithmetic,
        out_align=alignment(out.ctypes.data, most=16) if out.flags.c_contiguous else 16,  # of a copy, see `_call`
    )  # fmt: skip
    return family.choose(case, packed, copy.place.ordinal)


def _placed(x: Any) -> Any:
    """The tensor, or a copy of it, side by side from a multiple of 16 bytes on."""
    import torch

    return x if x.is_contiguous() and not x.data_ptr() % 16 else x.clone(memory_format=torch.contiguous_format)


def _call(run: QuantRun, x: Array, out: Array, bias: Any) -> None:
    """Rows that begin at multiples of 16 bytes, and contiguous results: kernels count on these."""
    given, into = _placed(arrays.tensor(x)), arrays.tensor(out)
    if into.is_contiguous():
        run(given, into, bias)
    else:
        made = into.new_empty(into.shape)
        run(given, made, bias)
        into.copy_(made)


def pieces(how: str, x: Array, w: Any) -> Iterator[tuple[Array, slice, Array]]:
    """x as the product takes it, and weights as floats [k, columns] of its type, some columns at a time."""
    copy: DeviceCopy = w._packed
    dtype = FLOAT32 if how == "fp32" else x.dtype
    if x.dtype != dtype:
        x = arrays.from_tensor("x", arrays.tensor(x).float())[0]
    n, k = copy.shape
    rows = max(1024, PIECE // max(1, k) // 1024 * 1024)
    for first in range(0, n, rows):
        here = slice(first, min(n, first + rows))
        weight = arrays.from_tensor("w", copy.dequantize(np.dtype(dtype).name, here))[0]
        yield x, here, weight.T
