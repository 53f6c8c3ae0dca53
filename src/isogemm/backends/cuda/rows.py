"""Operations along rows of torch CUDA tensors: a call seen before is a look-up, its results' memory and a launch.

Operands have been checked by who calls (`isogemm.torch.row_calls`). The bits are those of `isogemm.contract.rows`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from .row_build import EACH, REDUCE, Launch, Turned, each, reduce, rope
from .row_place import ABSENT, Side

__all__ = ["EACH", "forget", "known", "run", "side"]

_MOST = 8192
CODES = {"float32": 0, "bfloat16": 1, "float16": 2}


class Entry(NamedTuple):
    """A launch, its device, and shape and torch's keywords of each result; zeros for pointers that it lacks."""

    launch: Launch
    device: int
    results: tuple[tuple[tuple[int, ...], dict[str, Any]], ...]
    rest: tuple[int, ...]


_entries: dict[tuple[Any, ...], Entry] = {}
_types: dict[type, None] = {}
_empty: Any = None
_stream: Any = None


def _learn() -> None:
    """Take what calls need of torch, whose tensors somebody has."""
    global _empty, _stream
    import torch

    _empty = torch.empty
    _stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # a build without CUDA has none
    _types.update({torch.Tensor: None, torch.nn.Parameter: None})


def forget() -> None:
    """Empty the table of calls."""
    _entries.clear()


def known(kind: str, tensors: tuple[Any, ...], options: tuple[Any, ...]) -> Any:
    """The result of a call like one before (a tuple where there are several); None where there was none.

    Parameters
    ----------
    kind : str
    tensors : tuple of tensor or None
        In the order of the kernel's pointers.
    options : tuple
        What else the call was given; those that are equal mean the same.
    """
    try:
        key, at = _key(kind, tensors, options)
    except (AttributeError, RuntimeError, TypeError):  # no tensor, or none with an address, strides or a hash
        return None
    entry = _entries.get(key)
    return None if entry is None else _launched(entry, at)


def _key(kind: str, tensors: tuple[Any, ...], options: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[int]]:
    key: list[Any] = [kind, options]
    at, common = [], 128
    for x in tensors:
        if x is None:
            key.append(None)
            at.append(0)
            continue
        if type(x) not in _types or x.is_neg():
            raise TypeError(type(x).__name__)
        address = x.data_ptr()
        common |= address
        at.append(address)
        key += (x.shape, x.stride(), x.dtype, x.get_device())
    key.append(common & -common)
    return tuple(key), at


def _launched(entry: Entry, at: list[int]) -> Any:
    launch, device, results, rest = entry
    made = [_empty(shape, **like) for shape, like in results]
    launch(_stream(device), *at, *[x.data_ptr() for x in made], *rest)
    return made[0] if len(made) == 1 else tuple(made)


def run(kind: str, tensors: tuple[Any, ...], options: tuple[Any, ...], outs: Sequence[Any], **rest: Any) -> Any:
    """The result of a call that `known` does not know; it will.

    Parameters
    ----------
    kind, tensors, options
        As `known` gets them, checked.
    outs : sequence of (shape, torch dtype)
        Results.
    rest : object
        ``eps``, ``interleaved`` and the like.

    Returns
    -------
    Tensor or tuple of them; None where no kernel fits, and the caller has to compose
    """
    if not _types:
        _learn()
    x = next(t for t in tensors if t is not None)
    plain = tuple(t if t is None or type(t) in _types else t.as_subclass(next(iter(_types))) for t in tensors)
    key, at = _key(kind, plain, options)
    if key in _entries:  # of a subclass of torch's tensors
        return _launched(_entries[key], at)
    device = x.get_device()
    launch, pointers = _built(kind, plain, [CODES[_name(dtype)] for _, dtype in outs], key[-1], device, rest)
    if launch is None:
        return None
    results = tuple((tuple(shape), {"dtype": dtype, "device": x.device}) for shape, dtype in outs)
    entry = Entry(launch, device, results, (0,) * (pointers - len(tensors) - len(outs)))
    if len(_entries) >= _MOST:
        _entries.clear()
    _entries[key] = entry
    return _launched(entry, at)


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def side(x: Any) -> Side:
    """An operand as the kernels see it."""
    if x is None:
        return ABSENT
    steps = x.stride()
    return Side(CODES[_name(x.dtype)], steps[:-1], steps[-1])


def _built(
    kind: str, tensors: tuple[Any, ...], codes: list[int], align: int, device: int, rest: dict[str, Any]
) -> tuple[Launch | None, int]:
    """The launch, and how many pointers it takes."""
    x = tensors[0]
    shape, n = tuple(x.shape[:-1]), x.shape[-1]
    if kind in REDUCE:
        four = [*map(side, tensors), *[ABSENT] * (4 - len(tensors))]
        outs = (codes[0], codes[1] if len(codes) > 1 else -1)
        return reduce(kind, shape, n, four, outs, rest.get("eps", 0.0), align, device), 6
    if kind in EACH:
        three = [*map(side, tensors), *[ABSENT] * (3 - len(tensors))]
        return each(kind, shape, n, three, codes, align, device), 5
    x0, x1, cos, sin, w0, w1 = tensors
    turned = [
        Turned(tuple(t.shape[:-1]), side(t), _across(cos, t), _across(sin, t), side(w))
        for t, w in ((x0, w0), (x1, w1))
        if t is not None
    ]
    normed = kind.startswith("norm")
    launch = rope(
        turned, n, codes[0], interleaved=rest["interleaved"], normed=normed, eps=rest.get("eps", 0.0), align=align,
        device=device,
    )  # fmt: skip
    return launch, 8


def _across(table: Any, x: Any) -> Side:
    """A table of angles, broadcast to the rows of x."""
    return side(table.expand(*x.shape[:-1], table.shape[-1]))
