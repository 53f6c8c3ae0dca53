"""Attention's kernels compile for an H200, with no GPU: instructions, roundings, parameters, and what does not fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.backends.cuda.compiled import Compiled, Kernels, kernels

from isogemm.backends.cuda.attention import steps
from isogemm.backends.cuda.attention.case import AttentionCase, Strided
from isogemm.backends.cuda.attention.choose import KERNELS, admitted_run, ranked
from isogemm.contract.attention import factor
from isogemm.errors import OptionError

__all__ = ["kernels"]  # the fixture

LOOSE = r"\b(?:mul|add|sub)\.f32\b|\.ftz\b|\.f32x2\b|ex2\.approx|div\.full|rcp\.approx"


def contiguous(*shape: int) -> Strided:
    steps = [1]
    for size in shape[:0:-1]:
        steps.insert(0, steps[0] * size)
    return Strided(shape, tuple(steps))


def pose(
    tq: int = 512, tk: int = 512, d: int = 128, dtype: str = "bfloat16", group: int = 2, b: int = 2, **rest: Any
) -> AttentionCase:
    """An attention of b x 4 * group heads."""
    q, k = contiguous(b, 4 * group, tq, d), contiguous(b, 4, tk, d)
    chosen: dict[str, Any] = {
        "mask": None, "dtype": dtype, "dtype_out": dtype, "dtype_mask": None, "c": float(factor(None, d)),
        "offset": 0, "starts": False, "stops": True, "aligned": True,
        "arithmetic": "fma" if dtype == "float32" else "tensor_core:sm90",
    }  # fmt: skip
    return AttentionCase(operands=(q, k, k), **(chosen | rest))


def masked(case: AttentionCase, dtype: str) -> AttentionCase:
    return replace(case, dtype_mask=dtype, mask=(case.tq * case.tk, 0, case.tk, 1))


def build(kernels: Kernels, case: AttentionCase, kernel: str) -> list[Compiled]:
    kernels.loaded.clear()
    KERNELS[kernel].launch(case)
    return list(kernels.loaded)


@pytest.mark.parametrize(
    ("case", "chosen"),
    [
        (pose(), "hopper"),
        (pose(tq=1, tk=4096), "few"),
        (pose(tq=8, tk=300, group=4), "few"),
        (pose(tq=1, tk=128), "few"),
        (pose(tq=1, tk=128, aligned=False), "leaf"),
        (pose(tq=1, tk=300, d=20), "split"),
        (pose(tq=0, tk=0), "walk"),
        (pose(d=256), "walk"),
        (pose(d=100), "walk"),
        (pose(aligned=False), "walk"),
        (pose(dtype="float32"), "fma"),
        (pose(arithmetic="fma"), "fma"),
        (pose(tq=64, tk=8192), "few"),
        (pose(tq=128, tk=8192), "hopper"),
        (pose(tq=128, tk=8192, aligned=False), "split"),
    ],
)
def test_shapes_choose_a_kernel_that_serves(kernels: Kernels, case: AttentionCase, chosen: str):
    assert ranked(case)[0] == chosen


def test_a_kernel_that_cannot_is_refused():
    with pytest.raises(OptionError, match="walk"):
        admitted_run(pose(d=256), "hopper")


def check_triton(kernel: Compiled, operand: str) -> None:
    assert kernel.count(LOOSE) == 0
    assert kernel.count(r"ld\.global\S*\.[bsu]8 \{") == 0  # of Triton's own: they permute keys
    assert kernel.count(r"max\.NaN\.f32") > 0
    assert kernel.count(r"fma\.rn\.f32") > 0
    tensor = (
        rf"(?:wgmma\.mma_async\S*k16\.f32\.{operand}\.{operand}|mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.{operand})"
    )
    assert kernel.count(tensor) == kernel.count(r"wgmma\.mma_async\.sync|\bmma\.sync") > 0


@pytest.mark.parametrize(
    ("case", "kernel"),
    [
        (pose(tq=1, tk=4096), "split"),
        (masked(pose(tq=4, tk=300, d=64, dtype="float16", group=4), "bool"), "split"),
        (masked(pose(tq=1, tk=100, d=80), "bfloat16"), "leaf"),
        (pose(tq=100, tk=300, d=100, aligned=False, starts=True), "walk"),
    ],
)
def test_triton_rounds_each_step_and_calls_no_approximation(kernels: Kernels, case: AttentionCase, kernel: str):
    made = build(kernels, case, kernel)
    assert [k.name for k in made] == ["attention"] + ["attention_meet"] * (kernel == "split")
    check_triton(made[0], {"bfloat16": "bf16", "float16": "f16"}[case.dtype])
    assert all(k.spilled == 0 for k in made) or kernel == "walk"


def test_hopper_sums_blocks_of_16_and_rounds_each_step(kernels: Kernels):
    cases = [
        pose(),
        pose(d=64, dtype="float16", offset=None, starts=True),
        masked(pose(d=80, offset=None, dtype_out="float32"), "bool"),
        masked(pose(), "float32"),
    ]
    for case, (kernel,) in [(case, build(kernels, case, "hopper")) for case in cases]:
        products = {line.split("_")[0].rstrip(".") for line in kernel.machine_code if line.startswith("HGMMA")}
        kind, columns = ".BF16" * (case.dtype == "bfloat16"), 72 if case.d <= 64 else 136
        assert products == {f"HGMMA.64x{n}x16.F32{kind}" for n in (128, columns)}
        approximate = {line for line in kernel.machine_code if line.startswith("MUFU")}
        assert approximate <= {"MUFU.RCP", "MUFU.RSQ"}  # of divisions and their slow path
        assert kernel.machine_counts("FFMA")[0] >= 3 * 64
        assert kernel.spilled <= 128


def test_few_queries_take_the_same_blocks(kernels: Kernels):
    cases = [
        pose(tq=1, tk=4096),
        pose(tq=1, tk=2048, b=40),
        pose(tq=1, tk=4096, b=40),  # one entry may be much longer than others
        pose(tq=1, tk=4096, b=40, stops=False),
        pose(tq=16, tk=128, d=64, dtype="float16", offset=None, starts=True),
        masked(pose(tq=20, d=80, dtype_out="float32"), "bool"),
        masked(pose(tq=1), "float32"),
    ]
    for case, made in [(case, build(kernels, case, "few")) for case in cases]:
        whole = case.leaves == 1 or (case.batch == 40 and not (case.stops and case.tk == 4096))
        assert [k.name for k in made] == ["attention_few"] + ["attention_meet"] * (not whole)
        kind = ".BF16" * (case.dtype == "bfloat16")
        products = [line for line in made[0].machine_code if line.startswith("HMMA")]
        assert set(products) == {f"HMMA.16816.F32{kind}"}
        assert {line for line in made[0].machine_code if line.startswith("MUFU")} <= {"MUFU.RCP", "MUFU.RSQ"}
        assert all(k.spilled == 0 for k in made)
        assert not made[0].hasty()


@pytest.mark.parametrize("case", [pose(d=200, arithmetic="fma"), masked(pose(dtype="float32"), "float16")])
def test_float32_is_fused_multiply_adds(kernels: Kernels, case: AttentionCase):
    (kernel,) = build(kernels, case, "fma")
    fused, tensor, warpgroup = kernel.machine_counts("FFMA", "HMMA", "HGMMA")
    assert fused >= 128
    assert tensor == warpgroup == 0
    assert kernel.spilled <= 16


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_steps_of_gradients_round_one_by_one(kernels: Kernels, dtype: str):
    kernels.loaded.clear()
    steps.KERNEL.bind(steps.StepsCase((2, 3, 500), (0, 500, 1), (0, 0, 0), 0.1, dtype, 0), "", 0)
    (kernel,) = kernels.loaded
    assert kernel.name == "attention_backward"
    assert kernel.spilled == 0
    assert not any(line.startswith("MUFU.EX2") for line in kernel.machine_code)
    assert kernel.machine_counts("FMUL")[0] >= 4 * 6
