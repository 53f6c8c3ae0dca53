"""Rows of quantized blocks as kernels of the device load them: 16 bytes at once, at whole multiples of 16 bytes.

A block of 18, 34 or 210 bytes begins where no such load may. So a row has all codes of its blocks side by side, then
what stands for several of them, the scales last: the fields of a format, the largest first. Blocks of a multiple of 16
bytes stay as they are. Rows are filled up to 16 bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...formats.blocks import BlockFormat

WHOLE = 16  # bytes


def begun(form: BlockFormat) -> int:
    """Bytes of a block at the beginning of a row as `laid` has it: a whole block, or its codes."""
    return form.nbytes if form.nbytes % WHOLE == 0 else max(field.nbytes for field in form.fields)


def laid(rows: NDArray[np.uint8], form: BlockFormat) -> NDArray[Any]:
    """Rows [n, row bytes] of a format as pairs of bytes [n, a row's pairs]: a copy."""
    n, nbytes = rows.shape
    whole = np.zeros((n, -(-nbytes // WHOLE) * WHOLE), np.uint8)
    if form.nbytes % WHOLE == 0:
        whole[:, :nbytes] = rows
        return whole.view(np.float16)
    count, at = nbytes // form.nbytes, 0
    blocks = rows.reshape(n, count, form.nbytes)
    for field in sorted(form.fields, key=lambda field: -field.nbytes):
        stop = at + count * field.nbytes
        whole[:, at:stop] = blocks[:, :, field.offset : field.offset + field.nbytes].reshape(n, stop - at)
        at = stop
    return whole.view(np.float16)
