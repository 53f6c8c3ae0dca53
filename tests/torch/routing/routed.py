"""What tests of routing share: operands, bits, the products that they have to equal, and nothing left behind."""

from __future__ import annotations

import pytest
from tests.torch.tensors import bits, randn, same

import isogemm

torch = pytest.importorskip("torch")

from isogemm.torch.routing import scope  # noqa: E402

__all__ = ["LEAVES", "bits", "clean", "gemm", "modes", "randn", "same"]

LEAVES = "fma/leaf32"  # bits that no product of torch's has by chance


def gemm(a, b, contract=LEAVES, **options):
    return isogemm.gemm(a.detach(), b.detach(), contract=contract, **options)


def modes():
    return torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()


@pytest.fixture(autouse=True)
def clean():
    assert modes() == (0, 0)
    assert not scope.enabled()
    yield
    assert modes() == (0, 0)
    assert not scope.enabled()
