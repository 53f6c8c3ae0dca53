"""Operations along rows of torch CUDA tensors: a call seen before is a look-up, its results' memory and a launch.

Operands have been checked by who calls (`isogemm.torch.rows.direct`). The bits are those of `isogemm.contract.rows`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ....base.dtypes import CODE, torch_name
from ....base.seen import Seen
from ....contract.rows import OPERATIONS
from ..driver.kernel import Bound
from .build import Turned, each, loss, reduce, rope
from .sides import ABSENT, Side


class Ready(NamedTuple):
    """A launch, its device, and of each result shape, strides and torch's keywords; None for one that is as x is."""

    launch: Bound
    device: int
    results: tuple[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]] | None, ...]


_entries: Seen[Ready] = Seen(8192)
_types: dict[type, None] = {}
_like: Any = None
_strided: Any = None
_stream: Any = None
_bfloat16: Any = None  # the one dtype that is never a lazy negation


def _learn() -> None:
    """Take what calls need of torch, whose tensors somebody has."""
    global _like, _strided, _stream, _bfloat16
    import torch

    _like, _strided, _bfloat16 = torch.empty_like, torch.empty_strided, torch.bfloat16
    _stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # a build without CUDA has none
    _types.update({torch.Tensor: None, torch.nn.Parameter: None})


def known(kind: Any, tensors: tuple[Any, ...], options: tuple[Any, ...]) -> Any:
    """The result of a call like one before (a tuple where there are several); None where there was none.

    Parameters
    ----------
    kind : object
        What the call is, and which of its operands are given.
    tensors : tuple of tensor
        Those, in the order of the kernel's pointers.
    options : tuple
        What else the call was given; those that are equal mean the same.
    """
    try:
        key, at = _key(kind, tensors, options)
    except (AttributeError, RuntimeError, TypeError):  # no tensor, or none with an address, strides or a hash
        return None
    entry = _entries.get(key)
    return None if entry is None else _launched(entry, tensors[0], at)


def known_one(kind: Any, x: Any, options: tuple[Any, ...]) -> Any:
    """`known` of one operand, with one result, in fewer steps."""
    try:
        if type(x) not in _types or ((d := x.dtype) is not _bfloat16 and x.is_neg()):
            return None
        a = x.data_ptr()
        common = a | 128
        entry = _entries.get((kind, options, x.shape, x.stride(), d, x.get_device(), common & -common))
    except (AttributeError, RuntimeError, TypeError):
        return None
    if entry is None:
        return None
    launch, device, results = entry
    if (result := results[0]) is None:
        out = _like(x)
    else:
        shape, strides, like = result
        out = _strided(shape, strides, **like)
    launch(_stream(device), a, out.data_ptr())
    return out


def known_two(kind: Any, x: Any, y: Any, options: tuple[Any, ...]) -> Any:
    """`known` of two operands, with one result, in fewer steps."""
    try:
        if type(x) not in _types or ((d := x.dtype) is not _bfloat16 and x.is_neg()):
            return None
        if type(y) not in _types or ((e := y.dtype) is not _bfloat16 and y.is_neg()):
            return None
        a, b = x.data_ptr(), y.data_ptr()
        common = a | b | 128
        entry = _entries.get((
            kind, options, x.shape, x.stride(), d, x.get_device(), y.shape, y.stride(), e, y.get_device(),
            common & -common,
        ))  # fmt: skip
    except (AttributeError, RuntimeError, TypeError):
        return None
    if entry is None:
        return None
    launch, device, results = entry
    if (result := results[0]) is None:
        out = _like(x)
    else:
        shape, strides, like = result
        out = _strided(shape, strides, **like)
    launch(_stream(device), a, b, out.data_ptr())
    return out


def _key(kind: Any, tensors: tuple[Any, ...], options: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[int]]:
    key: tuple[Any, ...] = (kind, options)
    at, common = [], 128
    for x in tensors:
        d = x.dtype
        if type(x) not in _types or (d is not _bfloat16 and x.is_neg()):
            raise TypeError(type(x).__name__)
        address = x.data_ptr()
        common |= address
        at.append(address)
        key += (x.shape, x.stride(), d, x.get_device())
    return (*key, common & -common), at


def _launched(entry: Ready, x: Any, at: list[int]) -> Any:
    launch, device, results = entry
    made = [_like(x) if r is None else _strided(r[0], r[1], **r[2]) for r in results]
    if len(made) == 1:
        launch(_stream(device), *at, made[0].data_ptr())
        return made[0]
    launch(_stream(device), *at, made[0].data_ptr(), made[1].data_ptr())
    return tuple(made)


def run(
    kind: str, tensors: tuple[Any, ...], options: tuple[Any, ...], outs: Sequence[Any], *, tag: Any = None, **rest: Any
) -> Any:
    """The result of a call that `known` does not know; it will.

    Parameters
    ----------
    kind : str
        One of `isogemm.contract.rows.OPERATIONS`, "rope_pair" or "norm_rope_pair".
    tensors : tuple of tensor or None
        All that the kernel could take, checked.
    options
        As `known` gets them.
    outs : sequence of (shape, torch dtype)
        Results.
    tag : object
        The kind, as `known` gets it; default: `kind`.
    rest : object
        ``eps``, ``interleaved``, ``ignore_index``.

    Returns
    -------
    Tensor or tuple of them; None where no kernel fits, and the caller has to compose
    """
    if not _types:
        _learn()
    x = tensors[0]
    plain = tuple(None if t is None else _plain(t) for t in tensors)
    key, at = _key(tag or kind, tuple(t for t in plain if t is not None), options)
    entry = _entries.get(key)  # there may be one: tensors of a subclass always come this way
    if entry is None:
        codes = [CODE[torch_name(dtype)] for _, dtype in outs]
        launch = _built(kind, plain, codes, key[-1], x.get_device(), rest)
        if launch is None:
            return None
        entry = _entries.keep(key, Ready(launch, x.get_device(), _results(x, outs)))
    return _launched(entry, plain[0], at)


def _plain(x: Any) -> Any:
    """Of torch's own type, in memory that holds the values themselves: autograd negates some gradients lazily."""
    return (x if type(x) in _types else x.as_subclass(next(iter(_types)))).resolve_neg()


def _results(x: Any, outs: Sequence[Any]) -> Any:
    """What `Ready.results` says of results, which are contiguous."""
    found: list[Any] = []
    for shape, dtype in outs:
        if shape == x.shape and dtype == x.dtype and x.is_contiguous():
            found.append(None)
            continue
        strides, step = [], 1
        for extent in reversed(shape):
            strides.append(step)
            step *= max(extent, 1)
        found.append((tuple(shape), tuple(reversed(strides)), {"dtype": dtype, "device": x.device}))
    return tuple(found)


def side(x: Any) -> Side:
    """An operand as the kernels see it."""
    if x is None:
        return ABSENT
    steps = x.stride()
    return Side(CODE[torch_name(x.dtype)], steps[:-1], steps[-1])


def _built(
    kind: str, tensors: tuple[Any, ...], codes: list[int], align: int, device: int, rest: dict[str, Any]
) -> Bound | None:
    """The launch; it takes the addresses of tensors that are given, then those of results."""
    x, kernels = tensors[0], OPERATIONS[kind].kernels if kind in OPERATIONS else "rope"
    shape, n = tuple(x.shape[:-1]), x.shape[-1]
    if kernels in ("reduce", "each"):
        sides = [*map(side, tensors), *[ABSENT] * (4 - len(tensors))]
    if kernels == "reduce":
        outs = (codes[0], codes[1] if len(codes) > 1 else -1)
        return reduce(kind, shape, n, sides, outs, rest.get("eps", 0.0), align, device)
    if kernels == "loss":
        dy, target = tensors[1:3]
        beside = ABSENT if dy is None else Side(CODE[torch_name(dy.dtype)], dy.stride())
        places = Side(0, tuple(2 * step for step in target.stride()))
        return loss(kind, shape, n, (side(x), beside, places), codes[0], rest["ignore_index"], align, device)
    if kernels == "each":
        return each(kind, shape, n, sides[:3], codes, align, device)
    x0, x1, cos, sin, w0, w1 = tensors
    turned = [
        Turned(tuple(t.shape[:-1]), side(t), _across(cos, t), _across(sin, t), side(w))
        for t, w in ((x0, w0), (x1, w1))
        if t is not None
    ]
    return rope(
        turned, n, codes[0], interleaved=rest["interleaved"], normed=kind.startswith("norm"),
        eps=rest.get("eps", 0.0), align=align, device=device,
    )  # fmt: skip


def _across(table: Any, x: Any) -> Side:
    """A table of angles, broadcast to the rows of x."""
    return side(table.expand(*x.shape[:-1], table.shape[-1]))
