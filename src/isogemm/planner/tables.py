"""Tuning tables: which kernel was fastest where, and which were admitted, as JSON that is checked field by field."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

from ..base.disk import data_folder
from ..errors import IsogemmError
from ..problem.numeric import NumericKey, numeric_key
from ..problem.product import Product

SCHEMA = "isogemm.tuning.v1"


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


@dataclass(frozen=True, slots=True)
class Admitted:
    """Configurations of one family whose bits were right for a variant of products, with the date of the trial."""

    family: str
    fingerprint: str
    variant: str
    configs: tuple[str, ...]
    date: str


@dataclass(frozen=True, slots=True)
class LibraryRange:
    """A library's algorithm whose bits were right for one product, packed in memory, and rows in [low, high]."""

    family: str
    fingerprint: str
    key: NumericKey
    variant: str
    config: str
    low: int
    high: int
    date: str


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """Measured limits of the device: memory traffic, and operations per second by arithmetic; 0 where not measured."""

    memory_gb_per_second: float
    tflops: Mapping[str, float]


@dataclass(frozen=True)
class Table:
    """One device's measurements."""

    name: str  # the file's name
    stamp: Mapping[str, str]  # device, driver and libraries of the run that made it
    made: str  # date
    arithmetic: str = ""  # the tensor cores' arithmetic as found by its bits; empty where it was not looked for
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
    """A kernel that may be right for a product."""

    use: Use
    reason: str  # why it is considered
    table: Table | None = None  # where it stands
    row: TunedRow | None = None  # its row: of exactly this product, or of one nearby
    # microseconds, where exactly this N and K were timed and it was the fastest, or where a model says them
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


def hints_of(table: Table, row: TunedRow, m: int, nearby: str = "") -> Iterator[Hint]:
    """The kernels that a row has for `m`, the fastest first; `nearby` says which other product it is of, if it is."""
    for i, use in enumerate(row.bucket(m).uses):
        timed = row.microseconds(m) if i == 0 and not nearby else None
        yield Hint(use, nearby or f"table {table.name}", table, row, timed)


def recommended(tables: Sequence[Table], product: Product) -> Iterator[Hint]:
    """From the product's own row, table by table; then from the nearest rows, by the same buckets of M."""
    key = numeric_key(product)
    for table in tables:
        row = table.row(key)
        if row is not None:
            yield from hints_of(table, row, product.m)
    for table in tables:
        for row in nearest_rows(table, key):
            near = f"n {row.key.n}, k {row.key.k}" + (f", batch {row.key.batch}" if row.key.batch > 1 else "")
            yield from hints_of(table, row, product.m, f"default: as for {near} in {table.name}")


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
    what = f"tuning table {path.name}"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TableError(what, limit="JSON", value=str(error), nearest="delete it and run isogemm tune") from error
    schema = content.get("schema", "nothing") if isinstance(content, dict) else content
    if schema != SCHEMA:
        raise _wrong(f"{what}, field schema", SCHEMA, schema)
    parts = {name: kind for name, kind in _hints(Table).items() if name != "name"}
    return Table(
        path.name, **{name: _read(kind, content.get(name), f"{what}, field {name}") for name, kind in parts.items()}
    )


def dump(table: Table) -> str:
    """Its JSON, as `_read` takes it: a row to a line, so that differences can be read."""
    content = {"schema": SCHEMA, **asdict(table)}
    content["rows"] = [{**row.pop("key"), **row} for row in content["rows"]]
    lists = {name: content.pop(name) for name in ("rows", "admitted", "library")}
    head = {name: content[name] for name in ("schema", "made", "stamp", "arithmetic", "ceilings")}
    text = json.dumps(head, indent=1)[:-2]
    for name, items in lists.items():
        body = ",\n  ".join(json.dumps(item) for item in items)
        text += f',\n "{name}": [' + (f"\n  {body}\n ]" if items else "]")
    return text + "\n}\n"


_hints = cache(get_type_hints)


def _read(kind: Any, x: Any, where: str) -> Any:
    """JSON as what a type says, or `TableError`: dataclasses are objects, named tuples lists, numbers not negative."""
    if kind is str:
        return _of(str, x, where)
    if kind is int or kind is float:
        if isinstance(x, bool) or not isinstance(x, (int, kind)) or not 0 <= x < 2**63:
            raise _wrong(where, f"a {'whole ' * (kind is int)}number from 0 on, below 2**63", x)
        return kind(x)
    if kind is TunedRow:
        return _row(x, where)
    if get_origin(kind) is tuple:
        item = get_args(kind)[0]
        return tuple([_read(item, y, f"{where}[{i}]") for i, y in enumerate(_of(list, x, where))])
    if get_origin(kind) is Mapping:
        key, value = get_args(kind)
        if key is int and not all(name.isdecimal() and len(name) < 19 for name in _of(dict, x, where)):
            raise _wrong(where, "whole numbers as keys", list(x))
        return {key(name): _read(value, y, f"{where}.{name}") for name, y in _of(dict, x, where).items()}
    parts = _hints(kind)
    if issubclass(kind, tuple):
        if len(_of(list, x, where)) != len(parts):
            raise _wrong(where, f"[{', '.join(parts)}]", x)
        x = dict(zip(parts, x, strict=True))
    found = _of(dict, x, where)
    return kind(*[_read(part, found.get(name), f"{where}.{name}") for name, part in parts.items()])


def _row(x: Any, where: str) -> TunedRow:
    """A row, which has the fields of its key beside its own."""
    key = _read(NumericKey, x, where)
    buckets = _read(tuple[Bucket, ...], x.get("buckets"), f"{where}.buckets")
    ms = [bucket.m for bucket in buckets]
    if not ms or ms != sorted(set(ms)):
        raise _wrong(f"{where}.buckets", "one or more, with ascending m", ms)
    for i, bucket in enumerate(buckets):
        if not bucket.uses:
            raise _wrong(f"{where}.buckets[{i}]", "[m, [[family, config], ...]]", bucket)
    return TunedRow(key, buckets, _read(Mapping[int, float], x.get("us"), f"{where}.us"))


def _of(kind: type, x: Any, where: str) -> Any:
    if not isinstance(x, kind):
        raise _wrong(where, f"a {kind.__name__}", x)
    return x


def _wrong(where: str, limit: str, value: object) -> TableError:
    text = repr(value)
    shown = text if len(text) < 80 else text[:77] + "..."
    return TableError(where, limit=limit, value=shown, nearest="delete the file and run isogemm tune")
