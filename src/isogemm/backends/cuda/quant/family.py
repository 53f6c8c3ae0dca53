"""Which kernel multiplies with a quantized weight on a device: by rows of x and format, among those that were admitted.

A kernel is a row of `FAMILIES`. It is tried before it serves: `trial` compares its bits with the definition, and the
verdict is kept as those of other kernels are. What no kernel has (other orders and arithmetics, a kernel that was
refused) is the product with dequantized weights, which has its own admission; for integers there is no such way.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from ....planner.choose import Option, first
from ....planner.family import Families
from ..driver import facts, machine
from .case import QuantCase
from .kernel import QuantKernel
from .layout import Packed

# Of a path, and without models of their time, the fastest first.
FAMILIES: Families[QuantKernel] = Families(
    __package__,
    {
        "quant int": "integers.kernel:KERNEL",
        "quant floats": "floats:KERNEL",
        "quant few": "few:KERNEL",
        "quant apart": "apart:KERNEL",
        "quant many": "many:KERNEL",
        "quant once": "once:KERNEL",
    },
)


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


def options(case: QuantCase, device: int) -> list[Option[QuantCase, Any]]:
    """Kernels that compute a case: by their models the least time first, then, as their rows are, those without one."""
    found = []
    for kernel in FAMILIES.found.values():
        if kernel.supports(case, None):
            config = kernel.configure(case, facts.device(device).multiprocessors)
            found.append(Option(kernel, config, "a model of its time", kernel.microseconds(case, config, device)))
    return sorted(found, key=lambda option: math.inf if option.expected_us is None else option.expected_us)


def choose(case: QuantCase, packed: Packed, device: int) -> QuantRun | None:
    """The first admitted kernel; None where none was, or none computes this.

    Raises
    ------
    DeviceError
        While a graph is captured: kernels that could serve have not been tried.
    """
    choice = first(options(case, device), case, machine.admissions(device), what=str(case))
    if choice is None:
        return None
    return QuantRun(FAMILIES.found[choice.family], case, choice.config, packed, choice.launch)
