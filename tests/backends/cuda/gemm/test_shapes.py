"""Odd, tiny and empty products, every epilogue, mixed types: each against the executable definition, bit for bit."""

from __future__ import annotations

from itertools import product as every
from typing import Any

import pytest
from tests.backends.cuda.device import (
    ALL_MODES,
    BF16,
    FP16,
    IEEE,
    Guarded,
    Mode,
    all_modes,
    draw,
    expected,
    laid,
    modes,
    same,
    torch,
)

import isogemm

pytestmark = pytest.mark.gpu

# Tails of every tile and vector: each m, n and k meets several of the others.
MS, NS, KS = (1, 2, 5, 16, 17, 33, 65, 130, 257), (1, 7, 8, 33, 64, 129, 250), (1, 7, 8, 15, 16, 17, 33, 100, 264, 1029)
SIZES = [(m, NS[i % len(NS)], KS[(3 * i + j) % len(KS)]) for i, (m, j) in enumerate(every(MS, range(3)))]
EPILOGUES: dict[str, dict[str, Any]] = {
    "alpha": {"alpha": 1.7},
    "beta": {"beta": 0.3},
    "beta one": {"beta": 1.0},
    "all": {"alpha": -0.37, "beta": 1.9, "bias": True},
    "bias": {"bias": True},
    "accumulate": {"accumulate": True},
    "accumulate all": {"accumulate": True, "alpha": 0.61, "bias": True},
    "alpha zero": {"alpha": 0.0},
}


@all_modes
@pytest.mark.parametrize("part", range(3))
def test_odd_sizes(part: int, mode: Mode) -> None:
    for m, n, k in SIZES[part::3]:
        x, w = draw((m, k), mode.dtype, m + k, special=True), draw((n, k), mode.dtype, n)
        for out in (mode.dtype, "float32"):
            got = isogemm.linear(x, w, out_dtype=getattr(torch, out), **mode.options)
            same(got, expected(x, w.T, mode.definition, out_dtype=out), f"{mode} {m} x {n} x {k} to {out}")


@all_modes
def test_empty_products(mode: Mode) -> None:
    for m, n, k in ((0, 5, 7), (5, 0, 7), (0, 0, 0), (5, 7, 0), (1, 1, 0)):
        a, b = draw((m, k), mode.dtype, 1), draw((k, n), mode.dtype, 2)
        same(isogemm.matmul(a, b, **mode.options), torch.zeros((m, n), dtype=a.dtype, device="cuda"))
    c = draw((5, 7), "float32", 3, special=True)
    bias = draw((7,), mode.dtype, 4)
    a, b = draw((5, 0), mode.dtype, 1), draw((0, 7), mode.dtype, 2)
    for out in (mode.dtype, "float32"):
        got = isogemm.gemm(
            a, b, c, accumulate=True, alpha=0.7, bias=bias, out_dtype=getattr(torch, out), **mode.options
        )
        same(got, expected(a, b, mode.definition, c=c, alpha=0.7, bias=bias, out_dtype=out))
        got = isogemm.gemm(a, b, c, beta=1.3, bias=bias, out_dtype=getattr(torch, out), **mode.options)
        same(got, expected(a, b, mode.definition, added=c, beta=1.3, bias=bias, out_dtype=out))


@modes
@pytest.mark.parametrize("name", EPILOGUES)
def test_epilogues(name: str, mode: Mode) -> None:
    """Each step rounds by itself, in the pinned order, for every dtype of C, of the bias and of the output."""
    chosen = dict(EPILOGUES[name])
    with_bias, accumulate = chosen.pop("bias", False), chosen.pop("accumulate", False)
    if not accumulate:
        chosen.setdefault("beta", 0.0)  # C is there, and not read
    for m, n, k in ((5, 33, 100), (130, 128, 264)):
        a, b = draw((m, k), mode.dtype, 1, special=True), draw((k, n), mode.dtype, 2)
        for dtype, out in ((mode.dtype, mode.dtype), ("float32", "float32")):
            c = draw((m, n), "float32" if accumulate else dtype, 3, special=True)
            bias = draw((n,), dtype, 4, special=True) if with_bias else None
            got = isogemm.gemm(
                a, b, c, bias=bias, accumulate=accumulate, out_dtype=getattr(torch, out), **chosen, **mode.options
            )
            start = {"c": c} if accumulate else {"added": c}
            want = expected(a, b, mode.definition, **start, **chosen, bias=bias, out_dtype=out)
            same(got, want, f"{mode} {name} {m} x {n} x {k}, C and bias {dtype}, out {out}")


@modes
def test_c_in_place_and_strided(mode: Mode) -> None:
    """The output may be C itself; outputs of any layout, with nothing around them written."""
    m, n, k = 65, 72, 200
    a, b = draw((m, k), mode.dtype, 1), draw((k, n), mode.dtype, 2)
    for layout in ("rows", "columns", "offset", "stepped"):
        out, start = Guarded((m, n), "float32", layout), draw((m, n), "float32", 3)
        out.view.copy_(start)
        isogemm.gemm(a, b, out.view, alpha=1.1, beta=0.7, out=out.view, out_dtype=torch.float32, **mode.options)
        out.check(expected(a, b, mode.definition, added=start, alpha=1.1, beta=0.7, out_dtype="float32"), layout)
        out.view.copy_(start)
        isogemm.matmul(a, b, out=out.view, accumulate=True, **mode.options)
        out.check(expected(a, b, mode.definition, c=start, out_dtype="float32"), layout)


def test_beta_zero_never_reads_c() -> None:
    a, b = draw((5, 64), BF16.dtype, 1), draw((64, 72), BF16.dtype, 2)
    c = torch.full((5, 72), float("nan"), dtype=a.dtype, device="cuda")
    same(isogemm.gemm(a, b, c, beta=0.0), isogemm.matmul(a, b))


@modes
@pytest.mark.parametrize("letters", ["NN", "NT", "TN", "TT"])
def test_layouts(letters: str, mode: Mode) -> None:
    """The four layouts by `gemm`'s letters and by views, dense, padded and one element off, at small and large M."""
    for m, n, k in ((3, 64, 128), (257, 264, 520), (130, 251, 333)):
        a, b = draw((m, k), mode.dtype, m, special=True), draw((k, n), mode.dtype, n)
        want = expected(a, b, mode.definition)
        for layout in ("rows", "padded", "offset"):
            x = laid(a.T if letters[0] == "T" else a, layout)
            y = laid(b.T if letters[1] == "T" else b, layout)
            what = f"{mode} {letters} {layout} {m} x {n} x {k}"
            same(isogemm.gemm(x, y, trans_a=letters[0], trans_b=letters[1], **mode.options), want, what)
            left, right = (x.T if letters[0] == "T" else x), (y.T if letters[1] == "T" else y)
            same(isogemm.matmul(left, right, **mode.options), want, what)


@pytest.mark.parametrize("mode", [BF16, FP16], ids=str)
def test_sixteen_bit_operands_under_fma(mode: Mode) -> None:
    """``fma/chain`` on 16-bit operands, and beside float32 ones: the CPU's bits."""
    for m, n, k in ((1, 64, 128), (33, 65, 100), (130, 128, 520)):
        a, b = draw((m, k), mode.dtype, 1, special=True), draw((k, n), mode.dtype, 2)
        same(isogemm.matmul(a, b, contract="fma/chain"), expected(a, b, "fma/chain"))
        wide = draw((m, k), "float32", 3)
        got = isogemm.matmul(wide, b, contract="fma/chain")
        same(got, expected(wide, b.float(), "fma/chain"))


def test_fma_never_pads_k() -> None:
    """fma(0, 0, -0) is +0: a K that is padded with zeros turns a sum of -0 into +0, and is seen here."""
    for k in (1, 3, 17, 100):
        a = torch.full((40, k), -0.0, device="cuda")
        b = torch.full((k, 40), 1.0, device="cuda")
        c = torch.full((40, 40), -0.0, device="cuda")
        got = isogemm.gemm(a, b, c, accumulate=True)
        same(got, expected(a, b, IEEE.definition, c=c))
        assert torch.signbit(got).all()


@modes
def test_vectors_and_stacks(mode: Mode) -> None:
    """The shapes of `numpy.matmul`: 1-D operands and broadcast batches."""
    a, b = draw((3, 1, 7, 48), mode.dtype, 1), draw((4, 48, 40), mode.dtype, 2)
    got = isogemm.matmul(a, b, **mode.options)
    assert got.shape == (3, 4, 7, 40)
    for i, j in every(range(3), range(4)):
        same(got[i, j], expected(a[i, 0], b[j], mode.definition))
    same(isogemm.matmul(a[0, 0, 0], b[0], **mode.options), expected(a[0, 0, :1], b[0], mode.definition)[0])
    same(isogemm.matmul(a[0, 0], b[0, :, 0], **mode.options), expected(a[0, 0], b[0, :, :1], mode.definition)[:, 0])
    same(isogemm.linear(a, b[0].T, **mode.options)[2, 0], expected(a[2, 0], b[0], mode.definition))


def test_every_mode_has_its_own_bits() -> None:
    """The comparison tells contracts apart: another arithmetic or order is another result."""
    x, w = draw((64, 1024), "float32", 1), draw((64, 1024), "float32", 2)
    results = [isogemm.linear(x, w, **mode.options) for mode in ALL_MODES if mode.dtype == "float32"]
    results.append(isogemm.linear(x, w, contract="fma/leaf256"))
    for i, y in enumerate(results):
        assert all((y != z).any() for z in results[:i])
