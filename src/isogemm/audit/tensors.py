"""Providers whose products are of torch tensors on a device: what drifts on a GPU, audited there.

The audit's arrays are NumPy's. Here each becomes a tensor on the device with the same strides and the same distance
from an aligned address, so that layouts mean there what they mean on the host; results come back as arrays.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..base.dtypes import BFLOAT16
from ..lab.profiler import KernelLaunch, launches, short_name
from ..operands.tensors import as_tensor, on_host
from .data import Array
from .providers import LibraryCalls, TorchProvider

_ALIGNED = 64  # bytes; an audit's arrays begin at multiples of it, or some elements after one
_WARM_UP = 3  # calls before one is captured: libraries allocate workspaces in their first


class TensorProvider(TorchProvider):
    """A library's calls on tensors of one device, which torch names, for example ``cuda:0``."""

    def __init__(self, name: str, device: str, calls: LibraryCalls) -> None:
        super().__init__(name, calls)
        self._device = self._torch.device(device)
        self._kept: tuple[Any, Any] = (lambda: None, None)  # the last weight's array, weakly, and its tensor
        self._seen: list[str] | None = None
        if self._device.type == "cuda":
            self.streamed, self.captured, self.watched = self._on_a_stream, self._in_a_graph, self._watched

    def _called(self, call: Any, *operands: Any) -> Any:
        if self._seen is None:
            return super()._called(call, *operands)
        results: list[Any] = []
        called = super()._called
        found = launches(lambda: results.append(called(call, *operands)))
        rows = next(x for x in operands if x is not None).shape[-2]
        self._seen.append(f"M={rows}: {kernels_text(found)}")
        return results[0]

    def _on_a_stream(self, x: Array, w: Array) -> Array:
        """The product on a stream of its own."""
        cuda, tx, tw = self._torch.cuda, self._in(x), self._in(w)
        stream = cuda.Stream(self._device)
        stream.wait_stream(cuda.current_stream(self._device))
        with cuda.stream(stream):
            y = self._called(self._calls.linear, tx, tw)
        stream.synchronize()
        return self._out(y)

    def _in_a_graph(self, x: Array, w: Array) -> Array:
        """The product captured over other values of x, and replayed over these."""
        cuda, tx, tw = self._torch.cuda, self._in(x), self._in(w)
        given = self._in(np.zeros_like(x))
        stream = cuda.Stream(self._device)
        stream.wait_stream(cuda.current_stream(self._device))
        with cuda.stream(stream):
            for _ in range(_WARM_UP):
                self._called(self._calls.linear, given, tw)
        cuda.current_stream(self._device).wait_stream(stream)
        graph = cuda.CUDAGraph()
        with self._torch.inference_mode(), cuda.graph(graph):
            y = self._calls.linear(given, tw)
        with self._torch.inference_mode():
            given.copy_(tx)
        graph.replay()
        cuda.synchronize(self._device)
        return self._out(y)

    @contextlib.contextmanager
    def _watched(self) -> Iterator[list[str]]:
        """Within, each product leaves the kernels that it ran, in words."""
        seen: list[str] = []
        self._seen = seen
        try:
            yield seen
        finally:
            self._seen = None

    def _weight(self, w: Array) -> Any:
        """The tensor of a weight: the last one's again, where it is the same array, which nobody writes to."""
        if self._kept[0]() is not w:
            self._kept = weakref.ref(w), self._in(w)
        return self._kept[1]

    def _in(self, a: Array) -> Any:
        """A tensor on the device with the values, the strides and the alignment of an array."""
        torch, item = self._torch, a.itemsize
        kind = torch.bfloat16 if a.dtype == BFLOAT16 else getattr(torch, a.dtype.name)
        steps = [step // item for step in a.strides]
        reach = 1 + sum((size - 1) * step for size, step in zip(a.shape, steps, strict=True)) if a.size else 0
        skip = a.ctypes.data % _ALIGNED // item
        room = torch.full((skip + reach + _ALIGNED,), float("nan"), dtype=kind, device=self._device)
        first = skip + -room.data_ptr() % _ALIGNED // item
        placed = room.as_strided(a.shape, steps, first)
        return placed.copy_(as_tensor(np.ascontiguousarray(a)))

    def _out(self, y: Any) -> Array:
        return on_host(y.detach())  # an error where it is no tensor


def split_k(found: Sequence[KernelLaunch]) -> int | None:
    """Into how many parts a library cut K, by the kernels of one matrix product: 1 for none, None where nobody tells.

    A split shows by a kernel that sums partial results, or by the product's own name. Its parts are the z of the
    product's grid, unless that is 1: a persistent kernel keeps its parts to itself.
    """
    names = [launch.name.lower().replace("_", "") for launch in found]
    if not any("splitk" in name for name in names):
        return 1
    products = [launch for launch, name in zip(found, names, strict=True) if "splitkreduce" not in name]
    parts = max((launch.grid[2] for launch in products if len(launch.grid) > 2), default=1)
    return parts if parts > 1 else None


def kernels_text(found: Sequence[KernelLaunch]) -> str:
    """The kernels of one product, with their grids and the splits of K."""
    if not found:
        return "the profiler tells no kernels"
    shown = ", ".join(f"{short_name(launch.name)} {'x'.join(map(str, launch.grid))}" for launch in found)
    parts = split_k(found)
    return shown + ("" if parts == 1 else f" (split-K, {parts or 'an untold number of'} parts)")
