"""CPUs with AVX2: the bits are this CPU's."""

from __future__ import annotations

from . import checks


def test_quantized() -> None:
    checks.quantized("avx2")


def test_products() -> None:
    checks.products("avx2")


def test_rows() -> None:
    checks.rows("avx2")
