"""The kernel that adds sums of leaves in the order of a contract, and finishes: gemm/meet.cu."""

from __future__ import annotations

from ....problem.product import Product
from ..driver import facts
from ..driver.kernel import Bound, ints
from ..driver.nvrtc import function_of
from .fp32 import epilogue, types_of

VALUES, THREADS, BLOCKS = 4, 256, 8  # of a thread at once; of a block; blocks to a multiprocessor


def pitched(n: int) -> int:
    """Columns of a row of sums: whole words of 16 bytes."""
    return -(-n // VALUES) * VALUES


def meet_of(p: Product, leaves: int, device: int) -> Bound:
    """``launch(stream, sums, out, c, bias)``; `sums` is [batch, leaves, m, pitched(n)] in float32."""
    order = p.contract.order
    words = p.batch * p.m * pitched(p.n) // VALUES
    counts = ints(p.m, p.n, p.batch, pitched(p.n), leaves)
    defines = {"LEAVES": order.size if order.kind == "tree" else 0, "TYPES": types_of(p)}
    return function_of("gemm/meet.cu", "meet", device, defines).bind(
        ["ptr", "ptr", "ptr", "ptr", *epilogue(p), *counts, ("f32", p.alpha), ("f32", p.beta)],
        grid=(min(-(-words // THREADS), BLOCKS * facts.device(device).multiprocessors),),
        block=(THREADS,),
        pdl=True,
    )
