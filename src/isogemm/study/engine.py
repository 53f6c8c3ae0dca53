"""Runs a study: a row for each case, every way of a case interleaved with the others, by every clock it asks for."""

from __future__ import annotations

import gc
import shlex
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from ..base.arguments import nearest
from ..base.progress import Tell
from ..errors import DeviceError, LimitError, OptionError
from ..lab import Candidate, Timing, environment, interleave, row, verdict, write_json
from ..lab.others import Others
from ..lab.stamp import code_of_libraries
from .declare import Study, StudyCase, Way, Ways
from .journal import Journal
from .site import Site, untuned

__all__ = ["LATER", "SCHEMA", "RunOptions", "StudyRun", "run"]

SCHEMA = "isogemm.study.v1"
MEMORY_SHARE = 0.8  # of what is free: libraries take workspaces besides
COUNTED = "counted"  # the part of a row in which a profiler counts
ROUNDS = {"device": 7, "wall": 7, "submit": 7, "profiled": 3}
QUICK_ROUNDS = {"device": 5, "wall": 5, "submit": 5, "profiled": 1}
LARGE = 2**28  # bytes of a case that are not left to the collector's own time, and from which on time grows with them
LEAST_ROUNDS, LONG = 5, 0.2  # for a verdict; seconds of a round from which on they are enough
BLOCK_SECONDS = {"device": 2e-3, "wall": 5e-3, "submit": 1e-3, "profiled": 1e-9}
QUICK_BLOCK = 0.4
INTERRUPTED = 0.05  # seconds that a busy host may add to a call
SUBMITTED = 5e-3  # seconds of the device's work that are enqueued at once by the clock that does not wait for it
CPU_PAUSE, QUICK_PAUSE = 0.02, 0.005  # thread pools of the last block fall asleep


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What may be chosen for a run."""

    quick: bool = False  # fewer cases and rounds
    seed: int = 0  # of the operands
    case: str = ""  # the key of the only case; empty for all
    threads: int = 0  # of every library on a CPU, which the caller has set; 0 where each has its own count

    @property
    def words(self) -> list[str]:
        """The settings as the command line has them, the case left out."""
        threads = ["--threads", str(self.threads)] if self.threads else []
        return ["--seed", str(self.seed), *["--quick"] * self.quick, *threads]


@dataclass(frozen=True, slots=True)
class StudyRun:
    """What a run left."""

    study: str
    site: dict[str, Any]  # the machine: device, name, version
    rows: list[dict[str, Any]]  # from `isogemm.lab.row`
    options: dict[str, Any] = field(default_factory=dict)  # see `RunOptions`
    left_out: dict[str, str] = field(default_factory=dict)  # cases that memory does not hold, and why
    environment: dict[str, Any] = field(default_factory=dict)  # the lab's, and `others`, the CPUs that others kept busy


def run(
    study: Study,
    site: Site,
    options: RunOptions | None = None,
    folder: Path | None = None,
    tell: Tell = lambda done, total, text: None,
    *,
    limit: float = float("inf"),
) -> StudyRun:
    """Measure every case that memory holds, or the one that was asked for.

    With a folder, rows are kept as they come, a run that was stopped goes on, and ``NAME.json`` is written at the end.

    Parameters
    ----------
    study, site, options, folder, tell
    limit : float
        Seconds after which the run ends in order: after the first, a case is not begun when it is expected to take
        longer than is left, by what was timed of the two before it and, where it is large, by its memory beside
        theirs. What was not measured is in `StudyRun.left_out`.

    Raises
    ------
    OptionError
        No such case, or the folder has rows of another run.
    LimitError
        The case that was asked for, or every case, needs more memory than there is.
    """
    options = options or RunOptions()
    cases, left_out = _chosen(study, site, options)
    stamp = {"schema": SCHEMA, "study": study.name, "options": asdict(options), "machine": site.identity}
    journal = Journal(folder, stamp, environment()) if folder else None
    rows = dict(journal.rows) if journal else {}
    kept = frozenset(rows)  # that processes before this one measured
    pace, others = _Pace(limit), Others()
    with untuned() if options.quick else nullcontext():
        for done, case in enumerate(cases):
            tell(done, len(cases), case.key)
            if case.key in rows:
                continue
            if not pace.allows(case):
                left_out[case.key] = LATE
                continue
            rows[case.key] = _measured(study, case, site, options) | {"others": others.mean()}
            pace.add(case, rows[case.key]["seconds"])
            if journal:
                journal.add(rows[case.key])
    facts = site.identity | {"ceilings": {name: c.to_dict() for name, c in site.ceilings.items()}}
    measured = [rows[case.key] for case in cases if case.key in rows]
    before, now = ([row for row in measured if (row["name"] in kept) == there] for there in (True, False))
    stamped = environment() | {"others": _others(before, now, others.mean())}
    found = StudyRun(study.name, facts, measured, asdict(options), left_out, stamped)
    if folder:
        content = {"study": study.name, "site": found.site, "options": found.options, "left_out": left_out}
        write_json(folder / f"{study.name}.json", found.rows, environment=found.environment, schema=SCHEMA, **content)
    return found


def _others(before: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]], mean: float | None) -> float | None:
    """CPUs that other programs kept busy in the mean, while this process measured `rows` and others those `before`."""
    seen = [(row.get("others"), row) for row in before] + [(mean, row) for row in rows]
    known = [(x, sum(row["seconds"].values())) for x, row in seen if x is not None]
    seconds = sum(weight for _, weight in known)
    return round(sum(x * weight for x, weight in known) / seconds, 2) if seconds else mean


_size = attrgetter("nbytes")
LATER = "goes on from here"
LATE = f"not reached within the time limit; the same command {LATER}"


class _Pace:
    """How long cases take, and whether another may be begun.

    What is timed or counted takes as long again; of all else the lesser of the two before counts, nothing after the
    first: it compiles, and starts a profiler, which took 7 to 14 s of first rows on an H100.
    """

    def __init__(self, limit: float) -> None:
        self._end = time.monotonic() + limit
        self._last: list[tuple[int, float, float]] = []  # of the two before: bytes, seconds timed, and of all else

    def allows(self, case: StudyCase) -> bool:
        """Whether the case is expected to end in time, or nothing was measured yet."""
        if not self._last:
            return True
        more = [max(1.0, case.nbytes / max(LARGE, nbytes)) for nbytes, _, _ in self._last]
        timed, rest = ([m * row[i] for m, row in zip(more, self._last, strict=True)] for i in (1, 2))
        expected = max(timed) + (min(rest) if len(rest) > 1 else 0.0)
        return time.monotonic() + expected <= self._end

    def add(self, case: StudyCase, seconds: Mapping[str, float]) -> None:
        """Note what a case took."""
        timed = sum(s for part, s in seconds.items() if part in (*ROUNDS, COUNTED))
        self._last = [*self._last, (case.nbytes, timed, sum(seconds.values()) - timed)][-2:]


def _chosen(study: Study, site: Site, options: RunOptions) -> tuple[list[StudyCase], dict[str, str]]:
    """The cases to measure, and those that do not fit into memory."""
    cases = {case.key: case for case in study.cases(site, options.quick)}
    if options.case:
        if options.case not in cases:
            near = nearest(options.case, cases, next(iter(cases), "none"))
            raise OptionError(f"case of {study.name}", limit="a key that it has", value=options.case, nearest=near)
        cases = {options.case: cases[options.case]}
    room = int(site.memory * MEMORY_SHARE)
    fits = [case for case in cases.values() if case.nbytes <= room]
    large = [case for case in cases.values() if case.nbytes > room]
    left_out = {case.key: f"needs {_gib(case.nbytes)}, {_gib(room)} may be used" for case in large}
    if not fits:
        raise _no_room(study, site, options, min(large, key=_size), room)
    return fits, left_out


def _no_room(study: Study, site: Site, options: RunOptions, wanted: StudyCase, room: int) -> LimitError:
    """The error that names the largest case that fits."""
    known = study.cases(site, options.quick)
    fitting = [case for case in known if case.nbytes <= room]
    least = min(known, key=_size)
    near = f"--case {max(fitting, key=_size).key!r}" if fitting else f"{_gib(int(least.nbytes / MEMORY_SHARE))} free"
    limit = f"{_gib(room)} of {site.device}"
    return LimitError(f"memory for {wanted.key}", limit=limit, value=_gib(wanted.nbytes), nearest=near)


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"


def _measured(study: Study, case: StudyCase, site: Site, options: RunOptions) -> dict[str, Any]:
    """The row of a case; one that cannot be measured has the error in words and no times."""
    command = ["isogemm", "study", study.name, "--device", site.device, *options.words, "--case", case.key]
    facts: dict[str, Any] = {"facts": dict(case.facts), "clock": site.main_clock, "error": None, "absent": {}}
    spent = facts["seconds"] = _Spent()
    try:
        found = _timed(case, site, options, facts, spent)
    except Exception as error:
        found, facts["error"] = {"timings": {}}, _words(error)
    finally:
        site.forget()
        if case.nbytes > LARGE:
            gc.collect()
    if case.inspect and found["timings"] and not options.quick:
        facts |= _counters(study, case, found["timings"], options)
        spent.on(COUNTED)
    return row(
        case.key,
        command=shlex.join(command),
        seed=options.seed,
        ceilings=site.ceilings.get(case.roofline),
        **found,
        **facts,
    )


class _Spent(dict[str, float]):
    """Seconds of each part of a row: operands made, first calls, results checked, kernels named, each clock."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def on(self, part: str) -> None:
        """What was done since the last part was this one."""
        now = time.monotonic()
        self[part], self._last = round(now - self._last, 3), now


def _timed(case: StudyCase, site: Site, options: RunOptions, facts: dict[str, Any], spent: _Spent) -> dict[str, Any]:
    made = case.make(site, options.seed)
    spent.on("made")
    with made.under(), untuned():  # kernels were chosen while it was made: no search may run beside a clock
        return _with(made, case, site, options, facts, spent)


def _with(
    made: Ways, case: StudyCase, site: Site, options: RunOptions, facts: dict[str, Any], spent: _Spent
) -> dict[str, Any]:
    once: dict[str, float] = {}
    for name, way in list(made.ways.items()):
        try:
            once[name] = _first(way, site)
        except Exception as error:  # a graph does not take every call
            facts["absent"][name] = _words(error)
            del made.ways[name]
    if not made.ways:
        raise RuntimeError("no way of it could run")
    spent.on("called")
    correctness = made.check()
    spent.on("checked")
    kernels, launched = _kernels(made, site, inspect=case.inspect)
    spent.on("named")
    clocks = {}
    for clock in dict.fromkeys([site.main_clock, *(name for name in case.clocks if name in site.clocks)]):
        clocks[clock] = _by(clock, made.ways, once, site, options)
        spent.on(clock)
    timings = clocks.pop(site.main_clock)
    facts["facts"] |= made.facts
    if case.inspect:
        facts["launches"] = launched
    first, *others = timings.values()
    return {
        "timings": timings,
        "verdicts": [verdict(first, other) for other in others],
        "kernel": kernels,
        "correctness": correctness,
        "work": {name: way.work for name, way in made.ways.items()},
        "clocks": clocks,
    }


def _first(way: Way, site: Site) -> float:
    """Seconds of a call by the main clock, after one that compiles; on the host, the least of three short ones."""
    clock = site.clocks[site.main_clock]
    if site.main_clock != "wall":
        return clock.elapsed(way, 0, 1)  # a graph, captured after a call of its own
    way(0)
    seconds = clock.elapsed(way, 0, 1)
    return seconds if seconds > INTERRUPTED else min(seconds, *(clock.elapsed(way, 0, 1) for _ in range(2)))


def _by(
    clock: str, ways: Mapping[str, Way], once: Mapping[str, float], site: Site, options: RunOptions
) -> dict[str, Timing]:
    """All ways by one clock, interleaved; in fewer rounds where one takes long.

    What a call takes by the main clock it takes at least by the wall. Where only submissions count the device works
    all the same, and a block of them is as short as that needs: a hundred calls of 50 ms took 70 s of a row.
    """
    rounds, pause = (QUICK_ROUNDS, QUICK_PAUSE) if options.quick else (ROUNDS, CPU_PAUSE)
    known, most = once if clock in (site.main_clock, "wall") else {}, dict[str, int]()
    if clock == "submit":
        most = {name: max(1, int(SUBMITTED / max(seconds, 1e-9))) for name, seconds in once.items()}
        known = {name: BLOCK_SECONDS[clock] for name, calls in most.items() if calls == 1}  # the block is that call
    return interleave(
        [Candidate(name, way, known.get(name, 0.0), most.get(name, 0)) for name, way in ways.items()],
        blocks=min(rounds[clock], LEAST_ROUNDS) if sum(once.values()) > LONG else rounds[clock],
        block_seconds=BLOCK_SECONDS[clock] * (QUICK_BLOCK if options.quick else 1),
        pause=pause if site.device == "cpu" and clock == "wall" else 0.0,
        clock=site.clocks[clock],
    )


def _kernels(made: Ways, site: Site, *, inspect: bool) -> tuple[dict[str, str], dict[str, Any]]:
    """Names of the kernels behind each way, and with `inspect` how they were launched."""
    if site.device == "cpu":
        code = code_of_libraries()
        return {name: way.kernel or code.get(way.library, way.library) for name, way in made.ways.items()}, {}
    from ..lab.profiler import launches

    names, launched = {}, {}
    for name, way in made.ways.items():
        found = launches(partial(way, 0))
        each = list(dict.fromkeys(x.name for x in found))
        names[name] = "; ".join(each) if each else way.kernel or f"{way.library}: no profiler may run here"
        if inspect:
            unique = {(x.name, x.grid): x for x in found}
            counts = Counter((x.name, x.grid) for x in found)
            launched[name] = [asdict(x) | {"count": counts[key]} for key, x in unique.items()]
    return names, launched


def _counters(study: Study, case: StudyCase, ways: Sequence[str], options: RunOptions) -> dict[str, Any]:
    """What counters say of each way, or why not; another process reads them, when this one's memory is free."""
    from ..lab.counters import read_counters
    from .once import command_of

    try:
        return {"counters": read_counters(command_of(study.name, case.key, options.seed), list(ways))}
    except DeviceError as error:
        return {"counters": {}, "no_counters": _words(error)}


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".split("\n", 1)[0][:300]
