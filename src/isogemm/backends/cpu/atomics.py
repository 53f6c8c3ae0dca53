"""Atomic words, a pause and the floating-point control word: what a thread pool in compiled code needs."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from .target import target
from .vectors import I64, declare


def _word(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, ir.PointerType(I64))


@intrinsic  # type: ignore[untyped-decorator]
def atomic_load(typingctx, address):  # type: ignore[no-untyped-def]
    """Acquire."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.load_atomic(_word(builder, args[0]), "acquire", 8, typ=I64)

    return types.int64(types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def atomic_store(typingctx, address, value):  # type: ignore[no-untyped-def]
    """Release."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        builder.store_atomic(args[1], _word(builder, args[0]), "seq_cst", 8)

    return types.void(types.int64, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def atomic_add(typingctx, address, value):  # type: ignore[no-untyped-def]
    """The value before."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.atomic_rmw("add", _word(builder, args[0]), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def atomic_swap(typingctx, address, value):  # type: ignore[no-untyped-def]
    """Store, and the value before; orders everything before against everything after."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.atomic_rmw("xchg", _word(builder, args[0]), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def pause(typingctx):  # type: ignore[no-untyped-def]
    """Tell the core that this thread waits."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        if target().x86:
            builder.call(declare(builder.module, "llvm.x86.sse2.pause", ir.VoidType(), []), [])

    return types.void(), codegen


@intrinsic  # type: ignore[untyped-decorator]
def enter_default_rounding(typingctx):  # type: ignore[no-untyped-def]
    """Save this thread's floating-point control word and set IEEE defaults: to nearest, subnormals kept.

    A library that flushed subnormals in the calling thread would otherwise change bits.
    """

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        if not target().x86:
            return ir.Constant(I64, 0)
        slot = builder.alloca(ir.IntType(32))
        pointer = builder.bitcast(slot, ir.PointerType(ir.IntType(8)))
        kind = [ir.PointerType(ir.IntType(8))]
        builder.call(declare(builder.module, "llvm.x86.sse.stmxcsr", ir.VoidType(), kind), [pointer])
        saved = builder.load(slot, typ=ir.IntType(32))
        builder.store(ir.Constant(ir.IntType(32), 0x1F80), slot)
        builder.call(declare(builder.module, "llvm.x86.sse.ldmxcsr", ir.VoidType(), kind), [pointer])
        return builder.zext(saved, I64)

    return types.int64(), codegen


@intrinsic  # type: ignore[untyped-decorator]
def leave_default_rounding(typingctx, saved):  # type: ignore[no-untyped-def]
    """Restore the control word."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        if not target().x86:
            return
        slot = builder.alloca(ir.IntType(32))
        builder.store(builder.trunc(args[0], ir.IntType(32)), slot)
        pointer = builder.bitcast(slot, ir.PointerType(ir.IntType(8)))
        kind = [ir.PointerType(ir.IntType(8))]
        builder.call(declare(builder.module, "llvm.x86.sse.ldmxcsr", ir.VoidType(), kind), [pointer])

    return types.void(types.int64), codegen
