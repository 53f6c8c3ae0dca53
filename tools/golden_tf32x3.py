"""Golden vectors of ``tf32x3:sm90``, made on an NVIDIA GPU.

    python tools/golden_tf32x3.py --out tests/golden

Wants torch and Triton. Splits operands into hi and lo here, multiplies them with mma.sync and with wgmma tiles as
docs/design/0004-tf32x3.md says, checks that all tiles agree bit for bit, and writes ``tf32x3.npz`` and ``tf32x3.json``.
``--check ROUNDS`` writes nothing: it draws larger cases anew and compares the GPU with `isogemm.contract.reference`.
"""

from __future__ import annotations

import argparse
import collections
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from golden_cases import FP32, PLAN, Case, start
from golden_gpu import Vectors, store, tf32_bits

Array = Any
SIZES = {7: (16, 16), 32: (16, 16), 100: (8, 16), 333: (8, 8), 2568: (4, 8)}
LONG = ("normal", "heavy")  # categories with K = 2568
# name: BLOCK_M, BLOCK_N, warps, operands swapped. 64 rows or more are wgmma on Hopper, fewer are mma.sync.
TILES = {
    "mma 16x16": (16, 16, 1, False),
    "mma 32x32 swapped": (32, 32, 4, True),
    "wgmma 64x32": (64, 32, 4, False),
    "wgmma 64x64 swapped": (64, 64, 4, True),
    "wgmma 128x64": (128, 64, 8, False),
}


def tf32x3_cases(seed: int, grow: int = 1) -> Iterator[Case]:
    """Float32 operands of every category, without and with a start."""
    rng = np.random.default_rng(seed)
    for category, (draw, _, _) in PLAN.items():
        for k, (m, n) in SIZES.items():
            if k == 2568 and category not in LONG:
                continue
            m, n, started = m * grow, n * grow, k in (7, 100)
            a, b = draw(rng, FP32, m, n, k)
            c = start(rng, category, FP32, m, n) if started else None
            yield Case(f"tf32x3-{category}-k{k}{'-c' if started else ''}", FP32, a, b, c)


def split_bits(x: Array) -> tuple[Array, Array]:
    """Bits of hi and lo: a finite number keeps a finite hi, the rest of infinities and NaN is zero."""
    hi, finite = tf32_bits(x), (x & np.uint32(0x7F800000)) != 0x7F800000
    overflow = finite & ((hi & np.uint32(0x7FFFFFFF)) == 0x7F800000)
    hi = np.where(overflow, hi - np.uint32(0x2000), hi).astype(np.uint32)
    with np.errstate(invalid="ignore"):
        rest = x.view(np.float32) - hi.view(np.float32)
    return hi, np.where(finite, tf32_bits(rest.view(np.uint32)), 0).astype(np.uint32)


def kernel() -> Any:
    import triton
    import triton.language as tl

    globals()["tl"] = tl  # the compiler resolves names in the module of the kernel

    @triton.jit(do_not_specialize=["M", "N", "K", "zero"])
    def product(ah, al, bh, bl, c, y, M, N, K, zero, BM: tl.constexpr, BN: tl.constexpr, SWAP: tl.constexpr,
                START: tl.constexpr):  # fmt: skip
        rm = tl.program_id(0) * BM + tl.arange(0, BM)
        rn = tl.program_id(1) * BN + tl.arange(0, BN)
        rk = tl.arange(0, 32)
        left, right, L, R = (rn, rm, N, M) if SWAP else (rm, rn, M, N)
        BL: tl.constexpr = BN if SWAP else BM
        BR: tl.constexpr = BM if SWAP else BN
        at = right[None, :] * N + left[:, None] if SWAP else left[:, None] * N + right[None, :]
        inside = (left[:, None] < L) & (right[None, :] < R)
        # A zero that the compiler cannot see: with a constant one it folds the addition after a dot into the dot.
        nothing = tl.full((BL, BR), 0.0, tl.float32) + zero
        acc = nothing
        if START:
            acc = tl.load(c + at, mask=inside, other=0.0)
        for k in range(0, K, 32):
            kk = k + rk
            seen_l, seen_r = (left[:, None] < L) & (kk[None, :] < K), (right[None, :] < R) & (kk[:, None] < K)
            if SWAP:
                to_l, to_r = kk[None, :] * N + left[:, None], right[None, :] * K + kk[:, None]
                hl, ll = tl.load(bh + to_l, mask=seen_l, other=0.0), tl.load(bl + to_l, mask=seen_l, other=0.0)
                hr, lr = tl.load(ah + to_r, mask=seen_r, other=0.0), tl.load(al + to_r, mask=seen_r, other=0.0)
                small = tl.dot(hl, lr, nothing, input_precision="tf32")
                small = tl.dot(ll, hr, small, input_precision="tf32")
            else:
                to_l, to_r = left[:, None] * K + kk[None, :], kk[:, None] * N + right[None, :]
                hl, ll = tl.load(ah + to_l, mask=seen_l, other=0.0), tl.load(al + to_l, mask=seen_l, other=0.0)
                hr, lr = tl.load(bh + to_r, mask=seen_r, other=0.0), tl.load(bl + to_r, mask=seen_r, other=0.0)
                small = tl.dot(ll, hr, nothing, input_precision="tf32")
                small = tl.dot(hl, lr, small, input_precision="tf32")
            large = tl.dot(hl, hr, nothing, input_precision="tf32")
            acc += large + tl.where(tl.abs(small) < float("inf"), small, 0.0)
        tl.store(y + at, acc, mask=inside)

    return product


def run(product: Any, case: Case, tile: tuple[Any, ...], instructions: collections.Counter[str]) -> Array:
    """Result bits of one case on one tile."""
    import torch

    def put(x: Array) -> Any:
        return torch.from_numpy(np.ascontiguousarray(x).view(np.int32).copy()).cuda().view(torch.float32)

    (m, k), n = case.a.shape, case.b.shape[1]
    bm, bn, warps, swap = tile
    operands = [put(x) for x in (*split_bits(case.a), *split_bits(case.b))]
    c = put(case.c) if case.c is not None else operands[0]
    y = torch.full((m, n), float("nan"), device="cuda", dtype=torch.float32)
    handle = product[(-(-m // bm), -(-n // bn))](*operands, c, y, m, n, k, 0.0, BM=bm, BN=bn, SWAP=swap,
                                                START=case.c is not None, num_warps=warps)  # fmt: skip
    for name in re.findall(r"(?:wgmma\.mma_async|mma\.sync)[.\w]*", handle.asm["ptx"]):
        instructions[name] += 1
    return y.view(torch.int32).cpu().numpy().view(np.uint32)


def record(folder: Path, seed: int) -> int:
    """Draw, multiply, compare the tiles, write both files."""
    product, found = kernel(), Vectors()
    for case in tf32x3_cases(seed):
        store(found.arrays, case)
        for tile, shape in TILES.items():
            found.add(case.name, tile, run(product, case, shape, found.instructions[tile]))
    return found.save(folder, "tf32x3", seed)


def check(seed: int, rounds: int) -> int:
    """Compare the GPU with the executable definition on larger cases, drawn anew; the count of outputs that differ."""
    from isogemm.contract.reference import evaluate

    product, unused = kernel(), collections.Counter[str]()
    outputs, wrong = 0, collections.Counter[str]()
    for case in (case for r in range(rounds) for case in tf32x3_cases(seed + 1 + r, grow=4)):
        c = None if case.c is None else case.c.view(np.float32)
        expected = evaluate(case.a.view(np.float32), case.b.view(np.float32), "tf32x3:sm90", c).view(np.uint32)
        for tile, shape in TILES.items():
            bits = run(product, case, shape, unused)
            bits[(bits & 0x7FFFFFFF) > 0x7F800000] = 0x7FFFFFFF
            outputs += bits.size
            if (bits != expected).any():
                wrong[f"{case.name} {tile}"] += int((bits != expected).sum())
    print(f"{outputs} outputs; differ: {sum(wrong.values())} {dict(wrong)}")
    return sum(wrong.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("tests/golden"))
    parser.add_argument("--seed", type=int, default=20261122)
    parser.add_argument("--check", type=int, metavar="ROUNDS")
    chosen = parser.parse_args()
    if chosen.check:
        return 1 if check(chosen.seed, chosen.check) else 0
    return record(chosen.out, chosen.seed)


if __name__ == "__main__":
    sys.exit(main())
