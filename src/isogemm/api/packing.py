"""Weights prepared once for many products."""

from __future__ import annotations

from typing import Any

from ..backends.cpu.gemm.packed import PackedWeight, prepare
from ..backends.cuda.weight import DeviceWeight
from ..base.dtypes import supported
from ..errors import DTypeError, ShapeError
from ..operands.device_array import HOST
from ..operands.views import view

__all__ = ["DeviceWeight", "PackedWeight", "pack"]


def pack(w: Any) -> PackedWeight | DeviceWeight:
    """Prepare a weight w [n, k] once, for `isogemm.linear`.

    On the CPU: panels that every kernel reads as one stream. The result holds a copy of `w` in its dtype; later
    changes of `w` do not reach it. On a CUDA device: a reference, with all that a call asks of a weight looked up once.
    Kernels read the weight where it lies, so values written into `w` later are seen.

    Parameters
    ----------
    w : array [n, k]
        float32, bfloat16 or float16; any strides.

    Returns
    -------
    PackedWeight or DeviceWeight

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
    w, place = view("w", w)
    if w.ndim != 2:
        raise ShapeError("w", limit="2-D [n, k]", value=f"{w.ndim}-D {w.shape}", nearest="w.reshape(n, k)")
    if w.dtype.name not in ("float32", "bfloat16", "float16"):
        raise DTypeError("w", limit=supported(w.dtype.name), value=w.dtype.name, nearest="float32")
    if place is HOST:
        return prepare(w)
    from ..operands.cuda import tensor

    weight = tensor(w).detach()
    return DeviceWeight(weight, (weight.shape, weight.stride(), weight.dtype, weight.get_device()))
