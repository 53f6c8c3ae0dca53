"""Packages that isogemm can do without: asked for where they are needed, and named with the extra that brings them."""

from __future__ import annotations

import importlib.util

from ..errors import OptionError


def require_extra(extra: str, what: str, *packages: str) -> None:
    """Check that packages are installed, without importing them; else an OptionError names the extra."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            limit, nearest = f"the extra isogemm[{extra}]", f'pip install "isogemm[{extra}]"'
            raise OptionError(f"{what} needs {package}", limit=limit, value="not installed", nearest=nearest)
