"""Runs a study: a row for each case, every way of a case interleaved with the others, by every clock it asks for."""

from __future__ import annotations

import difflib
import gc
import shlex
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ..base.progress import Tell
from ..errors import DeviceError, LimitError, OptionError
from ..lab import Candidate, Timing, environment, interleave, row, verdict, write_json
from ..lab.stamp import code_of_libraries
from .declare import Study, StudyCase, Way, Ways
from .journal import Journal
from .site import Site, untuned

__all__ = ["SCHEMA", "RunOptions", "StudyRun", "run"]

SCHEMA = "isogemm.study.v1"
MEMORY_SHARE = 0.8  # of what is free: libraries take workspaces besides
ROUNDS = {"device": 7, "wall": 7, "submit": 7, "profiled": 3}
QUICK_ROUNDS = {"device": 5, "wall": 5, "submit": 5, "profiled": 1}
LARGE = 2**28  # bytes of a case that are not left to the collector's own time
LEAST_ROUNDS, LONG = 5, 1.0  # for a verdict; seconds of a round from which on they are enough
BLOCK_SECONDS = {"device": 2e-3, "wall": 5e-3, "submit": 1e-3, "profiled": 1e-9}
QUICK_BLOCK = 0.4
CPU_PAUSE, QUICK_PAUSE = 0.02, 0.005  # thread pools of the last block fall asleep


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What may be chosen for a run.

    Attributes
    ----------
    quick : bool
        Fewer cases and rounds.
    seed : int
        Of the operands.
    case : str
        The key of the only case; empty for all.
    threads : int
        Of every library on a CPU, which the caller has set; 0 where each has its own count.
    """

    quick: bool = False
    seed: int = 0
    case: str = ""
    threads: int = 0

    @property
    def words(self) -> list[str]:
        """As the command line has them, the case left out."""
        threads = ["--threads", str(self.threads)] if self.threads else []
        return ["--seed", str(self.seed), *["--quick"] * self.quick, *threads]


@dataclass(frozen=True, slots=True)
class StudyRun:
    """What a run left.

    Attributes
    ----------
    study : str
    site : dict
        The machine: device, name, version.
    rows : list of dict
        From `isogemm.lab.row`.
    options : dict
        See `RunOptions`.
    left_out : dict of str to str
        Cases that memory does not hold, and why.
    environment : dict
    """

    study: str
    site: dict[str, Any]
    rows: list[dict[str, Any]]
    options: dict[str, Any] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)


def run(
    study: Study,
    site: Site,
    options: RunOptions | None = None,
    folder: Path | None = None,
    tell: Tell = lambda done, total, text: None,
) -> StudyRun:
    """Measure every case that memory holds, or the one that was asked for.

    With a folder, rows are kept as they come, a run that was stopped goes on, and ``NAME.json`` is written at the end.

    Raises
    ------
    DeviceError
        The study cannot run on this device.
    OptionError
        No such case, or the folder has rows of another run.
    LimitError
        The case that was asked for, or every case, needs more memory than there is.
    """
    options = options or RunOptions()
    if site.device not in study.devices:
        raise DeviceError(
            study.name, limit=", ".join(study.devices), value=site.device, nearest=f"--device {study.devices[0]}"
        )
    cases, left_out = _chosen(study, site, options)
    stamp = {"schema": SCHEMA, "study": study.name, "options": asdict(options), "machine": site.identity}
    journal = Journal(folder, stamp, environment()) if folder else None
    rows = dict(journal.rows) if journal else {}
    with untuned() if options.quick else nullcontext():
        for done, case in enumerate(cases):
            tell(done, len(cases), case.key)
            if case.key not in rows:
                rows[case.key] = _measured(study, case, site, options)
                if journal:
                    journal.add(rows[case.key])
    facts = site.identity | {"ceilings": {name: c.to_dict() for name, c in site.ceilings.items()}}
    found = StudyRun(study.name, facts, [rows[case.key] for case in cases], asdict(options), left_out, environment())
    if folder:
        content = {"study": study.name, "site": found.site, "options": found.options, "left_out": left_out}
        write_json(folder / f"{study.name}.json", found.rows, environment=found.environment, schema=SCHEMA, **content)
    return found


def _chosen(study: Study, site: Site, options: RunOptions) -> tuple[list[StudyCase], dict[str, str]]:
    """The cases to measure, and those that do not fit into memory."""
    cases = {case.key: case for case in study.cases(site, options.quick)}
    if options.case:
        if options.case not in cases:
            near = (difflib.get_close_matches(options.case, cases, n=1, cutoff=0.0) or list(cases))[0]
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


def _size(case: StudyCase) -> int:
    return case.nbytes


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"


def _measured(study: Study, case: StudyCase, site: Site, options: RunOptions) -> dict[str, Any]:
    """The row of a case; one that cannot be measured has the error in words and no times."""
    command = ["isogemm", "study", study.name, "--device", site.device, *options.words, "--case", case.key]
    facts: dict[str, Any] = {"facts": dict(case.facts), "clock": site.main_clock, "error": None, "absent": {}}
    try:
        found = _timed(case, site, options, facts)
    except Exception as error:
        found, facts["error"] = {"timings": {}}, _words(error)
    finally:
        site.forget()
        if case.nbytes > LARGE:
            gc.collect()
    if case.inspect and found["timings"] and not options.quick:
        facts |= _counters(study, case, found["timings"], options)
    return row(
        case.key,
        command=shlex.join(command),
        seed=options.seed,
        ceilings=site.ceilings.get(case.roofline),
        **found,
        **facts,
    )


def _timed(case: StudyCase, site: Site, options: RunOptions, facts: dict[str, Any]) -> dict[str, Any]:
    made = case.make(site, options.seed)
    with made.under():
        return _with(made, case, site, options, facts)


def _with(made: Ways, case: StudyCase, site: Site, options: RunOptions, facts: dict[str, Any]) -> dict[str, Any]:
    spent = 0.0
    for name, way in list(made.ways.items()):
        try:
            way.run(0)  # which compiles
            spent += site.clocks[site.main_clock].elapsed(_Turns(way), 0, 1)  # a graph does not take every call
        except Exception as error:
            facts["absent"][name] = _words(error)
            del made.ways[name]
    if not made.ways:
        raise RuntimeError("no way of it could run")
    correctness = made.check()
    kernels, launched = _kernels(made, site, inspect=case.inspect)
    clocks = {name: _by(name, made.ways, site, options, spent > LONG) for name in _clocks(case, site)}
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


def _clocks(case: StudyCase, site: Site) -> list[str]:
    return list(dict.fromkeys([site.main_clock, *(name for name in case.clocks if name in site.clocks)]))


class _Turns:
    """A way as a clock sees it: its call, its library calls one by one, and over how many copies it rotates."""

    def __init__(self, way: Way) -> None:
        self.steps, self.period, self._run = way.steps, way.copies, way.run

    def __call__(self, i: int) -> object:
        return self._run(i)


def _by(clock: str, ways: Mapping[str, Way], site: Site, options: RunOptions, long: bool) -> dict[str, Timing]:
    """All ways by one clock, interleaved; in fewer rounds where one takes long."""
    rounds, pause = (QUICK_ROUNDS, QUICK_PAUSE) if options.quick else (ROUNDS, CPU_PAUSE)
    return interleave(
        [Candidate(name, _Turns(way)) for name, way in ways.items()],
        blocks=min(rounds[clock], LEAST_ROUNDS) if long else rounds[clock],
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
        found = launches(partial(way.run, 0))
        each = list(dict.fromkeys(x.name for x in found))
        names[name] = "; ".join(each) if each else way.kernel or f"{way.library}: no profiler may run here"
        if inspect:
            unique = {(x.name, x.grid): x for x in found}
            launched[name] = [asdict(x) | {"count": _count(found, x)} for x in unique.values()]
    return names, launched


def _counters(study: Study, case: StudyCase, ways: Sequence[str], options: RunOptions) -> dict[str, Any]:
    """What counters say of each way, or why not; another process reads them, when this one's memory is free."""
    from ..lab.counters import read_counters
    from .once import command_of

    try:
        return {"counters": read_counters(command_of(study.name, case.key, options.seed), list(ways))}
    except DeviceError as error:
        return {"counters": {}, "no_counters": _words(error)}


def _count(found: Sequence[Any], wanted: Any) -> int:
    return sum((x.name, x.grid) == (wanted.name, wanted.grid) for x in found)


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".split("\n", 1)[0][:300]
