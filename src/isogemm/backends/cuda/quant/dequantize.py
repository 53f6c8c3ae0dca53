"""Packed weights as floats on the device: for contracts that the kernels for quantized weights do not have."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ....errors import DTypeError, LayoutError, ShapeError
from .layout import ROWS, Layout, Packed, macros

if TYPE_CHECKING:
    from ..driver.kernel import Parameter

__all__ = ["run"]

KINDS = {"float32": 0, "bfloat16": 1, "float16": 2}
WARPS = 8
WAVES = 8  # blocks to a multiprocessor


def run(packed: Packed, out: Any, first: int = 0) -> None:
    """out[i, :] = W[first + i, :], with the bits of ``QuantizedMatrix.dequantize(out.dtype)``.

    Enqueued on torch's current stream of the device; nothing is allocated, nothing waits.

    Parameters
    ----------
    packed : Packed
        W [n, k].
    out : torch.Tensor
        [rows, k] of bfloat16, float16 or float32 on the same device, rows of whole 16 bytes.
    first : int
        A multiple of 16.

    Raises
    ------
    DTypeError, LayoutError, ShapeError
        `out` is none that can be written.
    """
    dtype = str(out.dtype).removeprefix("torch.")
    if dtype not in KINDS:
        raise DTypeError(
            "type of dequantized weights", limit=f"one of {', '.join(KINDS)}", value=dtype, nearest="float32"
        )
    rows = out.shape[0] if out.ndim == 2 else -1
    if out.ndim != 2 or out.shape[1] != packed.k or not 0 <= first <= first + rows <= packed.n or first % ROWS:
        raise ShapeError(
            "rows to dequantize", limit=f"[rows, {packed.k}] from a multiple of {ROWS} on, of {packed.n}",
            value=f"{list(out.shape)} from {first} on", nearest=f"[{packed.n}, {packed.k}] from 0 on",
        )  # fmt: skip
    step, align = out.stride(0), 16 // out.itemsize
    if rows and (out.stride(1) != 1 or step % align or out.data_ptr() % 16):
        raise LayoutError(
            "rows of dequantized weights", limit="contiguous along k, each at a multiple of 16 bytes",
            value=f"strides {list(out.stride())} at {out.data_ptr():#x}", nearest=f"strides [{packed.k}, 1]",
        )  # fmt: skip
    if rows:
        from ..driver.facts import current_stream

        device = out.device.index
        bound = _bind(packed.layout, dtype, rows, packed.k, step, device)
        bound(current_stream(device), packed.data.data_ptr(), out.data_ptr(), first)


@functools.lru_cache(maxsize=1024)
def _bind(lay: Layout, dtype: str, rows: int, k: int, step: int, device: int) -> Callable[..., None]:
    """Compile, or take from a cache, and bind: ``launch(stream, data, out, first)``."""
    from ..driver.facts import device as facts
    from ..driver.kernel import load
    from ..driver.nvrtc import compile_files

    defines = {"OUT": KINDS[dtype], **macros(lay)}
    cubin = compile_files(("quant/dequantize.cu",), arch=facts(device).arch, defines=defines, options=("-std=c++17",))
    kernel = load(cubin, "quant_dequantize", device)
    pieces = -(-rows // ROWS) * -(-k // 64)
    params: list[Parameter] = [
        "ptr",
        "ptr",
        ("i64", step),
        ("i64", lay.tile_bytes(k)),
        "i32",
        ("i32", rows),
        ("i32", k),
    ]
    grid = min(-(-pieces // WARPS), WAVES * facts(device).multiprocessors)
    return kernel.bind(params, grid=(grid,), block=(32 * WARPS,), pdl=True)
