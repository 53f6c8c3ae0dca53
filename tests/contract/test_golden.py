"""The executable definition against results recorded on an NVIDIA H200: tests/golden, made by tools/golden_gpu.py."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tests.recorded import facts, vectors
from tools.golden_cases import cases

from isogemm.contract.compare import differing, first_mismatch
from isogemm.contract.reference import evaluate

FACTS = facts("hopper")
ELEMENTS = {
    "bfloat16": (ml_dtypes.bfloat16, "tensor_core:sm90"),
    "float16": (np.float16, "tensor_core:sm90"),
    "tf32": (np.float32, "tf32:sm90"),
    "float32": (np.float32, "fma"),
}


def load(name: str) -> tuple[Any, Any, Any, Any, str]:
    """Operands, start, result and arithmetic of one case."""
    dtype, arithmetic = ELEMENTS[name.split("-")[0]]
    bits = vectors("hopper")
    start = bits.get(f"{name}.c")
    c = None if start is None else start.view(np.float32)
    return bits[f"{name}.a"].view(dtype), bits[f"{name}.b"].view(dtype), c, bits[f"{name}.out"], arithmetic


@pytest.mark.parametrize("name", FACTS["cases"])
def test_no_bit_differs_from_the_gpu(name: str) -> None:
    a, b, c, recorded, arithmetic = load(name)
    nan = (recorded & 0x7FFFFFFF) > 0x7F800000
    assert (recorded[nan] == 0x7FFFFFFF).all(), "the GPU's NaN is the canonical one"
    got = evaluate(a, b, f"{arithmetic}/chain", c)
    assert first_mismatch(got, recorded.view(np.float32)) is None


def test_the_generator_draws_these_cases() -> None:
    drawn = list(cases(FACTS["seed"]))
    assert [case.name for case in drawn] == FACTS["cases"]
    for case in drawn:
        a, b, c, _, _ = load(case.name)
        assert (case.a.shape, case.b.shape, case.c is None) == (a.shape, b.shape, c is None)


def test_what_was_recorded() -> None:
    assert FACTS["tiles that differ"] == {}
    for fmt in ("bfloat16", "float16", "tf32"):
        instructions = " ".join(
            name for tile, names in FACTS["tiles"].items() if tile.startswith(fmt) for name in names
        )
        assert "mma.sync" in instructions
        assert "wgmma.mma_async" in instructions
        assert {int(name.split("-k")[1].split("-")[0]) for name in FACTS["cases"] if name.startswith(fmt)} == {
            *(1, 7, 16, 100, 333, 2568)
        }
    assert {f"{name}.out" for name in FACTS["cases"]} == {key for key in vectors("hopper") if key.endswith(".out")}


@pytest.mark.parametrize(
    "other", ["tensor_core:sm80/chain", "tensor_core:sm90/leaf16", "tensor_core:sm90/tree2", "fma/chain"]
)
def test_the_vectors_tell_contracts_apart(other: str) -> None:
    a, b, c, recorded, _ = load("bfloat16-normal-k333")
    assert differing(evaluate(a, b, other, c), recorded.view(np.float32)) > recorded.size // 4


def test_the_vectors_pin_the_exponent_floor() -> None:
    """Sums whose exponents are all below -133: of the neighbouring floors only -133 has the recorded bits."""
    wrong = dict.fromkeys((-134, -133, -132), 0)
    for name in (n for n in FACTS["cases"] if "subnormal_result" in n or "underflow" in n):
        fmt, k = name.split("-")[0], int(name.split("-k")[1].split("-")[0])
        if fmt not in ("bfloat16", "tf32") or k > (8 if fmt == "tf32" else 16) or name.endswith("-c"):
            continue
        a, b, _, recorded, _ = load(name)
        for floor in wrong:
            wrong[floor] += int((one_block(a, b, floor, tf32=fmt == "tf32") != recorded).sum())
    assert wrong[-133] == 0
    assert wrong[-134] > 0
    assert wrong[-132] > 0


def one_block(a: Any, b: Any, floor: int, *, tf32: bool) -> Any:
    """The fused sum of a single block from zero, tiny products only, with another exponent floor."""
    from isogemm.contract.reference import round_tf32

    x, y = (round_tf32(v) if tf32 else v.astype(np.float32) for v in (a, b))
    ex, ey = (np.where(v == 0, -9999, np.frexp(v)[1] - 1) for v in (x, y))
    largest = np.maximum((ex[:, :, None] + ey[None]).max(1), floor)
    terms = np.trunc(np.ldexp(x.astype(np.float64)[:, :, None] * y[None], (25 - largest)[:, None]))
    value = np.ldexp(terms.sum(1), largest - 25)
    assert (np.abs(value) < 2.0**-126).all()
    return (np.trunc(value * 2.0**149) * 2.0**-149 + 0.0).astype(np.float32).view(np.uint32)
