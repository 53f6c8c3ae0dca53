"""Time kernels that could serve drawn products, on this GPU: what the model of their time is fitted to and tried on.

    python -m tools.time_kernels --seed 3 --count 200 --out timings.jsonl
    python -m tools.time_kernels --seed 4 --most-rows 512 --types bfloat16,float16 --multiples 8 --out few.jsonl
    python -m tools.time_kernels --seed 5 --count 900 --multiples 8 --least-k 8192 --most-blocks 132 --out long.jsonl
    python -m tools.time_kernels --seed 6 --families hopper --likeliest 24 --others 24 --among 400 --out unlikely.jsonl
    python -m tools.time_kernels --regret timings.jsonl        # of a file, without timing anything

The first line is the machine's stamp; then a line for each product: microseconds by family and configuration, of those
that its model puts first and of some others, and the model's own. What a library offers comes with the number of output
elements that differ from one of ours. The regret is the time of the model's first kernel over the fastest of ours.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.gpu.cases import RANDOM, Case, cases
from benchmarks.gpu.engine import posed

from isogemm.backends.cuda.gemm.choose import FAMILIES
from isogemm.lab.gpu.bench import worker_processes
from isogemm.problem.product import Product

LIBRARY = 16
MOST_FLOPS = 3e12
PROCESSES = 15

Use = tuple[str, str]


def main(words: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--least-rows", type=int, default=1, help="products with fewer are left out")
    parser.add_argument("--most-rows", type=int, default=8192, help="and with more")
    parser.add_argument("--least-blocks", type=int, default=1, help="of 64 x 64 of the output")
    parser.add_argument("--most-blocks", type=int, default=1 << 30, help="of them")
    parser.add_argument("--least-k", type=int, default=1)
    parser.add_argument("--types", default="bfloat16,float16,float32", help="of operands; others are left out")
    parser.add_argument("--layout", choices=("NT", "NN", "TN"), help="of operands, in place of the drawn ones")
    parser.add_argument("--multiples", type=int, default=1, help="of which N and K have to be")
    parser.add_argument("--families", default=",".join(FAMILIES.found), help="of kernels")
    parser.add_argument("--likeliest", type=int, default=16, help="of Hopper's kernels, by the model")
    parser.add_argument("--others", type=int, default=12, help="drawn from those behind them")
    parser.add_argument("--among", type=int, default=48, help="of which so many count, the likeliest with them")
    parser.add_argument("--seconds", type=float, default=500.0, help="after which no further product is begun")
    parser.add_argument("--out", type=Path, default=Path("timings.jsonl"))
    parser.add_argument("--regret", type=Path, help="a file to read instead of timing anything")
    given = parser.parse_args(words)
    if given.regret is None:
        drawn = [replace(x, bias=False) for x in cases([RANDOM], seed=given.seed, count=given.count)]
        types = given.types.split(",")
        drawn = [
            x
            for x in drawn
            if given.least_rows <= x.m <= given.most_rows and x.dtype in types and x.work.flops < MOST_FLOPS
        ]
        drawn = [x for x in drawn if x.n % given.multiples == x.k % given.multiples == 0 and x.k >= given.least_k]
        drawn = [x for x in drawn if given.least_blocks <= -(-x.m // 64) * -(-x.n // 64) <= given.most_blocks]
        drawn = [replace(x, layout=given.layout or x.layout) for x in drawn]
        source = random.Random(given.seed)
        offers = [(x, list(dict.fromkeys(_offered(posed(x), source, given)))) for x in drawn]
        measure([(x, uses) for x, uses in offers if uses], given.seconds, given.out)
    print(regret([json.loads(line) for line in (given.regret or given.out).read_text().splitlines()[1:]]))
    return 0


def measure(offers: Sequence[tuple[Case, Sequence[Use]]], seconds: float, out: Path) -> None:
    """Compile side by side, then time product by product."""
    from isogemm.backends import open_device
    from isogemm.lab import environment
    from isogemm.lab.gpu.bench import GpuBench
    from isogemm.operands.device_array import DeviceId

    end = time.monotonic() + seconds
    here, bench = open_device(DeviceId("cuda", 0)).chooser, GpuBench(0)
    jobs: dict[Use, list[Product]] = {}
    for x, uses in offers:
        for use in uses:
            if not FAMILIES.found[use[0]].library:
                jobs.setdefault(use, []).append(posed(x))
    _compile([(*use, products) for use, products in jobs.items()], seconds / 2)
    with out.open("w", encoding="utf-8") as file:
        file.write(json.dumps({"stamp": here.admissions.stamp, "environment": environment()}, default=str) + "\n")
        for x, uses in offers:
            if time.monotonic() > end:
                break
            file.write(json.dumps(_row(x, uses, bench)) + "\n")
            file.flush()


def regret(rows: Sequence[Mapping[str, Any]]) -> str:
    """How much longer the kernel that the model puts first takes than the fastest of ours, in words."""
    found = []
    for row in rows:
        timed = {use: us for use, us in row["us"].items() if use in row["expected"]}
        if timed:
            first = min(timed, key=row["expected"].__getitem__)
            found.append(timed[first] / min(timed.values()))
    found.sort()
    mean = sum(found) / len(found) - 1
    return f"{len(found)} products: {mean:.1%} in the mean, 95th percentile {found[len(found) * 19 // 20] - 1:.1%}"


def _offered(product: Product, source: random.Random, given: argparse.Namespace) -> Iterator[Use]:
    """The likeliest of each family, and some that its model thinks less of."""
    from isogemm.backends.cuda.gemm.hopper.model import ranked

    for name in given.families.split(","):
        family = FAMILIES.found[name]
        if family.library:
            yield from ((name, config) for config in _listed(product)[:LIBRARY])
        elif name == "hopper":
            every = [str(c) for c in ranked(product)[: given.among]]
            first, rest = every[: given.likeliest], every[given.likeliest :]
            yield from ((name, c) for c in first + source.sample(rest, min(given.others, len(rest))))
        elif name != "items":
            yield from ((name, c) for c in family.configs(product))


def _listed(product: Product) -> list[str]:
    """What cuBLASLt's heuristic lists with K in one piece."""
    from isogemm.backends.cuda.gemm.cublaslt import search
    from isogemm.backends.cuda.gemm.cublaslt.call import Descriptors, as_call, handle

    call = as_call(product)
    if call is None or product.dtype_a == "float32":
        return []
    found = search.heuristic(handle(0), Descriptors(call), 16 if product.aligned() else 2, count=LIBRARY)
    return [str(x.algorithm) for x in found]


def _compile(jobs: Sequence[tuple[str, str, list[Product]]], seconds: float) -> None:
    """Build kernels side by side; their code reaches this process through the disk."""
    with worker_processes(PROCESSES) as pool, contextlib.suppress(TimeoutError):
        for future in as_completed([pool.submit(_build, *job) for job in jobs], timeout=seconds):
            future.result()


def _build(name: str, config: str, products: Sequence[Product]) -> None:
    for product in products:
        with contextlib.suppress(Exception):
            FAMILIES.found[name].bind(product, config, 0)


def _row(x: Case, uses: Sequence[Use], bench: Any) -> dict[str, Any]:
    product = posed(x)
    launches, expected, failed = {}, {}, {}
    for name, config in uses:
        family = FAMILIES.found[name]
        try:
            launches[f"{name} {config}"] = family.bind(product, config, 0)
        except Exception as error:
            failed[f"{name} {config}"] = str(error)[:80]
            continue
        us = family.microseconds(product, config, 0)
        if us is not None and math.isfinite(us):
            expected[f"{name} {config}"] = round(us, 3)
    times = bench.seconds(product, launches, rough=False)
    ours = next((f"{n} {c}" for n, c in uses if f"{n} {c}" in times and not FAMILIES.found[n].library), None)
    differing = {
        use: bench.differing(product, launches[use], launches[ours])
        for use in times
        if ours and FAMILIES.found[use.partition(" ")[0]].library
    }
    facts = {"m": x.m, "n": x.n, "k": x.k, "dtype": x.dtype, "layout": x.layout}
    measured = {use: round(seconds * 1e6, 2) for use, seconds in times.items()}
    return {**facts, "us": measured, "expected": expected, "differing": differing, "failed": failed}


if __name__ == "__main__":
    sys.exit(main())
