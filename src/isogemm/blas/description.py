"""Which BLAS call a product of array views is, or why one of them would have to be copied first."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from ..api import dispatch
from ..api.operands import Operands
from ..base.dtypes import INT8
from ..problem import settings
from . import calls as blas
from .tensor_cores import Eligibility, tensor_cores

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Operand:
    """One argument of a column-major call.

    Attributes
    ----------
    name : {"a", "b", "out"}
    trans : {"N", "T"}
    ld : int
        Leading dimension, in elements.
    stride : int
        Elements from one item of the batch to the next; 0 without a batch and for a shared matrix.
    offsets : tuple of int
        Where each item begins, for a pointer array.
    start : int
        Elements between the beginning of the buffer that owns the memory and the view.
    copy : str
        Why the view has to be copied first; empty when it does not.
    """

    name: str
    trans: str
    ld: int
    stride: int = 0
    offsets: tuple[int, ...] = ()
    start: int = 0
    copy: str = ""


@dataclass(frozen=True, slots=True)
class Call:
    """A BLAS call in column-major terms; ``str()`` writes it beside its row-major translation.

    Attributes
    ----------
    routine : {"gemm", "gemm_strided_batched", "gemm_batched"}
    m, n, k, batch_count : int
        Of the column-major call: m and n are swapped where the operands are.
    first, second, out : Operand
        In the order of the call.
    swapped : bool
        Whether `first` is b: what a row-major out takes.
    copies : tuple of str
        One line for each operand that has to be copied first; empty when nothing has.
    """

    routine: str
    m: int
    n: int
    k: int
    batch_count: int
    first: Operand
    second: Operand
    out: Operand
    swapped: bool
    _arrays: tuple[Array, Array, Array | None] = field(repr=False, compare=False)
    _whole: tuple[int, ...] = field(repr=False, compare=False)
    _shape: tuple[int, ...] = field(repr=False, compare=False)
    _dtype: np.dtype[Any] = field(repr=False, compare=False)
    _given: tuple[Any, Any, Any] = field(repr=False, compare=False)
    _here: Operands = field(repr=False, compare=False)

    @property
    def copies(self) -> tuple[str, ...]:
        return tuple(f"{x.name}: {x.copy}" for x in (self.first, self.second, self.out) if x.copy)

    def __str__(self) -> str:
        x, y = self.first, self.second
        lines = [f"column-major  {self._line(x, y, self.m, self.n, x.trans, y.trans, self.out.ld)}"]
        flip = {"N": "T", "T": "N"}
        if self.swapped:
            lines.append(f"row-major     {self._line(y, x, self.n, self.m, y.trans, x.trans, self.out.ld)}")
            lines.append("the same call: operands swapped, m and n swapped")
        else:
            row = self._line(x, y, self.m, self.n, flip[x.trans], flip[y.trans], self.out.ld)
            lines.append(f"as stored     {row} with out column-major")
        lines += [f"{o.name} begins at element {o.start} of its buffer" for o in (x, y, self.out) if o.start]
        lines += [f"copy needed   {line}" for line in self.copies] or ["no copies"]
        return "\n".join(lines)

    def tensor_cores(self, mode: str = "default") -> Eligibility:
        """Whether this call could use an NVIDIA GPU's tensor cores: by its types, extents, strides and addresses."""
        a, b, out = self._arrays
        if a.dtype != b.dtype:
            return Eligibility(False, (f"operands of two types: {a.dtype.name} and {b.dtype.name}",))
        given = [x for x in (a, b, out) if x is not None]
        m, n = (self.n, self.m) if self.swapped else (self.m, self.n)
        return tensor_cores(
            m, n, self.k, dtype=a.dtype.name, mode=mode,
            leading=(self.first.ld, self.second.ld, self.out.ld), addresses=tuple(x.ctypes.data for x in given),
        )  # fmt: skip

    def _line(self, x: Operand, y: Operand, m: int, n: int, tx: str, ty: str, ldc: int) -> str:
        text = f"{tx!r}, {ty!r}, {m}, {n}, {self.k}, 1.0, {x.name}, {x.ld}, {y.name}, {y.ld}, 0.0, out, {ldc}"
        if self.routine == "gemm_strided_batched":
            text += f", {x.stride}, {y.stride}, {self.out.stride}, {self.batch_count}"
        elif self.routine == "gemm_batched":
            text += "".join(f", {_short(o.offsets)}" for o in (x, y, self.out))
        return f"{self.routine}({text})"

    def run(self) -> Any:
        """Make the call through `isogemm.blas`, copying only what `copies` names; the bits are those of `matmul`.

        Returns
        -------
        array
            The caller's `out`, or a new array of the product's shape.
        """
        a, b, out = self._arrays
        device = self._here.device
        target = dispatch.allocate(device, self._whole, self._dtype) if out is None or self.out.copy else out
        given = {"a": a, "b": b, "out": target}
        x, y, z = self.first, self.second, self.out
        fx, fy, fz = (
            _flat(device.contiguous(given[o.name]) if o.copy and o is not z else given[o.name]) for o in (x, y, z)
        )
        call = (x.trans, y.trans, self.m, self.n, self.k, 1.0, fx, x.ld, fy, y.ld, 0.0, fz, z.ld)
        if not target.size:
            pass
        elif self.routine == "gemm":
            blas.gemm(*call)
        elif self.routine == "gemm_strided_batched":
            blas.gemm_strided_batched(*call, x.stride, y.stride, z.stride, self.batch_count)
        else:
            blas.gemm_batched(*call, x.offsets, y.offsets, z.offsets)
        if out is not None and target is not out:
            device.assign(out, target)
        return self._here.result(target.reshape(self._shape), self._given[2], *self._given[:2])


def describe(a: Any, b: Any, out: Any = None) -> Call:
    """The exact BLAS call for ``a @ b`` on array views, or why a copy is needed. Computes nothing.

    Parameters
    ----------
    a, b : array [..., m, k] and [..., k, n], or [k]
        Element types and broadcasting are those of `isogemm.matmul`.
    out : array, optional
        Where the result would go; by default a new C-contiguous array.

    Returns
    -------
    Call
        ``str()`` gives the column-major call and its row-major translation, ``run()`` makes it, ``copies``
        is empty when every view can be passed as it lies.

    Raises
    ------
    ShapeError, DTypeError, LayoutError, AliasError
        `isogemm.matmul` refuses the product, or `out`.

    Examples
    --------
    >>> import numpy as np
    >>> print(describe(np.ones((5, 7), np.float32), np.ones((3, 7), np.float32).T))
    column-major  gemm('T', 'N', 3, 5, 7, 1.0, b, 7, a, 7, 0.0, out, 3)
    row-major     gemm('N', 'T', 5, 3, 7, 1.0, a, 7, b, 7, 0.0, out, 3)
    the same call: operands swapped, m and n swapped
    no copies
    """
    here = Operands()
    xa, xb, xc = here.view("a", a), here.view("b", b), here.optional("out", out)
    ma, mb, whole, shape = dispatch.matrices(xa, xb)
    mc = None if xc is None else dispatch.with_axes(xc, shape, xa.ndim == 1, xb.ndim == 1)
    for name, x in (("a", ma), ("b", mb)):
        settings.check_operand(name, x, INT8)
    dtype = dispatch.settings(dispatch.Options(), here.device, ma, mb).result_dtype(ma.dtype, mb.dtype)
    if mc is not None:
        settings.check_out(mc, whole, dtype, (("a", ma), ("b", mb)))
    places = [
        _Matrices.of("a", ma, whole[:-2]),
        _Matrices.of("b", mb, whole[:-2]),
        _Matrices.fresh(whole) if mc is None else _Matrices.of("out", mc, whole[:-2]),
    ]
    return _call(places, whole, shape, (ma, mb, mc), dtype, (a, b, out), here)


def _call(
    places: list[_Matrices],
    whole: tuple[int, ...],
    shape: tuple[int, ...],
    arrays: tuple[Array, Array, Array | None],
    dtype: np.dtype[Any],
    given: tuple[Any, Any, Any],
    here: Operands,
) -> Call:
    m, n, k = *whole[-2:], places[0].shape[1]
    swapped = places[2].trans == "T"
    if swapped:  # a row-major out is the transpose of a column-major one: out.T = b.T @ a.T
        places = [places[1].flipped(), places[0].flipped(), places[2].flipped()]
        m, n = n, m
    count = math.prod(whole[:-2])
    routine, strides = "gemm", [0] * 3
    offsets: list[tuple[int, ...]] = [()] * 3
    if len(whole) > 2:
        constant = [p.constant_stride() for p in places]
        routine = "gemm_batched" if None in constant else "gemm_strided_batched"
        strides = [s or 0 for s in constant]
        offsets = [p.offsets() if routine == "gemm_batched" else () for p in places]
    operands = [
        Operand(p.name, p.trans, p.ld, s, o, p.start, p.copy) for p, s, o in zip(places, strides, offsets, strict=True)
    ]
    first, second, target = operands
    return Call(routine, m, n, k, count, first, second, target, swapped, arrays, whole, shape, dtype, given, here)


@dataclass(frozen=True, slots=True)
class _Matrices:
    """Where a stack of matrices lies: strides in elements, and the reading of it as column-major."""

    name: str
    shape: tuple[int, int]
    batch: tuple[int, ...]
    batch_strides: tuple[int, ...]
    trans: str
    ld: int
    start: int = 0
    copy: str = ""

    @classmethod
    def of(cls, name: str, x: Array, batch: tuple[int, ...]) -> _Matrices:
        """The place of `x`, or of its contiguous copy where BLAS cannot express the view."""
        strides = tuple(s // x.itemsize for s in x.strides)
        reason = _why_copy(x.shape, strides) if x.size else ""
        if x.size and any(s % x.itemsize for s in x.strides):
            reason = f"strides of {list(x.strides)} bytes are not whole elements of {x.itemsize}"
        if reason or not x.size:
            strides = _contiguous(x.shape)
        lead = dict(zip(range(-x.ndim, -2), zip(x.shape, strides, strict=True), strict=False))
        steps = tuple(
            0 if axis not in lead or lead[axis][0] == 1 else lead[axis][1] for axis in range(-len(batch) - 2, -2)
        )
        rows, columns = x.shape[-2:]
        trans, ld = _reading(rows, columns, *strides[-2:])
        return cls(name, (rows, columns), batch, steps, trans, ld, 0 if reason else _start(x), reason)

    @classmethod
    def fresh(cls, whole: tuple[int, ...]) -> _Matrices:
        """The place of a new C-contiguous array."""
        steps = _contiguous(whole)[:-2]
        return cls("out", (whole[-2], whole[-1]), whole[:-2], steps, "T", max(1, whole[-1]))

    def flipped(self) -> _Matrices:
        """The place of the transposes."""
        rows, columns = self.shape
        return replace(self, shape=(columns, rows), trans="N" if self.trans == "T" else "T")

    def constant_stride(self) -> int | None:
        """Elements from one matrix to the next, or None when that is not one number."""
        pairs = [(d, s) for d, s in zip(self.batch, self.batch_strides, strict=True) if d != 1]
        if any(outer != size * inner for (_, outer), (size, inner) in pairwise(pairs)):
            return None
        return pairs[-1][1] if pairs else 0

    def offsets(self) -> tuple[int, ...]:
        """Where each matrix begins, from the first."""
        return tuple(
            sum(i * s for i, s in zip(index, self.batch_strides, strict=True)) for index in np.ndindex(self.batch)
        )


def _reading(rows: int, columns: int, down: int, across: int) -> tuple[str, int]:
    """(trans, ld): "T" when rows are contiguous, "N" when columns are. A vector is read as rows where it can be."""
    ld = down if rows > 1 else max(1, columns)
    if (columns <= 1 or across == 1) and ld >= columns:
        return "T", max(ld, 1)
    return "N", max(1, across if columns > 1 else rows)


def _why_copy(shape: tuple[int, ...], strides: tuple[int, ...]) -> str:
    """Why no leading dimension and batch stride describe a view; empty when they do."""
    for axis, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        if size > 1 and stride < 0:
            return f"stride {stride} of axis {axis} is negative, and BLAS walks upward"
        if size > 1 and stride == 0 and axis >= len(shape) - 2:
            line = "row" if axis == len(shape) - 2 else "column"
            return f"stride 0 of axis {axis} repeats one {line}, and no leading dimension is 0"
    (rows, columns), (down, across) = shape[-2:], strides[-2:]
    if min(rows, columns) > 1 and 1 not in (down, across):
        return f"neither stride of the matrix is 1 ({down} and {across}), so no leading dimension describes it"
    trans, ld = _reading(rows, columns, down, across)
    least = columns if trans == "T" else rows
    if ld < least:
        return f"a leading dimension of {ld} is less than the {least} elements it steps over: they overlap"
    return ""


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def _start(x: Array) -> int:
    """Elements from the beginning of the memory's owner to the view."""
    owner: Any = x
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    tensor: Any = getattr(owner.base, "owner", None)  # a device array's: where it begins in the storage counts too
    before = tensor.storage_offset() if hasattr(tensor, "storage_offset") else 0
    return before + int(x.ctypes.data - byte_bounds(owner)[0]) // x.itemsize if x.size else 0


def _flat(x: Array) -> Array:
    """The elements from the first to the last of a view, as a flat buffer."""
    if not x.size:
        return np.empty(0, x.dtype)
    extent = 1 + sum((d - 1) * s for d, s in zip(x.shape, x.strides, strict=True)) // x.itemsize
    return as_strided(x, (extent,), (x.itemsize,), subok=True, writeable=x.flags.writeable)


def _short(offsets: tuple[int, ...]) -> str:
    shown = ", ".join(str(o) for o in offsets[:4])
    return f"[{shown}, ...]" if len(offsets) > 4 else f"[{shown}]"
