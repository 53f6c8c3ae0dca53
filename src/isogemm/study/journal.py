"""Rows on disk as they come: a run that was stopped goes on, and a run of another kind is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import OptionError

ROWS = "rows.jsonl"
# Of what kind fields are that every stamp has, and every row.
STAMP = {"study": str, "options": dict, "machine": dict}
ROW = {"name": str, "command": str, "facts": dict, "clock": str, "error": str | None, "absent": dict, "timings": dict}


class Journal:
    """``rows.jsonl`` of a folder, which is made where it is missing: a stamp, and after it one row a line.

    The stamp is what all rows of a folder have in common: study, options, machine, version. The environment is kept
    beside the first run's; it may be another when that goes on. Raises OptionError: the folder has rows of another
    study, machine, version or option.
    """

    def __init__(self, folder: Path, stamp: Mapping[str, Any], environment: Mapping[str, Any]) -> None:
        self.path = folder / ROWS
        self.rows: dict[str, dict[str, Any]] = {}
        folder.mkdir(parents=True, exist_ok=True)
        found = whole_lines(self.path)
        if not found:
            self._append({**stamp, "environment": environment})
            return
        _same(found[0], stamp, folder)
        self.rows |= {row["name"]: row for row in found[1:]}

    def add(self, row: Mapping[str, Any]) -> None:
        """Keep a row; it is on disk, whole, when this returns."""
        self._append(row)
        self.rows[row["name"]] = dict(row)

    def _append(self, value: Mapping[str, Any]) -> None:
        line = json.dumps(value, allow_nan=False) + "\n"
        with open(self.path, "ab") as file:
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())


def read_rows(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The stamp of a folder, and its rows so far; as `whole_lines`."""
    found = whole_lines(folder / ROWS)
    if not found:
        raise _damaged(folder / ROWS, 1, "no stamp")
    return found[0], found[1:]


def lacking(found: Any, kinds: Mapping[str, Any]) -> str:
    """The first field that an object has not, or has of another kind, in words; empty where there is none."""
    if not isinstance(found, dict):
        return "no object of JSON"
    wrong = (name for name, kind in kinds.items() if name not in found or not isinstance(found[name], kind))
    return next((f"no {name}, or one of another kind" for name in wrong), "")


def _damaged(path: Path, line: int, why: object) -> OptionError:
    value = f"{path}, line {line} ({why})"
    return OptionError("rows of a study", limit="objects of JSON, each whole", value=value, nearest="another --out")


def whole_lines(path: Path) -> list[dict[str, Any]]:
    """What is on lines that were written to their end, stamp and rows; what a stop cut short is taken away.

    Raises OptionError, which names the line: the file is damaged.
    """
    if not path.exists():
        return []
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        os.truncate(path, len(whole))
    found = []
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            found.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise _damaged(path, number, f"{type(error).__name__}: {error}") from error
        if why := lacking(found[-1], STAMP if number == 1 else ROW):
            raise _damaged(path, number, why)
    return found


def _same(found: Mapping[str, Any], wanted: Mapping[str, Any], folder: Path) -> None:
    for name, value in wanted.items():
        if found.get(name) != value:
            raise OptionError(
                f"{folder} has rows of another {name}", limit=found.get(name), value=value, nearest="another --out"
            )
