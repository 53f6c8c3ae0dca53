"""Activations as 8-bit integers on the device, by a kernel that is held to `isogemm.contract.int32`."""

from __future__ import annotations

from typing import Any, NamedTuple

from numpy.typing import NDArray

from ...base.dtypes import FLOAT32
from ...operands.device_array import holder_of
from .adapter import Adapter
from .array import empty
from .launch import EXTRA, OUT, A, bound, placed
from .source import assembled, element

Array = NDArray[Any]


class Quantized(NamedTuple):
    """Rows of x [m, k]: words of four codes [m, k / 4], and scales [m, k / block]."""

    codes: Array
    scales: Array


def code_of_block(dtype: str, block: int) -> str:
    """The WGSL that quantizes rows of a type in blocks of 32 or 256."""
    return assembled("quantize_x", ("params", "integers", element("a", dtype), "rows"), {"BLOCK": block}, fused=True)


def run_quantize(adapter: Adapter, code: str, x: Array, block: int) -> Quantized:
    """The kernel's results, in new memory."""
    (m, k), place = x.shape, holder_of(x).place
    made = Quantized(empty((m, k // 4), FLOAT32, place), empty((m, k // block), FLOAT32, place))
    numbers = [m, k // block, k, 0]
    for view in (x, x, made.codes):
        numbers += placed(view, bound(view)[1])
    places = {A: bound(x), OUT: bound(made.codes), EXTRA: bound(made.scales)}
    adapter.launch(code, [*numbers, 0], places, (-(-k // 256), m))
    return made
