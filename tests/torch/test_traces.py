"""Traces and compiled code: what computes behind torch's back is an operator there, run as it is or refused, never a
constant."""

from __future__ import annotations

import numpy as np
import pytest
from tests.products import assert_same, product, values
from tests.quant.draws import encoded
from tests.torch.tensors import randn

import isogemm
from isogemm.errors import OptionError, ShapeError

torch = pytest.importorskip("torch")

import isogemm.torch as iso  # noqa: E402
from isogemm.torch import reductions  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore::torch.jit.TracerWarning")  # torch's own


W, LONG = randn(5, 32, seed=1), randn(33, 32, seed=2)
Q8 = encoded(randn(8, 32, seed=3).numpy(), "Q8_0")
MODEL = torch.nn.Sequential(
    torch.nn.Linear(32, 32), torch.nn.LayerNorm(32), torch.nn.SiLU(), torch.nn.GELU(), torch.nn.RMSNorm(32)
)
iso.convert(MODEL)

REFUSED = {
    "linear": lambda x: isogemm.linear(x, W),
    "matmul": lambda x: isogemm.matmul(x, W.T),
    "bfloat16": lambda x: isogemm.matmul(x.bfloat16(), W.T.bfloat16()),
    "stack": lambda x: isogemm.matmul(x[None], W.T[None]),
    "gemm": lambda x: isogemm.gemm(W, x, trans_b="T"),
    "gemm_batched": lambda x: isogemm.gemm_batched([x], [W.T])[0],
    "gemm_grouped": lambda x: isogemm.gemm_grouped([x], [W.T])[0],
    "gemm_strided_batched": lambda x: isogemm.gemm_strided_batched(x[None], W.T[None]),
    "pack": lambda x: isogemm.linear(W, isogemm.pack(x)),
    "quantize": lambda x: isogemm.linear(W, isogemm.quantize(x, "Q8_0")),
    "quantized": lambda x: isogemm.linear(x, Q8),
}
OPERATORS = {
    "linear": lambda x: iso.linear(x, W),
    "grouped": lambda x: iso.grouped([x], [W.T])[0],
    "quantized": lambda x: iso.linear(x, Q8),
    "attention": lambda x: iso.attention(x[None, None], x[None, None], x[None, None]),
    "rms_norm": lambda x: reductions.rms_norm(x, W[0]),
    "add_rms_norm": lambda x: torch.cat(reductions.add_rms_norm(x, x + 1)),
    "softmax": lambda x: reductions.softmax(x),
    "sum": lambda x: reductions.sum(x),
    "silu_mul": lambda x: reductions.silu_mul(x, x + 1),
    "embedding": lambda x: reductions.embedding(torch.tensor([2, 0]), x),
    "rope_pair": lambda x: torch.cat(reductions.rope_pair(x[:3], x[:3], W[:3, :16], W[:3, 16:])),
    "model": MODEL,
}


def jit(call, x):
    return torch.jit.trace(call, x, check_trace=False)


def fx(call, x):
    return torch.fx.experimental.proxy_tensor.make_fx(call)(x)


@pytest.mark.parametrize("trace", [jit, fx])
@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_a_constant_is_refused(trace, name):
    call, x = REFUSED[name], LONG[:3]
    want = call(x)  # from now on the short paths are asked
    with torch.no_grad(), pytest.raises(OptionError, match=r"torch\.jit\.trace or make_fx.*isogemm\.torch"):
        trace(call, x)
    assert torch.equal(call(x), want)


@pytest.mark.parametrize("trace", [jit, fx])
@pytest.mark.parametrize("name", OPERATORS)
def test_what_is_an_operator_is_computed_anew(trace, name):
    call, x = OPERATORS[name], LONG[:3]
    with torch.no_grad():
        traced = trace(call, x)
        for other in (x, LONG[:3] * 2 - 1, *([LONG] if name == "model" and trace is jit else [])):
            assert torch.equal(traced(other), call(other))
        assert not torch.equal(traced(x), traced(LONG[:3] * 2 - 1))


def test_gradients_of_a_trace():
    traced, found = jit(MODEL, LONG[:3]), []
    for call in (MODEL, traced):
        y = call(LONG)
        found.append([y, *torch.autograd.grad(y.square().sum(), list(MODEL.parameters()))])
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


def test_masks_in_a_trace_of_torchscript_are_refused():
    pytest.importorskip("transformers")
    from tests.torch.model.tiny import build, tokens

    model = build().requires_grad_(False)
    iso.convert(model)
    with torch.no_grad(), pytest.raises(OptionError, match=r"torch\.jit\.trace.*torch\.export"):
        jit(lambda ids: model(ids, use_cache=False).logits, tokens(2, 5))


def test_a_scope_inside_of_a_trace_leaves_torchs_operators_there():
    def call(x):
        with iso.invariant():
            return torch.softmax(x @ W.T, -1)

    traced = jit(call, LONG)
    torch.testing.assert_close(traced(LONG * 2 - 1), torch.softmax((LONG * 2 - 1) @ W.T, -1))


FORMS = {
    "matmul": lambda x, w: isogemm.matmul(x, w.T),
    "linear": lambda x, w: isogemm.linear(x, w),
    "gemm": lambda x, w: isogemm.gemm(x, w, trans_b="T"),
    "a list": lambda x, w: isogemm.gemm_batched([x, x], [w.T, w.T])[1],
    "a packed weight": lambda x, w: isogemm.linear(x, isogemm.pack(w)),
}


@pytest.mark.filterwarnings("ignore")  # torch's own, about itself
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_functions_of_arrays_are_run_as_they_are_in_compiled_code(form, library):
    """What they read of memory and tables would be a constant of other calls, and tables would keep it."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, w: FORMS[form](x * 1, w), backend="eager")
    for seed, (m, n, k) in enumerate(((1, 1, 1), (3, 4, 5), (3, 4, 5), (5, 4, 6), (2, 7, 3), (5, 4, 6), (8, 8, 8))):
        x, w = values((m, k), seed=seed), values((n, k), seed=9 + seed)
        given = (x, w) if library == "numpy" else (torch.from_numpy(x), torch.from_numpy(w))
        want = product(x, w.T)
        for call in (compiled, FORMS[form]):
            assert_same(np.asarray(call(*given)), want)
    torch._dynamo.reset()  # else what was compiled in pieces is taken
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"isogemm\.torch are operators"):
        torch.compile(FORMS[form], backend="eager", fullgraph=True)(*given)


def test_kernels_of_operators_are_no_code_to_compile():
    """torch's dispatcher calls it in eager code too, where a compiler looks for code around it."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    def call():
        return torch.ops.isogemm.softmax_forward.default(LONG, None)

    frames = torch._C._dynamo.eval_frame
    given_up = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)  # as after an error
    frames.set_code_exec_strategy(call.__code__, given_up)
    torch.compile(call, backend="eager")()
    assert not torch._dynamo.utils.counters["frames"]


@pytest.mark.filterwarnings("ignore")
def test_an_error_is_named_where_compiled_code_has_to_be_whole():
    torch._dynamo.reset()

    def call(x, w):
        return iso.linear(x, w, main_grad=x)

    with pytest.raises(ShapeError, match="shape of main_grad"):
        torch.compile(call, backend="eager")(LONG, W)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"ShapeError.*shape of main_grad"):
        torch.compile(call, backend="eager", fullgraph=True)(LONG, W)
