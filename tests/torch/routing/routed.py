"""What tests of routing share: operands, bits, the products that they have to equal, and nothing left behind."""

from __future__ import annotations

import contextlib

import pytest
from tests.torch.tensors import bits, randn, same

import isogemm

torch = pytest.importorskip("torch")

from isogemm.torch.routing import scope  # noqa: E402

__all__ = ["LEAVES", "SCOPED", "bits", "chain", "clean", "gemm", "modes", "randn", "same", "within"]

LEAVES = "fma/leaf32"  # bits that no product of torch's has by chance
SCOPED = pytest.mark.parametrize("scoped", [True, False], ids=["scope", "process"])


def gemm(a, b, contract=LEAVES, **options):
    return isogemm.gemm(a.detach(), b.detach(), contract=contract, **options)


def chain(terms):
    """The sum over the first dimension, one addition after another, in float32."""
    total = torch.zeros(terms.shape[1:], device=terms.device)
    for term in terms.detach().float():
        total = total + term
    return total


def modes():
    return torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()


@pytest.fixture(autouse=True)
def clean():
    assert modes() == (0, 0)
    assert not scope.enabled()
    yield
    assert modes() == (0, 0)
    assert not scope.enabled()


@contextlib.contextmanager
def within(scoped, *contract, strict=False, **options):
    """A scope, or the process-wide switch, which neither counts nor is strict."""
    if scoped:
        with scope.invariant(*contract, strict=strict, **options) as entered:
            yield entered
        return
    scope.enable(*contract, **options)
    try:
        yield None
    finally:
        scope.disable()
