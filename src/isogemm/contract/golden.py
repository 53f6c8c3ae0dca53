"""Golden products: small operands made of integers alone, and the bits of the reference for them, shipped as data.

An output element depends on its row of A and its column of B alone. So a block of a few rows and columns of every kind
of number says what a product of any size must be when those rows and columns are repeated: large products, which have
many tiles, many waves of blocks and ragged edges, cost no data.

Operands are drawn by a hash of (seed, row, column), never by a library's generator, whose streams may change.
`tools/golden_admission.py` writes the expected bits; a test holds them to `isogemm.contract.reference`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .spec import ARITHMETICS, Order

Array = NDArray[Any]
Words = NDArray[np.uint64]

ROWS, COLUMNS = 23, 29  # of the large blocks; coprime to every tile, so that a tile in a wrong place shows
FEW_ROWS, FEW_COLUMNS = 13, 17  # all pairs of kinds occur here too
KINDS = (
    "near",
    "wide",
    "paired",
    "ones",
    "subnormal",
    "special",
    "zeros",
    "underflow",
    "heavy",
    "near",
    "overflow",
)


@dataclass(frozen=True, slots=True)
class Format:
    """Exponent and fraction bits of a storage word."""

    word: type[np.unsignedinteger[Any]]
    exponent: int
    fraction: int

    @property
    def bias(self) -> int:
        return (1 << (self.exponent - 1)) - 1

    @property
    def sign(self) -> int:
        return 1 << (self.exponent + self.fraction)


FORMATS = {
    "bfloat16": Format(np.uint16, 8, 7),
    "float16": Format(np.uint16, 5, 10),
    "float32": Format(np.uint32, 8, 23),
}


@dataclass(frozen=True, slots=True)
class GoldenCase:
    """A product with known bits."""

    order: Order
    k: int
    started: bool = False  # the walk over K starts from `start`
    # rows, columns: size of the block of different rows and columns
    rows: int = FEW_ROWS
    columns: int = FEW_COLUMNS

    @property
    def seed(self) -> int:
        return self.k * 2 + self.started


def cases(arithmetic: str, *, small: bool = False) -> tuple[GoldenCase, ...]:
    """The cases of one arithmetic: K shorter than a step, with a tail, and long enough for every pipeline.

    512 is a multiple of every tile, 2568 of none: kernels are compiled differently for the two.
    """
    block = ARITHMETICS[arithmetic].block
    rows, columns = (FEW_ROWS, FEW_COLUMNS) if small else (ROWS, COLUMNS)
    one, long, short = GoldenCase, Order("leaf", 512), Order("leaf", max(16, block))
    chain = [one(Order(), k) for k in (512, 333, 100, 16, 7, 1)]
    chain += [one(Order(), 2568, False, rows, columns), one(Order(), 2568, True), one(Order(), 100, True)]
    leaf = [one(long, 2568), one(long, 2568, True), one(Order("leaf", 4096), 4168), one(short, 100)]
    tree = [one(Order("tree", n), k) for n, k in ((2, 333), (4, 333), (16, 333), (8, 2568))]
    tree += [one(Order("tree", n), 4096) for n in (2, 4, 8, 16)]  # leaves of whole stages, whatever their depth
    return (*chain, *leaf, *tree)


def combinations() -> Iterator[tuple[str, str, str]]:
    """(arithmetic, dtype of A, dtype of B) that bits are shipped for."""
    for name, arithmetic in ARITHMETICS.items():
        if name not in ("tensor_core:native", "exact"):  # what nothing evaluates, and what is no float
            yield from ((name, dtype, dtype) for dtype in arithmetic.operands)
    yield from (("fma", "float32", dtype) for dtype in ("bfloat16", "float16"))


def is_small(arithmetic: str, dtype_a: str, dtype_b: str) -> bool:
    """Whether a combination is held to the few rows alone."""
    return arithmetic == "tensor_core:sm80" or dtype_a != dtype_b or (arithmetic == "fma" and dtype_a != "float32")


def data_path() -> Path:
    """The file of expected bits."""
    return Path(__file__).with_suffix(".npz")


@lru_cache(maxsize=64)
def operands(case: GoldenCase, dtype_a: str, dtype_b: str) -> tuple[Array, Array]:
    """Bits of A [rows, k] and B [k, columns]; kept, so not to be written to."""
    a = _side(case, FORMATS[dtype_a], case.rows, left=True)
    b = np.ascontiguousarray(_side(case, FORMATS[dtype_b], case.columns, left=False).T)
    for x in (a, b):
        x.flags.writeable = False
    return a, b


def start(case: GoldenCase) -> Array:
    """Bits of the float32 C that the walk starts from: every exponent, signed zeros, infinities and NaN."""
    words = _hash(case.seed * 4 + 2, case.rows, case.columns)
    bits = _draw(words, FORMATS["float32"], 112, 142)
    odd = np.array([0, 1 << 31, 0x7F800000, 0xFF800000, 0x7FC00001, 1, 0x80000001, 0x00800000], np.uint32)
    return np.where(words % np.uint64(7) == 0, odd[(words >> np.uint64(40)) % np.uint64(8)], bits)


def epilogue_operands(case: GoldenCase, dtype_c: str, dtype_bias: str) -> tuple[Array, Array]:
    """Bits of a C [rows, columns] and of a bias [columns] of the size of ordinary sums."""
    fields = {"float16": (10, 22), "bfloat16": (118, 134), "float32": (118, 134)}
    c = _draw(_hash(case.seed * 4 + 3, case.rows, case.columns), FORMATS[dtype_c], *fields[dtype_c])
    bias = _draw(_hash(case.seed * 4 + 3, 1, case.columns), FORMATS[dtype_bias], *fields[dtype_bias])
    return c, bias[0]


def expected(arithmetic: str, dtype_a: str, dtype_b: str, case: GoldenCase) -> Array | None:
    """float32 bits of the accumulators [rows, columns]; None where none are shipped."""
    whole = _vectors().get(f"{arithmetic} {dtype_a} {dtype_b}")
    if whole is None:
        return None
    at = 0
    for other in cases(arithmetic, small=is_small(arithmetic, dtype_a, dtype_b)):
        size = other.rows * other.columns
        if other == case:
            return whole[at : at + size].reshape(other.rows, other.columns)
        at += size
    return None


@cache
def _vectors() -> dict[str, Array]:
    with np.load(data_path()) as file:
        return {name: file[name] for name in file.files}


def _hash(seed: int, rows: int, columns: int) -> Words:
    """splitmix64 of (seed, row, column); a row or a column does not depend on how many there are."""
    i, j = np.arange(rows, dtype=np.uint64), np.arange(columns, dtype=np.uint64)
    at: Words = (i[:, None] << np.uint64(20)) + j + np.uint64((seed + 1) << 40)
    z: Words = at * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Words = z ^ (z >> np.uint64(31))
    return mixed


def _draw(words: Words, f: Format, first: int, last: int) -> Array:
    """Random sign and fraction, exponent field in [first, last]."""
    last = min(last, (1 << f.exponent) - 2)
    exponent = np.uint64(first) + (words >> np.uint64(48)) % np.uint64(last - first + 1)
    fraction = words & np.uint64((1 << f.fraction) - 1)
    sign = (words >> np.uint64(47)) & np.uint64(1)
    shift = np.uint64(f.fraction)
    drawn: Array = ((sign << np.uint64(f.exponent + f.fraction)) | (exponent << shift) | fraction).astype(f.word)
    return drawn


def _side(case: GoldenCase, f: Format, count: int, *, left: bool) -> Array:
    """`count` vectors of length K; vector i holds numbers of the kind ``KINDS[i % len(KINDS)]``."""
    words = _hash(case.seed * 4 + left, count, case.k)
    out = np.empty((count, case.k), f.word)
    for i in range(count):
        out[i] = _vector(KINDS[i % len(KINDS)], f, words[i], left)
    return out


def _vector(kind: str, f: Format, words: Words, left: bool) -> Array:
    half, top = f.exponent == 5, (1 << f.exponent) - 1
    ranges = {
        "wide": (f.bias - (14 if half else 24), f.bias + (14 if half else 24)),
        "heavy": (f.bias - 3, f.bias + 9),
        "subnormal": (0, 2) if left else ((10, 30) if half else (f.bias + 104, f.bias + 120)),
        "underflow": (0, 3) if half else (f.bias - 80, f.bias - 66),
        "overflow": (f.bias + (13 if half else 60), f.bias + (15 if half else 66)),
    }
    x = _draw(words, f, *ranges.get(kind, (f.bias - 6, f.bias + 2)))
    one, sign = f.word(f.bias << f.fraction), f.word(f.sign)
    if kind == "ones":
        return np.full_like(x, one)
    if kind == "zeros":
        x = np.array([0, f.sign, 0, one, f.sign, 1, f.sign | 1, 0], f.word)[(words >> np.uint64(32)) % np.uint64(8)]
    if kind == "paired":  # terms that meet their negative, a unit away, half of K later
        pair = len(x) // 2
        nudge = (words[:pair] >> np.uint64(33)) & np.uint64(1)
        x[pair : 2 * pair] = x[:pair] if left else (x[:pair] ^ sign) ^ nudge.astype(f.word)
    if kind == "special":
        odd = np.array([top << f.fraction, (top << f.fraction) - 1, 1, (top << f.fraction) | (1 << (f.fraction - 1))])
        x[int(words[0]) % len(x)] = odd[int(words[0] >> np.uint64(32)) % 4] | (f.sign if left else 0)
    return x
