"""Guards for anybody's function: outputs among canaries and NaN, operands that may not change, two runs compared."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np

from ..base import arguments
from ..base.dtypes import as_dtype
from ..errors import DeviceError, DTypeError, IsogemmError
from ..operands.tensors import words
from .case import FLOATS

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
    """Bit patterns of a contiguous array or tensor, on the host. Raises DTypeError: its elements are no plain ones."""
    kind = getattr(x.dtype, "kind", "")
    if x.itemsize > 8 or kind == "O":
        limit = "numbers of at most 8 bytes"
        raise DTypeError("elements that are compared", limit=limit, value=str(x.dtype), nearest="float64 or complex64")
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

    Raises
    ------
    ShapeError, DTypeError, DeviceError
        An extent that is no whole number, a type that has no NaN, or a device that torch does not know.
    """
    listed = arguments.items(shape)
    shape = tuple(arguments.extent("shape", x, 0) for x in ([shape] if listed is None else listed))
    size = int(np.prod(shape, dtype=np.int64))
    kind = as_dtype(dtype, "dtype")
    if kind not in FLOATS:
        legal = ", ".join(known.name for known in FLOATS)
        raise DTypeError("dtype", limit=f"{legal}, which have a NaN", value=str(dtype), nearest="float32")
    if device is not None or type(dtype).__module__ == "torch":
        import torch

        try:
            whole = torch.full((size + 2 * ROOM,), float("nan"), dtype=getattr(torch, kind.name), device=device)
        except RuntimeError as error:
            value = f"{device} ({str(error).splitlines()[0]})"
            raise DeviceError("device", limit="one that torch can use here", value=value, nearest="cpu") from error
        array = whole[ROOM : ROOM + size].view(shape)
    else:
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

    if not callable(function):
        value, limit = arguments.shown(function), "a function of arrays or tensors"
        raise DTypeError("function", limit=limit, value=value, nearest="guard(function), then a call of what it gives")
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
        result = _result(called, first, named)
        shape, kept = tuple(result.shape), _bits(result).copy()
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
        result = _result(called, function(*args, **named), named)
        if tuple(result.shape) != shape:
            raise GuardError(
                f"{called} gave another shape in a second run",
                limit=list(shape),
                value=list(result.shape),
                nearest="a shape that follows from the operands",
            )
        again = _bits(result)
        if (again != kept).any():
            raise GuardError(
                f"{called} gave other bits in a second run",
                limit="the same bits from the same operands",
                value=f"{int((again != kept).sum())} of {kept.size} elements differ",
                nearest="a fixed order of sums; a barrier where threads share memory",
            )
        return first

    return guarded
