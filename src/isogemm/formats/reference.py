"""What a block means, in NumPy: the definition that the compiled loops are held to.

`decode` takes a block apart into integers and floats, `dequantize` multiplies them out as the file format's own
reader does: float32 throughout, each operation rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ..contract.int32 import Codes
from .blocks import BlockFormat

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]


def decode(rows: Array, fmt: BlockFormat) -> Codes:
    """Rows of blocks, uint8 [n, row bytes] of a quantized format, as integers and floats."""
    n = rows.shape[0]
    blocks = np.ascontiguousarray(rows).reshape(n, rows.shape[1] // fmt.nbytes, fmt.nbytes).view(fmt.dtype)[..., 0]
    q = _CODES[fmt.name](blocks).astype(np.int32).reshape(n, blocks.shape[1] * fmt.block) - fmt.zero
    scales, mins = _SCALES[fmt.name](blocks) if fmt.name in _SCALES else (None, None)
    d = blocks["d"].astype(np.float32)
    offset = blocks[fmt.offset.lstrip("-")].astype(np.float32) if fmt.offset else None
    if offset is not None and fmt.offset.startswith("-"):
        offset = -offset
    count = (n, blocks.shape[1] * (fmt.block // fmt.sub))
    ones = np.ones(count, np.int32)
    return Codes(
        fmt.block,
        fmt.sub,
        q,
        ones if scales is None else scales.astype(np.int32).reshape(count),
        d,
        None if offset is None else ones if mins is None else mins.astype(np.int32).reshape(count),
        offset,
    )


def dequantize(rows: Array, fmt: BlockFormat) -> Floats:
    """Rows of blocks, uint8 [n, row bytes], as float32 [n, k], with the bits of the ``gguf`` package."""
    if not fmt.quantized:
        raw = np.ascontiguousarray(rows).view(fmt.dtype)["x"]
        return (raw.astype(np.uint32) << 16).view(np.float32) if fmt.name == "BF16" else raw.astype(np.float32)
    from ..base.floating import ieee_defaults  # loads Numba, which reading a format should not

    c = decode(rows, fmt)
    n, k = c.q.shape
    shape = (n, k // c.block, c.block // c.sub)
    with np.errstate(all="ignore"), ieee_defaults():
        scale = c.d[..., None] * c.scales.reshape(shape).astype(np.float32)
        x = scale[..., None] * c.q.reshape(*shape, c.sub).astype(np.float32)
        if c.offset is not None and c.mins is not None:
            x = x + (c.offset[..., None] * c.mins.reshape(shape).astype(np.float32))[..., None]
    return x.reshape(n, k)


def _nibbles(qs: Array) -> Array:
    """Bytes [..., j]: low nibbles first, then high ones."""
    joined: Array = np.concatenate([qs & 15, qs >> 4], -1)
    return joined


def _unpacked(x: Array, bits: int, count: int) -> Array:
    """[..., count, bytes]: `bits` of each byte, `count` times, each `bits` further up."""
    shifts = bits * np.arange(count, dtype=np.uint8)
    found: Array = (x[..., None, :] >> shifts[:, None]) & np.uint8((1 << bits) - 1)
    return found


def _chunks(x: Array, size: int) -> Array:
    return np.reshape(x, (*x.shape[:-1], x.shape[-1] // size, size))


def _flat(x: Array, b: Array, count: int) -> Array:
    """`count` numbers for each block."""
    return np.reshape(x, (*b.shape, count))


def _five(b: Array) -> Array:
    high = np.unpackbits(b["qh"], axis=-1, bitorder="little")
    codes: Array = np.bitwise_or(_nibbles(b["qs"]), high << 4)
    return codes


def _q3(b: Array) -> Array:
    low = _flat(_unpacked(_chunks(b["qs"], 32), 2, 4), b, 256)
    codes: Array = np.bitwise_or(low, _flat(_unpacked(b["hmask"], 1, 8), b, 256) << 2)
    return codes


def _q4k(b: Array) -> Array:
    return _flat(_unpacked(_chunks(b["qs"], 32), 4, 2), b, 256)


def _q5k(b: Array) -> Array:
    codes: Array = np.bitwise_or(_q4k(b), _flat(_unpacked(b["qh"], 1, 8), b, 256) << 4)
    return codes


def _q6k(b: Array) -> Array:
    low = _flat(_unpacked(_chunks(b["ql"], 64), 4, 2), b, 256)
    codes: Array = np.bitwise_or(low, _flat(_unpacked(_chunks(b["qh"], 32), 2, 4), b, 256) << 4)
    return codes


_CODES: dict[str, Callable[[Array], Array]] = {
    "Q8_0": lambda b: b["qs"],
    "Q8_K": lambda b: b["qs"],
    "Q5_0": _five,
    "Q5_1": _five,
    "Q4_0": lambda b: _nibbles(b["qs"]),
    "Q4_1": lambda b: _nibbles(b["qs"]),
    "Q2_K": lambda b: _unpacked(_chunks(b["qs"], 32), 2, 4),
    "Q3_K": _q3,
    "Q4_K": _q4k,
    "Q5_K": _q5k,
    "Q6_K": _q6k,
}


def _scales2(b: Array) -> tuple[Array, Array | None]:
    return b["scales"] & 15, b["scales"] >> 4


def _scales3(b: Array) -> tuple[Array, Array | None]:
    """Sixteen 6-bit numbers: low nibbles in bytes 0 to 7, high pairs in bytes 8 to 11."""
    low = _flat(_unpacked(b["scales"][..., :8], 4, 2), b, 16)
    high = _flat(_unpacked(b["scales"][..., 8:], 2, 4), b, 16)
    return (low | (high << 4)).astype(np.int32) - 32, None


def _scales4(b: Array) -> tuple[Array, Array | None]:
    """Eight 6-bit scales and eight 6-bit minima in twelve bytes."""
    first, second, third = (b["scales"][..., i : i + 4] for i in (0, 4, 8))
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 2) & 48)], -1)
    return scales, np.concatenate([second & 63, (third >> 4) | ((second >> 2) & 48)], -1)


_SCALES: dict[str, Callable[[Array], tuple[Array, Array | None]]] = {
    "Q2_K": _scales2,
    "Q3_K": _scales3,
    "Q4_K": _scales4,
    "Q5_K": _scales4,
    "Q6_K": lambda b: (b["scales"], None),
}
