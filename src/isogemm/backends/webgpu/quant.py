"""Products with quantized weights: their bytes are uploaded once, as they are, and kernels read the blocks."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base.dtypes import FLOAT32, name_of
from ...contract.spec import Contract
from ...errors import ContractError, LimitError, OptionError
from ...operands.device_array import DeviceId
from ...operands.shapes import matrices
from ...problem.settings import Settings
from .adapter import Limits
from .array import WebGpuArray, empty, uploaded
from .choose import check_contract
from .integers import run_quantize
from .kernels import FORMATS
from .launch import KernelCall, bytes_of, shrinks
from .planes import laid

Array = NDArray[Any]


class BlockCopy:
    """The bytes of a quantized matrix on a device; `host` has the same rows on the host."""

    def __init__(self, host: Any, place: DeviceId) -> None:
        self.host, self.place, self.nbytes = host, place, int(host.rows.nbytes)
        # The bytes of the rows as `planes.laid` has them, in pairs [n, a row's pairs].
        self.native = uploaded(laid(np.ascontiguousarray(host.rows), host.format), place)

    def part(self, matrix: Any, rows: range) -> BlockCopy:
        """The copy of rows that `matrix` holds on the host: the same memory."""
        made = copy(self)
        made.host, made.nbytes = matrix, int(matrix.rows.nbytes)
        made.native = self.native[rows.start : rows.stop if rows.stop >= 0 else None : rows.step]
        return made

    def dequantize(self, dtype: str) -> WebGpuArray:
        """The weight as an array of the device; multiplied out on the host."""
        return WebGpuArray(uploaded(self.host.dequantize(dtype), self.place))

    def known(self, x: Any, bias: Any, out: Any, options: tuple[Any, ...]) -> None:
        """No call is remembered."""


def upload(matrix: Any, place: DeviceId, *, native: bool = False) -> BlockCopy:
    """The bytes of a matrix on a device.

    Raises
    ------
    OptionError
        No kernel reads the format.
    LimitError
        They do not fit into a buffer.
    """
    if matrix.format.name not in FORMATS:
        raise OptionError(
            f"format of weights on {place}", limit=", ".join(FORMATS), value=matrix.format.name,
            nearest="Q8_0" if matrix.format.quantized else "isogemm.webgpu.array(w.array())",
        )  # fmt: skip
    return BlockCopy(matrix, place)


def product(how: str, x: Array, w: Any, out: Array, bias: Array | None, contract: Contract) -> bool:
    """x @ w.T + bias into out, by kernels that read the blocks.

    Parameters
    ----------
    how : {"q8", "fp32", "same"}
        As `isogemm.api.quantized` has them.
    w : QuantizedMatrix
        With a copy on this device.

    Raises
    ------
    ContractError
        An order of integers other than the chain, or one that floats do not have here.
    """
    from .device import open_device

    there: BlockCopy = w._packed
    device = open_device(there.place)
    if not x.shape[-1]:
        return False
    if how == "q8" and contract.order.kind != "chain":
        raise ContractError(
            f"integer products on {there.place}", limit="int32/chain", value=contract, nearest="int32/chain"
        )
    size = w.format.block  # of activations, too
    for rows, into in matrices(x, out):
        asked = Settings(contract, out_dtype=into.dtype)
        if how == "q8":
            for part, sums in _row_parts(device.adapter.limits, rows, into):
                given = run_quantize(device.adapter, device.admissions.quantizer(name_of(x.dtype), size), part, size)
                walk = KernelCall(given.codes, there.native.T, sums, scales=given.scales)
                device.serve("integers", (name_of(FLOAT32), w.format.name), walk, asked, bias=bias)
        else:
            rounded = name_of(FLOAT32) if how == "fp32" else name_of(x.dtype)
            check_contract(device.place, contract)
            types = name_of(x.dtype), f"{w.format.name}:{rounded}"
            device.serve(contract.order.kind, types, KernelCall(rows, there.native.T, into), asked, bias=bias)
    return True


def _row_parts(limits: Limits, x: Array, out: Array) -> Iterator[tuple[Array, Array]]:
    """Rows of x and of out that kernels can see at once, as codes and as float32 sums, too; a row of out may be cut."""
    half = len(x) // 2
    seen = [bytes_of(x), x.size]
    if half:
        seen += [FLOAT32.itemsize * out.size, bytes_of(out) if shrinks(out, out[:half]) else 0]
    if max(seen) <= limits.binding and len(x) <= limits.groups:
        yield x, out
    elif half:
        for rows in (slice(0, half), slice(half, None)):
            yield from _row_parts(limits, x[rows], out[rows])
    else:
        raise LimitError(
            "bytes of a row of x in an integer product", limit=limits.binding, value=max(seen),
            nearest="activations='fp32'",
        )  # fmt: skip


def pieces(how: str, x: Array, w: Any) -> Iterator[tuple[Array, slice, Array]]:
    """x and the weight as they are for an empty K; all else `product` has."""
    n, k = w.shape
    dtype = FLOAT32 if how != "same" else x.dtype
    yield x, slice(0, n), empty((k, n), dtype, w._packed.place)
