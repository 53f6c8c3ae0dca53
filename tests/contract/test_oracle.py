"""The executable definition against a second one over fractions, element by element."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.contract import oracle
from tests.contract.draws import ARITHMETICS, CLASSES, FLOAT32, Arithmetic, draw, products

from isogemm.contract.compare import first_mismatch
from isogemm.contract.reference import evaluate, round_tf32
from isogemm.errors import DTypeError


def assert_agrees(arithmetic: Arithmetic, a: Any, b: Any, order: str, c: Any = None) -> None:
    start = None if c is None else c.view(np.float32)
    got = evaluate(a.view(arithmetic.dtype), b.view(arithmetic.dtype), f"{arithmetic.name}/{order}", start)
    bits = oracle.matmul(a, b, arithmetic.fmt, arithmetic.block, arithmetic.aligned_bits, order, c)
    assert first_mismatch(got, bits.view(np.float32)) is None, f"{arithmetic}/{order}"


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("arithmetic", ARITHMETICS, ids=str)
def test_every_class_of_numbers(arithmetic: Arithmetic, kind: str) -> None:
    rng = np.random.default_rng(CLASSES.index(kind))
    for k in (1, 7, 16, 37):
        a, b = draw(rng, (4, k), kind, arithmetic), draw(rng, (k, 5), kind, arithmetic)
        assert_agrees(arithmetic, a, b, "chain")
        assert_agrees(arithmetic, a, b, "chain", draw(rng, (4, 5), kind, FLOAT32))


@settings(max_examples=150)
@given(products(), st.sampled_from(["chain", "leaf1", "leaf2", "tree2", "tree4", "tree8", "tree16"]), st.booleans())
def test_random_products(case: Any, order: str, started: bool) -> None:
    arithmetic, a, b, c = case
    if order.startswith("leaf"):
        order = f"leaf{arithmetic.block * int(order[4:])}"
    assert_agrees(arithmetic, a, b, order, c if started and not order.startswith("tree") else None)


def test_operands_of_fma_in_16_bits_are_converted_exactly() -> None:
    rng = np.random.default_rng(5)
    for arithmetic in ARITHMETICS[1:3]:
        a, b = (draw(rng, s, "any", arithmetic).view(arithmetic.dtype) for s in ((5, 40), (40, 3)))
        wide = evaluate(a.astype(np.float32), b.astype(np.float32), "fma/chain")
        assert first_mismatch(evaluate(a, b, "fma/chain"), wide) is None


@given(st.integers(0, 2**32 - 1))
def test_rounding_to_tf32(bits: int) -> None:
    got = int(round_tf32(np.array([bits], np.uint32).view(np.float32)).view(np.uint32)[0])
    assert got & 0x1FFF == 0
    if np.isnan(np.uint32(bits).view(np.float32)):
        assert np.isnan(np.uint32(got).view(np.float32))
    else:
        assert got == oracle.tf32(bits) << 13


@pytest.mark.parametrize(
    ("bits", "rounded"),
    [
        (0x3F801000, 0x3F800000),  # a tie goes to the even neighbour, below
        (0x3F803000, 0x3F804000),  # and above
        (0x3F801001, 0x3F802000),
        (0x7F7FEFFF, 0x7F7FE000),  # the last number below the overflow threshold
        (0x7F7FF000, 0x7F800000),  # and the threshold
        (0xFF800000, 0xFF800000),
        (0x00001000, 0x00000000),
        (0x00001001, 0x00002000),
        (0x80000001, 0x80000000),
        (0x7F800001, 0x7FFFE000),  # a NaN whose payload lies in the dropped bits stays NaN
        (0xFFFFFFFF, 0x7FFFE000),
    ],
)
def test_tf32_corner_cases(bits: int, rounded: int) -> None:
    got = round_tf32(np.array([bits], np.uint32).view(np.float32)).view(np.uint32)[0]
    assert got == rounded, hex(got)


def test_operands_are_arrays_of_numpy() -> None:
    with pytest.raises(DTypeError, match=r"np\.asarray"):
        evaluate([[1.0]], np.ones((1, 1), np.float32), "fma/chain")
