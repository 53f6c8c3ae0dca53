"""What first calls cost, whose kernels are not compiled yet: ``python -m benchmarks.first_calls``.

Each row is a process of its own with an empty cache: a product as in docs/start.md, the README's model, `isogemm warm`,
and `make demo` in a fresh clone of the commit, its installation included. Run it on an idle machine: compiling takes a
CPU's time, and nothing else does.

``--gpu``: one process with an empty cache and without tables, in which drawn products are called for the first time,
one after the other, each until the device has its result.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from isogemm.base.progress import progress_bar
from isogemm.lab import environment, write_json

from .common import Out, cpu_name, results_path
from .gpu.engine import CudaEngine

ROOT = Path(__file__).parents[1]
PRODUCT = """
import numpy as np
import isogemm
x, w = np.ones((64, 4096), np.float32), np.ones((1024, 4096), np.float32)
isogemm.linear(x, w), isogemm.linear(x[5:6], w)
"""
GPU = """
import json, sys, time
import torch
torch.zeros(1, device="cuda"), torch.cuda.synchronize()
before = time.perf_counter()
import isogemm
from isogemm.backends.cuda.gemm import choose
print(json.dumps({"import": time.perf_counter() - before}), flush=True)
from benchmarks.draw import of_gpus
choose.shipped_tables = lambda: ()
for x in of_gpus(int(sys.argv[1]), int(sys.argv[2])):
    sizes = [(x.m, x.k)[:: 1 if x.layout[0] == "N" else -1], (x.k, x.n)[:: 1 if x.layout[1] == "N" else -1]]
    a, b = (torch.randn(size, device="cuda", dtype=getattr(torch, x.dtype)) for size in sizes)
    bias = torch.randn(x.n, device="cuda", dtype=a.dtype) if x.bias else None
    torch.cuda.synchronize()
    before = time.perf_counter()
    isogemm.gemm(a, b, trans_a=x.layout[0], trans_b=x.layout[1], bias=bias)
    torch.cuda.synchronize()
    print(json.dumps({**x._asdict(), "seconds": time.perf_counter() - before}), flush=True)
"""


def on_gpu(folder: Path, seed: int, count: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A row for each product, in the order of the calls, and what is said of them all."""
    env = os.environ | {"XDG_CACHE_HOME": str(folder / "cache"), "XDG_DATA_HOME": str(folder / "data")}
    command = [sys.executable, "-c", GPU, str(seed), str(count)]
    done = subprocess.run(command, cwd=ROOT, env=env, check=True, capture_output=True, text=True)
    first, *rows = [json.loads(text) for text in done.stdout.splitlines()]
    head, *rest = [row["seconds"] for row in rows]
    found = {"first": head, "median": statistics.median(rest), "most": max(rest), "said": done.stderr.splitlines()}
    return rows, {**first, **found}


def cold(command: list[str], folder: Path, where: Path = ROOT) -> dict[str, Any]:
    """The seconds of a command whose cache is empty, by the clock and of the CPUs, and of the same one again."""
    cache = folder / "cache"
    env = os.environ | {"XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(where / "src")}
    found: dict[str, Any] = {}
    for name in ("first", "again"):
        started, before = time.perf_counter(), os.times()
        subprocess.run(command, cwd=where, env=env, check=True, stdout=subprocess.DEVNULL)
        after = os.times()
        used = after.children_user + after.children_system - before.children_user - before.children_system
        found[name] = {"seconds": time.perf_counter() - started, "cpu_seconds": used}
    return found


def measure(folder: Path) -> list[dict[str, Any]]:
    """All of them, by name; ``again`` of the demo is with everything installed and compiled."""
    readme = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert readme
    clone = folder / "clone"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    rows: Mapping[str, tuple[list[str], Path]] = {
        "product": ([sys.executable, "-c", PRODUCT], ROOT),
        "model": ([sys.executable, "-c", readme[1]], ROOT),
        "warm": ([sys.executable, "-m", "isogemm", "warm"], ROOT),
        "demo": (["make", "demo"], clone),
    }
    found = []
    with progress_bar() as tell:
        for done, (name, (command, where)) in enumerate(rows.items()):
            tell(done, len(rows), name)
            found.append({"name": name, **cold(command, folder / name, where)})
    return found


def run(
    out: Out = None,
    gpu: Annotated[bool, typer.Option(help="Drawn products on this GPU instead.")] = False,
    seed: Annotated[int, typer.Option(help="Of these products.", min=0)] = 0,
    count: Annotated[int, typer.Option(help="Of them.", min=2)] = 40,
) -> None:
    """Time first calls, each in a process of its own with an empty cache, and the same calls again."""
    stamp, facts = environment(), dict[str, Any]()
    with tempfile.TemporaryDirectory() as folder:
        if gpu:
            rows, found = on_gpu(Path(folder), seed, count)
            facts = {"device": CudaEngine().facts(), "found": found}
        else:
            rows = measure(Path(folder))
    target = out or results_path("first-calls", str(facts["device"]["name"]) if gpu else cpu_name(stamp))
    path = write_json(target, rows, environment=stamp, benchmark="first_calls", **facts)
    for line in [_of_gpu(found)] if gpu else map(_of_cpu, rows):
        typer.echo(line)
    typer.echo(path)


def _of_gpu(found: Mapping[str, Any]) -> str:
    return f"first {found['first']:.2f} s; then median {1e3 * found['median']:.1f} ms, most {found['most']:.2f} s"


def _of_cpu(row: Mapping[str, Any]) -> str:
    first, again = row["first"], row["again"]
    return f"{row['name']}: {first['seconds']:.0f} s, {first['cpu_seconds']:.0f} of CPUs; again {again['seconds']:.1f}"


if __name__ == "__main__":
    typer.run(run)
