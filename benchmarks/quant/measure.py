"""Quantized products: cases, the calls of isogemm and of llama.cpp on the same bytes, and rows of results."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

import isogemm
from isogemm.contract import compare as bits
from isogemm.contract import int32
from isogemm.formats.reference import decode
from isogemm.lab import (
    WALL,
    Candidate,
    CpuClock,
    Progress,
    StreamingRead,
    Timing,
    Work,
    fastest,
    interleave,
    limit_threads,
    rotate,
    row,
    verdict,
)
from isogemm.quant import QuantizedMatrix

from ..common import Worded, compare_bits, repeated, told
from ..llama.cpu import Llama, Product

__all__ = ["FORMATS", "IN_PLACE", "PEERS", "ROWS", "SHAPES", "Case", "Settings", "bar", "cases", "measure"]

Array = npt.NDArray[Any]

FORMATS = ("Q8_0", "Q4_0", "Q4_K", "Q6_K")
SHAPES = ((4096, 4096), (9728, 2560), (2560, 9728))  # (n, k)
ROWS = (1, 16, 256)
PEERS = ("plain", "repacked")
IN_PLACE = "in place"  # isogemm without its second copy of the weights
BAR_THREADS = 2
CHECKED_ROWS, CHECKED_COLUMNS = 4, 48


@dataclass(frozen=True, slots=True)
class Case(Worded):
    """One product."""

    format: str
    m: int
    n: int
    k: int

    @property
    def words(self) -> tuple[str, ...]:
        """What ``--only`` selects by."""
        return (self.format, f"m={self.m}", f"n={self.n}", f"k={self.k}")


@dataclass(frozen=True, slots=True)
class Settings:
    """How long to measure."""

    threads: tuple[int, ...]
    blocks: int = 9
    block_seconds: float = 0.02
    pause: float = 0.04
    seed: int = 0
    cpu_time: bool = False


def cases() -> list[Case]:
    """All of them, those of one weight behind each other."""
    return [Case(fmt, m, n, k) for fmt in FORMATS for n, k in SHAPES for m in ROWS]


def bar(case: Case) -> float | None:
    """Least speed against the faster of llama.cpp's two kernels, with two threads."""
    if case.m == 1:
        return 0.95 if case.format == "Q4_K" else 1.0
    if case.m == 16:
        return 1.5
    return 2.5 if case.format == "Q8_0" else 1.1


def measure(chosen: Sequence[Case], llama: Llama, settings: Settings, report: Progress) -> Iterator[dict[str, Any]]:
    """A row for each case and thread count."""
    reads = {t: StreamingRead(t) for t in settings.threads}
    weights: list[QuantizedMatrix] = []
    held: tuple[str, int, int] | None = None
    for case in chosen:
        if held != (case.format, case.n, case.k):
            weights.clear()
            gc.collect()
            weights[:], held = _weights(case, settings.seed), (case.format, case.n, case.k)
        x = np.random.default_rng(settings.seed + 1).standard_normal((case.m, case.k), dtype=np.float32)
        with _peers(case, weights, x, llama) as peers:
            for threads in settings.threads:
                with limit_threads(threads):
                    llama.set_threads(threads)
                    yield _measured(case, weights, x, peers, reads[threads], threads, settings, report)


def _weights(case: Case, seed: int) -> list[QuantizedMatrix]:
    """Copies of one weight, so many that none is still in a cache when its turn comes."""
    rng = np.random.default_rng(seed)
    first = isogemm.quantize(rng.standard_normal((case.n, case.k), dtype=np.float32), case.format)

    def copy() -> QuantizedMatrix:
        made = QuantizedMatrix.from_bytes(first.rows.copy(), shape=first.shape, format=case.format)
        made.panels()
        return made

    return rotate(copy, first.nbytes)


@contextmanager
def _peers(
    case: Case, weights: Sequence[QuantizedMatrix], x: Array, llama: Llama
) -> Iterator[dict[str, list[Product]]]:
    found = {"plain": _products(case, weights, x, llama, repacked=False)}
    if llama.has_repacked(case.format):
        found["repacked"] = _products(case, weights, x, llama, repacked=True)
    try:
        yield found
    finally:
        for product in (p for products in found.values() for p in products):
            product.free()


def _products(
    case: Case, weights: Sequence[QuantizedMatrix], x: Array, llama: Llama, *, repacked: bool
) -> list[Product]:
    made = [Product(llama, w.rows, case.format, case.k, case.m, repacked=repacked) for w in weights]
    for product in made:
        product.x[...] = x
    return made


def _measured(
    case: Case,
    weights: Sequence[QuantizedMatrix],
    x: Array,
    peers: Mapping[str, Sequence[Product]],
    read: StreamingRead,
    threads: int,
    settings: Settings,
    report: Progress,
) -> dict[str, Any]:
    count, out = len(weights), np.empty((case.m, case.n), np.float32)  # llama.cpp's result lies in one place too
    work = Work(2 * case.m * case.n * case.k, weights[0].nbytes + x.nbytes + out.nbytes)
    correctness = _checked(case, weights[0], x, out, peers, settings.seed)
    native = [w.in_place() for w in weights]
    candidates = [Candidate("isogemm", lambda i: isogemm.linear(x, weights[i % count], out=out))]
    candidates += [Candidate(IN_PLACE, lambda i: isogemm.linear(x, native[i % count], out=out))]
    candidates += [Candidate(name, lambda i, p=p: p[i % count].run()) for name, p in peers.items()]
    candidates += [read.candidate] if case.m == 1 else []
    timings = interleave(
        candidates,
        blocks=settings.blocks,
        block_seconds=settings.block_seconds,
        pause=settings.pause,
        progress=report,
        clock=CpuClock() if settings.cpu_time else WALL,
    )
    if case.m == 1:
        timings["read"] = timings["read"].scaled(work.nbytes / read.nbytes)
    ours = timings["isogemm"]
    return row(
        case.name,
        command=_command(case, threads, settings),
        timings=timings,
        verdicts=[verdict(ours, t) for t in timings.values() if t is not ours],
        kernel="int32/chain",
        correctness=correctness,
        work=work,
        seed=settings.seed,
        threads=threads,
        operands=f"weights rotated over {count} copies",
        bars=[_judged(case, timings)] if threads == BAR_THREADS else [],
        error=None,
        clock="cpu" if settings.cpu_time else "wall",
        **case.facts,
    )


def _judged(case: Case, timings: Mapping[str, Timing]) -> dict[str, Any]:
    value = bar(case)
    against = verdict(timings["isogemm"], fastest(timings, *PEERS))
    return {"bar": f"≥ {value:g} llama.cpp", "result": against.against(value or 0.0)}


def _command(case: Case, threads: int, settings: Settings) -> str:
    words = [*told(only=" ".join(case.words), threads=threads, blocks=settings.blocks)]
    words += ["--cpu-time"] * settings.cpu_time
    return repeated("quant", ["--llama", "BUILD", *words], seed=settings.seed)


def _checked(
    case: Case, w: QuantizedMatrix, x: Array, out: Array, peers: Mapping[str, Sequence[Product]], seed: int
) -> dict[str, Any]:
    """Sampled elements against the definition, bit for bit; llama.cpp's results are only near."""
    rng = np.random.default_rng(seed + 2)
    out.fill(np.nan)
    isogemm.linear(x, w, out=out)
    rows = np.sort(rng.choice(case.m, min(case.m, CHECKED_ROWS), replace=False))
    columns = np.sort(rng.choice(case.n, CHECKED_COLUMNS, replace=False))
    expected = int32.evaluate(x[rows], decode(w.rows[columns], w.format))
    got = np.ascontiguousarray(out[np.ix_(rows, columns)])
    found = compare_bits("int32/chain", got, expected)
    found["differing"] += bits.differing(isogemm.linear(x, w.in_place()), out)
    apart = {}
    for name, products in peers.items():
        products[0].run()
        apart[name] = float(np.abs(products[0].y - out).max() / np.abs(out).max())
    return found | {"peers_apart": apart}
