"""Tables: values that survive their JSON, errors that name file and field, look-ups by key and by likeness."""

from __future__ import annotations

import json
import multiprocessing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.planner.fakes import H200, linear

from isogemm.base.disk import write_whole
from isogemm.errors import IsogemmError
from isogemm.planner.tables import (
    Admitted,
    Bucket,
    DeviceLimits,
    LibraryRange,
    Table,
    TableError,
    TunedRow,
    Use,
    dump,
    load,
    nearest_rows,
    shipped_tables,
    user_table_path,
)
from isogemm.problem.numeric import NumericKey, numeric_key

KEY = numeric_key(linear(1, 4096, 2560))
ROW = TunedRow(
    KEY, (Bucket(16, (Use("f", "a"), Use("g", "b"))), Bucket(4096, (Use("g", "c"),))), {1: 7.5, 16: 8.5, 4096: 99}
)
TABLE = Table(
    "t.json",
    H200,
    "2026-11-21",
    "tensor_core:sm90",
    DeviceLimits(3900.5, {"tensor_core": 800.0}),
    (ROW, replace(ROW, key=replace(KEY, n=512, batch=32))),
    (Admitted("f", "1234", "tensor_core:sm90/chain ...", ("a", "b"), "2026-11-21"),),
    (LibraryRange("library", "5678", KEY, "variant", "algo", 5, 64, "2026-11-21"),),
)


def written(folder: Path, content: Any) -> Path:
    path = folder / "t.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_a_table_survives_its_file(tmp_path: Path) -> None:
    assert load(written(tmp_path, dump(TABLE))) == TABLE
    assert load(written(tmp_path, dump(Table("t.json", {}, "")))) == Table("t.json", {}, "")


def test_a_row_is_a_line() -> None:
    lines = dump(TABLE).splitlines()
    assert sum('"n": 4096' in line for line in lines) == 2  # a row, and a library's key


def test_a_changed_file_is_read_anew(tmp_path: Path) -> None:
    path = written(tmp_path, dump(TABLE))
    load(path)
    written(tmp_path, dump(replace(TABLE, made="tomorrow")))
    assert load(path).made == "tomorrow"


DAMAGE: dict[str, Any] = {
    "schema": lambda t: t.update(schema="isogemm.tuning.v0"),
    "stamp.driver": lambda t: t["stamp"].update(driver=580),
    "made": lambda t: t.pop("made"),
    "arithmetic": lambda t: t.update(arithmetic=None),
    "ceilings.memory_gb_per_second": lambda t: t["ceilings"].update(memory_gb_per_second="fast"),
    "ceilings.tflops.tensor_core": lambda t: t["ceilings"]["tflops"].update(tensor_core=-1),
    "rows": lambda t: t.update(rows={}),
    "rows[0].k": lambda t: t["rows"][0].update(k=True),
    "rows[0].n": lambda t: t["rows"][0].update(n=-4),
    "rows[1].layout": lambda t: t["rows"][1].pop("layout"),
    "rows[0].buckets": lambda t: t["rows"][0].update(buckets=[]),
    "rows[0].buckets[0]": lambda t: t["rows"][0]["buckets"][0].__setitem__(1, []),
    "rows[0].buckets[1].uses[1]": lambda t: t["rows"][0]["buckets"][1][1].append(["f"]),
    "rows[0].us.16": lambda t: t["rows"][0]["us"].update({"16": None}),
    "rows[0].us.4096": lambda t: t["rows"][0]["us"].update({"4096": 10**400}),
    "rows[0].us": lambda t: t["rows"][0]["us"].update({"many": 1.0}),
    "rows[1].us": lambda t: t["rows"][1]["us"].update({"9" * 5000: 1.0}),
    "rows[1].n": lambda t: t["rows"][1].update(n=10**400),
    "admitted[0].configs[0]": lambda t: t["admitted"][0].update(configs=[1]),
    "admitted[0].variant": lambda t: t["admitted"][0].pop("variant"),
    "library[0].low": lambda t: t["library"][0].update(low="1"),
    "library[0].key.contract": lambda t: t["library"][0]["key"].pop("contract"),
}


@pytest.mark.parametrize("field", DAMAGE)
def test_damage_is_an_error_that_names_file_and_field(tmp_path: Path, field: str) -> None:
    content = json.loads(dump(TABLE))
    DAMAGE[field](content)
    with pytest.raises(TableError, match=r"t\.json") as error:
        load(written(tmp_path, content))
    assert error.value.what.endswith(f"field {field}")
    assert isinstance(error.value, IsogemmError)


def test_buckets_have_to_ascend(tmp_path: Path) -> None:
    content = json.loads(dump(TABLE))
    content["rows"][0]["buckets"].reverse()
    with pytest.raises(TableError, match="ascending"):
        load(written(tmp_path, content))


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"schema": 7}', "\x00"])
def test_what_is_no_table_is_an_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(TableError, match=r"t\.json"):
        load(written(tmp_path, text))


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="No such file"):
        load(tmp_path / "absent.json")


def test_buckets_and_times() -> None:
    assert [ROW.bucket(m).m for m in (1, 16, 17, 4096, 9999)] == [16, 16, 4096, 4096, 4096]
    assert ROW.microseconds(16) == 8.5
    assert ROW.microseconds(8) == pytest.approx(7.5 + 7 / 15)
    assert ROW.microseconds(5000) is None


def test_look_up_is_exact() -> None:
    assert TABLE.row(KEY) is ROW
    assert TABLE.row(replace(KEY, k=2561)) is None
    assert TABLE.row(replace(KEY, epilogue="accumulate")) is None


def row(**changes: Any) -> TunedRow:
    return replace(ROW, key=replace(KEY, **changes))


def test_the_nearest_rows_are_alike_first_and_close_then() -> None:
    rows = [
        row(n=4000, contract="tensor_core:sm90/leaf4096"),
        row(n=8192),
        row(n=4096, k=2560, layout="TN>N"),
        row(n=5000),
        row(types="float16*float16>float16"),
        row(contract="fma/chain"),
    ]
    found = nearest_rows(replace(TABLE, rows=tuple(rows)), KEY, 9)
    assert found == [rows[3], rows[1], rows[0], rows[2], rows[4]]
    assert all(r.key.arithmetic == "tensor_core:sm90" for r in found)


def test_the_key_has_no_m() -> None:
    assert "m" not in NumericKey.__dataclass_fields__
    product = linear(1, 4096, 2560)
    assert {numeric_key(product.with_m(m)) for m in (1, 2, 77, 4096)} == {KEY}
    assert "m 7" not in str(KEY)


def _write(path: str, made: str) -> None:
    for _ in range(50):
        write_whole(Path(path), dump(replace(TABLE, made=made)))


def test_a_reader_sees_a_whole_table_while_others_write(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    write_whole(path, dump(TABLE))
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write, args=(str(path), made)) for made in ("one", "two")]
    for writer in writers:
        writer.start()
    seen = set()
    while any(w.is_alive() for w in writers):
        seen.add(load(path).made)
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert seen <= {"one", "two", "2026-11-21"}
    assert [p.name for p in tmp_path.iterdir()] == ["t.json"]


def test_a_failed_write_leaves_the_old_table(tmp_path: Path) -> None:
    path = written(tmp_path, dump(TABLE))
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "\ud800")
    assert load(path) == TABLE
    assert [p.name for p in tmp_path.iterdir()] == ["t.json"]


def test_the_user_s_table_has_the_device_s_name() -> None:
    path = user_table_path("NVIDIA H200")
    assert path is not None
    assert path.name == "nvidia-h200.json"


def test_shipped_tables_are_sound() -> None:
    for table in shipped_tables():
        assert table.stamp["device"]
        assert table.rows
        assert table.arithmetic.startswith("tensor_core:")
        named = {use for r in table.rows for b in r.buckets for use in b.uses}
        assert named >= {Use(x.family, c) for x in table.admitted for c in x.configs}
