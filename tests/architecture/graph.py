"""Who imports whom in a package, read from its sources: imports inside functions count as those at the top do."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple


class Import(NamedTuple):
    """A module that another one imports, and where."""

    module: str
    line: int


def modules(package: Path) -> dict[str, Path]:
    """Dotted names of a package's modules, and their files; a folder goes by its own name."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name: str, known: Mapping[str, Path]) -> Iterator[Import]:
    """Modules among `known` that a module imports, whole or a name of theirs; for type checkers alone too."""
    path = known[name]
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno) for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                whole = f"{module}.{alias.name}"
                if whole in known or module in known:
                    yield Import(whole if whole in known else module, node.lineno)


def graph(known: Mapping[str, Path]) -> dict[str, set[str]]:
    """For each module the others that it imports."""
    return {name: {found.module for found in imports(name, known)} - {name} for name in known}


def circles(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other, directly or not (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in edges[name]:
            if other not in index:
                visit(other)
            if other in stack:
                low[name] = min(low[name], low[other])
        if low[name] == index[name]:
            at = stack.index(name)
            group, stack[at:] = stack[at:], []
            found.append(sorted(group))

    for name in edges:
        if name not in index:
            visit(name)
    return [group for group in found if len(group) > 1]


def longest_chain(edges: Mapping[str, set[str]]) -> list[str]:
    """The most modules of which each imports the next; there must be no circle."""
    chains: dict[str, list[str]] = {}

    def chain(name: str) -> list[str]:
        if name not in chains:
            chains[name] = [name, *max((chain(other) for other in edges[name]), key=len, default=[])]
        return chains[name]

    return max((chain(name) for name in edges), key=len)
