"""Golden vectors of ``fma/lanes32``, made on an NVIDIA GPU.

    python tools/golden_lanes.py --out tests/golden

Wants CuPy, and torch for the facts. Multiplies rows and columns of every kind of number by two kernels, a warp to an
output and eight threads of four lanes each, checks that they agree bit for bit, and writes ``lanes32.npz`` and
``lanes32.json``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
from golden_gpu import Vectors

from isogemm.base.dtypes import NUMPY
from isogemm.contract import golden
from isogemm.contract.spec import Order

Array = Any
K = (1, 31, 32, 33, 100, 333, 1025)
DTYPES = ("float32", "float16", "bfloat16")
# lane[l] = fma(a[i, k], b[k, j], lane[l]) for k = l, l + 32, ...; lanes meet by XOR, the largest mask first.
# The instructions are spelt out: CuPy has everything else compiled to drop subnormals.
SOURCE = r"""
__device__ float fma_of(float x, float y, float z) {
  asm("fma.rn.f32 %0, %1, %2, %0;" : "+f"(z) : "f"(x), "f"(y));
  return z;
}

__device__ float sum_of(float x, float y) {
  asm("add.rn.f32 %0, %0, %1;" : "+f"(x) : "f"(y));
  return x;
}

extern "C" __global__ void warp_each(const float* a, const float* b, float* out, int n, int k) {
  const int i = blockIdx.y, j = blockIdx.x;
  float lane = 0.f;
  for (int at = threadIdx.x; at < k; at += 32) lane = fma_of(a[i * k + at], b[at * n + j], lane);
  for (int mask = 16; mask > 0; mask >>= 1) lane = sum_of(lane, __shfl_xor_sync(0xffffffffu, lane, mask));
  if (threadIdx.x == 0) out[i * n + j] = lane;
}

extern "C" __global__ void eight_each(const float* a, const float* b, float* out, int n, int k) {
  const int i = blockIdx.y, j = blockIdx.x, first = 4 * threadIdx.x;
  float lanes[4] = {0.f, 0.f, 0.f, 0.f};
  for (int at = first; at < k; at += 32)
    for (int l = 0; l < 4; ++l)
      if (at + l < k) lanes[l] = fma_of(a[i * k + at + l], b[(at + l) * n + j], lanes[l]);
  for (int mask = 4; mask > 0; mask >>= 1)
    for (int l = 0; l < 4; ++l) lanes[l] = sum_of(lanes[l], __shfl_xor_sync(0xffu, lanes[l], mask));
  for (int mask = 2; mask > 0; mask >>= 1)
    for (int l = 0; l < mask; ++l) lanes[l] = sum_of(lanes[l], lanes[l + mask]);
  if (threadIdx.x == 0) out[i * n + j] = lanes[0];
}
"""
THREADS = {"warp_each": 32, "eight_each": 8}


def run(name: str, a: Array, b: Array) -> Array:
    """Result bits [m, n] of float32 operands by one kernel."""
    import cupy

    there = [cupy.asarray(np.ascontiguousarray(x, np.float32)) for x in (a, b)]
    (m, k), n = a.shape, b.shape[1]
    out = cupy.full((m, n), cupy.nan, cupy.float32)
    kernel = cupy.RawKernel(SOURCE, name)
    kernel((n, m), (THREADS[name],), (*there, out, np.int32(n), np.int32(k)))
    return out.get().view(np.uint32)


def record(folder: Path, seed: int) -> int:
    """Multiply, compare the kernels, write both files."""
    found = Vectors()
    for dtype in DTYPES:
        for k in K:
            name, case = f"{dtype}-{k}", golden.GoldenCase(Order(), k)
            a, b = golden.operands(case, dtype, dtype)
            found.arrays[f"{name}.a"], found.arrays[f"{name}.b"] = a, b
            for kernel in THREADS:
                found.instructions[kernel]["fma/lanes32"] += 1
                found.add(name, kernel, run(kernel, a.view(NUMPY[dtype]), b.view(NUMPY[dtype])))
    return found.save(folder, "lanes32", seed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("tests/golden"))
    chosen = parser.parse_args()
    return record(chosen.out, 0)


if __name__ == "__main__":
    sys.exit(main())
