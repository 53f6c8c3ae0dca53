"""Products with quantized weights for many tokens: weights dequantized into the registers of wgmma.

    out = x @ W.T + bias, W rounded once to the type of x: the contract tensor_core:sm90/chain

A configuration is a text such as ``2x1x128 s8 c2``: consumer warpgroups, blocks of 64 rows of W that each holds, tokens
of a tile, stages of the ring and blocks of a cluster. ``2x1x128 s8 to 4224, 2x1x256 s6``: rows of W up to there in one
way, the rest in another one. None of it reaches the bits.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ....base.dtypes import ITEMSIZE
from ....errors import DTypeError, LayoutError, OptionError, ShapeError
from .layout import FORMATS, ROWS, STEP, Layout, Packed, layout, macros

if TYPE_CHECKING:
    from ..driver.kernel import Parameter
    from ..driver.tensormap import Encoder

__all__ = ["Case", "Config", "Part", "best", "bind", "instruction", "legal", "parts", "run", "source", "takes"]

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
    if format not in FORMATS or dtype not in OPERANDS or min(m, n, k) <= 0 or max(m, n, k) >= 2**30:
        return False
    return layout(format).tile_bytes(k) < 2**31


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


COLS = (64, 96, 128, 176, 256)
SHAPES = ((2, 1), (2, 2), (3, 1))
# Measured on an H200, in us to 64 of K: a token's products with a block of 64 rows; dequantizing 2, 3 or 4 such blocks,
# which hides behind products of other warps alone. Integer scales of sub-blocks cost a fifth more.
TENSOR, WORK, INTEGERS = 0.0014, {2: 0.30, 3: 0.37, 4: 0.44}, 1.2
START, WAVE = 2.5, 0.8  # us of a launch, and of a wave of tiles


class Part(NamedTuple):
    """Some rows of W, and how they are walked."""

    first: int
    rows: int
    config: Config


def _microseconds(lay: Layout, c: Config, m: int, n: int, k: int, multiprocessors: int) -> float:
    """A model: whole waves of tiles, bound by tensor cores or by the warps' own work."""
    tiles = -(-n // (c.rows * c.cluster)) * c.cluster * -(-m // c.cols)
    blocks = c.warpgroups * c.blocks
    tensor = TENSOR * c.cols * blocks
    step = max(tensor, WORK[blocks] * (INTEGERS if lay.ints_each else 1) + 0.6 * tensor)
    return -(-tiles // multiprocessors) * (-(-k // STEP) * step + WAVE)


@functools.lru_cache(maxsize=4096)
def best(format: str, m: int, n: int, k: int, multiprocessors: int = 132) -> str:
    """How W is likely walked the fastest: all in one way, or whole waves of tiles of one size, then the rest."""
    lay = layout(format)
    configs = [c for w, b in SHAPES for cols in COLS if (c := deepest(lay, w, b, cols)) is not None]

    def fastest(rows: int) -> tuple[float, Config]:
        costs = [_microseconds(lay, c, m, rows, k, multiprocessors) for c in configs]
        return min(zip(costs, configs, strict=True), key=lambda pair: pair[0])

    cost, config = fastest(n)
    found = str(config)
    for c in configs:
        across = -(-m // c.cols)
        for waves in range(1, 1 + -(-n // c.rows) * across // multiprocessors):
            rows = waves * multiprocessors // across * c.rows
            if not 0 < rows < n:
                continue
            rest, other = fastest(n - rows)
            both = _microseconds(lay, c, m, rows, k, multiprocessors) + rest + START
            if both < (1 if "," in found else 0.98) * cost:
                cost, found = both, f"{c} to {rows}, {other}"
    return found


def parts(config: str, n: int) -> tuple[Part, ...]:
    """What a text means for n rows; where the first part would take them all, it takes half of them.

    Raises
    ------
    OptionError
        The text is none.
    """
    match = re.fullmatch(r"(.*) to (\d+), (.*)", config)
    texts = (match[1], match[3]) if match else (config,)
    read = [Config.parse(text) for text in texts]
    if any(c is None for c in read):
        raise OptionError(
            "configuration of quantized products", limit="as 2x1x128 s8", value=config, nearest="2x1x128 s8"
        )
    chosen = [c for c in read if c is not None]
    if match is None:
        return (Part(0, n, chosen[0]),)
    first = int(match[2]) if int(match[2]) < n else n // 128 * 64
    found = (Part(0, first, chosen[0]), Part(first, n - first, chosen[1]))
    return tuple(part for part in found if part.rows)


def instruction(operand: str, n: int) -> str:
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
    return instruction(OPERANDS[case.dtype], c.cols) + '#include "quant/many.cu"\n', ("-std=c++17", *options)


def _pieces(case: Case, lay: Layout, part: Part, nbytes: int) -> Encoder:
    """The map of W: tiles of 16 rows, each a run of bytes, of which the rows of a tile take `nbytes` at a time."""
    from ..driver.tensormap import encoder

    tiles, words = lay.tiles(part.rows), lay.tile_bytes(case.k) // 8
    return encoder(
        "float64",
        sizes=(1, tiles, words),
        strides=(tiles * words, words, 1),
        box=(1, part.config.rows // ROWS, nbytes // 8),
        swizzle=0,
        promotion=256,
    )


def _bind_part(case: Case, part: Part, device: int, *, late: bool) -> Launch:
    """``launch(stream, x, data, out, bias)`` for some rows, of addresses of the whole."""
    from ..driver.facts import device as facts
    from ..driver.kernel import load
    from ..driver.nvrtc import compile_text
    from ..driver.tensormap import encoder

    here, lay, c = facts(device), layout(case.format), part.config
    text, options = source(case, c)
    kernel = load(compile_text(text, name="quant_many_call.cu", arch=here.arch, options=options), "quant_many", device)
    tiles_w, tiles_x = -(-part.rows // (c.rows * c.cluster)), -(-case.m // c.cols)
    clusters = min(tiles_w * tiles_x, here.multiprocessors // c.cluster)
    group = max(1, min(tiles_x, 16 * 2**20 // (2 * case.k * c.cols)))  # x of these stays in L2
    ints = (part.rows, case.m, -(-case.k // STEP), tiles_w, tiles_x, group, int(late))
    scalars: list[Parameter] = [("i64", case.out_step), ("i64", case.bias_step), *(("i32", v) for v in ints)]
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
    map_w = _pieces(case, lay, part, lay.record_bytes if together else lay.step_bytes)
    map_s = map_w if together else _pieces(case, lay, part, lay.record_bytes - lay.floats)
    of_data, of_out = part.first // ROWS * lay.tile_bytes(case.k), part.first * ITEMSIZE[case.dtype_out]
    of_bias = 0 if case.dtype_bias is None else part.first * case.bias_step * ITEMSIZE[case.dtype_bias]

    def launch(stream: int, x: int, data: int, out: int, bias: int) -> None:
        w = data + of_data
        bound(stream, map_x(x), map_w(w), map_s(w), out + of_out, bias + of_bias)

    return launch


@functools.lru_cache(maxsize=4096)
def bind(case: Case, config: str | Config | None, device: int) -> Launch:
    """Compile, or take from a cache, and bind: ``launch(stream, x, data, out, bias)``; None: what is likely fastest."""
    from ..driver.facts import device as facts

    text = config or best(case.format, case.m, case.n, case.k, facts(device).multiprocessors)
    of = parts(str(text), case.n)
    launches = [_bind_part(case, part, device, late=i > 0) for i, part in enumerate(of)]
    if len(launches) == 1:
        return launches[0]

    def launch(stream: int, x: int, data: int, out: int, bias: int) -> None:
        for each in launches:
            each(stream, x, data, out, bias)

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
    OptionError
        `config` is none.
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
    from ..driver.facts import current_stream

    wide = at_out % 16 == 0 and out_step * out.itemsize % 16 == 0
    bias_step = 0 if bias is None else bias.stride(0)
    case = Case(packed.format, dtype, dtype_out, dtype_bias, m, n, k, x_step, out_step, bias_step, wide)
    device = x.device.index
    launch = bind(case, config, device)
    launch(current_stream(device), at_x, packed.data.data_ptr(), at_out, 0 if bias is None else bias.data_ptr())


def _name(t: Any) -> str:
    return str(t.dtype).removeprefix("torch.")
