"""The kernels of the WebGPU backend against a copy and the peak of its arithmetic, by the same API.

``python -m benchmarks.webgpu [--sweep] [--peers DIR]``. Times are of passes of many launches by the adapter's clock
where it has one, in interleaved rounds; launches take different weights in turn, more than a cache holds. Each kernel
is admitted by its bits first, and bits of what was timed are compared with the definition again. A failure is a row.

A folder of peers has a ``peers.json``: a list of {"name", "version", "file", "workgroups": [["N", 32], ["M", 32]],
"bindings": ["uniform", "a", "b", "out"], "fill": {"text": "M"}, "sizes": [1024]}, for float32 products
of a [M, K] and b [K, N]. ``fill`` puts an extent in place of a text of the file, ``uniform`` holds the
extent four times, and workgroups are extents divided, up: products are square.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from isogemm.backends.webgpu.kernels import KERNELS

from ..common import Out
from .ceilings import ceilings
from .chapter import chapter
from .peers import peers_of
from .products import Operands, admissions, kernels, library, operands
from .rounds import Bench, Timed
from .sweep import block_names, gemm_names, gemv_names, narrow_names

GEMV = ((4096, 4096), (32000, 4096))
SQUARE = (1024, 2048, 4096)


def gemvs(bench: Bench, divide: int, sweep: bool, dtype: str) -> None:
    """A few rows of x times two weights."""
    for n, k in GEMV:
        n, k = n // divide, max(256, k // divide // 256 * 256)
        for m in (1, 4):
            bench.tried(f"gemv {dtype} {m}", partial(gemv, bench, (m, n, k), dtype, sweep))


def called(bench: Bench, divide: int) -> None:
    """What `isogemm.linear` takes and costs."""
    for n, k in GEMV:
        n, k = n // divide, max(256, k // divide // 256 * 256)
        for m, dtype, contract in ((1, "float16", "fma/lanes32"), (4, "float16", "fma/lanes32"),
                                   (1, "float16", "fma/chain"), (1, "Q4_0", "int32/chain"),
                                   (1, "Q8_0", "int32/chain"), (1, "Q4_K", "int32/chain"),
                                   (1, "Q6_K", "int32/chain")):  # fmt: skip
            bench.tried(dtype, partial(library, bench, m, n, k, dtype, contract))
    for size in SQUARE:
        size //= divide
        for dtype in ("float16", "float32"):
            bench.tried(dtype, partial(library, bench, size, size, size, dtype, "fma/chain"))


def others(bench: Bench, divide: int, sweep: bool) -> None:
    """A row of x times one weight, in other types."""
    n, k = GEMV[0][0] // divide, max(256, GEMV[0][1] // divide // 256 * 256)
    for dtype in ("float32", "bfloat16", "Q8_0", "Q4_K", "Q6_K"):
        bench.tried(f"gemv {dtype}", partial(gemv, bench, (1, n, k), dtype, sweep))


def gemv(bench: Bench, extents: tuple[int, int, int], dtype: str, sweep: bool) -> None:
    """All kernels of one product."""
    m, n, k = extents
    if bench.late():
        return
    held = operands(m, n, k, dtype)
    names = block_names(m, sweep) if dtype[0] == "Q" else gemv_names(m, sweep)
    if sweep and dtype not in ("float16", "Q4_0"):
        names = names[:6]
    product = f"gemv {dtype} {m}x{n}x{k}"
    kernels(bench, product, held, names, dtype)


def narrow(bench: Bench, divide: int, sweep: bool) -> None:
    """A few rows of x in the order of a chain, the default."""
    for n, k in GEMV:
        n, k = n // divide, max(256, k // divide // 256 * 256)
        for m in (1, 16, 32, 64, 128) if n <= GEMV[0][0] else (1,):
            if not bench.late():
                held = operands(m, n, k, "float16")
                kernels(bench, f"chain float16 {m}x{n}x{k}", held, narrow_names(sweep), "float16")


def gemms(bench: Bench, divide: int, sweep: bool, peers: Path | None) -> None:
    """Squares, in halves and floats; weights [n, k], and [k, n] beside the peers."""
    best: dict[str, list[str]] = {}
    for size in SQUARE:
        largest = size == SQUARE[-1]
        size //= divide
        for dtype, across in (("float16", False), ("float32", False), ("float32", True)):
            if bench.late():
                return
            product = f"gemm {dtype} {size} {'[k, n]' if across else '[n, k]'}"
            held = operands(size, size, size, dtype, across=across)
            first = 0 if sweep or size == SQUARE[0] // divide else 1  # the chapter's kernel once
            names = best.get(f"{dtype}{across}") if sweep and largest else None
            found = kernels(bench, product, held, names or gemm_names(sweep, dtype)[first:], dtype)
            best[f"{dtype}{across}"] = [x.kernel for x in found][:6]
            if across and peers is not None and found:
                bench.tried("peers", partial(beside, bench, held, f"{product} beside peers", found[0].kernel, peers))


def beside(bench: Bench, held: Operands, product: str, ours: str, folder: Path) -> None:
    """The best of our kernels and the peers, in turns."""
    kernels(bench, product, held, [ours], "float32", peers_of(bench, held, product, folder))


def met(bench: Bench) -> Iterator[tuple[str, float | None, float]]:
    """The targets: what, the figure, the bar; of kernels whose bits were right."""
    right = [row for row in bench.rows if row.seconds and not row.verdict and not row.differing]
    copy = bench.facts.get("copy_gb_per_second") or float("nan")
    peak = bench.facts.get("peak_tflops") or float("nan")

    def best(words: str, **at: int) -> Timed | None:
        found = [x for x in right if words in x.product and all(getattr(x, key) == value for key, value in at.items())
                 and (x.kernel in KERNELS or x.kernel.startswith(("gem", "iso")))]  # fmt: skip
        return min(found, key=lambda x: x.best, default=None)

    for n in sorted({row.n for row in right if "gemv" in row.product}):
        one, four = best("gemv float16", n=n, m=1), best("gemv float16", n=n, m=4)
        quantized = best("gemv Q4_0", n=n, m=1)
        yield f"gemv float16 n={n} of a copy", one and one.nbytes / one.best / 1e9 / copy, 0.6
        yield f"gemv n={n}: M=4 over M=1 (at most)", one and four and four.best / one.best, 1.25
        yield f"Q4_0 n={n}: times float16", one and quantized and one.best / quantized.best, 2.2
    for product in dict.fromkeys(row.product for row in right if row.product.startswith("gemm")):
        ours = best(product)
        peers = [row for row in right if row.product == product and not row.kernel.startswith("gem")]
        rate = ours and 2 * ours.m * ours.n * ours.k / ours.best / 1e12
        yield f"{product} of the measured peak", rate and rate / peak, 0.5
        yield f"{product} of 66.9 TFLOP/s", rate and rate / 66.9, 0.5
        if peers:
            yield f"{product}: times the best peer", ours and min(row.best for row in peers) / ours.best, 1.1


def main(
    divide: Annotated[int, typer.Option(help="Divide every extent by this, for a try in software.", min=1)] = 1,
    json: Out = None,
    seconds: Annotated[float, typer.Option(help="No further kernel is begun after so long.")] = 180,
    sweep: Annotated[bool, typer.Option("--sweep", help="Time alternatives of tiles and vectors.")] = False,
    parts: Annotated[str, typer.Option(help="Some of gemv,blocks,gemm,others,chain,library,chapter,admissions.")] = "",
    checked: Annotated[bool, typer.Option("--checked", help="Only with wgpu's checks of indices and loops.")] = False,
    peers: Annotated[Path | None, typer.Option(help="A folder with peers.json, see above.")] = None,
) -> None:
    """Time the kernels on the preferred adapter. Exits with 1 when a bit differed."""
    bench = Bench(seconds, json, checked=checked)
    bench.say(f"{bench.adapter.name}, subgroups of {bench.adapter.subgroup}, timestamps {bench.adapter.timestamps}")
    bench.tried("ceilings", lambda: ceilings(bench, divide > 1))
    steps = {
        "gemv": lambda: gemvs(bench, divide, sweep, "float16"),
        "blocks": lambda: gemvs(bench, divide, sweep, "Q4_0"),
        "gemm": lambda: gemms(bench, divide, sweep, peers),
        "others": lambda: others(bench, divide, sweep),
        "chain": lambda: narrow(bench, divide, sweep),
        "library": lambda: called(bench, divide),
        "chapter": lambda: chapter(bench, divide),
        "admissions": lambda: admissions(bench),
    }
    for name in parts.split(",") if parts else steps:
        bench.tried(name, steps[name])
    bench.facts["targets"] = [{"what": what, "figure": figure, "bar": bar} for what, figure, bar in met(bench)]
    for target in bench.facts["targets"]:
        bench.say(f"{target['what']}: {target['figure'] and round(target['figure'], 3)} (bar {target['bar']})")
    bench.save()
    typer.echo(f"rows: {bench.path}")
    if any(row.differing and not row.verdict for row in bench.rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
