"""Atomic words, locks and a pause: what a thread pool in compiled code needs."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from .target import target
from .vectors import I8, I32, I64, declare

POINTER = ir.PointerType(I8)


def _word(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, ir.PointerType(I64))


@intrinsic
def atomic_load(typingctx, address):
    """Acquire."""

    def codegen(context, builder, signature, args):
        return builder.load_atomic(_word(builder, args[0]), "acquire", 8, typ=I64)

    return types.int64(types.int64), codegen


@intrinsic
def atomic_store(typingctx, address, value):
    """Release."""

    def codegen(context, builder, signature, args):
        builder.store_atomic(args[1], _word(builder, args[0]), "seq_cst", 8)

    return types.void(types.int64, types.int64), codegen


@intrinsic
def atomic_add(typingctx, address, value):
    """The value before."""

    def codegen(context, builder, signature, args):
        return builder.atomic_rmw("add", _word(builder, args[0]), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def atomic_swap(typingctx, address, value):
    """Store, and the value before; orders everything before against everything after."""

    def codegen(context, builder, signature, args):
        return builder.atomic_rmw("xchg", _word(builder, args[0]), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def atomic_exchange_if(typingctx, address, expected, value):
    """Store if the word is as expected; whether it was."""

    def codegen(context, builder, signature, args):
        pair = builder.cmpxchg(_word(builder, args[0]), args[1], args[2], "seq_cst")
        return builder.extract_value(pair, 1)

    return types.boolean(types.int64, types.int64, types.int64), codegen


@intrinsic
def lock_made(typingctx):
    """Address of a new lock of the interpreter's own kind, which every platform has and no GIL guards; 0 if none."""

    def codegen(context, builder, signature, args):
        return builder.ptrtoint(builder.call(declare(builder.module, "PyThread_allocate_lock", POINTER, []), []), I64)

    return types.int64(), codegen


@intrinsic
def lock_taken(typingctx, lock):
    """Take the lock; sleep until somebody releases it."""

    def codegen(context, builder, signature, args):
        take = declare(builder.module, "PyThread_acquire_lock", I32, [POINTER, I32])
        builder.call(take, [builder.inttoptr(args[0], POINTER), ir.Constant(I32, 1)])

    return types.void(types.int64), codegen


@intrinsic
def lock_released(typingctx, lock):
    """Wake whoever sleeps on the lock."""

    def codegen(context, builder, signature, args):
        release = declare(builder.module, "PyThread_release_lock", ir.VoidType(), [POINTER])
        builder.call(release, [builder.inttoptr(args[0], POINTER)])

    return types.void(types.int64), codegen


@intrinsic
def pause(typingctx):
    """Tell the core that this thread waits."""

    def codegen(context, builder, signature, args):
        if target().x86:
            builder.call(declare(builder.module, "llvm.x86.sse2.pause", ir.VoidType(), []), [])

    return types.void(), codegen
