"""Tuning tables: which kernel was fastest where, and which were admitted, as JSON that is checked field by field."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ..base.disk import data_folder
from ..errors import IsogemmError
from ..problem.numeric import NumericKey, numeric_key
from ..problem.product import Product

__all__ = [
    "SCHEMA",
    "Admitted",
    "Bucket",
    "DeviceLimits",
    "Hint",
    "LibraryRange",
    "Table",
    "TableError",
    "TunedRow",
    "Use",
    "dump",
    "load",
    "nearest_rows",
    "recommended",
    "shipped_tables",
    "user_table_path",
]  # fmt: skip

SCHEMA = "isogemm.tuning.v1"
T = TypeVar("T")


class TableError(IsogemmError, ValueError):
    """A tuning table cannot be read; the message names the file and the field."""


class Use(NamedTuple):
    """A kernel: a family and one of its configurations."""

    family: str
    config: str


class Bucket(NamedTuple):
    """The kernels for rows up to `m`, the fastest first."""

    m: int
    uses: tuple[Use, ...]


@dataclass(frozen=True, slots=True)
class TunedRow:
    """One product without M, the kernels by buckets of M (ascending), and microseconds at each M that was timed."""

    key: NumericKey
    buckets: tuple[Bucket, ...]
    us: Mapping[int, float]

    def bucket(self, m: int) -> Bucket:
        """The bucket of `m`; the last one also serves everything beyond it."""
        return next((b for b in self.buckets if m <= b.m), self.buckets[-1])

    def microseconds(self, m: int) -> float | None:
        """Time at `m`: measured, or drawn between measured neighbours; None beyond them."""
        if m in self.us:
            return self.us[m]
        below, above = [x for x in self.us if x < m], [x for x in self.us if x > m]
        if not below or not above:
            return None
        low, high = max(below), min(above)
        return self.us[low] + (self.us[high] - self.us[low]) * (m - low) / (high - low)


class Admitted(NamedTuple):
    """Configurations of one family whose bits were right for a variant of products, with the date of the trial."""

    family: str
    fingerprint: str
    variant: str
    configs: tuple[str, ...]
    date: str


class LibraryRange(NamedTuple):
    """A library's algorithm whose bits were right for one product, packed in memory, and rows in [low, high]."""

    family: str
    fingerprint: str
    key: NumericKey
    variant: str
    config: str
    low: int
    high: int
    date: str


class DeviceLimits(NamedTuple):
    """Measured limits of the device: memory traffic, and operations per second by arithmetic; 0 where not measured."""

    memory_gb_per_second: float
    tflops: Mapping[str, float]


@dataclass(frozen=True)
class Table:
    """One device's measurements.

    Attributes
    ----------
    name : str
        The file's name.
    stamp : mapping of str to str
        Device, driver and libraries of the run that made it.
    made : str
        Date.
    arithmetic : str
        The tensor cores' arithmetic as found by its bits; empty where it was not looked for.
    ceilings : DeviceLimits
    rows : tuple of TunedRow
    admitted : tuple of Admitted
    library : tuple of LibraryRange
    """

    name: str
    stamp: Mapping[str, str]
    made: str
    arithmetic: str = ""
    ceilings: DeviceLimits = field(default_factory=lambda: DeviceLimits(0.0, {}))
    rows: tuple[TunedRow, ...] = ()
    admitted: tuple[Admitted, ...] = ()
    library: tuple[LibraryRange, ...] = ()

    @cached_property
    def _rows(self) -> dict[NumericKey, TunedRow]:
        return {row.key: row for row in self.rows}

    @cached_property
    def _ranges(self) -> dict[NumericKey, list[LibraryRange]]:
        found: dict[NumericKey, list[LibraryRange]] = {}
        for entry in self.library:
            found.setdefault(entry.key, []).append(entry)
        return found

    def row(self, key: NumericKey) -> TunedRow | None:
        """The row of exactly this key."""
        return self._rows.get(key)

    def library_of(self, key: NumericKey) -> Sequence[LibraryRange]:
        """A library's algorithms on record for exactly this key."""
        return self._ranges.get(key, ())


class Hint(NamedTuple):
    """A kernel that may be right for a product.

    Attributes
    ----------
    use : Use
    reason : str
        Why it is considered.
    table : Table or None
        Where it stands.
    row : TunedRow or None
        Its row: of exactly this product, or of one nearby.
    expected_us : float or None
        Microseconds, where exactly this N and K were timed and it was the fastest.
    """

    use: Use
    reason: str
    table: Table | None = None
    row: TunedRow | None = None
    expected_us: float | None = None


def nearest_rows(table: Table, key: NumericKey, most: int = 3) -> list[TunedRow]:
    """Rows of the same arithmetic: the likest in types, layout and order first, then the closest in N and K."""

    def distance(row: TunedRow) -> tuple[int, float]:
        other = row.key
        unlike = sum(
            weight * (x != y)
            for weight, x, y in (
                (8, key.types.partition(">")[0], other.types.partition(">")[0]),
                (4, key.batch > 1, other.batch > 1),
                (4, key.layout, other.layout),
                (2, key.contract, other.contract),
                (1, key.types, other.types),
                (1, key.epilogue, other.epilogue),
            )
        )
        sizes = ((key.n, other.n), (key.k, other.k), (key.batch, other.batch))
        return unlike, sum(abs(math.log2(max(1, x) / max(1, y))) for x, y in sizes)

    return sorted((r for r in table.rows if r.key.arithmetic == key.arithmetic), key=distance)[:most]


def recommended(tables: Sequence[Table], product: Product) -> Iterator[Hint]:
    """From the product's own row, table by table; then from the nearest rows, by the same buckets of M."""
    key = numeric_key(product)
    seen: set[Use] = set()

    def of(table: Table, row: TunedRow, reason: str, *, exact: bool) -> Iterator[Hint]:
        for i, use in enumerate(row.bucket(product.m).uses):
            if use not in seen:
                seen.add(use)
                timed = row.microseconds(product.m) if exact and i == 0 else None
                yield Hint(use, reason, table, row, timed)

    for table in tables:
        row = table.row(key)
        if row is not None:
            yield from of(table, row, f"table {table.name}", exact=True)
    for table in tables:
        for row in nearest_rows(table, key):
            near = f"n {row.key.n}, k {row.key.k}" + (f", batch {row.key.batch}" if row.key.batch > 1 else "")
            yield from of(table, row, f"default: as for {near} in {table.name}", exact=False)


def shipped_tables() -> tuple[Table, ...]:
    """Every table in the package."""
    folder = Path(__file__).parent / "tables"
    return tuple(load(path) for path in sorted(folder.glob("*.json")))


def user_table_path(device_name: str) -> Path | None:
    """Where `isogemm tune` keeps this user's table for a device; None where there is no place for it."""
    slug = re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")
    folder = data_folder("tables")
    return folder and folder / f"{slug}.json"


def load(path: Path) -> Table:
    """The table in a file, read once for each state of the file.

    Raises
    ------
    TableError
        Not readable, not JSON, another schema, or a field that is missing or of the wrong kind.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise TableError("tuning table", limit="a readable file", value=str(error), nearest="isogemm tune") from error
    return _load(path, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=32)
def _load(path: Path, mtime: int, size: int) -> Table:
    del mtime, size
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TableError(
            f"tuning table {path.name}", limit="JSON", value=str(error), nearest="delete it and run isogemm tune"
        ) from error
    return _Reader(path.name).table(content)


def dump(table: Table) -> str:
    """Its JSON: a row to a line, so that differences can be read."""
    head = {
        "schema": SCHEMA,
        "made": table.made,
        "stamp": dict(table.stamp),
        "arithmetic": table.arithmetic,
        "ceilings": table.ceilings._asdict(),
    }
    lists: dict[str, list[Any]] = {
        "rows": [
            {
                **asdict(r.key),
                "buckets": [[b.m, [list(u) for u in b.uses]] for b in r.buckets],
                "us": {str(m): t for m, t in r.us.items()},
            }
            for r in table.rows
        ],
        "admitted": [a._asdict() for a in table.admitted],
        "library": [{**x._asdict(), "key": asdict(x.key)} for x in table.library],
    }
    text = json.dumps(head, indent=1)[:-2]
    for name, items in lists.items():
        body = ",\n  ".join(json.dumps(item) for item in items)
        text += f',\n "{name}": [' + (f"\n  {body}\n ]" if items else "]")
    return text + "\n}\n"


class _Reader:
    """Checks each field and names the one that is wrong."""

    def __init__(self, name: str) -> None:
        self.name = name

    def wrong(self, where: str, limit: str, value: object) -> TableError:
        text = repr(value)
        return TableError(
            f"tuning table {self.name}, field {where}",
            limit=limit,
            value=text if len(text) < 80 else text[:77] + "...",
            nearest="delete the file and run isogemm tune",
        )

    def get(self, content: Any, name: str, kind: type[T], where: str) -> T:
        if not isinstance(content, dict) or name not in content:
            raise self.wrong(f"{where}{name}", f"a {kind.__name__}", "nothing")
        value = content[name]
        if not isinstance(value, kind) or isinstance(value, bool):
            raise self.wrong(f"{where}{name}", f"a {kind.__name__}", value)
        return value

    def number(self, value: Any, where: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value >= 0):
            raise self.wrong(where, "a number of at least 0", value)
        return float(value)

    def count(self, value: Any, where: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.wrong(where, "a whole number of at least 0", value)
        return value

    def table(self, content: Any) -> Table:
        if not isinstance(content, dict) or content.get("schema") != SCHEMA:
            found = content.get("schema", "nothing") if isinstance(content, dict) else content
            raise self.wrong("schema", SCHEMA, found)
        stamp = self.get(content, "stamp", dict, "")
        for name, value in stamp.items():
            if not isinstance(value, str):
                raise self.wrong(f"stamp.{name}", "a str", value)
        return Table(
            self.name,
            stamp,
            self.get(content, "made", str, ""),
            self.get(content, "arithmetic", str, ""),
            self.ceilings(self.get(content, "ceilings", dict, "")),
            self.each(content, "rows", self.row),
            self.each(content, "admitted", self.admitted),
            self.each(content, "library", self.library),
        )

    def each(self, content: Any, name: str, read: Callable[[Any, str], T]) -> tuple[T, ...]:
        return tuple(read(item, f"{name}[{i}].") for i, item in enumerate(self.get(content, name, list, "")))

    def ceilings(self, content: Any) -> DeviceLimits:
        memory = self.number(content.get("memory_gb_per_second", 0.0), "ceilings.memory_gb_per_second")
        peaks = self.get(content, "tflops", dict, "ceilings.")
        return DeviceLimits(memory, {n: self.number(v, f"ceilings.tflops.{n}") for n, v in peaks.items()})

    def key(self, content: Any, where: str) -> NumericKey:
        values: dict[str, Any] = {}
        for f in fields(NumericKey):
            value = self.get(content, f.name, int if f.type == "int" else str, where)
            values[f.name] = self.count(value, where + f.name) if isinstance(value, int) else value
        return NumericKey(**values)

    def row(self, content: Any, where: str) -> TunedRow:
        key = self.key(content, where)
        buckets = tuple(
            self.bucket(b, f"{where}buckets[{i}]") for i, b in enumerate(self.get(content, "buckets", list, where))
        )
        if not buckets or [b.m for b in buckets] != sorted({b.m for b in buckets}):
            raise self.wrong(f"{where}buckets", "one or more, with ascending m", [b.m for b in buckets])
        times: dict[int, float] = {}
        for m, value in self.get(content, "us", dict, where).items():
            if not m.isdecimal():
                raise self.wrong(f"{where}us", "a whole number as key", m)
            times[int(m)] = self.number(value, f"{where}us.{m}")
        return TunedRow(key, buckets, times)

    def bucket(self, content: Any, where: str) -> Bucket:
        if not isinstance(content, list) or len(content) != 2 or not isinstance(content[1], list) or not content[1]:
            raise self.wrong(where, "[m, [[family, config], ...]]", content)
        for use in content[1]:
            if not isinstance(use, list) or len(use) != 2 or not all(isinstance(x, str) for x in use):
                raise self.wrong(where, "[family, config]", use)
        return Bucket(self.count(content[0], where), tuple(Use(*use) for use in content[1]))

    def admitted(self, content: Any, where: str) -> Admitted:
        family, fingerprint, variant, date = (
            self.get(content, n, str, where) for n in ("family", "fingerprint", "variant", "date")
        )
        configs = self.get(content, "configs", list, where)
        if not all(isinstance(c, str) for c in configs):
            raise self.wrong(f"{where}configs", "a list of str", configs)
        return Admitted(family, fingerprint, variant, tuple(configs), date)

    def library(self, content: Any, where: str) -> LibraryRange:
        family, fingerprint, variant, config, date = (
            self.get(content, n, str, where) for n in ("family", "fingerprint", "variant", "config", "date")
        )
        low, high = (self.count(self.get(content, n, int, where), where + n) for n in ("low", "high"))
        key = self.key(self.get(content, "key", dict, where), f"{where}key.")
        return LibraryRange(family, fingerprint, key, variant, config, low, high, date)
