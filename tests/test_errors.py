"""Bad input, row by row: a typed error that names limit, value and nearest legal choice, and C untouched."""

from __future__ import annotations

import copy
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided
from tests.backends.cuda.pretend import nowhere, pretended  # noqa: F401
from tests.products import BF16, F16, F32
from tests.quant.draws import encoded

import isogemm
from isogemm import blas
from isogemm.base import jit, threads
from isogemm.contract.spec import as_contract
from isogemm.errors import (
    DOCTOR,
    AliasError,
    ContractError,
    DeviceError,
    DTypeError,
    IsogemmError,
    LayoutError,
    LimitError,
    OptionError,
    ShapeError,
)

POISON = np.uint32(0x7FC0BEEF)  # a NaN whose payload no arithmetic makes


@dataclass(frozen=True)
class Row:
    """A call on `c`, a poisoned float32 [4, 4], and what its error has to say."""

    name: str
    call: Callable[[np.ndarray], Any]
    error: type[IsogemmError]
    value: str
    nearest: str


def ones(*shape: int, dtype: Any = F32) -> np.ndarray:
    return np.ones(shape, dtype)


def huge(*shape: int, dtype: Any = F32) -> np.ndarray:
    return np.broadcast_to(np.ones(1, dtype), shape)


def frozen(c: np.ndarray) -> np.ndarray:
    view = c[:]
    view.flags.writeable = False
    return view


def unaligned(rows: int, columns: int) -> np.ndarray:
    return np.frombuffer(bytearray(rows * columns * 4 + 1), F32, offset=1).reshape(rows, columns)


class Device:
    """Where the rows' arrays are taken before they reach a call; the host, unless a test says otherwise."""

    move: Callable[[np.ndarray], Any] | None = None

    @classmethod
    def moved(cls, x: Any) -> Any:
        if isinstance(x, list):
            return [cls.moved(item) for item in x]
        return cls.move(x) if cls.move is not None and type(x) is np.ndarray else x


def there(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, with its arrays taken to where `Device` says."""

    def moved(*args: Any, **options: Any) -> Any:
        options = {name: value if name == "alpha" else Device.moved(value) for name, value in options.items()}
        return call(*map(Device.moved, args), **options)

    return moved


A, B = ones(4, 6), ones(6, 4)
matmul, linear, gemm = there(isogemm.matmul), there(isogemm.linear), there(isogemm.gemm)
strided, batched, grouped = map(there, (isogemm.gemm_strided_batched, isogemm.gemm_batched, isogemm.gemm_grouped))
describe = there(blas.describe)

SHAPES = [
    Row("inner", lambda c: matmul(A, ones(5, 4), out=c), ShapeError, "[5, 4]", "b [6, 4]"),
    Row("inner 1-D", lambda c: matmul(ones(5), B), ShapeError, "[1, 5]", "[5, 4]"),
    Row("0-D", lambda c: matmul(ones(), B), ShapeError, "0", "reshape(1)"),
    Row("batch", lambda c: matmul(ones(2, 4, 6), ones(3, 6, 4)), ShapeError, "[3, 6, 4]", "b [2, 6, 4]"),
    Row("out", lambda c: matmul(A, ones(6, 3), out=c), ShapeError, "[4, 4]", "[4, 3]"),
    Row("out rank", lambda c: matmul(ones(6), B, out=c), ShapeError, "[4, 4]", "[4]"),
    Row("gemm 3-D", lambda c: gemm(ones(1, 4, 6), B, out=c), ShapeError, "[1, 4, 6]", "matmul"),
    Row("gemm c", lambda c: gemm(A, B, ones(4, 3), beta=1.0, out=c), ShapeError, "[4, 3]", "[4, 4]"),
    Row("gemm transposed", lambda c: gemm(A, B, trans_a="T", out=c), ShapeError, "[6, 4]", "b [4, 4]"),
    Row("bias", lambda c: gemm(A, B, bias=ones(3), out=c), ShapeError, "[3]", "[4]"),
    Row("bias 2-D", lambda c: gemm(A, B, bias=ones(1, 4), out=c), ShapeError, "[1, 4]", "[4]"),
    Row("linear k", lambda c: linear(A, ones(4, 5)), ShapeError, "w [4, 5]", "x [4, 5]"),
    Row("linear w", lambda c: linear(A, ones(2, 4, 6)), ShapeError, "[2, 4, 6]", "matmul"),
    Row("linear bias", lambda c: linear(A, ones(3, 6), ones(4)), ShapeError, "[4]", "[3]"),
    Row("linear out", lambda c: linear(A, ones(3, 6), out=c), ShapeError, "[4, 4]", "[4, 3]"),
    Row("linear 0-D", lambda c: linear(ones(), ones(3, 6)), ShapeError, "x []", "x [6]"),
    Row("strided 2-D", lambda c: strided(A, B), ShapeError, "[4, 6]", "broadcast_to"),
    Row("strided batch", lambda c: strided(ones(2, 4, 6), ones(3, 6, 4)), ShapeError, "[3, 6, 4]", "[2, 6, 4]"),
    Row("list lengths", lambda c: batched([A], [B, B], out=[c]), ShapeError, "2", "1"),
    Row("list out", lambda c: batched([A, A], [B, B], out=[c]), ShapeError, "1", "2"),
    Row("list c", lambda c: batched([A, A], [B, B], [c], beta=1.0), ShapeError, "1", "2"),
    Row("list sizes", lambda c: batched([A, A[:2]], [B, B]), ShapeError, "(2, 4, 6)", "gemm_grouped"),
    Row("list rank", lambda c: batched([ones(6)], [B], out=[c]), ShapeError, "[6]", "matmul"),
    Row("grouped inner", lambda c: grouped([A, A], [B, ones(5, 4)], out=[c, c]), ShapeError, "[5, 4]", "[6, 4]"),
    Row("describe", lambda c: describe(A, ones(6, 3), c), ShapeError, "[4, 4]", "[4, 3]"),
]

DTYPES = [
    Row("float64", lambda c: matmul(A.astype(float), B, out=c), DTypeError, "float64", "float32"),
    Row("complex", lambda c: matmul(A, B.astype(np.complex64), out=c), DTypeError, "complex64", "real and imaginary"),
    Row("object", lambda c: gemm(A.astype(object), B, out=c), DTypeError, "object", "float32"),
    Row("int8", lambda c: gemm(A.astype(np.int8), B, out=c), DTypeError, "int8", "float32"),
    Row("bool", lambda c: linear(A.astype(bool), A), DTypeError, "bool", "float32"),
    Row("text", lambda c: matmul(A.astype("U4"), B), DTypeError, "str", "float32"),
    Row("fields", lambda c: matmul(ones(4, 6, dtype="f4,f4"), B), DTypeError, "void", "float32"),
    Row("big-endian", lambda c: matmul(A.astype(">f4"), B, out=c), DTypeError, "foreign", "native"),
    Row("mixed halves", lambda c: matmul(A.astype(BF16), B.astype(F16)), DTypeError, "bfloat16 and float16", "both"),
    Row("out dtype", lambda c: matmul(A.astype(F16), B.astype(F16), out=c), DTypeError, "float32", "float16"),
    Row("out_dtype", lambda c: matmul(A, B, out_dtype=np.int32), DTypeError, "int32", "float32"),
    Row("out_dtype text", lambda c: matmul(A, B, out_dtype="quux"), DTypeError, "quux", "float32"),
    Row("out_dtype misspelt", lambda c: matmul(A, B, out_dtype="blfoat16"), DTypeError, "blfoat16", "bfloat16"),
    Row("c dtype", lambda c: gemm(A, B, c.astype(F16), beta=1.0, out=c), DTypeError, "float16", "float32"),
    Row("bias dtype", lambda c: gemm(A, B, bias=np.ones(4), out=c), DTypeError, "float64", "float32"),
    Row("list dtypes", lambda c: grouped([A, A.astype(F16)], [B, B.astype(F16)]), DTypeError, "float16", "float32"),
    Row("a list", lambda c: matmul([[1.0]], B, out=c), DTypeError, "list", "np.asarray"),
    Row("fp32 on halves", lambda c: matmul(A, B, contract="tensor_core:sm90"), DTypeError, "float32", "tf32:sm90"),
    Row("halves on tf32", lambda c: matmul(ones(2, 2, dtype=BF16), ones(2, 2, dtype=BF16), contract="tf32:sm90"),
        DTypeError, "bfloat16", "float32"),
    Row("mixed on tensor cores", lambda c: matmul(ones(2, 2, dtype=F16), ones(2, 2, dtype=BF16),
        contract="tensor_core:sm90"), DTypeError, "float16 and bfloat16", "both"),
]  # fmt: skip

MEMORY = [
    Row("read-only out", lambda c: matmul(A, B, out=frozen(c)), LayoutError, "read-only", "writable"),
    Row("unaligned a", lambda c: matmul(unaligned(4, 6), B, out=c), LayoutError, "unaligned", "np.require"),
    Row("unaligned b", lambda c: matmul(A, unaligned(6, 4)), LayoutError, "unaligned", "np.require"),
    Row("out is a", lambda c: matmul(c, ones(4, 4), out=c), AliasError, "overlap", "memory of its own"),
    Row("linear out is x", lambda c: linear(c, ones(4, 4), out=c), AliasError, "overlap", "memory of its own"),
    Row("linear out in w", lambda c: linear(ones(2, 4), c, out=c[:2]), AliasError, "overlap", "memory of its own"),
    Row("out is b", lambda c: gemm(ones(4, 4), c.T, out=c), AliasError, "overlap", "memory of its own"),
    Row("out in a", lambda c: gemm(c[:2], ones(4, 2), out=c[1:3, :2]), AliasError, "overlap", "memory of its own"),
    Row("out in bias", lambda c: gemm(A, B, bias=c[2], out=c), AliasError, "overlap", "memory of its own"),
    Row("out is c.T", lambda c: gemm(A, B, c.T, beta=1.0, out=c), AliasError, "overlap", "memory of its own"),
    Row("out in c", lambda c: gemm(A[:3], B, c[:3], beta=1.0, out=c[1:]), AliasError, "overlap", "memory of its own"),
    Row("out broadcast", lambda c: matmul(A, B, out=as_strided(c, (4, 4), (0, 4))), AliasError, "[0, 4]", "np.empty"),
    Row("out sliding", lambda c: matmul(A, B, out=as_strided(c, (4, 4), (4, 4))), AliasError, "[4, 4]", "np.empty"),
    Row("out batch", lambda c: strided(ones(2, 2, 6), ones(2, 6, 4), out=as_strided(c, (2, 2, 4), (16, 16, 4))),
        AliasError, "[16, 16, 4]", "np.empty"),
    Row("outs overlap", lambda c: batched([A[:2]] * 2, [B] * 2, out=[c[:2], c[1:3]]), AliasError, "overlap", "own"),
    Row("another's c", lambda c: batched([A[:2]] * 2, [B] * 2, [c[:2], c[2:]], beta=1.0, out=[c[2:], c[:2]]),
        AliasError, "overlap", "own"),
    Row("another's a", lambda c: grouped([A, c], [B, ones(4, 2)], out=[c, ones(4, 2)]), AliasError, "overlap", "own"),
]  # fmt: skip

OPTIONS = [
    Row("alpha inf", lambda c: gemm(A, B, alpha=np.inf, out=c), OptionError, "inf", "3.4028"),
    Row("alpha 1e39", lambda c: gemm(A, B, alpha=1e39, out=c), OptionError, "1e+39", "3.4028"),
    Row("beta nan", lambda c: gemm(A, B, c, beta=np.nan, out=c), OptionError, "nan", "1.0"),
    Row("alpha complex", lambda c: gemm(A, B, alpha=1j, out=c), OptionError, "1j", "1.0"),
    Row("alpha text", lambda c: gemm(A, B, alpha="1", out=c), OptionError, "'1'", "1.0"),
    Row("alpha array", lambda c: gemm(A, B, alpha=ones(2), out=c), OptionError, "array", "1.0"),
    Row("trans", lambda c: gemm(A, B, trans_a="H", out=c), OptionError, "'H'", "'N'"),
    Row("trans int", lambda c: gemm(A, B, trans_b=1, out=c), OptionError, "1", "'N'"),
    Row("beta without c", lambda c: gemm(A, B, beta=1.0, out=c), OptionError, "None", "beta=0"),
    Row("accumulate alone", lambda c: matmul(A, B, accumulate=True), OptionError, "None", "out="),
    Row("accumulate and beta", lambda c: gemm(A, B, c, beta=1.0, accumulate=True), OptionError, "1.0", "0"),
    Row("accumulate 2", lambda c: matmul(A, B, out=c, accumulate=2), OptionError, "2", "True"),
    Row("accumulate halves", lambda c: gemm(A, B, c.astype(F16), accumulate=True), DTypeError, "float16", "float32"),
    Row("accumulate tree", lambda c: matmul(A, B, out=c, accumulate=True, contract="fma/tree4"),
        ContractError, "fma/tree4", "chain"),
    Row("contract", lambda c: matmul(A, B, out=c, contract="fmaa/chain"), ContractError, "fmaa", "fma"),
    Row("order", lambda c: matmul(A, B, out=c, contract="fma/leaf"), ContractError, "leaf", "leaf4096"),
    Row("contract type", lambda c: matmul(A, B, out=c, contract=7), ContractError, "int", "fma/chain"),
]  # fmt: skip

SIZES = [
    Row("result", lambda c: matmul(huge(2**40, 1), huge(1, 2**40)), LimitError, str(2**82), "rows"),
    Row("memory", lambda c: matmul(huge(2**25, 1), huge(1, 2**25)), LimitError, str(2**52), "rows"),
    Row("linear", lambda c: linear(huge(2**30, 2), huge(2**30, 2)), LimitError, str(2**62), "rows"),
    Row("batch", lambda c: matmul(huge(2**40, 1, 2, 2), huge(2**40, 2, 2)), LimitError, str(2**40), "smaller"),
    Row("gemm", lambda c: gemm(huge(2**30, 1), huge(1, 2**30)), LimitError, str(2**62), "rows"),
    Row("grouped", lambda c: grouped([huge(2**30, 1)] * 9, [huge(1, 2**30)] * 9), LimitError, str(2**62), "rows"),
]


def bgemm(into: np.ndarray, **changes: Any) -> Any:
    """A legal 4 x 4 x 6 column-major call, except for `changes`."""
    call = {"transa": "N", "transb": "N", "m": 4, "n": 4, "k": 6, "alpha": 1.0, "a": ones(24), "lda": 4, "b": ones(24),
            "ldb": 6, "beta": 0.0, "c": into.reshape(-1), "ldc": 4}  # fmt: skip
    return there(blas.gemm)(**(call | changes))


def bstrided(c: np.ndarray, **changes: Any) -> Any:
    """Two 2 x 2 x 3 products, legal except for `changes`."""
    call = {"transa": "N", "transb": "N", "m": 2, "n": 2, "k": 3, "alpha": 1.0, "a": ones(12), "lda": 2, "b": ones(12),
            "ldb": 3, "beta": 0.0, "c": c.reshape(-1), "ldc": 2, "stride_a": 6, "stride_b": 6, "stride_c": 4,
            "batch_count": 2}  # fmt: skip
    return there(blas.gemm_strided_batched)(**(call | changes))


def bpointers(c: np.ndarray, a: list[int], b: list[int], out: list[int]) -> Any:
    return there(blas.gemm_batched)("N", "N", 2, 2, 3, 1.0, ones(12), 2, ones(12), 3, 0.0, c.reshape(-1), 2, a, b, out)


BLAS = [
    Row("lda", lambda c: bgemm(c, lda=3), LayoutError, "3", "4"),
    Row("lda of T", lambda c: bgemm(c, transa="T", lda=4), LayoutError, "4", "6"),
    Row("ldb", lambda c: bgemm(c, ldb=5), LayoutError, "5", "6"),
    Row("ldc", lambda c: bgemm(c, ldc=3), LayoutError, "3", "4"),
    Row("ld 0", lambda c: bgemm(c, m=0, lda=0), LayoutError, "0", "1"),
    Row("ld float", lambda c: bgemm(c, lda=4.0), OptionError, "4.0", "0"),
    Row("m", lambda c: bgemm(c, m=-1), ShapeError, "-1", "0"),
    Row("k", lambda c: bgemm(c, k=-6), ShapeError, "-6", "0"),
    Row("a short", lambda c: bgemm(c, a=ones(23)), LayoutError, "0 to 23", "24"),
    Row("b past its end", lambda c: bgemm(c, offset_b=1), LayoutError, "1 to 24", "24"),
    Row("c past its end", lambda c: bgemm(c, ldc=5), LayoutError, "0 to 18", "19"),
    Row("before a", lambda c: bgemm(c, offset_a=-1), LayoutError, "-1 to 22", "24"),
    Row("int64 overflow", lambda c: bgemm(c, lda=2**62), LayoutError, str(5 * 2**62 + 3), "buffer"),
    Row("2-D buffer", lambda c: bgemm(c, a=A), LayoutError, "[4, 6]", "reshape(-1)"),
    Row("stepped buffer", lambda c: bgemm(c, a=ones(48)[::2]), LayoutError, "[8]", "reshape(-1)"),
    Row("c in a", lambda c: bgemm(c, k=4, ldb=4, a=c.reshape(-1)), AliasError, "overlap", "own"),
    Row("read-only c", lambda c: bgemm(c, c=frozen(c).reshape(-1)), LayoutError, "read-only", "writable"),
    Row("trans", lambda c: bgemm(c, transb="X"), OptionError, "'X'", "'N'"),
    Row("beta", lambda c: bgemm(c, beta=np.inf), OptionError, "inf", "3.4028"),
    Row("int buffer", lambda c: bgemm(c, a=np.ones(24, int)), DTypeError, "int64", "float32"),
    Row("stride_c 0", lambda c: bstrided(c, stride_c=0), AliasError, "[0, ", "stride_c=4"),
    Row("stride_c overlaps", lambda c: bstrided(c, stride_c=3), AliasError, "[12, ", "stride_c=4"),
    Row("stride_c on ldc", lambda c: bstrided(c, ldc=4, stride_c=1), AliasError, "[4, ", "stride_c=8"),
    Row("stride_a past", lambda c: bstrided(c, stride_a=7), LayoutError, "0 to 12", "13"),
    Row("stride_b before", lambda c: bstrided(c, stride_b=-6), LayoutError, "-6 to 5", "12"),
    Row("batch_count", lambda c: bstrided(c, batch_count=-1), ShapeError, "-1", "0"),
    Row("pointer outside a", lambda c: bpointers(c, [0, 7], [0, 6], [0, 4]), LayoutError, "7 to 12", "6"),
    Row("pointers overlap in c", lambda c: bpointers(c, [0, 6], [0, 6], [0, 3]), AliasError, "overlap", "own"),
    Row("pointer lists", lambda c: bpointers(c, [0], [0, 6], [0, 4]), ShapeError, "[1, 2, 2]", "[1, 1, 1]"),
]


F8 = np.dtype(ml_dtypes.float8_e4m3fn)
PACKED = isogemm.pack(ones(4, 6))
QUANTIZED = encoded(ones(4, 32), "Q8_0")
LAYER = SimpleNamespace(weight=B)
HINTS = [
    Row("packed in matmul", lambda c: matmul(A, PACKED, out=c), DTypeError, "PackedWeight(4", "isogemm.linear(x, w)"),
    Row("packed in describe", lambda c: describe(A, PACKED), DTypeError, "PackedWeight", "isogemm.linear(x, w)"),
    Row("w.T in linear", lambda c: linear(A, ones(6, 3)), ShapeError, "[6, 3]", "w is [n, k]: did you mean w.T?"),
    Row("w in matmul", lambda c: matmul(A, ones(3, 6)), ShapeError, "[3, 6]", "linear(x, w), or w.T"),
    Row("tree alone", lambda c: matmul(A, B, contract="tree8"), ContractError, "tree8", "'fma/tree8'"),
    Row("chain alone", lambda c: matmul(A, B, contract="chain"), ContractError, "chain", "'fma/chain'"),
    Row("leaf alone", lambda c: matmul(A, B, contract="leaf4096"), ContractError, "leaf4096", "'fma/leaf4096'"),
    Row("Contract(3)", lambda c: isogemm.Contract(3), ContractError, "int 3", "Contract.parse"),
    Row("Contract(order)", lambda c: isogemm.Contract("fma", "chain"), ContractError, "str 'chain'", "Contract.parse"),
    Row("parse(3)", lambda c: isogemm.Contract.parse(3), ContractError, "int 3", "'fma/chain'"),
    Row("quantized in matmul", lambda c: matmul(A, QUANTIZED, out=c), DTypeError, "QuantizedM", "isogemm.linear(x, w)"),
    Row("array @ quantized", lambda c: A @ QUANTIZED, DTypeError, "QuantizedMatrix(4 x 32", "isogemm.linear(x, w)"),
    Row("array @ packed", lambda c: A @ PACKED, DTypeError, "PackedWeight(4 x 6", "isogemm.linear(x, w)"),
    Row("a layer", lambda c: linear(A, LAYER), LayoutError, "SimpleNamespace", "w.weight"),
    Row("a generator", lambda c: matmul(iter([1.0]), B), LayoutError, "list_iterator", "np.asarray(list(a)"),
    Row("iterators", lambda c: isogemm.gemm_grouped(iter([A]), [B]), DTypeError, "a list_iterator", "list(a)"),
    Row("no list", lambda c: isogemm.gemm_batched(A, [B]), ShapeError, "one matrix", "[a], or gemm"),
    Row("cast", lambda c: matmul(A, B, cast="bfloat16"), OptionError, "'bfloat16'", "cast='float32'"),
    Row("list and cast", lambda c: matmul([[1.0]], B), DTypeError, "list", 'cast="float32"'),
    Row("whole plan", lambda c: isogemm.plan(2.0, 3, 4), ShapeError, "2.0", "2"),
    Row("one count of heads", lambda c: isogemm.plan(9, 9, 64, heads=32), ShapeError, "32", "(32, 32)"),
    Row("heads that do not divide", lambda c: isogemm.plan(9, 9, 64, heads=(32, 5)), ShapeError, "(32, 5)", "(32, 4)"),
    Row("one group", lambda c: isogemm.plan(9, 9, 64, groups=9), ShapeError, "9", "(9,)"),
    Row("warm", lambda c: isogemm.warm([(4, 4)], device="cpu"), DeviceError, "cpu", "the command isogemm warm"),
    Row("threads", lambda c: isogemm.set_num_threads(10**6), OptionError, "1000000", str(threads._most())),
    Row("fp8 weight", lambda c: there(isogemm.pack)(A.astype(F8)), DTypeError, "float8_e4m3fn", "bfloat16"),
]  # fmt: skip


@pytest.mark.parametrize("x", [None, "x", np.float32(1)], ids=["None", "str", "scalar"])
def test_only_a_list_is_said_to_be_copied(x):
    with pytest.raises(DTypeError, match="an array") as caught:
        matmul(A, x)
    assert "copied" not in str(caught.value)
    with pytest.raises(DTypeError, match="copied silently"):
        matmul(A, [[1.0]])


@pytest.mark.parametrize(
    ("name", "there_is"),
    [
        ("int8", "int8 with int8 on a CPU"),
        ("uint8", "isogemm.QuantizedMatrix"),
        ("int4", "isogemm.QuantizedMatrix"),
        ("float8_e4m3fn", "bfloat16, which holds it exactly"),
        ("float8_e5m2", "bfloat16, which holds it exactly"),
    ],
)
def test_short_operands_are_told_what_there_is_for_them(name, there_is):
    dtype = np.dtype(getattr(ml_dtypes, name, None) or name)
    with pytest.raises(DTypeError, match=there_is):
        isogemm.pack(A.astype(dtype))
    with pytest.raises(DTypeError, match="float32" if name == "int8" else there_is):
        matmul(A.astype(dtype), B)
    with pytest.raises(DTypeError) as caught:
        matmul(A.astype(float), B)
    assert there_is not in str(caught.value)


def test_int8_where_only_floats_go_is_told_a_legal_choice():
    short = A.astype(np.int8)
    with pytest.raises(DTypeError, match=r"packed w is int8.*choice: float32, or the int8 array itself, in products"):
        isogemm.pack(short)
    for call in (
        lambda: linear(np.ones((1, 32), np.int8), isogemm.quantize(np.ones((2, 32), np.float32), "Q4_0")),
        lambda: matmul(short, short.T, out=np.empty((len(A), len(A)), np.int8)),
        lambda: isogemm.gemm(A, A.T, np.ones((len(A), len(A)), np.int8), beta=1.0),
    ):
        with pytest.raises(DTypeError, match=r"got: int8; nearest legal choice: (float|int)32$"):
            call()


def test_too_many_threads_in_the_environment(monkeypatch):
    for text in ("9" * 30, str(threads._most() + 1)):
        monkeypatch.setenv("ISOGEMM_NUM_THREADS", text)
        with pytest.raises(OptionError, match=f"ISOGEMM_NUM_THREADS: .*at most {threads._most()} threads; got: {text}"):
            threads._from_environment()
    monkeypatch.setenv("ISOGEMM_NUM_THREADS", str(threads._most()))
    assert 1 <= threads._from_environment() <= threads._most()


def test_nothing_is_said_to_be_kept_where_nothing_can_be(monkeypatch, tmp_path, capsys):
    (tmp_path / "file").touch()
    for folder, kept in ((tmp_path / "file" / "kernels", False), (tmp_path / "new" / "kernels", True)):
        monkeypatch.setattr(jit, "_said", False)
        monkeypatch.setattr(jit, "cache_directory", lambda folder=folder: folder)
        jit.announce()
        said = capsys.readouterr().err
        assert "compiling kernels for this CPU" in said
        assert ("kept" in said) == kept


ROWS = SHAPES + DTYPES + MEMORY + OPTIONS + SIZES + BLAS + HINTS


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_bad_input(row: Row) -> None:
    c = np.full((4, 4), POISON, np.uint32).view(F32)
    check(row, c)
    assert (c.view(np.uint32) == POISON).all()


# What a device's arrays cannot be: other element types have no device arrays, and are left to real tensors.
HOST_ALONE = {
    "object", "text", "fields", "big-endian", "read-only out", "unaligned a", "unaligned b", "read-only c",
    "float64", "complex", "int8", "bool", "int buffer", "bias dtype", "fp8 weight", "a list", "alpha array",
    "packed in matmul", "packed in describe", "quantized in matmul", "array @ quantized", "array @ packed", "a layer",
    "a generator", "iterators", "no list", "list and cast", "warm",
}  # fmt: skip


@pytest.mark.parametrize("row", [row for row in ROWS if row.name not in HOST_ALONE], ids=lambda row: row.name)
def test_bad_input_on_a_device(row: Row, pretended: Any, monkeypatch: Any) -> None:  # noqa: F811
    """The same errors for memory that cannot be read here, before anything is allocated or launched."""
    monkeypatch.setattr(Device, "move", staticmethod(nowhere))
    check(row, np.full((4, 4), POISON, np.uint32).view(F32))
    assert not pretended.chosen
    assert not pretended.allocated


TENSORS_CANNOT = HOST_ALONE - {"float64", "complex", "int8", "bool", "int buffer", "bias dtype"}


@pytest.mark.gpu
@pytest.mark.parametrize("row", [row for row in ROWS if row.name not in TENSORS_CANNOT], ids=lambda row: row.name)
def test_bad_input_on_a_gpu(row: Row, monkeypatch: Any) -> None:
    """The same errors for torch's tensors, and C untouched."""
    import torch

    c = np.full((4, 4), POISON, np.uint32).view(F32)
    there = torch.from_numpy(c.view(np.int32).copy()).cuda().view(torch.float32)
    monkeypatch.setattr(Device, "move", staticmethod(lambda x: on_gpu(x, c, there)))
    check(row, c, words=False)
    assert (there.view(torch.int32).cpu().numpy().view(np.uint32) == POISON).all()


def on_gpu(x: np.ndarray, c: np.ndarray, there: Any) -> Any:
    """`x` as a CUDA tensor with the same strides; a view of `c` as one of `there`."""
    import torch

    steps = tuple(s // x.itemsize for s in x.strides)
    if np.may_share_memory(x, c):
        return there.as_strided(x.shape, steps, (x.ctypes.data - c.ctypes.data) // 4)
    flat = torch.ones(1, dtype=torch.bfloat16) if x.dtype == BF16 else torch.from_numpy(np.ones(1, x.dtype))
    if x.size < 2**20:
        extent = 1 + sum(max(d - 1, 0) * s for d, s in zip(x.shape, steps, strict=True))
        flat = flat.expand(extent).contiguous()
    return flat.cuda().as_strided(x.shape, steps)


def check(row: Row, c: np.ndarray, *, words: bool = True) -> None:
    """Raise unless the row's call fails as it should; tensors name their dtypes and attributes in torch's words."""
    with pytest.raises(row.error) as caught:
        row.call(c)
    match = re.fullmatch(r".+: limit: (.+); got: (.+); nearest legal choice: (.+)", str(caught.value), re.DOTALL)
    assert match is not None, str(caught.value)
    assert match[1].strip()
    assert row.value in match[2]
    if words:
        assert row.nearest in match[3] or row.nearest in match[0].partition("limit:")[0]


@pytest.mark.parametrize("alpha", [np.inf, np.nan, 1e39, 1j, "1"])
def test_an_alpha_that_is_no_finite_number_is_refused_with_tensors_as_with_arrays(alpha):
    torch = pytest.importorskip("torch")
    a, b = torch.ones(2, 4, 6), torch.ones(2, 6, 4)
    isogemm.gemm(a[0], b[0], alpha=0.5)  # torch is seen: calls with tensors take the short way
    for call in (lambda: isogemm.gemm(a[0], b[0], alpha=alpha), lambda: strided(a, b, alpha=alpha)):
        with pytest.raises(OptionError, match=r"alpha.*finite"):
            call()


def test_what_other_libraries_let_pass_points_to_the_doctor():
    """Memory that two share and places of elements do; other errors have no notes."""
    said = {}
    c = ones(4, 4)
    calls = {
        "alias": lambda: matmul(c, ones(4, 4), out=c),
        "overlap": lambda: matmul(A, B, out=as_strided(c, (4, 4), (0, 4))),
        "ld": lambda: bgemm(c, lda=3),
        "shape": lambda: matmul(A, A),
        "dtype": lambda: matmul(A.astype(int), B),
    }
    for name, call in calls.items():
        with pytest.raises(IsogemmError) as caught:
            call()
        said[name] = getattr(caught.value, "__notes__", [])
    assert said == {"alias": [DOCTOR], "overlap": [DOCTOR], "ld": [DOCTOR], "shape": [], "dtype": []}


def test_the_rows_are_one_mistake_away_from_working():
    c = np.empty((4, 4), F32)
    bgemm(c)
    assert (c == 6).all()
    bstrided(c)
    assert (c.reshape(-1)[:8] == 3).all()
    bpointers(c, [0, 6], [0, 6], [0, 4])
    assert matmul(A, B, out=c) is c


@pytest.mark.parametrize("make", [lambda: matmul(A, B[:2]), lambda: matmul(A, B, out=A), lambda: as_contract("fam")])
def test_an_error_stays_what_it_is_when_it_is_pickled_or_copied(make: Callable[[], Any]) -> None:
    with pytest.raises(IsogemmError) as caught:
        make()
    error = caught.value
    texts = [pickle.dumps(error, protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    for again in [*map(pickle.loads, texts), copy.copy(error), copy.deepcopy(error)]:
        assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


def test_no_memory_is_asked_for_before_the_limit_is_checked(monkeypatch):
    monkeypatch.setattr(np, "empty", lambda *_: pytest.fail("allocated"))
    with pytest.raises(LimitError):
        matmul(huge(2**30, 1), huge(1, 2**30))
    with pytest.raises(LimitError, match=r"at most [1-9][0-9]* at a time"):  # one row of each is too many
        isogemm.gemm_strided_batched(huge(2**40, 1, 1), huge(2**40, 1, 1))
    with pytest.raises(LimitError, match="shorter rows"):
        matmul(huge(1, 1), huge(1, 2**60))


@pytest.mark.parametrize(
    "call", ["isogemm.webgpu.array(np.ones((2, 2), 'f'))", "isogemm.plan(1, 64, 64, device='webgpu')"]
)
def test_webgpu_that_is_not_installed_is_told_by_its_extra(call: str) -> None:
    lines = f"import sys; sys.modules['wgpu'] = None; import numpy as np, isogemm; {call}"
    said = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True)
    assert "OptionError: a WebGPU device needs wgpu: limit: the extra isogemm[webgpu]; " in said.stderr
    assert said.stderr.rstrip().endswith('nearest legal choice: pip install "isogemm[webgpu]"')
