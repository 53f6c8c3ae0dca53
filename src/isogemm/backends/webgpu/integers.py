"""Activations as 8-bit integers on the device, by a kernel that is held to `isogemm.contract.int32`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from numpy.typing import NDArray

from ...base.dtypes import FLOAT32, name_of
from ...operands.device_array import holder_of
from .adapter import Adapter
from .array import empty, offset_of
from .launch import EXTRA, OUT, A, bound, steps
from .source import assembled, element

if TYPE_CHECKING:
    from .admission import Admissions

__all__ = ["Quantized", "code_of_block", "quantized", "run_quantize"]

Array = NDArray[Any]


class Quantized(NamedTuple):
    """Rows of x [m, k]: words of four codes [m, k / 4], and scales [m, k / block]."""

    codes: Array
    scales: Array


def code_of_block(dtype: str, block: int) -> str:
    """The WGSL that quantizes rows of a type in blocks of 32 or 256."""
    return assembled("quantize_x", ("params", "integers", element("a", dtype)), {"BLOCK": block}, fused=True)


def quantized(adapter: Adapter, admissions: Admissions, x: Array, block: int) -> Quantized:
    """Rows of x, quantized by an admitted kernel.

    Raises
    ------
    ContractError
        The kernel's bits are others on this adapter.
    """
    size = 32 if block == 32 else 256
    return run_quantize(adapter, admissions.quantizer(name_of(x.dtype), size), x, size)


def run_quantize(adapter: Adapter, code: str, x: Array, block: int) -> Quantized:
    """The kernel's results, in new memory."""
    (m, k), place = x.shape, holder_of(x).place
    made = Quantized(empty((m, k // 4), FLOAT32, place), empty((m, k // block), FLOAT32, place))
    numbers = [m, k // block, k, 0]
    for view in (x, x, made.codes):
        numbers += [(offset_of(view) - bound(view)[1]) // view.itemsize, *steps(view)]
    places = {A: bound(x), OUT: bound(made.codes), EXTRA: bound(made.scales)}
    adapter.launch(code, [*numbers, 0], places, (-(-(k // block) // 64), m))
    return made
