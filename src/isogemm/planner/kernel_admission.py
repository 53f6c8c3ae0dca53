"""Admission of kernels that are no products (attention, operations along rows): by their bits, at first use.

What is admitted is *code*: a kernel's name and the text of all that selected what was compiled (macros, constants,
hints). Sizes are no part of it. A trial runs that code on operands that reach its edges and compares every bit with
the definition. Verdicts are kept with those of products, under the same stamp; a kernel that was refused is passed
over, and where nothing is left the call is a typed error.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from ..errors import ContractError, DeviceError, IsogemmError
from .admission import Admission as Verdict
from .admission import relevant
from .bench import Machine, difference
from .records import Records, notice, today

__all__ = ["Candidate", "KernelAdmissions", "Known", "difference", "fingerprint"]

T = TypeVar("T")


@dataclass(frozen=True)
class Candidate(Generic[T]):
    """A kernel that could serve a call.

    Attributes
    ----------
    name : str
        As ``attention hopper``.
    code : str
        What selected the compiled code.
    fingerprint : str
        Hash of its sources.
    trial : callable
        Given a machine, runs it; empty where every bit was right, else the first difference.
    build : callable
        What serves the call.
    """

    name: str
    code: str
    fingerprint: str
    trial: Callable[[Machine], str]
    build: Callable[[], T]


class Known(NamedTuple):
    """A verdict of this process."""

    name: str
    code: str
    verdict: Verdict


class KernelAdmissions:
    """Verdicts on one device, from this user's records or from a trial now.

    Parameters
    ----------
    machine : Machine
    records : Records
        Those of products.
    """

    def __init__(self, machine: Machine, records: Records) -> None:
        self.machine, self.records = machine, records
        self.stamp = relevant(machine.stamp(), library=False)
        self._known: dict[tuple[str, str, str], Verdict] = {}
        self._lock = threading.RLock()

    def verdict(self, candidate: Candidate[Any]) -> Verdict:
        """Whether the kernel may serve; without a record it is tried now, except while a stream is captured."""
        key = candidate.name, candidate.code, candidate.fingerprint
        known = self._known.get(key)
        if known is not None:
            return known
        with self._lock:
            known = self._known.get(key) or self._recorded(key)
            if known is None:
                if self.machine.capturing():
                    return Verdict("unknown")
                known = self._try(key, candidate.trial)
            self._known[key] = known
        return known

    def first(self, what: str, candidates: Iterable[Candidate[T]], *, nearest: str) -> T:
        """What the first admitted candidate builds.

        Parameters
        ----------
        what : str
            The call, for messages.
        candidates : iterable of Candidate
            The fastest first.
        nearest : str
            What to do where there is none.

        Raises
        ------
        ContractError
            All were refused; the message names the device, and of each kernel the first element that differed.
        DeviceError
            While a graph is captured: kernels that could serve have not been tried yet.
        """
        passed, waiting = [], False
        for candidate in candidates:
            found = self.verdict(candidate)
            if found.state == "admitted":
                return candidate.build()
            waiting = waiting or found.state == "unknown"
            passed.append(f"{candidate.name}: {found.state} {found.detail}".rstrip())
        if waiting:
            raise DeviceError(
                "graph capture",
                limit="kernels that were admitted before: a trial cannot run while a stream is captured",
                value=f"first call of {what}", nearest="call once with these shapes before capturing",
            )  # fmt: skip
        raise ContractError(
            f"no kernel on {self.stamp.get('device', 'this device')}", limit=f"one whose bits are those of {what}",
            value="; ".join(passed) or "none supports it", nearest=nearest,
        )  # fmt: skip

    def known(self) -> Iterator[Known]:
        """Everything looked up or tried so far in this process."""
        for (name, code, _), verdict in sorted(self._known.items()):
            yield Known(name, code, verdict)

    def _place(self, key: tuple[str, str, str]) -> dict[str, Any]:
        name, code, source = key
        return {"kernel": name, "code": code, "fingerprint": source, "stamp": self.stamp}

    def _recorded(self, key: tuple[str, str, str]) -> Verdict | None:
        found = self.records.get(self._place(key))
        if found is None or found.get("state") not in ("admitted", "refused"):
            return None
        state: Literal["admitted", "refused"] = "admitted" if found["state"] == "admitted" else "refused"
        return Verdict(state, "this user's records", found.get("date", ""), found.get("detail", ""))

    def _try(self, key: tuple[str, str, str], trial: Callable[[Machine], str]) -> Verdict:
        name, code, _ = key
        try:
            why = trial(self.machine)
        except Exception as error:
            # No wrong bit, and perhaps not this kernel's fault: it does not serve in this process, nothing is recorded.
            said = str(error) if isinstance(error, IsogemmError) else f"{type(error).__name__}: {error}"
            notice(f"kernel {name} [{code}] cannot run: {said}")
            return Verdict("refused", "a trial in this process", today(), f"cannot run: {said}")
        if why:
            notice(f"kernel {name} [{code}] is not used: {why}")
        verdict = Verdict("refused" if why else "admitted", "a trial in this process", today(), why)
        self.records.put(self._place(key), {"state": verdict.state, "date": verdict.date, "detail": why})
        return verdict


def fingerprint(*paths: Path) -> str:
    """Hash of files, by their names and contents, wherever they are."""
    digest = hashlib.sha256()
    for path in sorted(paths, key=lambda path: path.name):
        digest.update(f"{path.name}:".encode() + path.read_bytes())
    return digest.hexdigest()[:16]
