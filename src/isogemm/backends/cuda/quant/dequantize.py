"""Packed weights as floats on the device: for contracts that the kernels for quantized weights do not have.

By a kernel whose bits were compared with the definition; where it was refused, the host does its work: slowly, with the
right bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from ....base.dtypes import CODE, ITEMSIZE, torch_name
from ....errors import DTypeError, LayoutError, ShapeError
from ....planner.bench import Bench
from ..driver import facts
from ..driver.nvrtc import function_of
from ..driver.tensormap import encoder
from .layout import ROWS, STEP, Packed, PackedLayout, macros
from .pack import lay_out
from .single import Single, serves
from .trial import try_dequantize

WARPS = 4  # of a block, with 16 rows and 64 of K each
BOX = 128  # bytes of a row that the copy engine takes at once


def dequantize(packed: Packed, out: Any, first: int, rows: Callable[[], Any]) -> None:
    """Rows of the weights from `first` on, a multiple of 16, into a contiguous tensor [rows, k].

    `rows` gives those floats from the host, in the type of `out`, where no kernel serves.

    Raises
    ------
    DeviceError
        While a graph is captured: the kernel was not tried before.
    """
    if not out.numel():
        return
    if serves(KERNEL, f"{packed.format} > {torch_name(out.dtype)}", out.get_device()):
        run(packed, out, first)
        return
    import torch

    host = np.ascontiguousarray(rows())
    word = host.view(f"i{host.itemsize}")
    out.copy_(torch.from_numpy(word).to(out.device).view(out.dtype))


def run(packed: Packed, out: Any, first: int = 0) -> None:
    """out[i, :] = W[first + i, :], with the bits of ``QuantizedMatrix.dequantize(out.dtype)``.

    `out` is [rows, k] of bfloat16, float16 or float32 on the weight's device, rows of whole 16 bytes; `first` a
    multiple of 16. Enqueued on torch's current stream of the device; nothing is allocated, nothing waits.

    Raises
    ------
    DTypeError, LayoutError, ShapeError
        `out` is none that can be written.
    """
    dtype = torch_name(out.dtype)
    if dtype not in CODE:
        raise DTypeError(
            "type of dequantized weights", limit=f"one of {', '.join(CODE)}", value=dtype, nearest="float32"
        )
    rows = out.shape[0] if out.ndim == 2 else -1
    if out.ndim != 2 or out.shape[1] != packed.k or not 0 <= first <= first + rows <= packed.n or first % ROWS:
        raise ShapeError(
            "rows to dequantize", limit=f"[rows, {packed.k}] from a multiple of {ROWS} on, of {packed.n}",
            value=f"{list(out.shape)} from {first} on", nearest=f"[{packed.n}, {packed.k}] from 0 on",
        )  # fmt: skip
    step, align = packed.k if rows == 1 else out.stride(0), 16 // out.itemsize
    if rows and (out.stride(1) != 1 or step % align or out.data_ptr() % 16):
        raise LayoutError(
            "rows of dequantized weights", limit="contiguous along k, each at a multiple of 16 bytes",
            value=f"strides {list(out.stride())} at {out.data_ptr():#x}", nearest=f"strides [{packed.k}, 1]",
        )  # fmt: skip
    if out.numel():
        device = out.get_device()
        bound = bind(packed.layout, dtype, rows, packed.k, step, device)
        bound(facts.current_stream(device), packed.data.data_ptr(), out.data_ptr(), first)


def _try(bench: Bench, case: str) -> str:
    fmt, dtype = case.split(" > ")
    return try_dequantize(bench, fmt, dtype, run, lay_out)


KERNEL = Single("quant dequantize", _try)


@functools.lru_cache(maxsize=1024)
def bind(lay: PackedLayout, dtype: str, rows: int, k: int, step: int, device: int) -> Callable[..., None]:
    """Compile, or take from a cache, and bind: ``launch(stream, data, out, first)``."""
    made = function_of("quant/dequantize.cu", "quant_dequantize", device, {"OUT": CODE[dtype], **macros(lay)})
    across = -(-k // (STEP * WARPS))
    bound = made.bind(
        ["map", "ptr", ("i64", lay.tile_bytes(k)), "i32", ("i32", k), ("i32", across)],
        grid=(-(-rows // ROWS) * across,), block=(32 * WARPS,),
        shared=1024 + WARPS * ROWS * STEP * ITEMSIZE[dtype], pdl=True,
    )  # fmt: skip
    map_out = encoder(dtype, sizes=(rows, k), strides=(step, 1), box=(ROWS, BOX // ITEMSIZE[dtype]))
    return lambda stream, data, out, first: bound(stream, map_out(out), data, first)
