"""Coverage: every operator of a real run is listed, and what is not known to be safe is said not to be routed."""

from __future__ import annotations

import json

import pytest
from tests.torch.routing.routed import within

from isogemm.errors import ContractError

torch = pytest.importorskip("torch")

import isogemm.torch  # noqa: E402
from isogemm.torch.routing.coverage import ELEMENTWISE, NOT_ROUTED, ROUTED, coverage  # noqa: E402

F = torch.nn.functional


def statuses(report):
    return {row.op: row.status for row in report}


def ops(report, status):
    return {row.op.removeprefix("aten.").split(".")[0] for row in report if row.status == status}


class Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = torch.nn.LayerNorm(16), torch.nn.Linear(16, 48), torch.nn.Linear(48, 16)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def test_a_model_forward_and_backward():
    model, x = Mlp(), torch.randn(3, 5, 16)
    report = coverage(model, x, backward=True)
    found = statuses(report)
    assert found["aten.addmm.default"] == found["aten.mm.default"] == ROUTED
    assert found["aten.gelu.default"] == found["aten.gelu_backward.default"] == found["aten.add.Tensor"] == ELEMENTWISE
    assert found["aten.view.default"] == found["aten.t.default"] == ELEMENTWISE
    assert found["layer_norm"] == ROUTED
    assert found["aten.sum.dim_IntList"] == ROUTED
    assert not report.not_routed, str(report)
    less = coverage(model, x, backward=True, rows=False)
    several = {"gelu", "gelu_backward"}  # elementwise, with several forms
    assert ops(less, NOT_ROUTED) == {"native_layer_norm", "native_layer_norm_backward", "sum"} | several
    forward, backward = ({(r.op, r.count) for r in report if r.phase == p} for p in ("forward", "backward"))
    assert ("aten.addmm.default", 2) in forward
    assert ("aten.mm.default", 4) in backward
    assert all(p.grad is None for p in model.parameters())
    assert torch._C._len_torch_dispatch_stack() == torch._C._len_torch_function_stack() == 0


def test_it_is_the_table_and_the_data():
    report = coverage(Mlp(), torch.randn(3, 16), rows=False)
    text = str(report)
    assert text.splitlines()[0].split() == ["op", "dtype", "phase", "count", "status", "why"]
    assert "not routed" in text.splitlines()[1]  # what is not routed comes first
    assert f"{report.count(ROUTED)} routed" in text.splitlines()[-1]
    data = json.loads(json.dumps(report.as_data()))
    assert {row["op"]: row["count"] for row in data if row["status"] == ROUTED} == {"aten.addmm.default": 2}
    assert len(data) == len(report.rows) == len(text.splitlines()) - 2
    assert [row.op for row in report.not_routed] == ["aten.gelu.default", "aten.native_layer_norm.default"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("inference", [False, True], ids=["grad", "inference"])
def test_no_matrix_product_slips_through(dtype, inference):
    """Every way that torch has of writing one, large enough for its threaded and vendor kernels."""
    x, w, bias = (torch.randn(*s).to(dtype) for s in ((4, 96, 256), (160, 256), (160,)))
    out, acc = torch.empty(384, 160, dtype=dtype), torch.zeros(384, 160, dtype=dtype)
    flat, stack = x.view(384, 256), w.T.expand(4, 256, 160)
    cell = torch.nn.RNNCell(256, 32).to(dtype)
    calls = {
        "linear": lambda: F.linear(x, w, bias),
        "linear, strided": lambda: F.linear(x.transpose(0, 1), w, bias),
        "linear, one row": lambda: F.linear(x[:1, :1], w),
        "linear, a vector": lambda: F.linear(x[0, 0], w, bias),
        "matmul": lambda: torch.matmul(x, w.T),
        "matmul, out": lambda: torch.matmul(flat, w.T, out=out),
        "matmul, a vector": lambda: x @ w[0],
        "vectors": lambda: flat[0] @ w[0],
        "mm, out": lambda: torch.mm(flat, w.T, out=out),
        "addmm_": lambda: acc.addmm_(flat, w.T),
        "addmm, out": lambda: torch.addmm(bias, flat, w.T, out=out),
        "addmv_": lambda: acc[:, 0].clone().addmv_(flat, w[0]),
        "bmm": lambda: torch.bmm(x, stack),
        "baddbmm": lambda: torch.baddbmm(bias, x, stack),
        "addbmm": lambda: torch.addbmm(bias, x, stack),
        "einsum": lambda: torch.einsum("bti,oi->tbo", x, w),
        "tensordot": lambda: torch.tensordot(x, w, dims=([2], [1])),
        "inner": lambda: torch.inner(flat, w),
        "chain": lambda: torch.linalg.multi_dot([flat, w.T, w]),
        "power": lambda: torch.matrix_power(flat[:256], 3),
        "cell": lambda: cell(flat.clone()),
    }
    for name, call in calls.items():
        with torch.inference_mode(inference):
            report = coverage(call)
        assert report.count(ROUTED) >= 1, name
        assert not report.not_routed, f"{name}\n{report}"


def test_what_torch_keeps_is_said():
    q, image, numbers = torch.randn(1, 2, 8, 16), torch.randn(1, 3, 8, 8), torch.arange(12).view(3, 4)
    double, attention = torch.randn(1, 1, 4, 4, dtype=torch.float64), F.scaled_dot_product_attention
    expected = {
        "softmax": (lambda: double.softmax(-1), "_softmax"),
        "sum": (lambda: double.sum(-1), "sum"),
        "mean": (lambda: q.mean(-1, dtype=torch.float64), "mean"),
        "cumsum": (lambda: q.cumsum(-1), "cumsum"),
        "variance": (lambda: q.var(-1), "var"),
        "sigmoid": (lambda: q.cfloat().sigmoid(), "sigmoid"),
        "attention": (lambda: attention(double, double, double), "_scaled_dot_product_flash_attention_for_cpu"),
        "convolution": (lambda: torch.nn.Conv2d(3, 4, 3)(image), "convolution"),
        "double": (lambda: double[0, 0] @ double[0, 0], "mm"),
        "complex": (lambda: double[0, 0].cfloat() @ double[0, 0].cfloat(), "mm"),
        "integers": (lambda: numbers @ numbers.T, "mm"),
        "dropout": (lambda: F.dropout(q), "bernoulli_"),
        "svd": (lambda: torch.linalg.svd(double), "_linalg_svd"),
    }
    for name, (call, op) in expected.items():
        assert op in ops(coverage(call), NOT_ROUTED), name
    expected = {
        "softmax": (lambda: q.softmax(-1), "_softmax"),
        "sum": (lambda: q.sum(-1), "sum"),
        "mean": (lambda: q.mean(-1), "mean"),
        "silu": (lambda: F.silu(q), "silu"),
        "rsqrt": (lambda: q.half().rsqrt(), "rsqrt"),
        "alpha": (lambda: torch.add(q.half(), q.half(), alpha=0.3), "add"),
        "power": (lambda: q.abs() ** 1.5, "pow"),
    }
    for name, (call, op) in expected.items():
        assert op in ops(coverage(call, rows=False), NOT_ROUTED), name
        assert op not in ops(coverage(call), NOT_ROUTED), name
    report = coverage(lambda: (q.rsqrt(), q + q, q**2, 1 - q, q.exp(), q.cos()), rows=False)
    assert not report.not_routed, str(report)
    call = lambda: attention(q, q, q)  # noqa: E731
    assert ops(coverage(call, attention=False), NOT_ROUTED) == {"_scaled_dot_product_flash_attention_for_cpu"}
    report = coverage(call)
    assert [(row.op, row.status) for row in report] == [("scaled_dot_product_attention", ROUTED)]


def test_exact_reductions_are_safe():
    x, numbers = torch.randn(3, 4), torch.arange(12).view(3, 4)
    report = coverage(
        lambda: (x.amax(-1), x.argmax(-1), numbers.sum(-1), numbers.cumsum(-1), x.sort(-1), x[numbers[:, :2] % 3])
    )
    assert not report.not_routed, str(report)


def test_inference_mode_sees_through_composed_operators():
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    with torch.inference_mode():
        report = coverage(layer, torch.randn(2, 3, 16))
    assert ops(report, ROUTED) == {"linear", "addmm", "layer_norm", "scaled_dot_product_attention"}
    assert not report.not_routed, str(report)


def test_operators_of_others_are_not_vouched_for():
    @torch.library.custom_op("isogemm_tests::doubled", mutates_args=())
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    report = coverage(lambda: doubled(torch.ones(3)))
    assert statuses(report)["isogemm_tests.doubled.default"] == NOT_ROUTED


def test_a_model_as_it_runs_without_a_scope():
    """A function of elements in a converted model's own code is torch's; a converted activation is not."""
    model, x = Mlp(), torch.randn(3, 5, 16)
    bare = coverage(model, x, scope=False)
    assert ops(bare, NOT_ROUTED) == {"addmm", "gelu", "native_layer_norm"}
    isogemm.torch.convert(model)
    report = coverage(model, x, backward=True)
    assert ops(report, NOT_ROUTED) == {"gelu", "gelu_backward"}, str(report)
    assert {row.why for row in report.not_routed} == {"elementwise, but of several forms on a CPU"}
    assert not coverage(model, x, backward=True, scope=True).not_routed
    assert not coverage(lambda x: model(x), x).not_routed  # a function runs in a scope
    model = torch.nn.Sequential(torch.nn.Linear(16, 9), torch.nn.GELU(), torch.nn.Linear(9, 5), torch.nn.Sigmoid())
    assert ops(coverage(model, x, scope=False), NOT_ROUTED) == {"addmm", "gelu", "sigmoid"}
    report = isogemm.torch.convert(model)
    assert not report.left
    report = coverage(model, x, backward=True)
    assert not report.not_routed, str(report)
    assert {"isogemm.linear.default", "aten.gelu.default", "aten.gelu_backward.default"} <= set(statuses(report))
    tail = torch.nn.functional.silu
    model.register_forward_hook(lambda module, args, y: tail(y))
    assert ops(coverage(model, x), NOT_ROUTED) == {"silu"}
    assert torch._C._len_torch_dispatch_stack() == 0
    assert not any(m._forward_pre_hooks for m in model)
    assert len(model._forward_pre_hooks) == 1  # that of `convert`


def test_after_enable_a_converted_model_is_described_as_routed():
    model = Mlp()
    isogemm.torch.convert(model)
    with within(False):
        assert not coverage(model, torch.randn(3, 16)).not_routed


def test_errors_pass_and_leave_nothing_behind():
    with pytest.raises(ContractError):
        coverage(Mlp(), torch.randn(3, 16), contract="fma/chains")
    with pytest.raises(ZeroDivisionError):
        coverage(lambda: 1 // 0)
    assert torch._C._len_torch_dispatch_stack() == torch._C._len_torch_function_stack() == 0


def test_why_torch_computed_it():
    """The scope was closed, or rows were left out: not the operands' fault."""
    w, double = torch.randn(4, 4), torch.randn(4, 4, dtype=torch.float64)

    def call(x):
        return torch.softmax(x @ x, -1)

    def reasons(x, **options):
        return {row.op.split(".")[1]: row.why for row in coverage(call, x, **options).not_routed}

    closed = "outside of isogemm.torch.invariant()"
    assert reasons(w, scope=False) == {"mm": f"product {closed}", "_softmax": f"reduction {closed}"}
    assert reasons(w, rows=False) == {"_softmax": "reduction, with rows=False"}
    foreign = "of a dtype or layout isogemm has not"
    for scope in (False, True):
        assert reasons(double, scope=scope) == {"mm": f"product {foreign}", "_softmax": f"reduction {foreign}"}
    assert reasons(w) == {}
