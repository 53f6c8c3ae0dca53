"""What it costs, or gains, that a row's bits do not depend on the batch: time over M, and whether bits moved.

For every library and M: the first and the last row of a product of M rows against the same rows alone.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np

from ...api.products import linear
from ...base.dtypes import ITEMSIZE
from ...lab import Work
from ...lab.limits import held
from ...operands.tensors import as_tensor
from ...planner.tuning import Wanted
from ..bits import differing, judged
from ..charts import lines, times, words
from ..declare import Figure, Row, Study, StudyCase, Way, Ways
from ..products import DEFAULTS, OPERANDS
from ..site import Site

N, K = 4096, 4096
SWEEP = {"cpu": (1, 2, 4, 8, 16, 32, 64, 128, 256, 512), "cuda": tuple(2**e for e in range(13))}

Product = Callable[[Any, Any, Any], Any]
Switch = Callable[[], AbstractContextManager[None]]


def cases(site: Site, quick: bool) -> list[StudyCase]:
    """One linear layer over more and more rows."""
    n, k = (192, 256) if quick and site.device == "cpu" else (N, K)
    sweep = (1, 16, 100) if quick else SWEEP[site.device]
    return [_case(site, m, n, k) for m in sweep]


def _case(site: Site, m: int, n: int, k: int) -> StudyCase:
    dtype = OPERANDS[site.device]
    weight = ITEMSIZE[dtype] * n * k
    copies = site.copies(weight)
    nbytes = (copies + 1) * weight + 8 * ITEMSIZE[dtype] * m * (n + k)
    make = partial(_make, sizes=(m, n, k), dtype=dtype, copies=copies)
    return StudyCase(f"M={m} {n} x {k}", {"m": m, "n": n, "k": k, "dtype": dtype}, nbytes, make, ("device", "wall"))


def _make(site: Site, seed: int, *, sizes: tuple[int, int, int], dtype: str, copies: int) -> Ways:
    m, n, k = sizes
    contract = DEFAULTS[site.device]
    site.settle(Wanted("", n, k), m=m, dtype=dtype, contract=contract)
    x, out = site.normal((m, k), dtype, seed), site.empty((m, n), dtype)
    first = site.normal((n, k), dtype, seed + 1)
    weights = site.alike(first, copies)
    products = _products(site, contract)
    work = Work.gemm(m, n, k, itemsize=ITEMSIZE[dtype])
    ways = {
        name: Way((_step(product, x, weights, out),), work, name.split()[0], copies=copies)
        for name, product in products.items()
    }

    def results(name: str) -> Any:
        out[:] = float("nan")
        got = ways[name](0)
        return (out if got is None else got)[None]

    def check() -> dict[str, dict[str, Any]]:
        found = judged(ways, {name: partial(results, name) for name in ways}, [(x, first.T)], contract)
        for name in ways:
            whole = results(name)[0]
            found[name]["moved"] = sum(_moved(products[name], x, first, whole, i) for i in {0, m - 1})
        return found

    return Ways(ways, check, {"operands": f"weights rotated over {copies} copies", "contract": contract})


def _step(product: Product, x: Any, weights: Sequence[Any], out: Any) -> Callable[[int], Any]:
    return lambda i: product(x, weights[i % len(weights)], out)


def _moved(product: Product, x: Any, weight: Any, whole: Any, i: int) -> int:
    """Elements of a row with other bits than that row alone has."""
    kept = whole[i : i + 1].copy() if isinstance(whole, np.ndarray) else whole[i : i + 1].clone()
    alone = whole[:1] * 0
    got = product(x[i : i + 1], weight, alone)
    return differing(alone if got is None else got, kept)


def _products(site: Site, contract: str) -> dict[str, Product]:
    """What computes x @ w.T into a result, or returns it, by name."""

    def ours(x: Any, w: Any, out: Any) -> None:
        linear(x, w, out=out, contract=contract)

    found: dict[str, Product] = {"isogemm": ours}
    if site.device == "cpu":
        found["numpy"] = lambda x, w, out: np.matmul(x, w.T, out=out)
    if not site.torch:
        return found
    import torch

    def plain(x: Any, w: Any, out: Any) -> None:
        torch.mm(as_tensor(x), as_tensor(w).T, out=as_tensor(out))

    found["torch"] = plain
    # torch's promise that a call repeated gives the same bits; it says nothing of other batches.
    repeated = torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms
    found["torch deterministic"] = partial(_under, partial(held, True, *repeated), plain)
    if site.device == "cuda":
        settings, name = torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"
        halves = partial(getattr, settings, name), partial(setattr, settings, name)  # sums in 16 bits where K is split
        found["torch full precision"] = partial(_under, partial(held, False, *halves), plain)
        found["batch_invariant_ops"] = _peer
    return found


def _under(switch: Switch, product: Product, x: Any, w: Any, out: Any) -> Any:
    with switch():
        return product(x, w, out)


def _peer(x: Any, w: Any, out: Any) -> Any:
    """batch_invariant_ops' product, where that package can be imported; else the row says that it is absent."""
    return importlib.import_module("batch_invariant_ops.batch_invariant_ops").matmul_persistent(x, w.T)


def figures(rows: Sequence[Row]) -> list[Figure]:
    """Time beside torch's over M, and where bits moved."""
    return [*([_cost(rows, "torch")] if "torch" in times(rows[0]) else []), _bits(rows)]


def _cost(rows: Sequence[Row], peer: str) -> Figure:
    data = [
        {"M": row["facts"]["m"], "way": way, "cost": timing["median"] / times(row)[peer]["median"]}
        for row in rows
        for way, timing in times(row).items()
        if way != peer and peer in times(row)
    ]
    ours = {p["M"]: p["cost"] for p in data if p["way"] == "isogemm"}
    mean = float(np.exp(np.mean(np.log(list(ours.values())))))
    worst, best = max(ours, key=ours.__getitem__), min(ours, key=ours.__getitem__)
    title = f"With its bits kept, isogemm is {words(1 / mean, peer)} over all M: "
    title += f"{words(1 / ours[best], peer)} at M = {best}, {words(1 / ours[worst], peer)} at M = {worst}"
    chart = lines(data, "M", "cost", titles=("rows M", f"time / {peer}"), log=(True, True))
    return Figure(title, chart, "One linear layer; below 1 is faster than torch as it is.")


def _bits(rows: Sequence[Row]) -> Figure:
    table = []
    for row in rows:
        moved = {way: found["moved"] for way, found in row["correctness"].items()}
        table.append({"M": row["facts"]["m"], **moved})
    ways = list(dict.fromkeys(way for line in table for way in line if way != "M"))
    kept = [way for way in ways if not any(line.get(way) for line in table)]
    lost = [
        f"{way} at {sum(bool(line.get(way)) for line in table)} of {len(table)} M" for way in ways if way not in kept
    ]
    title = f"Rows have the bits that they have alone with {', '.join(kept)}" + f"; not with {', '.join(lost)}" * bool(
        lost
    )
    table = [{"M": line["M"], **{way: line.get(way, "absent") for way in ways}} for line in table]
    sentence = f"Elements of the first and the last row, of {rows[0]['facts']['n']} each, with other bits than alone."
    return Figure(title, None, sentence, table)


STUDY = Study("invariance-cost", "What does it cost to keep a row's bits in every batch?", cases, figures)
