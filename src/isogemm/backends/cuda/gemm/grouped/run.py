"""Grouped products of torch CUDA tensors: a call seen before is a look-up, its result's memory and a launch.

Whether kernels of this folder serve a call is known before anything is enqueued: None says that they do not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .....base.dtypes import torch_name
from .....base.seen import Seen
from .....contract.spec import Contract
from .....planner.choose import Option, first
from ...driver.kernel import Bound
from ...driver.machine import admissions
from ..hopper.config import HopperSide
from .case import ENDS, GroupedCase
from .family import Grouped

FAMILY = Grouped()
Resolve = Callable[[], Contract]
Tensor = Any  # torch is untyped to mypy


class GroupedReady(NamedTuple):
    """A launch, its device, the result's shape, and torch's keywords for its memory."""

    launch: Bound  # (stream, x, y, counts, out, bias)
    device: int
    shape: tuple[int, ...]
    options: dict[str, Any]


_calls: Seen[GroupedReady | None] = Seen(4096)
_UNKNOWN: Any = object()


def recalled(
    x: Tensor, w: Tensor, bias: Tensor | None, lengths: Tensor, contract: Any, out_dtype: Any
) -> Tensor | None:
    """`multiplied` of a call like one before; None where there was none, or it is not served."""
    try:
        key = _key(x, w, bias, lengths, contract, out_dtype, False)
        ready = _calls.get(key)
    except (AttributeError, RuntimeError, TypeError):  # no tensors, or nothing that has a hash
        return None
    return None if ready is None else _launched(ready, x, w, bias, lengths)


def multiplied(
    x: Tensor, w: Tensor, bias: Tensor | None, lengths: Tensor, contract: str, out_dtype: Any, resolve: Resolve,
    *, ends: bool = False,
) -> Tensor | None:  # fmt: skip
    """``x[i:j] @ w[g].T + bias[g]`` for the rows of each group; zeros behind the last.

    Parameters
    ----------
    x : tensor [rows, k]
    w : tensor [groups, n, k]
    bias : tensor [groups, n], optional
    lengths : tensor [groups]
        Rows of each group, int32 or int64, or with `ends` where each ends; contiguous, on the device of `x`.
    contract : str
        As the caller names it.
    out_dtype : torch.dtype or None
        None for that of `x`.
    resolve : callable
        The contract itself, asked for once a kind of call.
    """
    key = _key(x, w, bias, lengths, contract, out_dtype, ends)
    ready = _calls.get(key, _UNKNOWN)
    if ready is _UNKNOWN:
        dtype = out_dtype or x.dtype
        ready = _calls.keep(key, _ready(_case(x, w, bias, lengths, resolve(), dtype, ends), x, dtype))
    return None if ready is None else _launched(ready, x, w, bias, lengths)


def _key(
    x: Tensor, w: Tensor, bias: Tensor | None, lengths: Tensor, contract: Any, out_dtype: Any, ends: bool
) -> tuple[Any, ...]:
    return *map(_about, (x, w, bias, lengths)), contract, out_dtype, ends


def _about(x: Tensor | None) -> tuple[Any, ...] | None:
    return None if x is None else (x.shape, x.stride(), x.dtype, x.get_device(), x.is_neg())


def _launched(ready: GroupedReady, x: Tensor, w: Tensor, bias: Tensor | None, lengths: Tensor) -> Tensor | None:
    a, b = w.data_ptr(), x.data_ptr()
    if (a | b) & 15:
        return None
    launch, device, shape, options = ready
    out = _memory(shape, **options)
    launch(_stream(device), a, b, lengths.data_ptr(), out.data_ptr(), 0 if bias is None else bias.data_ptr())
    return out


def outer(
    a: Tensor, b: Tensor, lengths: Tensor, contract: str, out_dtype: Any, resolve: Resolve, *, ends: bool = False
) -> Tensor | None:
    """``a[i:j].T @ b[i:j]`` of each group; zeros where one has no rows. As `multiplied`."""
    ready = _outer(a, b, None, lengths, contract, out_dtype, resolve, ends)
    return None if ready is None else _launched(ready, b, a, None, lengths)


def continued(a: Tensor, b: Tensor, out: Tensor, lengths: Tensor, contract: str, resolve: Resolve) -> bool:
    """`outer` continued from the float32 values in `out`; False where no kernel here serves."""
    ready = _outer(a, b, out, lengths, contract, out.dtype, resolve, False)
    at, to, start = a.data_ptr(), b.data_ptr(), out.data_ptr()
    if ready is None or (at | to | start) & 15:
        return False
    ready.launch(_stream(ready.device), at, to, lengths.data_ptr(), start, 0)
    return True


def _outer(
    a: Tensor, b: Tensor, out: Tensor | None, lengths: Tensor, contract: str, out_dtype: Any, resolve: Resolve,
    ends: bool,
) -> GroupedReady | None:  # fmt: skip
    key = (*map(_about, (a, b, out, lengths)), contract, out_dtype, ends, "outer")
    found: GroupedReady | None = _calls.get(key, _UNKNOWN)
    if found is _UNKNOWN:
        found = _calls.keep(key, _ready(_outer_case(a, b, out, lengths, resolve(), out_dtype, ends), a, out_dtype))
    return found


def _ready(case: GroupedCase | None, x: Tensor, out_dtype: Any) -> GroupedReady | None:
    """The first admitted kernel; None where none serves."""
    if case is None:
        return None
    device = x.get_device()
    what = f"{case.contract} on groups of rows"
    options = (Option(FAMILY, config) for config in FAMILY.configs(case))
    found = first(options, case, admissions(device), what=what)
    if found is None:
        return None
    _learn()
    shape = (case.groups, case.x.size, case.y.size) if case.outer else (case.rows, case.x.size)
    return GroupedReady(found.launch, device, shape, {"dtype": out_dtype, "device": x.device})


_memory: Any = None
_stream: Any = None


def _learn() -> None:
    global _memory, _stream
    import torch

    _memory, _stream = torch.empty, torch._C._cuda_getCurrentRawStream


def _case(
    x: Tensor, w: Tensor, bias: Tensor | None, lengths: Tensor, contract: Contract, out_dtype: Any, ends: bool
) -> GroupedCase | None:
    (groups, n, k), rows = w.shape, len(x)
    if x.shape[1] != k or lengths.shape != (groups,) or (bias is not None and bias.shape != (groups, n)):
        return None  # whoever else is asked says so
    if any(t is not None and t.device != x.device for t in (w, bias, lengths)):
        return None
    weights, steps = _side(w.stride()[1:], n, k, w.stride(0) if groups > 1 else 0), x.stride()
    if weights is None or x.dtype != w.dtype or (steps[1] != 1 and k > 1) or not _plain(x, w, bias):
        return None
    return GroupedCase(
        groups, rows, k, weights, HopperSide(rows, steps[0] if rows > 1 else -(-k // 8) * 8, 0, False),
        torch_name(x.dtype), torch_name(out_dtype), contract, n,
        dtype_bias=None if bias is None else torch_name(bias.dtype),
        bias_step=1 if bias is None else bias.stride(1), bias_batch=0 if bias is None else bias.stride(0),
        lengths=_kind(lengths, ends),
    )  # fmt: skip


def _outer_case(
    a: Tensor, b: Tensor, out: Tensor | None, lengths: Tensor, contract: Contract, out_dtype: Any, ends: bool
) -> GroupedCase | None:
    rows, n, m = len(a), a.shape[1], b.shape[1]
    sides = [
        HopperSide(size, x.stride(0) if rows > 1 else -(-size // 8) * 8, 0, True)
        for x, size in ((a, n), (b, m)) if x.stride(1) == 1 or size == 1
    ]  # fmt: skip
    if len(sides) < 2 or a.dtype != b.dtype or len(b) != rows or a.device != b.device or not _plain(a, b, out):
        return None
    batch, row, col = (n * m, m, 1) if out is None else out.stride()
    if (col != 1 and row != 1) or (out is not None and out.shape != (len(lengths), n, m)):
        return None
    columns = col != 1
    return GroupedCase(
        len(lengths), rows, 0, sides[0], sides[1], torch_name(a.dtype), torch_name(out_dtype), contract,
        col if columns else row, batch, columns, accumulate=out is not None, lengths=_kind(lengths, ends),
    )  # fmt: skip


def _side(steps: Any, n: int, k: int, batch: int) -> HopperSide | None:
    row, col = steps
    if col == 1 or k == 1:
        return HopperSide(n, row if n > 1 else -(-k // 8) * 8, batch, False)
    return HopperSide(n, col, batch, True) if row == 1 or n == 1 else None


def _plain(*tensors: Tensor | None) -> bool:
    """Whether memory holds the values themselves, not their negatives."""
    return not any(x is not None and x.is_neg() for x in tensors)


def _kind(lengths: Tensor, ends: bool) -> int:
    return ENDS if ends else int(lengths.element_size() == 8)
