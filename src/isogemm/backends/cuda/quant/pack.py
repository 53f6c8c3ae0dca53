"""Blocks of quantized weights, as files hold them, into the layout of the device's kernels, on the device.

By a kernel whose bits were compared with those of `isogemm.backends.cuda.quant.layout.pack`; where it was refused, by
that on the host: slowly, with the right bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ....errors import DeviceError, DTypeError, LayoutError, LimitError, ShapeError
from ....formats.blocks import BlockFormat
from ..driver import facts
from ..driver.nvrtc import function_of
from .layout import FORMATS, Packed, PackedLayout, layout, macros
from .layout import pack as packed_by_host
from .single import Single, serves
from .trial import try_pack

INTS = 2**31


def pack(raw: Any, fmt: str, n: int, k: int) -> Packed:
    """Bytes of rows on a device, laid out for the kernels.

    Raises
    ------
    DeviceError
        While a graph is captured: the kernel was not tried before.
    """
    if serves(KERNEL, fmt, raw.get_device()):
        return lay_out(raw, fmt, n, k)
    import torch

    data = torch.from_numpy(packed_by_host(raw.cpu().numpy(), fmt)).to(raw.device)
    return settle(Packed(data, layout(fmt), n, k))


def settle(packed: Packed) -> Packed:
    """Packed weights that another kernel has just written, made ready for kernels that read before that has ended."""
    device = packed.data.get_device()
    _kernels(packed.layout, 1, device)[1](facts.current_stream(device))
    return packed


def lay_out(raw: Any, fmt: str | BlockFormat, n: int, k: int) -> Packed:
    """Lay out a weight for the kernels of quantized weights; its bits are those of `layout.pack`.

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
    _write(raw, data, lay, n, k)
    return Packed(data, lay, n, k)


def _write(raw: Any, data: Any, lay: PackedLayout, n: int, k: int) -> None:
    """The records of n rows of k weights."""
    if blocks := lay.tiles(n) * lay.records(k):
        device = raw.get_device()
        laid, settled = _kernels(lay, blocks, device)
        stream = facts.current_stream(device)
        laid(stream, raw.data_ptr(), data.data_ptr(), raw.stride(0), n, k)
        settled(stream)


KERNEL = Single("quant pack", lambda bench, fmt: try_pack(bench, fmt, _write))


@functools.lru_cache(256)
def _kernels(lay: PackedLayout, blocks: int, device: int) -> tuple[Callable[..., None], Callable[..., None]]:
    about = macros(lay) | {"FORMAT": FORMATS.index(lay.format.name), "BLOCK_BYTES": lay.format.nbytes}
    laid, settled = (function_of("quant/pack.cu", name, device, {**about}) for name in ("quant_pack", "settle"))
    return (
        laid.bind(["ptr", "ptr", "i64", "i32", "i32"], grid=(blocks,), block=(256,)),
        settled.bind([], grid=(1,), block=(32,)),
    )
