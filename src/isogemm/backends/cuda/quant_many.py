"""Products with quantized weights for many tokens: weights dequantized into the registers of wgmma.

    out = x @ W.T + bias, W rounded once to the type of x: the contract tensor_core:sm90/chain

A configuration is a text such as ``2x1x128 s8 c2``: consumer warpgroups, blocks of 64 rows of W that each holds, tokens
of a tile, stages of the ring and blocks of a cluster. None of it reaches the bits.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...errors import DTypeError, LayoutError, ShapeError
from .quant_layout import FORMATS, ROWS, STEP, Layout, Packed, layout, macros

if TYPE_CHECKING:
    from .driver import Parameter
    from .tensormap import Encoder

__all__ = ["Case", "Config", "best", "bind", "legal", "run", "source", "takes"]

OPERANDS = {"bfloat16": "bf16", "float16": "f16"}
KINDS = {"float32": 0, "bfloat16": 1, "float16": 2}
SHARED = 232448 - 1024  # bytes of dynamic shared memory that a block may have, less the barriers
TEXT = re.compile(r"(\d)x(\d)x(\d+) s(\d+)(?: c(\d))?")
Launch = Callable[..., None]


@dataclass(frozen=True, slots=True)
class Config:
    """A configuration, read."""

    warpgroups: int
    blocks: int
    cols: int
    stages: int
    cluster: int = 1

    @classmethod
    def parse(cls, text: str) -> Config | None:
        """Read a text; None where it is not one."""
        match = TEXT.fullmatch(text)
        return cls(*(int(x or 1) for x in match.groups())) if match else None

    def __str__(self) -> str:
        text = f"{self.warpgroups}x{self.blocks}x{self.cols} s{self.stages}"
        return text + f" c{self.cluster}" * (self.cluster > 1)

    @property
    def rows(self) -> int:
        """Rows of W of a tile."""
        return 64 * self.warpgroups * self.blocks

    def shared(self, lay: Layout) -> int:
        """Bytes of dynamic shared memory."""
        span, tiles = lay.record_k // STEP, self.rows // ROWS
        codes = lay.step_bytes if span > 1 else lay.record_bytes
        slots = (self.stages + 2 * span - 2) // span if span > 1 else 0
        stage = self.cols * 128 + -(-tiles * codes // 1024) * 1024
        slot = -(-tiles * (lay.record_bytes - lay.floats) // 128) * 128
        return 1024 + self.stages * stage + slots * slot


@dataclass(frozen=True, slots=True)
class Case:
    """A product but for its addresses.

    Attributes
    ----------
    format, dtype, dtype_out : str
    dtype_bias : str or None
    m, n, k : int
    x_step, out_step, bias_step : int
        Elements from row to row, and from value to value.
    wide : bool
        Every row of out starts at a multiple of 16 bytes.
    """

    format: str
    dtype: str
    dtype_out: str
    dtype_bias: str | None
    m: int
    n: int
    k: int
    x_step: int
    out_step: int
    bias_step: int
    wide: bool


def takes(format: str, m: int, n: int, k: int, dtype: str) -> bool:
    """Whether these kernels serve a product; they want at least 33 tokens to be of use."""
    return format in FORMATS and dtype in OPERANDS and min(m, n, k) > 0 and max(m, n, k) < 2**30


def legal(lay: Layout, c: Config) -> bool:
    """Whether there are such registers and such shared memory."""
    registers = c.blocks * (c.cols // 2 + 32)
    return (
        c.warpgroups in (2, 3)
        and 1 <= c.blocks <= 2
        and c.cols % (8 * c.cluster) == 0
        and 8 <= c.cols <= 256
        and 2 <= c.stages <= 32
        and c.cluster in (1, 2, 4)
        and registers <= (192 if c.warpgroups == 2 else 112)
        and c.shared(lay) <= SHARED
    )


def deepest(lay: Layout, warpgroups: int, blocks: int, cols: int, cluster: int = 1) -> Config | None:
    """With as many stages as there is room for; None where no ring of three fits."""
    for stages in range(16, 2, -1):
        config = Config(warpgroups, blocks, cols, stages, cluster)
        if legal(lay, config):
            return config
    return None


COLS = (64, 128, 176, 256)
SHAPES = ((2, 1), (2, 2), (3, 1))


def _microseconds(lay: Layout, c: Config, m: int, n: int, k: int, multiprocessors: int) -> float:
    """A model of an H200: whole waves of tiles, bound by tensor cores or by the warps' work.

    Measured there: 64 of K of a block of 64 rows take 0.0014 us a token of tensor cores, and their dequantizing 0.3 us
    (0.36 with integer scales), which hides behind products of other warps alone.
    """
    tiles = -(-n // (c.rows * c.cluster)) * c.cluster * -(-m // c.cols)
    blocks, work = c.warpgroups * c.blocks, 0.36 if lay.ints_each else 0.3
    tensor = 0.0014 * c.cols * blocks
    step = max(tensor, work * blocks / 2 + 0.6 * tensor)
    return -(-tiles // multiprocessors) * (-(-k // STEP) * step + 2.0)


@functools.lru_cache(maxsize=4096)
def best(format: str, m: int, n: int, k: int, multiprocessors: int = 132) -> Config:
    """The configuration that is likely the fastest; every one has the same bits."""
    lay = layout(format)
    found = [c for w, b in SHAPES for cols in COLS if (c := deepest(lay, w, b, cols)) is not None]
    return min(found, key=lambda c: _microseconds(lay, c, m, n, k, multiprocessors))


def _instruction(operand: str, n: int) -> str:
    """The function `mma`: one wgmma of 64 x n x 16, the first operand in registers; scale 0 starts from zero."""
    count = n // 2
    d = ", ".join(f"%{i}" for i in range(count))
    first = ", ".join(f"%{count + i}" for i in range(4))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    return (
        f"static __device__ __forceinline__ void mma(float (&d)[{count}], const unsigned (&a)[4], "
        f'unsigned long long y, int scale) {{\n  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + 5}, 0;\\n'
        f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{operand}.{operand} {{{d}}}, {{{first}}}, %{count + 4}, "
        f'p, 1, 1, 0;\\n}}" : {outputs} : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(y), "r"(scale));\n}}\n'
    )


def source(case: Case, c: Config) -> tuple[str, tuple[str, ...]]:
    """The text to compile, and the compiler's options."""
    defines = {
        "OPERAND": KINDS[case.dtype],
        "OUT": KINDS[case.dtype_out],
        "BIAS_KIND": -1 if case.dtype_bias is None else KINDS[case.dtype_bias],
        "EPILOGUE": case.dtype_bias is not None,
        "C_KIND": -1,
        "ACCUMULATE": 0,
        "COLUMNS": 1,
        "VECTOR": case.wide,
        "BN": c.cols,
        "MW": c.blocks,
        "WARPGROUPS": c.warpgroups,
        "STAGES": c.stages,
        "CM": c.cluster,
        "PRODUCER_REGISTERS": 40 if c.warpgroups == 2 else 32,
        "CONSUMER_REGISTERS": 232 if c.warpgroups == 2 else 160,
        **macros(layout(case.format)),
    }
    options = tuple(f"-D{k}={int(v) if isinstance(v, bool) else v}" for k, v in defines.items())
    return _instruction(OPERANDS[case.dtype], c.cols) + '#include "quant_many.cu"\n', ("-std=c++17", *options)


def _pieces(case: Case, lay: Layout, c: Config, nbytes: int) -> Encoder:
    """The map of W: tiles of 16 rows, each a run of bytes, of which the rows of a tile take `nbytes` at a time."""
    from .tensormap import encoder

    tiles, words = lay.tiles(case.n), lay.tile_bytes(case.k) // 8
    return encoder(
        "float64",
        sizes=(1, tiles, words),
        strides=(tiles * words, words, 1),
        box=(1, c.rows // ROWS, nbytes // 8),
        swizzle=0,
        promotion=256,
    )


@functools.lru_cache(maxsize=4096)
def bind(case: Case, config: Config | None, device: int) -> Launch:
    """Compile, or take from a cache, and bind: ``launch(stream, x, data, out, bias)``; None: the best configuration."""
    from .device import device as facts
    from .driver import load
    from .nvrtc import compile_text
    from .tensormap import encoder

    here, lay = facts(device), layout(case.format)
    c = config or best(case.format, case.m, case.n, case.k, here.multiprocessors)
    text, options = source(case, c)
    kernel = load(compile_text(text, name="quant_many_call.cu", arch=here.arch, options=options), "quant_many", device)
    tiles_w, tiles_x = -(-case.n // (c.rows * c.cluster)), -(-case.m // c.cols)
    clusters = min(tiles_w * tiles_x, here.multiprocessors // c.cluster)
    group = max(1, min(tiles_x, 16 * 2**20 // (2 * case.k * c.cols)))  # x of these stays in L2
    scalars: list[Parameter] = [
        ("i64", case.out_step), ("i64", case.bias_step), ("i32", case.n), ("i32", case.m),
        ("i32", -(-case.k // STEP)), ("i32", tiles_w), ("i32", tiles_x), ("i32", group),
    ]  # fmt: skip
    bound = kernel.bind(
        ["map", "map", "map", "ptr", "ptr", *scalars],
        grid=(clusters * c.cluster,),
        block=(128 * (c.warpgroups + 1),),
        shared=c.shared(lay),
        cluster=(c.cluster,),
        pdl=True,
    )
    map_x = encoder(
        case.dtype,
        sizes=(1, case.m, case.k),
        strides=(case.x_step * case.m, case.x_step, 1),
        box=(1, c.cols // c.cluster, STEP),
        promotion=256,
    )
    together = lay.record_k == STEP
    map_w = _pieces(case, lay, c, lay.record_bytes if together else lay.step_bytes)
    map_s = map_w if together else _pieces(case, lay, c, lay.record_bytes - lay.floats)

    def launch(stream: int, x: int, data: int, out: int, bias: int) -> None:
        bound(stream, map_x(x), map_w(data), map_s(data), out, bias)

    return launch


def run(x: Any, packed: Packed, out: Any, bias: Any = None, config: str | None = None) -> None:
    """out[m, n] = x[m, k] @ W[n, k].T + bias, with the bits of the product with ``w.dequantize(x.dtype)``.

    Enqueued on torch's current stream of the device; nothing is allocated, nothing waits.

    Parameters
    ----------
    x : torch.Tensor
        [m, k] of bfloat16 or float16, rows of whole 16 bytes.
    packed : Packed
        W [n, k].
    out : torch.Tensor
        [m, n] of float32, bfloat16 or float16, contiguous along n.
    bias : torch.Tensor, optional
        [n] of one of these types; added in float32.
    config : str, optional
        A configuration in place of the one that is likely the fastest.

    Raises
    ------
    DTypeError, LayoutError, ShapeError
        Tensors that these kernels do not take.
    """
    m, n, k = x.shape[0], packed.n, packed.k
    dtype, dtype_out = _name(x), _name(out)
    dtype_bias = None if bias is None else _name(bias)
    if x.shape != (m, k) or out.shape != (m, n) or (bias is not None and bias.shape != (n,)):
        raise ShapeError(
            "operands of a product with quantized weights", limit=f"x [m, {k}], out [m, {n}], bias [{n}]",
            value=f"x {list(x.shape)}, out {list(out.shape)}, bias {None if bias is None else list(bias.shape)}",
            nearest=f"x [{m}, {k}], out [{m}, {n}]",
        )  # fmt: skip
    if dtype not in OPERANDS or dtype_out not in KINDS or dtype_bias not in (None, *KINDS):
        raise DTypeError(
            "types of a product with quantized weights", limit="x bfloat16 or float16; out, bias these or float32",
            value=f"x {dtype}, out {dtype_out}, bias {dtype_bias}", nearest="x of bfloat16",
        )  # fmt: skip
    if not m or not n:
        return
    x_step, out_step = x.stride(0) if m > 1 else -(-k // 8) * 8, out.stride(0) if m > 1 else n
    at_x, at_out = x.data_ptr(), out.data_ptr()
    if x.stride(1) != 1 or x_step % 8 or at_x % 16 or x_step < k or (out.stride(1) != 1 and n > 1):
        raise LayoutError(
            "rows of x and out", limit="contiguous, and those of x at multiples of 16 bytes",
            value=f"strides {list(x.stride())} at {at_x:#x} and {list(out.stride())}", nearest="contiguous tensors",
        )  # fmt: skip
    from .device import current_stream

    wide = at_out % 16 == 0 and out_step * out.itemsize % 16 == 0
    bias_step = 0 if bias is None else bias.stride(0)
    case = Case(packed.format, dtype, dtype_out, dtype_bias, m, n, k, x_step, out_step, bias_step, wide)
    device = x.device.index
    launch = bind(case, None if config is None else Config.parse(config), device)
    launch(current_stream(device), at_x, packed.data.data_ptr(), at_out, 0 if bias is None else bias.data_ptr())


def _name(t: Any) -> str:
    return str(t.dtype).removeprefix("torch.")
