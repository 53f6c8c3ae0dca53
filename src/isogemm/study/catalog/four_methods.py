"""Four methods on equal work, 2 k N^3 operations: one wide product, a loop, an array of pointers, a strided batch.

The loop, the pointers and the strided batch multiply k pairs of N x N matrices and hold 3 k N^2 elements; the wide
product is [N, N] @ [N, k N] and holds (2 k + 1) N^2. All pairs have the same left matrix, in memory of its own each, so
that all four have the same results. Operands are not rotated: how they fit the cache, 12, 75 and 192 MiB a product, is
part of the question.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np

from ...api.products import gemm_batched, gemm_strided_batched, matmul
from ...lab import Work
from ...lab.limits import held
from ...operands.tensors import as_tensor
from ...planner.tuning import Wanted
from ..bits import judged
from ..charts import lines, number, points, times, words
from ..cublas import pointer_products
from ..declare import Figure, Row, Step, Study, StudyCase, Way, Ways
from ..site import Site

METHODS = ("wide", "loop", "pointers", "strided")
CONTRACTS = {"fp32": "fma/chain", "tf32": "tf32:sm90/chain"}
CLOCKS = ("device", "wall", "submit", "profiled")
KS = (2, 4, 8, 16, 32, 128, 512, 2048, 8192)


def works(n: int, k: int) -> dict[str, Work]:
    """Operations and bytes of each method on k products of n x n float32 matrices."""
    batch = Work.gemm(n, n, n, itemsize=4, batch=k)
    return {"wide": Work.gemm(n, k * n, n, itemsize=4)} | dict.fromkeys(METHODS[1:], batch)


def cases(site: Site, quick: bool) -> list[StudyCase]:
    """N and k from 2 past what a GPU's memory holds, the least work first; on a CPU until a product takes seconds."""
    on_gpu = site.device == "cuda"
    most = {1024: 8192, 2560: 2048, 4096: 512} if on_gpu else {256: 128, 1024: 8, 2560: 2}
    if quick:
        most = {1024: 4, 4096: 2} if on_gpu else {64: 8, 256: 4}
    ks = [(n, k) for n, last in most.items() for k in KS if k <= last]
    modes = ("fp32", "tf32") if on_gpu else ("fp32",)
    return [
        method_case(n, k, mode, clocks=_clocks(n, k, on_gpu=on_gpu, quick=quick))
        for n, k in sorted(ks, key=lambda nk: nk[1] * nk[0] ** 3)
        for mode in modes
    ]


def _clocks(n: int, k: int, *, on_gpu: bool, quick: bool) -> Sequence[str]:
    """Beyond k = 16 a profiling session for each product of a loop takes most of a row's time; where work is 50 ms and
    more, launching is nothing. A quick run profiles one size alone."""
    if 2 * k * n**3 > (25 * 10**11 if on_gpu else 3 * 10**10):
        return CLOCKS[:1]
    profiled = k <= 16 and (not quick or k == 4)
    return CLOCKS if profiled else CLOCKS[:3]


def method_case(
    n: int,
    k: int,
    mode: str,
    *,
    clocks: Sequence[str],
    methods: Sequence[str] = METHODS,
    inspect: bool = False,
) -> StudyCase:
    """A row of k products of n x n by some of the methods, in both libraries."""
    facts = {"N": n, "k": k, "mode": mode, "roofline": mode}
    # Left, right and right side by side; results of both forms, and those of two ways to compare with.
    nbytes = 4 * n * n * (7 * k + 1)
    make = partial(_make, n=n, k=k, mode=mode, methods=methods)
    return StudyCase(f"N={n} k={k} {mode}", facts, nbytes, make, clocks, inspect)


def _make(site: Site, seed: int, *, n: int, k: int, mode: str, methods: Sequence[str]) -> Ways:
    """Operands of all four methods, and the ways of every library to compute each."""
    one, batch, long = Wanted("", n, n, "NN"), Wanted("", n, n, "NN", k), Wanted("", k * n, n, "NN")
    site.settle(one, batch, long, m=n, dtype="float32", contract=CONTRACTS[mode])
    wide = site.normal((n, k * n), "float32", seed + 1)
    left, right = site.empty((k, n, n), "float32"), site.empty((k, n, n), "float32")
    left[:] = site.normal((n, n), "float32", seed)
    right[:] = _items(wide, k)
    out, out_wide = site.empty((k, n, n), "float32"), site.empty((n, k * n), "float32")
    operands = left, right, out, wide, out_wide
    calls = _isogemm(operands, CONTRACTS[mode])
    if site.torch:
        import torch

        calls |= _library("torch", [as_tensor(x) for x in operands], torch.bmm, torch.mm)
    if site.device == "cpu":
        calls |= _library("numpy", operands, np.matmul, np.matmul)
    if site.device == "cuda":
        products = pointer_products(left, right, out, tf32=mode == "tf32")
        calls |= {"pointers cuBLAS": (products,)} if products else {}
    work = works(n, k)
    named = {name: name.split() for name in calls if name.split()[0] in methods}
    ways = {name: Way(calls[name], work[method], library) for name, (method, library) in named.items()}

    def results(name: str) -> Callable[[], Any]:
        def run() -> Any:
            out[:], out_wide[:] = np.nan, np.nan
            ways[name](0)
            return _items(out_wide, k) if name.startswith("wide") else out

        return run

    items = list(zip(left, right, strict=True))
    return Ways(
        ways,
        lambda: judged(ways, {name: results(name) for name in ways}, items, CONTRACTS[mode]),
        {"operands": "not rotated"},
        lambda: torch_mode(site, tf32=mode == "tf32"),
    )


def _items(wide: Any, k: int) -> Any:
    """The k square matrices side by side in a wide one, as a stack: a view."""
    n = len(wide)
    return wide.reshape(n, k, n).swapaxes(0, 1)


Product = Callable[..., Any]
Calls = dict[str, Sequence[Step]]


def _isogemm(operands: Sequence[Any], contract: str) -> Calls:
    left, right, out, wide, out_wide = operands
    lists = list(left), list(right), list(out)
    triples = list(zip(*lists, strict=True))
    return {
        "strided isogemm": [lambda i: gemm_strided_batched(left, right, out=out, contract=contract)],
        "pointers isogemm": [lambda i: gemm_batched(*lists[:2], out=lists[2], contract=contract)],
        "loop isogemm": [step_of(matmul, a, b, out=c, contract=contract) for a, b, c in triples],
        "wide isogemm": [lambda i: matmul(left[0], wide, out=out_wide, contract=contract)],
    }


def _library(name: str, operands: Sequence[Any], batch: Product, one: Product) -> Calls:
    """The methods that another library has, by its product of stacks and by that of matrices."""
    left, right, out, wide, out_wide = operands
    triples = list(zip(left, right, out, strict=True))
    return {
        f"strided {name}": [lambda i: batch(left, right, out=out)],
        f"loop {name}": [step_of(one, a, b, out=c) for a, b, c in triples],
        f"wide {name}": [lambda i: one(left[0], wide, out=out_wide)],
    }


def step_of(product: Product, *operands: Any, **options: Any) -> Step:
    """A step that multiplies these operands, whichever turn it is."""
    return lambda i: product(*operands, **options)


def torch_mode(site: Site, *, tf32: bool) -> AbstractContextManager[None]:
    """torch's float32 products in TF32 or not, for a while; nothing without torch."""
    if not site.torch:
        return nullcontext()
    import torch

    settings = torch.backends.cuda.matmul
    return held(tf32, lambda: settings.allow_tf32, partial(setattr, settings, "allow_tf32"))


def figures(rows: Sequence[Row]) -> list[Figure]:
    """Growth with k, and speed-up over the loop, by each clock."""
    found: list[Figure] = []
    for clock in dict.fromkeys([*(row["clock"] for row in rows), "wall"]):
        timed = [row for row in rows if times(row, clock)]
        found += [_growth(group, clock) for group in _groups(timed) if len(group) > 1]
    for clock in ("device", "wall", "submit", "profiled"):
        timed = [row for row in rows if times(row, clock)]
        found += [_over_loop(group, clock) for group in _groups(timed)]
    return [*found, _bits(rows)]


def _groups(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows of one N and mode."""
    keys = dict.fromkeys((row["facts"]["N"], row["facts"]["mode"]) for row in rows)
    return [[row for row in rows if (row["facts"]["N"], row["facts"]["mode"]) == key] for key in keys]


def _growth(rows: Sequence[Row], clock: str) -> Figure:
    least = min(rows, key=lambda row: row["facts"]["k"])
    data = [
        point | {"growth": point["seconds"] / times(least, clock)[point["way"]]["median"]}
        for point in points(rows, clock)
        if point["way"] in times(least, clock)
    ]
    k, start = max(point["k"] for point in data), least["facts"]["k"]
    last = {point["way"]: point["growth"] for point in data if point["k"] == k}
    slow, fast = max(last, key=last.__getitem__), min(last, key=last.__getitem__)
    ends = f"{number(last[fast])} ({fast}) to {number(last[slow])} times ({slow}) as long"
    title = f"{_name(rows)}, {CLOCK_WORDS[clock]}: {k // start} times the work takes {ends}"
    text = f"Time against k, divided by each method's own at k = {start}: work alone would give {k / start:g}."
    chart = lines(data, "k", "growth", titles=("k", f"time / time at k = {start}"), log=(True, True))
    return Figure(title, chart, text)


def _over_loop(rows: Sequence[Row], clock: str) -> Figure:
    data = []
    for point in points(rows, clock):
        method, library = point["way"].split()
        row = next(row for row in rows if row["facts"] | {"k": point["k"]} == row["facts"])
        loop = times(row, clock).get(f"loop {'torch' if library == 'cuBLAS' else library}")
        if loop and method != "loop":
            data.append(point | {"gain": loop["median"] / point["seconds"]})
    top = max(data, key=lambda point: point["gain"])
    title = f"{_name(rows)}, {CLOCK_WORDS[clock]}: at k = {top['k']}, {top['way']} is {words(top['gain'], 'its loop')}"
    chart = lines(data, "k", "gain", titles=("k", "time of the loop / time"))
    return Figure(title, chart, CLOCK_SENTENCES[clock])


CLOCK_WORDS = {
    "device": "time on the device",
    "wall": "wall time",
    "submit": "time to enqueue",
    "profiled": "wall time under a profiler",
}
CLOCK_SENTENCES = {
    "device": "Calls replayed from a CUDA graph between two events: the host has no part in it.",
    "wall": "On the host, from the first call until the device has finished.",
    "submit": "On the host until the calls are enqueued: the price of launching, which a loop pays k times.",
    "profiled": "Each library call in a profiling session of its own, as a profiler that replays kernels takes them: a "
    "loop pays for k sessions, and the ratio says nothing about the products.",
}


def _name(rows: Sequence[Row]) -> str:
    facts = rows[0]["facts"]
    return f"N = {facts['N']}, {facts['mode']}"


def _bits(rows: Sequence[Row]) -> Figure:
    """How many elements differ between methods of one library."""
    count: dict[str, list[int]] = {}
    for row in rows:
        for way, found in row["correctness"].items():
            seen = count.setdefault(way, [0, 0, 0, 0])
            values = found["outputs"], found["from_own"], found["from_first"], found["differing"] or 0
            count[way] = [total + value for total, value in zip(seen, values, strict=True)]
    heads = "outputs", "other bits than the library's strided", "than isogemm's", "than the contract"
    table = [{"method": way, **dict(zip(heads, seen, strict=True))} for way, seen in count.items()]
    ours = sum(seen[1] + seen[3] for way, seen in count.items() if way.endswith("isogemm"))
    title = f"The four methods of isogemm differ in {ours} elements of all results"
    return Figure(title, None, "Whole results compared with each other, samples with the contract.", table)


STUDY = Study("four-methods", "Is one batched product faster than a loop, and by whose clock?", cases, figures)
