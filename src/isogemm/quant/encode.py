"""Floats to quantized matrices."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..backends import open_device
from ..base.arguments import of_type
from ..base.dtypes import DTYPES
from ..errors import DTypeError, OptionError, ShapeError
from ..formats.blocks import FORMATS, BlockFormat, format_of
from ..formats.stored import prefix, too_large, unquantizable
from ..operands.device_array import HOST
from ..operands.tensors import uncompiled
from ..operands.views import array
from .matrix import PLAIN, QuantizedMatrix


@uncompiled
def quantize(w: Any, format: str | BlockFormat, *, name: str = "") -> QuantizedMatrix:
    """Quantize a weight, with the bits of ggml's reference.

    Blocks of 32 have the bytes of the ``gguf`` package; super-blocks those of ggml's reference where its compiler fuses
    no multiplication with an addition.

    Parameters
    ----------
    w : array [n, k]
        float32, bfloat16 or float16, any strides.
    format : str or BlockFormat
        Q8_0, Q5_0, Q5_1, Q4_0, Q4_1, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K or Q8_K; F32, F16 and BF16 convert.
    name : str
        For messages.

    Returns
    -------
    QuantizedMatrix

    Raises
    ------
    ShapeError
        `w` is not 2-D, or k is no multiple of the block; the error names the format that fits.
    DTypeError
        Another element type, or a name that is no text.
    FormatError
        An element is infinite or no number, or a scale is too large for float16; for F16 and BF16, which keep both,
        a finite element that they would make infinite.

    Determinism
    -----------
    A block's bytes depend on its elements and the format alone, not on the thread count.

    Examples
    --------
    >>> import isogemm, numpy as np
    >>> isogemm.quantize(np.ones((2, 64), np.float32), "Q4_0")
    QuantizedMatrix(2 x 64, Q4_0, 72 bytes)
    """
    if hasattr(format, "shape"):  # the weights, whose numbers would be the message
        limit = "the name of a format, behind the weights"
        raise DTypeError("format", limit=limit, value=type(format).__name__, nearest="quantize(w, 'Q4_K')")
    fmt, x = format_of(format), array("w", w)
    of_type("name", name, str, "text", "''")
    if x.ndim != 2:
        raise ShapeError(f"{prefix(name)}w", limit="2-D [n, k]", value=list(x.shape), nearest="w.reshape(n, k)")
    if x.dtype not in DTYPES:
        raise DTypeError(
            f"{prefix(name)}w", limit="float32, bfloat16 or float16", value=x.dtype.name, nearest="w.astype('float32')"
        )
    n, k = x.shape
    rows = np.zeros((n, fmt.row_bytes(k, name)), np.uint8)
    if fmt.quantized:
        wrong = open_device(HOST).quant.quantize(x, fmt, rows) if x.size else 0
        if wrong:
            raise unquantizable(x, fmt, name)
    elif x.size:
        with np.errstate(over="ignore"):
            narrow = x.astype(PLAIN[fmt.name])
        lost = np.isinf(narrow) & np.isfinite(x)
        if lost.any():
            raise too_large(x, lost, fmt, name)
        rows.view(PLAIN[fmt.name])[...] = narrow
    made = QuantizedMatrix(rows, (n, k), fmt, name)
    made._checked = True
    return made


def weight_format(what: str, format: str | BlockFormat) -> BlockFormat:
    """A format of weights whose products with quantized activations are integers; an OptionError names them all."""
    found = format_of(format)
    if not found.activations:
        known = ", ".join(each.name for each in FORMATS.values() if each.activations)
        raise OptionError(what, limit=f"one of {known}", value=found.name, nearest="Q8_0")
    return found
