"""Blocks of quantized weights, as files hold them, into the layout of the device's kernels, on the device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ....errors import DeviceError, DTypeError, LayoutError, LimitError, ShapeError
from ....formats.blocks import BlockFormat
from .layout import FORMATS, Layout, Packed, layout, macros

__all__ = ["pack"]

INTS = 2**31


def pack(raw: Any, fmt: str | BlockFormat, n: int, k: int) -> Packed:
    """Lay out a weight for the kernels of quantized weights; its bits are those of `quant_layout.pack`.

    Ordered by the current stream, without synchronisation. The result may not be written afterwards: kernels read it
    before their predecessor in the stream has ended.

    Parameters
    ----------
    raw : torch.Tensor
        uint8 [n, row bytes] on a CUDA device, rows contiguous, any stride between them.
    fmt : str or BlockFormat
    n, k : int

    Raises
    ------
    OptionError
        The format has no layout.
    ShapeError, DTypeError, LayoutError, DeviceError
        `raw` does not hold n rows of k weights as bytes on a CUDA device.
    LimitError
        More records than a launch has blocks.
    """
    import torch

    lay = layout(fmt)
    row = lay.format.row_bytes(k)
    if raw.dtype != torch.uint8:
        raise DTypeError("quantized rows", limit="uint8", value=str(raw.dtype), nearest="x.view(torch.uint8)")
    if tuple(raw.shape) != (n, row):
        raise ShapeError("quantized rows", limit=f"({n}, {row})", value=tuple(raw.shape), nearest=(n, row))
    if not raw.is_cuda:
        raise DeviceError("quantized rows", limit="a CUDA device", value=str(raw.device), nearest="cuda:0")
    if raw.stride(1) != 1 and row > 1:
        raise LayoutError("quantized rows", limit="contiguous rows", value=raw.stride(), nearest=(row, 1))
    blocks = lay.tiles(n) * lay.records(k)
    if max(blocks, n, k) >= INTS:
        raise LimitError("records of a weight", limit=f"fewer than {INTS}", value=blocks, nearest=INTS - 1)
    data = torch.empty(lay.nbytes(n, k), dtype=torch.uint8, device=raw.device)
    if blocks:
        from ..driver.facts import current_stream

        stream = current_stream(raw.device.index)
        laid, settle = _kernels(lay, blocks, raw.device.index)
        laid(stream, raw.data_ptr(), data.data_ptr(), raw.stride(0), n, k)
        settle(stream)
    return Packed(data, lay, n, k)


@functools.lru_cache(256)
def _kernels(lay: Layout, blocks: int, device: int) -> tuple[Callable[..., None], Callable[..., None]]:
    from ..driver.facts import device as facts
    from ..driver.kernel import load
    from ..driver.nvrtc import compile_files

    defines = macros(lay) | {"FORMAT": FORMATS.index(lay.format.name), "BLOCK_BYTES": lay.format.nbytes}
    cubin = compile_files(["quant/pack.cu"], arch=facts(device).arch, defines=defines, options=("-std=c++17",))
    laid = load(cubin, "quant_pack", device).bind(["ptr", "ptr", "i64", "i32", "i32"], grid=(blocks,), block=(256,))
    return laid, load(cubin, "settle", device).bind([], grid=(1,), block=(32,))
