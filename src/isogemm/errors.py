"""Typed errors: each names the limit, the value that broke it and the nearest legal choice."""

from __future__ import annotations

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
        super().__init__(f"{said or what}: limit: {limit}; got: {value}; nearest legal choice: {nearest}")
        if what.startswith(self._elsewhere):
            self.add_note(DOCTOR)


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
