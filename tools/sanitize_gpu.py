"""compute-sanitizer over a reduced set of products: memory errors and races, in one command.

    python tools/sanitize_gpu.py                 # memcheck and racecheck; exit status 1 if either finds anything
    python tools/sanitize_gpu.py --tool memcheck

Tiny products through kernels of every family, forced one by one: odd sizes, tails of K, every order, epilogue and form,
each in memory of its own (torch's caching is off, so that a step past an operand leaves its allocation). A plain run
comes first: it fills the compilers' caches, which are slow to fill under the tool, and compares bits.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# The driver answers "invalid value" behind a kernel's last parameter, which is how their number is found: no error.
TOOLS = {"memcheck": ("--report-api-errors", "no"), "racecheck": ()}
SIZES = ((3, 40, 104), (17, 72, 136), (130, 136, 264))
UNEVEN = (5, 33, 51)
MOST = 4  # configurations of a family for one product


def sanitizer() -> str | None:
    """The program, from the PATH or from where CUDA is installed."""
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")


def main() -> int:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", choices=TOOLS, action="append", help="both by default")
    parser.add_argument("--seconds", type=float, default=100.0, help="the most that a tool may take")
    parser.add_argument("--products", action="store_true", help="run the products alone; what the tools watch")
    options = parser.parse_args()
    if options.products:
        return products()
    program = sanitizer()
    if program is None:
        print("compute-sanitizer is not installed: it comes with the CUDA toolkit", file=sys.stderr)
        return 2
    child = [sys.executable, str(Path(__file__).resolve()), "--products"]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    if subprocess.run(child, env=environment, check=False).returncode:
        print("the plain run failed")
        return 1
    return watch(program, options.tool or list(TOOLS), child, environment, options.seconds)


def watch(program: str, tools: list[str], child: list[str], environment: dict[str, str], seconds: float) -> int:
    """The products under each tool, side by side."""
    start = time.monotonic()
    running = {
        tool: subprocess.Popen(
            [program, "--tool", tool, *TOOLS[tool], "--error-exitcode", "9", "--print-limit", "20", *child],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for tool in tools
    }  # fmt: skip
    failed = False
    for tool, process in running.items():
        try:
            text, _ = process.communicate(timeout=max(1.0, start + seconds - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            text, _ = process.communicate()
            text += f"\n{tool}: not done within {seconds:g} s"
        found = process.returncode != 0
        failed = failed or found
        lines = text.strip().splitlines()
        print(f"== {tool}: {'FOUND SOMETHING' if found else 'clean'}, {time.monotonic() - start:.0f} s")
        print("\n".join(lines[-60:] if found else lines[-3:]))
    return int(failed)


def products() -> int:
    """Every product, each checked against the definition; the number of wrong ones is the status."""
    sys.path[:0] = [str(ROOT), str(ROOT / "src")]
    wrong = count = 0
    for name, got, want in results():
        count += 1
        if not same(got, want):
            wrong += 1
            print(f"wrong bits: {name}")
    print(f"{count} products, {wrong} wrong")
    return min(wrong, 1)


def same(got: Any, want: Any) -> bool:
    """Bits compared on the host, so that no kernel but ours runs under the tools."""
    from tests.backends.cuda.device import download

    from isogemm.contract.compare import differing

    return differing(download(got), want) == 0


def results() -> Iterator[tuple[str, Any, Any]]:
    """(name, result, definition's result) of every product."""
    from tests.backends.cuda.device import BF16, FP16, IEEE, TF32, TF32X3

    chains = (BF16, FP16, IEEE, TF32, TF32X3)
    for mode in (*chains, BF16.ordered("leaf64"), TF32X3.ordered("leaf64"), BF16.ordered("tree4")):
        yield from forced_products(mode)
    for mode in (BF16, IEEE, TF32X3):
        yield from forms(mode)


def operand(shape: tuple[int, ...], dtype: str, seed: int) -> Any:
    """Normal values, drawn on the host."""
    import torch

    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(getattr(torch, dtype))


def forced_products(mode: Any) -> Iterator[tuple[str, Any, Any]]:
    """A few configurations of every family that lists any, on each size, plain and continuing from a C."""
    import torch
    from tests.backends.cuda import forced
    from tests.backends.cuda.device import download

    from isogemm.contract import reference

    done: set[tuple[str, str]] = set()
    for m, n, k in (*SIZES, UNEVEN):
        a, b = operand((m, k), mode.dtype, m), operand((n, k), mode.dtype, n)
        c = operand((m, n), "float32", k)
        starts = (None,) if mode.contract.order.kind == "tree" else (None, c.cuda())
        for start in starts:
            x, w = a.cuda(), b.cuda().T
            out = torch.empty((m, n), device="cuda")
            product, at = forced.pose(x, w, out, mode, start)
            acc = reference.evaluate(download(a), download(b).T, mode.definition, None if start is None else c.numpy())
            taken: dict[str, int] = {}
            # What has not run yet comes first, so that sizes share the configurations among them.
            for name, config in sorted(forced.candidates(product), key=lambda pair: pair in done):
                taken[name] = taken.get(name, 0) + 1
                if taken[name] <= MOST:
                    done.add((name, config))
                    out.fill_(float("nan"))
                    forced.run(name, config, product, at)
                    yield f"{mode.definition} {name} [{config}] {m} x {n} x {k} {start is not None}", out, acc


def forms(mode: Any) -> Iterator[tuple[str, Any, Any]]:
    """Stacks, lists and groups through the public calls, with an epilogue."""
    from tests.backends.cuda.device import download

    import isogemm
    from isogemm.contract import reference

    a, b = operand((3, 17, 72), mode.dtype, 1), operand((3, 72, 40), mode.dtype, 2)
    bias = operand((40,), "float32", 3)
    want = [
        reference.epilogue(
            reference.evaluate(download(x), download(y), mode.definition),
            alpha=1.5, bias=bias.numpy(), out_dtype=download(x).dtype,
        )
        for x, y in zip(a, b, strict=True)
    ]  # fmt: skip
    x, y, options = a.cuda(), b.cuda(), {"alpha": 1.5, "bias": bias.cuda(), **mode.options}
    for call in (isogemm.gemm_strided_batched, isogemm.gemm_batched, isogemm.gemm_grouped):
        given = (x, y) if call is isogemm.gemm_strided_batched else (list(x), list(y))
        for i, got in enumerate(call(*given, **options)):
            yield f"{mode.definition} {call.__name__} {i}", got, want[i]


if __name__ == "__main__":
    sys.exit(main())
