"""What a kernel is made of: the files of its folder, and all that they import and include.

Nothing is listed by hand, so nothing can be forgotten: the compilers' options stand in the files that call them, and
those are imported. A verdict on a kernel holds while this hash does.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
# What can reach a kernel's bits, or the verdict on them: kernels and their hosts, the definitions, and the trials.
REACHING = ("backends", "contract", "formats", "planner/bench.py", "planner/trials.py")
# How long kernels take, and which are worth timing: nothing else than a choice sees it.
TIMES = tuple(
    f"backends/cuda/gemm/{x}.py" for x in ("model", "hopper/model", "hopper/palette", "sgemm/model", "unaligned/model")
)
IMPORT = re.compile(r"^\s*from (\.+)([\w.]*) import (\([^)]*\)|[^\n#]+)", re.MULTILINE)
DEVICE_CODE = re.compile(r"[\w/]+\.cu\b")


def fingerprint(home: str, package: Path | None = None) -> str:
    """Hash over every file that `made_of` finds for the folder `home` of the package, or for one of its files."""
    return _hashed(home, package or PACKAGE)


@cache
def _hashed(home: str, package: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(made_of(home, package)):
        digest.update(f"{file}\0".encode())
        digest.update((package / file).read_bytes())
    return digest.hexdigest()[:16]


def made_of(home: str, package: Path = PACKAGE) -> set[str]:
    """Paths in the package of the sources under `home`, and of all that they import and include, directly or not."""
    start = package / home
    files = [start] if start.is_file() else [f for kind in ("*.py", "*.cu") for f in start.rglob(kind)]
    if not files:
        raise FileNotFoundError(f"no sources under {start}")
    waiting = [x for file in files if (x := file.relative_to(package).as_posix()) not in TIMES]
    found: set[str] = set()
    while waiting:
        file = waiting.pop()
        if file not in found:
            found.add(file)
            waiting += _named(file, package)
    return found


@cache
def _named(file: str, package: Path) -> tuple[str, ...]:
    """Files that a source names: modules that it imports, and device code wherever its path stands."""
    text = (package / file).read_text(encoding="utf-8")
    device = "/".join(Path(file).parts[:2])
    code = {f"{device}/{name}" for name in DEVICE_CODE.findall(text)}
    modules = set(_imported(file, text, package)) if file.endswith(".py") else set()
    return tuple(
        x for x in sorted(code | modules) if x.startswith(REACHING) and x not in TIMES and (package / x).is_file()
    )


def _imported(file: str, text: str, package: Path) -> Iterator[str]:
    folder = Path(file).parent.parts
    for dots, module, names in IMPORT.findall(text):
        base = (*folder[: len(folder) - len(dots) + 1], *(module.split(".") if module else ()))
        path = "/".join(base)
        yield f"{path}.py"
        if (package / path).is_dir():
            yield f"{path}/__init__.py"
            for name in re.findall(r"\w+", names):
                yield f"{path}/{name}.py"
