"""Typed errors: each names the limit, the value that broke it and the nearest legal choice."""

from __future__ import annotations

import copyreg
import difflib
from typing import Any

__all__ = [
    "AliasError",
    "ContractError",
    "DTypeError",
    "DeviceError",
    "FormatError",
    "IsogemmError",
    "LayoutError",
    "LimitError",
    "OptionError",
    "RankError",
    "ShapeError",
]


DOCTOR = "A result that such a call left elsewhere: isogemm.doctor.diagnose names the mistake in it, docs/doctor.md"
"""A note under errors about memory that two matrices share, and about where their elements lie."""


class IsogemmError(Exception):
    """Base of every error that isogemm raises on purpose. When one is raised nothing was computed or written.

    Parameters
    ----------
    what : str
        What is wrong, in one clause.
    limit : object
        The rule that was broken.
    value : object
        The value that broke it.
    nearest : object
        The nearest choice that is legal.
    said : str, optional
        The problem in a whole sentence, which then comes first in the message.
    """

    _elsewhere: tuple[str, ...] = ()  # beginnings of `what` that other libraries do not refuse: the doctor is named

    def __init__(self, what: str, *, limit: object, value: object, nearest: object, said: str = "") -> None:
        self.what, self.limit, self.value, self.nearest = what, limit, value, nearest
        # Not by super(): compilers that meet the error in traced code would speak of that call in its place.
        self.args = (f"{said or what}: limit: {limit}; got: {value}; nearest legal choice: {nearest}",)
        if what.startswith(self._elsewhere):
            self.add_note(DOCTOR)

    def __reduce__(self) -> tuple[Any, ...]:
        """What pickles and copies it, as on the way from a process to the one that asked: all of it, as it stands."""
        return copyreg.__newobj__, (type(self),), {"args": self.args, **vars(self)}  # type: ignore[attr-defined]


class ShapeError(IsogemmError, ValueError):
    """Operand shapes do not fit each other, or a shape is out of range."""


class DTypeError(IsogemmError, TypeError):
    """An element type is not supported where it is used."""


class LayoutError(IsogemmError, ValueError):
    """Leading dimensions, strides, offsets or writability are not usable."""

    _elsewhere = ("ld", "stride", "offset", "elements of")


class AliasError(IsogemmError, ValueError):
    """An output shares memory with an operand or with itself."""

    _elsewhere = ("",)


class ContractError(IsogemmError, ValueError):
    """A contract is malformed, or is not implemented where it was asked for."""

    def __init__(self, what: str, *, limit: object, value: object, nearest: object, said: str = "") -> None:
        if what == "unknown arithmetic" and f" {nearest}," in f"{limit},":  # a whole contract was meant, and is kept
            nearest = _arithmetic_meant(str(value).strip("'"), str(limit).removeprefix("one of ").split(", "))
        super().__init__(what, limit=limit, value=value, nearest=nearest, said=said)


_ORDERS = {"chain": "chain", "leaf": "leaf4096", "leaf4096": "leaf4096", "tree": "tree8", "lanes": "lanes32"}


def _arithmetic_meant(name: str, known: list[str]) -> str:
    """The arithmetic that a misspelt name is like, the default one before an order's name, or else the default."""
    spelt = name.lower()
    order = difflib.get_close_matches(spelt, _ORDERS, n=1)
    likest = difflib.get_close_matches(spelt, [*known, *order], n=1)
    if likest and likest[0] in known:
        return likest[0]
    return f"'fma/{_ORDERS[order[0]]}'" if order else "'fma/chain'"


class OptionError(IsogemmError, ValueError):
    """A scalar, flag or enumeration argument is out of range."""


class LimitError(IsogemmError, ValueError):
    """A size is beyond what can be addressed or allocated."""


class DeviceError(IsogemmError, ValueError):
    """An operand lives on a device that no installed backend serves."""


class FormatError(IsogemmError, ValueError):
    """Bytes are not what their format says: a file is cut short or damaged, or a block's scale is no number."""


class RankError(IsogemmError, RuntimeError):
    """A process of a group died, or did not answer within the group's time: the message names it and the operation."""
