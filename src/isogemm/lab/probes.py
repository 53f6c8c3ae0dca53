"""The two loops behind the ceilings, compiled on first use."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..base.jit import dispatcher

# Independent accumulators: at least latency (4-5 cycles) times pipes (2), and within 16 registers with two operands.
ACCUMULATORS = 12


@functools.cache
def add_kernel() -> Callable[[Any], int]:
    """Sum of an int64 array.

    Integers, because the order of their sum is free: the loop becomes vectors with several accumulators. It
    reads as fast as hand-made loops with prefetching or several streams did (within 3 %, Zen 4).
    """

    @dispatcher
    def add(x: Any) -> int:
        total = 0
        for i in range(x.size):
            total += x[i]
        return total

    kernel: Callable[[Any], int] = add
    return kernel


@functools.cache
def multiply_add_kernel() -> tuple[Callable[[int], float], int]:
    """``kernel(rounds)`` and the number of fp32 in its vectors.

    A round is `ACCUMULATORS` independent vector multiply-adds ``v = v / 2 + 1 / 4``, fused where the CPU can.
    """
    from llvmlite import binding

    features = binding.get_host_cpu_features()
    width = 16 if features.get("avx512f") else 8 if features.get("avx2") else 4
    # Where x86 has no fused instruction LLVM would call a library for each element.
    rounds_of = _rounds_intrinsic(width, features.get("fma", True))

    @dispatcher
    def peak(rounds: int) -> Any:
        return rounds_of(rounds)

    kernel: Callable[[int], float] = peak
    return kernel, width


def _rounds_intrinsic(width: int, fused: bool) -> Any:
    from llvmlite import ir
    from numba import types
    from numba.core import cgutils
    from numba.extending import intrinsic

    vector, word = ir.VectorType(ir.FloatType(), width), ir.IntType(64)

    def splat(value: float) -> Any:
        return ir.Constant(vector, [value] * width)

    def step(builder: Any, value: Any) -> Any:
        if not fused:
            return builder.fadd(builder.fmul(value, splat(0.5)), splat(0.25))
        kind = ir.FunctionType(vector, [vector] * 3)
        fma = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{width}f32")
        return builder.call(fma, [value, splat(0.5), splat(0.25)])

    @intrinsic  # type: ignore[untyped-decorator]
    def rounds_of(typing_context: Any, rounds: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            cells = [cgutils.alloca_once_value(builder, splat(float(i))) for i in range(ACCUMULATORS)]
            with cgutils.for_range_slice(builder, word(0), arguments[0], word(1)):
                for cell in cells:
                    builder.store(step(builder, builder.load(cell)), cell)
            total = functools.reduce(builder.fadd, [builder.load(cell) for cell in cells])
            return builder.extract_element(total, ir.Constant(ir.IntType(32), 0))

        return types.float32(types.intp), generate

    return rounds_of
