"""Guards for anybody's function: outputs among canaries and NaN, operands that may not change, two runs compared."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import DTypeError, IsogemmError
from ..operands.tensors import words

ROOM = 64  # elements before and behind


class GuardError(IsogemmError):
    """A guarded function wrote where it must not, left elements unwritten, or gave other bits in a second run."""


class Guarded:
    """An output among canaries, filled with NaN.

    Attributes
    ----------
    array : array or tensor
        What to write to; contiguous.
    """

    def __init__(self, array: Any, whole: Any, pattern: Any) -> None:
        self.array, self._whole, self._pattern = array, whole, pattern

    def check(self, what: str = "out") -> None:
        """Raise where a canary died or an element still is the NaN that it was.

        Raises
        ------
        GuardError
            Names the first place: before, behind, or unwritten.
        """
        bits = _bits(self._whole)
        for where, part in (("before", slice(None, ROOM)), ("behind", slice(-ROOM, None))):
            dead = np.flatnonzero(bits[part] != self._pattern)
            if dead.size:
                at = int(dead[-1 if where == "before" else 0])
                away = ROOM - at if where == "before" else at + 1
                limit, nearest = "its own elements", "mask the last tile"
                raise GuardError(
                    f"{what} was written outside", limit=limit, value=f"{away} elements {where} it", nearest=nearest
                )
        left = np.flatnonzero(bits[ROOM:-ROOM] == self._pattern)
        if left.size:
            raise GuardError(
                f"{what} was not written everywhere",
                limit="every element",
                value=f"{left.size} elements left, the first at {int(left[0])} of its flat order",
                nearest="cover the last tile of every axis",
            )


def _bits(x: Any) -> np.ndarray[Any, Any]:
    """Bit patterns of a contiguous array or tensor, on the host."""
    if hasattr(x, "detach"):
        x = words(x.detach().reshape(-1)).cpu().numpy()
    x = np.asarray(x).reshape(-1)
    return np.asarray(x.view(f"u{x.itemsize}"))


def guarded_empty(shape: int | tuple[int, ...], dtype: Any = "float32", *, device: Any = None) -> Guarded:
    """An output of NaN with canaries around it.

    Parameters
    ----------
    shape : int or tuple of int
    dtype : str, numpy.dtype or torch.dtype
    device : optional
        A torch device: the array is a tensor there. Without it, it is NumPy's, unless `dtype` is torch's.

    Returns
    -------
    Guarded
        Write to ``.array``, then call ``.check()``.
    """
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    size = int(np.prod(shape, dtype=np.int64))
    if device is not None or type(dtype).__module__ == "torch":
        import torch

        kind = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        whole = torch.full((size + 2 * ROOM,), float("nan"), dtype=kind, device=device)
        array = whole[ROOM : ROOM + size].view(shape)
    else:
        from ..base.dtypes import NUMPY

        kind = NUMPY.get(dtype, np.dtype(dtype)) if isinstance(dtype, str) else np.dtype(dtype)
        whole = np.full(size + 2 * ROOM, np.nan, kind)
        array = whole[ROOM : ROOM + size].reshape(shape)
    return Guarded(array, whole, _bits(whole)[0])


def _copy(x: Any) -> Any:
    return x.detach().clone() if hasattr(x, "detach") else x.copy()


def _digest(x: Any) -> str:
    if hasattr(x, "detach"):
        return hashlib.sha256(_bits(x.detach().contiguous()).tobytes()).hexdigest()
    return hashlib.sha256(np.ascontiguousarray(x).tobytes()).hexdigest() if isinstance(x, np.ndarray) else ""


def _result(name: str, returned: Any, named: dict[str, Any]) -> Any:
    """What two runs are compared by: the array that was returned, or written to."""
    found = named.get("out") if returned is None else returned
    if not hasattr(found, "dtype"):
        limit, nearest = "an array or a tensor, returned or written to out=", "a function of one result"
        raise DTypeError(f"result of {name}", limit=limit, value=type(found).__name__, nearest=nearest)
    return found


def guard(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with guards: its operands are hashed before and after, and it is run twice.

    An ``out=`` that was made by `guarded_empty` is checked too.

    Parameters
    ----------
    function : callable
        Takes NumPy arrays or torch tensors and returns one, or writes to its ``out=`` and returns None.

    Returns
    -------
    callable
        With the same arguments and result.

    Raises
    ------
    GuardError
        An operand changed, a canary died, an element was not written, or two runs differ in a bit.
    DTypeError
        The result is no array or tensor, so that two runs cannot be compared.
    """

    called = getattr(function, "__name__", type(function).__name__)

    @functools.wraps(function)
    def guarded(*args: Any, **named: Any) -> Any:
        out = named.get("out")
        if isinstance(out, Guarded):
            named = named | {"out": out.array}
        operands = {f"operand {i}": x for i, x in enumerate(args)} | {k: v for k, v in named.items() if k != "out"}
        before = {name: _digest(x) for name, x in operands.items()}
        target = named.get("out")
        held = None if target is None else _copy(target)  # what both runs find there
        first = function(*args, **named)
        kept = _bits(_result(called, first, named)).copy()
        for name, x in operands.items():
            if _digest(x) != before[name]:
                limit, nearest = "operands are read", "an output of its own"
                raise GuardError(
                    f"{name} was changed", limit=limit, value=f"other bytes after {called}", nearest=nearest
                )
        if isinstance(out, Guarded):
            out.check()
        if target is not None:
            target[...] = held
        again = _bits(_result(called, function(*args, **named), named))
        if (again != kept).any():
            raise GuardError(
                f"{called} gave other bits in a second run",
                limit="the same bits from the same operands",
                value=f"{int((again != kept).sum())} of {kept.size} elements differ",
                nearest="a fixed order of sums; a barrier where threads share memory",
            )
        return first

    return guarded
