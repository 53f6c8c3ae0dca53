"""float32 activations times quantized weights on the device: ``fma/chain``, with the CPU's bits.

Few rows of x: weights are dequantized in registers, see quant/floats.cu. More: some rows of W at a time are
written out as float32, and the kernels of plain products multiply them.
"""

from __future__ import annotations

from typing import Any

from ....base.dtypes import CODE, ITEMSIZE, torch_name
from ....contract.spec import Contract, Order
from ....problem.product import Addresses, Product, Strides, alignment
from ..driver import facts
from ..driver.kernel import ints, longs
from ..driver.nvrtc import function_of
from ..gemm.execute import choose
from . import dequantize
from .case import QuantCase
from .kernel import Launch, QuantKernel
from .layout import ROWS, STEP, Packed, PackedLayout, layout, macros

FEW = 8
"""Rows of x up to which weights are dequantized in registers."""

WARPS = 2
RING = 32 * 1024  # bytes of a warp's ring, about
PIECE = 2**25  # dequantized elements at a time


class QuantFloats(QuantKernel):
    """x of any type and strides; bfloat16 and float16 are widened. Its bits: W dequantized in float32.

    Each result is a function of one row of x, one row of W and the bias.
    """

    name, path = "quant floats", "fp32"

    def configure(self, case: QuantCase, multiprocessors: int) -> str:
        """How it computes a case, in words: nothing is to choose."""
        few = min(case.m, FEW)
        return f"few {1 << (few - 1).bit_length()}" if case.m == few else "many"

    def tile(self, config: str) -> int:
        return STEP

    def build(self, case: QuantCase, config: Any, device: int) -> Launch | None:
        m, n, k, lay = case.m, case.n, case.k, layout(case.format)
        if m > FEW and k:
            return None
        (row, column), unit = case.x, 4 * ITEMSIZE[case.dtype]
        rows, stages = 1 << (min(m, FEW) - 1).bit_length(), _stages(lay)
        defines: dict[str, object] = {
            **macros(lay), "NX": rows, "TYPE": CODE[case.dtype],
            "VEC": column == 1 and case.x_align % unit == 0 and (row % 4 == 0 or m == 1), "WARPS": WARPS,
            "STAGES": stages, "TYPES": case.types,
        }  # fmt: skip
        made = function_of("quant/floats.cu", "quant_floats", device, defines)
        return made.bind(
            [*["ptr"] * 4, *longs(row, column), *case.steps, *ints(m, n, k)],
            grid=(-(-n // (2 * ROWS * WARPS)), -(-m // rows)), block=(32 * WARPS,),
            shared=WARPS * stages * _stage_bytes(lay), pdl=True,
        )  # fmt: skip

    def run_tensors(self, x: Any, packed: Packed, out: Any, bias: Any) -> None:
        """Some rows of W at a time, as float32."""
        import torch

        wide = x if x.dtype == torch.float32 else x.float()
        (m, k), device = x.shape, packed.data.get_device()
        rows = min(packed.n, max(ROWS, PIECE // k // 128 * 128))
        step = -(-k // 4) * 4
        room = torch.empty((rows, step), dtype=torch.float32, device=out.device)[:, :k]
        dtype_bias, bias_stride = (None, 1) if bias is None else (torch_name(bias.dtype), bias.stride(0))
        for first in range(0, packed.n, rows):
            count = min(rows, packed.n - first)
            dequantize.run(packed, room[:count], first)
            into = out[:, first : first + count]
            at = Addresses(
                wide.data_ptr(), room.data_ptr(), into.data_ptr(), 0, 0 if bias is None else bias[first:].data_ptr()
            )
            product = Product(
                m, count, k, "float32", "float32", torch_name(out.dtype), Contract("fma", Order()),
                a=Strides(*wide.stride()), b=Strides(1, step), out=Strides(*out.stride()),
                dtype_bias=dtype_bias, bias_stride=bias_stride, align=alignment(at.a, at.b, at.out),
            )  # fmt: skip
            choose(product, device)(at, facts.current_stream(device))


KERNEL = QuantFloats()


def _stage_bytes(lay: PackedLayout) -> int:
    return 2 * (256 // lay.record_k) * lay.record_bytes


def _stages(lay: PackedLayout) -> int:
    return max(2, min(6, RING // _stage_bytes(lay)))
