"""Decode: one row or a few against a whole weight, in formats from 32 bits to 2, and a model's step of such products.

A product of M rows with a weight [n, k] has 2 M n k operations and reads n k bits_per_weight / 8 bytes: below some M
the weight's way from memory takes the time, above it arithmetic does. Where that changes is computed from measured
times: the M at which the time of one row, which memory sets, meets the line of many rows, which arithmetic sets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ...api.products import linear
from ...base.dtypes import ITEMSIZE
from ...lab import Work
from ...lab.models import Model, model
from ...operands.tensors import on_host
from ...planner.tuning import Wanted
from ..bits import poisoned
from ..charts import bars, lines, number, times, words
from ..declare import ROOFLINES, Figure, Row, Step, Study, StudyCase, Way, Ways
from ..products import torch_product
from ..site import Site
from ..weights import FLOATS, checked, contract_of, format_bytes, make_weight, ready, resident_bytes

__all__ = ["STUDY", "crossover", "decode_case", "seven", "step_bytes"]

SHAPE, VOCABULARY = (4096, 4096), (32000, 4096)
FORMATS = ("F32", "F16", "Q8_0", "Q4_0", "Q4_K", "Q2_K")
SWEPT = ("F32", "F16", "Q8_0", "Q4_0")
QUICK = ("F32", "F16", "Q4_0")
FEW, MANY = (2, 4, 8, 16), (32, 64, 128, 256, 512)
STEPS = {"whole": ("Llama-3.1-8B", "Q4_0"), "quick": ("Qwen2.5-0.5B", "Q4_0")}


def cases(site: Site, quick: bool) -> list[StudyCase]:
    """Formats at one row, rows up to 512 for some of them, and the products of a model's step."""
    shapes, many = (SHAPE, VOCABULARY), list(MANY)
    if quick and site.device == "cpu":
        shapes, many = ((512, 512), (2000, 512)), [64]
    known = [kind for kind in FORMATS if kind in QUICK or not quick]  # each encoder compiles on the CPU, on a GPU too
    known = [kind for kind in known if kind != "F32" or site.device == "cpu"]
    found = [decode_case(site, kind, *shape, 1) for shape in shapes for kind in known]
    swept = [kind for kind in SWEPT if kind in known]
    rows = (4, many[-1]) if quick else (*FEW, *many)
    found += [decode_case(site, kind, *shapes[0], m) for kind in swept for m in rows]
    name, kind = STEPS["quick" if quick else "whole"]
    return [*found, _step_case(site, model(name), kind)]


def decode_case(site: Site, kind: str, n: int, k: int, m: int) -> StudyCase:
    """A row of m tokens against a weight of one format: together, and up to 16 of them one by one."""
    weight = format_bytes(kind, n, k)
    copies = site.copies(weight)
    dtype = _dtype(site)
    facts = {"part": "weights", "format": kind, "n": n, "k": k, "m": m, "weight_bytes": weight, "dtype": dtype}
    nbytes = (copies + 1) * resident_bytes(kind, n, k) + ITEMSIZE[dtype] * m * (k + 3 * n)
    key = f"{kind} {n} x {k} M={m}"
    return StudyCase(key, facts, nbytes, partial(_make, kind=kind, sizes=(m, n, k), copies=copies))


def _dtype(site: Site) -> str:
    return "float16" if site.device == "cuda" else "float32"


def _make(site: Site, seed: int, *, kind: str, sizes: tuple[int, int, int], copies: int) -> Ways:
    m, n, k = sizes
    dtype, contract = _dtype(site), contract_of(site, kind)
    if kind in FLOATS:
        site.settle(Wanted("", n, k), m=m, dtype=dtype, contract=contract)
    x, out = site.normal((m, k), dtype, seed), site.empty((m, n), dtype)
    first = make_weight(kind, n, k, seed + 1)
    plain = [first, *(make_weight(kind, n, k, seed + 1) for _ in range(copies - 1))]
    weights = [ready(site, weight) for weight in plain]
    calls: dict[str, list[Step]] = {"together isogemm": [lambda i: linear(x, weights[i % copies], out=out)]}
    if 1 < m <= max(FEW):
        calls["one by one isogemm"] = [_one(x[j : j + 1], weights, out[j : j + 1]) for j in range(m)]
    if site.torch and FLOATS.get(kind) == dtype:
        calls["together torch"] = [torch_product(x, plain if site.device == "cpu" else weights, out)]
    work = Work(2 * m * n * k, format_bytes(kind, n, k) + ITEMSIZE[dtype] * m * (n + k))
    ways = {name: Way(steps, work, name.split()[-1], copies=copies) for name, steps in calls.items()}

    def check() -> dict[str, dict[str, Any]]:
        results = [on_host(poisoned(way, out)).copy() for way in ways.values()]
        found = dict(zip(ways, checked(first, x, results, contract), strict=True))
        for name, way in ways.items():
            if way.library != "isogemm":
                found[name] |= {"contract": None, "differing": None}
        return found

    return Ways(ways, check, _limits(site) | {"operands": f"weights rotated over {copies} copies"})


def _one(x: Any, weights: Sequence[Any], out: Any) -> Step:
    return lambda i: linear(x, weights[i % len(weights)], out=out)


def _limits(site: Site) -> dict[str, Any]:
    return site.limits(ROOFLINES[_dtype(site)])


def seven(sizes: Model) -> list[tuple[int, int]]:
    """(n, k) of Q, K, V, the attention's output, gate, up and down of one layer."""
    query, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    attention = [(query, sizes.hidden), (keys, sizes.hidden), (keys, sizes.hidden), (sizes.hidden, query)]
    return [*attention, *[(sizes.intermediate, sizes.hidden)] * 2, (sizes.hidden, sizes.intermediate)]


def step_bytes(sizes: Model, kind: str) -> int:
    """Bytes of weights that one token reads: seven products a layer, and the LM head."""
    layer = sum(format_bytes(kind, n, k) for n, k in seven(sizes))
    return sizes.layers * layer + format_bytes(kind, sizes.vocabulary, sizes.hidden)


def _step_case(site: Site, sizes: Model, kind: str) -> StudyCase:
    weights = step_bytes(sizes, kind)
    products = 7 * sizes.layers + 1
    facts = {"part": "step", "model": sizes.name, "format": kind, "weight_bytes": weights, "products": products}
    make = partial(_make_step, sizes=sizes, kind=kind)
    return StudyCase(f"step {sizes.name} {kind}", {**facts, "dtype": _dtype(site)}, weights + (64 << 20), make)


def _make_step(site: Site, seed: int, *, sizes: Model, kind: str) -> Ways:
    """All products of one token, each with a weight of its own, read where it lies."""
    dtype = _dtype(site)
    shapes = [*seven(sizes) * sizes.layers, (sizes.vocabulary, sizes.hidden)]
    x = {k: site.normal((1, k), dtype, seed + k) for k in sorted({k for _, k in shapes})}
    out = {n: site.empty((1, n), dtype) for n in sorted({n for n, _ in shapes})}
    plain = [make_weight(kind, n, k, seed) for n, k in shapes]
    weights = [w.in_place() if site.device == "cpu" else ready(site, w) for w in plain]  # type: ignore[union-attr]
    steps: list[Step] = [_one(x[k], [w], out[n]) for (n, k), w in zip(shapes, weights, strict=True)]
    work = Work(sum(2 * n * k for n, k in shapes), step_bytes(sizes, kind))
    way = Way(steps, work)

    def check() -> dict[str, dict[str, Any]]:
        last = poisoned(way, out[sizes.vocabulary])
        return {"isogemm": checked(plain[-1], x[sizes.hidden], [last], contract_of(site, kind))[0]}

    return Ways({"isogemm": way}, check, _limits(site))


def crossover(seconds: Mapping[int, float]) -> float:
    """The M at which memory's line, flat at the time of one row, meets arithmetic's, in proportion to the most rows."""
    most = max(seconds)
    return seconds[min(seconds)] * most / seconds[most]


def figures(rows: Sequence[Row]) -> list[Figure]:
    """Time by format, rows together against one by one, where arithmetic takes over, and a model's step."""
    weights = [row for row in rows if row["facts"]["part"] == "weights"]
    steps = [row for row in rows if row["facts"]["part"] == "step"]
    found = [_formats(weights), _together(weights), _crossover(weights), _intensity(weights), _steps(steps)]
    return [figure for figure in found if figure]


def _points(rows: Sequence[Row]) -> list[dict[str, Any]]:
    way = "together isogemm"
    return [row["facts"] | {"seconds": times(row)[way]["median"]} for row in rows if way in times(row)]


def _formats(rows: Sequence[Row]) -> Figure | None:
    alone = [
        p | {"us": 1e6 * p["seconds"], "MiB": p["weight_bytes"] / 2**20, "shape": f"{p['n']} x {p['k']}"}
        for p in _points(rows)
        if p["m"] == 1
    ]
    by = {(p["shape"], p["format"]): p for p in alone}
    found = [
        f"at {shape} Q4_0 is {words(by[shape, 'F16']['us'] / p['us'], 'F16')}"
        for (shape, kind), p in by.items()
        if kind == "Q4_0" and (shape, "F16") in by
    ]
    if not found:
        return None
    ratio = format_bytes("F16", 32, 32) / format_bytes("Q4_0", 32, 32)
    title = f"One row: {', '.join(found)}, with {ratio:.3g} times fewer bytes"
    chart = bars(alone, "format", "us", "shape", titles=("", "microseconds"), log=True)
    slow = ", ".join(
        f"{p['format']} {number(p['MiB'], 4)} MiB {number(p['us'], 4)} us" for p in alone if p["n"] == alone[0]["n"]
    )
    return Figure(title, chart, f"Time follows bytes as long as memory is what is waited for. {slow}.")


def _together(rows: Sequence[Row]) -> Figure | None:
    data = []
    for row in rows:
        timed = times(row)
        if "one by one isogemm" in timed:
            gain = timed["one by one isogemm"]["median"] / timed["together isogemm"]["median"]
            data.append({"M": str(row["facts"]["m"]), "format": row["facts"]["format"], "gain": gain})
    if not data:
        return None
    four = ", ".join(f"{p['format']} {p['gain']:.3g}" for p in data if p["M"] == "4")
    chart = bars(data, "M", "gain", "format", titles=("rows M", "time of M gemvs / one product of M rows"))
    return Figure(f"4 rows together are so many times as fast as 4 gemvs: {four}", chart, "The weight is read once.")


def _swept(rows: Sequence[Row]) -> dict[str, dict[int, float]]:
    """Seconds by format and M, of the shape that was swept."""
    data = [p for p in _points(rows) if p["m"] > 1]
    shapes = {(p["n"], p["k"]) for p in data}
    found: dict[str, dict[int, float]] = {kind: {} for kind in dict.fromkeys(p["format"] for p in data)}
    for p in _points(rows):
        if (p["n"], p["k"]) in shapes and p["format"] in found:
            found[p["format"]][p["m"]] = p["seconds"]
    return {kind: seconds for kind, seconds in found.items() if len(seconds) > 1}


def _crossover(rows: Sequence[Row]) -> Figure | None:
    swept = _swept(rows)
    if not swept:
        return None
    data = [
        {"format": kind, "M": m, "cost": seconds / by[min(by)]}
        for kind, by in swept.items()
        for m, seconds in by.items()
    ]
    title = "Arithmetic takes over from memory at M = "
    title += ", ".join(f"{crossover(by):.3g} ({kind})" for kind, by in swept.items())
    chart = lines(data, "M", "cost", "format", titles=("rows M", "time / time of one row"), log=(True, True))
    return Figure(
        title, chart, "Flat while the weight's way from memory takes the time; M against M once arithmetic does."
    )


def _intensity(rows: Sequence[Row]) -> Figure | None:
    found = [row for row in rows if "flops_per_second" in row["facts"] and row["facts"]["m"] > 1]
    if not found:
        return None
    facts = found[0]["facts"]
    ridge = facts["flops_per_second"] / facts["bytes_per_second"]
    data = []
    for row in found:
        work = row["work"]["together isogemm"]
        data.append(
            {"M": row["facts"]["m"], "format": row["facts"]["format"], "intensity": work["flops"] / work["nbytes"]}
        )
    chart = lines(data, "M", "intensity", "format", titles=("rows M", "FLOP / byte"), log=(True, True))
    over = {kind: [p["M"] for p in data if p["format"] == kind and p["intensity"] > ridge] for kind in _swept(rows)}
    said = ", ".join(f"{kind} {f'from M = {min(ms)} on' if ms else 'never here'}" for kind, ms in over.items())
    title = f"The ridge of the ceilings is at {number(ridge)} FLOP a byte: products lie beyond it {said}"
    return Figure(title, chart, "The ceilings say where arithmetic could take over; the times above, where it does.")


def _steps(rows: Sequence[Row]) -> Figure | None:
    if not rows:
        return None
    table = []
    for row in rows:
        facts, seconds = row["facts"], times(row)["isogemm"]["median"]
        rate = facts.get("bytes_per_second")
        table.append(
            {
                "model": f"{facts['model']} {facts['format']}",
                "products": facts["products"],
                "MiB of weights": f"{facts['weight_bytes'] / 2**20:.5g}",
                "tokens/s from bytes": number(rate / facts["weight_bytes"]) if rate else "no ceiling measured",
                "tokens/s measured": number(1 / seconds),
                "GB/s": number(facts["weight_bytes"] / seconds / 1e9),
            }
        )
    got, told = table[0]["tokens/s measured"], table[0]["tokens/s from bytes"]
    title = f"{table[0]['model']}: {got} tokens/s in products, {told} from bytes"
    sentence = "The linears of one token, each weight in memory of its own; attention and norms are not in it."
    return Figure(title, None, sentence, table)


STUDY = Study("decode", "Where does the time of decoding go?", cases, figures)
