"""`examine`: a function that can be called, asked by probes of rising cost; no source is needed.

The function runs in a process of its own: it may raise, hang, end the process, write outside its output or into its
operands, and the examination goes on.
"""

from __future__ import annotations

import multiprocessing as mp
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from ..base.arguments import extent, nearest, number, shown
from ..base.progress import Tell
from ..errors import DTypeError, LimitError, OptionError
from ..lab import limit_threads
from ..operands.tensors import as_tensor, on_host
from ..quant.encode import weight_format
from .case import Array
from .diagnosis import Cause, Diagnosis
from .guard import Guarded, GuardError, guarded_empty
from .probes import SIGNATURES, Probe, around, check_memory, common, probes

__all__ = ["SIGNATURES", "examine"]

SECONDS, MOST_SECONDS = 5.0, 1e6  # for one call; systems wait for no longer
DRAWS = 600.0  # for the operands of the largest probe
ENOUGH = 15  # right answers
WRONG = 4  # wrong answers without a cause after which no more are asked for
TWICE = 2  # wrong answers in one size, of which none was clear
SMALL = 64  # extents up to which two mistakes at once are tried


def examine(
    function: Callable[..., Any],
    signature: str = "a, b",
    *,
    format: str = "",
    m: int | None = None,
    n: int | None = None,
    k: int | None = None,
    torch: bool = False,
    seconds: float = SECONDS,
    tell: Tell | None = None,
) -> Diagnosis:
    """Find the mistake in a function that multiplies matrices.

    Parameters
    ----------
    function : callable
    signature : {"a, b", "x, w", "a, b, out", "x, w, bias", "a, b, c, alpha, beta", "a[i], b[i]", \
            "a[h], b[h // group]", "x, blocks"}
        What it takes; see `SIGNATURES`.
    format : str, optional
        Of the blocks of "x, blocks", for example Q4_0.
    m, n, k : int, optional
        Extents that it insists on. Without them multiples of 16 are tried, and sizes that functions are often written
        for, where it refuses others.
    torch : bool
        Whether it takes torch tensors; NumPy arrays otherwise.
    seconds : float
        That one call may take.
    tell : callable, optional
        ``tell(done, total, text)``.

    Raises
    ------
    OptionError
        No such signature, or a format without blocks or none of quantized weights, or blocks without a format; no time
        for a call, or more than 10**6 seconds.
    DTypeError
        What is given is no function, or the seconds are no number.
    ShapeError
        An extent that is no whole number of at least 1.
    LimitError
        The memory does not hold a probe of these extents.

    Returns
    -------
    Diagnosis
        Of the wrong answer that says most; else right, with what the function refused in ``limits``.
    """
    if not callable(function):
        choice = "the function itself; by a name, isogemm doctor --call"
        raise DTypeError("function", limit="a function of arrays", value=shown(function), nearest=choice)
    if not isinstance(signature, str) or signature not in SIGNATURES:
        limit, meant = ", ".join(map(repr, SIGNATURES)), nearest(str(signature), SIGNATURES, "a, b")
        raise OptionError("signature", limit=limit, value=repr(signature), nearest=repr(meant))
    if not number("seconds", seconds) > 0:
        raise OptionError("seconds", limit="more than 0", value=seconds, nearest=SECONDS)
    if number("seconds", seconds) > MOST_SECONDS:
        raise OptionError("seconds", limit=f"at most {MOST_SECONDS:g}", value=seconds, nearest=MOST_SECONDS)
    if bool(format) != (signature == "x, blocks"):
        choice = "no format, or the signature 'x, blocks'" if format else "Q4_0"
        raise OptionError("format", limit="with the signature 'x, blocks'", value=repr(format), nearest=choice)
    if format:
        weight_format("format", format)
    m, n, k = (None if x is None else extent(name, x) for name, x in (("m", m), ("n", n), ("k", k)))
    fixed = (m, n, k)
    check_memory(signature, format, fixed)
    asked = _Asked(tell or (lambda done, total, text: None), seconds)
    with _Apart(function, torch) as apart:
        if not asked.answers(apart, probes(signature, format, fixed)):
            asked.answers(apart, common(signature, format, fixed))
        if len(asked.sizes) == 1:
            asked.answers(apart, around(signature, format, *asked.sizes))
    return asked.verdict()


class _Asked:
    """What was asked so far, and what came of it."""

    def __init__(self, tell: Tell, seconds: float) -> None:
        self.tell, self.seconds = tell, seconds
        self.refused: list[str] = []
        self.right: list[Diagnosis] = []
        self.wrong: list[tuple[Probe, Diagnosis, list[Array]]] = []
        self.sizes: set[tuple[int, int, int]] = set()
        self.asked: set[Probe] = set()
        self.known = False

    def answers(self, apart: _Apart, some: Iterator[Probe]) -> bool:
        """Ask until enough is known; whether anything was answered."""
        skipped = None
        for done, probe in enumerate(some):
            if self.known:
                break
            if (probe.kind, probe.extents) == skipped or probe in self.asked or self._vainly(probe) or not probe.fits:
                continue
            self.tell(done, None, str(probe))
            self.asked.add(probe)
            runs, trouble = apart.call(probe, self.seconds)
            if trouble.startswith("refused"):
                self.refused.append(f"{probe}: {trouble}")
                skipped = probe.kind, probe.extents
            else:
                self.sizes.add(probe.extents)
                self.known = not self._took(probe, runs, trouble)
        return bool(self.sizes)

    def _took(self, probe: Probe, runs: list[Array], trouble: str) -> bool:
        """Take an answer; whether more are wanted."""
        found = _said(probe, runs, pairs=False) if runs else Diagnosis("wrong")
        if trouble:
            cause = Cause(trouble.split(":")[0], f"{trouble} ({probe})", 0.0, 1.0, "see the words of the guard")
            found = replace(found, verdict="wrong", causes=(cause, *found.causes))
        if found.verdict == "right":
            self.right.append(found)
            return len(self.right) < ENOUGH
        said = _names(found)
        again = bool(said) and any(said == _names(other) for _, other, _ in self.wrong)
        self.wrong.append((probe, found, runs))
        unnamed = sum(not found.causes for _, found, _ in self.wrong)
        return not (trouble or _vague(found) == (False, 0) or again or unnamed >= WRONG)

    def _vainly(self, probe: Probe) -> bool:
        """Whether these extents were asked for often enough, and did not tell."""
        return sum(other.extents == probe.extents for other, _, _ in self.wrong) >= TWICE

    def verdict(self) -> Diagnosis:
        """The wrong answer whose causes are the fewest, of those that explain the others too; else right."""
        if self.wrong:
            probe, found = self._clearest()
            return replace(found, first=(str(probe), *found.first))
        if not self.right:
            limits = ("the function took none of the probes", *self.refused[:3])
            return Diagnosis("undiagnosable", limits=limits)
        told = [found for found in self.right if found.order] or self.right
        seen = next((found for found in self.right if found.causes), told[-1])
        words = (f"it refused {len(self.refused)} of the probes, the first {self.refused[0]}",) if self.refused else ()
        return replace(seen, limits=(*words, *(x for x in seen.limits if "not all different" not in x)))

    def _clearest(self) -> tuple[Probe, Diagnosis]:
        named = [(probe, found) for probe, found, _ in self.wrong if found.causes]
        if named:
            return min(named, key=lambda x: _vague(x[1]))
        for probe, _, runs in self.wrong:
            if max(probe.extents) <= SMALL:
                return probe, _said(probe, runs, pairs=True)
        return self.wrong[0][:2]


def _said(probe: Probe, runs: list[Array], *, pairs: bool) -> Diagnosis:
    with limit_threads(1):  # probes are small: a BLAS that waits for its threads takes several times as long
        return probe.diagnosed(runs, pairs=pairs)


def _names(found: Diagnosis) -> frozenset[str]:
    """The causes that explain it best; none where nobody wrote anything, which looks like a race."""
    if not found.causes or (found.causes[0].name == "race" and found.wrong == found.elements):
        return frozenset()
    return frozenset({found.causes[0].name, *found.causes[0].indistinguishable_from})


def _vague(found: Diagnosis) -> tuple[bool, int]:
    """Least where a wrong answer has one cause."""
    names = _names(found)
    return found.verdict != "wrong" or not names, len(names) - 1


class _Apart:
    """A process that runs the function; a new one where the last was ended."""

    def __init__(self, function: Callable[..., Any], torch: bool) -> None:
        self.function, self.torch = function, torch
        self.process: Any = None

    def __enter__(self) -> _Apart:
        return self

    def __exit__(self, *rest: object) -> None:
        self._end()

    def _end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.pipe.close()
            self.process = None

    def _start(self) -> None:
        context: Any = mp.get_context("fork" if "fork" in mp.get_all_start_methods() else "spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(self.function, self.torch, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def call(self, probe: Probe, seconds: float) -> tuple[list[Array], str]:
        """Two runs' results, and what went wrong. Raises LimitError: no memory for the operands, or `DRAWS` is over."""
        if self.process is None:
            self._start()
        try:
            self.pipe.send(probe)
            if not (self.pipe.poll(DRAWS) and self.pipe.recv()):
                limit = f"the free memory, filled within {DRAWS:g} s"
                raise LimitError("operands of a probe", limit=limit, value=probe, nearest="smaller m, n, k")
            if not self.pipe.poll(2 * seconds):
                self._end()
                return [], f"hangs: no result within {seconds:g} s"
            return self.pipe.recv()  # type: ignore[no-any-return]
        except (EOFError, OSError):  # it has ended, in this call or behind the one before
            self.process.join(1.0)
            code = self.process.exitcode
            self._end()
            return (
                [],
                f"ends the process: {f'signal {-code}' if code is not None and code < 0 else f'exit status {code}'}",
            )


def _serve(function: Callable[..., Any], torch: bool, pipe: Connection) -> None:
    """Answer calls until the pipe closes."""
    if torch:
        import torch as library

        library.set_num_threads(1)  # threads of a parent that forked are not here
    while True:
        try:
            probe = pipe.recv()
        except EOFError:
            return
        try:
            calls = [_Drawn.of(probe, torch) for _ in range(2)]
            kept = probe.operands()
        except MemoryError:
            pipe.send(False)
            continue
        pipe.send(True)  # from here on it is the function's time
        pipe.send(_run(function, probe, kept, calls))


class _Drawn(NamedTuple):
    """What one call is given."""

    operands: dict[str, Any]
    out: Guarded | None

    @classmethod
    def of(cls, probe: Probe, torch: bool) -> _Drawn:
        given = {name: as_tensor(x) if torch else x for name, x in probe.operands().items()}
        out = "out" in probe.signature
        return cls(given, guarded_empty(probe.shape, probe.kind, device="cpu" if torch else None) if out else None)


def _run(
    function: Callable[..., Any], probe: Probe, kept: dict[str, Any], calls: list[_Drawn]
) -> tuple[list[Array], str]:
    """Results of the calls, and what is wrong with them beside their values."""
    runs = []
    for given, out in calls:
        try:
            result = function(*given.values(), *((out.array,) if out else ()))
            found = on_host(out.array if out else result)
        except Exception as error:  # whatever it raises is what it says to this probe
            words = str(traceback.TracebackException(type(error), error, None)) or traceback.format_exc(limit=1)
            return [], f"refused: {type(error).__name__}: {words}"
        if any(on_host(given[name]).tobytes() != on_host(x).tobytes() for name, x in kept.items()):
            return [], "writes into its operands: they have other bytes after the call"
        if not isinstance(found, np.ndarray) or found.shape != probe.shape or found.dtype.kind not in "fV":
            got = f"{type(found).__name__} {getattr(found, 'dtype', '')} {list(getattr(found, 'shape', ()))}"
            return [], f"returns something else: {got} where floats {list(probe.shape)} were due"
        runs.append(np.array(found))
        try:
            if out:
                out.check()
        except GuardError as error:
            return runs, f"{error.what}: {error.value}"
    return runs, ""
