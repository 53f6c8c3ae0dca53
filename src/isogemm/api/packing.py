"""Weights prepared once for many products."""

from __future__ import annotations

from typing import Any

from ..backends import open_device
from ..base.dtypes import check_dtype
from ..errors import ShapeError
from ..operands.prepared import PreparedWeight
from ..operands.tensors import uncompiled
from ..operands.views import view


@uncompiled
def pack(w: Any) -> PreparedWeight:
    """Prepare a weight w [n, k] once, for `isogemm.linear`.

    On the CPU: panels that every kernel reads as one stream. The result holds a copy of `w` in its dtype; later
    changes of `w` do not reach it. On a device of CUDA or WebGPU: a reference, with what a call asks of a weight looked
    up once. Kernels read the weight where it lies, so values written into `w` later are seen.

    Parameters
    ----------
    w : array [n, k]
        float32, bfloat16 or float16; any strides.

    Returns
    -------
    PackedWeight, DeviceWeight or WebGpuWeight

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
    check_dtype("packed w", w.dtype)
    packed: PreparedWeight = open_device(place).pack(w)
    return packed
