"""Quantized weights in torch where it is easy to be wrong: weights that look alike, odd arguments, moves that fail."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from tests.torch.quant.test_linear import drawn, same, weight

import isogemm
from isogemm.errors import DeviceError, DTypeError, LayoutError, OptionError
from isogemm.quant import QuantizedMatrix

torch = pytest.importorskip("torch")

import isogemm.torch as iso  # noqa: E402
from isogemm.torch.quant import ops as quantized_ops  # noqa: E402


def test_slices_that_begin_at_the_same_byte_are_different_weights():
    w, x = weight(n=40), drawn(5, 512, seed=1, grad=True)
    whole = isogemm.linear(x.detach(), w)
    front, apart = w[:20], w[::2]
    for _ in range(2):
        same(iso.linear(x, front), whole[:, :20])
        same(iso.linear(x, apart), whole[:, ::2])
    layers = iso.QuantizedLinear(front), iso.QuantizedLinear(apart)
    same(layers[0](x), whole[:, :20])
    same(layers[1](x), whole[:, ::2])


def test_operators_look_at_blocks_that_begin_where_a_weight_does():
    w, x = weight(), drawn(3, 512, seed=1)
    blocks = quantized_ops.blocks_of(w)

    def product(given):
        return quantized_ops.linear_op(x, given, None, w.format.name, *w.shape, "", "", "leaf4096", None)

    same(product(blocks), isogemm.linear(x, w))
    for given in (blocks[:, ::2], blocks[:, :144], blocks.T):
        with pytest.raises(LayoutError, match="bytes of Q4_K rows"):
            product(given)
    with pytest.raises(DeviceError, match="got: meta"):
        product(blocks.to("meta"))


def test_rows_in_descending_order_are_no_tensor():
    w, x = weight()[::-1], drawn(3, 512, seed=1)
    same(iso.linear(x, w), isogemm.linear(x, w))
    for call in (lambda: iso.QuantizedLinear(w), lambda: iso.linear(x.requires_grad_(), w)):
        with pytest.raises(LayoutError, match=r"-288 bytes.*from_bytes"):
            call()
    upright = QuantizedMatrix.from_bytes(np.ascontiguousarray(w.rows), shape=w.shape, format=w.format)
    same(iso.QuantizedLinear(upright)(x), isogemm.linear(x.detach(), w))


@pytest.mark.parametrize("x", [None, "x", np.zeros((2, 512), np.float32)], ids=["None", "text", "array"])
def test_the_layer_wants_tensors(x):
    layer = iso.QuantizedLinear(weight())
    with pytest.raises(DTypeError, match=r"x of linear: limit: a tensor"):
        layer(x)
    with torch.no_grad(), pytest.raises(DTypeError, match=r"x of linear: limit: a tensor"):
        layer(x)


@pytest.mark.parametrize("grad", [False, True])
def test_options_are_read_alike_with_gradients_and_without(grad):
    w, x = weight(), drawn(3, 512, seed=1, grad=grad)
    for dtype in ("bfloat16", np.float16, torch.bfloat16):
        want = isogemm.linear(x.detach(), w, out_dtype=dtype)
        same(iso.linear(x, w, out_dtype=dtype), want)
        same(iso.QuantizedLinear(w, out_dtype=dtype)(x), want)
    for dtype in ("x", 3, torch.float64):
        for call in (iso.linear, lambda x, w, **options: iso.QuantizedLinear(w, **options)):
            with pytest.raises(DTypeError, match=r"limit: float32, bfloat16 or float16"):
                call(x, w, out_dtype=dtype)
    with pytest.raises(OptionError, match=r"activations: limit: one of q8, fp32, same; got: 3"):
        iso.linear(x, w, activations=3)


def test_a_meta_tensor_beside_data_is_refused():
    w, x, there = weight(), drawn(3, 512, seed=1), torch.zeros(20, device="meta")
    plain = torch.zeros(20, 512)
    calls = {
        "quantized": lambda: iso.linear(x, w, there),
        "layer": lambda: iso.QuantizedLinear(w, there)(x),
        "bias": lambda: iso.linear(x, plain, there),
        "weight": lambda: iso.linear(x, plain.to("meta")),
        "matrix": lambda: iso.mm(x, plain.T.to("meta")),
        "addend": lambda: iso.addmm(there, x, plain.T),
    }
    for name, call in calls.items():
        for context in (torch.enable_grad, torch.no_grad):
            with context(), pytest.raises(DeviceError, match=r"got: meta"):
                pytest.fail(f"{name}: {call()}")
    assert iso.linear(x.to("meta"), w).is_meta  # shapes of a whole model


def test_a_move_that_fails_changes_nothing():
    layer = iso.QuantizedLinear(weight(), drawn(1, 20, seed=3)[0])
    x = drawn(3, 512, seed=1)
    want = layer(x)
    for move in (lambda: layer.to("meta"), lambda: layer.to_empty(device="meta")):
        with pytest.raises(DeviceError, match=r"limit: cpu or cuda; got: meta"):
            move()
        assert layer.bias.device.type == "cpu"
        same(layer(x), want)


def test_layers_made_in_inference_mode_can_be_trained_through():
    x = drawn(3, 512, seed=1, grad=True)
    with torch.inference_mode():
        layer = iso.QuantizedLinear(weight())
    layer(x).sum().backward()
    same(x.grad, torch.autograd.grad(iso.linear(x, weight()).sum(), x)[0])


@pytest.mark.parametrize(
    "change",
    [
        {"format": torch.tensor([300, -2])},
        {"format": torch.tensor(3.5)},
        {"format": torch.zeros(4, dtype=torch.uint8, device="meta")},
        {"format": "Q4_K"},
        {"weight": "x"},
        {"weight": torch.zeros(20, 288, dtype=torch.uint8, device="meta")},
    ],
    ids=str,
)
def test_odd_entries_of_a_state_dict_are_named(change):
    layer = iso.QuantizedLinear(weight())
    state, before = layer.state_dict(), copy.deepcopy(layer)
    (key,) = change
    with pytest.raises(RuntimeError, match=rf"Error\(s\) in loading state_dict[^$]*\n\s+{key}: limit: "):
        layer.load_state_dict({**state, **change})
    assert torch.equal(layer.state_dict()["weight"], before.state_dict()["weight"])


def test_rows_that_lie_apart_are_saved_one_behind_the_other(tmp_path):
    save_file = pytest.importorskip("safetensors.torch").save_file
    layer = iso.QuantizedLinear(weight(n=40)[::2])
    save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    rows = isogemm.quant.load(tmp_path / "layer.safetensors")["weight"]
    assert np.array_equal(rows, layer.weight.rows)


@pytest.mark.parametrize("shape", [(0, 512), (5, 0), (0, 0)])
def test_weights_without_rows_or_columns(shape):
    n, k = shape
    x = torch.ones(3, k, requires_grad=True)
    bias = torch.arange(n, dtype=torch.float32).requires_grad_()
    layer = iso.QuantizedLinear(isogemm.quantize(np.zeros(shape, np.float32), "Q4_K"), bias)
    layer.load_state_dict(layer.state_dict())
    y = layer(x)
    same(y, bias.detach().expand(3, n).contiguous())
    y.sum().backward()
    same(x.grad, torch.zeros(3, k))
    same(layer.bias.grad, torch.full((n,), 3.0))


def test_operators_see_what_was_written_into_blocks():
    w, other, x = weight(n=40), weight(n=40, seed=9), drawn(5, 512, seed=1)
    blocks = quantized_ops.blocks_of(w).clone()

    def product():
        arguments = (x, blocks, None, w.format.name, 40, 512, "", "q8", "leaf4096", None)
        return torch.ops.isogemm.quantized_linear(*arguments)

    same(product(), isogemm.linear(x, w))
    blocks.copy_(quantized_ops.blocks_of(other))
    same(product(), isogemm.linear(x, other))


def test_a_view_of_blocks_has_its_own_weights():
    w = isogemm.quantize(np.random.default_rng(0).standard_normal((8, 64), np.float32), "Q8_0")
    blocks, x = quantized_ops.blocks_of(w), torch.randn(3, 64)

    def call(b):
        return torch.ops.isogemm.quantized_linear(x, b, None, "Q8_0", len(b), 64, "", "", "leaf4096", None)

    whole = call(blocks)
    assert torch.equal(call(blocks[:4]), whole[:, :4])
    assert torch.equal(call(blocks[::2]), whole[:, ::2])
