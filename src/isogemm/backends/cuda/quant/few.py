"""Products of a few rows with quantized weights, dequantized in registers: ``tensor_core:sm90/chain`` of W in x's type.

The bits are those of ``x @ W.T`` under that contract, W the float32 weights rounded once to bfloat16 or float16: K
ascends in steps of 16 into one accumulator. How a multiprocessor shares out the rows of W does not reach the bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ....errors import DeviceError, DTypeError, LayoutError, LimitError, ShapeError
from ....formats.blocks import BlockFormat
from .layout import FORMATS, ROWS, Layout, Packed, layout, macros

__all__ = ["MOST", "Config", "configure", "run", "takes"]

MOST = 32  # rows of x
KINDS = {"float32": 0, "bfloat16": 1, "float16": 2}
SHARED = 227 * 1024  # bytes of dynamic shared memory that a block may have
WARPS = 17  # of a block
TILES = 16  # that a block walks at once


@dataclass(frozen=True, slots=True)
class Config:
    """How a multiprocessor shares out the work; nothing here reaches the bits.

    Attributes
    ----------
    whole, split : int
        Tiles of 16 rows of W that a block walks at once: with a warp each, and with two warps, of eight rows each.
    chunk, stages : int
        K of a buffer of a tile's ring, and buffers.
    xstages : int
        Chunks of x that fit; 0: all of it, which is brought once.
    part : int
        K for which code is unrolled.
    """

    whole: int
    split: int
    chunk: int
    stages: int = 2
    xstages: int = 0
    part: int = 256

    @property
    def warps(self) -> int:
        """Of a block, without the one that brings chunks of x."""
        return self.whole + 2 * self.split

    @property
    def threads(self) -> int:
        """Of a block."""
        return 32 * (self.warps + (self.xstages > 0))

    def shared(self, lay: Layout, m: int, k: int) -> int:
        """Bytes of dynamic shared memory of a block, as the kernel cuts it up."""
        tiles = self.whole + self.split
        barriers = 16 * (tiles * self.stages + max(self.xstages, 1))
        ring = self.stages * (self.chunk // lay.record_k) * lay.record_bytes
        # A row's 16 bytes more put eight rows into different banks.
        x = self.xstages * m * (2 * self.chunk + 16) if self.xstages else m * (2 * k + 16)
        # Operands are loaded for 64 of K at once: a last half of that reads on.
        return -(-barriers // 128) * 128 + tiles * ring + x + 48


def takes(fmt: str | BlockFormat, m: int, n: int, k: int, dtype: str) -> bool:
    """Whether there is a kernel for x [m, k] of a type and weights [n, k] of a format."""
    name = fmt if isinstance(fmt, str) else fmt.name
    if name not in FORMATS or dtype not in ("bfloat16", "float16") or not 0 < m <= MOST:
        return False
    return 0 < n < 2**31 - ROWS and k > 0 and layout(name).tile_bytes(k) < 2**31


def configure(lay: Layout, m: int, n: int, k: int, multiprocessors: int) -> Config:
    """The configuration for a product: one for all rows of x that make as many tiles of 8, and one for a row alone."""
    m = m if m == 1 else -(-m // 8) * 8
    each = _tiles(-(-lay.tiles(n) // multiprocessors))
    # Measured on an H200, n from 2560 to 28672, k from 2560 to 14336, m from 1 to 32. Few tiles: what takes long is a
    # warp's chain, and its waits where parts and chunks end. Many: long parts pay where their code is short, for there
    # are three kinds of warps, each with its own.
    few = each <= 4
    short = lay.floats_each == 1 and not lay.ints_each and lay.bits <= 5
    split, part = _split(each), 512 if few or short else 256
    chunks = (1024, 512, 256) if each <= 2 or (few and m <= 8) else (512, 256) if few or lay.bits < 8 else (256,)
    alone = (0, 4, 2) if few or short else (2, 0)  # where x is read while something else is done, it costs nothing
    found = (
        Config(each - split, split, chunk, 2, xstages, min(part, chunk))
        for chunk in chunks
        for xstages in (alone if m == 1 else (2,) if chunk == 1024 else (4, 2))
    )
    return next(c for c in found if c.shared(lay, m, k) <= SHARED)


def _split(tiles: int) -> int:
    """Of a multiprocessor's tiles, those with two warps: its quarters get equal shares, and none stays without work."""
    return tiles if tiles <= 4 else tiles % 4 % 3


def _tiles(each: int) -> int:
    """Tiles at once of a multiprocessor that has so many: all, or what keeps its busiest quarter least busy."""
    if each <= TILES:
        return each

    def time(tiles: int) -> float:
        passes, rest = divmod(each, tiles)
        return passes * ((tiles - _split(tiles) + 3) // 4 + 0.5 * (_split(tiles) > 0)) + (rest + 3) // 4

    return min(range(TILES, TILES // 2, -1), key=time)


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
    from ..driver.facts import current_stream

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
    from ..driver.facts import device as facts
    from ..driver.kernel import load
    from ..driver.nvrtc import compile_files

    on = facts(device)
    chosen = config or configure(lay, m, n, k, on.multiprocessors)
    defines = macros(lay) | {
        "KIND": kinds[0], "OUT": kinds[1], "BIAS_KIND": kinds[2], "LOW": m <= 8, "NT": -(-m // 16),
        "CHUNK": chosen.chunk, "PART": chosen.part, "HOLD": chosen.xstages == 0, "WHOLE": chosen.whole > 0,
        "THREADS": 32 * WARPS,
    }  # fmt: skip
    cubin = compile_files(["quant/few.cu"], arch=on.arch, defines=defines, options=("-std=c++17",))
    counts = (m, n, k, chosen.whole, chosen.split, chosen.stages, max(chosen.xstages, 1))
    return load(cubin, "quant_few", device).bind(
        [*["ptr"] * 4, ("i64", x_row), ("i64", out_row), *[("i32", x) for x in counts]],
        grid=(min(on.multiprocessors, lay.tiles(n)),),
        block=(chosen.threads,),
        shared=chosen.shared(lay, m, k),
        pdl=True,
    )
