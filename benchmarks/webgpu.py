"""The kernels of the WebGPU backend against a copy by the same API: ``python -m benchmarks.webgpu``.

Times are of many launches in a row and one wait, so they leave out what a single call costs. Each product's bits are
compared with the definition on rows that are drawn, where the definition is not too slow for that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.table import Table

import isogemm
from isogemm.backends import open_device
from isogemm.contract.compare import differing
from isogemm.contract.reference import evaluate
from isogemm.lab import environment, write_json
from isogemm.operands.device_array import DeviceId

from .common import line_console, results_path

GEMV = ((4096, 4096), (32000, 4096))
SQUARE = (1024, 2048, 4096)
CHECKED = 64  # rows and columns that are compared
ROTATED = 2**28  # bytes of weights that launches take in turn: more than a cache holds


@dataclass(frozen=True)
class Timed:
    """One product's time, and what it moved and computed."""

    name: str
    m: int
    n: int
    k: int
    seconds: float
    gigabytes: float
    gflops: float
    differing: int


def best(device: Any, call: Callable[[int], object], least: float = 0.2) -> float:
    """Seconds of a call: the least of five runs of as many as fill `least` seconds."""
    calls, times = 1, []
    while len(times) < 5:
        device.adapter.wait()
        begun = time.perf_counter()
        for i in range(calls):
            call(i)
        device.adapter.wait()
        spent = time.perf_counter() - begun
        if spent < least and not times:
            calls *= 2
        else:
            times.append(spent / calls)
    return min(times)


def copied(device: Any) -> float:
    """Gigabytes a second of a copy from buffer to buffer, read and written."""
    size = min(ROTATED, device.adapter.limits.buffer)
    one, other = device.adapter.allocate(size), device.adapter.allocate(size)
    return 2 * size / best(device, lambda _: device.adapter.copy(one, other)) / 1e9


def product(device: Any, m: int, n: int, k: int, contract: str, fmt: str = "float16") -> Timed:
    """x [m, k] times a weight [n, k] of floats, or of blocks with integers."""
    rng = np.random.default_rng(m)
    x = rng.standard_normal((m, k)).astype(np.float32 if fmt != "float16" else np.float16)
    w = rng.standard_normal((n, k)).astype(np.float32)
    there = isogemm.webgpu.array(x)
    if fmt == "float16":
        w = w.astype(np.float16)
        nbytes, make = w.nbytes, lambda: isogemm.webgpu.array(w)
    else:
        stored = isogemm.quantize(w, fmt)
        nbytes, make = stored.nbytes, lambda: stored.to("cpu").to("webgpu")
    weights = [make() for _ in range(max(1, min(16, ROTATED // nbytes)))]
    asked = {"contract": contract}
    got = isogemm.linear(there, weights[0], out_dtype="float32", **asked).numpy()
    if fmt == "float16":
        wrong = differing(got[:CHECKED, :CHECKED], evaluate(x[:CHECKED], w[:CHECKED].T, contract))
    else:
        wrong = differing(got, isogemm.linear(x, stored, **asked))
    spent = best(device, lambda i: isogemm.linear(there, weights[i % len(weights)], **asked))
    return Timed(f"{fmt} {contract}", m, n, k, spent, nbytes / spent / 1e9, 2 * m * n * k / spent / 1e9, wrong)


def _cases(divide: int) -> Iterator[tuple[int, int, int, str, str]]:
    """m, n, k, contract and format: floats first, since blocks are made on the host."""
    gemv = [(n // divide, max(256, k // divide // 256 * 256)) for n, k in GEMV]
    for n, k in gemv:
        yield from ((m, n, k, "fma/lanes32", "float16") for m in (1, 4))
    for size in (size // divide for size in SQUARE):
        yield from ((size, size, size, f"fma/{order}", "float16") for order in ("chain", "lanes32"))
    for n, k in gemv:
        yield from ((1, n, k, "int32/chain", fmt) for fmt in ("Q4_0", "Q8_0", "Q4_K", "Q6_K"))


def main(
    divide: Annotated[int, typer.Option(help="Divide every extent by this, for a try in software.", min=1)] = 1,
    json: Annotated[Path | None, typer.Option(help="Where the rows go; benchmarks/results by default.")] = None,
) -> None:
    """Time the kernels on the preferred adapter. Exits with 1 when a bit differed."""
    device = open_device(DeviceId("webgpu"))
    isogemm.webgpu.measure()
    bandwidth, rows = copied(device), list[Timed]()
    path = json or results_path("webgpu", device.adapter.name)
    for case in _cases(divide):
        rows.append(product(device, *case))
        typer.echo(f"{rows[-1].name} {case[:3]}: {rows[-1].seconds * 1e6:.1f} us", err=True)
        write_json(
            path, [asdict(row) for row in rows], environment=environment(), adapter=device.adapter.name,
            copy_gb_per_second=bandwidth, crossovers=asdict(device.crossovers),
        )  # fmt: skip
    table = Table(title=f"{device.adapter.name}: a copy moves {bandwidth:.3g} GB/s")
    for heading in ("product", "m", "n", "k", "us", "GB/s", "of a copy", "GFLOP/s", "bits"):
        table.add_column(heading, justify="left" if heading == "product" else "right")
    for row in rows:
        table.add_row(
            row.name, str(row.m), str(row.n), str(row.k), f"{row.seconds * 1e6:.1f}", f"{row.gigabytes:.1f}",
            f"{row.gigabytes / bandwidth:.2f}", f"{row.gflops:.1f}", str(row.differing),
        )  # fmt: skip
    line_console(120).print(table)
    typer.echo(f"rows: {path}")
    if any(row.differing for row in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
