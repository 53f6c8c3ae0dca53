"""Weights written out once for a plain product: every piece in its place, and the bits of that product."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from benchmarks.common import RESULTS
from tests.backends.cuda.quant.test_many import (
    BF16,
    F16,
    F32,
    drawn,
    floats,
    packed_of,
    poisoned,
    product,
    same,
    weight,
)

from isogemm.backends.cuda.driver import facts
from isogemm.backends.cuda.gemm.hopper.model import expected, ranked
from isogemm.backends.cuda.gemm.model import H200
from isogemm.backends.cuda.quant import dequantize, family, once
from isogemm.backends.cuda.quant.case import QuantCase
from isogemm.backends.cuda.quant.kernel import QuantKernel, filling
from isogemm.backends.cuda.quant.once import KERNEL, OnceConfig
from isogemm.contract.spec import Contract
from isogemm.planner.family import Families
from isogemm.problem.product import Product

torch = pytest.importorskip("torch")
CASE = QuantCase("same", "Q4_K", "bfloat16", "float32", "float16", 5, 40, 256, "tensor_core:sm90")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("name", ["Q4_0", "Q5_1", "Q6_K"])
def test_bits_are_those_of_the_product_with_dequantized_weights(name: str, dtype: Any) -> None:
    w = weight(name, 2100, 512, "blocks")
    x, bias = drawn(70, 512, dtype), torch.linspace(-3, 3, 2100)
    for rows in (2100, 1024):  # in one piece, and in three, the last of which has other tiles
        for out_dtype in (F32, dtype):
            out = poisoned(70, 2100, dtype=out_dtype)
            KERNEL.run(x.cuda(), packed_of(w), out, bias.cuda(), OnceConfig(rows, ""))
            same(out, product(x, w, bias.cuda(), out_dtype))
    assert floats(w, dtype).dtype is dtype


@pytest.mark.parametrize("part", ["x_align", "out_align"])
def test_the_product_is_aligned_no_better_than_its_operands(part: str) -> None:
    """A view that begins amid 16 bytes: kernels that store 16 at once may not be chosen."""
    posed = [once._product(replace(CASE, **{part: align}), "tensor_core:sm90", 40, 0).align for align in (16, 4, 2)]
    assert posed == [16, 4, 2]


def test_each_piece_is_written_and_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both kernels of a piece follow each other; results and biases begin at its first row."""
    told: list[Any] = []
    posed: list[Product] = []

    def bind(lay: Any, dtype: str, rows: int, k: int, step: int, device: int) -> Any:
        return lambda stream, data, out, first: told.append(("write", dtype, rows, k, step, data, out - base, first))

    def choose(product: Product, device: int) -> Any:
        posed.append(product)
        return lambda at, stream: told.append(("multiply", at.a, at.b - base, at.out, at.bias))

    room = torch.empty(16 * 256 * 2, dtype=torch.uint8)
    base = room.data_ptr()
    monkeypatch.setattr(dequantize, "bind", bind)
    monkeypatch.setattr(once, "choose", choose)
    monkeypatch.setattr(once, "workspace", lambda nbytes, device: room if nbytes == room.numel() else None)
    KERNEL.build(CASE, OnceConfig(16, "tensor_core:sm90"), 0)(7, 1000, 2000, 3000, 500)
    assert told == [
        step
        for first, rows in ((0, 16), (16, 16), (32, 8))
        for step in (
            ("write", "bfloat16", rows, 256, 256, 2000, 0, first),
            ("multiply", 1000, 0, 3000 + 4 * first, 500 + 2 * first),
        )
    ]
    assert [(p.m, p.n, p.k, p.out.row, p.contract) for p in posed] == [
        (5, rows, 256, 40, Contract.parse("tensor_core:sm90/chain")) for rows in (16, 16, 8)
    ]


def test_a_contract_is_part_of_the_configuration() -> None:
    """Cases that want other bits are equal, and what is bound is kept by case and configuration."""
    other = replace(CASE, arithmetic="tensor_core:sm80")
    assert other == CASE
    assert KERNEL.configure(other, 132) != KERNEL.configure(CASE, 132)
    assert KERNEL.code(CASE, KERNEL.configure(CASE, 132)) == "Q4_K > bfloat16"


class Timed(QuantKernel):
    """A kernel that says what it takes."""

    path = "same"

    def __init__(self, name: str, us: float | None) -> None:
        self.name, self.us = name, us

    def configure(self, case: QuantCase, multiprocessors: int) -> str:
        return ""

    def microseconds(self, case: QuantCase, config: Any, device: int) -> float | None:
        return self.us


def test_the_least_time_comes_first_and_no_time_last(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = [Timed("silent", None), Timed("slow", 9.0), Timed("fast", 2.0), Timed("silent too", None)]
    found = Families("", {})
    monkeypatch.setattr(family, "FAMILIES", found)
    monkeypatch.setattr(Families, "found", {kernel.name: kernel for kernel in kernels})
    monkeypatch.setattr(family.facts, "device", lambda ordinal: type("Facts", (), {"multiprocessors": 132}))
    order = [option.family.name for option in family.options(CASE, 0)]
    assert order == ["fast", "slow", "silent", "silent too"]


def test_blocks_are_a_whole_share_of_the_multiprocessors() -> None:
    for blocks in (1, 33, 34, 60, 128, 132):
        filled = filling(blocks, 132)
        assert filled >= blocks
        assert filled in (33, 44, 66, 132)
    assert filling(200, 132) == 200


def test_its_time_is_that_of_writing_and_of_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """More bytes take longer, behind the cache longer each; each piece is a product; without its time there is none."""
    monkeypatch.setattr(once, "gpu_of", lambda device: H200)
    monkeypatch.setattr(once.products, "expected_us", lambda product, device: took)
    took: float | None = 10.0

    def expected(n: int, rows: int) -> float:
        case = replace(CASE, n=n, k=4096)
        found = KERNEL.microseconds(case, OnceConfig(rows, "tensor_core:sm90"), 0)
        assert found is not None
        return found

    small, twice, large, larger = (expected(n, n) for n in (1024, 2048, 16384, 17408))
    assert 10.0 < small < twice < large
    assert larger - large > twice - small > 0
    assert expected(2048, 1024) - twice == pytest.approx(once.START + 10.0)
    took = None
    assert KERNEL.microseconds(CASE, OnceConfig(40, "tensor_core:sm90"), 0) is None


def test_the_way_that_comes_first_is_nearly_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are written out by the model of other products, so that one may not change for itself."""
    known = facts.DeviceFacts(0, "NVIDIA H200", (9, 0), 132, 62914560, 232448, 4917.0, None)
    monkeypatch.setattr(facts, "device", lambda ordinal: known)
    monkeypatch.setattr(once.products, "expected_us", lambda p, device: expected(p, ranked(p)[0], H200))
    lines = (RESULTS / "quant-gpu-h200-2026-11-29-kernels.jsonl").read_text().splitlines()[1:]
    behind = []
    for row in map(json.loads, lines):
        case = QuantCase(
            "same", row["format"], "bfloat16", "bfloat16", None, row["m"], row["n"], row["k"], CASE.arithmetic
        )
        ways: dict[str, float] = {}
        for use, us in row["us"].items():
            way = f"quant {use.partition(' ')[0]}"
            ways[way] = min(us, ways.get(way, us))
        found = [ways[option.family.name] for option in family.options(case, 0) if option.family.name in ways]
        behind.append(found[0] / min(found) - 1)
    assert len(behind) == 191
    assert sum(behind) / len(behind) == pytest.approx(0.009, abs=5e-4)
