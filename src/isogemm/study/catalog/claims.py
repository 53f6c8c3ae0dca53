"""Published numbers about batched, strided and quantized products, held against what this machine does.

Every claim names the rows of another study that decide it; they are measured here as that study measures them. A claim
holds where our number lies in its range by the clock it was made by; it holds elsewhere where another clock, or another
library here, gives such a number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ..charts import measured, number, times
from ..declare import Figure, Row, Study, StudyCase
from ..engine import StudyRun
from ..facts import mended_facts
from ..site import Site
from . import study
from .decode import crossover

Found = tuple[str, float]  # where the number was seen, and the number
HOLDS, ELSEWHERE, NOT, MISSING = "holds", "holds elsewhere", "does not hold", "not measured on this machine"


@dataclass(frozen=True, slots=True)
class Claim:
    """A number that somebody published."""

    text: str  # as the sources state it
    study: str  # whose rows decide it
    wants: Mapping[str, Any]  # facts that those rows have; a tuple is any of its values
    # low, high: the range in which it holds: a quarter around a number, half to double around those by the wall
    low: float
    high: float
    # ``values(rows)`` gives where a number was seen, and the number; the first is the claim's own
    values: Callable[[Sequence[Row]], Iterator[Found]]
    reason: str  # why it holds here and not there
    on_cpu: str = ""  # the same for a CPU, where that is another reason

    def decided_by(self, facts: Mapping[str, Any]) -> bool:
        """Whether a row with these facts is one that decides it."""
        legal = {name: value if isinstance(value, tuple) else (value,) for name, value in self.wants.items()}
        return all(facts.get(name) in values for name, values in legal.items())


def _gain(rows: Sequence[Row], *, clock: str, over: str = "loop", by: str = "strided") -> Iterator[Found]:
    """Time of one method over that of another: torch's by the claim's clock first, then other libraries and clocks."""
    for name in dict.fromkeys((clock, "device", "wall", "submit", "profiled")):
        for library in ("torch", "isogemm", "numpy"):
            for row in sorted(rows, key=lambda row: -row["facts"].get("k", 0)):
                timed = times(row, name)
                if {f"{over} {library}", f"{by} {library}"} <= set(timed):
                    ratio = timed[f"{over} {library}"]["median"] / timed[f"{by} {library}"]["median"]
                    yield f"{library}, {name} time, {row['name'].partition(': ')[2]}", ratio


def _formats(rows: Sequence[Row]) -> Iterator[Found]:
    """Time of FP16 over that of Q4_0, for each shape."""
    by = {(row["facts"]["n"], row["facts"]["k"], row["facts"]["format"]): row for row in rows}
    for (n, k, kind), row in by.items():
        other = by.get((n, k, "Q4_0"))
        if kind == "F16" and other:
            way = "together isogemm"
            yield f"isogemm, {n} x {k}", times(row)[way]["median"] / times(other)[way]["median"]


def _extents(rows: Sequence[Row]) -> Iterator[Found]:
    """Time of 251 columns over that of 256, for each library."""
    by = {row["facts"]["shape"]: times(row) for row in rows}
    even, odd = by.get(EVEN, {}), by.get(ODD, {})
    for library in ("torch", "isogemm", "numpy"):
        if library in even and library in odd:
            yield f"{library}, {ODD}", odd[library]["median"] / even[library]["median"]


def _crossing(rows: Sequence[Row]) -> Iterator[Found]:
    swept = {(row["facts"]["n"], row["facts"]["k"]) for row in rows if row["facts"]["m"] > 1}
    for n, k in swept:
        own = [row for row in rows if (row["facts"]["n"], row["facts"]["k"]) == (n, k)]
        by = {row["facts"]["m"]: times(row)["together isogemm"]["median"] for row in own}
        if min(by) == 1:
            yield f"isogemm, {n} x {k}, M up to {max(by)}", crossover(by)


def _other_bits(rows: Sequence[Row]) -> Iterator[Found]:
    for library in ("torch", "isogemm", "numpy"):
        found = [
            seen["from_own"]
            for row in rows
            for way, seen in row["correctness"].items()
            if way in (f"loop {library}", f"strided {library}")
        ]
        if found:
            yield f"{library}, loop against strided batch, {len(rows)} rows", float(sum(found))


EVEN, ODD = "256 x 256 x 256", "256 x 251 x 256"
FIRST = "Llama-3.1-8B"  # of three models that say the same
LARGE = {"mode": "fp32", "k": (2, 4, 8, 16)}
PROFILER = "A profiler that replays kernels has a price for each launch, so a loop of k launches looks k times slower."
NO_LAUNCH = (
    "A CPU launches nothing: a loop pays a call, microseconds, for each product, and no profiler stands between."
)
BUSY = "One product keeps all of a CPU's cores busy, so a batch has nothing left to fill."
HEADS = "A head's product is too small to fill the machine, and a loop launches one after the other."
CLAIMS = (
    Claim(
        "a strided batch is 2.4x as fast as a loop at N = 1024", "four-methods", {"N": 1024, **LARGE}, 1.8, 3.0,
        partial(_gain, clock="device"), "It needs products that leave much of the machine idle when alone.",
        BUSY,
    ),
    Claim(
        "a batch is 20 to 30 % slower than a loop at N = 4096", "four-methods", {"N": 4096, **LARGE}, 0.70, 0.87,
        partial(_gain, clock="device"),
        "A library runs another kernel for a batch; one product of this size fills the machine alone.",
    ),
    Claim(
        "batching gains 330x by the wall at N = 1024", "four-methods", {"N": 1024, **LARGE}, 165, 660,
        partial(_gain, clock="wall"), PROFILER, NO_LAUNCH,
    ),
    Claim(
        "batching gains 150x by the wall at N = 2560", "four-methods", {"N": 2560, **LARGE}, 75, 300,
        partial(_gain, clock="wall"), PROFILER, NO_LAUNCH,
    ),
    Claim(
        "batching gains 20x by the wall at N = 4096", "four-methods", {"N": 4096, **LARGE}, 10, 40,
        partial(_gain, clock="wall"), PROFILER, NO_LAUNCH,
    ),
    Claim(
        "attention's batch is 2.5x as fast as a loop in training at T = 1024", "attention",
        {"phase": "training", "product": "scores", "T": 1024}, 1.9, 3.1, partial(_gain, clock="device"), HEADS,
        BUSY,
    ),
    Claim(
        "attention's batch is 7.3 to 8.6x as fast as a loop in decode at T = 1024", "attention",
        {"phase": "decode", "product": "scores", "T": 1024}, 5.5, 10.8, partial(_gain, clock="device"), HEADS,
        NO_LAUNCH,
    ),
    Claim(
        "attention's batch gains 35 to 150x by the wall", "attention",
        {"phase": ("training", "decode"), "product": "scores", "T": 1024}, 35, 150, partial(_gain, clock="wall"),
        PROFILER, NO_LAUNCH,
    ),
    Claim(
        "a batched gemv of M = 4 rows is 4x as fast as 4 gemvs", "decode",
        {"part": "weights", "format": "F16", "m": 4}, 3.0, 5.0,
        partial(_gain, clock="device", over="one by one", by="together"),
        "The weight is read once in place of four times; where it stays in a cache, less is gained.",
        "The weight is read once in place of four times, but after a few rows a CPU's arithmetic takes the time.",
    ),
    Claim(
        "a Q4_0 gemv is 3.6x as fast as one of FP16", "decode", {"part": "weights", "m": 1, "format": ("F16", "Q4_0")},
        2.7, 4.5, _formats,
        "18 bytes in place of 64 for 32 weights: time follows bytes where memory is what is waited for.",
    ),
    Claim(
        "arithmetic takes over from memory at M = 16 to 64", "decode", {"part": "weights", "format": "F16"}, 16, 64,
        _crossing,
        "It is where the intensity meets the machine's ridge: few rows on a CPU, hundreds on a GPU with tensor cores.",
    ),
    Claim(
        "an extent of 251 is slower than one of 256", "prefill", {"part": "alignment", "shape": (EVEN, ODD)}, 1.05,
        float("inf"), _extents,
        "Rows of the result no longer begin at 16 bytes, which matters to kernels that copy 16 bytes at a time.",
    ),
    Claim(
        "an array of pointers costs time at small batches", "pointers", {"N": 64, "k": 4}, 1.05, float("inf"),
        partial(_gain, clock="device", over="pointers", by="strided"),
        "A list is looked at item by item on the host; on the device a pointer is one more read.",
    ),
    Claim(
        "PEDANTIC math gives 0 different bits", "four-methods", {"mode": "fp32", "k": 2}, 0, 0, _other_bits,
        "It rules out TF32, not another order of additions: a loop and a batch may run different kernels.",
    ),
)  # fmt: skip


def cases(site: Site, quick: bool) -> list[StudyCase]:
    """The cases of other studies that decide a claim."""
    found = []
    for name in dict.fromkeys(claim.study for claim in CLAIMS):
        own = [claim for claim in CLAIMS if claim.study == name]
        for case in study(name).cases(site, quick):
            if _decides(own, case.facts):
                found.append(replace(case, key=f"{name}: {case.key}", facts={**case.facts, "study": name}))
    return found


def _decides(claims: Sequence[Claim], facts: Mapping[str, Any]) -> bool:
    return facts.get("model", FIRST) == FIRST and any(claim.decided_by(facts) for claim in claims)


def claims_of(runs: Sequence[StudyRun]) -> list[StudyRun]:
    """A run of claims for each machine that has none, out of the rows of its other studies."""
    found: dict[str, StudyRun] = {}
    own = {run.site["name"] for run in runs if run.study == STUDY.name}
    for run in runs:
        deciding = [claim for claim in CLAIMS if claim.study == run.study]
        rows = [row for row in measured(run.rows) if _decides(deciding, row["facts"])]
        if rows and run.site["name"] not in own:
            known = found.setdefault(run.site["name"], replace(run, study=STUDY.name, rows=[], left_out={}))
            for row in rows:
                facts = {**row["facts"], "study": run.study}
                known.rows.append({**row, "name": f"{run.study}: {row['name']}", "facts": facts})
    return list(found.values())


def judge(claim: Claim, rows: Sequence[Row]) -> tuple[str, list[Found]]:
    """The verdict, and the numbers behind it: the claim's own, and the one seen elsewhere."""
    seen = list(claim.values([row for row in rows if claim.decided_by(row["facts"])]))
    if not seen:
        return MISSING, []
    inside = [found for found in seen if claim.low <= found[1] <= claim.high]
    if seen[0] in inside:
        return HOLDS, seen[:1]
    return (ELSEWHERE, [seen[0], inside[0]]) if inside else (NOT, seen[:1])


def figures(rows: Sequence[Row]) -> list[Figure]:
    """The table of claims, and facts that need no machine."""
    table, counts = [], dict.fromkeys((HOLDS, ELSEWHERE, NOT, MISSING), 0)
    for claim in CLAIMS:
        own = [row for row in rows if row["facts"]["study"] == claim.study]
        verdict, seen = judge(claim, own)
        counts[verdict] += 1
        command = next((row["command"] for row in own if claim.decided_by(row["facts"])), "isogemm study claims")
        on_cpu = bool(seen) and own[0]["clock"] == "wall"  # a GPU's rows have the device's clock
        said = "; ".join(f"{number(value)} ({where})" for where, value in seen) or MISSING
        table.append(
            {
                "claim": claim.text,
                "here": said,
                "verdict": verdict,
                "reason": (on_cpu and claim.on_cpu) or claim.reason,
                "command": command,
            }
        )
    title = f"{len(CLAIMS)} published numbers: " + ", ".join(f"{word}: {count}" for word, count in counts.items())
    sentence = (
        "A number holds within a quarter of what was published, by the wall within half to double. Where it holds "
        "elsewhere, the second number says by which clock or library."
    )
    facts = mended_facts()
    said = f"{len(facts)} statements of the sources are wrong on any machine"
    return [
        Figure(title, None, sentence, table),
        Figure(said, None, "Each value is computed as the page is made.", facts),
    ]


STUDY = Study("claims", "Which published numbers hold on this machine?", cases, figures)
