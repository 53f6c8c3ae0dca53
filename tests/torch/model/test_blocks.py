"""The rows of `convert` for other libraries' blocks: their bits, their gradients and their float32 buffers."""

from __future__ import annotations

import copy

import pytest

from isogemm.errors import OptionError

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.torch.tensors import same  # noqa: E402
from transformers.models.falcon.modeling_falcon import FalconLinear  # noqa: E402
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm, Gemma3TextScaledWordEmbedding  # noqa: E402
from transformers.pytorch_utils import Conv1D  # noqa: E402

import isogemm.torch as iso  # noqa: E402


def conv1d():
    layer = Conv1D(24, 40)
    torch.nn.init.normal_(layer.bias)
    return layer


def norm():
    layer = Gemma3RMSNorm(40)
    torch.nn.init.normal_(layer.weight)
    return layer


def embedding():
    return Gemma3TextScaledWordEmbedding(11, 40, 0, embed_scale=40**0.5)


BLOCKS = {"conv1d": conv1d, "falcon": lambda: FalconLinear(40, 24), "norm": norm, "embedding": embedding}


def inputs(name, rows):
    if name == "embedding":
        return torch.randint(0, 11, (rows, 3))
    return torch.randn(rows, 3, 40)


@pytest.mark.parametrize("name", BLOCKS)
def test_gradients_are_those_of_the_formula(name):
    plain = torch.nn.Sequential(BLOCKS[name]())
    ours, x = copy.deepcopy(plain), inputs(name, 7)
    assert iso.convert(ours, strict=True).converted == ("0",)
    wide = plain.double()
    dy = torch.randn(7, 3, 24 if name in ("conv1d", "falcon") else 40)
    x_wide = x.double() if x.is_floating_point() else x
    if x.is_floating_point():
        x.requires_grad_()
        x_wide.requires_grad_()
    y, want = ours(x), wide(x_wide)
    y.backward(dy)
    want.backward(dy.double())
    torch.testing.assert_close(y.double(), want, rtol=1e-4, atol=1e-4)
    if x.requires_grad:
        torch.testing.assert_close(x.grad.double(), x_wide.grad, rtol=1e-4, atol=1e-4)
    assert same(ours(x)[2:3], ours(x[2:3]))
    for p, q in zip(ours.parameters(), wide.parameters(), strict=True):
        torch.testing.assert_close(p.grad.double(), q.grad.double(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", BLOCKS)
def test_micro_batches_have_the_bits_of_the_whole(name, dtype):
    """3 tokens a sequence and chains of rows: any cut is one of whole leaves."""
    model = torch.nn.Sequential(BLOCKS[name]()).to(dtype)
    iso.convert(model, strict=True, grad_order="chain")
    x = inputs(name, 8)
    x = x.to(dtype) if x.is_floating_point() else x
    dy = torch.randn(8, 3, 24 if name in ("conv1d", "falcon") else 40).to(dtype)

    def gradients(size):
        iso.use_main_grad(model)
        for part, d in zip(x.split(size), dy.split(size), strict=True):
            model(part).backward(d)
        assert not any(p.grad is not None and p.grad.any() for p in model.parameters())
        return [total.clone() for _, _, total in iso.main_grads(model)]

    whole = gradients(8)
    assert all(total.abs().sum() > 0 for total in whole)
    for size in (1, 2, 4):
        assert all(same(a, b) for a, b in zip(gradients(size), whole, strict=True))


def test_a_transposed_weight_has_linear_s_bits():
    layer, x = conv1d(), torch.randn(5, 40)
    want = iso.linear(x, layer.weight.mT, layer.bias)
    iso.convert(torch.nn.Sequential(layer), strict=True)
    assert same(layer(x), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_norm_of_one_and_a_weight_rounds_once(dtype):
    layer, x = norm().to(dtype), torch.randn(5, 40).to(dtype)
    iso.convert(torch.nn.Sequential(layer), strict=True)
    assert same(layer(x), iso.reductions.rms_norm(x, 1 + layer.weight.float(), layer.eps, out_dtype=dtype))
    narrow = x.bfloat16()
    assert layer(narrow).dtype == narrow.dtype


class Doubled(torch.nn.Linear):
    def forward(self, x):
        return 2 * (x @ self.weight.T) + self.bias


class Limited(Gemma3TextScaledWordEmbedding):
    def forward(self, ids):
        return super().forward(ids).clamp(-1e4, 1e4)


def test_subclasses_that_compute_something_else_are_refused():
    with pytest.raises(OptionError, match=r"a subclass of Linear.*Doubled: calls mul"):
        iso.convert(torch.nn.Sequential(Doubled(4, 4)))
    with pytest.warns(iso.LeftToTorch, match="a subclass of Embedding.*Limited: calls clamp"):
        iso.convert(torch.nn.Sequential(Limited(11, 40, 0, embed_scale=2.0)))
