"""Quantized activations times quantized weights on the device: ``int32/chain``, with the CPU's bits.

Two kernels: activations.cu makes codes of x, then few.cu (few rows) or many.cu multiplies. No
configuration reaches the bits: integers are exact, and the chain over blocks is walked by one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ...driver.kernel import Bound, Parameter
from ...driver.workspace import workspace
from ...gemm.fp32 import KINDS, LIMIT
from ..floats import run as run_floats
from ..layout import FORMATS, ROWS, STEP, Layout, Packed, macros
from ..operands import Tail, check, compiled, dtype_of, tail_of
from . import activations as quant_activations
from . import wide as quant_wide
from .wide import Wide

__all__ = ["Few", "Many", "Parts", "Wide", "config", "run", "run_floats", "takes"]

MULTIPROCESSORS = 132  # of an H200; sizes teams and rings, nothing else
SHARED = 224 * 1024
BLOCK = 227 * 1024  # bytes of shared memory that a block may have, what the kernel declares included
WARPS = 14  # of a block, at most
FUSED = 1  # rows of x up to which every block makes its own codes
FEW = 32  # rows of x for quant/integers/few.cu, where codes of so many fit into shared memory
_MOST = 4096


class Few(NamedTuple):
    """How quant/integers/few.cu shares out few rows of x.

    Attributes
    ----------
    tiles : int
        Of 8 rows of x.
    group, teams, stages, span : int
        Warps of a team, teams of a block, stages of a warp's ring, K of a stage.
    x : str
        Where the codes of x are: in "memory", "staged" in shared memory, or made there by every block: "fused".
    rows : int
        Of x, which a fused kernel is compiled for; 0 for any.
    split : int
        Teams that are two, each with half of the tiles of x; only where x is "staged".
    """

    tiles: int
    group: int
    teams: int
    stages: int
    span: int = 256
    x: str = "memory"
    rows: int = 0
    split: int = 0

    def ring(self, lay: Layout) -> int:
        """Bytes of shared memory for weights."""
        return self.group * self.teams * self.stages * (self.span // lay.record_k) * lay.record_bytes

    @property
    def declared(self) -> int:
        """Bytes of shared memory that the kernel declares: barriers, where chains are handed on, who has read what."""
        chains = 512 * self.tiles * self.teams if self.group > 1 else 0
        read = 4 * max(1, self.group * self.split * self.stages)
        return -(-(8 * self.group * self.teams * self.stages + chains + read + 32) // 128) * 128


class Many(NamedTuple):
    """How quant/integers/many.cu shares out many rows of x.

    Attributes
    ----------
    tiles_w, tiles_x : int
        A warp's tiles of 16 rows of W and of 8 rows of x.
    warps_w, warps_x : int
        Warps along both.
    stages, span : int
        Stages of the ring, and K of a stage.
    blocks : int
        Of a multiprocessor at once.
    """

    tiles_w: int
    tiles_x: int
    warps_w: int
    warps_x: int
    stages: int
    span: int = 256
    blocks: int = 1

    @property
    def producer(self) -> bool:
        """Whether a warp of its own fills the ring: where its many copies for a stage take less than the sums do."""
        return 8 * self.tiles_x * self.warps_x >= 128


class Plan(NamedTuple):
    """The launches of a call, and the workspace between them; without, there is one, which reads x itself."""

    activations: Bound | None
    product: Bound
    places: quant_activations.Places
    device: int

    def enqueue(self, stream: int, x: int, w: int, out: int, bias: int) -> None:
        """Launch on addresses; `bias` is 0 where there is none."""
        if self.activations is None:
            self.product(stream, w, x, out, bias)
            return
        room = workspace(self.places.nbytes, self.device)
        codes = self.places.at(room.data_ptr())
        self.activations(stream, x, *codes)
        self.product(stream, w, *codes, out, bias)


class Parts(NamedTuple):
    """Rows of x in several launches.

    Attributes
    ----------
    each : int
        Rows of a part.
    few : Few
        Of such a part.
    """

    each: int
    few: Few

    def of(self, rows: int) -> Few:
        """For a part of so many rows, the last one of which may have fewer."""
        tiles = -(-rows // 8)
        return self.few._replace(tiles=tiles, split=0 if tiles % 2 else self.few.split)


class Several(NamedTuple):
    """Plans of parts of x, with the bytes to their rows of x and of the result."""

    parts: tuple[tuple[Plan, int, int], ...]
    device: int

    def enqueue(self, stream: int, x: int, w: int, out: int, bias: int) -> None:
        """As a plan's."""
        for plan, x_at, out_at in self.parts:
            plan.enqueue(stream, x + x_at, w, out + out_at, bias)


Chosen = Few | Many | Wide | Parts
_plans: dict[tuple[Any, ...], Plan | Several | None] = {}
_stream: Callable[[int], int] | None = None


def takes(format: str, m: int, n: int, k: int, dtype: str) -> bool:
    """Whether `run` multiplies x [m, k] of a type with a weight [n, k] in a format."""
    return format in FORMATS and dtype in KINDS and k >= 0 and max(m, n, k) <= LIMIT


def run(x: Any, packed: Packed, out: Any, bias: Any = None, *, chosen: Chosen | None = None) -> None:
    """out = x @ W.T + bias under ``int32/chain``, enqueued on torch's current stream.

    Parameters
    ----------
    x : CUDA tensor [m, k]
        float32, bfloat16 or float16, any strides.
    packed : Packed
        W [n, k].
    out : CUDA tensor [m, n]
        float32, bfloat16 or float16, any strides.
    bias : CUDA tensor [n], optional
    chosen : Few, Many, Wide or Parts, optional
        A configuration instead of the usual one.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, LimitError
        Operands do not fit.

    Determinism
    -----------
    Each result is a function of one row of x, one row of W, the format and the bias: the bits of
    `isogemm.contract.int32.evaluate`.
    """
    global _stream
    at = x.data_ptr()
    key = (
        packed.layout.format.name, packed.n, packed.k, x.shape, x.stride(), x.dtype, out.shape, out.stride(), out.dtype,
        None if bias is None else (bias.shape, bias.stride(), bias.dtype, bias.device), at % 16, x.device, out.device,
        packed.data.device, chosen,
    )  # fmt: skip
    if key in _plans:
        plan = _plans[key]
    else:
        if len(_plans) >= _MOST:
            _plans.clear()
        plan = _plans[key] = _plan(x, packed, out, bias, chosen)
    if plan is None:
        return
    if _stream is None:
        import torch

        _stream = torch._C._cuda_getCurrentRawStream
    plan.enqueue(
        _stream(plan.device), at, packed.data.data_ptr(), out.data_ptr(), 0 if bias is None else bias.data_ptr()
    )


def config(lay: Layout, m: int, n: int, k: int) -> Chosen:
    """The configuration for a product."""
    if m <= FEW and (few := _few(lay, m, n, k)):
        return few
    # Timed on an H200 in Q4_K, Q6_K and Q8_0: reading W again costs less than tiles of 64 rows of x where a
    # multiprocessor has one or two of W, and, up to 64 rows, less than the tiles of `Many`.
    alone = lay.format.name in quant_wide.NONE
    if (m <= FEW and -(-n // ROWS) <= 2 * MULTIPROCESSORS) or (m <= 2 * FEW and alone):
        for rows in (FEW, FEW // 2):
            if rows < m and (few := _few(lay, rows, n, k)):
                return Parts(rows, few)
    if wide := quant_wide.config(lay, m, n, k, MULTIPROCESSORS):
        return wide
    shape = (1, 4, 8, 1) if m <= 32 else (2, 8, 4, 1) if m <= 64 else (2, 8, 4, 2)
    fit = SHARED // _stage_bytes(lay, Many(*shape, 1))
    return Many(*shape, max(2, min(3, fit)))


def _few(lay: Layout, m: int, n: int, k: int) -> Few | None:
    """Warps to keep a multiprocessor busy; x where it can be read fastest. None where `Many` is faster."""
    tiles, spans, wide = -(-n // ROWS), max(1, -(-k // 256)), -(-m // 8)
    each = -(-tiles // MULTIPROCESSORS)  # tiles of W of a multiprocessor
    kept = "fused" if m <= FUSED else "staged"
    codes = _x_bytes(lay, m, k, kept)
    for span, x in ((256, kept), (128, kept), (256, "memory")):
        group = 1 if each > 6 else min(4 if m == 1 and spans <= 16 else 8, spans, 12 // each)
        teams = -(-each // -(-each // min(each, WARPS // group)))
        # One or two teams more than a multiprocessor's four schedulers divide are halved.
        split = teams % 4 if group == 1 and x == "staged" and wide % 2 == 0 and teams % 4 < 3 else 0
        c = Few(wide, group, teams, 1, span, x, m if x == "fused" else 0, split)
        if x == "memory":
            return None if wide > 2 else c._replace(stages=max(2, min(SHARED // 2 // c.ring(lay), 4)))
        most = min((SHARED - codes) // c.ring(lay), 1024 // span) if k and span >= lay.record_k else 0
        for found in (c._replace(stages=stages) for stages in range(most, 1, -1)):
            if found.ring(lay) + found.declared + codes <= BLOCK:
                return found
    return None


def _x_bytes(lay: Layout, m: int, k: int, x: str) -> int:
    """Bytes of shared memory of codes, scales and sums of x."""
    if x == "memory":
        return 0
    places = quant_activations.places(lay, m, k, _halves(lay))
    if x == "staged":
        return places.nbytes + 128
    scales = places.nbytes - places.scales  # and sums, of 8 rows
    return -(-k // STEP) * STEP * m + (scales // 8 if m == 1 else scales) + 128


def _halves(lay: Layout) -> bool:
    """Whether quant/integers/few.cu takes scales of x as float16: where they are."""
    return lay.record_k == STEP


def _stage_bytes(lay: Layout, c: Many) -> int:
    """Bytes of a buffer of quant/integers/many.cu."""
    rows, chunks = 8 * c.tiles_x * c.warps_x, c.span // STEP
    weights = c.tiles_w * c.warps_w * (c.span // lay.record_k) * lay.record_bytes
    kind, per_span = quant_activations.sums_kind(lay), max(1, c.span // lay.format.block)
    sums = per_span * rows * (8 if kind == quant_activations.FLOAT else 4)
    if kind == quant_activations.PAIRS:
        sums += c.span // lay.format.sub // 2 * rows * 4
    return -(-(weights + chunks * STEP * rows + sums) // 128) * 128


def _plan(x: Any, packed: Packed, out: Any, bias: Any, chosen: Chosen | None) -> Plan | Several | None:
    """Look at everything once, and bind; None where there is nothing to compute."""
    check(x, packed, out, bias, takes)
    (m, k), n, lay, device = x.shape, packed.n, packed.layout, packed.data.get_device()
    if not m or not n:
        return None
    align = 16 if x.data_ptr() % 16 == 0 else 1
    c = chosen or config(lay, m, n, k)
    if isinstance(c, Parts):
        return _several(x, packed, out, bias, c)
    if isinstance(c, Wide):
        codes = quant_wide.activations(lay, m, k, dtype_of(x), x.stride(), align, device)
        wide = quant_wide.bind(lay, m, n, k, c, tail_of(out, bias), device)
        return Plan(codes, wide, quant_wide.places(lay, m, k), device)
    product = bind(lay, m, n, k, c, tail_of(out, bias), device, (dtype_of(x), x.stride(), align))
    if isinstance(c, Few) and c.x == "fused":
        return Plan(None, product, quant_activations.Places(0, 0, 0, 0), device)
    halves = isinstance(c, Few) and _halves(lay)
    activations = quant_activations.bind(lay, m, k, dtype_of(x), x.stride(), align, device, halves)
    return Plan(activations, product, quant_activations.places(lay, m, k, halves), device)


def _several(x: Any, packed: Packed, out: Any, bias: Any, c: Parts) -> Several:
    """Plans of the parts."""
    parts = []
    for first in range(0, len(x), c.each):
        rows = slice(first, min(first + c.each, len(x)))
        plan = _plan(x[rows], packed, out[rows], bias, c.of(rows.stop - first))
        assert isinstance(plan, Plan)  # there are rows, and a few of them
        parts.append((plan, first * x.stride(0) * x.itemsize, first * out.stride(0) * out.itemsize))
    return Several(tuple(parts), packed.data.get_device())


def bind(
    lay: Layout, m: int, n: int, k: int, c: Few | Many, tail: Tail, device: int, x: tuple[str, Sequence[int], int]
) -> Bound:
    """``launch(stream, w, codes, scales, sums, out, bias)`` of the product; with x "fused", x instead of its codes.

    `x` is its type, its strides and what divides its address.
    """
    common = {**macros(lay), "SUMS": quant_activations.sums_kind(lay), "TYPES": tail.types}
    common |= {"STAGES": c.stages, "SPAN_K": c.span}
    given: list[Parameter] = ["ptr"] * 6
    if isinstance(c, Few):
        fused = m if c.x == "fused" else 0
        if fused:
            dtype, strides, align = x
            given = ["ptr", "ptr", ("i64", strides[0]), ("i64", strides[1]), "ptr", "ptr"]
            common |= quant_activations.reading(dtype, strides, align, m)
        made = compiled(
            "integers/few.cu", "quant_int", device, **common, NT=c.tiles, SPLIT=c.split, GROUP=c.group, TEAMS=c.teams,
            EACH=2 if m == 1 else 1, FIXED=-(-m // 8) == c.tiles, STAGED=c.x == "staged", FUSED=fused,
        )  # fmt: skip
        grid = (-(-n // (ROWS * c.teams)), -(-m // (8 * c.tiles)))
        threads = 32 * c.group * (c.teams + c.split)
        shared = c.ring(lay) + _x_bytes(lay, m, k, c.x)
    else:
        made = compiled(
            "integers/many.cu", "quant_int_many", device, **common, MI=c.tiles_w, NJ=c.tiles_x,
            WARPS_M=c.warps_w, WARPS_N=c.warps_x,
            BLOCKS=c.blocks, PRODUCER=c.producer,
        )  # fmt: skip
        grid = (-(-n // (ROWS * c.tiles_w * c.warps_w)) * -(-m // (8 * c.tiles_x * c.warps_x)), 1)
        threads = 32 * c.warps_w * c.warps_x + (128 if c.producer else 0)
        shared = c.stages * _stage_bytes(lay, c)
    given += [("i64", v) for v in (tail.row, tail.column, tail.bias)]
    given += [("i32", v) for v in (m, n, k)]
    return made.bind(given, grid=grid, block=(threads,), shared=shared, pdl=True)
