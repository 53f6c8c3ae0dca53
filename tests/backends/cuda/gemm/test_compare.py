"""Comparing a library with a kernel of ours: which ways to add are told apart, on the host's memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from isogemm.backends.cuda.gemm.cublaslt import compare
from isogemm.contract.reference import evaluate
from isogemm.contract.spec import Contract
from isogemm.problem.product import Addresses, Launch, Product, Strides

TYPES: dict[str, Any] = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
M, N = 24, 20
CHAIN = "tensor_core:sm90/chain"
Sums = Callable[[Any, Any], Any]


def chain(a: Any, b: Any) -> Any:
    return evaluate(a, b, CHAIN)


def two_leaves(a: Any, b: Any) -> Any:
    half = a.shape[1] // 32 * 16
    return chain(a[:, :half], b[:half]) + chain(a[:, half:], b[half:])


def without_tensor_cores(a: Any, b: Any) -> Any:
    return evaluate(a, b, "fma/chain")


def flushed(a: Any, b: Any) -> Any:
    sums = chain(a, b)
    return np.where(np.abs(sums) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), sums), sums)


def flushed_operands(a: Any, b: Any) -> Any:
    return chain(*(np.where(np.abs(x) < ml_dtypes.finfo(x.dtype).smallest_normal, x.dtype.type(0), x) for x in (a, b)))


def kernel(product: Product, sums: Sums) -> Launch:
    def array(address: int, rows: int, columns: int, dtype: str) -> Any:
        nbytes = rows * columns * np.dtype(TYPES[dtype]).itemsize
        memory = (ctypes.c_char * nbytes).from_address(address)
        return np.frombuffer(memory, np.dtype(TYPES[dtype])).reshape(rows, columns)

    def launch(at: Addresses, stream: int) -> None:
        a = array(at.a, product.m, product.k, product.dtype_a)
        b = array(at.b, product.n, product.k, product.dtype_b).T
        array(at.out, product.m, product.n, product.dtype_out)[:] = sums(a, b)

    return launch


def product_of(dtype: str, out: str, k: int) -> Product:
    return Product(
        M, N, k, dtype, dtype, out, Contract.parse(CHAIN), Strides(k, 1), Strides(1, k), Strides(N, 1), align=16
    )


@pytest.mark.parametrize(
    ("dtype", "out", "k", "wrong"),
    [
        ("bfloat16", "bfloat16", 160, two_leaves),
        ("bfloat16", "float32", 1, without_tensor_cores),
        ("bfloat16", "bfloat16", 1, without_tensor_cores),
        ("bfloat16", "float32", 160, flushed),
        ("bfloat16", "bfloat16", 1, flushed),
        ("float16", "float16", 160, two_leaves),
        ("float16", "float32", 160, flushed_operands),
        ("float16", "float16", 1, flushed_operands),
    ],
)
def test_a_wrong_way_to_add_differs_and_the_same_way_does_not(dtype: str, out: str, k: int, wrong: Sums) -> None:
    product = product_of(dtype, out, k)
    ours, others = kernel(product, chain), [kernel(product, chain), kernel(product, wrong)]
    right, found = compare.differing(product, ours, others, torch.Generator(), 0)
    assert right == 0
    assert found > 0
