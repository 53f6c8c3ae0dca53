"""Break the order of K in a copy of the kernels on purpose, and report which breaks a check of bits sees.

    python tools/break_kernels.py            # copies, breaks, compiles and checks; exit status 1 if a break goes unseen
    python tools/break_kernels.py --check    # the checks alone, on the installed package; what the copy runs

Each check is blind to every other break, so one copy with all of them, compiled once, tells them apart.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer


@dataclass(frozen=True)
class Break:
    """A source edit that changes the order of a sum, and the check that must see it.

    Attributes
    ----------
    name, check : str
    file : str
        Relative to the package.
    old, new : str
        `old` occurs once.
    """

    name: str
    check: str
    file: str
    old: str
    new: str


BREAKS = (
    Break(
        "steps of the unrolled group in descending order", "tile", "backends/cpu/gemm/micro.py",
        "for u in range(UNROLL):", "for u in reversed(range(UNROLL)):",
    ),
    Break(
        "each K panel from zero, then added", "panels", "backends/cpu/gemm/loops.py",
        "f.CONTINUES if (not first_panel or d[f.START] != 0) else 0", "f.CONTINUES if d[f.START] != 0 else 0",
    ),
    Break(
        "columns of a tile of weights in descending order", "gemv", "backends/cpu/gemm/gemv.py",
        "for j, column in enumerate(tile_columns):\n            single(",
        "for j, column in reversed(list(enumerate(tile_columns))):\n            single(",
    ),
    Break(
        "columns of a strip of weights in descending order", "quads", "backends/cpu/gemm/quads.py",
        "for i, column in enumerate(columns):", "for i, column in reversed(list(enumerate(columns))):",
    ),
    Break(
        "steps of a turn of instructions in descending order", "turn", "backends/cpu/gemm/turn.py",
        "return turn // self.blocks", "return STEPS - 1 - turn // self.blocks",
    ),
    Break(  # the same check: a processor takes one of the two
        "columns of a turn of 16 lanes in descending order", "turn", "backends/cpu/gemm/wide.py",
        "for i, column in enumerate(group):", "for i, column in reversed(list(enumerate(group))):",
    ),
    Break(
        "steps along prepared panels in descending order", "prepared", "backends/cpu/gemm/panels.py",
        "for u in range(UNROLL):", "for u in reversed(range(UNROLL)):",
    ),
    Break(
        "columns of a tile in descending order, rows in turns", "turns", "backends/cpu/gemm/gemv.py",
        "for j, column in enumerate(tile_columns):\n            values",
        "for j, column in reversed(list(enumerate(tile_columns))):\n            values",
    ),
    Break(
        "rows of B that stream by in descending order", "stream", "backends/cpu/gemm/stream.py",
        "for u in range(depth):\n            column", "for u in reversed(range(depth)):\n            column",
    ),
    Break(
        "leaves in descending order", "leaves", "backends/cpu/gemm/leaves.py",
        "for start, end in leaves:", "for start, end in reversed(leaves):",
    ),
    Break(
        "a tree of leaves from far apart", "tree", "backends/cpu/gemm/leaves.py",
        "parts = [parts[i] + parts[i + 1] for i in range(0, len(parts), 2)]",
        "parts = [parts[i] + parts[i + len(parts) // 2] for i in range(len(parts) // 2)]",
    ),
)  # fmt: skip


# The tile's result would be the last panel alone: the sum of the panels, each from zero, is made here.
_PANELS = (
    "            if d[f.PLAIN] != 0:\n",
    "            if d[f.PLAIN] != 0 and not first_panel:\n"
    "                c = d[f.OUT] + i * d[f.O_RS] + (j0 + j) * 4\n"
    "                _tile(d, routine, count, kb, ap, bp, b_rs, tile, NR * 4, 0)\n"
    "                for r in range(count):\n"
    "                    for q in range(width):\n"
    "                        x, y = peek32(tile + (r * NR + q) * 4), c + r * d[f.O_RS] + q * 4\n"
    "                        poke32(y, as_bits(add32(as_float(peek32(y)), as_float(x))))\n"
    "            elif d[f.PLAIN] != 0:\n",
)
_IMPORTS = (
    "import epilogue_tile, peek32, peek32_at, poke32, poke32_at",
    "import add32, as_bits, as_float, epilogue_tile, peek32, peek32_at, poke32, poke32_at",
)


def check() -> dict[str, int]:
    """Outputs that differ from the executable definition, by the order of K that a check looks at."""
    import numpy as np

    from isogemm.backends.cpu.gemm import execute
    from isogemm.backends.cpu.gemm.packed import prepare
    from isogemm.backends.cpu.gemm.schedule import Schedule
    from isogemm.contract import Contract, compare, reference
    from isogemm.problem.settings import Settings

    rng = np.random.default_rng(0)

    def differing(
        m: int,
        k: int,
        lines: bool,
        chosen: Any = None,
        contract: str = "fma/chain",
        *,
        ready: bool = False,
        n: int = 70,
    ) -> int:
        a = rng.standard_normal((m, k), dtype=np.float32)
        b = rng.standard_normal((k, n), dtype=np.float32)
        out = np.full((m, n), np.nan, np.float32)
        laid: Any = prepare(b.T) if ready else np.asfortranarray(b) if lines else b
        execute.gemm(a, laid, out, Settings(Contract.parse(contract)), chosen=chosen)
        return compare.differing(out, reference.evaluate(a, b, contract))

    tiled = Schedule("tiled", "block", "block", 4, 64, 128, 512, 1, 1, 1)
    checks: dict[str, Callable[[], int]] = {
        "tile": lambda: differing(20, 96, True, tiled),
        # Panels of 3: no unrolled group. Leaves of 1: no order inside one.
        "panels": lambda: differing(20, 30, True, replace(tiled, kc=3)),
        "gemv": lambda: differing(2, 1024, True),  # weight rows that fall into one cache set
        "quads": lambda: differing(2, 96, True, n=20),  # too few columns for turns of 16 lanes
        "turn": lambda: differing(1, 96, True),
        "prepared": lambda: differing(1, 96, True, ready=True),
        "turns": lambda: differing(13, 96, True),
        "stream": lambda: differing(2, 96, False),
        "leaves": lambda: differing(20, 20, True, None, "fma/leaf1"),
        "tree": lambda: differing(20, 16, True, None, "fma/tree16"),
    }
    return {name: run() for name, run in checks.items()}


def broken_copy(folder: Path) -> Path:
    """A copy of the package with every break in it; the folder to put on PYTHONPATH.

    Raises
    ------
    LookupError
        The source to break is not there, or not once: the edit has to follow the kernel.
    """
    package = folder / "isogemm"
    shutil.copytree(Path(__file__).parent.parent / "src" / "isogemm", package)
    for b in BREAKS:
        _edit(package / b.file, b.old, b.new)
    for old, new in (_PANELS, _IMPORTS):
        _edit(package / "backends/cpu/gemm/loops.py", old, new)
    return folder


def _edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    if text.count(old) != 1:
        raise LookupError(f"{file.name}: {old!r} occurs {text.count(old)} times, not once")
    file.write_text(text.replace(old, new))


def run_broken() -> dict[str, int]:
    """`check` in a process of its own, on a broken copy with a kernel cache of its own."""
    with tempfile.TemporaryDirectory() as name:
        folder = broken_copy(Path(name))
        # An order is in the source: no optimizer may change it, and without one they compile in half the time.
        own = {"PYTHONPATH": str(folder), "XDG_CACHE_HOME": f"{name}/cache", "NUMBA_OPT": "0"}
        env = os.environ | own | {"ISOGEMM_NUM_THREADS": "1"}
        command = [sys.executable, str(Path(__file__).resolve()), "--check"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env, cwd=name)
    if done.returncode:
        raise RuntimeError(done.stderr)
    found = json.loads(done.stdout)
    if not found.pop("package").startswith(name):
        raise RuntimeError("the checks ran on another copy of the package")
    return {str(key): int(value) for key, value in found.items()}


def main(
    of_this: Annotated[bool, typer.Option("--check", help="Count the outputs of this package that differ.")] = False,
) -> None:
    """Break a copy of the package in each way, and say which breaks its bits show. Exits with 1 where one is unseen."""
    if of_this:
        import isogemm

        print(json.dumps({"package": str(isogemm.__file__)} | check()))
        return
    found = run_broken()
    for b in BREAKS:
        print(f"{'seen' if found[b.check] else 'UNSEEN':<7} {found[b.check]:>5} outputs  {b.file}: {b.name}")
    if not all(found[b.check] for b in BREAKS):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
