"""The kernel cache: stamped with every source, where it is kept, what is said and counted while compiling."""

from __future__ import annotations

import gc
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import isogemm
from isogemm.base import jit

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="XDG_CACHE_HOME moves the cache")
PACKAGE = Path(isogemm.__file__).parent
COMPILE = """
import sys
import isogemm.base.jit as jit

@jit.njit
def double(x):
    return x + x

@jit.njit
def part(x):
    return double(x) - x

def entry(x):
    return part(x) - x

from numba import types
assert jit.compile_seconds() == 0
{announce}
assert double(21) == 42
assert jit.compile_entry(types.int64(types.int64), entry).ctypes(7) == 0
print(jit.cache_directory())
print(jit.compile_seconds())
"""


@pytest.fixture
def module(tmp_path: Path) -> Path:
    """A script in a file, as the cache wants it, that takes the package's name for its own functions."""
    return tmp_path / "script.py"


def run(script: Path, **env: str) -> tuple[list[str], str]:
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=300, env=os.environ | env
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n"), done.stderr


@pytest.mark.parametrize(
    "name",
    ["base/jit.py", "contract/arithmetic.py", "formats/blocks.py", "backends/cpu/gemm/micro.py", "backends/cpu/new.py"],
)
def test_stamp_changes_with_every_kernel_source(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(PACKAGE, tmp_path / "isogemm", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(jit, "__file__", str(tmp_path / "isogemm" / "base" / "jit.py"))
    fresh = jit.source_stamp.__wrapped__
    before = fresh()
    assert before == fresh() == jit.source_stamp()
    file = tmp_path / "isogemm" / name
    file.write_text((file.read_text() if file.exists() else "") + "# another\n")
    assert fresh() != before


def test_stamp_ignores_times_and_other_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wheels have reproducible times: content decides, and the audit is no kernel."""
    shutil.copytree(PACKAGE, tmp_path / "isogemm", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(jit, "__file__", str(tmp_path / "isogemm" / "base" / "jit.py"))
    os.utime(tmp_path / "isogemm/backends/cpu/gemm/micro.py", (0, 0))
    (tmp_path / "isogemm/api/products.py").write_text("another")
    assert jit.source_stamp.__wrapped__() == jit.source_stamp()


def test_stamp_covers_every_module_that_compiles() -> None:
    """A kernel outside the stamped sources would be stale after an upgrade; the demo's rows make no products."""
    imports = re.compile(r"from \.+(?:base\.)?jit import .*\b(njit|compile_entry)\b")
    compiles = {f.relative_to(PACKAGE) for f in PACKAGE.rglob("*.py") if imports.search(f.read_text())}
    assert len(compiles) > 8
    for file in compiles - {Path("demo/rows.py")}:
        assert {parent.as_posix() for parent in file.parents} & set(jit._SOURCES), file


def test_cache_directory_names_version_and_stamp(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert jit.cache_directory().name == f"kernels-{isogemm.__version__}-{jit.source_stamp()}"
    if sys.platform == "linux":
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert jit.cache_directory.__wrapped__().parent == tmp_path / "isogemm"


@LINUX
def test_compiled_once_counted_and_kept(module: Path, tmp_path: Path) -> None:
    module.write_text(COMPILE.format(announce=""))
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    (folder, seconds, _), _ = run(module, **cache)
    assert Path(folder).is_relative_to(tmp_path / "cache")
    assert float(seconds) > 0
    # What Python or C calls; a function that only kernels call is compiled within them.
    names = {re.sub(r"-\w+", "", f.name) for f in Path(folder).rglob("*") if f.is_file()}
    assert names == {"double.kernel", "entry.kernel"}
    (_, again, _), said = run(module, **cache)
    assert (float(again), said) == (0.0, "")  # from the cache, in silence


@LINUX
def test_a_long_compilation_is_announced_once(module: Path, tmp_path: Path) -> None:
    module.write_text(COMPILE.format(announce="jit.ANNOUNCE_AFTER = 0.0"))
    _, said = run(module, XDG_CACHE_HOME=str(tmp_path / "cache"))
    (line,) = said.splitlines()
    assert line.startswith("isogemm: compiling kernels for this CPU that are not in the cache yet; ")
    assert " they are kept in " in line
    assert str(tmp_path / "cache") in line


@LINUX
def test_what_is_not_kept_is_not_said_to_be(module: Path, tmp_path: Path) -> None:
    """Kernels that probe a machine are compiled in every process."""
    module.write_text("__name__ = 'isogemm.probe'\nfrom isogemm.base import jit\njit.listen()\n"
                      "assert jit.dispatcher(lambda x: x + x)(21) == 42\nprint(jit.compile_seconds() > 0)")  # fmt: skip
    assert run(module, XDG_CACHE_HOME=str(tmp_path / "cache"))[1] == ""


@LINUX
def test_processes_of_one_command_announce_it_once_together(module: Path, tmp_path: Path) -> None:
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    others = [tmp_path / f"{name}.py" for name in ("second", "rank", "later")]
    for script in (module, *others):  # other sources, so each of them compiles
        script.write_text(COMPILE.format(announce="jit.ANNOUNCE_AFTER = 0.0") + f"# {script}\n")
    assert "compiling" in run(module, **cache)[1]
    assert run(others[0], **cache)[1] == ""
    (mark,) = (tmp_path / "cache" / "isogemm").glob(".said-*")
    mark.unlink()
    assert run(others[1], LOCAL_RANK="1", **cache)[1] == ""
    mark.touch()
    long_ago = mark.stat().st_mtime - jit.SAID_SECONDS - 60
    os.utime(mark, (long_ago, long_ago))
    assert "compiling" in run(others[2], **cache)[1]


@LINUX
def test_without_any_cache_kernels_work_and_it_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder can be made here")
    text = COMPILE.format(announce="")
    env = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "file")}
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[1]) > 0
    assert "isogemm: kernels are not cached, every process compiles them anew" in done.stderr


@pytest.mark.parametrize("collects", [True, False])
@pytest.mark.parametrize("fails", [False, True])
def test_the_collector_waits_for_the_compiler_and_is_as_it_was(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, collects: bool, fails: bool
) -> None:
    from numba import types
    from numba.core import event

    monkeypatch.setattr(jit, "cache_directory", lambda: tmp_path)
    seen = []

    class Watch(event.Listener):
        def on_start(self, record: object) -> None:
            seen.append(gc.isenabled())

        def on_end(self, record: object) -> None:
            pass

    def entry(x):
        return missing(x) if fails else x  # noqa: F821

    before = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        with event.install_listener("numba:run_pass", Watch()):
            for compile_it in (lambda: jit.njit(entry)(3), lambda: jit.compile_entry(types.int64(types.int64), entry)):
                seen.clear()
                try:
                    compile_it()
                except Exception:
                    assert fails
                assert seen
                assert not any(seen)
                assert gc.isenabled() == collects
    finally:
        (gc.enable if before else gc.disable)()
