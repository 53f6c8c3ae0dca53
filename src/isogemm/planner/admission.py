"""Admission: a kernel may serve only where its bits were seen to be right, on this device and software.

What is admitted is *code*: a family's name and the text of all that selected what was compiled. A trial runs that code
on operands that reach its edges and compares every bit with the definition, once for each code. Every verdict carries
what could change it, the sources included; where any of that changes, the verdict is void and the code is tried again
at first use. A kernel that was refused is passed over.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

from ..contract import golden
from ..errors import IsogemmError
from .bench import Bench, Machine
from .family import Family, NotCompiledError
from .fingerprint import fingerprint
from .records import Records, log, notice, today

TOO_SHORT = "supports no golden product that is long enough to tell"
# Parts of a stamp that can change bits. torch only lends memory and streams, and is no part of either.
GENERIC_PARTS = ("device", "capability", "driver", "cuda", "triton", "nvrtc", "golden")
LIBRARY_PARTS = ("device", "capability", "driver", "cublaslt")


@dataclass(frozen=True, slots=True)
class Admission:
    """Whether a kernel may serve."""

    # {"admitted", "refused", "unknown", "stale", "absent"}: ``unknown`` where nothing is on record and nothing may be
    # run now. Of a library's algorithm, which no trial can admit: ``stale`` where a table's record is void, ``absent``
    # where there is none.
    state: Literal["admitted", "refused", "unknown", "stale", "absent"]
    source: str = ""  # where the verdict comes from
    date: str = ""
    detail: str = ""  # why it was refused


class Known(NamedTuple):
    """A verdict of this process: on a family's code, made from these sources."""

    name: str
    code: str
    fingerprint: str
    admission: Admission


def relevant(stamp: Mapping[str, str], *, library: bool) -> dict[str, str]:
    """The parts of a stamp that can change a kernel's bits."""
    return {name: stamp[name] for name in (LIBRARY_PARTS if library else GENERIC_PARTS) if name in stamp}


def same_stamp(one: Mapping[str, str], other: Mapping[str, str], *, library: bool) -> bool:
    """Whether verdicts made under `one` hold under `other`."""
    return relevant(one, library=library) == relevant(other, library=library)


class Admissions:
    """Verdicts on one device: from shipped tables, from this user's records, or from a trial now."""

    def __init__(self, machine: Machine, records: Records) -> None:
        self.machine, self.records, self.bench = machine, records, Bench(machine)
        # All that could void a verdict, the sources of a kernel apart: new golden bits void the verdicts of old ones.
        self.stamp = {**machine.stamp(), "golden": golden_digest()}
        self._known: dict[tuple[str, str, str], Admission] = {}
        self._trying: dict[tuple[str, str, str], threading.RLock] = {}

    def verdict(self, family: Family[Any, Any], case: Any, config: Any, *, trial: bool = True) -> Admission:
        """Whether the kernel may serve `case`; without a record it is tried now, except while a stream is captured."""
        key = family.name, family.code(case, config), self.fingerprint(family)
        known = self._known.get(key) or self._recorded(key)
        if known is not None:
            return self._known.setdefault(key, known)
        if not trial or self.machine.capturing():
            return Admission("unknown")
        with self._trying.setdefault(key, threading.RLock()):  # other kernels are tried meanwhile, by other threads
            known = self._known.get(key) or self._try(key, family, case, config)
            if known.state != "unknown":
                self._known[key] = known
        return known

    def fingerprint(self, family: Family[Any, Any]) -> str:
        """Hash of all that reaches a family's bits."""
        return fingerprint(family.home)

    def trust(self, name: str, code: str, source: str, admission: Admission) -> None:
        """Take a verdict of a table over: it holds for sources with that fingerprint."""
        self._known[name, code, source] = admission

    def known(self) -> Iterator[Known]:
        """Everything looked up, taken over or tried so far in this process."""
        for key, admission in sorted(self._known.items(), key=lambda item: item[0]):
            yield Known(*key, admission)

    def ask(self, what: str, sources: str) -> str:
        """An answer that was recorded for this device and these sources; empty where there is none."""
        found = self.records.get(self._key(question=what, fingerprint=sources))
        return "" if found is None else found.get("value", "")

    def answer(self, what: str, sources: str, value: str) -> None:
        """Record an answer for `ask`."""
        self.records.put(self._key(question=what, fingerprint=sources), {"value": value})

    def _key(self, **parts: str) -> dict[str, Any]:
        return {**parts, "stamp": relevant(self.stamp, library=False)}

    def _recorded(self, key: tuple[str, str, str]) -> Admission | None:
        name, code, sources = key
        found = self.records.get(self._key(kernel=name, code=code, fingerprint=sources))
        if found is None or found.get("state") not in ("admitted", "refused"):
            return None
        state: Literal["admitted", "refused"] = "admitted" if found["state"] == "admitted" else "refused"
        return Admission(state, "this user's records", found.get("date", ""), found.get("detail", ""))

    def _try(self, key: tuple[str, str, str], family: Family[Any, Any], case: Any, config: Any) -> Admission:
        name, code, sources = key
        try:
            why = family.trial(self.bench, case, config)
        except NotCompiledError:  # the process is about to end: nothing was found
            raise
        except Exception as error:
            if self.machine.capturing():  # which began on this stream behind the trial's back
                return Admission("unknown")
            # Not a wrong bit, and perhaps not this kernel's fault (a device out of memory, one broken by another
            # kernel): it does not serve in this process, and nothing is recorded.
            said = cannot_run(name, code, error)
            return Admission("refused", "a trial in this process", today(), f"cannot run: {said}")
        if why:
            say = log.info if why == TOO_SHORT else notice  # of some variants that is all that can be said
            say(f"kernel {name} [{code}] is not used: {why}")
        found = Admission("refused" if why else "admitted", "a trial in this process", today(), why)
        value = {"state": found.state, "date": found.date, "detail": why}
        self.records.put(self._key(kernel=name, code=code, fingerprint=sources), value)
        return found


def cannot_run(name: str, code: str, error: Exception) -> str:
    """Say once that a kernel cannot run here, and return why."""
    said = str(error) if isinstance(error, IsogemmError) else f"{type(error).__name__}: {error}"
    notice(f"kernel {name} [{code}] cannot run: {said}")
    return said


@cache
def golden_digest() -> str:
    """Hash of the shipped bits."""
    return hashlib.sha256(golden.data_path().read_bytes()).hexdigest()[:16]
