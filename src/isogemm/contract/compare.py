"""Comparison of results: bits first, then units in the last place, then error against float64 in units of its bound.

Arrays of NumPy and tensors of torch on the CPU, which may be compared with each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ..errors import DeviceError, DTypeError, ShapeError
from ..operands.tensors import is_tensor, on_host

__all__ = ["Mismatch", "bits", "differing", "error_units", "first_mismatch", "is_nan", "ulp_distance"]

Array = npt.NDArray[Any]

_UNSIGNED: dict[np.dtype[Any], np.dtype[Any]] = {
    np.dtype(np.float64): np.dtype(np.uint64),
    np.dtype(np.float32): np.dtype(np.uint32),
    np.dtype(np.float16): np.dtype(np.uint16),
    np.dtype(ml_dtypes.bfloat16): np.dtype(np.uint16),
}


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first element, in row-major order, whose bits differ."""

    index: tuple[int, ...]
    # left_bits, right_bits: bit patterns in hexadecimal
    left_bits: str
    right_bits: str
    # left, right: values
    left: float
    right: float
    ulps: int  # `ulp_distance` of the two

    def __str__(self) -> str:
        where = ", ".join(map(str, self.index))
        left, right = f"{self.left_bits} ({self.left:.9g})", f"{self.right_bits} ({self.right:.9g})"
        return f"[{where}]: {left} against {right}, {self.ulps} ULP"


def bits(x: Array) -> Array:
    """The bit patterns of a floating-point array, as unsigned integers of the same width and shape.

    Raises
    ------
    DTypeError
        Not float64, float32, float16 or bfloat16.
    """
    x = np.asarray(_array("x", x) if is_tensor(x) else x)
    if x.dtype not in _UNSIGNED:
        raise DTypeError(
            "bit patterns", limit="float64, float32, float16 or bfloat16", value=x.dtype.name, nearest="float32"
        )
    return x.view(_UNSIGNED[x.dtype])


def differing(x: Array, y: Array) -> int:
    """Elements whose bits differ: -0 differs from +0, and a NaN equals only its own bit pattern.

    Raises
    ------
    ShapeError, DTypeError
        The arrays differ in shape or in dtype.
    """
    x, y = _pair(x, y)
    return int(np.count_nonzero(bits(x) != bits(y)))


def first_mismatch(x: Array, y: Array) -> Mismatch | None:
    """The first element whose bits differ in row-major order, or None.

    Raises
    ------
    ShapeError, DTypeError
        The arrays differ in shape or in dtype.
    """
    x, y = _pair(x, y)
    left, right = bits(x), bits(y)
    unequal = left != right
    if not unequal.any():
        return None
    index = tuple(int(i) for i in np.unravel_index(int(np.argmax(unequal)), unequal.shape))
    digits = 2 + 2 * left.itemsize
    at = tuple(slice(i, i + 1) for i in index)
    return Mismatch(
        index=index,
        left_bits=f"{int(left[index]):#0{digits}x}",
        right_bits=f"{int(right[index]):#0{digits}x}",
        left=float(x[index]),
        right=float(y[index]),
        ulps=int(ulp_distance(x[at], y[at]).reshape(())),
    )


def ulp_distance(x: Array, y: Array) -> npt.NDArray[np.int64]:
    """Steps between neighbouring numbers of the dtype that lead from x to y, never negative.

    Numbers stand in the order -inf, ..., -smallest, zero, +smallest, ..., +inf, so -0 and +0 are 0 apart and the two
    smallest subnormals 2. All NaNs are one point: 0 from each other, and the largest int64 from everything else. A
    float64 distance beyond int64 is that largest value too.

    Raises
    ------
    ShapeError, DTypeError
        The arrays differ in shape or in dtype.
    """
    x, y = _pair(x, y)
    far = np.iinfo(np.int64).max
    left, right = _ordinal(x), _ordinal(y)
    with np.errstate(over="ignore"):
        distance = np.abs(left - right)
    if x.dtype.itemsize == 8:  # ordinals of opposite sign can be more than int64 apart
        wrapped = ((left < 0) != (right < 0)) & (np.abs(left.astype(np.float64) - right.astype(np.float64)) >= 2.0**63)
        distance = np.where(wrapped, far, distance)
    nan_left, nan_right = is_nan(x), is_nan(y)
    out = np.where(nan_left | nan_right, np.where(nan_left & nan_right, 0, far), distance)
    return np.asarray(out, np.int64)


def error_units(got: Array, a: Array, b: Array) -> npt.NDArray[np.float64]:
    """Error of a product in units of its bound: ``|got - a @ b| / (eps * sqrt(K) * (|a| @ |b|))``.

    The product is taken in float64 and eps is 2**-23 for float32, 2**-10 for float16, 2**-7 for bfloat16. Never
    relative to the element itself: where terms cancel that says nothing. An exact element is 0; one that is off where
    the bound is zero, or not finite where float64 is (or the other way round), is infinite. Elements of which float64
    has no number are 0 where `got` has none either.

    Parameters
    ----------
    got : array [m, n]
    a : array [m, k]
    b : array [k, n]

    Raises
    ------
    ShapeError
        `got` is not [m, n].
    """
    got, a, b = _array("got", got), _array("a", a), _array("b", b)
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0] or got.shape != (a.shape[0], b.shape[1]):
        raise ShapeError(
            "error of a product",
            limit="got [m, n], a [m, k], b [k, n]",
            value=f"{got.shape}, {a.shape}, {b.shape}",
            nearest=(*a.shape[:1], *b.shape[1:]),
        )
    eps = float(ml_dtypes.finfo(got.dtype).eps)
    with np.errstate(all="ignore"):
        x, y, z = (np.asarray(v, np.float64) for v in (a, b, got))
        exact = x @ y
        unit = eps * np.sqrt(a.shape[1]) * (np.abs(x) @ np.abs(y))
        error = np.abs(z - exact)
        units = np.where(error == 0, 0.0, error / unit)
    alike = (np.isnan(z) & np.isnan(exact)) | (z == exact)
    odd = ~np.isfinite(z) | ~np.isfinite(exact)
    return np.where(odd, np.where(alike, 0.0, np.inf), units)


def is_nan(x: Array) -> npt.NDArray[np.bool_]:
    """Where `x` is NaN, read from its bits: `numpy.isnan` warns of signalling NaNs in bfloat16."""
    pattern = bits(x)
    infinity = bits(np.array(np.inf, x.dtype))
    sign = pattern.dtype.type(1 << (8 * int(pattern.itemsize) - 1))
    return np.asarray((pattern & ~sign) > infinity, np.bool_)


def _ordinal(x: Array) -> npt.NDArray[np.int64]:
    """Position of each number on the line, zero at zero."""
    pattern = bits(x)
    width = 8 * int(pattern.itemsize)
    magnitude = (pattern & pattern.dtype.type(2 ** (width - 1) - 1)).astype(np.int64)
    return np.asarray(np.where(pattern >> pattern.dtype.type(width - 1), -magnitude, magnitude), np.int64)


def _pair(x: Any, y: Any) -> tuple[Array, Array]:
    """Both as arrays, of one shape and dtype."""
    x, y = _array("x", x), _array("y", y)
    if x.shape != y.shape:
        raise ShapeError("comparison", limit="equal shapes", value=f"{x.shape} and {y.shape}", nearest=x.shape)
    if x.dtype != y.dtype:
        raise DTypeError("comparison", limit="equal dtypes", value=f"{x.dtype} and {y.dtype}", nearest=x.dtype.name)
    return x, y


def _array(name: str, x: Any) -> Array:
    """An array as it is, or a tensor's memory as one. Raises DTypeError or DeviceError: neither is here.

    Raises LayoutError: a tensor that is not dense.
    """
    if not is_tensor(x):
        if isinstance(x, np.ndarray | np.generic):
            return x  # type: ignore[return-value]
        raise DTypeError(name, limit="an array or a tensor", value=type(x).__name__, nearest=f"np.asarray({name})")
    if x.device.type != "cpu":
        limit = "this host's memory"
        raise DeviceError(f"device of {name}", limit=limit, value=str(x.device), nearest=f"{name}.cpu()")
    return on_host(x)
