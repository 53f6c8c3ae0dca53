"""Which kernel multiplies with a quantized weight on a device: by rows of x and format, among those that were admitted.

A kernel is tried before it serves: `quant_trial` compares its bits with the definition, and the verdict is kept as
those of other kernels are. What no kernel has (other orders and arithmetics, a kernel that was refused) is the product
with dequantized weights, which has its own admission; for integers there is no such way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from ....errors import DeviceError
from ....planner.fingerprint import fingerprint
from ....planner.kernel_admission import Candidate
from .. import admitted
from . import bind as quant_bind
from . import few as quant_few
from . import floats as quant_floats
from . import many as quant_many
from .copy import Run
from .integers import few as quant_int
from .layout import STEP, Packed, layout

__all__ = ["Case", "Kernel", "candidates", "choose", "name_of", "sources"]


# Rows of x from which dequantizing weights once (90 us for 28672 x 4096) costs less than doing it in registers again
# for every 256 rows. Measured on an H200: d q of blocks of 32, and formats with more to a weight.
ONCE_SIMPLE, ONCE_OTHER = 4096, 2048


@dataclass(frozen=True, slots=True)
class Case:
    """A product with a quantized weight, but for its addresses.

    Attributes
    ----------
    path : str
        ``same``: x times weights rounded to its type; ``q8``: codes of x times codes; ``fp32``: x times weights in
        float32.
    format, dtype, dtype_out : str
    dtype_bias : str or None
    m, n, k : int
    """

    path: str
    format: str
    dtype: str
    dtype_out: str
    dtype_bias: str | None
    m: int
    n: int
    k: int

    @property
    def wide(self) -> bool:
        """Whether rows of a contiguous result begin at multiples of 16 bytes."""
        return self.n * (4 if self.dtype_out == "float32" else 2) % 16 == 0


def _unbound(*operands: Any) -> None:
    """A kernel without a shorter way."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel in the configuration that a case gets.

    Attributes
    ----------
    name : str
    config : object
        What `run` takes as one.
    run : callable
        ``run(x, packed, out, bias, config)``.
    few : int
        Rows of x of which one tile is made; sizes the trial.
    bind : callable
        With the same operands, a launch on addresses, or None: see `quant_bind`.
    """

    name: str
    config: Any
    run: Callable[..., None]
    few: int
    bind: Callable[..., Any] = _unbound

    def code(self, case: Case) -> str:
        """What selects compiled code; and K's size and tail, as a verdict on few blocks says little of many."""
        bias = case.dtype_bias or "no"
        alone = " alone" if case.m == 1 else ""
        types = f"{case.format} {case.dtype}>{case.dtype_out} {bias} bias"
        counted = case.m <= quant_few.MOST or isinstance(self.config, quant_int.Parts)
        tiles = f"{-(-case.m // 8)} tiles" if counted else "many tiles"
        k = f"k of {min(case.k, 2**13 - 1).bit_length()} bits, % 256 = {case.k % 256}"
        return f"{types}, {tiles}{alone}, {k}{', wide' if case.wide else ''}, {self.config}"


def kernels(case: Case, multiprocessors: int) -> Iterator[Kernel]:
    """Those that compute a case, the fastest first."""
    about = (case.format, case.m, case.n, case.k, case.dtype)
    lay = layout(case.format)
    if case.path == "q8":
        if quant_int.takes(*about):
            shape = quant_int.config(lay, case.m, case.n, case.k)
            one = shape.few if isinstance(shape, quant_int.Parts) else shape
            few = 8 * (one.tiles if isinstance(one, quant_int.Few) else one.tiles_x)
            yield Kernel("quant int", shape, _integers, few, quant_bind.integers)
        return
    if case.path == "fp32":
        if quant_floats.takes(*about):
            few = min(case.m, quant_floats.FEW)
            text = f"few {1 << (few - 1).bit_length()}" if case.m == few else "many"
            yield Kernel("quant floats", text, _floats, STEP, quant_bind.floats)
        return
    if quant_few.takes(*about):
        config = quant_few.configure(lay, case.m, case.n, case.k, multiprocessors)
        yield Kernel("quant few", config, quant_few.run, 8, quant_bind.few)
    if quant_many.takes(*about):
        best = str(quant_many.best(case.format, case.m, case.n, case.k, multiprocessors))
        yield Kernel("quant many", best, quant_many.run, STEP, quant_bind.many)


def _integers(x: Any, packed: Packed, out: Any, bias: Any, config: Any) -> None:
    quant_int.run(x, packed, out, bias, chosen=config)


def _floats(x: Any, packed: Packed, out: Any, bias: Any, config: Any) -> None:
    quant_floats.run(x, packed, out, bias)


def name_of(tensor: Any) -> str:
    """A tensor's element type."""
    return str(tensor.dtype).removeprefix("torch.")


def _same(kernel: Kernel) -> Kernel:
    return kernel


def candidates(case: Case, arithmetic: str, device: int) -> Iterator[Candidate[Kernel]]:
    """Kernels of a case with what admits them.

    Parameters
    ----------
    arithmetic : str
        What their bits have to be.
    """
    from ..driver.facts import device as facts
    from . import trial as quant_trial

    for kernel in kernels(case, facts(device).multiprocessors):
        yield Candidate(
            kernel.name, f"{arithmetic} {kernel.code(case)}", sources(),
            partial(quant_trial.try_kernel, kernel=kernel, case=case, arithmetic=arithmetic), partial(_same, kernel),
        )  # fmt: skip


def choose(case: Case, packed: Packed, arithmetic: str, device: int) -> Run | None:
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
    for candidate in candidates(case, arithmetic, device):
        verdict = admitted.admissions(device).verdict(candidate)
        if verdict.state == "admitted":
            kernel = candidate.build()
            return Run(kernel.run, kernel.bind, kernel.config, packed)
        if verdict.state == "unknown":
            raise DeviceError(
                "graph capture",
                limit="kernels that were admitted before: a trial cannot run while a stream is captured",
                value=f"first call of {case}", nearest="call once with these shapes before capturing",
            )  # fmt: skip
    return None


@cache
def sources() -> str:
    """Hash of all that reaches the bits of these kernels, the definitions included."""
    return fingerprint("backends/cuda/quant")
