"""Block formats as data: how many elements a block holds, in how many bytes, and which field lies where.

A quantized row is a run of blocks; a block is a run of fields. Every format decodes by one formula,

    x[i] = (d * s[i // sub]) * q[i]  +  o * t[i // sub]

with codes q (integers, the zero point taken off), an integer scale s and an integer offset t for each sub-block of
`sub` elements, and two floats d and o for the block. Formats without s have s = 1, formats without o have no second
term. The layouts are GGUF's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np

from ..base import arguments
from ..errors import OptionError, ShapeError


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a block."""

    name: str
    offset: int  # bytes from the start of the block
    dtype: str  # a NumPy type, little endian
    count: int = 1  # elements

    @property
    def nbytes(self) -> int:
        """Bytes of the field."""
        return np.dtype(self.dtype).itemsize * self.count


@dataclass(frozen=True)
class BlockFormat:
    """A block format."""

    name: str  # GGUF's name
    block: int  # elements of a block
    nbytes: int  # bytes of a block
    fields: tuple[Field, ...]  # in the order of their offsets, without gaps
    sub: int = 1  # elements that share an integer scale and offset
    zero: int = 0  # zero point: what is subtracted from a stored code
    # low, high: least and greatest code, after the zero point
    low: int = 0
    high: int = 0
    offset: str = ""  # which field is o: "" where there is none; a leading "-" where it is subtracted
    # the format that activations are quantized to for the integer product; "" where there is none
    activations: str = ""
    fallback: str = ""  # the format to fall back to for rows that are no whole number of blocks

    def __str__(self) -> str:
        return self.name

    @property
    def quantized(self) -> bool:
        """Whether it has scales: everything but F32, F16 and BF16."""
        return self.block > 1

    @property
    def bits_per_weight(self) -> float:
        """Bits of one element, scales included."""
        return 8 * self.nbytes / self.block

    @property
    def scales(self) -> tuple[Field, ...]:
        """The floating-point fields of a block."""
        return tuple(f for f in self.fields if f.name in ("d", "m", "dmin")) if self.quantized else ()

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """The block as a NumPy structure."""
        return np.dtype(
            {
                "names": [f.name for f in self.fields],
                "formats": [f.dtype if f.count == 1 else (f.dtype, (f.count,)) for f in self.fields],
                "offsets": [f.offset for f in self.fields],
                "itemsize": self.nbytes,
            }
        )

    def row_bytes(self, k: int, name: str = "") -> int:
        """Bytes of a row of `k` elements: ``k / block * nbytes``, exactly.

        Raises
        ------
        ShapeError
            `k` is no multiple of the block; the error names the format that fits. There are no partial blocks.
        """
        what = f"{name + ': ' if name else ''}columns of a {self.name} matrix"
        k = arguments.whole(what, k)
        if k % self.block or k < 0:
            fit = self.fitting(k)
            below = k // self.block * self.block
            raise ShapeError(
                what,
                limit=f"a multiple of its block, {self.block}",
                value=k,
                nearest=f"{fit.name}, whose block is {fit.block}; or k = {below or self.block}",
            )
        return k // self.block * self.nbytes

    def row_offset(self, n: int, k: int) -> int:
        """Bytes from the start of a matrix of `k` columns to its row `n`."""
        return arguments.whole("row", n) * self.row_bytes(k)

    def fitting(self, k: int) -> BlockFormat:
        """This format, or the nearest one whose blocks fill a row of `k` elements."""
        chosen, k = self, arguments.whole("k", k)
        while k % chosen.block:
            chosen = FORMATS[chosen.fallback]
        return chosen


def _laid(*fields: tuple[str, str, int]) -> tuple[Field, ...]:
    """Fields one behind the other."""
    found, offset = [], 0
    for name, dtype, count in fields:
        found.append(Field(name, offset, dtype, count))
        offset += found[-1].nbytes
    return tuple(found)


_D, _M, _DMIN = ("d", "<f2", 1), ("m", "<f2", 1), ("dmin", "<f2", 1)


def _bytes(name: str, count: int) -> tuple[str, str, int]:
    return name, "u1", count


def _formats() -> tuple[BlockFormat, ...]:
    small: Any = {"block": 32, "sub": 32, "activations": "Q8_0", "fallback": "F16"}
    large: Any = {"block": 256, "activations": "Q8_K"}
    qs16, qs64, qs128 = (_bytes("qs", n) for n in (16, 64, 128))
    return (
        BlockFormat("F32", 1, 4, _laid(("x", "<f4", 1))),
        BlockFormat("F16", 1, 2, _laid(("x", "<f2", 1))),
        BlockFormat("BF16", 1, 2, _laid(("x", "<u2", 1))),
        BlockFormat("Q8_0", nbytes=34, fields=_laid(_D, ("qs", "i1", 32)), low=-128, high=127, **small),
        BlockFormat(
            "Q5_0", nbytes=22, fields=_laid(_D, _bytes("qh", 4), qs16), zero=16, low=-16, high=15, **small
        ),
        BlockFormat("Q5_1", nbytes=24, fields=_laid(_D, _M, _bytes("qh", 4), qs16), high=31, offset="m", **small),
        BlockFormat("Q4_0", nbytes=18, fields=_laid(_D, qs16), zero=8, low=-8, high=7, **small),
        BlockFormat("Q4_1", nbytes=20, fields=_laid(_D, _M, qs16), high=15, offset="m", **small),
        BlockFormat(
            "Q2_K", nbytes=84, fields=_laid(_bytes("scales", 16), qs64, _D, _DMIN), sub=16, high=3, offset="-dmin",
            fallback="Q4_0", **large,
        ),
        BlockFormat(
            "Q3_K", nbytes=110, fields=_laid(_bytes("hmask", 32), qs64, _bytes("scales", 12), _D), sub=16, zero=4,
            low=-4, high=3, fallback="Q4_0", **large,
        ),
        BlockFormat(
            "Q4_K", nbytes=144, fields=_laid(_D, _DMIN, _bytes("scales", 12), qs128), sub=32, high=15,
            offset="-dmin", fallback="Q5_0", **large,
        ),
        BlockFormat(
            "Q5_K", nbytes=176, fields=_laid(_D, _DMIN, _bytes("scales", 12), _bytes("qh", 32), qs128), sub=32, high=31,
            offset="-dmin", fallback="Q5_1", **large,
        ),
        BlockFormat(
            "Q6_K", nbytes=210, fields=_laid(_bytes("ql", 128), _bytes("qh", 64), ("scales", "i1", 16), _D), sub=16,
            zero=32, low=-32, high=31, fallback="Q8_0", **large,
        ),
        # Of activations: a float32 scale, and the sums of each 16 codes.
        BlockFormat(
            "Q8_K", 256, 292, _laid(("d", "<f4", 1), ("qs", "i1", 256), ("bsums", "<i2", 16)), sub=256, low=-127,
            high=127, fallback="Q8_0",
        ),
    )  # fmt: skip


FORMATS = MappingProxyType({f.name: f for f in _formats()})
"""Every format by its name."""

_ALIASES = {"FP32": "F32", "FP16": "F16", "FLOAT32": "F32", "FLOAT16": "F16", "BFLOAT16": "BF16"}


def format_of(name: str | BlockFormat) -> BlockFormat:
    """The format with that name; case does not matter, and FP32 and FP16 are F32 and F16.

    Raises
    ------
    OptionError
        No such format; the error names the closest one.
    """
    if isinstance(name, BlockFormat):
        return name
    key = name.upper() if isinstance(name, str) else ""
    found = FORMATS.get(_ALIASES.get(key, key))
    if found is None:
        close = arguments.nearest(key, FORMATS, "Q8_0", alike=0.0)
        raise OptionError("format", limit="one of " + ", ".join(FORMATS), value=repr(name), nearest=close)
    return found
