"""Quantized activations times quantized weights on the device: ``int32/chain``, with the CPU's bits.

Two kernels: quant_activations.cu makes codes of x, then quant_int.cu (few rows) or quant_int_many.cu multiplies. No
configuration reaches the bits: integers are exact, and the chain over blocks is walked by one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from . import quant_activations
from .driver import Bound
from .fp32 import KINDS, LIMIT
from .quant_floats import run as run_floats
from .quant_layout import FORMATS, ROWS, STEP, Layout, Packed, macros
from .quant_operands import Tail, check, compiled, dtype_of, tail_of
from .workspace import workspace

__all__ = ["Few", "Many", "config", "run", "run_floats", "takes"]

MULTIPROCESSORS = 132  # of an H200; sizes teams and rings, nothing else
SHARED = 225 * 1024
_MOST = 4096


class Few(NamedTuple):
    """Tiles of 8 rows of x; warps of a team, teams of a block, stages of a warp's ring, K of a stage."""

    tiles: int
    group: int
    teams: int
    stages: int
    span: int = 256


class Many(NamedTuple):
    """A warp's tiles of 16 rows of W and of 8 rows of x; warps along both; stages, K of a stage; blocks at a time."""

    tiles_w: int
    tiles_x: int
    warps_w: int
    warps_x: int
    stages: int
    span: int = 256
    blocks: int = 1


class Plan(NamedTuple):
    """Both launches of a call, and the workspace between them."""

    activations: Bound
    product: Bound
    places: quant_activations.Places
    device: int


_plans: dict[tuple[Any, ...], Plan | None] = {}
_stream: Callable[[int], int] | None = None


def takes(format: str, m: int, n: int, k: int, dtype: str) -> bool:
    """Whether `run` multiplies x [m, k] of a type with a weight [n, k] in a format."""
    return format in FORMATS and dtype in KINDS and k >= 0 and max(m, n, k) <= LIMIT


def run(x: Any, packed: Packed, out: Any, bias: Any = None, *, chosen: Few | Many | None = None) -> None:
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
    chosen : Few or Many, optional
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
        None if bias is None else (bias.shape, bias.stride(), bias.dtype), at % 16, x.device, out.device,
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
    stream, room = _stream(plan.device), workspace(plan.places.nbytes, plan.device)
    codes = plan.places.at(room.data_ptr())
    plan.activations(stream, at, *codes)
    plan.product(
        stream, packed.data.data_ptr(), *codes, out.data_ptr(), 0 if bias is None else bias.data_ptr()
    )  # fmt: skip


def config(lay: Layout, m: int, n: int, k: int) -> Few | Many:
    """The configuration for a product."""
    stage = 256 // lay.record_k * lay.record_bytes
    tiles = -(-n // ROWS)
    if m <= 16:
        spans = max(1, -(-k // 256))
        group = min(-(-8 * MULTIPROCESSORS // tiles), 8, spans)
        teams = max(1, (2 if group == 1 else 4) // group)
        warps = -(-min(16 * MULTIPROCESSORS, tiles * group) // MULTIPROCESSORS)
        stages = max(2, min(6, 128 * 1024 // (warps * stage)))
        wide = m > 8
        return Few(1 + wide, group, teams, stages, 128 if wide and group > 1 and lay.record_k == STEP else 256)
    shape = (1, 4, 8, 1) if m <= 32 else (2, 4, 4, 2) if m <= 64 else (2, 8, 4, 2)
    fit = SHARED // _stage_bytes(lay, Many(*shape, 1))
    return Many(*shape, max(2, min(4, fit)))


def _stage_bytes(lay: Layout, c: Many) -> int:
    """Bytes of a buffer of kernels/quant_int_many.cu."""
    rows, chunks = 8 * c.tiles_x * c.warps_x, c.span // STEP
    weights = c.tiles_w * c.warps_w * (c.span // lay.record_k) * lay.record_bytes
    if lay.record_k == STEP:
        sums = 2 * chunks * rows * 8
    else:
        pairs = quant_activations.sums_kind(lay) == quant_activations.PAIRS
        sums = (chunks * STEP // lay.format.sub // (2 if pairs else 1) + 1) * rows * 4
    return -(-(weights + chunks * STEP * rows + sums) // 128) * 128


def _plan(x: Any, packed: Packed, out: Any, bias: Any, chosen: Few | Many | None) -> Plan | None:
    """Look at everything once, and bind; None where there is nothing to compute."""
    check(x, packed, out, bias, takes)
    (m, k), n, lay, device = x.shape, packed.n, packed.layout, packed.data.get_device()
    if not m or not n:
        return None
    tail = tail_of(out, bias)
    product = bind(lay, m, n, k, chosen or config(lay, m, n, k), tail, device)
    align = 16 if x.data_ptr() % 16 == 0 else 1
    activations = quant_activations.bind(lay, m, k, dtype_of(x), x.stride(), align, device)
    return Plan(activations, product, quant_activations.places(lay, m, k), device)


def bind(lay: Layout, m: int, n: int, k: int, c: Few | Many, tail: Tail, device: int) -> Bound:
    """``launch(stream, w, codes, scales, sums, out, bias)`` of the product."""
    common = {
        **macros(lay),
        "SUMS": quant_activations.sums_kind(lay),
        "STAGES": c.stages,
        "SPAN_K": c.span,
        "TYPES": tail.types,
    }
    if isinstance(c, Few):
        made = compiled(
            "quant_int", device, **common, NT=c.tiles, GROUP=c.group, TEAMS=c.teams,
            EACH=2 if m == 1 else 1, FIXED=m <= 8 * c.tiles,
        )  # fmt: skip
        grid = (-(-n // (ROWS * c.teams)), -(-m // (8 * c.tiles)))
        threads = 32 * c.group * c.teams
        shared = c.group * c.teams * c.stages * (c.span // lay.record_k) * lay.record_bytes
    else:
        made = compiled(
            "quant_int_many", device, **common, MI=c.tiles_w, NJ=c.tiles_x, WARPS_M=c.warps_w,
            WARPS_N=c.warps_x, BLOCKS=c.blocks,
        )  # fmt: skip
        grid = (-(-n // (ROWS * c.tiles_w * c.warps_w)) * -(-m // (8 * c.tiles_x * c.warps_x)), 1)
        threads = 32 * c.warps_w * c.warps_x
        shared = c.stages * _stage_bytes(lay, c)
    strides = [("i64", x) for x in (tail.row, tail.column, tail.bias)]
    counts = [("i32", x) for x in (m, n, k)]
    return made.bind([*["ptr"] * 6, *strides, *counts], grid=grid, block=(threads,), shared=shared, pdl=True)
