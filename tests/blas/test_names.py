"""Names of kernels and calls, and when tensor cores can be used."""

from __future__ import annotations

import operator

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import isogemm
from isogemm import blas
from isogemm.blas.kernels import LOOPS
from isogemm.contract import compare
from isogemm.contract.modes import MODES
from isogemm.errors import DTypeError, OptionError, ShapeError
from isogemm.formats.blocks import FORMATS
from isogemm.lab.architectures import ARCHITECTURES, across

RNG = np.random.default_rng(3)
KNOWN = {
    "gemm_nt_q5_0_q8_0": ["isogemm.linear(x, isogemm.quantize(w, 'Q5_0'), activations='q8')"],
    "gemm_nt_q4_k": ["isogemm.linear(x, isogemm.quantize(w, 'Q4_K'), activations='fp32')"],
    "gemm_nt_q6_k": ["isogemm.linear(x, isogemm.quantize(w, 'Q6_K'), activations='fp32')"],
    "gemm_blocked_serial_bf16": ["isogemm.linear(x, w, bias)"],
    "gemm_fwd_f32": ["isogemm.linear(x, w, bias)"],
    "gemm_backward_f32": ["isogemm.gemm(dy, w)", "isogemm.gemm(dy, x, trans_a='T', contract='fma/leaf4096')"],
    "gemm_nn_f16": ["isogemm.gemm(x, w)"],
    "gemm_tn_f32": ["isogemm.gemm(x, w, trans_a='T')"],
}
BLOCKS = {name.lower(): fmt.activations.lower() for name, fmt in FORMATS.items() if fmt.activations}


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_kernel_is_read_written_and_served(name: str) -> None:
    kernel = blas.parse_kernel(name)
    assert str(kernel) == name
    assert [product.call for product in kernel.products()] == KNOWN[name]
    m, n, k = 6, 10, 256
    dtype = ml_dtypes.bfloat16 if "bf16" in name else np.float16 if "f16" in name else np.float32
    x, w, dy = (RNG.standard_normal(shape).astype(dtype) for shape in ((m, k), (n, k), (m, n)))
    stored = {
        "isogemm": isogemm, "x": x.T if kernel.layout[:1] == "t" else x,
        "w": w.T if kernel.layout[1:] == "n" else w, "dy": dy, "bias": np.zeros(n, np.float32),
    }  # fmt: skip
    wide = {"x": x.astype(float), "w": w.astype(float), "dy": dy.astype(float)}
    for product, plan in zip(kernel.products(), kernel.plans(m, n, k) or [None], strict=True):
        got = eval(product.call, stored)
        formula = {"y = x @ w.T": "x @ w.T", "y = x @ w": "x @ w.T", "y = x.T @ w": "x @ w.T"}.get(product.formula)
        want = eval(formula or product.formula.partition("= ")[2], wide)
        assert np.linalg.norm(got.astype(float) - want) < 0.1 * np.linalg.norm(want)
        if plan is not None:
            assert (plan.m, plan.n) == got.shape
            assert str(plan.contract) == product.contract
            assert plan.threads == 1 or "serial" not in name
    assert name in kernel.meaning()


@given(
    op=st.sampled_from(["gemm", "gemv"]),
    layout=st.sampled_from(["", "nn", "nt", "tn", "tt"]),
    direction=st.sampled_from(["", "fwd", "backward"]),
    loops=st.lists(st.sampled_from(sorted(LOOPS)), max_size=2),
    weights=st.sampled_from(["f32", "bf16", "f16", *BLOCKS]),
    integers=st.booleans(),
)
def test_names_round_trip(
    op: str, layout: str, direction: str, loops: list[str], weights: str, *, integers: bool
) -> None:
    if weights in BLOCKS:
        layout, direction = layout and "nt", direction and "fwd"
    activations = BLOCKS.get(weights, "") if integers else ""
    name = "_".join(filter(None, (op, layout, direction, *loops, weights, activations)))
    kernel = blas.parse_kernel(name)
    assert str(kernel) == name
    assert (kernel.op, kernel.layout, kernel.direction, kernel.loops) == (op, layout, direction, tuple(loops))
    assert (kernel.weights, kernel.activations) == (weights, activations)
    assert blas.parse_kernel(name.upper()) == kernel


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("gemm_nt_q5_0_q8_k", "gemm_nt_q5_0_q8_0"),
        ("gemm_tn_q4_k", "gemm_nt_q4_k"),
        ("gemm_backward_q4_0", "gemm_nt_q4_0"),
        ("gemm_nt_f32_bf16", "gemm_nt_f32"),
        ("gemm_nt_q9", "gemm_nt_q4_k_q8_k"),
        ("", "gemm_nt_q4_k_q8_k"),
    ],
)
def test_a_wrong_kernel_names_a_right_one(name: str, nearest: str) -> None:
    with pytest.raises(OptionError) as caught:
        blas.parse_kernel(name)
    assert caught.value.nearest == nearest
    assert str(blas.parse_kernel(nearest)) == nearest


def test_other_spellings_are_written_one_way() -> None:
    assert str(blas.parse_kernel("gemm_forward_fp32")) == "gemm_fwd_f32"
    assert str(blas.parse_kernel("gemm_bwd_fp16")) == "gemm_backward_f16"
    for name, short in (("gemm_nt_q5_0_f32", "gemm_nt_q5_0"), ("gemm_nt_bf16_bf16", "gemm_nt_bf16")):
        assert blas.parse_kernel(name) == blas.parse_kernel(short)  # activations that need no name may have one
        assert str(blas.parse_kernel(name)) == short
    with pytest.raises(DTypeError):
        blas.parse_kernel(None)


def test_calls_are_found_by_each_of_their_names_and_ours_exist() -> None:
    for call in blas.CALLS:
        assert tuple(call.names()) == blas.LIBRARIES
        for text in filter(None, call.names().values()):
            assert all(call in blas.names_of(name) for name in text.split(", "))
        for name in call.here.split(", "):
            if name.startswith("isogemm."):
                assert callable(operator.attrgetter(name.removeprefix("isogemm."))(isogemm))
        assert call.what in str(call)
    (found,) = blas.names_of("cublashgemmstridedbatched")
    assert found.rocblas == "rocblas_sgemm_strided_batched"


def test_calls_that_are_not_here_say_so() -> None:
    with pytest.raises(DTypeError, match="cublasSgemm"):
        blas.names_of("cublasDgemm")
    with pytest.raises(OptionError) as caught:
        blas.names_of("cublasSgemmBatchd")
    assert caught.value.nearest == "cublasSgemmBatched"


@pytest.mark.parametrize(
    ("extents", "options", "says"),
    [
        ((256, 256, 256), {"dtype": "float16"}, ""),
        ((1, 8, 8), {"dtype": "bfloat16"}, ""),
        ((256, 256, 256), {"mode": "tf32"}, ""),
        ((256, 4, 12), {"mode": "tf32x3"}, ""),
        ((256, 16, 32), {"dtype": "int8"}, ""),
        ((256, 256, 256), {}, "mode='tf32'"),
        ((256, 256, 256), {"mode": "ieee", "dtype": "float16"}, "IEEE"),
        ((256, 256, 256), {"mode": "tf32", "dtype": "float16"}, "mode='default'"),
        ((256, 251, 256), {"dtype": "float16"}, "n = 251 is no multiple of 8"),
        ((256, 256, 250), {"mode": "tf32"}, "k = 250 is no multiple of 4"),
        ((256, 24, 256), {"dtype": "int8"}, "n = 24 is no multiple of 16"),
        ((8, 8, 8), {"dtype": "float16", "leading": (9,)}, "leading dimension of 9"),
        ((8, 8, 8), {"dtype": "float16", "addresses": (18,)}, "0x12"),
    ],
)
def test_tensor_cores_are_eligible_or_the_condition_is_named(
    extents: tuple[int, int, int], options: dict[str, object], says: str
) -> None:
    found = blas.tensor_cores(*extents, **options)
    assert bool(found) is not bool(says)
    assert says in str(found)
    assert len(found.reasons) == bool(says)


def test_a_described_call_looks_at_types_strides_and_addresses() -> None:
    room = np.zeros(64 * 64 + 16, np.float16)
    start = -room.ctypes.data % 16 // 2
    a = room[start : start + 4096].reshape(64, 64)
    assert blas.describe(a, a.T).tensor_cores()
    assert "251" in str(blas.describe(np.ones((8, 251), np.float16), np.ones((251, 8), np.float16)).tensor_cores())
    moved = room[start + 1 : start + 4097].reshape(64, 64)
    assert "bytes" in str(blas.describe(moved, a.T).tensor_cores())
    assert not blas.describe(a.astype(np.float32), a.astype(np.float32)).tensor_cores().uses


def test_tensor_cores_refuse_what_they_cannot_judge() -> None:
    for options, error in (({"dtype": "float64"}, DTypeError), ({"mode": "fast"}, OptionError)):
        with pytest.raises(error):
            blas.tensor_cores(8, 8, 8, **options)
    for options in ({"dtype": ["float16"]}, {"dtype": None}):
        with pytest.raises(DTypeError, match=r"^dtype: limit: float32, "):
            blas.tensor_cores(8, 8, 8, **options)
    for name in ("leading", "addresses"):
        with pytest.raises(OptionError, match=f"^{name}: limit: a whole number for each operand; got: 3; "):
            blas.tensor_cores(8, 8, 8, **{name: 3})
        for several in (("a",), (8, -8), [None], np.ones(3)):
            with pytest.raises(ShapeError, match=rf"^{name}\[[01]\]: limit: a whole number of at least [01]; got: "):
                blas.tensor_cores(8, 8, 8, **{name: several})
    with pytest.raises(ShapeError):
        blas.tensor_cores(8, 0, 8)
    assert set(MODES) == {"default", "tf32", "tf32x3", "ieee", "pedantic"}


def test_two_architectures_are_compared_bit_by_bit() -> None:
    a, b = (RNG.standard_normal(shape).astype(ml_dtypes.bfloat16) for shape in ((9, 200), (200, 7)))
    report = across(a, b)
    first, second = (isogemm.matmul(a, b, contract=name, out_dtype="float32") for name in ARCHITECTURES)
    assert report.results[0].differing == 0
    assert report.results[1].differing == compare.differing(first, second) > 10
    assert 0 < report.results[1].error < 1e-5
    assert f"{report.results[1].differing} differ from {ARCHITECTURES[0]}" in str(report)
    assert report.to_dict()["results"][1]["max_ulp"] == report.results[1].max_ulp > 0
    assert across(a, b, [ARCHITECTURES[0]] * 2).results[1].differing == 0
    with pytest.raises(OptionError):
        across(a, b, ARCHITECTURES[:1])
