"""Operands that separate one arithmetic from another: every category of a golden case, drawn bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = Any


@dataclass(frozen=True)
class Format:
    """A floating-point format inside a storage word: exponent bits, fraction bits, low bits that stay for rounding."""

    name: str
    word: type
    exponent: int
    fraction: int
    low: int = 0

    @property
    def bias(self) -> int:
        return (1 << (self.exponent - 1)) - 1

    @property
    def top(self) -> int:
        """The exponent field of infinities and NaN."""
        return (1 << self.exponent) - 1

    def draw(self, rng: Any, shape: tuple[int, int], first: int, last: int, zeros: float = 0.0) -> Array:
        """Random bits with exponent fields in [first, last]; field 0 is subnormal; a share of signed zeros."""
        sign = rng.integers(0, 2, shape, dtype=np.uint64) << (self.exponent + self.fraction + self.low)
        first, last = max(first, 0), max(min(last, self.top - 1), 2)
        field = rng.integers(first, last + 1, shape, dtype=np.uint64)
        rest = rng.integers(0, 1 << (self.fraction + self.low), shape, dtype=np.uint64)
        magnitude = np.where(rng.random(shape) < zeros, np.uint64(0), (field << (self.fraction + self.low)) | rest)
        return (sign | magnitude).astype(self.word)

    def round(self, x: Array) -> Array:
        """Bits of float64 numbers of ordinary size, rounded to the storage word."""
        if self.name == "float16":
            return x.astype(np.float16).view(np.uint16)
        bits = x.astype(np.float32).view(np.uint32)
        if self.name != "bfloat16":
            return bits
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)

    def special(self, which: str) -> int:
        shift = self.fraction + self.low
        largest = (self.top << shift) - 1
        return {"inf": self.top << shift, "nan": (self.top << shift) | (1 << (shift - 1)), "max": largest,
                "one": self.bias << shift, "smallest": 1 << self.low}[which]  # fmt: skip

    @property
    def sign(self) -> int:
        return 1 << (self.exponent + self.fraction + self.low)


BF16 = Format("bfloat16", np.uint16, 8, 7)
FP16 = Format("float16", np.uint16, 5, 10)
TF32 = Format("tf32", np.uint32, 8, 10, low=13)
FP32 = Format("float32", np.uint32, 8, 23)
SIZES = {1: (24, 24), 7: (24, 24), 16: (24, 24), 96: (12, 12), 100: (12, 16), 333: (8, 8), 336: (8, 8), 2568: (4, 8)}
Draw = Callable[[Any, Format, int, int, int], tuple[Array, Array]]


def normal(rng: Any, f: Format, m: int, n: int, k: int) -> tuple[Array, Array]:
    return f.round(rng.standard_normal((m, k))), f.round(rng.standard_normal((k, n)))


def heavy(rng: Any, f: Format, m: int, n: int, k: int) -> tuple[Array, Array]:
    def one(*shape: int) -> Array:
        x = rng.standard_normal(shape) * np.exp(2 * rng.standard_normal(shape))
        return f.round(np.clip(x, -3e4, 3e4))

    return one(m, k), one(k, n)


def cancelling(rng: Any, f: Format, m: int, n: int, k: int) -> tuple[Array, Array]:
    """Terms in pairs x*y, -x*y' with y' a unit away from y at most, pairs scattered over K."""
    a, b = heavy(rng, f, m, n, k)
    half, order = k // 2, rng.permutation(k)
    left, right = order[:half], order[half : 2 * half]
    a[:, right] = a[:, left]
    nudge = rng.integers(0, 2, (half, n)).astype(f.word) << f.low
    b[right] = (b[left] ^ f.word(f.sign)) ^ nudge.astype(f.word)
    return a, b


def ones(rng: Any, f: Format, m: int, n: int, k: int) -> tuple[Array, Array]:
    one = f.word(f.special("one"))
    return np.full((m, k), one, f.word), np.full((k, n), one, f.word)


def wide(rng: Any, f: Format, m: int, n: int, k: int) -> tuple[Array, Array]:
    """Exponents all over, with zeros: everything in half precision, subnormal operands too."""
    reach = f.bias if f is FP16 else 24
    return tuple(f.draw(rng, s, f.bias - reach, f.bias + reach, 0.1) for s in ((m, k), (k, n)))


def near(rng: Any, f: Format, m: int, n: int, k: int) -> tuple[Array, Array]:
    """Exponents a few apart, so that truncation of small terms decides."""
    return f.draw(rng, (m, k), f.bias - 7, f.bias + 2, 0.05), f.draw(rng, (k, n), f.bias - 7, f.bias + 2, 0.05)


def subnormal_left(rng: Any, f: Format, m: int, n: int, k: int) -> tuple[Array, Array]:
    """Subnormal and smallest normal operands against large ones."""
    low, high = (10, 30) if f is FP16 else (f.bias + 104, f.bias + 120)
    return f.draw(rng, (m, k), 0, 2, 0.05), f.draw(rng, (k, n), low, high, 0.05)


def subnormal_mixed(rng: Any, f: Format, m: int, n: int, k: int) -> tuple[Array, Array]:
    """A few subnormal operands among small normal ones whose products are of like size."""
    a, b = f.draw(rng, (m, k), 0, 12, 0.05), f.draw(rng, (k, n), 0, 12, 0.05)
    if f is not FP16:  # the other side brings products back to where float32 is normal
        b = f.draw(rng, (k, n), f.bias + 96, f.bias + 110, 0.05)
    return a, b


def subnormal_result(rng: Any, f: Format, m: int, n: int, k: int) -> tuple[Array, Array]:
    """Products about float32's smallest number and far below."""
    middle = f.bias - 74
    return f.draw(rng, (m, k), middle - 5, middle + 5, 0.05), f.draw(rng, (k, n), middle - 5, middle + 5, 0.05)


def underflow(rng: Any, f: Format, m: int, n: int, k: int) -> tuple[Array, Array]:
    """Powers of two whose products lie from above float32's smallest number to far below the last bit of any sum."""
    shift = f.fraction + f.low
    fields = (f.bias - 82, f.bias - 69)
    return tuple((f.draw(rng, s, *fields) >> shift << shift).astype(f.word) for s in ((m, k), (k, n)))


def subnormal_both(rng: Any, f: Format, m: int, n: int, k: int) -> tuple[Array, Array]:
    """Both operands subnormal."""
    return f.draw(rng, (m, k), 0, 1, 0.05), f.draw(rng, (k, n), 0, 1, 0.05)


def special(rng: Any, f: Format, m: int, n: int, k: int) -> tuple[Array, Array]:
    """Infinities, NaN, zeros, largest and smallest numbers of both signs, rare enough to meet one at a time."""
    a, b = normal(rng, f, m, n, k)
    for x in (a, b):
        share = min(0.4, 1.5 / k)
        hit = rng.random(x.shape) < share
        names = ["inf", "inf", "max", "smallest", "zero", "zero", "nan"]
        values = np.array([0 if s == "zero" else f.special(s) for s in names], np.uint64)
        pick = rng.choice(values, x.shape) | (rng.integers(0, 2, x.shape, dtype=np.uint64) * np.uint64(f.sign))
        x[hit] = pick[hit].astype(f.word)
    return a, b


def overflow(rng: Any, f: Format, m: int, n: int, k: int) -> tuple[Array, Array]:
    """Sums on both sides of 2**128."""
    middle = f.bias + (15 if f is FP16 else 62)
    return f.draw(rng, (m, k), middle - 2, middle + 1, 0.1), f.draw(rng, (k, n), middle - 2, middle + 1, 0.1)


def overflow_far(rng: Any, f: Format, m: int, n: int, k: int) -> tuple[Array, Array]:
    """Products far beyond float32 that may cancel."""
    a, b = f.draw(rng, (m, k), f.top - 6, f.top - 1), f.draw(rng, (k, n), f.top - 6, f.top - 1)
    if k > 1:
        a[:, 1::2], b[1::2] = a[:, : k - 1 : 2], b[: k - 1 : 2] ^ f.word(f.sign)
    return a, b


def zeros(rng: Any, f: Format, m: int, n: int, k: int) -> tuple[Array, Array]:
    """Signed zeros, ones and smallest numbers: sums that are exactly zero, or a zero of either sign."""

    def one(*shape: int) -> Array:
        values = np.array([0, 0, 0, f.special("one"), f.special("smallest")], np.uint64)
        return (rng.choice(values, shape) | (rng.integers(0, 2, shape, dtype=np.uint64) * np.uint64(f.sign))).astype(
            f.word
        )

    a, b = one(m, k), one(k, n)
    a[0], b[:, 0] = 0, f.sign  # every product of row 0 and of column 0 is a zero; of (0, 0) a negative one
    a[1], b[:, 1] = f.sign, 0
    return a, b


START_FIELDS = {
    "heavy": (117, 137),
    "near": (111, 129),
    "wide": (87, 157),
    "cancelling": (117, 131),
    "subnormal_left": (100, 124),
    "subnormal_mixed": (100, 120),
    "subnormal_result": (0, 3),
    "subnormal_both": (0, 2),
    "underflow": (0, 2),
    "overflow": (250, 254),
}
START_FIELDS_HALF = {"subnormal_left": (94, 118), "subnormal_mixed": (80, 112), "subnormal_both": (76, 100)}


def start(rng: Any, category: str, f: Format, m: int, n: int) -> Array:
    """float32 bits to start from, of a size at which the products of the category matter."""
    fields = START_FIELDS_HALF.get(category) if f is FP16 else None
    out = FP32.draw(rng, (m, n), *(fields or START_FIELDS.get(category, (120, 131))), 0.1)
    if category == "zeros":
        out = (out & 0x80000000).astype(np.uint32)
    if category == "special":
        values = np.array([0x7F800000, 0xFF800000, 0x7FC00001, 0x7F7FFFFF, 0xFF7FFFFF, 0, 0x80000000, 1], np.uint32)
        out = np.where(rng.random((m, n)) < 0.2, rng.choice(values, (m, n)), out)
    return out


PLAN: dict[str, tuple[Draw, tuple[int, ...], tuple[int, ...]]] = {
    # category: drawing, K without a start, K with one
    "normal": (normal, (1, 7, 16, 100, 333, 2568), (7, 100)),
    "heavy": (heavy, (1, 7, 16, 100, 333, 2568), (16, 333)),
    "cancelling": (cancelling, (7, 16, 100, 333, 2568), (16, 100)),
    "ones": (ones, (1, 7, 16, 100, 333, 2568), (7,)),
    "wide": (wide, (1, 7, 16, 100, 333), (16, 100)),
    "near": (near, (7, 16, 100), (1, 7, 16, 100)),
    "subnormal_left": (subnormal_left, (1, 7, 16, 100), (1, 7, 16, 100)),
    "subnormal_mixed": (subnormal_mixed, (1, 7, 16, 100), (1, 7, 16, 100)),
    "subnormal_both": (subnormal_both, (1, 7, 16, 100), (1, 7, 16, 100)),
    "subnormal_result": (subnormal_result, (1, 7, 16, 100, 333), (1, 7, 16, 100)),
    "underflow": (underflow, (7, 16, 100), (1, 16)),
    "special": (special, (1, 7, 16, 100), (1, 7, 16, 100)),
    "overflow": (overflow, (1, 7, 16, 100), (1, 7, 16, 100)),
    "overflow_far": (overflow_far, (1, 7, 16, 100), (7, 16)),
    "zeros": (zeros, (1, 7, 16, 100), (1, 7, 16, 100)),
}
# multiples of 16, the step of the GPU's fma tiles: padding of K adds +0 * +0, which turns an accumulator of -0 into +0
FLOAT32_PLAN = {
    "normal": (16, 336),
    "heavy": (336,),
    "cancelling": (96,),
    "wide": (96,),
    "subnormal_left": (16,),
    "subnormal_result": (16, 96),
    "underflow": (16, 96),
    "special": (16, 96),
    "overflow": (16, 96),
    "zeros": (16,),
}


@dataclass(frozen=True)
class Case:
    """One product: operands and start as bits."""

    name: str
    format: Format
    a: Array
    b: Array
    c: Array | None


def cases(seed: int, grow: int = 1) -> Iterator[Case]:
    """Every case, drawn in a fixed order; `grow` multiplies m and n."""
    rng = np.random.default_rng(seed)
    for f in (BF16, FP16, TF32, FP32):
        for category, (draw, plain, started) in PLAN.items():
            if f is FP16 and category == "underflow":
                continue  # its smallest product is 2**-48
            if f is FP32:
                plain, started = FLOAT32_PLAN.get(category, ()), FLOAT32_PLAN.get(category, ())[-1:]
            for k, with_start in [(k, False) for k in plain] + [(k, True) for k in started]:
                m, n = (grow * size for size in SIZES[k])
                a, b = draw(rng, f, m, n, k)
                c = start(rng, category, f, m, n) if with_start else None
                yield Case(f"{f.name}-{category}-k{k}{'-c' if with_start else ''}", f, a, b, c)
