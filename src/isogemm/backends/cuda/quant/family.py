"""Which kernel multiplies with a quantized weight on a device: by rows of x and format, among those that were admitted.

A kernel is a row of `FAMILIES`. It is tried before it serves: `trial` compares its bits with the definition, and the
verdict is kept as those of other kernels are. What no kernel has (other orders and arithmetics, a kernel that was
refused) is the product with dequantized weights, which has its own admission; for integers there is no such way.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from ....planner.choose import Option, first
from ....planner.family import Families
from ..driver import facts, machine
from .case import QuantCase
from .kernel import QuantKernel
from .layout import Packed, layout

__all__ = ["FAMILIES", "QuantRun", "choose"]

# Of a path, the fastest first.
FAMILIES: Families[QuantKernel] = Families(
    __package__,
    {
        "quant int": "integers.kernel:KERNEL",
        "quant floats": "floats:KERNEL",
        "quant few": "few:KERNEL",
        "quant many": "many:KERNEL",
    },
)

# Rows of x from which dequantizing weights once (90 us for 28672 x 4096) costs less than doing it in registers again
# for every 256 rows. Measured on an H200: d q of blocks of 32, and formats with more to a weight.
ONCE_SIMPLE, ONCE_OTHER = 4096, 2048


class QuantRun(NamedTuple):
    """A kernel that serves a product, with its configuration and its weight."""

    kernel: QuantKernel
    case: QuantCase
    config: Any
    packed: Packed
    launch: Any
    """``launch(stream, x, w, out, bias)`` of addresses of contiguous matrices, aligned to 16 bytes; or None."""

    def __call__(self, x: Any, out: Any, bias: Any) -> None:
        """Tensors x [m, k] and out [m, n], on torch's current stream."""
        self.kernel.run(x, self.packed, out, bias, self.config)


def options(case: QuantCase, multiprocessors: int) -> Iterator[Option[QuantCase, Any]]:
    """Kernels that compute a case, the fastest first."""
    for kernel in FAMILIES.found.values():
        if kernel.supports(case, None):
            yield Option(kernel, kernel.configure(case, multiprocessors))


def choose(case: QuantCase, packed: Packed, device: int) -> QuantRun | None:
    """The first admitted kernel; None where none was, none computes this, or weights are better dequantized once.

    Raises
    ------
    DeviceError
        While a graph is captured: kernels that could serve have not been tried.
    """
    lay = layout(case.format)
    simple = lay.floats_each == 1 and not lay.ints_each
    if case.path == "same" and case.m >= (ONCE_SIMPLE if simple else ONCE_OTHER):
        return None
    several = options(case, facts.device(device).multiprocessors)
    choice = first(several, case, machine.admissions(device), what=str(case))
    if choice is None:
        return None
    return QuantRun(FAMILIES.found[choice.family], case, choice.config, packed, choice.launch)
