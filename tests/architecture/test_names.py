"""Names: one class, one name; words that do not say what they are name nothing; file sizes."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

import isogemm

ROOT = Path(isogemm.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
# They were names of modules and classes here, and nobody could tell from them what was behind.
SAYS_NOTHING = {"ghost", "given", "space", "front", "defined", "fields", "stacks", "recorded", "place"}


def definitions(path: Path) -> list[str]:
    """Public classes and functions of a file."""
    kinds = ast.ClassDef | ast.FunctionDef
    return [node.name for node in ast.parse(path.read_text()).body if isinstance(node, kinds)]


def classes() -> Counter[str]:
    nodes = (node for path in FILES for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef))
    return Counter(node.name for node in nodes if not node.name.startswith("_"))


def test_one_class_one_name():
    assert [name for name, count in classes().items() if count > 1] == []


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_names_say_what_they_are(path):
    assert path.stem not in SAYS_NOTHING
    assert not {name for name in definitions(path) if name.lower().strip("_") in SAYS_NOTHING}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_stay_readable(path):
    assert len(path.read_text().splitlines()) <= 500


def test_folders_say_what_is_in_them():
    assert not [
        path for path in FILES if path.name == "__init__.py" and not ast.get_docstring(ast.parse(path.read_text()))
    ]
