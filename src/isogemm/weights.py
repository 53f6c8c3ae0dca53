"""Weights prepared once for many products."""

from __future__ import annotations

from typing import Any

from .backends.cpu.packed import PackedWeight, prepare
from .errors import DTypeError, ShapeError
from .interop import array
from .problem import supported

__all__ = ["PackedWeight", "pack"]


def pack(w: Any) -> PackedWeight:
    """Prepare a weight w [n, k] once, for `isogemm.linear`: panels that every kernel reads as one stream.

    The result holds a copy of `w` in its dtype; later changes of `w` do not reach it.

    Parameters
    ----------
    w : array [n, k]
        float32, bfloat16 or float16; any strides.

    Returns
    -------
    PackedWeight

    Raises
    ------
    ShapeError
        `w` is not 2-D.
    DTypeError
        Another element type.

    Determinism
    -----------
    ``linear(x, pack(w))`` has the bits of ``linear(x, w)``.
    """
    w = array("w", w)
    if w.ndim != 2:
        raise ShapeError("w", limit="2-D [n, k]", value=f"{w.ndim}-D {w.shape}", nearest="w.reshape(n, k)")
    if w.dtype.name not in ("float32", "bfloat16", "float16"):
        raise DTypeError("w", limit=supported(w.dtype.name), value=w.dtype.name, nearest="float32")
    return prepare(w)
