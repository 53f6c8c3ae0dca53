"""Files that appear whole or not at all, and what is kept for later."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from isogemm.base import disk
from isogemm.errors import OptionError


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*"))


def test_a_file_has_the_mode_that_the_umask_gives(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        disk.write_whole(tmp_path / "deep" / "a.json", "Ω")
    finally:
        os.umask(before)
    assert (tmp_path / "deep" / "a.json").read_bytes() == "Ω".encode()
    assert (tmp_path / "deep" / "a.json").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), SystemExit(143)])
def test_what_ends_in_the_middle_leaves_the_file_that_was_there(tmp_path: Path, error: BaseException) -> None:
    (tmp_path / "a.json").write_text("before")

    def half(name: str) -> None:
        with disk.replacing(tmp_path / name) as part:
            part.write_text("half")
            assert (tmp_path / "a.json").read_text() == "before"
            raise error

    for name in ("a.json", "b.json"):
        with pytest.raises(type(error)):
            half(name)
    assert names(tmp_path) == ["a.json"]
    assert (tmp_path / "a.json").read_text() == "before"


def test_a_file_that_cannot_get_its_name_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(PermissionError):
        disk.write_whole(tmp_path / "a.json", "text")
    assert names(tmp_path) == []


def test_a_link_stays_and_its_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "a.json").symlink_to(tmp_path / "data" / "real.json")
    disk.check_room(tmp_path / "a.json")
    disk.write_whole(tmp_path / "a.json", "text")
    assert (tmp_path / "a.json").is_symlink()
    assert (tmp_path / "data" / "real.json").read_text() == "text"
    assert names(tmp_path / "data") == ["real.json"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no pipes with names")
def test_pipes_and_devices_are_written_to_and_stay(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append((tmp_path / "pipe").read_bytes()))
    reader.start()
    disk.check_room(tmp_path / "pipe")
    disk.write_whole(tmp_path / "pipe", "text")
    reader.join()
    assert found == [b"text"]
    assert names(tmp_path) == ["pipe"]
    disk.write_whole("/dev/null", "text")
    assert not Path("/dev/null").is_file()


def test_trying_leaves_nothing(tmp_path: Path) -> None:
    disk.check_room(tmp_path / "new" / "deep" / "a.json")
    disk.check_room(tmp_path / "a.json")
    assert names(tmp_path) == []
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file" / "a.json", "/proc/no/such/folder.json", "/proc/a.json"):
        with pytest.raises(OSError, match=r"."):
            disk.check_room(path)
    assert names(tmp_path) == ["file"]


def test_a_file_that_must_not_be_written_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.json").touch(0o444)
    monkeypatch.setattr(os, "access", lambda path, mode, **_: mode != os.W_OK)  # root may
    with pytest.raises(PermissionError):
        disk.check_room(tmp_path / "a.json")


@pytest.mark.parametrize(("value", "lines"), [("1", 0), ("0", 1)])
def test_what_is_not_kept_is_said_once_where_it_may_be(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, value: str, lines: int
) -> None:
    monkeypatch.setenv("ISOGEMM_QUIET", value)
    monkeypatch.setattr(disk, "_said", set())
    disk.say_not_kept("kernels", "no room")
    disk.say_not_kept("kernels", "no room")
    assert len(capsys.readouterr().err.splitlines()) == lines


@pytest.mark.parametrize("content", [None, b"{", b"[]", b"\xff", b"[" * 100_000])
def test_what_is_no_object_of_json_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "a.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(OptionError, match=rf"config: limit: .*{path}"):
        disk.read_object("config", path, "another")


def test_what_is_kept_comes_back_or_nothing_does(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "x"
    assert disk.kept(path) is None
    for data in (b"", b"code" * 1000):
        disk.keep(path, data)
        assert disk.kept(path) == data
    whole = path.read_bytes()
    for damaged in (b"", whole[:31], whole[:-1], whole + b"\0", whole[:50] + b"\xff" + whole[51:]):
        path.write_bytes(damaged)
        assert disk.kept(path) is None
    assert names(tmp_path) == ["cache", "x"]
