"""Which of attention's kernels serve a call: the fastest one whose bits were right on this device and software."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from ....planner.fingerprint import fingerprint
from ....planner.kernel_admission import Candidate
from ..admitted import first_admitted
from .plans import Case, Run, bind, code_of, kernels_of, serves
from .ranged import bind_ranged, code_of_ranged, together
from .trial import try_kernel, try_ranged

__all__ = ["admitted_run", "ranged_run", "sources"]


def admitted_run(case: Case, arithmetic: str, device: int, kernel: str | None = None) -> Run:
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
    if not min(case.batch, case.tq, case.heads) or (kernel is not None and not serves(case, kernel)):
        return bind(case, kernel or "walk", device)  # nothing to launch, or its refusal
    names = kernels_of(case, device) if kernel is None else [kernel]
    what = f"{arithmetic}/chain on attention of {case.dtype}"
    return first_admitted(what, _candidates(case, arithmetic, device, names), device)


def ranged_run(case: Case, arithmetic: str, device: int, kernel: str | None = None) -> Run:
    """`admitted_run` of a call whose queries have the ranges of keys that its mask shows them."""
    main = admitted_run(together(case), arithmetic, device, kernel)
    if not min(case.batch, case.tq, case.heads, case.tk):
        return main
    trial = partial(try_ranged, case=case, arithmetic=arithmetic)
    one = Candidate(
        "attention ranged", code_of_ranged(case, device), sources(), trial, partial(bind_ranged, case, device, main)
    )  # fmt: skip
    return first_admitted(f"{arithmetic}/chain on attention of {case.dtype} with ranges of a mask", [one], device)


def _candidates(case: Case, arithmetic: str, device: int, names: list[str]) -> Iterator[Candidate[Run]]:
    source = sources()
    for name in names:
        yield Candidate(
            f"attention {name}", code_of(case, name, device), source,
            partial(try_kernel, kernel=name, case=case, arithmetic=arithmetic), partial(bind, case, name, device),
        )  # fmt: skip


def sources() -> str:
    """Hash of all that reaches the bits of attention's kernels, the definition included."""
    return fingerprint("backends/cuda/attention")
