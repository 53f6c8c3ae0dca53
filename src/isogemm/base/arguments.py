"""What callers hand over beside arrays: text, numbers, names, paths; anything else is refused by name, a TypeError."""

from __future__ import annotations

import difflib
import math
import operator
import os
from collections.abc import Iterable
from typing import Any

import numpy as np

from ..errors import DTypeError, OptionError, ShapeError


def nearest(name: str, known: Iterable[str], otherwise: str, alike: float = 0.6) -> str:
    """The known name that is spelt most like `name`, or begins like it, or `otherwise` where none does.

    `alike` is how much, from 0 for any name to 1 for the same one.
    """
    known = list(known)
    begin = [each for each in known if name and each.startswith(name)]
    return (difflib.get_close_matches(name, known, 1, alike) or begin or [otherwise])[0]


def unknown(what: str, name: str, known: Iterable[str], otherwise: str) -> OptionError:
    """The error for a name that there is not; `otherwise` is the advice where none is near."""
    known = list(known)
    limit, advice = ", ".join(known), nearest(name, known, otherwise)
    return OptionError(f"unknown {what}", limit=limit, value=repr(name), nearest=advice)


def of_type(name: str, x: Any, kind: type | tuple[type, ...], limit: str, nearest: str) -> Any:
    """`x`, if it is one of these; else a DTypeError."""
    if not isinstance(x, kind):
        raise DTypeError(name, limit=limit, value="None" if x is None else type(x).__name__, nearest=nearest)
    return x


def one_of(name: str, x: Any, known: tuple[str, ...], nearest: str) -> str:
    """`x`, if it is one of these words; else an OptionError."""
    if not isinstance(x, str) or x not in known:
        raise OptionError(name, limit="one of " + ", ".join(known), value=shown(x), nearest=nearest)
    return x


def number(name: str, x: Any) -> float:
    """A real number: Python's, NumPy's, or a tensor with one element; else a DTypeError."""
    try:
        if not isinstance(x, str | bytes | bytearray):
            return float(x)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        pass  # RuntimeError: a tensor of several elements, of torch's
    raise DTypeError(name, limit="a number", value=shown(x), nearest="1.0")


def nearest_float32(x: float) -> float:
    """A number rounded to float32, ties to even, whatever a processor was told about rounding and subnormals.

    In whole steps of the result, each exactly: an instruction that rounds would ask the processor.
    """
    if x - x != 0:  # infinite, or no number
        return x
    step = max(math.frexp(x)[1] - 24, -149)
    rounded = math.ldexp(round(math.ldexp(x, -step)), step)
    return math.copysign(rounded if abs(rounded) < 2.0**128 else math.inf, x)


def flag(name: str, x: Any) -> bool:
    """Whether `x` is true, where that can be said; else a DTypeError: of text too, in which "no" would be true."""
    try:
        if not isinstance(x, str | bytes | bytearray):
            return bool(x)
    except (TypeError, ValueError, RuntimeError):
        pass
    raise DTypeError(name, limit="True or False", value=shown(x), nearest="False")


def whole(name: str, x: Any) -> int:
    """A whole number.

    Raises
    ------
    DTypeError
    """
    found = counted(x)
    if found is None:
        raise DTypeError(name, limit="a whole number", value=shown(x), nearest="0")
    return found


def counted(x: Any) -> int | None:
    """A whole number of Python's or of another library's; None of what is none: truth, text, an array of several."""
    if isinstance(x, bool) or getattr(x, "ndim", 0) != 0 or str(getattr(x, "dtype", "")).endswith("bool"):
        return None
    try:
        return operator.index(x)
    except (TypeError, ValueError, RuntimeError):
        return None


def extent(name: str, x: Any, least: int = 1) -> int:
    """A size, a whole number of at least `least`, of Python's or of another library's.

    Raises
    ------
    ShapeError
        With the size that text or a float meant.
    """
    size = counted(x)
    if size is not None and size >= least:
        return size
    try:
        meant = max(least, int(x))
    except (TypeError, ValueError, OverflowError, RuntimeError):
        meant = least
    raise ShapeError(name, limit=f"a whole number of at least {least}", value=repr(x), nearest=meant)


def strings(name: str, x: Any, nearest: str) -> tuple[str, ...]:
    """Several words, or one; else a DTypeError."""
    found = (x,) if isinstance(x, str) else tuple(x) if isinstance(x, Iterable) and not _is_array(x) else None
    if found is None or not all(isinstance(each, str) for each in found):
        raise DTypeError(name, limit="text, or a sequence of it", value=shown(x), nearest=nearest)
    return found


def items(x: Any) -> list[Any] | None:
    """What is in a list, an array or anything else that can be walked; None where there is nothing, as in text."""
    if isinstance(x, str | bytes):
        return None
    try:
        return list(x)
    except (TypeError, RuntimeError):  # RuntimeError: of torch's
        return None


def path(name: str, x: Any, nearest: str) -> str:
    """The path of a file; else a DTypeError."""
    found = os.fspath(of_type(name, x, (str, os.PathLike), "a str or a path", nearest))
    return os.fsdecode(found)


def shown(x: Any) -> str:
    """`x` in a message: short, and without computing anything."""
    plain = x is None or isinstance(x, str | bytes | bool | int | float | complex)
    text = repr(x) if plain else type(x).__name__
    return text if len(text) <= 80 else text[:77] + "..."


def _is_array(x: Any) -> bool:
    return hasattr(x, "dtype") or hasattr(x, "layout")


def beta_of_c(beta: float | None, accumulate: Any) -> float:
    """The beta of a call that was given a C, which is not ignored in silence: an OptionError where it would be."""
    if beta is None and isinstance(accumulate, bool | np.bool_) and not accumulate:  # what is neither is refused later
        limit = "a number, where c is given"
        raise OptionError("beta", limit=limit, value=None, nearest="1.0, which adds c, or 0.0, which leaves it unread")
    return 0.0 if beta is None else beta
