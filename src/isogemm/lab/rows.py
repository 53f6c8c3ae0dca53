"""Results as JSON: rows that say how to repeat them, in a file that says where they were measured."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..base.disk import read_object, write_whole
from ..errors import OptionError
from .ceilings import Ceilings, Work
from .timing import Timing
from .verdicts import Verdict

SCHEMA = "isogemm.lab.v1"


def row(
    name: str,
    *,
    command: str,
    timings: Mapping[str, Timing],
    verdicts: Sequence[Verdict] = (),
    kernel: str | Mapping[str, str] | None = None,
    correctness: Mapping[str, Any] | None = None,
    work: Work | Mapping[str, Work] | None = None,
    ceilings: Ceilings | None = None,
    seed: int | None = None,
    clocks: Mapping[str, Mapping[str, Timing]] | None = None,
    **facts: Any,
) -> dict[str, Any]:
    """One measured case as a JSON-ready dict.

    Parameters
    ----------
    name : str
        The case.
    command : str
        The line that measures this case again.
    timings : mapping of str to Timing
        Every candidate; times in seconds per call.
    verdicts : sequence of Verdict
        Comparisons made from those timings.
    kernel : str or mapping of str to str, optional
        What computed our side, or each candidate.
    correctness : mapping, optional
        What was compared with the reference, and how many bit patterns differed.
    work : Work or mapping of str to Work, optional
        Of all candidates, or of each. Adds flop/s and byte/s to each timing; with `ceilings` also its share of the
        roofline.
    seed : int, optional
        Of the operands.
    clocks : mapping of str to mapping, optional
        What other clocks said of the same candidates.
    **facts
        Anything else, for example shapes and dtypes.
    """
    each = work if isinstance(work, Mapping) else dict.fromkeys(timings, work)
    done = {key: None if value is None else asdict(value) for key, value in each.items()}
    others = {
        clock: {key: _timing(t, None, None) for key, t in found.items()} for clock, found in (clocks or {}).items()
    }
    return {
        "name": name,
        "command": command,
        "seed": seed,
        **facts,
        "kernel": dict(kernel) if isinstance(kernel, Mapping) else kernel,
        "correctness": None if correctness is None else dict(correctness),
        "work": done if isinstance(work, Mapping) else None if work is None else asdict(work),
        "timings": {key: _timing(value, each.get(key), ceilings) for key, value in timings.items()},
        **({"clocks": others} if clocks is not None else {}),
        "verdicts": [asdict(v) for v in verdicts],
    }


def _timing(timing: Timing, work: Work | None, ceilings: Ceilings | None) -> dict[str, Any]:
    facts = {key: value for key, value in asdict(timing).items() if key != "name"}
    facts["samples"] = list(timing.samples)
    if work is not None:
        facts["gflop_per_second"] = work.flops / timing.median / 1e9
        facts["gb_per_second"] = work.nbytes / timing.median / 1e9
        if ceilings is not None:
            facts["roofline"] = ceilings.fraction(work, timing.median)
    return facts


def write_json(
    path: str | Path,
    rows: Sequence[Mapping[str, Any]],
    *,
    environment: Mapping[str, Any],
    schema: str = SCHEMA,
    **facts: Any,
) -> Path:
    """Write rows, a line each, and their environment as one JSON object; a reader never sees half a file.

    Parameters
    ----------
    path : path
        Replaced in one step when everything is on disk; missing folders are made.
    rows : sequence of mapping
        From `row`.
    environment : mapping
        From `environment`.
    schema : str
        Name and version of the format.
    **facts
        Further keys beside ``schema``, ``environment`` and ``rows``.

    Returns
    -------
    Path
        Of the file.

    Raises
    ------
    OptionError
        A value that JSON cannot hold (NaN and infinities are refused); an existing file is left as it was.
    OSError
        The folder cannot be written.
    """
    try:
        head = json.dumps({"schema": schema, "environment": environment, **facts}, indent=1, allow_nan=False)
        lines = ",\n".join(json.dumps(row, allow_nan=False) for row in rows)
    except (TypeError, ValueError) as error:
        raise OptionError(
            "results", limit="values of JSON", value=str(error), nearest="numbers, strings, None"
        ) from error
    return write_whole(path, f'{head[:-2]},\n "rows": [\n{lines}\n ]\n}}\n')


def read_json(path: str | Path, *, schema: str = SCHEMA) -> dict[str, Any]:
    """Read what `write_json` wrote.

    Raises
    ------
    OptionError
        The file cannot be read, is not JSON, or of another schema.
    """
    content = read_object("results file", path, "another file, or measure again")
    if content.get("schema") != schema:
        raise OptionError(f"schema of {path}", limit=schema, value=repr(content.get("schema")), nearest=schema)
    return content
