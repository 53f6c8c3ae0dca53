"""Convolutions inside a scope: along one dimension, and of patches, they are products; others are torch's and said."""

from __future__ import annotations

import pytest
from tests.torch.routing.routed import SCOPED, randn, same, within

import isogemm
from isogemm.errors import OptionError

torch = pytest.importorskip("torch")

from isogemm.torch.routing.scope import invariant  # noqa: E402

F = torch.nn.functional
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


@DTYPES
@pytest.mark.parametrize("inference", [False, True], ids=["grad", "inference"])
def test_a_convolution_along_one_dimension_is_a_product(dtype, inference):
    x, w, bias = randn(5, 20, 61, dtype=dtype), randn(7, 20, 3, dtype=dtype), randn(7, dtype=dtype)
    with torch.inference_mode(inference), invariant(strict=True) as scope:
        got, alone, plain = F.conv1d(x, w, bias, 2, 1), F.conv1d(x[2:3], w, bias, 2, 1), F.conv1d(x[3], w)
        later = F.conv1d(x[..., 10:], w, bias, 2, 1)
        none = F.conv1d(x[:0], w)
    assert scope.routed == {"convolution": 5}
    wide = F.pad(x, (1, 1))
    rows = torch.stack([wide[..., i : i + 3].flatten(1) for i in range(0, 61, 2)], 1)
    assert same(got, isogemm.linear(rows, w.flatten(1), bias).mT)
    assert got.is_contiguous()
    assert same(alone, got[2:3])
    assert same(later[..., 1:], got[..., 6:])  # all but what lies upon padding
    assert plain.shape == (7, 59)
    assert none.shape == (0, 7, 59)
    torch.testing.assert_close(got, F.conv1d(x, w, bias, 2, 1), rtol=2e-2, atol=5e-2)


@SCOPED
def test_patches_are_rows(scoped):
    image, w, bias = randn(3, 4, 12, 15), randn(8, 4, 4, 5), randn(8)
    with within(scoped):
        got = F.conv2d(image, w, bias, (4, 5))
    rows = image.view(3, 4, 3, 4, 3, 5).permute(0, 2, 4, 1, 3, 5).reshape(3, 9, 80)
    assert same(got.flatten(2), isogemm.linear(rows, w.flatten(1), bias).mT)


def test_other_convolutions_are_torchs_and_counted():
    x, image = randn(2, 4, 12), randn(2, 4, 12, 12)
    calls = {
        "groups": lambda: F.conv1d(x, randn(4, 2, 3), groups=2),
        "dilation": lambda: F.conv1d(x, randn(4, 4, 3), dilation=2),
        "transposed": lambda: F.conv_transpose1d(x, randn(4, 4, 3)),
        "overlapping": lambda: F.conv2d(image, randn(4, 4, 3, 3)),
        "float64": lambda: F.conv1d(x.double(), randn(4, 4, 3).double()),
    }
    for name, call in calls.items():
        plain = call()
        with invariant() as scope:
            assert torch.equal(call(), plain), name
        assert not scope.routed, name
        assert [what.split()[0] for what in scope.passed] == ["convolution"], name
        with invariant(strict=True), pytest.raises(OptionError, match="convolution"):
            call()
    with invariant():
        for w in (randn(4, 4, 13), randn(4, 3, 3), randn(4, 4, 0), randn(0, 4, 3)):
            with pytest.raises(RuntimeError):
                F.conv1d(x, w)


def test_its_gradient_is_torchs_and_counted():
    x, w = randn(2, 4, 12), randn(4, 4, 3).requires_grad_()
    with invariant() as scope:
        F.conv1d(x, w).sum().backward()
    (gradient,) = torch.autograd.grad(F.conv1d(x, w).sum(), w)
    torch.testing.assert_close(w.grad, gradient)
    assert scope.passed == {"convolution_backward.default": 1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_whisper_holds_in_batches(dtype):
    transformers = pytest.importorskip("transformers")
    sides = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in
             {"layers": 1, "attention_heads": 2, "ffn_dim": 48}.items()}  # fmt: skip
    config = transformers.WhisperConfig(
        vocab_size=97, num_mel_bins=20, d_model=40, max_source_positions=50, max_target_positions=20,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, **sides,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.WhisperForConditionalGeneration(config).eval().to(dtype)
    sound, ids = randn(5, 20, 100, dtype=dtype), torch.arange(35).view(5, 7) + 3
    with torch.no_grad(), invariant() as scope:
        batch = model(input_features=sound, decoder_input_ids=ids).logits
        alone = model(input_features=sound[2:3], decoder_input_ids=ids[2:3]).logits
    assert same(batch[2:3], alone)
    assert not scope.passed
