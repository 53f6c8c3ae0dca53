"""Precision modes: what each costs in accuracy and buys in speed, and that a loop and a batch agree in every bit.

By the names that lectures use: ``ieee`` is float32 arithmetic, ``tf32`` rounds operands to 11 bits, ``tf32x3``
splits each in two and takes three products, ``bf16`` and ``fp16`` have 16-bit operands.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from ...api.products import gemm, gemm_strided_batched
from ...lab import Work
from ...operands.tensors import as_tensor, on_host
from ..bits import apart, differing
from ..charts import bars, number, points, words
from ..declare import Figure, Row, Study, StudyCase, Way, Ways
from ..products import LinearProduct
from ..site import Site
from .four_methods import step_of, torch_mode

ALPHA, BETA = 1.5, 0.5
MODES = {
    "ieee": ("float32", "fma/chain", "fp32"),
    "tf32": ("float32", "tf32:sm90/chain", "tf32"),
    "tf32x3": ("float32", "tf32x3:sm90/chain", "tf32"),
    "bf16": ("bfloat16", "", "bf16"),
    "fp16": ("float16", "", "bf16"),
}


def cases(site: Site, quick: bool) -> list[StudyCase]:
    """A square product in each mode that the device has, and the worked example."""
    on_gpu = site.device == "cuda"
    size = 128 if quick and not on_gpu else 1024 if quick or not on_gpu else 4096
    found = []
    for mode, (dtype, contract, roofline) in MODES.items():
        if not on_gpu and mode.startswith("tf32"):
            continue  # of tensor cores; the CPU has their definition, not their speed
        product = LinearProduct(
            size, size, size, dtype, contract, roofline, partial(torch_mode, site, tf32=mode.startswith("tf32"))
        )
        found.append(product.case(site, f"{mode} {size}", {"mode": mode}))
    facts = {"mode": "worked example", "roofline": "fp32"}
    return [*found, StudyCase("alpha beta example", facts, 1 << 12, _example)]


def worked_example() -> tuple[Any, Any]:
    """Three 4 x 4 matrices each: element i of A is (i mod 7) * 0.1, of B (i mod 5) * 0.2."""
    i = np.arange(48)
    a, b = ((i % 7) * 0.1).astype(np.float32), ((i % 5) * 0.2).astype(np.float32)
    return a.reshape(3, 4, 4), b.reshape(3, 4, 4)


def _example(site: Site, seed: int) -> Ways:
    """alpha A B + beta C as a strided batch and as a loop."""
    host = worked_example()
    a, b = (site.empty(x.shape, "float32") for x in host)
    for target, x in zip((a, b), host, strict=True):
        target[:] = x if site.device == "cpu" else as_tensor(x)
    c = a + b
    work = Work.gemm(4, 4, 4, itemsize=4, batch=3)
    outs = {name: site.empty((3, 4, 4), "float32") for name in ("strided", "loop")}
    loop = [step_of(gemm, a[i], b[i], c[i], out=outs["loop"][i], alpha=ALPHA, beta=BETA) for i in range(3)]
    ways = {
        "strided": Way([lambda i: gemm_strided_batched(a, b, c, out=outs["strided"], alpha=ALPHA, beta=BETA)], work),
        "loop": Way(loop, work),
    }

    def check() -> dict[str, dict[str, Any]]:
        for way in ways.values():
            way(0)
        exact = ALPHA * host[0].astype(float) @ host[1].astype(float) + BETA * on_host(c).astype(float)
        return {
            name: {
                "contract": "fma/chain", "checked": 48, "differing": differing(out, outs["strided"]), "outputs": 48,
                "from_first": differing(out, outs["strided"]),
                "error": apart(on_host(out), exact),
            }
            for name, out in outs.items()
        }  # fmt: skip

    return Ways(ways, check, {"alpha": ALPHA, "beta": BETA})


def figures(rows: Sequence[Row]) -> list[Figure]:
    """Error and speed of each mode, and the bits of the worked example."""
    modes = [row for row in rows if row["facts"]["mode"] in MODES]
    example = [row for row in rows if row["facts"]["mode"] not in MODES]
    return [*([_errors(modes), _speeds(modes)] if modes else []), *map(_bits, example)]


def _errors(rows: Sequence[Row]) -> Figure:
    data = [
        {"mode": row["facts"]["mode"], "way": way, "error": found["error"]}
        for row in rows
        for way, found in row["correctness"].items()
        if found["error"] is not None
    ]
    ours = {p["mode"]: p["error"] for p in data if p["way"] == "isogemm"}
    low, high = min(ours, key=ours.__getitem__), max(ours, key=ours.__getitem__)
    title = f"{high} is {number(ours[high] / ours[low])} times as far from float64 as {low}"
    chart = bars(data, "mode", "error", titles=("", "relative error against float64"), log=True)
    return Figure(title, chart, "Of a sample's elements, in Frobenius' norm; operands are rounded to the mode first.")


def _speeds(rows: Sequence[Row]) -> Figure:
    data = [p | {"rate": 2e-9 * p["m"] * p["n"] * p["k"] / p["seconds"]} for p in points(rows)]
    ours = {p["mode"]: p["rate"] for p in data if p["way"] == "isogemm"}
    fast = max(ours, key=ours.__getitem__)
    slow = ours.get("ieee", min(ours.values()))
    title = f"{fast} is {words(ours[fast] / slow, 'ieee')}" if fast != "ieee" else "No mode is faster than ieee here"
    return Figure(title, bars(data, "mode", "rate", titles=("", "GFLOP/s")), "Products of one square size.")


def _bits(row: Row) -> Figure:
    off = row["correctness"]["loop"]["differing"]
    table = [
        {"way": way, "elements": f["checked"], "other bits": f["differing"]} for way, f in row["correctness"].items()
    ]
    title = f"alpha A B + beta C, loop against strided batch: {off} elements differ"
    return Figure(title, None, f"Three 4 x 4 matrices, alpha {ALPHA}, beta {BETA}.", table)


STUDY = Study("modes", "What does each precision mode cost, and what does it buy?", cases, figures)
