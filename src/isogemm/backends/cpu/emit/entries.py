"""Compiled code as addresses, which C code and other kernels call; what was compiled lives as long as the process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from numba.core import types

from ....base.jit import compile_entry

CHUNK = types.void(types.CPointer(types.int64), types.int64, types.int64)  # type: ignore[attr-defined]
"""``void (i64 *task, i64 chunk, i64 scratch)``: one chunk of a task array, a kernel for the pool's threads."""

SEVEN_WORDS = types.void(*[types.int64] * 7)
"""What `call7` calls."""

_alive: list[Any] = []


@cache
def address_of(function: Callable[..., Any], signature: Any = CHUNK, *, emitted: bool = False) -> int:
    """The address of a function, compiled when it is first asked for; `emitted` as in `compile_entry`."""
    compiled = compile_entry(signature, function, emitted=emitted)
    _alive.append(compiled)
    return int(compiled.address)
