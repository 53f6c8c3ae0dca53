"""CPUs with no special instructions: the bits are this CPU's."""

from __future__ import annotations

from . import checks


def test_quantized() -> None:
    checks.quantized("generic")


def test_products() -> None:
    checks.products("generic")


def test_rows() -> None:
    checks.rows("generic")
