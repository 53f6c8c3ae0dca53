"""The cache of kernels in bad company: no disk, a full one, read-only or damaged files, other settings of Numba's.

Each test defines the functions of a file anew where a second process would, so that what was kept is what can serve.
"""

from __future__ import annotations

import builtins
import errno
import importlib.util
import os
import shutil
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numba
import numpy as np
import platformdirs
import pytest
from numba.core import config

from isogemm.backends.cuda.driver import nvrtc
from isogemm.base import disk, jit
from isogemm.errors import OptionError
from isogemm.lab import admissions, probes
from isogemm.planner.tables import user_table_path

SOURCE = """
import isogemm.base.jit as jit
from numba import types

@jit.njit
def double(x):
    return x + x

def _entry(x):
    return double(x) - x

entry = jit.compile_entry(types.int64(types.int64), _entry)
"""


WHERE = jit.cache_directory.__wrapped__
NAME = "isogemm.some_kernels"  # what is ours is counted


class Process:
    """A file of kernels as one process sees it."""

    def __init__(self, path: Path) -> None:
        spec = importlib.util.spec_from_file_location(NAME, path)
        assert spec is not None
        assert spec.loader is not None
        before = jit.compile_seconds()
        self.module = sys.modules[NAME] = importlib.util.module_from_spec(spec)  # entries name it
        spec.loader.exec_module(self.module)
        assert self.module.double(21) == 42
        assert self.module.double(0.25) == 0.5
        assert self.module.entry.ctypes(7) == 7
        self.compiled = jit.compile_seconds() > before


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "cache" / "kernels"
    monkeypatch.setattr(jit, "cache_directory", lambda: place)
    monkeypatch.setattr(disk, "_said", set())  # each test hears what is said once
    return place


@pytest.fixture
def process(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Process]:
    (tmp_path / "sources").mkdir()
    file = tmp_path / "sources" / "some_kernels.py"
    file.write_text(SOURCE)
    monkeypatch.setitem(sys.modules, NAME, None)
    return lambda: Process(file)


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def fails(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Callable[[int], None]:
    """From then on nothing can be written below the cache; for a full disk, files can be made, but not filled."""

    def below(path: Any) -> bool:
        return isinstance(path, str | os.PathLike) and Path(path).is_relative_to(folder.parent)

    def refuse(name: str, module: Any, number: int, when: Callable[..., bool]) -> None:
        real = getattr(module, name)

        def call(path: Any, *args: Any, **options: Any) -> Any:
            if below(path) and when(*args, *options.values()):
                raise OSError(number, os.strerror(number), str(path))
            return real(path, *args, **options)

        monkeypatch.setattr(module, name, call)

    def start(number: int) -> None:
        refuse("open", builtins, number, lambda mode="r", *rest: bool(set(str(mode)) & set("wax+")))
        monkeypatch.setattr("io.open", builtins.open)
        if number != errno.ENOSPC:
            refuse("open", os, number, lambda flags, *rest: bool(flags & (os.O_WRONLY | os.O_RDWR)))
            refuse("mkdir", os, number, lambda *rest: True)
            refuse("replace", os, number, lambda *rest: True)
            refuse("access", os, number, lambda mode, *rest: False)
            monkeypatch.setattr(os, "access", lambda path, mode, **rest: not (below(path) and mode & os.W_OK))

    return start


def test_what_is_kept_serves_and_is_readable_to_others(process: Callable[[], Process], folder: Path) -> None:
    before = os.umask(0o022)
    try:
        assert process().compiled
    finally:
        os.umask(before)
    assert not process().compiled
    assert len(files(folder)) >= 3
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in files(folder))


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_cache_that_cannot_be_written_serves(
    process: Callable[[], Process], fails: Callable[[int], None], capfd: pytest.CaptureFixture[str], number: int
) -> None:
    process()
    capfd.readouterr()
    fails(number)
    assert not process().compiled
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_disk_that_takes_nothing_costs_the_cache_alone(
    process: Callable[[], Process],
    fails: Callable[[int], None],
    folder: Path,
    capfd: pytest.CaptureFixture[str],
    number: int,
) -> None:
    fails(number)
    assert process().compiled
    said = [line for line in capfd.readouterr().err.splitlines() if "not cached" in line]
    assert len(said) == 1, said
    assert os.strerror(number) in said[0]
    assert files(folder.parent) == []


def test_a_folder_that_cannot_be_made(
    process: Callable[[], Process], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """/proc refuses root too, who has every right there; a file where a folder should be refuses anyone."""
    (tmp_path / "file").touch()
    for place in (Path("/proc/isogemm/kernels"), tmp_path / "file" / "kernels"):
        monkeypatch.setattr(jit, "_said", False)
        monkeypatch.setattr(jit, "cache_directory", lambda place=place: place)
        assert process().compiled
        jit.announce()
        assert "kept" not in capfd.readouterr().err
    assert [path.name for path in files(tmp_path) if "__pycache__" not in path.parts] == ["file", "some_kernels.py"]
    assert [path for path in files(tmp_path) if path.suffix != ".pyc" and "__pycache__" in path.parts] == []


DAMAGE: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "one bit": lambda path: path.write_bytes(_flipped(path.read_bytes())),
    "other bytes": lambda path: path.write_bytes(b"\x80\x05.garbage" * 100),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


def _flipped(data: bytes) -> bytes:
    at = len(data) // 2
    return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]


@pytest.mark.parametrize("damage", DAMAGE, ids=str)
def test_damage_costs_a_compilation(process: Callable[[], Process], folder: Path, damage: str) -> None:
    process()
    for path in files(folder):
        DAMAGE[damage](path)
    assert process().compiled
    if damage != "a folder":  # what is no file is nobody's to remove
        assert not process().compiled


def test_entries_of_another_function_are_not_taken(process: Callable[[], Process], folder: Path) -> None:
    """Whole files under wrong names: a backup put back by hand."""
    process()
    first, *rest = files(folder)
    for path in rest:
        shutil.copy(first, path)
    assert process().compiled
    assert not process().compiled


def test_a_folder_that_vanishes_is_made_again(process: Callable[[], Process], folder: Path) -> None:
    early = process().module
    shutil.rmtree(folder.parent)
    assert early.double(1j) == 2j
    assert files(folder)
    shutil.rmtree(folder.parent)
    assert process().compiled
    assert not process().compiled


def test_a_write_that_is_interrupted_leaves_nothing(
    process: Callable[[], Process], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            process()
    assert files(folder.parent) == []
    assert process().compiled


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="files have no such owners here")
def test_entries_of_another_user_are_not_run(
    process: Callable[[], Process], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process()
    user = os.geteuid()
    if user == 0:
        for path in files(folder):
            os.chown(path, 4242, -1)
    monkeypatch.setattr(os, "geteuid", lambda: 4343)
    assert process().compiled
    if user == 0:
        assert not process().compiled  # root's are trusted, as its programs are


class Watched(types.ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        raise AssertionError(f"numba.config.{name} was set")


@pytest.fixture
def watched() -> Iterator[None]:
    """Numba's configuration, which raises when it is set: whoever shares the process has it too."""
    before = config.__class__
    config.__class__ = Watched
    try:
        yield
    finally:
        object.__setattr__(config, "__class__", before)


def test_numba_s_configuration_is_left_alone(process: Callable[[], Process], watched: None) -> None:
    process()
    process()


def test_numba_s_settings_of_its_cache_are_not_ours(
    process: Callable[[], Process], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path / "numba"))
    monkeypatch.setattr(config, "CACHE_LOCATOR_CLASSES", "InTreeCacheLocator", raising=False)
    assert process().compiled
    assert files(folder)
    assert not (tmp_path / "numba").exists()
    assert [path for path in files(tmp_path / "sources") if path.suffix not in (".py", ".pyc")] == []


def test_without_compilation_what_is_kept_serves_and_what_is_not_is_an_error(
    process: Callable[[], Process], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NUMBA_DISABLE_JIT: a user steps through functions of their own; instructions have no form in Python."""
    monkeypatch.setattr(config, "DISABLE_JIT", 1)
    assert isinstance(numba.njit(lambda x: x), types.FunctionType)
    with pytest.raises(OptionError, match=r"NUMBA_DISABLE_JIT: limit: 0, .*nearest legal choice: the same calls once"):
        process()
    assert files(folder) == []
    with monkeypatch.context() as patch:
        patch.setattr(config, "DISABLE_JIT", 0)
        assert process().compiled
    assert not process().compiled
    assert probes.add_kernel.__wrapped__()(np.arange(5)) == 10
    assert probes.multiply_add_kernel.__wrapped__()[0](3) > 0


def test_settings_that_change_code_have_entries_of_their_own(
    process: Callable[[], Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    process()
    with monkeypatch.context() as patch:
        patch.setattr(config, "LOOP_VECTORIZE", 0)
        assert process().compiled
    assert not process().compiled


def _no_home(*_: Any, **__: Any) -> str:
    raise RuntimeError("could not determine the home directory")


@pytest.mark.parametrize("answer", [_no_home, lambda *_, **__: "~/.cache/isogemm"], ids=["newer", "older"])
def test_without_a_home_nothing_is_kept_where_the_process_stands(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    process: Callable[[], Process],
    capfd: pytest.CaptureFixture[str],
    answer: Callable[..., str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(platformdirs, "user_cache_dir", answer)
    monkeypatch.setattr(platformdirs, "user_data_dir", answer)
    monkeypatch.setattr(jit, "cache_directory", WHERE)
    assert process().compiled
    assert not (tmp_path / "~").exists()
    assert "not cached" in capfd.readouterr().err
    assert user_table_path("a GPU") is None
    assert nvrtc.cache_directory() is None
    assert list(admissions.read(admissions.folder())) == []
