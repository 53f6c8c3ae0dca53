"""The BLAS view: column-major calls on flat buffers, with leading dimensions, offsets and strides.

A stored matrix with `rows` rows and leading dimension `ld` has its element (i, j) at ``offset + i + j * ld``;
``ld >= rows``, and what lies between is padding that is neither read nor written. For op T or C the stored A
is k x m and the stored B n x k. Everything is counted in elements. C is written in place, in its own dtype.

A row-major C[m, n] = A @ B is the column-major call with operands swapped and m and n swapped, because a
row-major matrix *is* its transpose in column-major order: no copies. `describe` writes that call out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from ..api import dispatch
from ..api.operands import Operands
from ..base import arguments
from ..base.dtypes import INT8, INT32
from ..contract.modes import contract_of
from ..contract.spec import ContractLike
from ..errors import LayoutError, OptionError, ShapeError
from ..operands.aliasing import check_items_apart, check_no_self_overlap
from ..problem import settings as problem

Array = NDArray[Any]


def gemm(
    transa: str,
    transb: str,
    m: int,
    n: int,
    k: int,
    alpha: float,
    a: Any,
    lda: int,
    b: Any,
    ldb: int,
    beta: float,
    c: Any,
    ldc: int,
    *,
    offset_a: int = 0,
    offset_b: int = 0,
    offset_c: int = 0,
    contract: ContractLike | None = None,
    mode: str | None = None,
) -> Any:
    """C = alpha * op(A) @ op(B) + beta * C, column-major, in place.

    Parameters
    ----------
    transa, transb : {"N", "T", "C"}
    m, n, k : int
        op(A) is m x k, op(B) k x n, C m x n.
    alpha, beta : float
        ``beta=0`` never reads C.
    a, b, c : flat array
        One dimension, contiguous; the three may be one buffer where the matrices in it do not overlap.
    lda, ldb, ldc : int
        At least the rows of the stored matrix.
    offset_a, offset_b, offset_c : int
        Where element (0, 0) is.
    contract, mode
        As in `isogemm.matmul`.

    Returns
    -------
    flat array
        `c`, of which only the m x n elements were written.

    Raises
    ------
    OptionError, ShapeError, LayoutError, AliasError, DTypeError, ContractError
        A leading dimension is too small, a matrix leaves its buffer, C overlaps an operand: C is untouched.

    Determinism
    -----------
    As `isogemm.gemm`: neither ld, offset, transposition nor the swap of operands changes a bit.
    """
    stored = _stored(transa, transb, (m, n, k), (a, b, c), (lda, ldb, ldc), alpha, beta, contract, mode)
    where = _wholes("offset", offset_a, offset_b, offset_c)
    return stored.run(*(window.at(offset) for window, offset in zip(stored.windows, where, strict=True)))


def gemm_strided_batched(
    transa: str,
    transb: str,
    m: int,
    n: int,
    k: int,
    alpha: float,
    a: Any,
    lda: int,
    b: Any,
    ldb: int,
    beta: float,
    c: Any,
    ldc: int,
    stride_a: int,
    stride_b: int,
    stride_c: int,
    batch_count: int,
    *,
    offset_a: int = 0,
    offset_b: int = 0,
    offset_c: int = 0,
    contract: ContractLike | None = None,
    mode: str | None = None,
) -> Any:
    """`gemm` for i in 0..batch_count-1 on the matrices at ``offset + i * stride``.

    Parameters
    ----------
    stride_a, stride_b : int
        Elements from one matrix to the next; 0 gives every item the same one.
    stride_c : int
        As these, but the matrices of C may not overlap. ``ldc * n`` is the nearest that never does.
    batch_count : int
    transa, transb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc, offset_a, offset_b, offset_c, contract, mode
        As in `gemm`.

    Returns
    -------
    flat array
        `c`.

    Raises
    ------
    OptionError, ShapeError, LayoutError, AliasError, DTypeError, ContractError
        C is untouched.

    Determinism
    -----------
    Each item has the bits that `gemm` gives it alone.
    """
    stored = _stored(transa, transb, (m, n, k), (a, b, c), (lda, ldb, ldc), alpha, beta, contract, mode)
    count = _size("batch_count", batch_count)
    where, steps = _wholes("offset", offset_a, offset_b, offset_c), _wholes("stride", stride_a, stride_b, stride_c)
    va, vb, vc = (w.batch(offset, step, count) for w, offset, step in zip(stored.windows, where, steps, strict=True))
    check_no_self_overlap(f"C (stride_c={steps[2]}; stride_c={stored.windows[2].span} never overlaps)", vc)
    return stored.run(va, vb, vc)


def gemm_batched(
    transa: str,
    transb: str,
    m: int,
    n: int,
    k: int,
    alpha: float,
    a: Any,
    lda: int,
    b: Any,
    ldb: int,
    beta: float,
    c: Any,
    ldc: int,
    offsets_a: Sequence[int],
    offsets_b: Sequence[int],
    offsets_c: Sequence[int],
    *,
    contract: ContractLike | None = None,
    mode: str | None = None,
) -> Any:
    """`gemm` for each triple of offsets: the array of pointers.

    Parameters
    ----------
    offsets_a, offsets_b, offsets_c : sequence of int
        Where each item's element (0, 0) is; offsets may repeat in A and B, the matrices of C may not overlap.
    transa, transb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc, contract, mode
        As in `gemm`.

    Returns
    -------
    flat array
        `c`.

    Raises
    ------
    OptionError, ShapeError, LayoutError, AliasError, DTypeError, ContractError
        C is untouched.

    Determinism
    -----------
    Each item has the bits that `gemm` gives it alone.
    """
    stored = _stored(transa, transb, (m, n, k), (a, b, c), (lda, ldb, ldc), alpha, beta, contract, mode)
    given = {"offsets_a": offsets_a, "offsets_b": offsets_b, "offsets_c": offsets_c}
    lists = [[_whole(f"{name}[{i}]", x) for i, x in enumerate(_items(name, each))] for name, each in given.items()]
    if len({len(x) for x in lists}) > 1:
        limit = "one of A, B and C for each item"
        raise ShapeError("offsets", limit=limit, value=[len(x) for x in lists], nearest=[len(lists[0])] * 3)
    views = [[w.at(offset) for offset in offsets] for w, offsets in zip(stored.windows, lists, strict=True)]
    return stored.run_items(*views)


@dataclass(frozen=True, slots=True)
class _Window:
    """Column-major matrices of one size in a flat buffer."""

    name: str
    flat: Array
    rows: int
    columns: int
    ld: int
    transpose: bool

    @property
    def span(self) -> int:
        return self.ld * self.columns

    @property
    def _step(self) -> int:
        """From column to column; where there is one, `ld` says nothing, and may be more than a stride can be."""
        return self.ld if self.columns > 1 else self.rows

    def _check(self, first: int, last: int) -> None:
        """Raise unless all matrices whose element (0, 0) lies in first..last are inside the buffer."""
        empty = self.rows == 0 or self.columns == 0
        need = 0 if empty else (self.columns - 1) * self.ld + self.rows
        if first < 0 or last + need > self.flat.size:
            raise LayoutError(
                f"elements of {self.name}",
                limit=f"0 to {self.flat.size - 1}, those of its buffer"
                if self.flat.size
                else "none: its buffer is empty",
                value=f"{first} to {last + max(need, 1) - 1}",
                nearest=f"offset 0 in a buffer of {need + max(last - first, 0)}",
            )

    def _view(self, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Array:
        item, writeable = self.flat.itemsize, self.flat.flags.writeable
        try:
            if 0 in shape:
                return np.empty(shape, self.flat.dtype)
            return as_strided(
                self.flat[offset:], shape, tuple(s * item for s in strides), subok=True, writeable=writeable
            )
        except (ValueError, OverflowError) as error:
            limit = "matrices whose elements 63 bits can count"
            raise ShapeError(f"shape of {self.name}", limit=limit, value=list(shape), nearest=[0, 0]) from error

    def at(self, offset: int) -> Array:
        """op of the matrix at `offset`, as a view [rows, columns] of op's result."""
        self._check(offset, offset)
        x = self._view(offset, (self.rows, self.columns), (1, self._step))
        return x.T if self.transpose else x

    def batch(self, offset: int, step: int, count: int) -> Array:
        """op of the matrices at offset + i * step, as one view [count, rows, columns]."""
        if count:
            reach = step * (count - 1)
            self._check(offset + min(reach, 0), offset + max(reach, 0))
        x = self._view(offset, (count, self.rows, self.columns), (step if count > 1 else 0, 1, self._step))
        return x.swapaxes(1, 2) if self.transpose else x


@dataclass(frozen=True, slots=True)
class _Stored:
    """The operands of a call, checked as far as one item goes."""

    windows: tuple[_Window, _Window, _Window]
    settings: problem.Settings
    here: Operands
    given: Any  # the caller's C

    def run(self, a: Array, b: Array, c: Array) -> Any:
        """Row-major C.T = op(B).T @ op(A).T: the kernels' own order, and the swap costs nothing."""
        problem.check_product(a, b, c if self.settings.reads_c else None, None, c, self.settings, ("A", "B", "C"))
        bt, at, ct = b.swapaxes(-1, -2), a.swapaxes(-1, -2), c.swapaxes(-1, -2)
        dispatch.run(self.here.device, bt, at, ct if self.settings.reads_c else None, ct, None, self.settings)
        return self.here.result(c, self.given)

    def run_items(self, a: Sequence[Array], b: Sequence[Array], c: list[Array]) -> Any:
        """The same for each item of three lists."""
        for x, y, out in zip(a, b, c, strict=True):
            start = out if self.settings.reads_c else None
            problem.check_product(x, y, start, None, out, self.settings, ("A", "B", "C"))
        reads = [(name, i, x) for name, group in (("A", a), ("B", b)) for i, x in enumerate(group)]
        check_items_apart(c, reads, out_name="C")
        at, bt, ct = [x.T for x in a], [x.T for x in b], [x.T for x in c]
        starts: Sequence[Array | None] = ct if self.settings.reads_c else [None] * len(ct)
        dispatch.run_items(self.here.device, bt, at, starts, ct, None, self.settings)
        return self.here.results(c, self.given)


def _stored(
    transa: str,
    transb: str,
    sizes: tuple[int, int, int],
    buffers: tuple[Any, Any, Any],
    lds: tuple[int, int, int],
    alpha: float,
    beta: float,
    contract: ContractLike | None,
    mode: str | None,
) -> _Stored:
    contract = contract if mode is None else contract_of(mode, contract)
    m, n, k = (_size(name, x) for name, x in zip("mnk", sizes, strict=True))
    ta, tb = (problem.stored(name, op) == "T" for name, op in (("transa", transa), ("transb", transb)))
    here = Operands()
    flat = [_flat(name, here.view(name, x)) for name, x in zip("abc", buffers, strict=True)]
    shapes = ((k, m) if ta else (m, k), (n, k) if tb else (k, n), (m, n))
    windows = tuple(
        _Window(name.upper(), x, *shape, _ld(name, ld, shape[0]), op)
        for name, x, shape, ld, op in zip("abc", flat, shapes, lds, (ta, tb, False), strict=True)
    )
    given = dispatch.Options(contract, alpha, beta, flat[2].dtype)
    chosen = dispatch.settings(given, here.device, flat[0], flat[1])
    return _Stored(windows, chosen, here, buffers[2])  # type: ignore[arg-type]


def _flat(name: str, flat: Array) -> Array:
    if flat.ndim != 1 or not flat.flags.c_contiguous:
        raise LayoutError(
            f"buffer {name}",
            limit="one dimension, contiguous",
            value=f"shape {list(flat.shape)}, strides {list(flat.strides)} bytes",
            nearest=f"{name}.reshape(-1) of a contiguous array",
        )
    problem.check_operand(name, flat, INT32 if name == "c" else INT8)
    return flat


def _ld(name: str, ld: Any, rows: int) -> int:
    value = _whole(f"ld{name}", ld)
    if value < max(1, rows):
        limit = f"at least the {rows} rows of the stored {name.upper()}"
        raise LayoutError(f"ld{name}", limit=limit, value=value, nearest=max(1, rows))
    return value


def _whole(name: str, value: Any) -> int:
    found = arguments.counted(value)
    if found is None:
        raise OptionError(name, limit="a whole number", value=arguments.shown(value), nearest=0)
    return found


def _items(name: str, offsets: Any) -> list[Any]:
    found = arguments.items(offsets)
    if found is None:
        raise OptionError(name, limit="an offset for each item", value=arguments.shown(offsets), nearest=[0])
    return found


def _wholes(name: str, *values: Any) -> list[int]:
    """One for each of A, B and C."""
    return [_whole(f"{name}_{letter}", x) for letter, x in zip("abc", values, strict=True)]


def _size(name: str, value: Any) -> int:
    size = _whole(name, value)
    if size < 0:
        raise ShapeError(name, limit="at least 0", value=size, nearest=0)
    return size
