"""Launches of kernels for quantized weights on addresses, for calls whose operands were looked at before.

``launch(stream, x, w, out, bias)``: raw handles and addresses. Each binder is given tensors like those that will come:
contiguous ones whose rows begin at multiples of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import few as quant_few
from . import floats as quant_floats
from . import many as quant_many
from .integers import few as quant_int
from .layout import Packed
from .operands import tail_of

__all__ = ["Launch", "few", "floats", "integers", "many"]

Launch = Callable[[int, int, int, int, int], None]


def few(x: Any, packed: Packed, out: Any, bias: Any, config: Any) -> Launch | None:
    """Of `quant_few`."""
    kinds = _kind(x), _kind(out), -1 if bias is None else _kind(bias)
    rows, device = (x.stride(0), out.stride(0)), packed.data.get_device()
    return quant_few._bound(packed.layout, len(x), packed.n, packed.k, kinds, *rows, device, config)


def many(x: Any, packed: Packed, out: Any, bias: Any, config: Any) -> Launch | None:
    """Of `quant_many`."""
    m, n, k = len(x), packed.n, packed.k
    types = _name(x), _name(out), None if bias is None else _name(bias)
    wide = out.data_ptr() % 16 == 0 and n * out.itemsize % 16 == 0
    steps = k if m > 1 else -(-k // 8) * 8, n, 0 if bias is None else bias.stride(0)
    case = quant_many.Case(packed.format, *types, m, n, k, *steps, wide)
    return quant_many.bind(case, config, packed.data.get_device())


def integers(x: Any, packed: Packed, out: Any, bias: Any, config: Any) -> Launch | None:
    """Of `quant_int`, codes of x included."""
    plan = quant_int._plan(x, packed, out, bias, config)
    return None if plan is None else plan.enqueue


def floats(x: Any, packed: Packed, out: Any, bias: Any, config: Any) -> Launch | None:
    """Of `quant_floats`, where one launch does it all."""
    if len(x) > quant_floats.FEW:
        return None
    launch: Launch = quant_floats._bind(x, packed, tail_of(out, bias)).launch
    return launch


def _name(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _kind(tensor: Any) -> int:
    return quant_few.KINDS[_name(tensor)]
