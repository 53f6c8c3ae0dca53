"""Atomic words and a pause: what a thread pool in compiled code needs."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from .target import target
from .vectors import I64, declare


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
def pause(typingctx):
    """Tell the core that this thread waits."""

    def codegen(context, builder, signature, args):
        if target().x86:
            builder.call(declare(builder.module, "llvm.x86.sse2.pause", ir.VoidType(), []), [])

    return types.void(), codegen
