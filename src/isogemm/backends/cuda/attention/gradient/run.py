"""Gradients of attention without scores in memory, on tensor cores: attention/gradient/tile.py.

    found = gradients(dy, q, k, v, y, m, total, c=factor(None, 128), scale=128**-0.5, arithmetic="tensor_core:sm90")

The bits are those of products by contract with `isogemm.contract.attention.gradient_steps` between them. What is not
served here (masks, float32, other head sizes, a device where no kernel has the bits) gets None, and is left to those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .....base.dtypes import TRITON, torch_name
from .....base.seen import Seen
from .....contract.attention import factor
from .....errors import ContractError
from .....planner.bench import Bench
from .....planner.choose import Option, choose
from ...driver import facts
from ...driver.kernel import Bound
from ...driver.machine import admissions
from ...driver.triton_build import build
from ..case import Strided
from ..family import named_steps, padded, terms
from ..run import clamped
from .trial import BackRun, by_definition, contents, differs, posed

if TYPE_CHECKING:
    import torch

MAX_HEAD = 128
STATS_ROWS = 16
MOST_ROWS = 128  # of a tile
Launch = Callable[..., None]


class BackTile(NamedTuple):
    """How a kernel cuts its work; none of it reaches a bit."""

    rows: int
    keys: int
    stages: int
    warps: int


class BackCase(NamedTuple):
    """Gradients but for their addresses: `dy` is as products read it, `wide` what it was rounded from."""

    q: Strided
    k: Strided
    v: Strided
    dy: tuple[int, ...]
    wide: tuple[int, ...]
    y: tuple[int, ...]
    dtype: str
    dtype_wide: str
    dtype_y: str
    c: float
    scale: float
    offset: int | None
    starts: bool
    stops: bool
    arithmetic: str
    device: int

    @property
    def d(self) -> int:
        return self.q.shape[3]

    @property
    def dv(self) -> int:
        return self.v.shape[3]

    @property
    def group(self) -> int:
        """Query heads to a key head."""
        return self.q.shape[1] // self.k.shape[1]

    @property
    def rows(self) -> int:
        """Queries that share a key head."""
        return self.q.shape[2] * self.group

    @property
    def width(self) -> int:
        """Rows with those that are zeros."""
        return -(-self.rows // 128) * 128


class BackTiles(NamedTuple):
    """The tiles of the kernel for dk and dv, and of the one for dq."""

    keys: BackTile
    rows: BackTile


# The likeliest first, by whether a head has more than 64 elements.
PAIRS = {
    False: (BackTiles(BackTile(64, 64, 2, 4), BackTile(64, 32, 3, 4)),),
    True: (BackTiles(BackTile(32, 128, 3, 8), BackTile(128, 64, 3, 8)),),
}


class Back:
    """The family of both kernels, and of the one that prepares what they need of each row."""

    name = "attention back"
    home = "backends/cuda/attention"

    def supports(self, case: BackCase, config: BackTiles) -> bool:
        """Head sizes that the tiles hold, of 16 elements each; tensor cores whose arithmetic is defined."""
        sizes = all(size % 16 == 0 and 0 < size <= MAX_HEAD for size in (case.d, case.dv))
        tiles = max(-(-case.k.shape[2] // config.keys.keys), -(-case.rows // config.rows.rows))
        return sizes and case.arithmetic not in ("fma", "tensor_core:native") and tiles <= 65535

    def configs(self, case: BackCase) -> Sequence[BackTiles]:
        """Pairs of tiles."""
        found = PAIRS[max(case.d, case.dv) > 64]
        return [pair for pair in found if self.supports(case, pair)]

    def code(self, case: BackCase, config: BackTiles) -> str:
        """Tiles, dtypes and sizes: all that is compiled in."""
        chosen = _constants(case, config.keys) | {"WIDE": case.dtype_wide, "Y": case.dtype_y, "KIND": case.dtype}
        text = " ".join(f"{key}={value}" for key, value in chosen.items() if key not in ("TERMS", *_TILED))
        return f"{text} keys={tuple(config.keys)} rows={tuple(config.rows)}"

    def bind(self, case: BackCase, config: BackTiles, device: int) -> Launch:
        """``launch(stream, q, k, v, dy, wide, y, m, total, start, stop, stats, dq, dk, dv)``."""
        from .tile import attention_back_keys, attention_back_rows

        (b, heads, tk, _), (keys, rows) = case.k.shape, config
        prepare = _prepare(case)
        of_keys = _bound(attention_back_keys, case, keys, ("dk", "dv_"), (heads, b, -(-tk // keys.keys)))
        of_rows = _bound(attention_back_rows, case, rows, ("dq",), (heads, b, -(-case.rows // rows.rows)))

        def launch(stream: int, q: int, k: int, v: int, dy: int, wide: int, y: int, m: int, total: int, start: int,
                   stop: int, stats: int, dq: int, dk: int, dv: int) -> None:  # fmt: skip
            prepare(stream, wide, y, m, total, stats)
            if dk:
                of_keys(stream, q, k, v, dy, stats, start, stop, dk, dv)
            if dq:
                of_rows(stream, q, k, v, dy, stats, start, stop, dq)

        return launch

    def trial(self, bench: Bench, case: BackCase, config: BackTiles) -> str:
        """Empty where every bit of every gradient was right, else the first difference."""
        causal = case.offset is not None
        for each in posed(case.group, case.d, case.dv, causal, case.starts, case.stops):
            held = contents(each, case.dtype)
            run = self.bind(_made(case, each, bench.device), config, bench.device)
            want = by_definition(each, held, case.arithmetic)
            found = differs(bench, run, each, held, want, (case.dtype_wide, case.dtype_y))
            if found:
                return found
        return ""


def _made(case: BackCase, each: BackRun, device: int) -> BackCase:
    """The case of a run of the trial."""

    def laid(heads: int, tokens: int, size: int) -> Strided:
        return Strided((each.b, heads, tokens, size), (heads * tokens * size, tokens * size, size, 1))

    q, k = laid(each.heads * each.group, each.tq, each.d), laid(each.heads, each.tk, each.d)
    v, dy = laid(each.heads, each.tk, each.dv), laid(each.heads * each.group, each.tq, each.dv).strides[:3]
    c, scale = float(factor(None, each.d)), each.d**-0.5
    return case._replace(q=q, k=k, v=v, dy=dy, wide=dy, y=dy, c=c, scale=scale, offset=each.offset, device=device)


def _constants(case: BackCase, tile: BackTile) -> dict[str, Any]:
    d, dv = padded(case.d), padded(case.dv)
    return {
        "ROWS": tile.rows, "KEYS": tile.keys, "D": d, "DV": dv, "GROUP": case.group,
        "CAUSAL": case.offset is not None, "STARTS": case.starts, "STOPS": case.stops, "EVEN_D": d == case.d,
        "EVEN_DV": dv == case.dv, "TERMS": terms("float32"),
        "STAGES": tile.stages, "EVEN_ROWS": case.rows % tile.rows == 0, "PDL": facts.device(case.device).overlaps,
    }  # fmt: skip


def _prepare(case: BackCase) -> Bound:
    """``prepare(stream, wide, y, m, total, stats)``."""
    from .tile import attention_back_stats

    (b, heads, _, _), on = case.k.shape, facts.device(case.device)
    steps = named_steps(dy=case.wide, y=case.y)
    values = {**steps, "rows": case.rows, "dv": case.dv, "heads": heads}
    types = {"dy": f"*{TRITON[case.dtype_wide]}", "y": f"*{TRITON[case.dtype_y]}", **dict.fromkeys(
        ("m", "total", "stats"), "*fp32"), **{name: "i64" if "_" in name else "i32" for name in values}}  # fmt: skip
    constants = {"ROWS": STATS_ROWS, "GROUP": case.group, "PDL": on.overlaps}
    built = build(attention_back_stats, types, constants, aligned=["dy", "y", *steps, "dv"], capability=on.capability,
                  num_warps=4, launch_pdl=on.overlaps)  # fmt: skip
    return built.bind(case.device, (case.width // STATS_ROWS, heads, b), values)


def _bound(function: Any, case: BackCase, tile: BackTile, outs: Sequence[str], grid: tuple[int, int, int]) -> Bound:
    """``launch(stream, q, k, v, dy, stats, start, stop, outs...)``."""
    on, kind = facts.device(case.device), f"*{TRITON[case.dtype]}"
    steps = named_steps(q=case.q.strides[:3], k=case.k.strides[:3], v=case.v.strides[:3], dy=case.dy)
    values = {**steps, "rows": case.rows, "tk": case.k.shape[2], "d": case.d, "dv": case.dv, "heads": case.k.shape[1],
              "offset": case.offset or 0, "c": case.c, "scale": case.scale}  # fmt: skip
    types = dict.fromkeys(("q", "k", "v", "dy", *outs), kind) | {"stats": "*fp32", "start": "*i32", "stop": "*i32"}
    hints = [name for name in types if name not in ("start", "stop")] + [*steps, "d", "dv"]
    types |= {name: "fp32" if name in ("c", "scale") else "i64" if name in steps else "i32" for name in values}
    constants = {name: x for name, x in _constants(case, tile).items() if name in function.arg_names}
    built = build(function, types, constants, aligned=hints, capability=on.capability, num_warps=tile.warps,
                  launch_pdl=on.overlaps)  # fmt: skip
    return built.bind(case.device, grid, values)


_TILED = ("ROWS", "KEYS", "STAGES")
KERNEL = Back()
_plans: Seen[tuple[Launch, int] | None] = Seen(1024)
"""What `_planned` gave, by all that it depends on."""


def _planned(case: BackCase) -> tuple[Launch, int] | None:
    """The launch of the first admitted pair, and the rows of its numbers; None where there is none."""
    options = [Option(KERNEL, pair) for pair in KERNEL.configs(case)]
    what = f"the gradients of attention, {case.arithmetic}/chain on {case.dtype}"
    try:
        return choose(options, case, admissions(case.device), what=what).launch, case.width
    except ContractError:
        return None


def gradients(
    dy: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    y: torch.Tensor,
    m: torch.Tensor,
    total: torch.Tensor,
    *,
    c: float,
    scale: float,
    arithmetic: str,
    causal_offset: int | None = None,
    start: torch.Tensor | None = None,
    stop: torch.Tensor | None = None,
    needs: Sequence[bool] = (True, True, True),
) -> tuple[Any, Any, Any] | None:
    """``(dq, dk, dv)`` of attention without a mask, None for what is not needed; or None where nothing here serves.

    Parameters
    ----------
    dy, y : CUDA tensors [b, hq, tq, dv] of bfloat16, float16 or float32
    q, k, v : CUDA tensors [b, hq, tq, d], [b, hkv, tk, d], [b, hkv, tk, dv] of bfloat16 or float16
    m, total : float32 CUDA tensors [b, hq, tq]
    c, scale : float
        `contract.attention.factor` of the scale, and the scale itself.
    arithmetic : str
    causal_offset, start, stop
        As in `run.forward`.
    needs : sequence of bool
    """
    import torch

    device, narrow = q.get_device(), dy if dy.dtype is v.dtype else dy.to(v.dtype)
    operands = [q, k, v, narrow, dy, y]
    facts = c, scale, causal_offset, start is not None, stop is not None, arithmetic, device
    known = not any(x.data_ptr() % 16 or x.is_neg() for x in operands)
    plan = _plans.get(_key(operands, facts), ()) if known else ()
    if plan == ():
        operands = [_laid(x) for x in operands]
        operands[0], operands[3] = (_near(x, q.shape[1] // k.shape[1]) for x in (operands[0], operands[3]))
        key = _key(operands, facts)
        plan = _plans[key] if key in _plans else _plans.keep(key, _planned(_case(operands, *facts)))
    if not plan:
        return None
    launch, width = plan
    stats = torch.empty((3, *k.shape[:2], width), dtype=torch.float32, device=q.device)
    wanted = needs[0], needs[1] or needs[2], needs[1] or needs[2]
    outs = [
        torch.empty(x.shape, dtype=x.dtype, device=x.device) if w else None
        for x, w in zip((q, k, v), wanted, strict=True)
    ]
    places = (*operands, m.contiguous(), total.contiguous(), start, stop, stats, *outs)
    launch(torch._C._cuda_getCurrentRawStream(device), *(0 if x is None else x.data_ptr() for x in places))
    return outs[0], outs[1], outs[2]


def _case(
    operands: Sequence[torch.Tensor], c: float, scale: float, offset: int | None, starts: bool, stops: bool,
    arithmetic: str, device: int,
) -> BackCase:  # fmt: skip
    """What is asked of kernels: q, k, v, dy as products read it, dy and y, laid as these need it."""
    q, k, v = [Strided(tuple(x.shape), _steps(x)) for x in operands[:3]]
    offset = clamped(offset, q.shape[2], k.shape[2])
    narrow, wide, y = [_steps(x)[:3] for x in operands[3:]]
    kind, of_dy, of_y = [torch_name(operands[i].dtype) for i in (0, 4, 5)]
    return BackCase(
        q, k, v, narrow, wide, y, kind, of_dy, of_y, float(c), float(scale), offset, starts, stops, arithmetic, device
    )


def _key(operands: Sequence[torch.Tensor], facts: tuple[Any, ...]) -> tuple[Any, ...]:
    q, k, v, _, dy, y = operands
    return q.shape, k.shape, v.shape, *[x.stride() for x in operands], q.dtype, dy.dtype, y.dtype, facts


def _laid(x: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy whose rows begin at multiples of 16 elements."""
    odd = x.data_ptr() % 16 or x.stride(3) != 1 or any(step % 16 for step in _steps(x)[:3]) or x.is_neg()
    return x.new_empty(x.shape).copy_(x) if odd else x


def _near(x: torch.Tensor, group: int) -> torch.Tensor:
    """The tensor, or a copy of other strides, for the kernel that finds the rows of a tile by numbers of 32 bits."""
    _, head, token, _ = _steps(x)
    if (group - 1) * head + MOST_ROWS * token < 2**31:
        return x
    tokens, heads = x.shape[2], x.shape[1]
    return x.new_empty((x.shape[0], tokens, heads, x.shape[3])).copy_(x.transpose(1, 2)).transpose(1, 2)


def _steps(x: torch.Tensor) -> tuple[int, ...]:
    """Strides, 0 where there is no step to take."""
    return tuple([0 if size == 1 else step for size, step in zip(x.shape, x.stride(), strict=True)])
