"""A kernel for quantized weights, as one would be added: this file, and a row of `isogemm.backends.cuda.quant.family`.

It dequantizes on the host and multiplies by the definition. A real one compiles a `.cu` that lies beside it.
"""

from __future__ import annotations

import numpy as np
import torch

from isogemm.backends.cuda.quant.kernel import QuantKernel
from isogemm.base.dtypes import NUMPY
from isogemm.contract import reference
from isogemm.formats.blocks import FORMATS
from isogemm.formats.reference import dequantize


class ToyKernel(QuantKernel):
    """float32 weights, one chain of fused steps; `wrong` adds one to the last result."""

    name, path = "toy", "fp32"
    wrong = False

    def configure(self, case, multiprocessors):
        return "plain"

    def tile(self, config):
        return 8

    def build(self, case, config, device):
        return None  # nothing is bound: it runs with tensors

    def run_tensors(self, x, packed, out, bias):
        words = out.view(torch.int16 if out.element_size() == 2 else torch.int32).numpy()
        given = x.float().numpy()
        w = dequantize(packed.rows, FORMATS[packed.format])
        acc = reference.evaluate(given, np.ascontiguousarray(w.T), "fma/chain")
        added = None if bias is None else bias.float().numpy()
        words.view(NUMPY[str(out.dtype).removeprefix("torch.")])[...] = reference.epilogue(
            acc, bias=added, out_dtype=NUMPY[str(out.dtype).removeprefix("torch.")]
        )
        if self.wrong:
            words[-1, -1] += 1


KERNEL = ToyKernel()
