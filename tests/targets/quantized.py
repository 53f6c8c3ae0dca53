"""Quantized products, weights and conversions against their definitions, on the CPU that the environment names.

Run as a script it prints the instructions that it ran; NUMBA_CPU_NAME and NUMBA_CPU_FEATURES choose them.
"""

from __future__ import annotations

import numpy as np
from tests.formats.test_blocks import same
from tests.products import BF16, F16, product
from tests.quant.draws import values
from tests.quant.test_linear import defined, weight

import isogemm
from isogemm.backends.cpu.quant.dot import instructions
from isogemm.formats import reference
from isogemm.formats.blocks import FORMATS

FLOATS = "Q4_K"  # float activations have no code of their own for a CPU
# One format of each way to multiply: what a format unpacks is the same on every CPU. Codes of eight bits, of fewer
# with and without offsets, and scales with signs; without vectors of its own a CPU has one way for short blocks and
# one for long ones, which adds offsets in pairs.
SHAPES = {"generic": ("Q8_0", "Q4_K")}.get(instructions(), ("Q8_0", "Q5_1", "Q4_K", "Q6_K"))


def main() -> None:
    for fmt in map(FORMATS.__getitem__, SHAPES):
        w = weight(fmt, 33, 2)
        for m in (1, 2, 5, 9):
            x = values("heavy", m, w.shape[1], seed=m)
            want = defined(x, w)
            same(isogemm.linear(x, w), want)
            same(isogemm.linear(x, w.in_place()), want)
            same(isogemm.linear(x, w[2:30]), np.ascontiguousarray(want[:, 2:30]))
            for float_x in (x, x.astype(BF16), np.clip(x, -9, 9).astype(F16)) if str(fmt) == FLOATS else ():
                wanted = product(float_x, w.dequantize(float_x.dtype).T)
                same(isogemm.linear(float_x, w, activations="fp32" if float_x is x else None), wanted)
        same(w.dequantize(), reference.dequantize(w.rows, fmt))
        same(isogemm.quantize(x, fmt).dequantize(), reference.dequantize(isogemm.quantize(x, fmt).rows, fmt))


if __name__ == "__main__":
    main()
    print(instructions())
