"""grouped_linear by kernels that read lengths on the device: what a kernel is told of torch's tensors, on the host."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.backends.cuda.gemm.test_grouped import OnHost  # noqa: E402
from tests.planner.fakes import FakeMachine  # noqa: E402
from tests.torch.tensors import same  # noqa: E402

import isogemm.torch as iso  # noqa: E402
from isogemm.backends.cuda.gemm.grouped import run  # noqa: E402
from isogemm.contract.spec import Contract  # noqa: E402
from isogemm.planner.admission import Admissions  # noqa: E402
from isogemm.planner.records import Records  # noqa: E402
from isogemm.torch.gemm import grouped_linear, ragged  # noqa: E402

CONTRACT = "tensor_core:sm90/chain"
COUNTS = [3, 0, 17, 16]


class Counting(OnHost):
    """Kernels on the host, and how often one was launched."""

    launches = 0

    def bind(self, case: Any, config: str, device: int, clusters: int = 2**30) -> Any:
        launch = super().bind(case, config, device, clusters)

        def counted(*given: Any) -> None:
            self.launches += 1
            launch(*given, *[0] * (6 - len(given)))

        return counted


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Counting:
    """Tensors of this process are taken for a GPU's."""
    found, admissions = Counting(), Admissions(FakeMachine(), Records(tmp_path))
    monkeypatch.setattr(run, "FAMILY", found)
    monkeypatch.setattr(run, "_calls", run.Seen(16))
    monkeypatch.setattr(run, "admissions", lambda device: admissions)
    monkeypatch.setattr(run, "_learn", lambda: None)
    monkeypatch.setattr(run, "_memory", lambda shape, **options: torch.empty(shape, **options).fill_(torch.nan))
    monkeypatch.setattr(run, "_stream", lambda device: 0)
    monkeypatch.setattr(grouped_linear, "on_device", lambda counts, x: counts)
    for module in (grouped_linear, ragged):
        monkeypatch.setattr(module, "column", lambda name, kind: run)
    return found


def operands(dtype=torch.bfloat16, n=24, k=40, behind=2):
    generator = torch.Generator().manual_seed(3)
    shapes = ((sum(COUNTS) + behind, k), (4, n, k), (4, n), (sum(COUNTS) + behind, n))
    x, w, bias, dy = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    x[sum(COUNTS) :], dy[sum(COUNTS) :] = torch.nan, torch.nan
    return x.requires_grad_(), w.requires_grad_(), bias.requires_grad_(), dy


def step(x, w, bias, dy, counts, **options):
    y = iso.grouped_linear(x, w, counts, bias, contract=CONTRACT, **options)
    return y, *torch.autograd.grad(y, [t for t in (x, w, bias) if t is not None], dy.to(y.dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("order", ["chain", "leaf16", "leaf4096"])
def test_kernels_have_the_bits_of_the_other_way(monkeypatch, family, order, dtype):
    given, counts = operands(dtype), torch.tensor(COUNTS)
    got = step(*given, counts, grad_order=order)
    # Two launches in a trial of each kernel; gradients of weights and biases have one, whose leaves are whole stages.
    assert family.launches == (2 * 3 + 4 if order != "leaf16" else 2 * 2 + 2)
    again = step(*given, counts.int(), grad_order=order)
    monkeypatch.undo()
    want = step(*given, counts, grad_order=order)
    assert all(map(same, got, want))
    assert all(map(same, again, want))


def test_weights_of_the_other_layout_float32_results_and_no_bias(monkeypatch, family):
    x, w, _, dy = operands()
    w = w.detach().mT.contiguous().mT.requires_grad_()
    got = step(x, w, None, dy, torch.tensor(COUNTS), out_dtype="float32")
    assert family.launches
    monkeypatch.undo()
    assert all(map(same, got, step(x, w, None, dy, torch.tensor(COUNTS), out_dtype="float32")))


@pytest.mark.parametrize(("transposed", "order"), [(False, "leaf16"), (False, "leaf4096"), (True, "leaf4096")])
def test_buffers_are_continued(monkeypatch, family, transposed, order):
    x, w, _, dy = operands(behind=0)
    counts, totals = torch.tensor(COUNTS), []
    for _ in range(2):
        total = torch.ones(4, 40, 24).mT if transposed else torch.ones(4, 24, 40)
        for _ in range(2):
            y = grouped_linear.call_grouped_linear(x, w, None, counts, CONTRACT, order, None, total, None)
            before = total._version
            y.backward(dy)
            assert total._version > before, "torch does not see that a buffer was written"
        totals.append(total)
        launches = family.launches
        monkeypatch.undo()
    assert launches
    assert launches == family.launches
    assert same(*totals)


def test_a_call_seen_before_is_a_look_up(family):
    x, w, bias, _ = operands()
    with torch.no_grad():
        want = iso.grouped_linear(x, w, torch.tensor(COUNTS), bias, contract=CONTRACT)
        assert same(run.recalled(x, w, bias, torch.tensor(COUNTS), CONTRACT, None), want)
        assert run.recalled(x[:5], w, bias, torch.tensor(COUNTS), CONTRACT, None) is None
        assert run.recalled(x, w, bias, COUNTS, CONTRACT, None) is None


@pytest.mark.parametrize("what", ["x", "w", "bias", "dtypes", "counts"])
def test_what_kernels_do_not_serve_goes_the_other_way(monkeypatch, family, what):
    x, w, bias, _ = (t.detach() for t in operands())
    counts = torch.tensor(COUNTS)
    if what == "x":
        x = x.T.contiguous().T
    elif what == "w":
        w = w.repeat_interleave(2, 2)[..., ::2]
    elif what == "bias":
        bias = bias[:, 1:]
    elif what == "dtypes":
        x = x.float()
    else:
        counts = counts[1:]
    assert run.multiplied(x, w, bias, counts, CONTRACT, None, lambda: Contract.parse(CONTRACT)) is None
    assert not family.launches


def test_offsets_of_torch_s_grouped_mm(monkeypatch, family):
    x, w, _, dy = (t.detach() for t in operands())
    ends = torch.tensor(COUNTS).cumsum(0).int()
    monkeypatch.setattr(ragged, "_on_gpu", lambda *tensors: True)
    got = ragged.grouped_mm(CONTRACT, x, w.mT, ends), ragged.grouped_mm(CONTRACT, dy.mT, x, ends)
    assert family.launches
    monkeypatch.undo()
    want = ragged.grouped_mm(CONTRACT, x, w.mT, ends), ragged.grouped_mm(CONTRACT, dy.mT, x, ends)
    assert all(map(same, got, want))
