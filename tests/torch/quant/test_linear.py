"""Quantized weights in torch: functions, operators, the layer; the bits of `isogemm.linear` and of its gradients."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
import weakref

import numpy as np
import pytest
from tests.products import F32, assert_same, product
from tests.quant.draws import WEIGHTS, values
from tests.quant.draws import blocks as drawn_blocks

import isogemm
from isogemm.errors import DeviceError, DTypeError, LayoutError, OptionError, ShapeError
from isogemm.operands import views
from isogemm.quant import FORMATS, QuantizedMatrix, quantize

torch = pytest.importorskip("torch")

import isogemm.torch as iso  # noqa: E402
from isogemm.torch.quant import ops as quantized_ops  # noqa: E402

KINDS = [(torch.float32, None), (torch.float32, "fp32"), (torch.bfloat16, None), (torch.float16, "q8")]


def weight(fmt="Q4_K", n: int = 20, count: int = 2, seed: int = 0) -> QuantizedMatrix:
    fmt = FORMATS[str(fmt)]
    if not fmt.quantized:
        return quantize(values("normal", n, 64, seed), fmt)
    return QuantizedMatrix.from_bytes(drawn_blocks(fmt, n, count, seed), shape=(n, count * fmt.block), format=fmt)


def drawn(*shape: int, seed: int = 0, dtype=torch.float32, grad: bool = False):
    x = values("normal", int(np.prod(shape[:-1])), shape[-1], seed).reshape(shape)
    return torch.from_numpy(x).to(dtype).requires_grad_(grad)


def array(x) -> np.ndarray:
    return views.array("x", x.detach())


def same(x, y) -> None:
    assert_same(array(x), array(y))


@pytest.mark.parametrize("fmt", [*WEIGHTS, FORMATS["F16"]], ids=str)
@pytest.mark.parametrize(("dtype", "activations"), KINDS[:3], ids=str)
def test_every_way_of_calling_has_the_same_bits(fmt, dtype, activations):
    w, bias = weight(fmt), drawn(1, 20, seed=3)[0]
    x = drawn(2, 3, w.shape[1], seed=1, dtype=dtype)
    want = isogemm.linear(x, w, bias, activations=activations)
    layer = iso.QuantizedLinear(w, bias, activations=activations)
    parts = (quantized_ops.blocks_of(w), bias, w.format.name, *w.shape)
    for y in (
        iso.linear(x, w, bias, activations=activations),
        iso.linear(x.clone().requires_grad_(), w, bias, activations=activations),
        layer(x),
        layer(x.clone().requires_grad_()),
        quantized_ops.linear_op(x, *parts, "", activations or "", "leaf4096", None),
        quantized_ops.linear_forward_op(x, *parts, "", activations or "", None),
    ):
        same(y, want)
    with torch.no_grad():
        same(layer(x), want)
    with torch.inference_mode():
        same(layer(x), want)


def test_options_reach_the_product():
    w, x = weight(), drawn(3, 512)
    for options in ({"contract": "int32/leaf256"}, {"activations": "fp32", "contract": "fma/tree2"},
                    {"out_dtype": torch.bfloat16}):  # fmt: skip
        want = isogemm.linear(x, w, **options)
        same(iso.linear(x, w, **options), want)
        same(iso.linear(x.clone().requires_grad_(), w, **options), want)
        same(iso.QuantizedLinear(w, **options)(x), want)
    short = x.bfloat16()
    want = isogemm.linear(short, w, contract="tensor_core:sm90")
    same(iso.linear(short.requires_grad_(), w, contract="tensor_core:sm90"), want)


@pytest.mark.parametrize("fmt", ["Q4_0", "Q6_K"])
@pytest.mark.parametrize(("dtype", "activations"), KINDS, ids=str)
def test_gradients_are_chains_over_the_dequantized_weights(fmt, dtype, activations):
    w = weight(fmt, 24)
    x, bias = drawn(2, 3, w.shape[1], dtype=dtype, grad=True), drawn(1, 24, seed=1, dtype=dtype)[0].requires_grad_()
    dy = drawn(2, 3, 24, seed=2, dtype=dtype)
    iso.linear(x, w, bias, activations=activations, grad_order="leaf2").backward(dy)
    wide = F32 if activations or dtype is torch.float32 else dtype
    rows = array(dy).reshape(6, 24).astype(F32 if wide is F32 else array(dy).dtype)
    want = product(rows, w.dequantize(wide), out_dtype=array(x).dtype)
    assert_same(array(x.grad).reshape(6, -1), want)
    ones = np.ones((1, 6), rows.dtype)
    assert_same(array(bias.grad), product(ones, rows, "fma/leaf2", out_dtype=array(bias).dtype)[0])


def test_gradients_follow_the_arithmetic_that_was_asked_for():
    w, x = weight("Q8_0", 32), drawn(3, 64, dtype=torch.bfloat16, grad=True)
    dy = drawn(3, 32, seed=2, dtype=torch.bfloat16)
    iso.linear(x, w, contract="tensor_core:sm90/leaf32").backward(dy)
    assert_same(array(x.grad), product(array(dy), w.dequantize(torch.bfloat16), "tensor_core:sm90/chain"))


def test_a_gradient_can_be_differentiated_again():
    w, x = weight("Q5_1", 8), drawn(3, 64, grad=True)
    (g,) = torch.autograd.grad(iso.linear(x, w, activations="fp32").pow(3).sum(), x, create_graph=True)
    g.sum().backward()
    assert x.grad.abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck(dtype):
    w, x = weight("Q4_K"), drawn(2, 3, 512, dtype=dtype, grad=True)
    blocks, about = quantized_ops.blocks_of(w), ("Q4_K", 20, 512)
    bias = drawn(1, 20, seed=1)[0].requires_grad_()
    check = torch.library.opcheck
    check(quantized_ops.linear_op, (x, blocks, bias, *about, "", "", "leaf4096", None))
    check(quantized_ops.linear_op, (x, blocks, None, *about, "fma/leaf64", "fp32", "leaf8", torch.float32))
    check(quantized_ops.linear_forward_op, (x.detach(), blocks, bias.detach(), *about, "", "", None))
    check(quantized_ops.weight_op, (blocks, *about, torch.float16))


@pytest.mark.filterwarnings("ignore")  # torch's own, about itself
@pytest.mark.parametrize("fmt", ["Q8_0", "Q4_K"])
def test_compiled_code_has_the_same_bits(fmt):
    torch._dynamo.reset()
    count = 512 // FORMATS[fmt].block  # of one shape, so that what a C++ compiler makes serves both formats
    w, x = weight(fmt, 24, count), drawn(5, 512)
    layer = iso.QuantizedLinear(w, drawn(1, 24, seed=1)[0].requires_grad_())

    def model(x):
        return layer(torch.relu(x)) * 2

    compiled = torch.compile(model, fullgraph=True)
    for f in (model, compiled):
        one = x.clone().requires_grad_()
        y = f(one)
        y.square().sum().backward()
        if f is model:
            want = y, one.grad, layer.bias.grad
        else:
            for a, b in zip((y, one.grad, layer.bias.grad), want, strict=True):
                same(a, b)
        layer.bias.grad = None
    with torch.no_grad():
        same(compiled(x), model(x))
        same(compiled(x[:2]), model(x[:2]))
    fresh = weight(fmt, 24, count, seed=5)  # a matrix whose blocks nobody has asked for yet
    f = torch.compile(lambda x: iso.linear(x, fresh) + 1, fullgraph=True)
    same(f(x), iso.linear(x, fresh) + 1)


@pytest.mark.filterwarnings("ignore")  # torch's own, about itself
def test_blocks_that_share_code_compile_once():
    """Layers of one shape are not told apart by a compiler."""
    layers = [iso.QuantizedLinear(weight("Q4_0", 64, 2, seed)) for seed in range(5)]
    counter = torch._dynamo.testing.CompileCounter()
    torch._dynamo.reset()
    compiled = [torch.compile(layer, fullgraph=True, backend=counter) for layer in layers]
    x = drawn(3, 64)
    for f, layer in zip(compiled, layers, strict=True):
        with torch.no_grad():
            same(f(x), layer(x))
    assert counter.frame_count == 1


@pytest.mark.filterwarnings("ignore")  # torch's own, about itself
def test_autocast_takes_activations_to_its_type():
    w, x = weight("Q4_0", 16), drawn(3, 64)
    layer = iso.QuantizedLinear(w)
    want = isogemm.linear(x.bfloat16(), w)
    with torch.autocast("cpu", torch.bfloat16):
        same(layer(x), want)
        same(iso.linear(x, w), want)
        same(torch.compile(layer, fullgraph=True)(x), want)


def test_the_layer_goes_through_a_state_dict():
    layer = iso.QuantizedLinear(weight(), drawn(1, 20)[0])
    other = iso.QuantizedLinear(weight(seed=1), torch.zeros(20))
    x = drawn(3, 512)
    state = layer.state_dict()
    assert set(state) == {"weight", "format", "bias"}
    assert all(isinstance(v, torch.Tensor) for v in state.values())
    assert np.array_equal(state["weight"].numpy(), layer.weight.rows)
    assert not torch.equal(other(x), layer(x))
    model = torch.nn.Sequential(other)
    assert not any(model.load_state_dict({f"0.{k}": v for k, v in state.items()}))
    same(other(x), layer(x))
    state["weight"].zero_()  # the loaded layer has bytes of its own
    assert other(x).abs().sum() > 20


def test_a_state_dict_that_does_not_fit():
    layer, x = iso.QuantizedLinear(weight("Q4_0")), drawn(2, 64)
    before = layer(x)
    damaged = layer.state_dict()
    damaged["weight"] = torch.full_like(damaged["weight"], 255)
    for state, words in (
        (iso.QuantizedLinear(weight("Q4_1")).state_dict(), "Q4_1"),
        (iso.QuantizedLinear(weight("Q4_0", 19)).state_dict(), "19"),
        (damaged, "finite"),
        ({"format": layer.state_dict()["format"]}, "weight"),
    ):
        with pytest.raises(RuntimeError, match=words):
            layer.load_state_dict(state)
    same(layer(x), before)
    assert layer.load_state_dict({}, strict=False).missing_keys == ["weight", "format"]


@pytest.mark.filterwarnings("ignore")  # torch's own, about itself
def test_the_layer_is_copied_and_kept():
    layer = iso.QuantizedLinear(weight(), drawn(1, 20)[0])
    x, room = drawn(3, 512), io.BytesIO()
    want = layer(x)
    torch.save(layer, room)
    room.seek(0)
    for made in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.load(room, weights_only=False)):
        same(made(x), want)
        assert made.weight is not layer.weight
        same(torch.compile(made, fullgraph=True, backend="eager")(x), want)


def test_a_change_of_dtype_changes_the_bias_alone():
    layer = iso.QuantizedLinear(weight(), drawn(1, 20)[0]).to(torch.bfloat16)
    assert layer.bias.dtype is torch.bfloat16
    assert layer.blocks.dtype is torch.uint8
    x = drawn(3, 512, dtype=torch.bfloat16)
    same(layer.eval()(x), isogemm.linear(x, layer.weight, layer.bias.detach()))
    assert layer.to("cpu") is layer
    assert [name for name, _ in layer.named_parameters()] == ["bias"]


def test_a_matrix_is_found_by_its_blocks_and_dies_with_them():
    w = weight("Q4_0", seed=9)
    held = quantized_ops.blocks_of(w)
    assert quantized_ops.blocks_of(w) is held
    assert quantized_ops.matrix_of(held.detach(), "Q4_0", 20, 64) is w
    copied = held.clone()
    made = quantized_ops.matrix_of(copied, "Q4_0", 20, 64)
    assert made is not w
    assert quantized_ops.matrix_of(copied, "Q4_0", 20, 64) is made
    gone = [weakref.ref(w), weakref.ref(made)]
    del w, held, made
    gc.collect()
    assert gone[0]() is None
    assert gone[1]() is not None  # as long as the tensor
    del copied
    gc.collect()
    assert gone[1]() is None


def test_read_only_bytes_are_taken_without_a_warning(tmp_path):
    w = weight("Q4_0")
    (tmp_path / "w").write_bytes(w.rows.tobytes())
    mapped = np.memmap(tmp_path / "w", np.uint8, "r").reshape(w.rows.shape)
    x = drawn(3, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer = iso.QuantizedLinear(QuantizedMatrix.from_bytes(mapped, shape=w.shape, format="Q4_0"))
        same(layer(x), isogemm.linear(x, w))
        same(layer(x.requires_grad_()), isogemm.linear(x.detach(), w))


def test_vmap_over_activations():
    w, x = weight("Q4_0"), drawn(4, 3, 64)
    want = isogemm.linear(x, w)
    same(torch.func.vmap(lambda x: iso.linear(x, w))(x), want)
    same(torch.func.vmap(lambda x: iso.linear(x, w), in_dims=1, out_dims=1)(x), want)
    layer = iso.QuantizedLinear(w, torch.zeros(20))
    same(torch.func.vmap(layer)(x), want)
    with pytest.raises(OptionError, match="vmap"):
        torch.func.vmap(lambda x, bias: iso.linear(x, w, bias))(x, torch.zeros(4, 20))


@pytest.mark.filterwarnings("ignore")  # torch's own, about itself
def test_transforms_that_differentiate():
    w, x = weight("Q4_0"), drawn(4, 64)

    def loss(x):
        return iso.linear(x, w, activations="fp32").pow(2).sum()

    y = x.clone().requires_grad_()
    loss(y).backward()
    same(torch.func.grad(loss)(x), y.grad)
    same(torch.func.vmap(torch.func.grad(lambda row: loss(row[None])))(x), y.grad)
    with pytest.raises(OptionError, match="forward-mode"):
        torch.func.jvp(loss, (x,), (x,))
    program = torch.export.export(iso.QuantizedLinear(w), (x,))
    same(program.module()(x), isogemm.linear(x, w))


def test_what_is_refused():
    w, x = weight(), drawn(3, 512)
    for call, error in (
        (lambda: iso.linear(x.numpy(), w), DTypeError),
        (lambda: iso.linear(x, w, np.zeros(20, F32)), DTypeError),
        (lambda: iso.linear(x[:, :256], w), ShapeError),
        (lambda: iso.linear(x[:, :256].requires_grad_(), w), ShapeError),
        (lambda: iso.linear(x, w, main_grad=torch.zeros(20, 512)), OptionError),
        (lambda: iso.linear(x, torch.zeros(20, 512), activations="q8"), OptionError),
        (lambda: iso.linear(x, w, activations="int8"), OptionError),
        (lambda: iso.linear(x.requires_grad_(), w, activations="int8"), OptionError),
        (lambda: iso.QuantizedLinear(torch.zeros(20, 512)), DTypeError),
        (lambda: iso.QuantizedLinear(w, activations="int8"), OptionError),
        (lambda: iso.QuantizedLinear(w, torch.zeros(19)), ShapeError),
        (lambda: iso.QuantizedLinear(w, [0.0] * 20), DTypeError),
        (lambda: iso.QuantizedLinear(w).to("meta"), DeviceError),
        (lambda: w.to("meta"), DeviceError),
        (lambda: w.to("cuda:99"), DeviceError),
        (lambda: quantized_ops.matrix_of(torch.zeros(20, 30, dtype=torch.uint8), "Q4_K", 20, 256), LayoutError),
    ):
        with pytest.raises(error):
            call()


def test_what_is_printed():
    layer = iso.QuantizedLinear(weight(), contract="int32/leaf256")
    assert str(layer) == (
        "QuantizedLinear(in_features=512, out_features=20, bias=False, format=Q4_K, activations=default, "
        "contract=int32/leaf256)"
    )
