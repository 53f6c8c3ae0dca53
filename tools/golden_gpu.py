"""Golden vectors of the tensor-core contracts, made on an NVIDIA GPU.

    python tools/golden_gpu.py --out tests/golden

Wants torch and Triton. Draws operands bit by bit, multiplies them with mma.sync and with wgmma tiles of several shapes,
checks that all tiles agree bit for bit, and writes ``hopper.npz`` (operands, starts and float32 results, as bits)
and ``hopper.json`` (where, when and with what). ``--dry`` draws the operands alone and needs no GPU.
``--check ROUNDS`` writes nothing: it draws larger cases anew and compares the GPU with `isogemm.contract.reference`.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from golden_cases import FP32, TF32, Case, Format, cases

Array = Any

ELEMENTS: dict[str, tuple[Any, str]] = {
    "bfloat16": (ml_dtypes.bfloat16, "tensor_core:sm90/chain"),
    "float16": (np.float16, "tensor_core:sm90/chain"),
    "tf32": (np.float32, "tf32:sm90/chain"),
    "float32": (np.float32, "fma/chain"),
}

# name: BLOCK_M, BLOCK_N, BLOCK_K, warps, operands swapped. 64 rows or more are wgmma on Hopper, fewer are mma.sync.
TILES = {
    "mma 16x16x16": (16, 16, 16, 1, False),
    "mma 32x32x64 swapped": (32, 32, 64, 4, True),
    "wgmma 64x16x64": (64, 16, 64, 4, False),
    "wgmma 64x32x16": (64, 32, 16, 4, False),
    "wgmma 64x32x32 swapped": (32, 64, 32, 4, True),
    "wgmma 128x64x64": (128, 64, 64, 8, False),
}
IEEE_TILES = {"fma 16x16x16": (16, 16, 16, 1, False), "fma 32x32x16": (32, 32, 16, 4, False)}


def kernel() -> Any:
    import triton
    import triton.language as tl

    globals()["tl"] = tl  # the compiler resolves names in the module of the kernel

    @triton.jit(do_not_specialize=["M", "N", "K"])
    def product(a, b, c, y, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SWAP: tl.constexpr,
                START: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
        rm = tl.program_id(0) * BM + tl.arange(0, BM)
        rn = tl.program_id(1) * BN + tl.arange(0, BN)
        rk = tl.arange(0, BK)
        if SWAP:
            at = rm[None, :] * N + rn[:, None]
            inside = (rm[None, :] < M) & (rn[:, None] < N)
            acc = tl.zeros((BN, BM), tl.float32)
        else:
            at = rm[:, None] * N + rn[None, :]
            inside = (rm[:, None] < M) & (rn[None, :] < N)
            acc = tl.zeros((BM, BN), tl.float32)
        if START:
            acc = tl.load(c + at, mask=inside, other=0.0)
        for k in range(0, K, BK):
            kk = k + rk
            if SWAP:
                x = tl.load(a + rm[None, :] * K + kk[:, None], mask=(rm[None, :] < M) & (kk[:, None] < K), other=0.0)
                w = tl.load(b + kk[None, :] * N + rn[:, None], mask=(rn[:, None] < N) & (kk[None, :] < K), other=0.0)
                acc = tl.dot(w, x, acc, input_precision=PRECISION)
            else:
                x = tl.load(a + rm[:, None] * K + kk[None, :], mask=(rm[:, None] < M) & (kk[None, :] < K), other=0.0)
                w = tl.load(b + kk[:, None] * N + rn[None, :], mask=(rn[None, :] < N) & (kk[:, None] < K), other=0.0)
                acc = tl.dot(x, w, acc, input_precision=PRECISION)
        tl.store(y + at, acc, mask=inside)

    return product


def tf32_bits(x: Array) -> Array:
    """float32 bits rounded to nearest even to 10 fraction bits; NaN stays one."""
    nan = (x & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    rounded = (x + np.uint32(0xFFF) + ((x >> np.uint32(13)) & np.uint32(1))) & np.uint32(0xFFFFE000)
    return np.where(nan, np.uint32(0x7FFFE000), rounded)


def run(product: Any, case: Case, tile: tuple[Any, ...], instructions: collections.Counter[str]) -> Array:
    """Result bits of one case on one tile."""
    import torch

    def put(x: Array, f: Format) -> Any:
        kind = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(f.name, torch.float32)
        signed = np.ascontiguousarray(x).view(np.int16 if x.itemsize == 2 else np.int32)
        return torch.from_numpy(signed.copy()).cuda().view(kind)

    (m, k), n = case.a.shape, case.b.shape[1]
    bm, bn, bk, warps, swap = tile
    narrow = tf32_bits if case.format is TF32 else (lambda x: x)
    a, b = put(narrow(case.a), case.format), put(narrow(case.b), case.format)
    c = put(case.c, FP32) if case.c is not None else a
    y = torch.full((m, n), float("nan"), device="cuda", dtype=torch.float32)
    handle = product[(-(-m // bm), -(-n // bn))](
        a, b, c, y, m, n, k, BM=bm, BN=bn, BK=bk, SWAP=swap, START=case.c is not None,
        PRECISION="ieee" if case.format is FP32 else "tf32", num_warps=warps)  # fmt: skip
    for name in re.findall(r"(?:wgmma\.mma_async|mma\.sync)[.\w]*|fma\.rn[.\w]*", handle.asm["ptx"]):
        instructions[name] += 1
    return y.view(torch.int32).cpu().numpy().view(np.uint32)


def machine() -> dict[str, str]:
    import torch
    import triton

    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    name, driver = (s.strip() for s in subprocess.check_output(query, text=True).splitlines()[0].split(","))
    return {"device": name, "capability": ".".join(map(str, torch.cuda.get_device_capability())), "driver": driver,
            "cuda": str(torch.version.cuda), "torch": torch.__version__, "triton": triton.__version__,
            "python": sys.version.split()[0], "numpy": np.__version__}  # fmt: skip


class Vectors:
    """Operands and results of cases, whose tiles have to agree on every bit."""

    def __init__(self) -> None:
        self.arrays: dict[str, Array] = {}
        self.instructions: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)  # by tile
        self.differences: dict[str, dict[str, int]] = {}  # how many elements of a case are others, by tile
        self.names: dict[str, None] = {}  # of the cases, in order

    def add(self, name: str, tile: str, bits: Array, result: str = "out") -> None:
        """Keep what the first tile made of a case, and count where the bits of another one differ."""
        self.names[name] = None
        first = self.arrays.setdefault(f"{name}.{result}", bits)
        if (bits != first).any():
            self.differences.setdefault(name, {})[tile] = int((bits != first).sum())

    def save(self, folder: Path, stem: str, seed: int) -> int:
        """Write the vectors and what they were made with; 1 where tiles differ."""
        np.savez_compressed(folder / f"{stem}.npz", **self.arrays)
        facts = {
            "command": f"python tools/{Path(sys.argv[0]).name} --out tests/golden",
            "date": datetime.date.today().isoformat(),
            "seed": seed,
            **machine(),
            "tiles": {t: sorted(i) for t, i in self.instructions.items()},
            "tiles that differ": self.differences,
            "cases": list(self.names),
        }
        (folder / f"{stem}.json").write_text(json.dumps(facts, indent=1) + "\n")
        print(f"{len(self.names)} cases; tiles differ in {len(self.differences)}: {self.differences}")
        return 1 if self.differences else 0


def record(folder: Path, seed: int) -> int:
    """Draw, multiply, compare the tiles, write both files."""
    product, found = kernel(), Vectors()
    for case in cases(seed):
        store(found.arrays, case)
        for tile, shape in tiles_of(case).items():
            bits = run(product, case, shape, found.instructions[f"{case.format.name} {tile}"])
            found.add(case.name, tile, bits)
    return found.save(folder, "hopper", seed)


def check(seed: int, rounds: int) -> int:
    """Compare the GPU with the executable definition on larger cases, drawn anew; the count of outputs that differ."""
    from isogemm.contract.reference import evaluate

    product, unused = kernel(), collections.Counter[str]()
    outputs: collections.Counter[str] = collections.Counter()
    wrong: collections.Counter[str] = collections.Counter()
    for case in (case for r in range(rounds) for case in cases(seed + 1 + r, grow=4)):
        kind, contract = ELEMENTS[case.format.name]
        c = None if case.c is None else case.c.view(np.float32)
        expected = evaluate(case.a.view(kind), case.b.view(kind), contract, c).view(np.uint32)
        for tile, shape in tiles_of(case).items():
            bits = run(product, case, shape, unused)
            bits[(bits & 0x7FFFFFFF) > 0x7F800000] = 0x7FFFFFFF
            outputs[case.format.name] += bits.size
            if (bits != expected).any():
                wrong[f"{case.name} {tile}"] += int((bits != expected).sum())
    print(f"{dict(outputs)} outputs; differ: {sum(wrong.values())} {dict(wrong)}")
    return sum(wrong.values())


def tiles_of(case: Case) -> dict[str, tuple[Any, ...]]:
    return IEEE_TILES if case.format is FP32 else TILES


def store(arrays: dict[str, Array], case: Case) -> None:
    arrays[f"{case.name}.a"], arrays[f"{case.name}.b"] = case.a, case.b
    if case.c is not None:
        arrays[f"{case.name}.c"] = case.c


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("tests/golden"))
    parser.add_argument("--seed", type=int, default=20261121)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--check", type=int, metavar="ROUNDS")
    chosen = parser.parse_args()
    if chosen.check:
        return 1 if check(chosen.seed, chosen.check) else 0
    if not chosen.dry:
        return record(chosen.out, chosen.seed)
    arrays: dict[str, Array] = {}
    for case in cases(chosen.seed):
        store(arrays, case)
    np.savez_compressed(chosen.out / "operands.npz", **arrays)
    return 0


if __name__ == "__main__":
    sys.exit(main())
