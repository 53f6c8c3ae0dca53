"""Tensor maps for the bulk copy engine: how a tile of a matrix is found in memory, as a kernel parameter of 128 bytes.

    encode = encoder("bfloat16", sizes=(n, k), strides=(ldb, 1), box=(128, 64), swizzle=128)
    launch(stream, encode(b_address), ...)

Sizes, strides and boxes are given as in Python, outermost first, in elements; the last stride is 1. What lies outside
the matrix is read as zeros and never written. A miss brings what was asked for into the second-level cache, no more:
256 bytes at a time cost decoding 5 % of its time and products of few rows 2 % (docs/design/0006-cuda-kernels.md).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from ctypes import addressof, c_char, c_uint, c_uint64

from ....errors import DTypeError, LayoutError, LimitError
from .libcuda import INVALID_CONTEXT, Driver, DriverError, context, driver

Encoder = Callable[[int], bytes]

DTYPES = {  # CUtensorMapDataType and bytes
    "uint8": (0, 1),
    "int8": (0, 1),
    "float16": (6, 2),
    "float32": (7, 4),
    "float64": (8, 8),
    "bfloat16": (9, 2),
    "int32": (3, 4),
    "tfloat32": (11, 4),
}
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
NBYTES, ALIGN, REMEMBERED = 128, 64, 512


def encoder(
    dtype: str,
    *,
    sizes: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    swizzle: int = 128,
    on: Driver | None = None,
) -> Encoder:
    """Fix everything about a tensor map but the address.

    Parameters
    ----------
    dtype : str
        One of `DTYPES`; ``tfloat32`` reads float32 rounded to tf32 by the copy engine.
    sizes, strides, box : sequence of 1 to 5 int
        Of the tensor and, for `box`, of the tile that one copy moves; in elements, outermost first.
    swizzle : {0, 32, 64, 128}
        Bytes over which 16-byte pieces of a row are permuted in shared memory; a row of the box is no longer than that.

    Returns
    -------
    callable
        ``encode(address) -> bytes``, 128 of them. Maps of recent addresses are remembered: a map is a function of its
        arguments alone.

    Raises
    ------
    DTypeError, LayoutError, LimitError
        What the copy engine cannot address, before the driver is asked. For the address: when encoding.
    """
    if dtype not in DTYPES:
        raise DTypeError("element type of a tensor map", limit=f"one of {sorted(DTYPES)}", value=dtype, nearest="uint8")
    kind, itemsize = DTYPES[dtype]
    _check(tuple(sizes), tuple(strides), tuple(box), itemsize, swizzle)
    on = on or driver()
    rank = len(sizes)
    dims = (c_uint64 * rank)(*reversed(sizes))
    steps = (c_uint64 * max(1, rank - 1))(*[step * itemsize for step in reversed(strides[:-1])])
    boxes, ones = (c_uint * rank)(*reversed(box)), (c_uint * rank)(*[1] * rank)
    fixed = (dims, steps, boxes, ones, 0, SWIZZLES[swizzle], 0, 0)  # not interleaved, L2 as it is, zeros outside
    doing = f"encoding a tensor map of {dtype}{list(sizes)}"

    @functools.lru_cache(maxsize=REMEMBERED)
    def encode(address: int) -> bytes:
        if address % 16 or not address:
            raise LayoutError(
                "address of a tensor map", limit="a multiple of 16 bytes", value=address, nearest=address & -16
            )
        memory = (c_char * (NBYTES + ALIGN))()
        offset = -addressof(memory) % ALIGN
        arguments = addressof(memory) + offset, kind, rank, address, *fixed
        try:
            on.call("cuTensorMapEncodeTiled", *arguments, doing=doing)
        except DriverError as error:
            if error.code != INVALID_CONTEXT:
                raise
            with context(on.entered(), on):  # a new thread has none, and any will do
                on.call("cuTensorMapEncodeTiled", *arguments, doing=doing)
        return memory.raw[offset : offset + NBYTES]

    return encode


def _check(sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], itemsize: int, swizzle: int) -> None:
    """The copy engine's rules, as cuda.h states them for cuTensorMapEncodeTiled."""
    rank = len(sizes)
    if not (1 <= rank <= 5 and len(strides) == len(box) == rank):
        given = f"{len(sizes)} sizes, {len(strides)} strides, box of {len(box)}"
        raise LayoutError(
            "rank of a tensor map", limit="1 to 5, the same for all", value=given, nearest=min(max(rank, 1), 5)
        )
    if strides[-1] != 1:
        raise LayoutError("last stride of a tensor map", limit="1", value=strides[-1], nearest=1)
    for step in strides[:-1]:
        if step * itemsize % 16 or not 0 <= step * itemsize < 2**40:
            limit = "a multiple of 16 bytes, under 2**40"
            raise LayoutError(
                "stride of a tensor map", limit=limit, value=step * itemsize, nearest=-(-step * itemsize // 16) * 16
            )
    for size in sizes:
        if not 1 <= size <= 2**32:
            raise LimitError("size of a tensor map", limit="1 to 2**32", value=size, nearest=min(max(size, 1), 2**32))
    for tile in box:
        if not 1 <= tile <= 256:
            raise LimitError("box of a tensor map", limit="1 to 256", value=tile, nearest=min(max(tile, 1), 256))
    if swizzle not in SWIZZLES:
        raise LayoutError("swizzle of a tensor map", limit=f"one of {list(SWIZZLES)}", value=swizzle, nearest=128)
    row = box[-1] * itemsize
    if row % 16 or (swizzle and row > swizzle):
        limit = f"a multiple of 16 bytes{f', at most {swizzle}' if swizzle else ''}"
        nearest = min(-(-row // 16) * 16, swizzle or 4096)
        raise LayoutError("row of a tensor map's box", limit=limit, value=row, nearest=nearest)
