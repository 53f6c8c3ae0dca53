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

X86 = platform.machine().lower() in ("x86_64", "amd64")  # elsewhere the control word is left alone
_DEFAULTS = 0x1F80
_MODES = 0xFFC0  # the control word without what it remembers of past operations
_WORD = ir.IntType(32)


def _control(builder: Any, instruction: str, slot: Any) -> None:
    """Store the control word into a slot of the stack (``stmxcsr``), or take it from there (``ldmxcsr``)."""
    pointer = ir.PointerType(ir.IntType(8))
    kind = ir.FunctionType(ir.VoidType(), [pointer])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.sse.{instruction}")
    builder.call(function, [builder.bitcast(slot, pointer)])


@intrinsic
def enter_default_rounding(typingctx):
    """Save this thread's floating-point control word and set IEEE defaults: to nearest, subnormals kept.

    A library that flushed subnormals in the calling thread would otherwise change bits.
    """

    def codegen(context, builder, signature, args):
        if not X86:
            return ir.Constant(ir.IntType(64), 0)
        slot = builder.alloca(_WORD)
        _control(builder, "stmxcsr", slot)
        saved = builder.load(slot, typ=_WORD)
        builder.store(ir.Constant(_WORD, _DEFAULTS), slot)
        _control(builder, "ldmxcsr", slot)
        return builder.zext(saved, ir.IntType(64))

    return types.int64(), codegen


@intrinsic
def leave_default_rounding(typingctx, saved):
    """Restore the control word."""

    def codegen(context, builder, signature, args):
        if not X86:
            return
        slot = builder.alloca(_WORD)
        builder.store(builder.trunc(args[0], _WORD), slot)
        _control(builder, "ldmxcsr", slot)

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
    return saved != 0 and (saved ^ _DEFAULTS) & _MODES != 0


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
