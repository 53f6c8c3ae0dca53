"""Compiled code as addresses, which C code and other kernels call; what was compiled lives as long as the process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from ....base.jit import compile_entry
from .vectors import I64

CHUNK = types.void(types.CPointer(types.int64), types.int64, types.int64)  # type: ignore[attr-defined]
"""``void (i64 *task, i64 chunk, i64 scratch)``: one chunk of a task array, a kernel for the pool's threads."""

_alive: list[Any] = []


@cache
def of_words(count: int) -> Any:
    """``void (i64, ...)`` of so many words: what entries call, for a row, a block, a panel or a tile."""
    return types.void(*[types.int64] * count)


@cache
def address_of(function: Callable[..., Any], signature: Any = CHUNK, *, emitted: bool = False) -> int:
    """The address of a function, compiled when it is first asked for; `emitted` as in `compile_entry`."""
    compiled = compile_entry(signature, function, emitted=emitted)
    _alive.append(compiled)
    return int(compiled.address)


@intrinsic  # type: ignore[untyped-decorator]
def call(typing: Any, address: Any, *words: Any) -> Any:
    """Call a ``void (i64, ...)`` at an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> None:
        at, given = args
        function = ir.FunctionType(ir.VoidType(), [I64] * len(words)).as_pointer()
        builder.call(builder.inttoptr(at, function), cgutils.unpack_tuple(builder, given))

    many = types.UniTuple(types.int64, len(words))  # type: ignore[attr-defined]
    return types.void(types.int64, many), codegen
