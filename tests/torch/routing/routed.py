"""What tests of routing share: operands, bits, the products that they have to equal, and nothing left behind."""

from __future__ import annotations

import pytest

import isogemm

torch = pytest.importorskip("torch")

from isogemm.torch.routing import scope  # noqa: E402

__all__ = ["LEAVES", "bits", "clean", "gemm", "modes", "randn", "same"]

LEAVES = "fma/leaf32"  # bits that no product of torch's has by chance


def bits(x):
    return x.detach().contiguous().view(torch.int32 if x.dtype is torch.float32 else torch.int16)


def same(a, b):
    return a.dtype is b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def randn(*shape, dtype=torch.float32, seed=0, grad=False):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype).requires_grad_(grad)


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
