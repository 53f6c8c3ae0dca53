"""Modes by name: each is a contract, everywhere a contract is taken, and a wrong name gets the right hint."""

from __future__ import annotations

import inspect
import operator
from typing import Any

import numpy as np
import pytest

import isogemm
from isogemm.contract import Contract, compare
from isogemm.contract.modes import MEANT, MODES
from isogemm.errors import ContractError, DTypeError, OptionError

RNG = np.random.default_rng(5)
A, B = RNG.standard_normal((5, 70), np.float32), RNG.standard_normal((70, 9), np.float32)
CALLS: dict[str, Any] = {
    "matmul": lambda **kw: isogemm.matmul(A, B, **kw),
    "linear": lambda **kw: isogemm.linear(A, B.T, **kw),
    "gemm": lambda **kw: isogemm.gemm(A, B, **kw),
    "gemm_strided_batched": lambda **kw: isogemm.gemm_strided_batched(A[None], B[None], **kw)[0],
    "gemm_batched": lambda **kw: isogemm.gemm_batched([A], [B], **kw)[0],
    "gemm_grouped": lambda **kw: isogemm.gemm_grouped([A], [B], **kw)[0],
    "blas.gemm": lambda **kw: _columns(isogemm.blas.gemm, **kw),
    "blas.gemm_strided_batched": lambda **kw: _columns(isogemm.blas.gemm_strided_batched, 0, 0, 45, 1, **kw),
    "blas.gemm_batched": lambda **kw: _columns(isogemm.blas.gemm_batched, [0], [0], [0], **kw),
}


def _columns(call: Any, *where: Any, **kw: Any) -> Any:
    """A @ B by a column-major call: operands swapped."""
    out = np.full(45, np.nan, np.float32)
    call("N", "N", 9, 5, 70, 1.0, B.reshape(-1), 9, A.reshape(-1), 70, 0.0, out, 9, *where, **kw)
    return out.reshape(5, 9)


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_has_the_bits_of_its_contract_in_every_form(mode: str) -> None:
    expected = isogemm.matmul(A, B, contract=MODES[mode].contract or None)
    for name, call in CALLS.items():
        assert compare.differing(call(mode=mode), expected) == 0, name


def test_modes_are_different_numbers_where_they_are_different_contracts() -> None:
    ieee, tf32, tf32x3 = (isogemm.matmul(A, B, mode=mode) for mode in ("ieee", "tf32", "tf32x3"))
    assert compare.differing(tf32, ieee) > 40
    assert compare.differing(tf32x3, ieee) > 0
    exact = A.astype(np.float64) @ B.astype(np.float64)
    assert np.abs(tf32 - exact).max() > 50 * np.abs(tf32x3 - exact).max()


def test_every_product_takes_a_mode() -> None:
    taking = {name for name in isogemm.__all__ if callable(getattr(isogemm, name)) and _has_contract(name)}
    assert {name for name in CALLS if "." not in name} <= taking
    for name in CALLS:
        assert "mode" in inspect.signature(operator.attrgetter(name)(isogemm)).parameters, name


def _has_contract(name: str) -> bool:
    try:
        return "contract" in inspect.signature(getattr(isogemm, name)).parameters
    except (TypeError, ValueError):
        return False


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [("fp32", "'ieee'"), ("TF32", "'tf32'"), ("high", "'tf32'"), ("iee", "'ieee'"), ("pedant", "'pedantic'"),
     ("bf16", "'default'"), ("", "'default'"), (3, "'default'"), ("CUBLAS_TF32_TENSOR_OP_MATH", "'tf32'"),
     ("cublas_pedantic_math", "'pedantic'"), ("CUBLAS_COMPUTE_32F", "'ieee'"), ("CUBLAS_DEFAULT_MATH", "'default'")],
)  # fmt: skip
def test_a_wrong_mode_names_the_right_one(wrong: Any, nearest: str) -> None:
    for call in CALLS.values():
        with pytest.raises(OptionError, match="one of default, tf32") as caught:
            call(mode=wrong)
        assert caught.value.nearest == nearest


def test_a_mode_and_a_contract_are_one_too_many() -> None:
    with pytest.raises(OptionError, match="a mode or a contract"):
        isogemm.matmul(A, B, mode="ieee", contract="fma/chain")
    for call in CALLS.values():  # one object, as Python keeps one of equal words
        with pytest.raises(OptionError, match="a mode or a contract"):
            call(mode="tf32", contract="tf32")


@pytest.mark.parametrize(
    ("word", "nearest"),
    [("ieee", "fma/chain"), ("pedantic", "fma/chain"), ("fp32", "fma/chain"), ("tf32", "tf32:sm90/chain"),
     ("TF32", "tf32:sm90/chain"), ("tf32x3", "tf32x3:sm90/chain"), ("bf16", "tensor_core:sm90/chain"),
     ("int8", "exact/chain"), ("CUBLAS_TF32_TENSOR_OP_MATH", "tf32:sm90/chain"), ("CUBLAS_PEDANTIC_MATH", "fma/chain")],
)  # fmt: skip
def test_a_mode_in_the_place_of_a_contract_is_told_the_contract(word: str, nearest: str) -> None:
    with pytest.raises(ContractError) as caught:
        Contract.parse(word)
    assert caught.value.nearest == nearest


def test_every_hint_is_a_contract() -> None:
    for contract in MEANT.values():
        assert str(Contract.parse(contract)) == contract


def test_tf32_is_of_float32_alone() -> None:
    with pytest.raises(DTypeError, match="float32"):
        isogemm.matmul(A.astype(np.float16), B.astype(np.float16), mode="tf32")
