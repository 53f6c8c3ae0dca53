"""Quantized weights written out once, as floats of x's type in a workspace, for the kernels of plain products.

``same`` is that product by its definition. What the first kernel writes the second finds in the second-level cache,
where W is not too large for it; so this is the fastest way for rows of x that outnumber what dequantizing costs.
"""

from __future__ import annotations

from typing import NamedTuple

from ....base.dtypes import ITEMSIZE
from ....contract.spec import Contract, Order
from ....planner.bench import Bench
from ....problem.product import Addresses, Product, Strides
from ..driver.workspace import workspace
from ..gemm import choose as products
from ..gemm.execute import choose
from ..gemm.model import gpu_of
from . import dequantize
from .case import QuantCase
from .kernel import Launch, RoundedKernel
from .layout import layout

PIECE = 2**27  # weights written out at a time
# Fitted to timings of 154 drawn products of up to 512 rows on an H200: us of the launch that writes; bytes that it
# writes in a us, for each GB/s of the bus, up to what the second-level cache takes, and behind that.
START, WRITTEN, CACHED, BEHIND = 1.3, 691.0, 30e6, 508.0


class OnceConfig(NamedTuple):
    """How W is written out: so many rows at a time, for a product of this arithmetic."""

    rows: int
    arithmetic: str


class QuantOnce(RoundedKernel):
    """x of bfloat16 or float16, rows of whole 16 bytes.

    Its verdict is about the kernel that dequantizes; the product's kernels have theirs.
    """

    name = "quant once"

    def configure(self, case: QuantCase, multiprocessors: int) -> OnceConfig:
        return OnceConfig(min(case.n, max(1024, PIECE // case.k // 1024 * 1024)), case.arithmetic)

    def code(self, case: QuantCase, config: OnceConfig) -> str:
        return f"{case.format} > {case.dtype}"

    def trial(self, bench: Bench, case: QuantCase, config: OnceConfig) -> str:
        return dequantize.KERNEL.trial(bench, self.code(case, config), "")

    def microseconds(self, case: QuantCase, config: OnceConfig, device: int) -> float | None:
        product = products.expected_us(_product(case, config.arithmetic, config.rows, device), device)
        if product is None:
            return None
        written, pieces = 2 * case.n * case.k, -(-case.n // config.rows)
        writing = (min(written, CACHED) / WRITTEN + max(0.0, written - CACHED) / BEHIND) / gpu_of(device).memory
        return pieces * (START + product) + writing

    def build(self, case: QuantCase, config: OnceConfig, device: int) -> Launch:
        """For each piece of W both kernels, over the same memory."""
        (rows, arithmetic), lay, item = config, layout(case.format), ITEMSIZE[case.dtype_out]
        parts = []
        for first in range(0, case.n, rows):
            count = min(rows, case.n - first)
            of_bias = 0 if case.dtype_bias is None else first * case.bias_stride * ITEMSIZE[case.dtype_bias]
            multiply = choose(_product(case, arithmetic, count, device), device)
            parts.append((dequantize.bind(lay, case.dtype, count, case.k, case.k, device), multiply, first, of_bias))

        def launch(stream: int, x: int, data: int, out: int, bias: int) -> None:
            memory = workspace(2 * rows * case.k, device)
            w = memory.data_ptr()
            for write, multiply, first, of_bias in parts:
                write(stream, data, w, first)
                multiply(Addresses(x, w, out + first * item, 0, bias + of_bias), stream)

        return launch


KERNEL = QuantOnce()


def _product(case: QuantCase, arithmetic: str, count: int, device: int) -> Product:
    """x times `count` rows of weights in its own type, which lie one after the other."""
    contract = Contract(arithmetic, Order()) if arithmetic else products.default_contract_of(device, case.dtype)
    return Product(
        case.m, count, case.k, case.dtype, case.dtype, case.dtype_out, contract, a=Strides(*case.x),
        b=Strides(1, case.k), out=Strides(*case.out), dtype_bias=case.dtype_bias, bias_stride=case.bias_stride,
        align=min(case.x_align, case.out_align),
    )  # fmt: skip
