"""A model's products under this machine's roofline: min(peak, bandwidth * intensity), both measured here.

The points are every product of one layer and the LM head, in prefill and in decode. Attention's are packed: query heads
that share a key head are rows of one product.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ...api.products import gemm_strided_batched
from ...base.dtypes import ITEMSIZE
from ...lab.models import model
from ...lab.ops import PHASES, Op, ops
from ...planner.tuning import Wanted
from ..bits import judged, poisoned
from ..charts import number, roof, times
from ..declare import ROOFLINES, Figure, Row, Step, Study, StudyCase, Way, Ways
from ..products import DEFAULTS, OPERANDS, LinearProduct, stacks_of, torch_batch
from ..site import Site

MODEL, TOKENS = "Qwen3-4B", 512
SMALL, FEW, QUICK_WEIGHT = "Qwen2.5-0.5B", 64, 1 << 24  # elements: the LM head of a quick run would take seconds


def cases(site: Site, quick: bool) -> list[StudyCase]:
    """Every kind of product of one model, in both phases."""
    small = quick and site.device == "cpu"
    name, tokens = (SMALL, FEW) if small else (MODEL, TOKENS)
    found = [(phase, op) for phase in PHASES for op in ops(model(name), phase, tokens)]
    return [_case(site, name, tokens, phase, op) for phase, op in found if not small or op.n * op.k <= QUICK_WEIGHT]


def packed(op: Op) -> tuple[int, int, int, int]:
    """(items, m, n, k) of attention's product with the query heads of a key head as rows of one."""
    return op.distinct, op.m * op.batch // op.distinct, op.n, op.k


def _case(site: Site, name: str, tokens: int, phase: str, op: Op) -> StudyCase:
    dtype = OPERANDS[site.device]
    work = op.work(dtype)
    key = f"{name} {phase} {op.name}"
    facts = {"model": name, "phase": phase, "product": op.name, "T": tokens, "count": op.count, "dtype": dtype}
    facts |= {"intensity": work.flops / work.nbytes, **site.limits(ROOFLINES[dtype])}
    if op.form == "linear":
        return LinearProduct(op.m, op.n, op.k, dtype).case(site, key, facts)
    items, m, n, _ = packed(op)
    copies = site.copies(work.nbytes)
    nbytes = copies * work.nbytes + 2 * items * m * n * ITEMSIZE[dtype]
    return StudyCase(key, facts, nbytes, partial(_make, op=op, dtype=dtype, copies=copies))


def _make(site: Site, seed: int, *, op: Op, dtype: str, copies: int) -> Ways:
    items, m, n, k = packed(op)
    contract = DEFAULTS[site.device]
    site.settle(Wanted("", n, k, op.layout, items), m=m, dtype=dtype, contract=contract)
    pairs, out = stacks_of(site, seed, (items, m, n, k), dtype, op.layout, copies), site.empty((items, m, n), dtype)
    calls: dict[str, Step] = {"isogemm": lambda i: gemm_strided_batched(*pairs[i % copies], out=out)}
    if site.torch:
        calls["torch"] = torch_batch(pairs, out)
    ways = {name: Way((call,), op.work(dtype), name, copies=copies) for name, call in calls.items()}
    results = {name: partial(poisoned, way, out) for name, way in ways.items()}
    rotated = {"operands": f"rotated over {copies} copies"}
    return Ways(ways, lambda: judged(ways, results, list(zip(*pairs[0], strict=True)), contract), rotated)


def figures(rows: Sequence[Row]) -> list[Figure]:
    """Each library's points under the roofline, and the products one by one."""
    found = [row for row in rows if "flops_per_second" in row["facts"]]
    ways = dict.fromkeys(way for row in found for way in times(row))
    return [*(_points(found, way) for way in ways), _table(rows)]


def _points(rows: Sequence[Row], way: str) -> Figure:
    facts = rows[0]["facts"]
    memory, peak = facts["bytes_per_second"], facts["flops_per_second"]
    data = [
        {
            "phase": row["facts"]["phase"],
            "product": row["facts"]["product"],
            "intensity": row["facts"]["intensity"],
            "rate": times(row)[way]["gflop_per_second"],
        }
        for row in rows
        if way in times(row)
    ]
    reached = []
    for phase in dict.fromkeys(p["phase"] for p in data):
        own = [p for p in data if p["phase"] == phase]
        share = [100e9 * p["rate"] / min(peak, memory * p["intensity"]) for p in own]
        beyond = sum(p["intensity"] > peak / memory for p in own)
        reached.append(f"{phase} {min(share):.3g} to {max(share):.3g} % ({beyond} of {len(own)} beyond the ridge)")
    title = f"{way}, {facts['model']}: of the roofline {', '.join(reached)}"
    sentence = (
        f"Measured ceilings: {number(memory / 1e9, 4)} GB/s, {number(peak / 1e9, 4)} GFLOP/s; they meet at "
        f"{number(peak / memory)} FLOP a byte, the ridge. Left of it memory is waited for, right of it arithmetic. "
        "Above the line operands were cached."
    )
    return Figure(title, roof(data, (memory, peak), "phase", "product"), sentence)


def _table(rows: Sequence[Row]) -> Figure:
    table, whole = [], dict.fromkeys(PHASES, 0.0)
    for row in rows:
        facts, timing = row["facts"], times(row)["isogemm"]
        whole[facts["phase"]] += facts["count"] * timing["median"]
        table.append(
            {
                "product": f"{facts['phase']} {facts['product']}",
                "calls": facts["count"],
                "FLOP/byte": f"{facts['intensity']:.4g}",
                "ms": number(1e3 * timing["median"], 4),
                "GFLOP/s": number(timing["gflop_per_second"], 4),
                "GB/s": number(timing["gb_per_second"], 4),
                "of the roofline": f"{100 * timing['roofline']:.3g} %" if "roofline" in timing else "",
            }
        )
    facts = rows[0]["facts"]
    title = f"All products of {facts['model']} together: " + ", ".join(
        f"{phase} {number(seconds)} s" for phase, seconds in whole.items()
    )
    return Figure(
        title, None, f"isogemm; prefill and context of {facts['T']} tokens, calls counted, measured rows alone.", table
    )


STUDY = Study("roofline", "What is the most that a model's products could do on this machine?", cases, figures)
