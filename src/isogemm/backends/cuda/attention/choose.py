"""Which of attention's kernels serve a call: the fastest one whose bits were right on this device and software."""

from __future__ import annotations

from ....errors import OptionError
from ....planner.choose import Option, choose
from ..driver.machine import admissions
from .case import AttentionCase
from .family import Attention
from .few import FewAttention
from .fma import FmaAttention
from .hopper import HopperAttention
from .ranged import RangedAttention, together
from .trial import Run
from .walk import LeafAttention, SplitAttention, WalkAttention

# A new kernel is its file and a row here.
KERNELS: dict[str, Attention] = {
    "hopper": HopperAttention(),
    "few": FewAttention(),
    "split": SplitAttention(),
    "leaf": LeafAttention(),
    "walk": WalkAttention(),
    "fma": FmaAttention(),
}


def ranked(case: AttentionCase) -> list[str]:
    """Kernels for a case: the one that is likely the fastest first, then those that do with the least memory.

    Every choice has the same bits.
    """
    ranks = {name: kernel.rank(case) for name, kernel in KERNELS.items() if kernel.supports(case)}
    return [name for _, name in sorted((rank, name) for name, rank in ranks.items() if rank is not None)]


def admitted_run(case: AttentionCase, kernel: str | None = None) -> Run:
    """The launch of the first admitted kernel; of `kernel` alone where one is named.

    Raises
    ------
    ContractError
        No kernel that serves has the bits of the definition here.
    DeviceError
        While a graph is captured, of a kernel that has not been tried.
    OptionError
        `kernel` cannot compute this case.
    """
    if not min(case.batch, case.tq, case.heads):
        return lambda *values: None  # nothing to launch
    if kernel is not None and not (kernel in KERNELS and KERNELS[kernel].supports(case)):
        legal = [name for name, each in KERNELS.items() if each.supports(case)]
        raise OptionError("kernel of attention", limit=legal, value=kernel, nearest=legal[:1])
    return _first([KERNELS[name] for name in ([kernel] if kernel else ranked(case))], case, "")


def ranged_run(case: AttentionCase, kernel: str | None = None) -> Run:
    """`admitted_run` of a call whose queries have the ranges of keys that its mask shows them."""
    main = admitted_run(together(case), kernel)
    if not min(case.batch, case.tq, case.heads, case.tk):
        return main
    return _first([RangedAttention(main)], case, " with ranges of a mask")


def _first(kernels: list[Attention], case: AttentionCase, said: str) -> Run:
    what = f"{case.arithmetic}/chain on attention of {case.dtype}{said}"
    options = (Option(kernel, config) for kernel in kernels for config in kernel.configs(case))
    return choose(options, case, admissions(case.device), what=what).launch
