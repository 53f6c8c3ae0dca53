"""Attention's products: scores Q K^T, values P V, in training and in decode, as a loop, pointers and a strided batch.

Training multiplies [T, 128] by [128, T] for each head, decode [1, 128] by [128, T]; values have the same operations.
At 2 bytes an element a head's scores have 128 T / (256 + T) operations a byte in training, and 128 T / (128 + 129 T) in
decode: at 4 bytes half of that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ...api.products import gemm_batched, gemm_strided_batched, matmul
from ...base.dtypes import ITEMSIZE
from ...lab import Work
from ...lab.models import model
from ...operands.tensors import as_tensor
from ...planner.tuning import Wanted
from ..bits import judged, poisoned
from ..charts import lines, median, number, points, times, words
from ..declare import Figure, Row, Step, Study, StudyCase, Way, Ways
from ..products import DEFAULTS, OPERANDS, Stacks, stacks_of, torch_batch
from ..site import Site
from ..whole_attention import whole_case

WIDTH = 128
MODELS = ("Llama-3.1-8B", "Llama-3.1-70B", "Llama-3.1-405B")
PHASES = ("training", "decode")
CPU_SCORES = 64 * 1024**2  # of all heads: more take a CPU minutes


def shape(phase: str, product: str, tokens: int) -> tuple[int, int, int]:
    """(m, n, k) of one head's product."""
    rows = tokens if phase == "training" else 1
    return (rows, tokens, WIDTH) if product == "scores" else (rows, WIDTH, tokens)


def work(phase: str, product: str, tokens: int, *, itemsize: int, heads: int = 1) -> Work:
    """Operations, and bytes of operands and result, of some heads."""
    m, n, k = shape(phase, product, tokens)
    return Work.gemm(m, n, k, itemsize=itemsize, batch=heads)


def intensity(phase: str, tokens: int, *, itemsize: int) -> float:
    """Operations for each byte of one head's scores."""
    one = work(phase, "scores", tokens, itemsize=itemsize)
    return one.flops / one.nbytes


def cases(site: Site, quick: bool) -> list[StudyCase]:
    """Three models, T doubled from 1024 until memory ends; on a CPU from 512 until a product takes seconds."""
    on_gpu = site.device == "cuda"
    last = {"training": 2**17 if on_gpu else 1024, "decode": 2**17 if on_gpu else 4096}
    names: tuple[str, ...] = MODELS
    if quick:
        last = {"training": 2048 if on_gpu else 128, "decode": 2048 if on_gpu else 128}
        names = MODELS[:1]
    start = 1024 if on_gpu else 64 if quick else 512
    found = []
    for name in names:
        for phase in PHASES:
            sizes = [start * 2**e for e in range((last[phase] // start).bit_length())]
            if not on_gpu and phase == "training":
                sizes = [tokens for tokens in sizes if model(name).heads * tokens**2 <= CPU_SCORES]
            products = ("scores", "values", *["whole"] * site.torch)
            found += [_case(site, name, phase, p, t) for t in sizes for p in products]
    return found


def _case(site: Site, name: str, phase: str, product: str, tokens: int) -> StudyCase:
    dtype = OPERANDS[site.device]
    facts: dict[str, Any] = {"model": name, "phase": phase, "product": product, "T": tokens}
    facts |= {"heads": model(name).heads, "dtype": dtype}
    key = f"{name} {phase} {product} T={tokens}"
    if product == "whole":
        return whole_case(key, facts, tokens if phase == "training" else 1, tokens)
    needed = work(phase, product, tokens, itemsize=ITEMSIZE[dtype], heads=facts["heads"])
    copies = site.copies(needed.nbytes)
    facts |= {"intensity": needed.flops / needed.nbytes}
    m, n, _ = shape(phase, product, tokens)
    nbytes = copies * needed.nbytes + 2 * facts["heads"] * m * n * ITEMSIZE[dtype]
    make = partial(_make, case=facts, copies=copies)
    return StudyCase(key, facts, nbytes, make, ("device", "wall"))


def _make(site: Site, seed: int, case: Mapping[str, Any], copies: int) -> Ways:
    heads, dtype = case["heads"], case["dtype"]
    m, n, k = shape(case["phase"], case["product"], case["T"])
    layout = "NT" if case["product"] == "scores" else "NN"
    one, batch = Wanted("", n, k, layout), Wanted("", n, k, layout, heads)
    contract = DEFAULTS[site.device]
    site.settle(one, batch, m=m, dtype=dtype, contract=contract)
    stacks = stacks_of(site, seed, (heads, m, n, k), dtype, layout, copies)  # keys are stored [T, 128]
    out = site.empty((heads, m, n), dtype)
    done = work(case["phase"], case["product"], case["T"], itemsize=ITEMSIZE[dtype], heads=heads)
    calls = _isogemm(stacks, out) | (_torch(stacks, out) if site.torch else {})
    ways = {name: Way(steps, done, name.split()[1], copies=copies) for name, steps in calls.items()}
    results = {name: partial(poisoned, way, out) for name, way in ways.items()}
    items = list(zip(*stacks[0], strict=True))
    rotated = {"operands": f"rotated over {copies} copies"}
    return Ways(ways, lambda: judged(ways, results, items, contract), rotated)


def _isogemm(stacks: Stacks, out: Any) -> dict[str, list[Step]]:
    count, lists = len(stacks), [(list(a), list(b)) for a, b in stacks]
    results = list(out)

    def head(h: int) -> Step:
        return lambda i: matmul(lists[i % count][0][h], lists[i % count][1][h], out=results[h])

    return {
        "strided isogemm": [lambda i: gemm_strided_batched(*stacks[i % count], out=out)],
        "pointers isogemm": [lambda i: gemm_batched(*lists[i % count], out=results)],
        "loop isogemm": [head(h) for h in range(len(results))],
    }


def _torch(stacks: Stacks, out: Any) -> dict[str, list[Step]]:
    import torch

    pairs, target, count = [(as_tensor(a), as_tensor(b)) for a, b in stacks], as_tensor(out), len(stacks)

    def head(h: int) -> Step:
        return lambda i: torch.mm(pairs[i % count][0][h], pairs[i % count][1][h], out=target[h])

    return {"strided torch": [torch_batch(stacks, out)], "loop torch": [head(h) for h in range(len(target))]}


def figures(rows: Sequence[Row]) -> list[Figure]:
    """Growth with T, the loop beside the batch, and intensity."""
    found = []
    for phase in PHASES:
        for product in ("scores", "values"):
            chosen = [r for r in rows if (r["facts"]["phase"], r["facts"]["product"]) == (phase, product)]
            if chosen:
                found += [_growth(chosen), *(_ratio(chosen, clock) for clock in ("device", "wall"))]
    whole = [row for row in rows if row["facts"]["product"] == "whole"]
    found += [_fused([r for r in whole if r["facts"]["phase"] == phase], phase) for phase in PHASES if whole]
    return [*(each for each in found if each), _intensity()]


def _growth(rows: Sequence[Row]) -> Figure:
    start = min(row["facts"]["T"] for row in rows)
    ours = [point for point in points(rows) if point["way"] == "strided isogemm"]
    first = {point["model"]: point["seconds"] for point in ours if point["T"] == start}
    data = [point | {"growth": point["seconds"] / first[point["model"]]} for point in ours]
    top = max(data, key=lambda point: point["T"])
    facts = rows[0]["facts"]
    title = (
        f"{facts['phase'].capitalize()}, {facts['product']}: {top['T'] // start} times the tokens take "
        f"{top['model']} {number(top['growth'])} times as long"
    )
    grows = "T squared" if facts["phase"] == "training" else "T"
    return Figure(
        title,
        lines(data, "T", "growth", "model", titles=("tokens T", f"time / time at T = {start}"), log=(True, True)),
        f"Time of the strided batch against T, divided by that at T = {start}. The operations grow with {grows}.",
    )


def _ratio(rows: Sequence[Row], clock: str) -> Figure | None:
    data = []
    for row in rows:
        for library in ("isogemm", "torch"):
            loop, batch = (median(row, f"{method} {library}", clock) for method in ("loop", "strided"))
            if loop and batch:
                facts = row["facts"]
                name = f"{facts['model'].removeprefix('Llama-3.1-')} {library}"
                data.append({"T": facts["T"], "series": name, "gain": loop / batch})
    if not data:
        return None
    top, facts = max(data, key=lambda point: point["gain"]), rows[0]["facts"]
    where = "time on the device" if clock == "device" else "wall time"
    title = (
        f"{facts['phase'].capitalize()}, {facts['product']}, {where}: at T = {top['T']} "
        f"the batch is {words(top['gain'], 'the loop')} ({top['series']})"
    )
    chart = lines(data, "T", "gain", "series", titles=("tokens T", "time of the loop / strided batch"))
    return Figure(title, chart, "Both compute the same heads; a loop launches a kernel a head.")


def _fused(rows: Sequence[Row], phase: str) -> Figure | None:
    """Two batched products with a softmax between them, beside kernels that never write the scores."""
    data = []
    for row in rows:
        fused = median(row, "fused torch")
        name = row["facts"]["model"].removeprefix("Llama-3.1-")
        if fused:
            data += [
                {"T": row["facts"]["T"], "series": f"{name} {way}", "cost": timing["median"] / fused}
                for way, timing in times(row).items()
                if way != "fused torch"
            ]
    if not data:
        return None
    top = max(data, key=lambda point: point["T"])["T"]
    found = ", ".join(f"{p['series']} {p['cost']:.3g}" for p in data if p["T"] == top)
    title = f"Whole attention, {phase}, T = {top}: {found} times as long as torch's fused kernel"
    chart = lines(data, "T", "cost", "series", titles=("tokens T", "time / torch's fused kernel"), log=(True, True))
    return Figure(title, chart, "Two products write the scores of every pair of tokens to memory and read them back.")


def _intensity() -> Figure:
    sizes = [1024 * 2**e for e in range(8)]
    table = [
        {"T": tokens, **{f"{p}, {s} bytes": f"{intensity(p, tokens, itemsize=s):.5g}" for p in PHASES for s in (2, 4)}}
        for tokens in sizes
    ]
    low, high = (intensity("training", tokens, itemsize=2) for tokens in (sizes[0], sizes[-1]))
    title = (
        f"Training does {low:.4g} to {high:.5g} operations a byte, decode {intensity('decode', 1024, itemsize=2):.2g}"
    )
    return Figure(title, None, "Operations for each byte of one head's scores, every operand moved once.", table)


STUDY = Study("attention", "When does batching attention's heads pay?", cases, figures)
