"""Routing at its edges: checkpoints, views, integers, threads, nested tensors, and what a scope leaves behind."""

from __future__ import annotations

import sys
import threading

import pytest
from tests.torch.routing.routed import SCOPED, clean, randn, within  # noqa: F401

import isogemm
from isogemm.errors import OptionError

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import checkpoint  # noqa: E402

from isogemm.torch.routing import scope as routing  # noqa: E402
from isogemm.torch.routing.scope import invariant  # noqa: E402

F = torch.nn.functional


@pytest.mark.parametrize("how", ["method", "function", "grad"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_recomputes_attention_and_norms(reentrant, how):
    w = randn(96, 32).requires_grad_()

    def block(x):
        q, k, v = (t.view(*t.shape[:2], 2, 16).transpose(1, 2) for t in F.linear(x, w).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return F.rms_norm(y, (32,)) + F.layer_norm(y, (32,))

    def gradient(x, kept):
        x, w.grad = x.clone().requires_grad_(), None
        with invariant(strict=True) as scope:
            y = checkpoint(block, x, use_reentrant=reentrant) if kept else block(x)
            total = y[:, :9].square().sum()
            if how == "method":
                total.backward()
            elif how == "function" or reentrant:
                torch.autograd.backward([total])
            else:
                x.grad, w.grad = torch.autograd.grad(total, (x, w))
            total = None
        assert scope.routed["scaled_dot_product_attention"] == scope.routed["rms_norm"] == (2 if kept else 1)
        assert not scope.passed
        return x.grad, w.grad

    x = randn(3, 40, 32)
    for mine, other in zip(gradient(x, True), gradient(x, False), strict=True):
        assert torch.equal(mine, other)
    assert torch.equal(gradient(x, True)[0][:1, :9], gradient(x[:1, :9], True)[0])


@SCOPED
@pytest.mark.parametrize("name", ["pow_", "atan2_", "xlogy_", "fmod_", "remainder_", "hypot_", "igamma_"])
def test_writing_in_place_stays_inside_the_view(name, scoped):
    """torch refuses a result that is larger than what it is written to; so must we, whose memory is a neighbour's."""
    memory = torch.full((16,), 4.0)
    view = memory[:3].view(1, 3)
    with within(scoped), pytest.raises(RuntimeError, match="broadcast shape"):
        getattr(view, name)(torch.full((4, 3), 0.5))
    assert view.shape == (1, 3)
    assert torch.equal(memory, torch.full((16,), 4.0))
    with within(scoped):
        assert torch.equal(memory[:3].clone().view(1, 3).pow_(0.5), torch.full((1, 3), 2.0))


@SCOPED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_integers_added_up_as_floats_are_rows(dtype, scoped):
    x = torch.randint(0, 2**40, (3, 50_001), generator=torch.Generator().manual_seed(1))
    rows = x.float()
    out = torch.empty(3, dtype=dtype)
    with within(scoped, strict=True):
        for kind in ("sum", "mean"):
            found = getattr(x, kind)(-1, dtype=dtype)
            assert torch.equal(found, getattr(isogemm.torch.reductions, kind)(rows, out_dtype=dtype))
            assert torch.equal(found[1:2], getattr(x[1:2], kind)(-1, dtype=dtype))
        assert torch.equal(torch.sum(x, -1, out=out), isogemm.torch.reductions.sum(rows, out_dtype=dtype))
        assert torch.equal(x[:, :70].logsumexp(-1), rows[:, :70].logsumexp(-1))
        assert x.sum(-1).tolist() == [sum(row) for row in x.tolist()]  # integers into integers are torch's


def test_integers_and_complex_numbers_added_up_are_not_called_exact():
    x, z = torch.arange(12).view(3, 4), torch.ones(3, 4, dtype=torch.complex64)
    report = isogemm.torch.coverage(lambda: (x.sum(-1, dtype=torch.float64), z.sum(-1)))
    assert {row.dtype for row in report.not_routed} == {"complex64", "int64"}, str(report)
    for call in (lambda: x.sum(-1, dtype=torch.float64), lambda: z.sum(-1)):
        with invariant(strict=True), pytest.raises(OptionError, match="strict"):
            call()
    assert not isogemm.torch.coverage(lambda: x.sum(-1)).not_routed


@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.cdist(x, x),  # of more than 25 rows: a product, sums of squares and a root
        lambda x: torch.cdist(x, x, p=1.0),
        lambda x: torch.linalg.matrix_exp(x @ x.T / 100),
    ],
    ids=["cdist by a product", "cdist of another norm", "matrix_exp"],
)
def test_products_within_operators_of_other_names_are_no_secret(call):
    x = torch.randn(30, 7, generator=torch.Generator().manual_seed(2))
    why = {row.op: row.why for row in isogemm.torch.coverage(call, x).not_routed}
    assert set(why.values()) == {"product inside the operator"}, why
    with invariant() as scope:
        call(x)
    assert sum(scope.passed.values()) == 1, scope.passed
    with invariant(strict=True), pytest.raises(OptionError, match="strict"):
        call(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["add", "sub", "rsub"])
def test_sums_with_alpha_and_a_number(name, dtype):
    x = randn(1003).to(dtype)
    call = getattr(torch, name)
    with invariant():
        whole = call(x, 0.7, alpha=0.3)
        assert torch.equal(whole[::3], call(x[::3], 0.7, alpha=0.3))
        assert torch.equal(whole, torch.cat([call(x[i : i + 5], 0.7, alpha=0.3) for i in range(0, 1003, 5)]))
    less = isogemm.torch.coverage(lambda: call(x, 0.7, alpha=0.3), rows=False)
    assert [row.op for row in less.not_routed] == [f"aten.{name}.Scalar" if name == "rsub" else f"aten.{name}.Tensor"]


@SCOPED
def test_gradients_of_numbers(scoped):
    a = torch.tensor(0.7, requires_grad=True)
    with within(scoped):
        for call in (torch.softmax, torch.log_softmax):
            assert torch.autograd.grad(call(a, 0), a) == (torch.tensor(0.0),)


def test_disable_gives_the_compilers_stance_back():
    from torch._dynamo import eval_frame

    torch.compiler.set_stance("eager_on_recompile")
    try:
        routing.enable()
        routing.enable(rows=False)
        assert eval_frame._stance.stance == "force_eager"
        routing.disable()
        assert eval_frame._stance.stance == "eager_on_recompile"
        routing.enable()
        torch.compiler.set_stance("fail_on_recompile")
        routing.disable()
        assert eval_frame._stance.stance == "fail_on_recompile"  # the program's own, chosen since
    finally:
        torch.compiler.set_stance("default")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@SCOPED
def test_strided_nested_tensors_are_torchs(scoped):
    layer, parts = torch.nn.Linear(37, 11), [randn(5, 37), randn(9, 37)]
    calls = (layer, lambda x: F.softmax(x, -1), F.gelu)
    with torch.no_grad():
        x = torch.nested.nested_tensor(parts)
        plain = [call(x) for call in calls]
        with within(scoped):
            found = [call(x) for call in calls]
    for a, b in zip(plain, found, strict=True):
        assert all(torch.allclose(p, q, atol=1e-5) for p, q in zip(a.unbind(), b.unbind(), strict=True))
    for call in calls:
        with torch.no_grad(), invariant(strict=True), pytest.raises(OptionError, match="strict"):
            call(x)
        with torch.no_grad():
            assert isogemm.torch.coverage(call, x).not_routed


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_encoder_that_packs_padding_runs_after_enable():
    layer = torch.nn.TransformerEncoderLayer(16, 2, 24, 0.0, batch_first=True)
    encoder, x = torch.nn.TransformerEncoder(layer, 2).eval(), randn(3, 8, 16)
    padding = torch.zeros(3, 8, dtype=torch.bool)
    padding[1, 5:] = True
    with torch.no_grad():
        plain = encoder(x, src_key_padding_mask=padding)
        with within(False):
            found = encoder(x, src_key_padding_mask=padding)
    assert torch.allclose(plain, found, atol=1e-5)


def outside(call, *operands):
    with invariant():
        y = call(*operands)
    y.backward(torch.ones_like(y))


@pytest.mark.parametrize(
    "call", [F.silu, lambda x: x * randn(9, 37), lambda x: F.embedding(torch.tensor([1, 2, 2]), x), lambda x: x.T]
)
def test_a_backward_outside_is_an_error_whatever_was_recorded(call):
    """A gradient of an embedding, or of an operand that broadcasts, is a sum as well."""
    x = randn(9, 37).requires_grad_()
    with pytest.raises(OptionError, match="outside"):
        outside(call, x)
    assert x.grad is None


def test_what_was_recorded_before_a_scope_is_not_marked():
    x = randn(9, 37).requires_grad_()
    y = x * 2
    with invariant():
        assert y.contiguous() is y
        same = F.dropout(y, training=False)
    same.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2))


def test_one_scope_for_many_threads():
    """Threads leave one scope in any order while others enter it."""
    a, b = randn(8, 301), randn(301, 7)
    scope, wrong, interval = invariant(), [], sys.getswitchinterval()
    expected, rounds = isogemm.matmul(a, b), 1500

    def work():
        try:
            for i in range(rounds):
                with scope:
                    assert i % 100 or torch.equal(a @ b, expected)
            assert torch._C._len_torch_dispatch_stack() == torch._C._len_torch_function_stack() == 0
        except BaseException as error:  # a thread's failure has to reach the test
            wrong.append(error)

    sys.setswitchinterval(1e-7)
    try:
        threads = [threading.Thread(target=work) for _ in range(6)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong
    assert not scope._entered


@SCOPED
def test_a_negative_eps_is_torchs(scoped):
    x = randn(3, 8)
    plain = F.layer_norm(x, (8,), eps=-1e-3)
    with within(scoped):
        assert torch.allclose(F.layer_norm(x, (8,), eps=-1e-3), plain)


@SCOPED
def test_a_gradient_transform_of_a_norm(scoped):
    """torch.func's operands are not plain: the norm is computed by its steps."""
    x, w = randn(5, 40), randn(40)

    def gradient(w, x):
        return torch.func.grad(lambda w: (F.layer_norm(x, (40,), w) ** 2).sum() + F.rms_norm(x, (40,), w).sum())(w)

    expected = gradient(w, x)
    with within(scoped):
        found = gradient(w, x)
        rows = torch.func.vmap(gradient, (None, 0))(w, x)
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert torch.allclose(rows.sum(0), expected, rtol=1e-4, atol=1e-4)


def test_a_sum_over_columns_is_one_chain():
    """300 rows: more than any leaf."""
    x = randn(300, 7)
    expected = isogemm.matmul(torch.ones(1, 300), x, contract="fma/chain")[0]
    assert not torch.equal(expected, isogemm.matmul(torch.ones(1, 300), x, contract="fma/leaf32")[0])
    with invariant():
        assert torch.equal(x.sum(0), expected)


@SCOPED
def test_out_takes_the_shape_of_a_product(scoped):
    a, b = randn(9, 300), randn(300, 20)
    out = torch.empty(0)
    with within(scoped):
        assert torch.mm(a, b, out=out) is out
    assert torch.equal(out, isogemm.matmul(a, b))


@SCOPED
@pytest.mark.parametrize("name", ["cosh", "sinh", "exp2"])
def test_functions_of_integers(name, scoped):
    x = torch.arange(1003) % 7 - 3
    call = getattr(torch, name)
    with within(scoped):
        whole = call(x)
        assert torch.equal(whole, torch.cat([call(x[i : i + 5]) for i in range(0, 1003, 5)]))
        assert (x % 3).tolist() == [v % 3 for v in x.tolist()]
        assert (x % 3).dtype is torch.int64


@SCOPED
@pytest.mark.parametrize("name", ["sigmoid", "sinh", "pow"])
def test_operators_on_lists(name, scoped):
    x = randn(1003).abs()
    rest = (0.37,) if name == "pow" else ()
    call = getattr(torch, f"_foreach_{name}")
    with within(scoped):
        whole, double = call([x, 2 * x], *rest)
        assert torch.equal(whole, torch.cat(call(list(x.split(5)), *rest)))
        assert torch.equal(double, getattr(torch, name)(2 * x, *rest))
        inside = [x.clone()]
        assert getattr(torch, f"_foreach_{name}_")(inside, *rest) is None or torch.is_tensor(inside[0])
        assert torch.equal(inside[0], whole)
    assert not isogemm.torch.coverage(lambda: call([x], *rest)).not_routed


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_attention_in_torchscript_is_refused_or_routed():
    def attention(x):
        return F.scaled_dot_product_attention(x, x, x)

    x = randn(1, 2, 41, 16)
    script = torch.jit.trace(attention, x)
    with torch.no_grad():
        with pytest.raises(OptionError, match="TorchScript"), invariant():
            script(x)
        with invariant(attention=False) as scope:
            script(x)
        assert scope.passed.total() == 1
        assert [row.op for row in isogemm.torch.coverage(script, x).not_routed] == [
            "aten._scaled_dot_product_flash_attention_for_cpu.default"
        ]
        with within(False):
            assert torch.equal(script(x), isogemm.torch.scaled_dot_product_attention(x, x, x))
        with invariant(), torch.inference_mode():
            assert torch.equal(script(x), isogemm.torch.scaled_dot_product_attention(x, x, x))


def test_attention_that_a_scope_leaves_to_torch_is_no_error():
    layer, x = torch.nn.MultiheadAttention(16, 2, batch_first=True), randn(2, 9, 16)
    with invariant() as scope:
        layer(x, x, x, need_weights=False)
        F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], dropout_p=0.5)
    assert scope.passed.total() >= 1
