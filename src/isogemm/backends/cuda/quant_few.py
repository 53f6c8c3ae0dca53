"""Products of a few rows with quantized weights, dequantized in registers: ``tensor_core:sm90/chain`` of W in x's type.

The bits are those of ``x @ W.T`` under that contract, W the float32 weights rounded once to bfloat16 or float16: K
ascends in steps of 16 into one accumulator. How a multiprocessor shares out the rows of W does not reach the bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...errors import DeviceError, DTypeError, LayoutError, LimitError, ShapeError
from ...quant.formats import BlockFormat
from .quant_layout import FORMATS, ROWS, Layout, Packed, macros

__all__ = ["MOST", "Config", "configure", "run", "takes"]

MOST = 32  # rows of x
KINDS = {"float32": 0, "bfloat16": 1, "float16": 2}
WORKERS = 16
SHARED = 227 * 1024  # bytes of dynamic shared memory that a block may have
PART = 256  # of K


@dataclass(frozen=True, slots=True)
class Config:
    """How a multiprocessor shares out the work; nothing here reaches the bits.

    Attributes
    ----------
    slots, stages, span : int
        Tiles of 16 rows of W that a block walks at once; chunks of ``256 * span`` of K in flight or in use of each.
    xstages : int
        Chunks of x that fit.
    hold : bool
        All of x fits: it is brought once.
    rotate : bool
        Slots go round among 16 warps; else each warp keeps its own.
    """

    slots: int
    stages: int
    span: int
    xstages: int
    hold: bool
    rotate: bool = False

    @property
    def warps(self) -> int:
        """Of a block, without the one that brings x."""
        return WORKERS if self.rotate else self.slots

    def shared(self, lay: Layout, m: int) -> int:
        """Bytes of dynamic shared memory of a block, as the kernel cuts it up."""
        barriers = 8 * (self.slots * (self.stages + 1) + 2 * self.xstages)
        ring = self.stages * self.span * (PART // lay.record_k) * lay.record_bytes
        kept = 512 * -(-m // 8) if self.rotate else 0
        tables = self.warps * (PART // lay.format.sub) * 8 * 16
        return (
            -(-barriers // 128) * 128 + self.slots * (ring + kept) + tables + self.xstages * m * _row_bytes(self.span)
        )


def _row_bytes(span: int) -> int:
    """Of a row of a chunk of x: eight rows fall into different banks."""
    return 2 * PART * span + 16


def takes(fmt: str | BlockFormat, m: int, n: int, k: int, dtype: str) -> bool:
    """Whether there is a kernel for x [m, k] of a type and weights [n, k] of a format."""
    name = fmt if isinstance(fmt, str) else fmt.name
    return name in FORMATS and dtype in ("bfloat16", "float16") and 0 < m <= MOST and 0 < n < 2**31 - ROWS and k > 0


def configure(lay: Layout, m: int, n: int, k: int, multiprocessors: int) -> Config:
    """The configuration for a product: one for all rows of x that make as many tiles of 8, and one for a row alone."""
    m = m if m == 1 else -(-m // 8) * 8
    each = -(-lay.tiles(n) // multiprocessors)
    slots = -(-each // -(-each // (15 if m > 16 else 16)))
    # Measured on an H200: going round gains 3 to 5 % with 14 slots and loses 5 % with 12; long chunks gain 3 %, unless
    # they leave too little in flight beside each other, as the wide records of Q8_0 do.
    wide = lay.record_bytes * (PART // lay.record_k) > 4096
    for span, xstages in ((1, 4), (1, 2)) if wide else ((2, 4), (2, 2), (1, 4), (1, 2)):
        chunks = -(-k // (PART * span))
        hold = chunks * m * _row_bytes(span) <= 40 * 1024
        rotate = hold and not wide and 12 < slots < WORKERS
        config = Config(slots, 2, span, chunks if hold else xstages, hold, rotate)
        if config.shared(lay, m) <= SHARED:
            break
    return config


def run(x: Any, packed: Packed, out: Any, bias: Any = None, config: Config | None = None) -> None:
    """``out[m, n] = x[m, k] @ W[n, k].T + bias[n]``, the accumulator and the bias added in float32 and rounded once.

    Ordered by the current stream, without synchronisation; may be captured.

    Parameters
    ----------
    x : torch.Tensor
        bfloat16 or float16 [m, k], m up to 32, contiguous rows that begin at multiples of 16 bytes.
    packed : Packed
        Of `quant_pack.pack`, on the same device.
    out : torch.Tensor
        [m, n], bfloat16, float16 or float32, contiguous rows.
    bias : torch.Tensor, optional
        [n], contiguous, of any of these types.
    config : Config, optional

    Raises
    ------
    LimitError, ShapeError, DTypeError, LayoutError, DeviceError
        Operands that the kernel does not take.
    """
    m, n = _checked(x, packed, out, bias)
    if not n or not m:
        return
    kinds = KINDS[_type(x)], KINDS[_type(out)], -1 if bias is None else KINDS[_type(bias)]
    launch = _bound(packed.layout, m, n, packed.k, kinds, x.stride(0), out.stride(0), x.device.index, config)
    from .device import current_stream

    address = 0 if bias is None else bias.data_ptr()
    launch(current_stream(x.device.index), x.data_ptr(), packed.data.data_ptr(), out.data_ptr(), address)


def _type(x: Any) -> str:
    return str(x.dtype).removeprefix("torch.")


def _checked(x: Any, packed: Packed, out: Any, bias: Any) -> tuple[int, int]:
    n, k = packed.n, packed.k
    if x.ndim != 2 or x.shape[1] != k:
        raise ShapeError("activations", limit=f"[m, {k}]", value=tuple(x.shape), nearest=("m", k))
    m = int(x.shape[0])
    if m > MOST:
        raise LimitError("rows of a product of few rows", limit=f"0 to {MOST}", value=m, nearest=MOST)
    for what, tensor, shape in (("out", out, (m, n)), ("bias", bias, (n,))):
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ShapeError(what, limit=str(shape), value=tuple(tensor.shape), nearest=shape)
    if _type(x) not in ("bfloat16", "float16"):
        raise DTypeError("activations", limit="bfloat16 or float16", value=_type(x), nearest="bfloat16")
    for what, tensor in (("activations", x), ("out", out), ("bias", bias)):
        if tensor is None:
            continue
        if _type(tensor) not in KINDS:
            raise DTypeError(what, limit="float32, bfloat16 or float16", value=_type(tensor), nearest="bfloat16")
        if tensor.device != packed.data.device:
            raise DeviceError(what, limit=str(packed.data.device), value=str(tensor.device), nearest="x.to(...)")
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise LayoutError(what, limit="contiguous rows", value=tensor.stride(), nearest="x.contiguous()")
    if x.data_ptr() % 16 or (m > 1 and x.stride(0) % 8):
        raise LayoutError(
            "rows of activations",
            limit="beginning at multiples of 16 bytes",
            value=f"address {x.data_ptr():#x}, {2 * x.stride(0)} bytes from row to row",
            nearest="x.contiguous()",
        )
    return m, n


@functools.lru_cache(4096)
def _bound(
    lay: Layout, m: int, n: int, k: int, kinds: tuple[int, int, int], x_row: int, out_row: int, device: int,
    config: Config | None,
) -> Callable[..., None]:  # fmt: skip
    from .device import device as facts
    from .driver import load
    from .nvrtc import compile_files

    on = facts(device)
    chosen = config or configure(lay, m, n, k, on.multiprocessors)
    defines = macros(lay) | {
        "KIND": kinds[0], "OUT": kinds[1], "BIAS_KIND": kinds[2], "NT": -(-m // 8), "SPAN": chosen.span,
        "HOLD": chosen.hold, "ROTATE": chosen.rotate, "THREADS": 544 if chosen.warps == WORKERS else 512,
    }  # fmt: skip
    cubin = compile_files(["quant_few.cu"], arch=on.arch, defines=defines, options=("-std=c++17",))
    counts = [("i32", x) for x in (m, n, k, chosen.slots, chosen.stages, chosen.xstages)]
    return load(cubin, "quant_few", device).bind(
        [*["ptr"] * 4, ("i64", x_row), ("i64", out_row), *counts],
        grid=(min(on.multiprocessors, lay.tiles(n)),),
        block=(32 * chosen.warps + 32,),
        shared=chosen.shared(lay, m),
        pdl=True,
    )
