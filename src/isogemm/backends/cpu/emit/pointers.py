"""Addresses as pointers, which arrays are made of."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic


def _pointer_to(element: Any) -> Any:
    """An address as a pointer to numbers of a type."""

    @intrinsic
    def pointer(typingctx, address):
        def codegen(context, builder, signature, args):
            return builder.inttoptr(args[0], ir.PointerType(context.get_value_type(element)))

        return types.CPointer(element)(types.int64), codegen

    return pointer


pointer_to_words, pointer_to_ints = _pointer_to(types.int64), _pointer_to(types.int32)
pointer_to_shorts, pointer_to_bytes = _pointer_to(types.uint16), _pointer_to(types.uint8)
pointer_to_codes, pointer_to_floats = _pointer_to(types.int8), _pointer_to(types.float32)
