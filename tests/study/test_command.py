"""``isogemm study``: what it prints and writes, and how it ends."""

from __future__ import annotations

import json
import sys

import pytest
from tests.study import fakes

from isogemm.base import extras
from isogemm.cli import commands


@pytest.fixture
def isogemm(run, monkeypatch):
    """The command with a study of nothing on a machine that needs no time."""
    queue, fails = fakes.Queue(), []
    declared = fakes.study(queue, fails=lambda k: fails and k == 2 and fails[0]())
    monkeypatch.setattr("isogemm.lab.clock.time", queue.time)
    monkeypatch.setattr("isogemm.study.catalog.study", lambda name: declared)
    monkeypatch.setattr("isogemm.study.page.study", lambda name: declared)
    monkeypatch.setattr("isogemm.study.site.open_site", lambda device: fakes.site(queue))

    def call(*words):
        return run("study", *words)

    call.fails = fails
    return call


def test_rows_and_page_are_written(isogemm, tmp_path):
    pytest.importorskip("vl_convert")
    status, out, _ = isogemm("fake", "--out", str(tmp_path))
    assert status == 0
    assert {path.name for path in tmp_path.iterdir()} == {"fake.json", "rows.jsonl", "index.html"}
    rows, written = out.splitlines()
    assert rows.startswith(f"Rows: {tmp_path}/fake.json (3 in 0 s; the longest, k=")
    assert written == f"Page: {tmp_path}/index.html"
    status, out, _ = isogemm("report", str(tmp_path), str(tmp_path), "--out", str(tmp_path / "both"))
    assert status == 0
    assert (tmp_path / "both" / "index.html").read_text().count("<h3>a queue</h3>") == 2


def test_a_run_that_was_stopped_is_reported_with_the_rows_it_left(isogemm, tmp_path):
    pytest.importorskip("vl_convert")
    isogemm("fake", "--out", str(tmp_path / "fake"))
    (tmp_path / "fake" / "fake.json").unlink()
    stamp, *rows = (tmp_path / "fake" / "rows.jsonl").read_text().splitlines()
    (tmp_path / "fake" / "rows.jsonl").write_text("\n".join([stamp, rows[0], rows[1][:40]]))
    status, _, _ = isogemm("report", str(tmp_path), "--out", str(tmp_path / "page"))
    text = (tmp_path / "page" / "index.html").read_text()
    assert status == 0
    assert "the run was stopped; its command goes on from here" in text
    assert text.count("--case") == 1
    assert "One row finds nothing." in text
    assert "a finding" not in text


def test_without_the_extra_rows_are_written_and_one_line_says_how_to_get_the_page(isogemm, tmp_path, monkeypatch):
    monkeypatch.setattr(extras.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "altair", None)  # figures need it before the page does
    status, out, _ = isogemm("fake", "--out", str(tmp_path))
    assert status == 0
    assert json.loads((tmp_path / "fake.json").read_text())["rows"]
    assert "No page yet: the page needs altair" in out
    assert "the same command writes it" in out
    assert 'pip install "isogemm[report]"' in out
    assert not (tmp_path / "index.html").exists()


def test_a_stop_keeps_whole_rows_and_the_same_command_goes_on(isogemm, tmp_path):
    def stop():
        raise KeyboardInterrupt

    isogemm.fails.append(stop)
    status, _, err = isogemm("fake", "--out", str(tmp_path))
    assert (status, err.strip()) == (130, "isogemm: stopped; the same command goes on from here")
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 2
    isogemm.fails.clear()
    assert isogemm("fake", "--out", str(tmp_path))[0] == 0
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 4


def test_a_run_ends_at_its_time_limit_and_goes_on(isogemm, tmp_path, monkeypatch):
    pytest.importorskip("vl_convert")
    now = [0.0]
    monkeypatch.setattr("isogemm.study.engine.time.monotonic", lambda: now[0])
    isogemm.fails.append(lambda: now.__setitem__(0, 200.0))  # k=2 takes 200 s
    status, out, _ = isogemm("fake", "--out", str(tmp_path), "--time-limit", "150")
    assert status == 0
    assert "fake.json (2 in 200 s, 1 left out; the longest, k=2, 200.0 s: made 200.0)" in out
    text = (tmp_path / "index.html").read_text()
    assert "k=3: not reached within the time limit" in text
    assert "Not whole. Rows: 2; not reached: k=3. What is found is of these rows alone." in text
    status, out, _ = isogemm("fake", "--out", str(tmp_path))
    assert "(3 in 200 s; " in out
    assert len(json.loads((tmp_path / "fake.json").read_text())["rows"]) == 3


@pytest.mark.parametrize(
    ("others", "options", "said"),
    [
        (None, (), ""),
        (0.05, (), ""),
        (0.5, (), "Other programs kept 0.5 of 2 CPUs busy meanwhile: times are rough, bits are not; with --threads 1 "),
        (1.0, ("--threads", "1"), "Other programs kept 1 of 2 CPUs busy meanwhile: times are rough, bits are not"),
    ],
)
def test_other_programs_are_told_of(isogemm, tmp_path, monkeypatch, others, options, said):
    pytest.importorskip("vl_convert")
    monkeypatch.setattr("isogemm.study.engine.Others.mean", lambda self: others)
    stamp = {"cpu": {"usable": 2, "model": "", "core": ""}, "pools": [], "packages": {}}
    stamp |= {"date": "", "load": 0, "command": ""}
    monkeypatch.setattr("isogemm.study.engine.environment", lambda: stamp)
    status, _, err = isogemm("fake", "--out", str(tmp_path), *options)
    text = (tmp_path / "index.html").read_text()
    assert status == 0
    assert ("Other programs" in err, "Other programs" in text) == (bool(said), bool(said))
    assert said in err
    assert said in text
    assert ("suffer least" in text) == (bool(said) and not options)
    monkeypatch.setattr("isogemm.study.engine.Others.mean", lambda self: 0.0)  # a report has what was measured then
    isogemm("report", str(tmp_path), "--out", str(tmp_path / "page"))
    assert ("Other programs" in (tmp_path / "page" / "index.html").read_text()) == bool(said)


def test_what_other_programs_did_before_a_run_was_stopped_is_told_of(isogemm, tmp_path, monkeypatch):
    """Rows that were there have what was seen beside them, whatever is seen by the process that ends the run."""
    monkeypatch.setattr("isogemm.study.engine.Others.mean", lambda self: 1.5)
    isogemm("fake", "--out", str(tmp_path))
    (tmp_path / "fake.json").unlink()
    monkeypatch.setattr("isogemm.study.engine.Others.mean", lambda self: 0.0)
    isogemm("fake", "--out", str(tmp_path))
    assert json.loads((tmp_path / "fake.json").read_text())["environment"]["others"] == 1.5


def test_the_page_says_what_was_not_measured_and_why(isogemm, tmp_path):
    pytest.importorskip("vl_convert")

    def fail():
        raise RuntimeError("out of memory")

    isogemm.fails.append(fail)
    isogemm("fake", "--out", str(tmp_path))
    content = json.loads((tmp_path / "fake.json").read_text())
    content["rows"][0]["absent"] = {"loop": "OptionError: no such graph"}
    (tmp_path / "fake.json").write_text(json.dumps(content))
    isogemm("report", str(tmp_path), "--out", str(tmp_path / "page"))
    text = (tmp_path / "page" / "index.html").read_text()
    assert "<p>k=2: RuntimeError: out of memory</p><p>loop: OptionError: no such graph</p>" in text


def test_one_case_is_printed(isogemm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, _ = isogemm("fake", "--case", "k=2")
    assert status == 0
    assert "k=2: device time, median" in out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "said"),
    [((), "a name, report or --list"), (("fake", "x"), "one name"), (("report",), "one folder or more")],
)
def test_bad_usage(isogemm, words, said):
    status, _, err = isogemm(*words)
    assert status == 2
    assert said in err


def test_a_folder_without_studies_is_refused(isogemm, tmp_path):
    status, _, err = isogemm("report", str(tmp_path))
    assert status == 2
    assert "folders of finished studies" in err


@pytest.mark.parametrize("name", ["index.html", "fake.json"])
def test_a_folder_in_the_place_of_a_file_is_refused_before_the_work(isogemm, tmp_path, monkeypatch, name):
    monkeypatch.setattr("isogemm.study.site.open_site", lambda device: pytest.fail("ceilings are measured"))
    (tmp_path / name).mkdir()
    status, _, err = isogemm("fake", "--out", str(tmp_path))
    assert status == 2
    assert "cannot write: limit: a writable file" in err
    assert [file.name for file in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("line", ["{", "3", '{"name": 1', '{"no": "name"}', '{"name": "ieee 128"}', "[]", "\udcff"])
def test_a_damaged_row_is_named_by_file_and_line(isogemm, tmp_path, monkeypatch, line):
    isogemm("fake", "--out", str(tmp_path))
    (tmp_path / "fake.json").unlink()
    path = tmp_path / "rows.jsonl"
    stamp, *rows = path.read_text().splitlines()
    path.write_bytes("\n".join([stamp, rows[0], line, ""]).encode(errors="surrogateescape"))
    monkeypatch.setattr("isogemm.study.site.open_site", lambda device: pytest.fail("ceilings are measured"))
    for words in (("fake", "--out", str(tmp_path)), ("report", str(tmp_path), "--out", str(tmp_path / "page"))):
        status, _, err = isogemm(*words)
        assert status == 2
        assert f"{path}, line 3 (" in err
    path.write_text("")
    assert f"{path}, line 1 (no " in isogemm("report", str(tmp_path), "--out", str(tmp_path / "page"))[2]


@pytest.mark.parametrize("damage", ["{", '{"schema": "isogemm.study.v1"}', '{"schema": "other"}'])
def test_a_damaged_file_of_results_is_named(isogemm, tmp_path, damage):
    isogemm("fake", "--out", str(tmp_path))
    (tmp_path / "fake.json").write_text(damage)
    status, _, err = isogemm("report", str(tmp_path), "--out", str(tmp_path / "page"))
    assert status == 2
    assert str(tmp_path / "fake.json") in err


def refused(isogemm, path, field):
    page = path.parent / "page"
    status, _, err = isogemm("report", str(path.parent), "--out", str(page))
    assert status == 2
    assert str(path) in err
    assert field in err
    assert not page.exists()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((name, None) for name in ("study", "site", "rows", "options", "left_out", "environment")),
        ("rows", [{}]),
        ("rows", [None]),
        ("site", {}),
        ("options", {"speed": 3}),
    ],
)
def test_a_field_of_results_of_another_kind_is_named(isogemm, tmp_path, field, value):
    isogemm("fake", "--out", str(tmp_path))
    path = tmp_path / "fake.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    refused(isogemm, path, field)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((name, None) for name in ("study", "machine", "options", "environment")),
        ("machine", {}),
        ("options", {"speed": 3}),
    ],
)
def test_a_field_of_a_stamp_of_another_kind_is_named(isogemm, tmp_path, field, value):
    isogemm("fake", "--out", str(tmp_path))
    (tmp_path / "fake.json").unlink()
    path = tmp_path / "rows.jsonl"
    stamp, *rows = path.read_text().splitlines()
    path.write_text("\n".join([json.dumps(json.loads(stamp) | {field: value}), *rows, ""]))
    refused(isogemm, path, field)


def test_the_studies_are_listed(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["isogemm", "study", "--list"])
    with pytest.raises(SystemExit):
        commands.command_line()
    assert "four-methods      Is one batched product faster than a loop" in capsys.readouterr().out


def test_the_command_line_loads_no_study():
    from tests.architecture.test_imports import loaded_by

    assert not loaded_by("import isogemm.cli") & {"torch", "altair", "vl_convert", "numba"}
