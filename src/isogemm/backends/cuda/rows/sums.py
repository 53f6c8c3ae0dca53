"""Sums over rows of torch CUDA tensors, in pinned orders: gradients of weights, biases and tables of rows."""

from __future__ import annotations

from math import prod
from typing import Any

from ....base.seen import Seen
from ....contract.spec import Order
from ..driver.facts import current_stream
from ..driver.kernel import Bound
from . import build
from .run import side
from .sides import ABSENT

CHAIN = Order()
_columns: Seen[Bound] = Seen(4096)
_table: Seen[Bound] = Seen(4096)


def columns(term: int, x: Any, dy: Any, stats: Any, out: Any, *, order: Order = CHAIN, start: bool) -> None:
    """The terms of every row, added in `order` under the contract ``fma``: to ``out[c]`` where `start`, else from +0.

    Parameters
    ----------
    term : int
        0: ``dy``; 1: ``dy * (x * r)``; 2: ``dy * ((x - mean) * r)``.
    x, dy : Tensor, shape (..., n)
        `x` is not read where `term` is 0.
    stats : Tensor or None
        float32, (..., 2): r and mean of each row.
    out : Tensor, shape (n,)
        float32 where `start`: sums go on from what it holds.
    order : Order
        No tree where `start`.
    start : bool
    """
    import torch

    count, tree = prod(dy.shape[:-1]), order.kind == "tree"
    if order.kind == "chain" or (not tree and count <= order.size and not start):
        return _walked(term, x, dy, stats, out, count, start=start)
    # As `Order.leaves` has them. A tree's last ones may be empty, and are zero.
    leaf, leaves = (-(-count // order.size), order.size) if tree else (order.size, -(-count // order.size))
    sums = (torch.zeros if tree else torch.empty)(leaves, out.shape[0], dtype=torch.float32, device=out.device)
    if count:
        _walked(term, x, dy, stats, sums, leaf, start=False)
    if not tree:
        return _walked(0, None, sums, None, out, leaves, start=start)
    while len(sums) > 1:
        sums = sums[::2] + sums[1::2]
    out.copy_(sums[0])
    return None


def groups(x: Any, rows: int, out: Any) -> None:
    """Every `rows` rows, added in ascending order from +0.

    Parameters
    ----------
    x : Tensor, shape (..., n)
        Of `rows` rows for each of `out`, one at least.
    rows : int
    out : Tensor, shape (groups, n)
        Dense.
    """
    _walked(0, None, x, None, out, rows, start=False)


def _walked(term: int, x: Any, dy: Any, stats: Any, out: Any, leaf: int, *, start: bool) -> None:
    """One sum for each leaf of so many rows, in ascending order."""
    n = out.shape[-1]
    if n == 0:
        return
    device, leaf = out.get_device(), max(leaf, 1)
    at = [0 if t is None else t.data_ptr() for t in (x if term else None, dy, stats, out)]
    common = at[0] | at[1] | 128
    align = common & -common
    left = (x.stride(), x.dtype) if term else None
    key = (term, dy.shape, dy.stride(), dy.dtype, left, out.stride(), out.dtype, leaf, start, align, device)
    launch = _columns.get(key)
    if launch is None:
        sides = side(x) if term else ABSENT, side(dy), side(out)
        launch = build.columns(term, dy.shape[:-1], n, *sides, leaf, start, align, device)
        if launch is None:  # more leading dimensions than a kernel counts
            x = x.reshape(-1, n) if term else None
            return _walked(term, x, dy.reshape(-1, n), stats, out, leaf, start=start)
        _columns.keep(key, launch)
    launch(current_stream(device), *at)


def table(ids: Any, order: Any, dy: Any, out: Any, *, start: bool) -> None:
    """Rows of dy are added to rows of `out`, each in ascending order, from what it holds where `start`, else from +0.

    Parameters
    ----------
    ids, order : Tensor of int64, shape (count,)
        Rows of `out`, sorted, and where in dy each was, ascending among equals. Rows that none names stay as they are;
        one that is not there is an error of the device.
    dy : Tensor, shape (..., n)
        Of `count` rows.
    out : Tensor, shape (rows, n)
    start : bool
        Then `out` is float32.
    """
    n, device = out.shape[1], out.get_device()
    key = (dy.shape, dy.stride(), dy.dtype, out.shape, out.stride(), out.dtype, start, device)
    launch = _table.get(key)
    if launch is None:
        launch = build.table(dy.shape[:-1], n, side(dy), side(out), out.shape[0], start, device)
        if launch is None:
            return table(ids, order, dy.reshape(-1, n), out, start=start)
        _table.keep(key, launch)
    launch(current_stream(device), ids.data_ptr(), order.data_ptr(), dy.data_ptr(), out.data_ptr())
