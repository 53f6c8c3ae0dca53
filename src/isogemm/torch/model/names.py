"""Names of modules and parameters in a model, with dots as torch writes them."""

from __future__ import annotations


def below(name: str, key: str) -> str:
    """The name of what stands under `key` in the module `name`; a model itself has no name."""
    return f"{name}.{key}" if name else key


def prefixes(name: str) -> list[str]:
    """``a.b.c``, ``a.b``, ``a`` and the root."""
    parts = name.split(".") if name else []
    return [".".join(parts[:n]) for n in range(len(parts), -1, -1)]
