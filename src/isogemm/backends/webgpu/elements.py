"""What follows the walk over K, one rounding to a launch, as the contract's `epilogue` has it; and copies."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base.dtypes import FLOAT32, NUMPY, name_of
from ...contract import golden, reference
from ...contract.compare import first_mismatch
from ...contract.spec import Order
from ...errors import ContractError
from ...operands.device_array import holder_of
from ...problem.settings import Settings
from .adapter import Adapter
from .array import WebGpuArray, buffer_of, empty, uploaded
from .launch import bound, bytes_of, placed, shrinks
from .source import WRITE_HALF, element, part, rounding_store

Array = NDArray[Any]

# By integers, since a device's own may drop what is small; -0 + -0 is -0, so that a product keeps its sign.
SCALED, ADDED = "fused(p.scale, x, bitcast<f32>(0x80000000u))", "fused(1.0, x, y)"
_SCALE = -0.7  # of a trial
# By bytes of an element: the type of a word of out, the element's bits, and how they are written.
COPIES = {
    4: ("u32", "x_words[source_at]", "fn write(i: u32, bits: u32) { out_words[i] = bits; }"),
    2: (
        "atomic<u32>",
        "(x_words[source_at >> 1u] >> ((source_at & 1u) << 4u)) & 0xffffu",
        WRITE_HALF + "fn write(i: u32, bits: u32) { write_half(i, bits); }",
    ),
}


def follow(adapter: Adapter, acc: Array, out: Array, asked: Settings, c: Array | None, bias: Array | None) -> None:
    """out = alpha * acc + beta * c + bias, rounded after each operation; `acc` float32 [m, n], apart from `out`."""
    ready: list[tuple[str, float, Array]] = []
    if asked.alpha != 1:
        ready.append((SCALED, asked.alpha, acc))
    if asked.beta != 0 and c is not None:
        ready.append((ADDED, 1.0, _scaled(adapter, _apart(adapter, c, out), asked.beta)))
    if bias is not None:
        ready.append((ADDED, 1.0, _apart(adapter, np.broadcast_to(bias, out.shape, subok=True), out)))
    value = acc
    for i, (operation, scale, other) in enumerate(ready or [("x", 1.0, acc)]):
        last = i + 1 >= len(ready)
        result = out if last else empty(out.shape, FLOAT32, holder_of(out).place)
        _step(adapter, operation, value, other, result, scale)
        value = result


def _scaled(adapter: Adapter, c: Array, beta: float) -> Array:
    if beta == 1:
        return c
    made = empty(c.shape, FLOAT32, holder_of(c).place)
    _step(adapter, SCALED, c, c, made, beta)
    return made


def _apart(adapter: Adapter, x: Array, out: Array) -> Array:
    """`x` in a buffer that `out` is not in: a kernel cannot read and write one buffer."""
    if buffer_of(x) is not buffer_of(out):
        return x
    made = empty(x.shape, x.dtype, holder_of(x).place)
    copy(adapter, made, x)
    return made


def _step(adapter: Adapter, operation: str, x: Array, y: Array, out: Array, scale: float) -> None:
    code = _admitted(adapter, name_of(x.dtype), name_of(y.dtype), name_of(out.dtype), operation)
    _over(adapter, code, (x, y, out), [float(scale), 0])


@cache
def _admitted(adapter: Adapter, x: str, y: str, out: str, operation: str) -> str:
    """The code of a step, after every bit of it on golden operands, each with each, and on ties was right.

    Raises ContractError: its bits are others on this adapter.
    """
    word = "u32" if out == "float32" else "atomic<u32>"
    body = part("elements").replace("OUT_WORD", word).replace("OPERATION", operation)
    code = "\n".join([part("integers"), element("a", x), element("b", y), rounding_store(out), body])
    left, right = golden.operands(golden.GoldenCase(Order(), 64), x, y)
    kept = [0xFFFFFFFF, 0xFFFFF000, 0xFFFF8000] if x == "float32" else [0xFFFF]  # bits: at ties of float16, of bfloat16
    a = np.concatenate([np.repeat(left & left.dtype.type(bits), right.shape[1], axis=0) for bits in kept])
    b = np.tile(right.T, (len(kept) * len(left), 1))
    a, b, made = a.view(NUMPY[x]), b.view(NUMPY[y]), empty(a.shape, NUMPY[out], adapter.place)
    _over(adapter, code, (uploaded(a, adapter.place), uploaded(b, adapter.place), made), [_SCALE, 0])
    alpha, beta = _SCALE if operation == SCALED else 1.0, float(operation == ADDED)
    want = reference.epilogue(a.astype(np.float32), alpha=alpha, beta=beta, c=b, out_dtype=NUMPY[out])
    mismatch = first_mismatch(WebGpuArray(made).numpy(), want)
    if mismatch is not None:
        raise ContractError(
            f"what follows a product on {adapter.name}", limit="the bits of its contract", value=str(mismatch),
            nearest="the CPU, which has them",
        )  # fmt: skip
    return code


def copy(adapter: Adapter, out: Array, x: Array) -> None:
    """out[...] = x, bits as they are; shapes and types are equal."""
    if not out.size:
        return
    x = _apart(adapter, x, out)
    word, load, store = COPIES[out.itemsize]
    body = part("copy").replace("OUT_WORD", word).replace("WORD", load)
    code = f"{store}\n{body}"
    if out.ndim < 2:
        _over(adapter, code, (np.atleast_2d(x), np.atleast_2d(out)), [])
        return
    for i in np.ndindex(out.shape[:-2]):
        _over(adapter, code, (x[i], out[i]), [])


def _over(adapter: Adapter, code: str, views: tuple[Array, ...], rest: list[int | float]) -> None:
    """A kernel of one element to a thread, over matrices of one shape, as many launches as they need."""
    m, n = views[-1].shape
    large = [x for x in views if bytes_of(x) > adapter.limits.binding]
    if large or m > adapter.limits.groups or n > 64 * adapter.limits.groups:
        rows = shrinks(large[0], large[0][: m // 2]) if large else m > adapter.limits.groups
        half = (m if rows else n) // 2
        for part_of in (slice(0, half), slice(half, None)):
            _over(adapter, code, tuple(x[part_of] if rows else x[:, part_of] for x in views), rest)
        return
    places = [bound(x) for x in views]
    numbers: list[int | float] = [m, n]
    for x, (_, first, _) in zip(views, places, strict=True):
        numbers += placed(x, first)
    adapter.launch(code, [*numbers, *rest], dict(enumerate(places, 1)), (-(-n // 64), m))
