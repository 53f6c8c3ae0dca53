"""What a product must be, bit for bit, by the executable definition; and operands that lie in memory in odd ways."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from isogemm.contract import compare, reference

F32, BF16, F16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)
DTYPES = (F32, BF16, F16)
LAYOUTS = ("c", "f", "padded", "stepped", "reversed", "broadcast")


def values(shape: tuple[int, ...], dtype: np.dtype[Any] = F32, *, seed: int = 0, special: bool = False) -> np.ndarray:
    """Normal values; with `special` a few infinities, NaNs, signed zeros and subnormals among heavy tails."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape).astype(np.float32)
    if special:
        x *= np.exp2(rng.integers(-20, 20, shape)).astype(np.float32)
        odd = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, 1e-40, -6e-8], np.float32)
        x = np.where(rng.random(shape) < 0.02, rng.choice(odd, shape), x)
    with np.errstate(over="ignore"):
        return x.astype(dtype)


def laid(x: np.ndarray, layout: str) -> np.ndarray:
    """The values of `x` (of its first row, for ``broadcast``) as a view with that layout."""
    if x.ndim == 0 or layout == "c":
        return x
    if layout == "f":
        return np.asfortranarray(x)
    if layout == "broadcast":
        return np.broadcast_to(x[:1], x.shape)
    if layout == "reversed":
        return np.ascontiguousarray(x[..., ::-1])[..., ::-1]
    step = 1 if layout == "padded" else 2
    room = np.zeros([step * d + 3 for d in x.shape], x.dtype)
    view = room[tuple(slice(1, 1 + step * d, step) for d in x.shape)]
    view[...] = x
    return view


layouts = st.sampled_from(LAYOUTS)


def product(
    a: np.ndarray,
    b: np.ndarray,
    contract: str = "fma/chain",
    *,
    c: np.ndarray | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    bias: np.ndarray | None = None,
    out_dtype: Any = None,
    accumulate: bool = False,
) -> np.ndarray:
    """One product, by the reference."""
    dtype = np.dtype(a.dtype if out_dtype is None else out_dtype)
    if a.dtype != b.dtype:
        a, b = a.astype(np.float32), b.astype(np.float32)
    acc = reference.evaluate(a, b, contract, c if accumulate else None)
    return reference.epilogue(acc, alpha=alpha, beta=beta, c=c, bias=bias, out_dtype=dtype)


def stacked(a: np.ndarray, b: np.ndarray, contract: str = "fma/chain", out_dtype: Any = None) -> np.ndarray:
    """numpy.matmul's shapes, one reference product at a time."""
    ma, mb = (a[None] if a.ndim == 1 else a), (b[:, None] if b.ndim == 1 else b)
    batch = np.broadcast_shapes(ma.shape[:-2], mb.shape[:-2])
    ma, mb = np.broadcast_to(ma, batch + ma.shape[-2:]), np.broadcast_to(mb, batch + mb.shape[-2:])
    out = np.empty((*ma.shape[:-1], mb.shape[-1]), a.dtype if out_dtype is None else out_dtype)
    for i in np.ndindex(batch):
        out[i] = product(ma[i], mb[i], contract, out_dtype=out_dtype)
    if a.ndim == 1:
        out = out[..., 0, :]
    return out[..., 0] if b.ndim == 1 else out


def assert_same(got: Any, want: np.ndarray) -> None:
    """Same shape, dtype and bits; the failure names the first mismatch."""
    assert isinstance(got, np.ndarray)
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    assert compare.differing(got, want) == 0, str(compare.first_mismatch(got, want))


def poisoned(shape: tuple[int, ...], dtype: Any = F32) -> np.ndarray:
    """An array of NaNs, which no missed write survives."""
    return np.full(shape, np.nan, dtype)
