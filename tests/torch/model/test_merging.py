"""Linears that read the same x as one product: the bits of each, whatever becomes of a layer afterwards."""

from __future__ import annotations

import copy

import pytest
from tests.torch.tensors import same

from isogemm.contract.spec import as_contract

torch = pytest.importorskip("torch")

from tests.torch.model.tiny import DTYPES, TINY, build, converted, tokens  # noqa: E402

import isogemm.torch as iso  # noqa: E402


@pytest.mark.parametrize("family", ["Qwen3", "Qwen2"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_merged_products_have_the_same_bits(family, dtype):
    apart, _ = converted(family, dtype)
    merged, ids = build(family, dtype), tokens(2, 9)
    parameters = dict(merged.named_parameters())
    iso.convert(merged, fuse=True)
    assert all(p is parameters[name] for name, p in merged.named_parameters())
    assert merged.state_dict().keys() == apart.state_dict().keys()
    attention, mlp = merged.model.layers[0].self_attn, merged.model.layers[0].mlp
    assert attention.q_proj.weight.data_ptr() == attention.merged_weight.data_ptr()
    calls = []

    def check():
        calls.clear()
        with torch.no_grad():
            assert same(merged(ids).logits, apart(ids).logits)

    check()
    state = {name: p + 0.125 for name, p in apart.state_dict().items()}
    for model in (apart, merged):  # in place: the merged weights see it
        model.load_state_dict(state)
    check()
    merged = copy.deepcopy(merged)
    attention, mlp = merged.model.layers[0].self_attn, merged.model.layers[0].mlp
    assert attention.q_proj.weight.data_ptr() == attention.merged_weight.data_ptr()
    for model in (apart, merged):
        model.to(torch.float64).to(dtype)  # new memory: merged again
    assert mlp.gate_proj.weight.data_ptr() == mlp.merged_weight.data_ptr()
    check()
    for model in (apart, merged):  # behind torch's back: not merged any more
        model.model.layers[0].mlp.gate_proj.weight.data = -model.model.layers[0].mlp.gate_proj.weight.data
        model.model.layers[1].mlp.up_proj.weight.data = -model.model.layers[1].mlp.up_proj.weight.data
    check()
    merged.model.layers[1].self_attn.k_proj.register_forward_hook(lambda *args: calls.append(1))
    check()
    assert calls == [1]
    assert same(merged(ids).logits, apart(ids).logits)  # with gradients: apart
    check()


CHANGES = {
    "nothing": lambda layer: None,
    "numbers": lambda layer: layer.weight.data.mul_(2),
    "memory": lambda layer: setattr(layer.weight, "data", -layer.weight.data),
    "strides": lambda layer: setattr(layer.weight, "data", layer.weight.data.mT),
    "parameter": lambda layer: setattr(layer, "weight", torch.nn.Parameter(-layer.weight.detach())),
    "assigned": lambda layer: layer.load_state_dict({"weight": -layer.weight.detach()}, assign=True),
    "bias": lambda layer: setattr(layer, "bias", torch.nn.Parameter(torch.ones(len(layer.weight)))),
}


@pytest.mark.parametrize("place", [0, 1])
def test_merged_layers_may_change(place):
    """What is one product is seen anew in each call: by the compiled code of before, too."""
    model = build(num_hidden_layers=1, intermediate_size=TINY["hidden_size"])
    iso.convert(model, fuse=True)
    mlp = model.model.layers[0].mlp
    layers, x = [mlp.gate_proj, mlp.up_proj], torch.randn(3, mlp.gate_proj.in_features)
    torch._dynamo.reset()
    compiled = torch.compile(mlp, fullgraph=True, backend="aot_eager")

    def check(what):
        with torch.no_grad():
            apart = [layer(x) for layer in layers]
            assert all(same(*pair) for pair in zip(mlp._products(x), apart, strict=True)), what
            want = mlp.down_proj(iso.reductions.silu_mul(*apart))
            assert same(compiled(x), want), what

    for what, change in CHANGES.items():
        check("as they were merged")
        change(layers[place])
        check(what)
        layers[place].bias = None
        mlp.merge()
        assert mlp.is_merged()
    layers[place].contract = as_contract("fma/leaf8")
    with torch.no_grad():
        assert all(same(y, layer(x)) for y, layer in zip(mlp._products(x), layers, strict=True))
    layers[place].contract = None
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert all(same(y, layer(x)) for y, layer in zip(mlp._products(x), layers, strict=True))
