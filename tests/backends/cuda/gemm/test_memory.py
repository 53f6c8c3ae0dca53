"""What products read, write and allocate: their operands, their output, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from tests.backends.cuda.device import BF16, TF32X3, Guarded, Mode, differing, draw, expected, laid, modes, torch

import isogemm

pytestmark = pytest.mark.gpu

SIZES = ((1, 72, 128), (16, 264, 520), (33, 251, 333), (300, 520, 96))


@modes
@pytest.mark.parametrize("layout", ["rows", "columns", "offset", "stepped"])
def test_outputs_are_written_whole_and_nothing_beside_them(layout: str, mode: Mode) -> None:
    for m, n, k in SIZES:
        a, b = draw((m, k), mode.dtype, m), draw((k, n), mode.dtype, n)
        for dtype in (mode.dtype, "float32"):
            out = Guarded((m, n), dtype, layout)
            got = isogemm.gemm(a, b, out=out.view, out_dtype=getattr(torch, dtype), **mode.options)
            assert got is out.view
            out.check(expected(a, b, mode.definition, out_dtype=dtype), f"{mode} {m} x {n} x {k} {layout} {dtype}")


@modes
def test_what_lies_between_and_behind_operands_is_never_used(mode: Mode) -> None:
    """Operands in seas of NaN: one value too many, multiplied by a padded zero even, would show."""
    for m, n, k in SIZES:
        a, b = draw((m, k), mode.dtype, m), draw((k, n), mode.dtype, n)
        want = expected(a, b, mode.definition)
        for left in ("padded", "offset", "stepped"):
            for right in ("offset", "padded columns"):
                got = isogemm.matmul(laid(a, left), laid(b, right), **mode.options)
                assert differing(got, want) == 0, f"{mode} {m} x {n} x {k} {left} {right}"


@modes
def test_operands_stay_as_they_are(mode: Mode) -> None:
    for m, n, k in SIZES:
        a, b, c = draw((m, k), mode.dtype, m), draw((k, n), mode.dtype, n), draw((m, n), "float32", 3)
        bias = draw((n,), mode.dtype, 4)
        before = [x.clone() for x in (a, b, c, bias)]
        isogemm.gemm(a, b, c, alpha=1.5, beta=0.5, bias=bias, out_dtype=torch.float32, **mode.options)
        isogemm.gemm(a, b, c, accumulate=True, **mode.options)
        assert all(differing(x, y) == 0 for x, y in zip((a, b, c, bias), before, strict=True))


def allocated(call: Any) -> int:
    """Bytes by which the peak of torch's allocator grows over a call, its result included."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del result
    return int(peak)


@modes
def test_no_operand_is_copied(mode: Mode) -> None:
    """A call allocates its result and at most a workspace of 64 MiB; a call into `out` no result either.

    tf32x3 multiplies the parts that its operands are split into: two float32 numbers for each element.
    """
    x, w = draw((64, 4096), mode.dtype, 1), draw((20000, 4096), mode.dtype, 2)
    out = torch.empty((64, 20000), dtype=x.dtype, device="cuda")
    isogemm.linear(x, w, **mode.options)
    isogemm.matmul(x, w.T, out=out, **mode.options)
    spare = 64 << 20
    assert w.nbytes > 2 * spare
    spare += 2 * (x.nbytes + w.nbytes) if mode is TF32X3 else 0
    assert allocated(lambda: isogemm.linear(x, w, **mode.options)) <= out.nbytes + spare
    assert allocated(lambda: isogemm.matmul(x, w.T, out=out, **mode.options)) <= spare
    assert allocated(lambda: isogemm.linear(x.T.contiguous().T, w, **mode.options)) <= out.nbytes + x.nbytes + spare


def test_nothing_is_kept_from_call_to_call() -> None:
    x, w = draw((16, 1024), BF16.dtype, 1), draw((512, 1024), BF16.dtype, 2)
    for options in ({}, BF16.ordered("tree4").options):
        for _ in range(3):
            isogemm.linear(x, w, **options)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for _ in range(200):
            isogemm.linear(x, w, **options)
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == before


def test_guards_see_a_write_too_far() -> None:
    out = Guarded((5, 8), "bfloat16")
    want = torch.zeros((5, 8), dtype=torch.bfloat16, device="cuda")
    out.view.copy_(want)
    out.check(want)
    out.room[0, 130] = 0
    with pytest.raises(AssertionError, match="around the output"):
        out.check(want)
