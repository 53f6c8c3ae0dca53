"""Imports point one way: api -> problem and planner -> backends -> contract; and importing has no side effects."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import isogemm

ROOT = Path(isogemm.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# Layers of the core, lowest first: a module imports its own layer and those below.
LAYERS = (
    {"disk", "errors", "_version", "__version__"},
    {"aliasing", "floating", "ghost", "given", "jit", "kernel_cache", "threads"},
    {"contract", "problem"},
    {"interop", "interop_cuda", "views"},
    {"backends", "planner", "quant"},
    {"space", "tensors"},
    {"dispatch", "describe", "blas", "api", "forms", "quantized", "quantized_cuda"},
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
# Readers of the core: nothing in the core imports them.
READERS = {"audit", "cli", "demo", "lab", "models", "torch", "weights", "__main__"}


def part(path: Path) -> str:
    """The part of the package that a file belongs to: its first folder, or its own name."""
    first = path.relative_to(ROOT).parts[0]
    return first.removesuffix(".py")


def imported(path: Path) -> set[tuple[str, int]]:
    """(part of the package, line) of everything of ours that a file imports, inside functions too."""
    package = ("isogemm", *path.relative_to(ROOT).parent.parts)
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{module}.{alias.name}" if module == "isogemm" else module for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "isogemm" and len(parts) > 1:
                found.add((parts[1], getattr(node, "lineno", 0)))
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_one_way(path):
    own = part(path)
    if own in READERS or own == "__init__":
        return
    assert own in LEVEL, f"{own} has no layer: give it one here"
    for other, line in imported(path):
        assert other not in READERS, f"{path}:{line} imports {other}, which reads the core"
        assert other in LEVEL, f"{path}:{line} imports {other}, which has no layer"
        assert LEVEL[other] <= LEVEL[own], f"{path}:{line}: {own} imports {other}, which is above it"


@pytest.mark.parametrize("own", ["contract", "problem"])
def test_contract_and_problem_stand_alone(own):
    """What the numbers are, and what is multiplied, know of nothing above the ground floor."""
    allowed = {own, "errors"} | ({"aliasing"} if own == "problem" else {"jit", "floating"})
    for path in FILES:
        if part(path) == own:
            assert {name for name, _ in imported(path)} <= allowed, path


def test_the_walk_sees_imports():
    assert {name for name, _ in imported(ROOT / "api.py")} >= {"backends", "contract", "dispatch"}
    assert {name for name, _ in imported(ROOT / "backends" / "cpu" / "execute.py")} >= {"contract"}


def loaded_by(code: str) -> set[str]:
    """Top-level modules in memory after `code` ran in a fresh interpreter."""
    script = f"{code}\nimport sys\nprint(*sorted({{m.split('.')[0] for m in sys.modules}}))"
    return set(
        subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.split()
    )


def test_importing_the_package_loads_nothing_heavy():
    heavy = {"altair", "llvmlite", "matplotlib", "numba", "pandas", "psutil", "rich", "torch", "typer"}
    assert not loaded_by("import isogemm; dir(isogemm); isogemm.Contract.parse('fma/chain')") & heavy


def test_the_products_load_no_reader():
    assert not loaded_by("import isogemm; isogemm.matmul") & {"altair", "rich", "torch", "typer"}


@pytest.mark.parametrize("name", isogemm.__all__)
def test_public_names_resolve_and_are_documented(name):
    value = getattr(isogemm, name)
    assert name in dir(isogemm)
    if name != "__version__":
        assert (value.__doc__ or "").strip()


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="no attribute 'gemmm'"):
        isogemm.gemmm  # noqa: B018


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_stay_readable(path):
    assert len(path.read_text().splitlines()) <= 500
