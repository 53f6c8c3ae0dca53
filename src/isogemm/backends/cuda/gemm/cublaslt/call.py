"""A product as cuBLASLt takes it: the column-major call, its descriptors and the handle of a device.

A row-major out[m, n] = A @ B is the column-major out^T[n, m] = B^T @ A^T, because a row-major matrix *is* its transpose
in column-major order: B goes first, m and n swap, nothing is copied. Split-K is not part of a call; it belongs to an
algorithm (`isogemm.backends.cuda.gemm.cublaslt.search`).
"""

from __future__ import annotations

import ctypes
import importlib
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from .....errors import DeviceError
from .....problem.product import Product, Strides
from ...driver.libcuda import context, relaxed

DATA_TYPE = {"float32": 0, "float16": 2, "bfloat16": 14}  # cudaDataType
COMPUTE_32F = 68  # cublasComputeType: products and sums in float32, operands as they are
LARGEST = 2**31 - 1  # of an extent or a count; cuBLASLt indexes rows and columns by int
BATCH = 65535  # items beyond which some of its kernels have no grid


@dataclass(frozen=True, slots=True)
class Matrix:
    """A stored column-major matrix: element (i, j) of item b lies at ``i + j * ld + b * stride``."""

    rows: int
    columns: int
    ld: int
    stride: int
    dtype: str


@dataclass(frozen=True, slots=True)
class CublasCall:
    """out[m, n] = op(first)[m, k] @ op(second)[k, n] (+ C), column-major."""

    swapped: bool  # whether `first` is B: what a row-major out takes
    trans_first: str  # N or T
    trans_second: str
    first: Matrix
    second: Matrix
    out: Matrix
    c: Matrix  # `out` where no C is read
    batch: int

    @property
    def matrices(self) -> tuple[Matrix, Matrix, Matrix, Matrix]:
        """The matrices in the order in which the library asks for them."""
        return self.first, self.second, self.c, self.out

    @property
    def types(self) -> tuple[int, ...]:
        """cudaDataType of each."""
        return tuple(DATA_TYPE[x.dtype] for x in self.matrices)


def as_call(product: Product) -> CublasCall | None:
    """The column-major call that a product is, or None where no leading dimensions describe its matrices."""
    m, n, k = product.m, product.n, product.k
    if not (min(m, n, k) >= 1 and max(m, n, k) <= LARGEST and 1 <= product.batch <= BATCH):
        return None
    places = {
        "a": _reading(m, k, product.a),
        "b": _reading(k, n, product.b),
        "out": _reading(m, n, product.out),
        "c": _reading(m, n, product.c or product.out),
    }
    if None in places.values() or (product.batch > 1 and not product.out.batch):
        return None
    (ta, lda), (tb, ldb), (to, ldo), (tc, ldc) = (p for p in places.values() if p)
    swapped = to == "T"
    if tc != to:
        return None
    a = _stored(m, k, ta, lda, product.a.batch, product.dtype_a)
    b = _stored(k, n, tb, ldb, product.b.batch, product.dtype_b)
    out = _stored(m, n, to, ldo, product.out.batch, product.dtype_out)
    c = out
    if product.c is not None:
        c = _stored(m, n, tc, ldc, product.c.batch, product.dtype_c or product.dtype_out)
    if swapped:
        return CublasCall(True, _flip(tb), _flip(ta), b, a, out, c, product.batch)
    return CublasCall(False, ta, tb, a, b, out, c, product.batch)


def _reading(rows: int, columns: int, x: Strides) -> tuple[str, int] | None:
    """(trans, ld): "T" where rows are contiguous, "N" where columns are; None where neither holds.

    A stride along an axis of one element is nobody's business: the least leading dimension stands for it.
    """
    if x.col == 1 or columns == 1:
        ld = x.row if rows > 1 else columns
        if ld >= columns:
            return "T", ld
    if x.row == 1 or rows == 1:
        ld = x.col if columns > 1 else rows
        if ld >= rows:
            return "N", ld
    return None


def _stored(rows: int, columns: int, trans: str, ld: int, stride: int, dtype: str) -> Matrix:
    return Matrix(columns, rows, ld, stride, dtype) if trans == "T" else Matrix(rows, columns, ld, stride, dtype)


def _flip(trans: str) -> str:
    return "N" if trans == "T" else "T"


@cache
def binding() -> Any:
    """The low-level binding, ``nvmath.bindings.cublasLt``.

    Raises
    ------
    DeviceError
        nvmath-python is not installed.
    """
    try:
        return importlib.import_module("nvmath.bindings.cublasLt")
    except ImportError as error:
        raise DeviceError(
            "cuBLASLt", limit="nvmath-python and a cuBLAS library", value=str(error), nearest="isogemm[cuda]"
        ) from error


@cache
def handle(device: int) -> int:
    """The handle of a device, made once and kept: cuBLASLt's functions may share one among threads.

    Raises
    ------
    DeviceError
        There is no cuBLASLt that this binding can use.
    """
    lt = binding()
    with context(device), relaxed():
        try:
            return int(lt.create())
        except (RuntimeError, lt.cuBLASLtError) as error:
            raise DeviceError(
                "cuBLASLt", limit="a cuBLAS library of this driver's CUDA", value=str(error), nearest="isogemm[cuda]"
            ) from error


def set_attribute(
    setter: Callable[[int, int, int, int], object], target: int, attribute: int, value: int, ctype: Any
) -> None:
    """Set one attribute of a descriptor, a layout, a preference or an algorithm."""
    held = ctype(value)
    setter(target, int(attribute), ctypes.addressof(held), ctypes.sizeof(held))


class Descriptors:
    """The descriptors of a call: made once, only read afterwards, so that threads may share them.

    Parameters
    ----------
    call : CublasCall
    bias : int
        Address of the bias, one value for each row of the column-major out; 0 for none.
    dtype_bias : str, optional
    """

    __slots__ = ("__weakref__", "c", "call", "first", "matmul", "out", "second")

    def __init__(self, call: CublasCall, bias: int = 0, dtype_bias: str | None = None) -> None:
        lt = binding()
        self.call = call
        self.matmul = lt.matmul_desc_create(COMPUTE_32F, DATA_TYPE["float32"])
        weakref.finalize(self, lt.matmul_desc_destroy, self.matmul).atexit = False
        self._set_operations(bias, dtype_bias)
        self.first = self._layout(call.first)
        self.second = self._layout(call.second)
        self.out = self._layout(call.out)
        self.c = self.out if call.c == call.out else self._layout(call.c)

    @property
    def handles(self) -> tuple[int, int, int, int, int]:
        """The descriptor and the layouts of the matrices."""
        return self.matmul, self.first, self.second, self.c, self.out

    def _set_operations(self, bias: int, dtype_bias: str | None) -> None:
        lt = binding()
        name, put = lt.MatmulDescAttribute, lt.matmul_desc_set_attribute
        set_attribute(put, self.matmul, name.TRANSA, int(self.call.trans_first == "T"), ctypes.c_int32)
        set_attribute(put, self.matmul, name.TRANSB, int(self.call.trans_second == "T"), ctypes.c_int32)
        if dtype_bias is not None:
            set_attribute(put, self.matmul, name.EPILOGUE, int(lt.Epilogue.BIAS), ctypes.c_uint32)
            set_attribute(put, self.matmul, name.BIAS_DATA_TYPE, DATA_TYPE[dtype_bias], ctypes.c_int32)
            set_attribute(put, self.matmul, name.BIAS_POINTER, bias, ctypes.c_uint64)

    def _layout(self, x: Matrix) -> int:
        lt = binding()
        layout = lt.matrix_layout_create(DATA_TYPE[x.dtype], x.rows, x.columns, x.ld)
        weakref.finalize(self, lt.matrix_layout_destroy, layout).atexit = False
        if self.call.batch > 1:
            name, put = lt.MatrixLayoutAttribute, lt.matrix_layout_set_attribute
            set_attribute(put, layout, name.BATCH_COUNT, self.call.batch, ctypes.c_int32)
            set_attribute(put, layout, name.STRIDED_BATCH_OFFSET, x.stride, ctypes.c_int64)
        return int(layout)
