"""What ends the process of an audit, and what is left behind: no pass, and no half a file."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="signals end processes otherwise here")

PROVIDERS = """
import atexit, ctypes, os, time

def leaves(x, w):
    os._exit(0)

def crashes(x, w):
    ctypes.string_at(0)

def waits(x, w):
    with open("waits.pid", "w") as file:
        file.write(str(os.getpid()))
    time.sleep(1000)

def changes(x, w):
    atexit.register(os._exit, 0)
    return x @ w.T * x.dtype.type(1 + len(x) / 100)
"""
ENDS = {
    "leaves": (3, "the audit ended before its verdict"),
    "crashes": (3, "Segmentation fault"),
    "changes": (1, ""),
    "interrupted": (130, ""),
    "killed": (-9, ""),
}


def started(folder: Path, name: str) -> subprocess.Popen[str]:
    (folder / "mine.py").write_text(PROVIDERS)
    (folder / "s.csv").write_text("24,40\n")
    provider = name if f"def {name}(" in PROVIDERS else "waits"
    words = ["audit", "-p", f"mine.py:{provider}", "--no-speed", "--m", "1,2", "--shapes", "s.csv"]
    command = [sys.executable, "-m", "isogemm", *words, "--relation", "population", "--json", "out/r.json"]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, cwd=folder, stdout=pipe, stderr=pipe, text=True, start_new_session=True, preexec_fn=hears_interrupts
    )


def hears_interrupts() -> None:
    """A job in the background of a shell ignores them, and so would what it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 300
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline, path
        time.sleep(0.02)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Path, int, str]]]:
    """All of them at once: each costs two starts of Python."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ENDS}
    running = {name: started(folder, name) for name, folder in folders.items()}
    found = {}
    try:
        for name, process in running.items():
            if name in ("interrupted", "killed"):
                wait_for(folders[name] / "waits.pid")
            if name == "interrupted":
                os.killpg(process.pid, signal.SIGINT)  # as a terminal does
            if name == "killed":
                process.kill()
            # The audit has the pipes of the process that was killed: they are closed when it has ended, too.
            text = "".join(process.communicate(timeout=20 if name == "killed" else 300))
            found[name] = (folders[name], process.returncode, text)
        yield found
    finally:
        for process in running.values():
            if process.returncode is None:  # else its number may be another's
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@pytest.mark.parametrize("name", ENDS)
def test_the_status_is_that_of_a_verdict(ended: dict[str, tuple[Path, int, str]], name: str) -> None:
    _, status, text = ended[name]
    expected, message = ENDS[name]
    assert status == expected, text
    assert message in text
    assert "Traceback" not in text


@pytest.mark.parametrize("name", [name for name in ENDS if name != "changes"])
def test_nothing_is_left_behind(ended: dict[str, tuple[Path, int, str]], name: str) -> None:
    given = ("mine.py", "s.csv", "waits.pid", "__pycache__")
    assert [p.name for p in ended[name][0].iterdir() if p.name not in given] == []


def test_what_has_a_verdict_has_its_report(ended: dict[str, tuple[Path, int, str]]) -> None:
    """Whatever happens to the process behind it."""
    assert (ended["changes"][0] / "out" / "r.json").read_text().endswith("}\n")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc")
def test_the_audit_ends_with_the_process_that_waits_for_it(ended: dict[str, tuple[Path, int, str]]) -> None:
    place = Path("/proc") / (ended["killed"][0] / "waits.pid").read_text() / "stat"
    deadline = time.monotonic() + 20
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # ended, and somebody has asked how
        while place.read_text().split(") ")[1][0] != "Z":  # or nobody has
            assert time.monotonic() < deadline
            time.sleep(0.02)
