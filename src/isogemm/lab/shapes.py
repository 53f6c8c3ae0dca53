"""Linears from files of shapes: what `isogemm audit --shapes` and `isogemm tune --shapes` read."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..base import arguments
from ..errors import OptionError, ShapeError
from .models import LinearShape


def read_shapes(path: str) -> list[LinearShape]:
    """Linears from a shapes file.

    JSON: a list of ``{"n": 4096, "k": 2560, "name": "up"}`` or of ``[n, k]`` / ``[n, k, name]``.
    CSV: lines ``n,k[,name]``; a first line that names the columns is allowed, in any order.

    Raises
    ------
    OptionError
        The file cannot be read or is not JSON or CSV of this form.
    ShapeError
        A size is not a whole number of at least 1, or there is none.
    """
    path = arguments.path("path", path, "'shapes.json'")
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or a path that cannot be
        raise unreadable(path, error) from error
    try:
        rows = json.loads(text) if text.lstrip()[:1] in ("[", "{") else _csv_rows(text)
    except (ValueError, RecursionError, csv.Error) as error:  # ValueError: no JSON, or a number without end
        raise unreadable(path, error) from error
    if not isinstance(rows, list) or not rows:
        raise ShapeError(
            "shapes file", limit="a list of at least one (n, k[, name])", value=path, nearest="[[4096, 2560]]"
        )
    return [_linear(row, path) for row in rows]


def unreadable(path: str, error: Exception) -> OptionError:
    """The error for a file of shapes or weights that cannot be read."""
    form = "a .safetensors file" if path.endswith(".safetensors") else "[[4096, 2560]] as JSON, 4096,2560 as CSV"
    return OptionError(
        "cannot read",
        limit="a file of shapes, as JSON or CSV, or of weights",
        value=f"{path} ({error})",
        nearest=nearest_file(path, "a path that exists") if not os.path.exists(path) else form,
    )


def nearest_file(path: str, otherwise: str) -> str:
    """The file beside `path` whose name is most like its, or `otherwise`."""
    folder, name = os.path.split(path)
    beside = os.listdir(folder or ".") if os.path.isdir(folder or ".") else []
    found = arguments.nearest(name, beside, "")
    return os.path.join(folder, found) if found and found != name else otherwise


def _csv_rows(text: str) -> list[Any]:
    lines = [[cell.strip() for cell in row] for row in csv.reader(text.splitlines()) if any(c.strip() for c in row)]
    lines = [row for row in lines if not row[0].startswith("#")]
    if lines and {"n", "k"} <= set(lines[0]):
        return [dict(zip(lines[0], row, strict=False)) for row in lines[1:]]
    return list(lines)


def _linear(row: object, path: str) -> LinearShape:
    if isinstance(row, dict):
        n, k, name = row.get("n"), row.get("k"), row.get("name")
    elif isinstance(row, Iterable) and not isinstance(row, str) and 2 <= len(cells := list(row)) <= 3:
        n, k, name = (*cells, None)[:3]
    else:
        n = k = name = None
    return LinearShape(str(name or f"{n}x{k}"), _size(n, row, path), _size(k, row, path))


def _size(value: object, row: object, path: str) -> int:
    text = str(value) if isinstance(value, int | str) and not isinstance(value, bool) else ""
    if not text.isdecimal() or len(text) > 10 or not 1 <= int(text) < 2**31:
        limit = "n,k[,name] with n and k from 1 to 2**31 - 1"
        raise ShapeError(f"malformed shape in {path}", limit=limit, value=str(row)[:80], nearest=[4096, 2560])
    return int(text)
