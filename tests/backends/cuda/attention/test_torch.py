"""Attention as torch sees it on a GPU: the bits of a CPU, gradients included, under any layout, graph and compiler."""

from __future__ import annotations

import math
from typing import Any

import pytest
from tests.backends.cuda.poison import poisoned

__all__ = ["poisoned"]  # the fixture

torch = pytest.importorskip("torch")
calls = pytest.importorskip("isogemm.torch.attention.calls")
gradients = pytest.importorskip("isogemm.torch.attention.gradients")

from tests.torch.attention.test_forward import attention, drawn, masked, operands, same, sdpa  # noqa: E402

pytestmark = pytest.mark.gpu
CASES = [
    (torch.float32, "fma/chain"), (torch.bfloat16, "tensor_core:sm90/chain"), (torch.float16, "tensor_core:sm90/chain"),
    (torch.bfloat16, "fma/chain"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the bits of Hopper's tensor cores")


def up(x: Any) -> Any:
    return x.cuda() if isinstance(x, torch.Tensor) else x


def taken(tensors: list[Any], dy: Any, **options: Any) -> list[Any]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    y = attention(*leaves, **options)
    return [y.detach().cpu(), *(x.cpu() for x in torch.autograd.grad(y, leaves, dy))]


@pytest.mark.parametrize(("dtype", "contract"), CASES, ids=str)
@pytest.mark.parametrize("kind", ["none", "causal", "bool", "added", "ranges"])
def test_results_and_gradients_are_those_of_a_cpu(dtype, contract, kind):
    tensors, dy = operands(2, 4, 2, 9, 200, 64, dtype), drawn(2, 4, 9, 64, seed=9, dtype=dtype)
    options: dict[str, Any] = {"contract": contract}
    if kind in ("bool", "added"):
        options["mask"] = masked(kind, 2, 4, 9, 200, torch.float32)
    if kind in ("causal", "ranges"):
        options |= {"causal": True, "scale": 0.2}
    if kind == "ranges":
        options |= {"start": torch.tensor([3, 140]), "stop": torch.tensor([150, 200])}
    want = taken(tensors, dy, **options)
    got = taken([up(x) for x in tensors], up(dy), **{name: up(x) for name, x in options.items()})
    for one, other in zip(got, want, strict=True):
        same(one, other)


SHAPES = [  # b, hq, hkv, tq, tk, d, causal, start, stop
    (2, 4, 2, 200, 200, 128, True, None, None),
    (1, 8, 8, 333, 333, 64, True, None, None),
    (1, 3, 1, 100, 170, 80, True, None, None),
    (2, 2, 2, 257, 515, 128, False, None, None),
    (2, 4, 2, 300, 300, 64, True, [0, 70], [300, 201]),
    (1, 16, 1, 130, 130, 32, False, None, [99]),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_without_scores_are_those_of_products(shape, dtype, monkeypatch):
    *sizes, d, causal, start, stop = shape
    tensors = cuda_operands(*sizes, d, dtype=dtype)
    b, hq, _, tq, _ = sizes
    dy = up(drawn(b, hq, tq, d, seed=9, dtype=dtype))
    options = {name: up(torch.tensor(x)) for name, x in (("start", start), ("stop", stop)) if x is not None}
    real, served = gradients._fused, []
    monkeypatch.setattr(gradients, "_fused", lambda *call: served.append(real(*call)) or served[-1])
    got = taken(tensors, dy, causal=causal, **options)
    assert served[-1] is not None
    monkeypatch.setattr(gradients, "_fused", lambda *call: None)
    for one, other in zip(got, taken(tensors, dy, causal=causal, **options), strict=True):
        same(one, other)


def test_gradients_of_a_broadcast_and_of_heads_inside_tokens():
    tensors = cuda_operands(2, 4, 2, 70, 70, 64)
    dy = torch.ones((), dtype=torch.bfloat16).cuda().expand(2, 4, 70, 64)
    want = taken(tensors, dy.contiguous(), causal=True)
    laid = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    for one, other in zip(taken(laid, dy, causal=True), want, strict=True):
        same(one, other)


def cuda_operands(*sizes: int, dtype: Any = torch.bfloat16) -> list[Any]:
    return [up(x) for x in operands(*sizes, dtype)]


def test_padding_by_a_mask():
    q, k, v = cuda_operands(3, 4, 2, 7, 300, 128)
    first = torch.tensor([0, 5, 130]).cuda()
    key, query = torch.arange(300).cuda(), torch.arange(7).cuda().view(-1, 1)
    shown = (key >= first.view(3, 1, 1, 1)) & (key <= query + 293)
    for x in (k, v):
        x.masked_fill_((key < first.view(3, 1)).view(3, 1, 300, 1), math.nan)
    got = sdpa(q, k, v, shown, enable_gqa=True)
    for i, at in enumerate(first.tolist()):
        same(got[i].cpu(), attention(q[i : i + 1], k[i : i + 1, :, at:], v[i : i + 1, :, at:], causal=True)[0].cpu())


@pytest.mark.parametrize("d", [64, 80])
def test_layouts(d):
    q, k, v = cuda_operands(2, 4, 2, 7, 300, d)
    want = attention(q, k, v, causal=True).cpu()
    for laid in (
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: x.mT.contiguous().mT,
        lambda x: torch.cat([x, x], 2)[:, :, : x.shape[2]],
    ):
        same(attention(*(laid(x) for x in (q, k, v)), causal=True).cpu(), want)


def test_no_token_and_no_key():
    q, k, v = cuda_operands(2, 4, 2, 7, 30, 64)
    assert attention(q[:, :, :0], k, v).shape == (2, 4, 0, 64)
    for y in (
        attention(q, k[:, :, :0], v[:, :, :0]), attention(q, k, v, stop=0), attention(q, k, v, start=99),
        attention(q, k, v, causal=True, offset=-40),
    ):  # fmt: skip
        same(y.cpu(), torch.zeros(2, 4, 7, 64, dtype=torch.bfloat16))


def test_a_captured_graph_reads_its_range():
    q, k, v = cuda_operands(2, 4, 2, 1, 512, 128)
    stop = torch.tensor([100, 200]).cuda()
    attention(q, k, v, stop=stop)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = attention(q, k, v, stop=stop)
    for n in ([100, 200], [300, 511], [1, 512]):
        stop.copy_(torch.tensor(n))
        graph.replay()
        same(y.cpu(), attention(q, k, v, stop=stop).cpu())


def test_the_operator_keeps_torchs_rules():
    leaves = [x.requires_grad_() for x in cuda_operands(2, 4, 2, 33, 200, 64)]
    arguments = (*leaves, None, 3, None, None, False, None, None, "", None)
    torch.library.opcheck(torch.ops.isogemm.attention.default, arguments)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # parts of torch that other parts of it deprecate
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # torch's own
def test_compiled_attention_has_the_eager_bits():
    torch._dynamo.reset()
    leaves = [x.requires_grad_() for x in cuda_operands(2, 4, 2, 33, 200, 64)]
    dy = up(drawn(2, 4, 33, 64, seed=9, dtype=torch.bfloat16))

    def step(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, causal=True) * 1

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for one, other in zip(*(torch.autograd.grad(f(*leaves), leaves, dy) for f in (compiled, step)), strict=True):
        same(one.cpu(), other.cpu())
    torch._dynamo.reset()
