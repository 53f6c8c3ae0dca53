"""Tensors in tests: the same ones every time, and their bits."""

import pytest

torch = pytest.importorskip("torch")


def bits(x):
    return x.detach().contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32)


def same(x, y):
    """Of one dtype and shape, with the same bits: a zero has its sign."""
    return x.dtype is y.dtype and torch.equal(bits(x), bits(y))


def randn(*shape, dtype=torch.float32, seed=0, grad=False):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype).requires_grad_(grad)
