"""torch's grouped products inside a scope: every form, forward and backward, and what is refused."""

from __future__ import annotations

import pytest
from tests.torch.routing.routed import LEAVES, clean, gemm, randn, same  # noqa: F401

import isogemm
from isogemm.errors import DeviceError, IsogemmError, OptionError, ShapeError

torch = pytest.importorskip("torch")

import isogemm.torch  # noqa: E402
from isogemm.torch.gemm.ragged import grouped_mm  # noqa: E402
from isogemm.torch.routing import scope as routing  # noqa: E402
from isogemm.torch.routing.scope import invariant  # noqa: E402

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
K, N, ENDS = 304, 40, (3, 3, 10)  # three groups, one of them empty; torch wants rows of whole 16 bytes


def offsets(*ends):
    return torch.tensor(ends, dtype=torch.int32)


def spans(*ends):
    return list(zip((0, *ends), ends, strict=False))


def forms(dtype, rows=10):
    """What torch is asked for, by its dimensions, and the products that it has to equal."""
    x, y = randn(rows, K, dtype=dtype), randn(K, 16, dtype=dtype)
    stack, weights = randn(3, 8, K, dtype=dtype), randn(3, N, K, dtype=dtype).mT
    long, wide = randn(8, 24, dtype=dtype), randn(24, N, dtype=dtype)
    both = list(enumerate(spans(*ENDS)))
    two_two = [gemm(long[:, i:j], wide[i:j]) for _, (i, j) in enumerate(spans(7, 7, 24))]
    return {
        "2D 3D": ((x, weights, offsets(*ENDS)), torch.cat([gemm(x[i:j], weights[g]) for g, (i, j) in both])),
        "3D 2D": (
            (stack, y, offsets(3, 3, 16)),
            torch.cat([gemm(stack[g], y[:, i:j]) for g, (i, j) in enumerate(spans(3, 3, 16))], 1),
        ),
        "2D 2D": ((long, wide, offsets(7, 7, 24)), torch.stack(two_two)),
        "3D 3D": ((stack, weights), torch.stack([gemm(stack[g], weights[g]) for g in range(3)])),
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", ["2D 3D", "3D 2D", "2D 2D", "3D 3D"])
@pytest.mark.parametrize("how", ["scope", "inference", "enable"])
def test_every_form_has_the_bits_of_each_product_alone(form, dtype, how):
    operands, expected = forms(dtype)[form]
    call = torch.nn.functional.grouped_mm if hasattr(torch.nn.functional, "grouped_mm") else torch._grouped_mm
    if how == "enable":
        routing.enable(LEAVES)
        try:
            got = call(*operands[:2], offs=operands[2] if len(operands) > 2 else None)
        finally:
            routing.disable()
    else:
        with torch.inference_mode(how == "inference"), invariant(LEAVES, strict=True) as scope:
            got = torch._grouped_mm(*operands)
        assert scope.routed == {"_grouped_mm": 1}
        assert not scope.passed
    assert same(got, expected)


def test_a_row_has_the_bits_of_that_row_alone():
    x, w = randn(17, K), randn(4, N, K)
    with invariant():
        batch = torch._grouped_mm(x, w.mT, offsets(5, 5, 6, 17))
        for row, expert in ((0, 0), (4, 0), (5, 2), (6, 3), (16, 3)):
            alone = torch._grouped_mm(x[row : row + 1], w.mT, offsets(*[int(g >= expert) for g in range(4)]))
            assert same(batch[row : row + 1], alone)
            assert same(alone, isogemm.linear(x[row : row + 1], w[expert]))


def test_what_lies_behind_the_last_offset_is_zero():
    """torch leaves it as it was found, which is another value every time."""
    x, w, stack = randn(9, K), randn(3, K, N), randn(3, 8, K)
    with invariant():
        rows = torch._grouped_mm(x, w, offsets(2, 2, 5))
        columns = torch._grouped_mm(stack, randn(K, 16), offsets(0, 4, 6))
        nothing = torch._grouped_mm(x, w, offsets(0, 0, 0))
    assert not rows[5:].any()
    assert same(rows[:5], torch.cat((isogemm.matmul(x[:2], w[0]), isogemm.matmul(x[2:5], w[2]))))
    assert not columns[:, 6:].any()
    assert columns[:, :6].all()
    assert not nothing.any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_are_the_written_products(dtype):
    for form, (operands, _) in forms(dtype).items():
        a, b = (x.detach().clone(memory_format=torch.preserve_format).requires_grad_() for x in operands[:2])
        with invariant(LEAVES, strict=True) as scope:
            y = torch._grouped_mm(a, b, *operands[2:])
            dy = randn(*y.shape, dtype=dtype, seed=5)
            y.backward(dy)
        assert scope.routed == {"_grouped_mm": 3}
        items = spans(*operands[2].tolist()) if len(operands) > 2 else [(0, 0)] * 3
        for g, (i, j) in enumerate(items):
            ag = a[g] if a.dim() == 3 else a[i:j] if b.dim() == 3 else a[:, i:j]
            bg = b[g] if b.dim() == 3 else b[:, i:j] if a.dim() == 3 else b[i:j]
            dg = dy[i:j] if form == "2D 3D" else dy[:, i:j] if form == "3D 2D" else dy[g]
            da = a.grad[g] if a.dim() == 3 else a.grad[i:j] if b.dim() == 3 else a.grad[:, i:j]
            db = b.grad[g] if b.dim() == 3 else b.grad[:, i:j] if a.dim() == 3 else b.grad[i:j]
            assert same(da, gemm(dg, bg.mT)), form
            assert same(db, gemm(ag.mT, dg)), form


def test_a_backward_outside_of_the_scope_is_an_error():
    x, w = randn(9, K, grad=True), randn(3, K, N)
    with invariant():
        y = torch._grouped_mm(x, w, offsets(2, 2, 9))
    with pytest.raises(OptionError, match=r"backward\(\) outside of it"):
        y.sum().backward()


def test_what_is_no_grouped_product_is_refused():
    x, w, y, offs = randn(9, K), randn(3, K, N), randn(K, 16), offsets(2, 2, 9)
    cases: list[tuple[type[IsogemmError], str, tuple]] = [
        (OptionError, "bias", (x, w, offs, randn(N))),
        (OptionError, "offs", (x, w)),
        (OptionError, "offs", (w, w.mT, offs)),
        (OptionError, "int32", (x, w, offs.long())),
        (OptionError, "int32", (x, w, offs.float())),
        (ShapeError, "groups", (x, w, offsets(2, 9))),
        (ShapeError, "groups", (w.mT, y, offsets(2, 9))),
        (ShapeError, "groups", (w, randn(4, N, K))),
        (ShapeError, "dimensions", (x[None, None], w, offs)),
        (ShapeError, "dimensions", (x, w, offs[None])),
        (ShapeError, "inner", (x, w[:, :16], offs)),
        (ShapeError, "inner", (x, y[:16], offs)),
        (ShapeError, "offsets", (x, w, offsets(5, 2, 9))),
        (ShapeError, "offsets", (x, w, offsets(5, 7, 10))),
        (ShapeError, "offsets", (x, w, offsets(-1, 7, 9))),
    ]
    for kind, what, operands in cases:
        with invariant(), pytest.raises(kind, match=what):
            torch._grouped_mm(*operands)
    with invariant(), pytest.raises(OptionError, match="strict"), invariant(strict=True):
        torch._grouped_mm(x.double(), w.double(), offs)


def test_offsets_of_a_device_are_not_waited_for_in_a_capture(monkeypatch):
    class Offsets:
        dtype, device, is_cuda, shape = torch.int32, torch.device("cpu"), True, (3,)

        def dim(self):
            return 1

        def tolist(self):
            raise AssertionError("waited for")

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(DeviceError, match="capture"):
        grouped_mm(None, randn(9, K), randn(3, K, N), Offsets())


def test_scaled_products_are_refused_and_listed():
    scale, listed = torch.ones(16), []

    def call():
        return torch.ops.aten._scaled_grouped_mm(randn(16, 32), randn(2, 32, 16), scale, scale, offsets(3, 16))

    def caught():
        with pytest.raises(NotImplementedError):  # torch has no kernel for a CPU
            call()
        listed.append(True)

    for strict in (False, True):
        with invariant(strict=strict), pytest.raises(OptionError, match=r"_scaled_grouped_mm.*dequantized"):
            call()
    isogemm.torch.coverage(caught)
    assert listed


def test_transformers_own_operator_is_routed():
    """What transformers calls where torch has no grouped product, or a compiler cannot take it."""
    pytest.importorskip("transformers.integrations.moe")
    x, w = randn(9, 300, grad=True), randn(3, 300, 20, grad=True)
    with invariant(LEAVES, strict=True) as scope:
        y = torch.ops.transformers.grouped_mm_fallback(x, w, offsets(2, 2, 9))
        dy = randn(*y.shape, seed=7)
        y.backward(dy)
    assert scope.routed["grouped_mm_fallback"] == 1
    assert same(y, torch.cat((gemm(x[:2], w[0]), gemm(x[2:], w[2]))))
    assert same(x.grad, torch.cat((gemm(dy[:2], w[0].T), gemm(dy[2:], w[2].T))))
    assert same(w.grad[2], gemm(x[2:].T, dy[2:]))


def test_coverage_lists_it_as_routed():
    x, w, offs = randn(9, K, grad=True), randn(3, K, N, grad=True), offsets(2, 2, 9)
    report = isogemm.torch.coverage(lambda x, w: torch._grouped_mm(x, w, offs), x, w, backward=True)
    rows = [row for row in report if row.op == "aten._grouped_mm.default"]
    assert {(row.phase, row.count) for row in rows} == {("forward", 1), ("backward", 2)}
    assert {(row.status, row.why) for row in rows} == {("routed", "product")}
    assert not report.not_routed
