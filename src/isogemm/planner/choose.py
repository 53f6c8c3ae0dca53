"""The one way to a kernel: those that could serve, in the order of their speed, until one is admitted and bound.

Where the order comes from is told by the options: a column asks tables first, then its model, then takes whatever else
serves. None of that can reach a bit, as nothing serves that was not admitted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from ..errors import ContractError, DeviceError
from .admission import Admission, Admissions
from .family import Family
from .records import notice

C = TypeVar("C")
L = TypeVar("L")
Judge = Callable[..., Admission]
"""``judge(family, case, config)``"""
ELSEWHERE = "the CPU, which has the same bits"


class Option(NamedTuple, Generic[C, L]):
    """A kernel that may serve a call: a family, its configuration, why it is considered, and the time to expect."""

    family: Family[C, L]
    config: Any
    reason: str = ""
    expected_us: float | None = None


FORESEEN = "a model of its time"  # how reasons begin for kernels of whose time nothing but a model is known


@dataclass(frozen=True, slots=True)
class Choice(Generic[L]):
    """The kernel for a call."""

    family: str
    config: Any
    launch: L  # compiled and bound
    reason: str  # why this one
    expected_us: float | None  # microseconds, as timed or by a model


def choose(
    options: Iterable[Option[C, L]], case: C, admissions: Admissions, *, what: str, nearest: str = ELSEWHERE,
    none: str = "none supports it", judge: Judge | None = None,
) -> Choice[L]:  # fmt: skip
    """`first`, where having none is an error; `none` is said where no option supports the case.

    Raises ContractError: no kernel here has the bits; the message names the device, and of each kernel why it was
    passed over. Raises DeviceError: see `first`.
    """
    passed: list[str] = []
    found = first(options, case, admissions, what=what, passed=passed, judge=judge)
    if found is not None:
        return found
    raise ContractError(
        f"no kernel on {admissions.stamp.get('device', 'this device')}", limit=f"one whose bits are those of {what}",
        value="; ".join(passed[:6]) or none, nearest=nearest,
    )  # fmt: skip


def first(
    options: Iterable[Option[C, L]], case: C, admissions: Admissions, *, what: str, passed: list[str] | None = None,
    judge: Judge | None = None,
) -> Choice[L] | None:  # fmt: skip
    """The first option that is admitted and can be bound; None where all were refused.

    Parameters
    ----------
    options : iterable of Option
        The fastest first. Those that do not support the case are passed over.
    case
        The call.
    what : str
        The call in words, for messages; whatever its sizes, so that they are said once.
    passed : list, optional
        Gets what is to be said of each kernel that does not serve.
    judge : callable, optional
        In place of `Admissions.verdict`.

    Raises
    ------
    DeviceError
        While a graph is captured: kernels that could serve have not been tried yet.
    """
    passed = [] if passed is None else passed
    unbound: list[str] = []
    waiting = False
    for family, config, reason, expected in options:
        if not family.supports(case, config):
            continue
        found: Admission = (judge or admissions.verdict)(family, case, config)
        label = f"{family.name} [{config}]"
        if found.state != "admitted":
            waiting = waiting or found.state == "unknown"
            passed.append(f"{label}: {found.state} {found.detail}".rstrip())
            continue
        try:
            launch = family.bind(case, config, admissions.machine.device)
        except Exception as error:
            unbound.append(f"{label}: {error}")
            passed.append(unbound[-1])
            continue
        if unbound:
            several = f"{len(unbound)} admitted kernels" if len(unbound) > 1 else "an admitted kernel"
            text = f"{several} cannot be built for {what}, and {label} serves. The first was {unbound[0]}"
            notice(text, about=f"unbuilt for {what}")
        return Choice(family.name, config, launch, reason, expected)
    if waiting and admissions.machine.capturing():
        limit = "kernels that were admitted before: a trial cannot run while a stream is captured"
        nearest = "call once with these shapes before capturing"
        raise DeviceError("graph capture", limit=limit, value=f"first call of {what}", nearest=nearest)
    return None
