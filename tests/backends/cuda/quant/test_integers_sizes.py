"""Room and ranges of integer products: what kernels lay out fits where the host puts it, and no sum passes 2**24."""

from __future__ import annotations

from typing import Any

import pytest
from tests.backends.cuda.compiled import Kernels, kernels
from tests.quant.draws import WEIGHTS

from isogemm.backends.cuda.driver import nvrtc
from isogemm.backends.cuda.quant import few as quant_few
from isogemm.backends.cuda.quant import many
from isogemm.backends.cuda.quant.case import QuantCase
from isogemm.backends.cuda.quant.integers import activations, few, wide
from isogemm.backends.cuda.quant.integers.wide import WideCodes
from isogemm.backends.cuda.quant.layout import layout

__all__ = ["kernels"]  # the fixture

CODE = 127  # the largest of x
FLOAT16, FLOAT32 = 2**11, 2**24  # integers up to these are exact


def laid_out(fmt: Any, rows: int, k: int, lines: int) -> tuple[int, int, int]:
    """Bytes of codes, scales and sums of x, `lines` rows of scales, as quant/integers/few.cu has them."""
    steps = -(-k // 64)
    if fmt.block == 32:  # two float16 scales to 64 of K, and two float32 sums
        return 64 * rows * steps, 4 * lines * steps, 8 * lines * steps if fmt.offset else 0
    words = 64 // fmt.sub // 2 if fmt.offset else 0
    return 64 * rows * steps, 4 * lines * -(-steps // 4), 4 * lines * words * steps


@pytest.mark.parametrize("fmt", WEIGHTS, ids=str)
def test_codes_scales_and_sums_have_room(fmt: Any) -> None:
    lay = layout(fmt)
    for k in (fmt.block * i for i in (1, 2, 3, 5, 8, 77)):
        for m in range(1, 33):
            codes, scales, sums = laid_out(fmt, rows := -(-m // 8) * 8, k, rows)
            at = activations.places(lay, m, k, few.form_of(lay))
            assert (at.codes, at.scales % 16, at.sums % 16) == (0, 0, 0)
            assert at.codes + codes <= at.scales
            assert at.scales + scales <= at.sums
            assert at.sums + sums <= at.nbytes
            assert codes + scales + sums <= few.x_bytes(lay, m, k, "staged")
            fused = sum(laid_out(fmt, m, k, 1 if m == 1 else 8))
            assert m > 8 or fused <= few.x_bytes(lay, m, k, "fused")


def largest(fmt: Any) -> tuple[int, int]:
    """The largest magnitudes of what codes of x are multiplied by: s q (q of blocks of 32), and t."""
    field = {"Q2_K": (0, 15), "Q3_K": (-32, 31), "Q4_K": (0, 63), "Q5_K": (0, 63), "Q6_K": (-128, 127)}
    bits = sum(bits for bits, _ in layout(fmt).planes)
    zero = layout(fmt).zero
    s = max(map(abs, field[fmt.name])) if fmt.block == 256 else 1
    return s * max(zero, 2**bits - 1 - zero), s if fmt.offset and fmt.block == 256 else 0


@pytest.mark.parametrize("fmt", WEIGHTS, ids=str)
def test_sums_in_float32_accumulators_are_exact(fmt: Any) -> None:
    """Of all formats that have a wide configuration, in the parts that quant/integers/wide.cu sums at once."""
    lay = layout(fmt)
    part = 32 if fmt.block == 32 else 256 if lay.bits <= 3 else 128
    product, offset = largest(fmt)
    exact = product < FLOAT16 and part * product * CODE < FLOAT32
    legal = any(wide.legal(lay, WideCodes(w, cols, 2)) for w in (1, 2, 3, 4) for cols in (32, 64, 96, 128))
    assert legal == exact
    assert 16 * CODE < FLOAT16  # sums of codes, as float16
    assert 256 * offset * CODE < FLOAT32


@pytest.mark.parametrize("name", ["Q8_0", "Q5_1", "Q4_0", "Q2_K", "Q3_K", "Q4_K"])
def test_wide_kernels_lay_out_what_they_ask_for(kernels: Kernels, name: str, monkeypatch: Any) -> None:
    """The kernel's own sizes, held by its compiler; of most formats those of the tile between."""
    lay, compile_text = layout(name), nvrtc.compile_text
    nvrtc._cubins.clear()
    shapes = [(1, 32), (2, 128), (4, 32)] if name in ("Q8_0", "Q4_K") else [(2, 128)]
    for warpgroups, cols in shapes:
        c = wide._deepest(lay, warpgroups, cols)
        assert c is not None
        held = f"static_assert(1024 + STAGES * STAGE_BYTES + SLOTS * SLOT_BYTES == {wide.shared(lay, c)});\n"
        monkeypatch.setattr(nvrtc, "compile_text", lambda text, held=held, **more: compile_text(text + held, **more))
        c.bind(QuantCase("q8", name, "float32", "float32", None, 100, 64, 512), 0)
    assert len(kernels.loaded) == len(shapes)


@pytest.mark.parametrize("fmt", WEIGHTS, ids=str)
def test_rows_of_which_a_tile_has_too_many_bytes_are_left_to_others(fmt: Any) -> None:
    """Kernels count a tile's bytes in 32 bits; in Q8_0 one row of 2**27 is 142 MB, and its tile 2.3 GB."""
    lay = layout(fmt)
    most = (2**31 - 1) // lay.record_bytes * lay.record_k
    for k, fits in ((most, True), (most + lay.record_k, False)):
        assert (lay.tile_bytes(k) < 2**31) == fits
        for kernel, m in ((quant_few.KERNEL, 1), (many.KERNEL, 33)):
            assert kernel.takes(QuantCase("same", fmt.name, "bfloat16", "bfloat16", None, m, 1, k)) == fits
        assert any(wide.options(lay, 64, 16, k)) == (fits and fmt.name not in wide.NONE)
