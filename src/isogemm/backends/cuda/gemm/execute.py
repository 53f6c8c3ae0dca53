"""Runs validated products on a CUDA device: device arrays in, launches on torch's current stream out.

The planner chooses a kernel for a `Product`; this module says what the product is and where its operands lie. Nothing
waits for the device, and all of it may be captured into a graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from numpy.typing import NDArray

from ....base.seen import Seen
from ....operands.cuda import current_stream, tensor
from ....operands.device_array import DeviceId
from ....operands.tensors import rounded
from ....planner.device import Item
from ....planner.relay import Relay
from ....problem.product import Addresses, Product, Strides, alignment
from ....problem.settings import Settings

Array = NDArray[Any]


class Executor:
    """The CUDA backend on one device; the same calls as the CPU's.

    Attributes
    ----------
    place : DeviceId
    trace : list of (Relay, Product, Addresses), (runner, items, None) or (None, None, None)
        What this call launched: one product, a list of them, or the sums over an empty K.
    """

    __slots__ = ("place", "trace")

    def __init__(self, place: DeviceId) -> None:
        self.place = place
        self.trace: list[tuple[Any, Any, Addresses | None]] = []

    def gemm(
        self, a: Array, b: Array, out: Array, asked: Settings, *, c: Array | None = None, bias: Array | None = None
    ) -> None:
        """out = alpha * (a @ b) + beta * c + bias on views [m, k], [k, n] and [m, n], or on [batch, ...] of each."""
        if not out.size:
            return
        if not a.shape[-1]:
            self.trace.append((None, None, None))
            without_walk(tensor(out), _optional(c), _optional(bias), asked)
            return
        product, at = pose(a, b, out, asked, c, bias)
        self._enqueue(product, at)

    gemm_batched = gemm

    def gemm_items(self, items: Sequence[Item], asked: Settings, *, bias: Array | None = None) -> None:
        """`gemm` on each (a, b, out, c); sizes may differ."""
        walked = [item for item in items if item[0].shape[1] and item[2].size]
        if len(walked) == 1:
            a, b, out, c = walked[0]
            self.gemm(a, b, out, asked, c=c, bias=bias)
        elif walked:
            posed = [pose(a, b, out, asked, c, bias) for a, b, out, c in walked]
            run = runner(posed)
            self.trace.append((run, posed, None))
            run(posed, self.place.ordinal, current_stream(self.place))
        for a, b, out, c in items:  # last: what comes before may still refuse
            if not a.shape[1]:
                self.gemm(a, b, out, asked, c=c, bias=bias)

    def _enqueue(self, product: Product, at: Addresses) -> None:
        launch = choose(product, self.place.ordinal)
        self.trace.append((launch, product, at))
        launch.now(at, current_stream(self.place))


def choose(product: Product, device: int) -> Relay:
    """The planner's launch; the same for the same product, until the planner reads its tables anew."""
    from .choose import chooser

    planner = chooser(device)
    key = product, math.copysign(1.0, product.alpha), planner  # an alpha of 0.0 equals -0.0, whose zeros differ
    launch = _launches.get(key)
    if launch is None:
        launch = _launches.keep(key, planner.serve(product))
    return launch


_launches: Seen[Relay] = Seen(8192)


def runner(items: Sequence[tuple[Product, Addresses]]) -> Callable[..., None]:
    """What runs a list of products: one launch where they are of one kind, else one for each."""
    from .lists import family as grouped

    return grouped.run_items if grouped.uniform([product for product, _ in items]) else run_loop


def run_loop(items: Sequence[tuple[Product, Addresses]], device: int, stream: int) -> None:
    """One launch for each item: what a grouped launch has to agree with, bit for bit."""
    launches = [choose(product, device) for product, _ in items]  # any refusal comes before the first launch
    for launch, (_, at) in zip(launches, items, strict=True):
        launch.now(at, stream)


def pose(
    a: Array, b: Array, out: Array, asked: Settings, c: Array | None, bias: Array | None
) -> tuple[Product, Addresses]:
    """What kernels see of a product of views with at least one element each, and where they find it."""
    at = Addresses(*[0 if x is None else x.ctypes.data for x in (a, b, out, c, bias)])
    product = Product(
        m=out.shape[-2],
        n=out.shape[-1],
        k=a.shape[-1],
        dtype_a=_name(a),
        dtype_b=_name(b),
        dtype_out=_name(out),
        contract=asked.contract,
        a=strides_of(a),
        b=strides_of(b),
        out=strides_of(out),
        batch=out.shape[0] if out.ndim == 3 else 1,
        c=None if c is None else strides_of(c),
        dtype_c=None if c is None else _name(c),
        dtype_bias=None if bias is None else _name(bias),
        bias_stride=1 if bias is None or bias.shape[0] == 1 else bias.strides[0] // bias.itemsize,
        alpha=asked.alpha,
        beta=asked.beta,
        accumulate=asked.accumulate,
        align=alignment(*at),
    )
    return product, at


def strides_of(x: Array) -> Strides:
    """Strides in elements. A step that is never taken gets the one of a contiguous matrix, so that equal work is equal.

    >>> import numpy as np
    >>> strides_of(np.empty((7, 5), np.float32)[:1])
    Strides(row=5, col=1, batch=0)
    """
    item = x.itemsize
    rows, columns = x.shape[-2:]
    row, col = x.strides[-2] // item, x.strides[-1] // item
    if columns == 1:
        col = 1
    if rows == 1:
        row = columns if col == 1 else 1
    return Strides(row, col, x.strides[0] // item if x.ndim == 3 and x.shape[0] > 1 else 0)


_ITEM_NAMES = {"f4": "float32", "f2": "float16"}


def _name(x: Array) -> str:
    return _ITEM_NAMES.get(x.dtype.str[1:], "bfloat16")


def _optional(x: Array | None) -> Any:
    return None if x is None else tensor(x)


def without_walk(out: Any, c: Any, bias: Any, asked: Settings) -> None:
    """The product over an empty K, by torch: the sum is +0, or C with `accumulate`, and the epilogue is as always.

    Every operation is a torch call of its own, so none can be fused with the next.
    """
    import torch

    v = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    if asked.accumulate:
        v = c.to(torch.float32, copy=True)
    if asked.alpha != 1:
        v = v * asked.alpha
    if asked.beta != 0:
        v = v + (c.float() if asked.beta == 1 else c.float() * asked.beta)
    if bias is not None:
        v = v + bias.float()
    out.copy_(rounded(v, out.dtype))
