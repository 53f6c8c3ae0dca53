"""Every configuration of every kernel family, forced: each has the definition's bits and stays inside its output."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from tests.backends.cuda import forced
from tests.backends.cuda.device import (
    BF16,
    FP16,
    IEEE,
    TF32,
    TF32X3,
    Guarded,
    Mode,
    check_sample,
    draw,
    expected,
    torch,
)

from isogemm.backends.cuda.gemm.choose import FAMILIES
from isogemm.planner.tables import shipped_tables
from isogemm.problem.product import Strides

pytestmark = pytest.mark.gpu

# Rows for every bucket that families list configurations by, columns and K with tails of every tile.
HOMES = (
    (1, 264, 1024),
    (5, 264, 1040),
    (16, 520, 1024),
    (31, 264, 1040),
    (64, 520, 1024),
    (130, 520, 1040),
    (700, 776, 512),
)
ODD = (37, 251, 333)
LARGE = (1030, 4104, 1040)  # more tiles than multiprocessors, so that persistent kernels take a second one
MODEL = (
    (1, 28672, 4096),
    (16, 6144, 2560),
    (128, 4096, 14336),
    (512, 6144, 2560),
    (2048, 28672, 4096),
    (4096, 4096, 4096),
)
PARTS = 8
KINDS = (
    BF16,
    FP16,
    IEEE,
    TF32,
    TF32X3,
    BF16.ordered("leaf256"),
    BF16.ordered("tree4"),
    IEEE.ordered("tree8"),
    TF32X3.ordered("leaf256"),
)


@cache
def operands(size: tuple[int, int, int], dtype: str) -> tuple[Any, Any]:
    m, n, k = size
    return draw((m, k), dtype, m, special=True), draw((n, k), dtype, n).T


@cache
def answer(size: tuple[int, int, int], mode: Mode) -> Any:
    return expected(*operands(size, mode.dtype), mode.definition)


def listing(mode: Mode) -> Iterator[tuple[str, str]]:
    """Everything that families list for small products and for a model's, and that shipped tables name."""
    a, b = operands(ODD, mode.dtype)
    small, _ = forced.pose(a, b, torch.empty(ODD[:2], dtype=a.dtype, device="cuda"), mode)
    for m, n, k in (*HOMES, LARGE, *MODEL):  # only listed, so that none of it needs memory
        packed = replace(small, m=m, n=n, k=k, a=Strides(k, 1), b=Strides(1, k), out=Strides(n, 1), align=128)
        yield from forced.candidates(packed)
    for table in shipped_tables():
        for row in table.rows:
            if row.key.contract == mode.definition and row.key.types.startswith(mode.dtype):
                yield from (tuple(use) for bucket in row.buckets for use in bucket.uses)


def everything(mode: Mode) -> list[tuple[str, str, tuple[int, int, int]]]:
    """(family, configuration, the first product that it supports), each configuration once; libraries apart."""
    found: dict[tuple[str, str], tuple[int, int, int]] = {}
    for name, config in dict.fromkeys(listing(mode)):
        for size in (*HOMES, LARGE):
            if FAMILIES.found[name].library or (name, config) in found:
                break
            a, b = operands(size, mode.dtype)
            product, _ = forced.pose(a, b, torch.empty(size[:2], dtype=a.dtype, device="cuda"), mode)
            if forced.family(name).supports(product, config):
                found[name, config] = size
    return [(*name, size) for name, size in found.items()]


@cache
def listed(mode: Mode) -> list[tuple[str, str, tuple[int, int, int]]]:
    return everything(mode)


def check(name: str, config: str, size: tuple[int, int, int], mode: Mode) -> bool:
    """Whether the kernel supports the product; if so, its bits are right."""
    a, b = operands(size, mode.dtype)
    out = Guarded(size[:2], mode.dtype)
    product, at = forced.pose(a, b, out.view, mode)
    if not forced.family(name).supports(product, config):
        return False
    forced.run(name, config, product, at)
    out.check(answer(size, mode), f"{mode.definition} {name} [{config}] {size}")
    return True


@pytest.mark.parametrize("mode", KINDS, ids=lambda m: f"{m.dtype}-{m.definition}")
@pytest.mark.parametrize("part", range(PARTS))
def test_every_configuration(part: int, mode: Mode) -> None:
    names = listed(mode)
    assert names, "no kernel for this contract"
    wrong = []
    for name, config, size in names[part::PARTS]:
        try:
            assert check(name, config, size, mode)
            check(name, config, ODD, mode)
        except (AssertionError, pytest.fail.Exception) as error:
            wrong.append(f"{name} [{config}]: {error}")
    assert not wrong, "\n".join(wrong)


@cache
def large(mode: Mode) -> Any:
    """The large product by the first listed kernel, its sample checked against the definition."""
    a, b = operands(LARGE, mode.dtype)
    out = torch.empty(LARGE[:2], dtype=a.dtype, device="cuda")
    product, at = forced.pose(a, b, out, mode)
    name, config = next(iter(forced.candidates(product)))
    forced.run(name, config, product, at)
    check_sample(out, a, b, mode)
    return out


@pytest.mark.parametrize(
    "mode", [BF16, IEEE, TF32X3, BF16.ordered("leaf256")], ids=lambda m: f"{m.dtype}-{m.definition}"
)
@pytest.mark.parametrize("part", range(PARTS))
def test_more_tiles_than_multiprocessors(part: int, mode: Mode) -> None:
    """Every configuration three times over a large product: pipelines wrap, persistent kernels go round."""
    a, b = operands(LARGE, mode.dtype)
    want, wrong = large(mode), []
    for name, config, _ in listed(mode)[part::PARTS]:
        for _ in range(3):
            out = Guarded(LARGE[:2], mode.dtype)
            product, at = forced.pose(a, b, out.view, mode)
            if not forced.family(name).supports(product, config):
                break
            forced.run(name, config, product, at)
            try:
                out.check(want, f"{mode.definition} {name} [{config}]")
            except (AssertionError, pytest.fail.Exception) as error:
                wrong.append(str(error))
                break
    assert not wrong, "\n".join(wrong)


def test_every_family_is_here() -> None:
    """On the machine that the kernels are for, none of them may be missing."""
    assert not FAMILIES.absent
    named = {name for mode in KINDS for name, *_ in listed(mode)}
    # A library is admitted for exact products alone; lists choose for themselves; copies, and lines read as they
    # lie, are for operands out of step, and none here is: tested with tables, with forms and with odd sizes.
    assert set(FAMILIES.rows) - named <= {"cublaslt", "items", "padded", "unaligned"}


def test_a_kernel_that_is_wrong_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch on a K that is one block short, and one that also writes a row too many."""
    name, config, size = listed(BF16)[0]
    true = forced.launch

    def short(name: str, config: str, product: Any) -> Any:
        return true(name, config, replace(product, k=product.k - 16))

    def tall(name: str, config: str, product: Any) -> Any:
        return true(name, config, replace(product, m=product.m + 1))

    for broken, words in ((short, "differ"), (tall, "around the output")):
        monkeypatch.setattr(forced, "launch", broken)
        with pytest.raises((AssertionError, pytest.fail.Exception), match=words):
            check(name, config, size, BF16)
