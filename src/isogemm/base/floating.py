"""The floating-point environment that every contract assumes: round to nearest even, subnormals kept.

A library may have told the processor to flush subnormals in the calling thread (``torch.set_flush_denormal(True)``,
code built with -ffast-math). Products put the control word in order while they run and give it back as it was.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from .jit import njit

# Elsewhere the control word is left alone.
_MODES = 0xFFC0  # the control word without what it remembers of past operations
X86 = platform.machine().lower() in ("x86_64", "amd64")


def _declare(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, arguments), name)


@intrinsic
def enter_default_rounding(typingctx):
    """Save this thread's floating-point control word and set IEEE defaults: to nearest, subnormals kept.

    A library that flushed subnormals in the calling thread would otherwise change bits.
    """

    def codegen(context, builder, signature, args):
        if not X86:
            return ir.Constant(ir.IntType(64), 0)
        slot = builder.alloca(ir.IntType(32))
        pointer = builder.bitcast(slot, ir.PointerType(ir.IntType(8)))
        kind = [ir.PointerType(ir.IntType(8))]
        builder.call(_declare(builder, "llvm.x86.sse.stmxcsr", ir.VoidType(), kind), [pointer])
        saved = builder.load(slot, typ=ir.IntType(32))
        builder.store(ir.Constant(ir.IntType(32), 0x1F80), slot)
        builder.call(_declare(builder, "llvm.x86.sse.ldmxcsr", ir.VoidType(), kind), [pointer])
        return builder.zext(saved, ir.IntType(64))

    return types.int64(), codegen


@intrinsic
def leave_default_rounding(typingctx, saved):
    """Restore the control word."""

    def codegen(context, builder, signature, args):
        if not X86:
            return
        slot = builder.alloca(ir.IntType(32))
        builder.store(builder.trunc(args[0], ir.IntType(32)), slot)
        pointer = builder.bitcast(slot, ir.PointerType(ir.IntType(8)))
        kind = [ir.PointerType(ir.IntType(8))]
        builder.call(_declare(builder, "llvm.x86.sse.ldmxcsr", ir.VoidType(), kind), [pointer])

    return types.void(types.int64), codegen


@njit
def _enter():
    return enter_default_rounding()


@njit
def _leave(saved):
    leave_default_rounding(saved)


@njit
def _differs():
    saved = enter_default_rounding()
    leave_default_rounding(saved)
    return saved != 0 and (saved ^ 0x1F80) & _MODES != 0


def flushes() -> bool:
    """Whether the calling thread takes subnormals for zeros, or rounds otherwise than to nearest."""
    return bool(_differs())


@contextmanager
def ieee_defaults() -> Iterator[None]:
    """IEEE defaults in the calling thread, and in threads that it starts, inside the block."""
    saved = _enter()
    try:
        yield
    finally:
        _leave(saved)
