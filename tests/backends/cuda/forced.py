"""Kernels by name: every configuration of every family on a product of one's choice, past the planner."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.backends.cuda.device import NAMES, Mode, torch

from isogemm.backends.cuda.gemm.choose import FAMILIES
from isogemm.planner.trials import ProductFamily
from isogemm.problem.product import Addresses, Launch, Product, Strides

__all__ = ["candidates", "launch", "pose"]


def strides(x: Any) -> Strides:
    """Of a matrix, or of each matrix of a stack."""
    return Strides(x.stride(-2), x.stride(-1), x.stride(0) if x.ndim == 3 else 0)


def pose(a: Any, b: Any, out: Any, mode: Mode, start: Any = None) -> tuple[Product, Addresses]:
    """What a kernel sees of out = a @ b, or of a walk that begins at `start`."""
    at = Addresses(a.data_ptr(), b.data_ptr(), out.data_ptr(), 0 if start is None else start.data_ptr())
    common = at.a | at.b | at.out | at.c | 128
    return Product(
        out.shape[-2], out.shape[-1], a.shape[-1], NAMES[a.dtype], NAMES[b.dtype], NAMES[out.dtype], mode.contract,
        strides(a), strides(b), strides(out), batch=out.shape[0] if out.ndim == 3 else 1,
        c=None if start is None else strides(start), dtype_c=None if start is None else "float32",
        accumulate=start is not None, align=common & -common,
    ), at  # fmt: skip


def candidates(product: Product) -> Iterator[tuple[str, str]]:
    """(family, configuration) of everything that may serve a product: all of our own, and a library's admitted ones."""
    from isogemm.backends.cuda.gemm.choose import chooser

    here = chooser(torch.cuda.current_device())
    for family in here.own():
        for config in family.configs(product):
            if family.supports(product, config):
                yield family.name, config
    for hint, found in here.judged(product):
        if here.families[hint.use.family].library and found.state == "admitted":
            yield tuple(hint.use)


def family(name: str) -> ProductFamily:
    """By name."""
    return FAMILIES.found[name]


def launch(name: str, config: str, product: Product) -> Launch:
    """One kernel, built for a product."""
    return FAMILIES.found[name].bind(product, config, torch.cuda.current_device())


def run(name: str, config: str, product: Product, at: Addresses) -> None:
    """Enqueue one kernel on the current stream."""
    launch(name, config, product)(at, torch.cuda.current_stream().cuda_stream)
