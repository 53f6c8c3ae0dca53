"""What torch really ran: the same product spelled in several ways, with the kernel behind each, its time and its bits.

On a GPU the kernels come from the profiler of launches; on a CPU, whose libraries name no kernels, the operators do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ...base.dtypes import ITEMSIZE
from ...base.extras import require_extra
from ...lab import Work
from ...operands.tensors import as_tensor, on_host
from ..bits import apart, attended, unpromised
from ..charts import number, times
from ..declare import Figure, Row, Study, StudyCase, Way, Ways
from ..site import Site
from .four_methods import step_of

Call = Callable[[Any, Any], Any]


@dataclass(frozen=True, slots=True)
class Spelled:
    """One computation, and the calls that mean it."""

    name: str
    # left, right: shapes of the operands
    left: tuple[int, ...]
    right: tuple[int, ...]
    calls: Mapping[str, Call]  # ``call(left, right)``; the first is the one that the others' bits are compared with
    exact: Call  # the same in float64, on NumPy arrays
    flops: int


def spellings(m: int, n: int, k: int, batch: int) -> list[Spelled]:
    """A linear layer, a batch that shares its weight, a batch, and attention."""
    import torch

    one = torch.nn.functional
    linear: dict[str, Call] = {
        "mm": lambda x, w: torch.mm(x, w.T),
        "matmul": lambda x, w: torch.matmul(x, w.T),
        "linear": one.linear,
        "einsum": lambda x, w: torch.einsum("mk,nk->mn", x, w),
        "addmm": lambda x, w: torch.addmm(x[:1, :1], x, w.T, beta=0),
    }
    shared: dict[str, Call] = {
        "linear": one.linear,
        "matmul": lambda x, w: torch.matmul(x, w.T),
        "einsum": lambda x, w: torch.einsum("bmk,nk->bmn", x, w),
        "bmm of an expanded weight": lambda x, w: torch.bmm(x, w.T.expand(batch, k, n)),
    }
    several: dict[str, Call] = {
        "bmm": lambda x, y: torch.bmm(x, y.transpose(1, 2)),
        "matmul": lambda x, y: torch.matmul(x, y.transpose(1, 2)),
        "einsum": lambda x, y: torch.einsum("bmk,bnk->bmn", x, y),
        "baddbmm": lambda x, y: torch.baddbmm(x[:, :1, :1], x, y.transpose(1, 2), beta=0),
    }
    heads = 1, batch, m, 64
    attention: dict[str, Call] = {
        "sdpa": lambda q, v: one.scaled_dot_product_attention(q, v, v),
        "sdpa by its formula": _by_formula,
        "two matmuls": lambda q, v: torch.softmax(q @ v.transpose(2, 3) / 8, -1) @ v,
    }
    flops = 2 * m * n * k
    return [
        Spelled("linear", (m, k), (n, k), linear, lambda x, w: x @ w.T, flops),
        Spelled("shared weight", (batch, m, k), (n, k), shared, lambda x, w: x @ w.T, batch * flops),
        Spelled("batch", (batch, m, k), (batch, n, k), several, lambda x, y: x @ y.swapaxes(1, 2), batch * flops),
        Spelled("attention", heads, heads, attention, lambda q, v: attended(q, v, v), 4 * batch * m * m * 64),
    ]


def _by_formula(q: Any, v: Any) -> Any:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        return torch.nn.functional.scaled_dot_product_attention(q, v, v)


def cases(site: Site, quick: bool) -> list[StudyCase]:
    """One token and many, in two types."""
    require_extra("torch", "the study dispatch", "torch")
    n, k, batch = (96, 64, 3) if quick and site.device == "cpu" else (1024, 512, 16)
    found = []
    for dtype in ("float32",) if quick else ("float32", "bfloat16"):
        for m in (1, 48) if quick else (1, 16, 256):
            for spelled in spellings(m, n, k, batch):
                facts = {"product": spelled.name, "m": m, "dtype": dtype}
                elements = np.prod(spelled.left) + 2 * np.prod(spelled.right) + 8 * batch * m * max(n, m)
                make = partial(_make, spelled=spelled, dtype=dtype)
                found.append(StudyCase(f"{spelled.name} M={m} {dtype}", facts, 16 * int(elements), make))
    return found


def _make(site: Site, seed: int, *, spelled: Spelled, dtype: str) -> Ways:
    x, y = (as_tensor(site.normal(s, dtype, seed + i)) for i, s in enumerate((spelled.left, spelled.right)))
    outputs = next(iter(spelled.calls.values()))(x, y).numel()
    work, ways = Work(spelled.flops, ITEMSIZE[dtype] * (x.numel() + y.numel() + outputs)), {}
    for name, call in spelled.calls.items():
        step = step_of(call, x, y)
        ways[name] = Way((step,), work, "torch", _ran(site, partial(step, 0)))

    def check() -> dict[str, dict[str, Any]]:
        exact = spelled.exact(*(on_host(each).astype(np.float64) for each in (x, y)))
        results = {name: way(0) for name, way in ways.items()}
        first = next(iter(results.values()))
        return {name: unpromised(got, first, got.numel(), apart(on_host(got), exact)) for name, got in results.items()}

    return Ways(ways, check, {"operands": "not rotated"})


def _ran(site: Site, call: Callable[[], Any]) -> str:
    """Operators on a CPU; on a GPU the engine asks the profiler of launches."""
    if site.device == "cuda":
        return ""
    from ...lab.profiler import operators

    call()
    return "; ".join(dict.fromkeys(operators(call)))


def figures(rows: Sequence[Row]) -> list[Figure]:
    """A table for each computation: what ran, how long, and how many results have other bits."""
    names = dict.fromkeys(row["facts"]["product"] for row in rows)
    return [_table([row for row in rows if row["facts"]["product"] == name]) for name in names]


def _table(rows: Sequence[Row]) -> Figure:
    table, ran, moved, spelled = [], set(), 0, 0
    for row in rows:
        for way, timing in times(row).items():
            bits = row["correctness"][way]
            ran.add(row["kernel"][way])
            moved += bits["from_first"] > 0
            spelled += 1
            table.append(
                {
                    "rows": f"M = {row['facts']['m']}, {row['facts']['dtype']}",
                    "call": way,
                    "us": number(1e6 * timing["median"], 4),
                    "elements with other bits than the first": f"{bits['from_first']} of {bits['outputs']}",
                    "what ran": row["kernel"][way][:160],
                }
            )
    title = f"{rows[0]['facts']['product'].capitalize()}: {spelled} calls ran {len(ran)} different things, "
    title += f"and {moved} gave other bits than the first spelling"
    return Figure(
        title, None, "All calls of a group mean the same numbers; libraries choose by shape and spelling.", table
    )


STUDY = Study("dispatch", "Which kernel does each of torch's calls really run?", cases, figures)
