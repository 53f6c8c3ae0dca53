"""Plans on a GPU: what they say is what serves, and a replay has the bits of the call."""

from __future__ import annotations

import pytest

import isogemm
import isogemm.torch
from isogemm.backends.cuda.plans.plan import DevicePlan
from isogemm.backends.cuda.plans.work import DESCRIBED
from isogemm.errors import ShapeError

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu
MASKS = ("", "causal", "window:200", "bool", "added")


def drawn(*shape, dtype=torch.bfloat16):
    torch.manual_seed(len(shape))
    return torch.randn(shape, device="cuda", dtype=dtype)


def replayed(plan, *operands):
    """By the plan, and by its JSON; every tensor filled with NaN before is seen where it was not written."""
    assert plan.here
    found = plan.run(*operands)
    again = DevicePlan.from_json(plan.to_json()).run(*operands)
    for x, y in zip(*((some if isinstance(some, list) else [some]) for some in (found, again)), strict=True):
        assert torch.equal(x.view(torch.int16), y.view(torch.int16))
    return found


def same(x, y):
    return torch.equal(x.view(torch.int16), y.view(torch.int16))


@pytest.mark.parametrize("m", [1, 16, 300])
def test_products(m):
    a, w = drawn(m, 512), drawn(768, 512)
    plan = isogemm.plan(m, 768, 512, dtype="bfloat16", device="cuda")
    assert same(replayed(plan, a, w.T), isogemm.linear(a, w))
    with pytest.raises(ShapeError, match="operands of a replay"):
        plan.run(a[:, :-1], w.T)


def test_a_batch_and_groups():
    a, b = drawn(8, 40, 64), drawn(8, 64, 48)
    plan = isogemm.plan(40, 48, 64, dtype="bfloat16", device="cuda", batch=8, trans_b="N")
    assert same(replayed(plan, a, b), isogemm.gemm_strided_batched(a, b))
    rows = (3, 100, 0, 57)
    some, others = [drawn(x, 256) for x in rows], [drawn(256, 128) for _ in rows]
    plan = isogemm.plan(sum(rows), 128, 256, dtype="bfloat16", device="cuda", groups=rows, trans_b="N")
    for x, y in zip(replayed(plan, some, others), isogemm.gemm_grouped(some, others), strict=True):
        assert same(x, y)


@pytest.mark.parametrize("m", [1, 9, 200])
@pytest.mark.parametrize("fmt", ["Q4_0", "Q4_K", "Q8_0"])
def test_quantized(m, fmt):
    x = drawn(m, 512)
    w = isogemm.quantize(drawn(768, 512).float().cpu().numpy(), fmt).to("cuda")
    plan = isogemm.plan(m, 768, 512, dtype="bfloat16", device="cuda", format=fmt)
    assert same(replayed(plan, x, w), isogemm.linear(x, w, activations="q8"))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("tokens", "keys"), [(1, 1000), (300, 300)])
def test_attention(tokens, keys, mask):
    q, k, v = drawn(2, 8, tokens, 64), drawn(2, 2, keys, 64), drawn(2, 2, keys, 64)
    plan = isogemm.plan(tokens, keys, 64, dtype="bfloat16", device="cuda", batch=2, heads=(8, 2), mask=mask)
    given = {"bool": drawn(tokens, keys) > 0, "added": drawn(tokens, keys)}.get(mask)
    found = replayed(plan, q, k, v, *(() if given is None else (given,)))
    if mask.startswith("window"):
        from isogemm.problem.forms import Mask

        shown = torch.from_numpy(Mask.parse(mask).shown(tokens, keys)).cuda()
        wanted = isogemm.torch.scaled_dot_product_attention(q, k, v, shown, enable_gqa=True)
    else:
        wanted = isogemm.torch.attention(q, k, v, mask=given, causal=mask == "causal")
    assert same(found, wanted)


def test_a_described_device_plans_what_a_live_one_does():
    name = next((x for x, given in DESCRIBED.items() if given.name == torch.cuda.get_device_name()), None)
    if name is None:
        pytest.skip("a GPU that is not described")
    for extents, about in (
        ((160, 512, 512), {"groups": (3, 100, 57)}), ((16, 4096, 4096), {"format": "Q4_K"}),
        ((1, 8192, 128), {"batch": 4, "heads": (32, 8)}), ((512, 512, 64), {"heads": (8, 2), "mask": "window:200"}),
    ):  # fmt: skip
        live, told = (isogemm.plan(*extents, dtype="bfloat16", device=x, **about) for x in ("cuda", name))
        assert (live.family, live.config, live.numeric) == (told.family, told.config, told.numeric)
