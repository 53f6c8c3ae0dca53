"""tf32x3:sm90 from first principles: the split, the sums of a block, their order, special values and accuracy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.contract import oracle
from tests.contract.draws import CLASSES, FLOAT32, draw
from tests.recorded import facts, vectors

import isogemm
from isogemm.contract import Contract
from isogemm.contract.compare import differing, first_mismatch
from isogemm.contract.reference import evaluate, split_tf32
from isogemm.errors import ContractError, DTypeError

NAME = "tf32x3:sm90"
LARGEST = 0x7F7FE000  # tf32's largest number, as float32


def split(bits: int) -> tuple[int, int]:
    """(hi, lo) of float32 bits as 19-bit tf32 patterns, over fractions."""
    (kind, _, value), _ = oracle.read(bits, "float32")
    if kind != "finite":
        return oracle.tf32(bits), 0
    hi = oracle.tf32(bits)
    if hi & 0x3FFFF == oracle.INF >> 13:
        hi -= 1
    (_, _, near), _ = oracle.read(hi, "tf32")
    rest = value - near
    return hi, oracle.to_float32(rest, nearest=True, fraction_bits=10) >> 13


def block_sum(xs: list[int], ys: list[int]) -> int:
    """The sum of one block of 32 as float32 bits."""

    def chain(pairs: list[tuple[int, int]], c: int) -> int:
        return oracle.chain([x for x, _ in pairs], [y for _, y in pairs], c, "tf32", 8, 25)

    a, b = [split(x) for x in xs], [split(y) for y in ys]
    both = list(zip(a, b, strict=True))
    small = chain([(x[1], y[0]) for x, y in both], 0)
    small = chain([(x[0], y[1]) for x, y in both], small)
    if small & 0x7FFFFFFF >= oracle.INF:
        small = 0
    return oracle.add(chain([(x[0], y[0]) for x, y in both], 0), small)


def walk(xs: list[int], ys: list[int], c: int) -> int:
    for i in range(0, len(xs), 32):
        short = [0] * max(0, i + 32 - len(xs))
        c = oracle.add(c, block_sum(xs[i : i + 32] + short, ys[i : i + 32] + short))
    return c


def by_fractions(a: Any, b: Any, order: str, c: Any = None) -> Any:
    out = np.empty((a.shape[0], b.shape[1]), np.uint32)
    for i, j in np.ndindex(out.shape):
        xs, ys, start = a[i].tolist(), b[:, j].tolist(), 0 if c is None else int(c[i, j])
        if order == "chain":
            out[i, j] = walk(xs, ys, start)
            continue
        size = int(order[4:])
        length = size if order.startswith("leaf") else 32 * max(1, -(-len(xs) // (32 * size)))
        cuts = range(0, len(xs), length) if order.startswith("leaf") else range(0, size * length, length)
        sums = [walk(xs[p : p + length], ys[p : p + length], 0) for p in cuts]
        if order.startswith("leaf"):
            for leaf in sums:
                start = oracle.add(start, leaf)
            sums = [start]
        while len(sums) > 1:
            sums = [oracle.add(*sums[p : p + 2]) for p in range(0, len(sums), 2)]
        out[i, j] = sums[0]
    out[(out & 0x7FFFFFFF) > oracle.INF] = oracle.NAN
    return out


@settings(max_examples=300)
@given(st.integers(0, 2**32 - 1))
def test_split(bits: int) -> None:
    hi, lo = (int(x.view(np.uint32)[0]) for x in split_tf32(np.array([bits], np.uint32).view(np.float32)))
    assert (hi, lo) == tuple(x << 13 for x in split(bits))


@pytest.mark.parametrize(
    ("bits", "hi", "lo"),
    [
        (0x3F801000, 0x3F800000, 0x3A000000),  # 1 + 2**-11 is a tie: down to even, the rest is exact
        (0x3F803000, 0x3F804000, 0xBA000000),  # up to even: a negative rest
        (0x7F7FFFFF, LARGEST, 0x79FFE000 + 0x2000),  # float32's largest: hi stays finite, lo is 2**117
        (0xFF7FF000, 0xFF7FE000, 0xF9800000),
        (0x7F800000, 0x7F800000, 0),
        (0xFF800000, 0xFF800000, 0),
        (0x7FC00000, 0x7FFFE000, 0),
        (0x80000000, 0x80000000, 0),
        (0x00000FFF, 0x00000000, 0),  # below half of 2**-136: lost
        (0x00003001, 0x00004000, 0x80000000),  # lo would be less than half of 2**-136
    ],
)
def test_corner_cases_of_the_split(bits: int, hi: int, lo: int) -> None:
    got = [int(x.view(np.uint32)[0]) for x in split_tf32(np.array([bits], np.uint32).view(np.float32))]
    assert got == [hi, lo]


def test_hi_and_lo_together_hold_22_bits() -> None:
    x = np.random.default_rng(0).standard_normal(10_000).astype(np.float32)
    hi, lo = split_tf32(x)
    rest = np.abs(x.astype(np.float64) - hi - lo)
    assert (rest <= 2.0**-23 * np.abs(x)).all()
    assert (rest == 0).mean() > 0.5


@settings(max_examples=60)
@given(
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(0, 80)),
    st.tuples(*[st.sampled_from(CLASSES)] * 3),
    st.sampled_from(["chain", "leaf32", "leaf64", "tree2", "tree4"]),
    st.integers(0, 2**32 - 1),
)
def test_against_fractions(shape: tuple[int, int, int], kinds: tuple[str, str, str], order: str, seed: int) -> None:
    (m, n, k), rng = shape, np.random.default_rng(seed)
    a, b = draw(rng, (m, k), kinds[0], FLOAT32), draw(rng, (k, n), kinds[1], FLOAT32)
    c = None if order.startswith("tree") else draw(rng, (m, n), kinds[2], FLOAT32)
    start = None if c is None else c.view(np.float32)
    got = evaluate(a.view(np.float32), b.view(np.float32), f"{NAME}/{order}", start)
    assert first_mismatch(got, by_fractions(a, b, order, c).view(np.float32)) is None


def test_special_values_follow_ieee() -> None:
    inf, nan = np.float32(np.inf), np.float32(np.nan)
    row = np.array([[inf, 1.0, 2.0]], np.float32)
    for value, expected in [(1.0, inf), (1.1, inf), (-1.1, -inf), (0.0, nan), (inf, inf), (nan, nan)]:
        column = np.array([[value], [1.1], [3.0]], np.float32)
        for got in (evaluate(row, column, NAME), evaluate(column.T, row.T, NAME)):
            assert np.array_equal(got, [[expected]], equal_nan=True), value
    both = evaluate(np.array([[inf, inf]], np.float32), np.array([[1.1], [-1.1]], np.float32), NAME)
    assert both.view(np.uint32)[0, 0] == oracle.NAN
    largest = np.array([[np.finfo(np.float32).max]], np.float32)
    assert evaluate(largest, np.array([[0.5]], np.float32), NAME)[0, 0] == 2.0**127  # its lo rounds up: no infinity


def test_padding_cutting_and_neighbours() -> None:
    rng = np.random.default_rng(3)
    a, b = rng.standard_normal((9, 200), np.float32), rng.standard_normal((200, 140), np.float32)
    whole = evaluate(a, b, NAME)
    assert first_mismatch(evaluate(np.pad(a, ((0, 0), (0, 61))), np.pad(b, ((0, 61), (0, 0))), NAME), whole) is None
    first = evaluate(a[:, :96], b[:96], NAME)
    assert first_mismatch(evaluate(a[:, 96:], b[96:], NAME, first), whole) is None
    assert differing(evaluate(a[:, 80:], b[80:], NAME, evaluate(a[:, :80], b[:80], NAME)), whole) > 0
    assert first_mismatch(evaluate(a[4:5], b[:, 130:], NAME), whole[4:5, 130:]) is None
    assert first_mismatch(evaluate(a, b, NAME, threads=3), whole) is None
    assert first_mismatch(isogemm.matmul(a, b, contract=NAME), whole) is None


def test_accuracy_is_better_than_that_of_float32() -> None:
    rng = np.random.default_rng(4)
    a, b = rng.standard_normal((16, 4096), np.float32), rng.standard_normal((4096, 64), np.float32)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    error = {
        name: np.linalg.norm(evaluate(a, b, name) - exact) / np.linalg.norm(exact)
        for name in (NAME, "fma", "tf32:sm90", f"{NAME}/leaf1024")
    }
    assert error[NAME] < 0.3 * error["fma"]
    assert error[NAME] < 1e-3 * error["tf32:sm90"]
    assert error[f"{NAME}/leaf1024"] < error[NAME]


def test_wrong_uses_are_named() -> None:
    assert Contract.parse(NAME).block == 32
    with pytest.raises(ContractError, match="32"):
        Contract.parse(f"{NAME}/leaf48")
    half = np.ones((2, 2), np.float16)
    with pytest.raises(DTypeError, match="float32"):
        evaluate(half, half, NAME)
    with pytest.raises(ContractError, match="tree"):
        evaluate(np.ones((2, 2), np.float32), np.ones((2, 2), np.float32), f"{NAME}/tree2", np.ones((2, 2), np.float32))


FACTS = facts("tf32x3")


@pytest.mark.parametrize("name", FACTS["cases"])
def test_no_bit_differs_from_the_gpu(name: str) -> None:
    bits = vectors("tf32x3")
    a, b, c = (None if x is None else x.view(np.float32) for x in (bits.get(f"{name}.{part}") for part in "abc"))
    recorded = bits[f"{name}.out"]
    assert (c is not None) == name.endswith("-c")
    assert (recorded[(recorded & 0x7FFFFFFF) > oracle.INF] == oracle.NAN).all()
    assert first_mismatch(evaluate(a, b, NAME, c), recorded.view(np.float32)) is None


def test_what_was_recorded() -> None:
    assert FACTS["tiles that differ"] == {}
    assert {f"{name}.out" for name in FACTS["cases"]} == {key for key in vectors("tf32x3") if key.endswith(".out")}
    instructions = {name for names in FACTS["tiles"].values() for name in names}
    assert any("mma.sync" in name for name in instructions)
    assert any("wgmma" in name for name in instructions)
