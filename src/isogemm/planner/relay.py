"""Launches that may be replaced while they are held, and what that needs of a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from ..problem.product import Addresses, Launch, Product


class Relay:
    """A launch that may be replaced by one with the same bits while others hold it: they call `now`."""

    __slots__ = ("__weakref__", "now")

    def __init__(self, launch: Launch) -> None:
        self.now = launch

    def __call__(self, at: Addresses, stream: int) -> None:
        self.now(at, stream)


class Round(Protocol):
    """Timed runs of several kernels, enqueued: each behind its like, as many times as was asked for."""

    def done(self) -> bool:
        """Whether the device has come to its end; waits for nothing."""
        ...

    def valid(self) -> bool:
        """Whether all was enqueued before the first kernel began: else the times are the host's."""
        ...

    def microseconds(self) -> Sequence[float]:
        """Microseconds of one run of each kernel."""
        ...

    def whole(self) -> float:
        """Milliseconds of the device, all in all; without those in which it waited for the host."""
        ...


class LiveBench(Protocol):
    """What choosing at run time needs of a device besides `Machine`."""

    def compiled_alone(self) -> AbstractContextManager[None]:
        """Inside, binding what would have to be compiled raises `NotCompiledError`."""
        ...

    def aside(self) -> AbstractContextManager[None]:
        """For a thread of ours: a stream of its own, and no quarrel with captures of other threads."""
        ...

    def round(
        self, product: Product, launches: Sequence[Launch], at: Addresses, stream: int, in_a_row: int, patience: int
    ) -> Round | None:
        """Enqueue `in_a_row` runs of each, with operands from beyond the caches.

        Only the first is the call itself once more: results of others are nobody's. With more `patience` the host may
        take longer to enqueue it. None where there is no memory for it.
        """
        ...

    def differing(self, product: Product, ours: Launch, others: Sequence[Launch]) -> Sequence[int] | None:
        """Elements in which others differ from ours, on operands that show an order; None where memory lacks."""
        ...

    def operands(self, product: Product) -> tuple[Any, Addresses]:
        """Operands of a packed product, and what holds them."""
        ...

    def synchronize(self) -> None:
        """Wait for the device."""
        ...

    def busy(self) -> bool:
        """Whether other threads of ours are at work: they would be timed as well."""
        ...

    def idle(self, seconds: float) -> bool:
        """Wait until none is; False where that takes longer."""
        ...

    def submit(self, task: Callable[[], None], rank: int) -> None:
        """Do it in another thread."""
        ...
