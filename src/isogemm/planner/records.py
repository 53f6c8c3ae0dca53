"""Verdicts of this user, kept a file each, and what is said once in a process."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..base.disk import read_own, write_whole

SCHEMA = "isogemm.admission.v2"
MOST, OFTEN = 16384, 256  # files; and those that a process writes before it looks how many there are

log = logging.getLogger("isogemm")
_said: set[str] = set()


def notice(text: str, about: str = "") -> None:
    """Say something once in this process, to the logger ``isogemm``; of several texts `about` one thing, the first."""
    if (about or text) not in _said:
        _said.add(about or text)
        log.warning(text)


def today() -> str:
    """The date of a verdict."""
    return datetime.now(UTC).date().isoformat()


class Records:
    """Verdicts of this user, a file each: writers never meet, and a damaged file costs one trial.

    Without a folder nothing is kept. Of a folder's files those that were read or written last are, `MOST` or some more:
    processes look with their first record and now and then, as products whose K is the tokens so far never end.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder, self._written = folder, 0

    def get(self, key: Mapping[str, Any]) -> dict[str, str] | None:
        """What was recorded under exactly this key, if it can be read."""
        if self.folder is None:
            return None
        path = self._path(key)
        found = _read(path)
        if not found or found[0] != dict(key):
            return None
        with suppress(OSError):
            os.utime(path)
        return found[1]

    def each(self) -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
        """Everything on record, (key, value); files that are no records are passed over."""
        paths = sorted(self.folder.glob("*.json")) if self.folder else ()
        yield from filter(None, map(_read, paths))

    def put(self, key: Mapping[str, Any], value: Mapping[str, str]) -> None:
        """Record; where nothing can be written the next process tries again."""
        if self.folder is None:
            return
        try:
            text = json.dumps({"schema": SCHEMA, "key": dict(key), "value": dict(value)})
            write_whole(self._path(key), text, lasting=False)
        except OSError as error:
            notice(f"admissions are not kept, every process tries its kernels anew: {error}")
            return
        if self._written % OFTEN == 0:
            self._thin()
        self._written += 1

    def _thin(self) -> None:
        """Remove what was used longest ago, beyond the limit; other processes may do so, and files may be others'."""
        assert self.folder is not None
        ages: dict[Path, float] = {}
        for path in self.folder.glob("*.json"):
            with suppress(OSError):
                ages[path] = path.stat().st_mtime
        for path in sorted(ages, key=ages.__getitem__)[: max(0, len(ages) - MOST)]:
            with suppress(OSError):
                path.unlink()

    def _path(self, key: Mapping[str, Any]) -> Path:
        assert self.folder is not None
        return self.folder / f"{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]}.json"


def _read(path: Path) -> tuple[dict[str, Any], dict[str, str]] | None:
    try:
        content = json.loads(read_own(path) or b"")
    except (ValueError, RecursionError):  # of what nests too deeply to be read
        return None
    match content:
        case {"schema": str(schema), "key": dict(key), "value": dict(value)} if schema == SCHEMA:
            return (key, value) if all(isinstance(x, str) for x in value.values()) else None
    return None
