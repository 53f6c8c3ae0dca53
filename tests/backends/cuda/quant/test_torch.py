"""Quantized weights in torch on a CUDA device: the layer moves, operators, compiled code, graphs, refused kernels."""

from __future__ import annotations

import copy
import gc
import io
import logging
from types import SimpleNamespace

import numpy as np
import pytest
from tests.backends.cuda.quant.test_linear import activations, cuda, host, wanted, weight
from tests.products import BF16, F32, assert_same, product

import isogemm
from isogemm.base import seen
from isogemm.errors import DeviceError, LimitError
from isogemm.quant import FORMATS

torch = pytest.importorskip("torch")

import isogemm.torch as iso  # noqa: E402
from isogemm.backends.cuda.driver import machine  # noqa: E402
from isogemm.backends.cuda.quant import family, pack  # noqa: E402
from isogemm.backends.cuda.quant.apart import QuantApart  # noqa: E402
from isogemm.planner import records  # noqa: E402
from isogemm.planner.admission import Admissions  # noqa: E402
from isogemm.planner.records import Records  # noqa: E402
from isogemm.torch.quant import ops as quantized_ops  # noqa: E402

pytestmark = pytest.mark.gpu

Q4_K = FORMATS["Q4_K"]


def layer(fmt=Q4_K, n=40, k=512, **options):
    bias = torch.linspace(-1, 2, n)
    return iso.QuantizedLinear(weight(fmt, n, k), bias, **options)


def test_the_layer_moves_there_and_back():
    x, short = activations(5, 512, F32), activations(5, 512, BF16)
    made = layer()
    want = host(made(torch.from_numpy(x)))
    before = made.weight
    assert made.cuda() is made
    assert made.blocks.is_cuda
    assert made.bias.is_cuda
    assert made.weight.device == "cuda:0"
    assert_same(host(made(cuda(x))), want)
    bias = made.bias.detach().cpu().numpy()
    assert_same(host(made(cuda(short))), wanted(short, before, bias=bias))
    with torch.no_grad():
        assert_same(host(made(cuda(x))), want)
        assert_same(host(made(cuda(x))), want)
    state = made.state_dict()
    assert np.array_equal(state["weight"].cpu().numpy(), before.rows)
    other = layer()
    other.load_state_dict(state)
    other = other.to("cuda")
    other.load_state_dict(state)
    for same in (other, copy.deepcopy(made)):
        assert same.weight.device == "cuda:0"
        assert_same(host(same(cuda(x))), want)
    room = io.BytesIO()
    torch.save(made, room)
    room.seek(0)
    assert_same(host(torch.load(room, weights_only=False)(cuda(x))), want)
    assert_same(host(made.cpu()(torch.from_numpy(x))), want)
    assert made.weight is before


def test_memory_on_the_device_is_that_of_the_copy():
    made = layer(n=4096, k=4096)
    torch.cuda.synchronize()
    gc.collect()
    start = torch.cuda.memory_allocated()
    made.cuda()
    grown = torch.cuda.memory_allocated() - start
    assert made.weight._packed.nbytes <= grown <= made.weight._packed.nbytes + 2**17
    made.cpu()
    gc.collect()
    assert torch.cuda.memory_allocated() - start <= 2**17


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_operators(dtype):
    made = layer().cuda()
    x = torch.randn(3, 512, device="cuda").to(dtype)
    about = (made.blocks, made.bias, "Q4_K", 40, 512)
    want = made(x).detach()
    got = quantized_ops.linear_op(x, *about, "", "", "leaf4096", None)
    assert torch.equal(got, want)
    torch.library.opcheck(quantized_ops.linear_op, (x.requires_grad_(), *about, "", "", "leaf4096", None))
    torch.library.opcheck(quantized_ops.weight_op, (made.blocks, "Q4_K", 40, 512, dtype))
    stranger = made.blocks.clone()  # of a matrix that nobody holds
    assert torch.equal(quantized_ops.linear_op(x, stranger, *about[1:], "", "", "leaf4096", None), want)
    with pytest.raises(DeviceError, match="host"):
        quantized_ops.matrix_of(stranger, "Q4_K", 40, 512).to("cpu")
    with pytest.raises(LimitError):
        quantized_ops.matrix_of(stranger, "Q4_K", 40, 256)


def test_gradients_have_the_definition_s_bits():
    w = weight(Q4_K, 48, 512)
    x, dy = activations(9, 512, BF16), activations(9, 256, BF16)[:, :48].copy()
    given = cuda(x).requires_grad_()
    iso.linear(given, w.to("cuda")).backward(cuda(dy))
    assert_same(host(given.grad), product(dy, w.dequantize(BF16), "tensor_core:sm90/chain"))
    wide = cuda(x.astype(F32)).requires_grad_()
    iso.linear(wide, w.to("cuda")).backward(cuda(dy.astype(F32)))
    assert_same(host(wide.grad), product(dy.astype(F32), w.dequantize()))


def test_copies_outlive_the_transform_and_the_mode_that_made_them():
    w, x, made = weight(Q4_K, 48, 512), torch.randn(3, 512, device="cuda"), {}

    def loss(x):
        made["whole"] = w.to("cuda")
        made["part"], made["floats"] = made["whole"][16:32], made["whole"].dequantize()
        return iso.linear(x, made["whole"], activations="fp32").pow(2).sum()

    torch.func.grad(loss)(x)
    with torch.inference_mode():
        made["inference"] = w.to("cuda")
    want = torch.from_numpy(w.dequantize()).cuda()
    assert torch.equal(made.pop("floats"), want)
    for name, there in made.items():
        given = x.clone().requires_grad_()
        iso.linear(given, there, activations="fp32").sum().backward()
        assert given.grad.isfinite().all(), name
        assert torch.equal(there.dequantize(), want[16:32] if name == "part" else want), name


@pytest.mark.filterwarnings("ignore")  # torch's own, about itself
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_compiled_code(mode):
    model = torch.nn.Sequential(layer(), torch.nn.ReLU(), torch.nn.Identity()).cuda()
    part = model
    x = torch.randn(5, 512, device="cuda").bfloat16()
    compiled = torch.compile(part, fullgraph=True, mode=mode)
    with torch.no_grad():
        want = part(x)
        for _ in range(3):
            assert torch.equal(compiled(x).clone(), want)
        assert torch.equal(compiled(x[:1]).clone(), want[:1])


def test_a_whole_model():
    """A sequence alone has the logits that it has in a batch; so it has decoded token by token."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        vocab_size=96, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=256, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(config).bfloat16().eval()
    done = iso.convert(model, quantize="Q4_K")
    assert sum(isinstance(m, iso.QuantizedLinear) for m in model.modules()) == 15, str(done)
    model.cuda()
    ids = torch.randint(0, 96, (5, 24), device="cuda")
    with torch.no_grad():
        want = model(ids).logits
        assert torch.equal(model(ids[2:3]).logits, want[2:3])
        assert torch.equal(model(ids[:, :7]).logits, want[:, :7])
        cache = transformers.DynamicCache()
        for i in range(24):
            step = model(ids[:1, i : i + 1], past_key_values=cache).logits
            assert torch.equal(step[0, 0], want[0, i]), i


@pytest.fixture
def verdicts(monkeypatch, tmp_path):
    """Verdicts of this device, with none on record; and calls that are chosen anew."""
    monkeypatch.setattr(records, "_said", set())  # what is said once was said by no test before
    found = Admissions(machine.TorchMachine(0), Records(tmp_path))
    monkeypatch.setattr(machine, "admissions", lambda device: found)
    seen.forget()
    yield found
    seen.forget()


right = QuantApart.run


def broken(self, x, packed, out, bias=None, config=None):
    right(self, x, packed, out, bias, config)
    out.view(torch.int16)[-1, -1] ^= 1  # one bit of one result


def test_a_broken_kernel_serves_no_call(monkeypatch, verdicts, caplog):
    monkeypatch.setattr(QuantApart, "run", broken)
    x, w = activations(3, 512, BF16), weight(Q4_K, 40, 512)
    there = w.to("cuda")
    with caplog.at_level(logging.WARNING, "isogemm"):
        for _ in range(2):
            assert_same(host(isogemm.linear(cuda(x), there)), wanted(x, w))
    assert "quant apart" in caplog.text
    assert "is not used" in caplog.text
    states = {known.name: known.admission.state for known in verdicts.known()}
    assert states["quant apart"] == "refused"
    assert "admitted" in states.values()


def test_where_all_are_refused_weights_are_dequantized(monkeypatch, verdicts):
    monkeypatch.setattr(family, "FAMILIES", SimpleNamespace(found={}))
    x, w = activations(3, 512, BF16), weight(Q4_K, 40, 512)
    assert_same(host(isogemm.linear(cuda(x), w.to("cuda"))), wanted(x, w))
    wide = x.astype(F32)
    got = isogemm.linear(cuda(wide), w.to("cuda"), activations="fp32")
    assert_same(host(got), isogemm.linear(wide, w, activations="fp32"))
    with pytest.raises(isogemm.errors.ContractError, match="int32"):
        isogemm.linear(cuda(wide), w.to("cuda"))


def test_a_wrong_copy_is_made_by_the_host(monkeypatch, verdicts):
    write = pack._write

    def wrong(raw, data, lay, n, k):
        write(raw, data, lay, n, k)
        data[-1] ^= 1

    monkeypatch.setattr(pack, "_write", wrong)
    w, x = weight(Q4_K, 40, 512), activations(3, 512, F32)
    there = w.to("cuda")
    monkeypatch.setattr(pack, "_write", write)
    assert_same(host(isogemm.linear(cuda(x), there)), isogemm.linear(x, w))


def test_a_first_call_in_a_capture_is_refused(verdicts):
    w = weight(Q4_K, 40, 512).to("cuda")
    x = torch.zeros(2, 512, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.zero_()
        with pytest.raises(DeviceError, match="capture"):
            isogemm.linear(x, w)
    torch.cuda.synchronize()
    isogemm.linear(x, w)
