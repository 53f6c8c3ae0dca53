"""Gradients, bit for bit against the products that they are said to be; and what cutting a batch does to them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from tests.products import BF16, DTYPES, F16, F32, assert_same, product, values

from isogemm.contract import compare
from isogemm.errors import ContractError, DeviceError, DTypeError, LayoutError, OptionError, ShapeError
from isogemm.operands.tensors import as_tensor as tensor

torch = pytest.importorskip("torch")

from tests.torch.gemm.test_ops import array  # noqa: E402

import isogemm.torch as iso  # noqa: E402
from isogemm.torch.gemm import products  # noqa: E402

TORCH = {F32: torch.float32, BF16: torch.bfloat16, F16: torch.float16}
# The batch sizes that the whole library is held to, as far as a test can walk them.
BATCHES = (1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128)


def leaf(x):
    return tensor(x.copy()).requires_grad_()


def ones(m, dtype):
    return np.ones((1, m), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("contract", "order"),
    [(None, "leaf4096"), ("fma/leaf16", "leaf8"), ("fma/tree4", "chain"), ("tensor_core:sm90/chain", "leaf16")],
)
def test_linear_s_gradients_are_named_products(dtype, contract, order):
    if dtype == F32 and contract and "tensor" in contract:
        contract = "tf32:sm90/chain"
    x, w, bias = values((2, 9, 20), dtype, seed=1), values((7, 20), dtype, seed=2), values((7,), dtype, seed=3)
    dy = values((2, 9, 7), dtype, seed=4)
    tx, tw, tb = leaf(x), leaf(w), leaf(bias)
    y = iso.linear(tx, tw, tb, contract=contract, grad_order=order)
    y.backward(tensor(dy))
    arithmetic = (contract or "fma/chain").split("/")[0]
    rows, flat = dy.reshape(18, 7), x.reshape(18, 20)
    assert_same(array(y), product(flat, w.T, contract or "fma/chain", bias=bias).reshape(2, 9, 7))
    assert_same(array(tx.grad), product(rows, w, f"{arithmetic}/chain").reshape(x.shape))
    assert_same(array(tw.grad), product(rows.T, flat, f"{arithmetic}/{order}"))
    assert_same(array(tb.grad), product(ones(18, dtype), rows, f"{arithmetic}/{order}")[0])


@pytest.mark.parametrize("shape", [(4, 0), (0, 3), (2, 0, 3), (2, 4, 0), (0, 0), (0,)])
@pytest.mark.parametrize("n", [0, 5])
def test_linear_s_gradients_where_something_is_empty(shape, n):
    def grads(function):
        given = [torch.ones(shape), torch.ones(n, shape[-1]), torch.ones(n)]
        given = [x.requires_grad_() for x in given]
        y = function(*given)
        return [y.detach(), *torch.autograd.grad(y.sum(), given)]

    for got, want in zip(grads(iso.linear), grads(torch.nn.functional.linear), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_products_of_matrices(dtype):
    a, b, c = values((9, 20), dtype, seed=1), values((20, 7), dtype, seed=2), values((7,), dtype, seed=3)
    dy = values((9, 7), dtype, seed=4)
    ta, tb, tc = leaf(a), leaf(b), leaf(c)
    iso.addmm(tc, ta, tb, alpha=0.3, beta=0.5, grad_order="leaf4").backward(tensor(dy))
    assert_same(array(ta.grad), product(dy, b.T, alpha=0.3))
    assert_same(array(tb.grad), product(a.T, dy, "fma/leaf4", alpha=0.3))
    summed = product(ones(9, dtype), dy, "fma/leaf4", out_dtype=F32)[0]
    assert_same(array(tc.grad), (summed * np.float32(0.5)).astype(dtype))
    pair = iso.grouped([ta, ta.detach()[:3]], [tb, tb.detach()[:, :2].requires_grad_()], grad_order="leaf4")
    ta.grad = tb.grad = None
    pair[0].backward(tensor(dy))
    assert_same(array(ta.grad), product(dy, b.T))
    assert_same(array(tb.grad), product(a.T, dy, "fma/leaf4"))


def test_stacks():
    a, b, dy = values((3, 9, 20), seed=1), values((3, 20, 7), seed=2), values((3, 9, 7), seed=3)
    ta, tb = leaf(a), leaf(b)
    iso.bmm(ta, tb, grad_order="leaf2").backward(tensor(dy))
    for i in range(3):
        assert_same(array(ta.grad[i]), product(dy[i], b[i].T))
        assert_same(array(tb.grad[i]), product(a[i].T, dy[i], "fma/leaf2"))


@pytest.mark.parametrize(
    "shape", [(7,), (1, 7), (9, 1), (1, 1), (3, 9, 7), (1, 9, 7), (3, 1, 7), (3, 9, 1), (3, 1, 1), ()]
)
@pytest.mark.parametrize("beta", [1.0, 0.5, 0.0])
def test_c_is_summed_where_it_was_broadcast(shape, beta):
    a, b, c = leaf(values((3, 9, 20), seed=1)), leaf(values((3, 20, 7), seed=2)), leaf(values(shape, seed=3))
    iso.baddbmm(c, a, b, beta=beta).pow(3).sum().backward()
    got, c.grad = c.grad, None
    torch.baddbmm(c, a, b, beta=beta).pow(3).sum().backward()
    torch.testing.assert_close(got, c.grad, rtol=1e-4, atol=1e-2)
    assert got.abs().sum() > 0 or beta == 0


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_numerically_torch_s(dtype):
    """All five with gradients of all operands, against torch's products in float64."""
    draw = [leaf(values(s, dtype, seed=i)) for i, s in enumerate([(6, 20), (20, 7), (6, 7), (2, 6, 20), (2, 20, 7)])]
    ours = (
        lambda a, b, c, x, w: iso.mm(a, b),
        lambda a, b, c, x, w: iso.addmm(c, a, b, alpha=2, beta=-0.5),
        lambda a, b, c, x, w: iso.bmm(x, w),
        lambda a, b, c, x, w: iso.baddbmm(c, x, w, beta=3),
        lambda a, b, c, x, w: iso.linear(x, b.mT, c[0]),
    )
    theirs = (
        lambda a, b, c, x, w: torch.mm(a, b),
        lambda a, b, c, x, w: torch.addmm(c, a, b, alpha=2, beta=-0.5),
        lambda a, b, c, x, w: torch.bmm(x, w),
        lambda a, b, c, x, w: torch.baddbmm(c, x, w, beta=3),
        lambda a, b, c, x, w: torch.nn.functional.linear(x, b.mT, c[0]),
    )
    exact = [t.detach().double().requires_grad_() for t in draw]
    limit = 1e-6 if dtype == F32 else 0.02
    for f, g in zip(ours, theirs, strict=True):
        got = torch.autograd.grad(f(*draw).square().sum(), draw, allow_unused=True)
        want = torch.autograd.grad(g(*exact).square().sum(), exact, allow_unused=True)
        for u, v in zip(got, want, strict=True):
            assert (u is None) is (v is None)
            if u is not None:
                assert (u.double() - v).abs().max() < limit * v.abs().max()


def test_twice_differentiated():
    x, w, bias = leaf(values((4, 5, 20), seed=1)), leaf(values((7, 20), seed=2)), leaf(values((7,), seed=3))

    def second(linear):
        first = torch.autograd.grad(linear(x, w, bias).pow(3).sum(), (x, w, bias), create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), (x, w, bias))

    for got, want in zip(second(iso.linear), second(torch.nn.functional.linear), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-2 * want.abs().max().item())


def test_only_what_is_asked_for_is_computed(monkeypatch):
    calls = []
    inner = products.call_product
    monkeypatch.setattr(products, "call_product", lambda *args: calls.append(args) or inner(*args))
    x, w = leaf(values((5, 20))), leaf(values((7, 20)))
    for needs, count in (((True, False), 1), ((False, True), 1), ((True, True), 2)):
        calls.clear()
        tx, tw = (t.detach().requires_grad_(need) for t, need in zip((x, w), needs, strict=True))
        iso.linear(tx, tw).sum().backward()
        assert len(calls) == count
        assert [t.grad is not None for t in (tx, tw)] == list(needs)


@pytest.mark.parametrize(
    ("dtypes", "contract", "out"),
    [
        ((F32, BF16), None, None),
        ((BF16, F32), None, None),
        ((BF16, BF16), None, F32),
        ((BF16, BF16), "tensor_core:sm90/chain", F32),
        ((F32, F32), None, BF16),
        ((BF16, BF16), None, F16),
        ((F32, F32), "tf32:sm90/chain", BF16),
    ],
)
def test_mixed_dtypes_give_each_operand_its_own(dtypes, contract, out):
    x, w = leaf(values((5, 16), dtypes[0], seed=1)), leaf(values((7, 16), dtypes[1], seed=2))
    y = iso.linear(x, w, contract=contract, out_dtype=None if out is None else TORCH[out])
    y.sum().backward()
    assert (x.grad.dtype, w.grad.dtype) == (x.dtype, w.dtype)
    torch.testing.assert_close(x.grad.float(), w.detach().float().sum(0).expand(5, 16), rtol=2e-2, atol=5e-2)
    torch.testing.assert_close(w.grad.float(), x.detach().float().sum(0).expand(7, 16), rtol=2e-2, atol=5e-2)


# What cutting a batch does.


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("contract", [None, "fma/leaf32"])
def test_a_row_of_dx_is_the_same_in_every_batch(dtype, contract):
    w, x, dy = values((48, 96), dtype, seed=1), values((128, 96), dtype, seed=2), values((128, 48), dtype, seed=3)
    seen = {}
    for m in BATCHES:
        tx = leaf(x[:m])
        iso.linear(tx, leaf(w), contract=contract).backward(tensor(dy[:m]))
        for row in (0, m - 1):
            got = array(tx.grad)[row]
            assert compare.differing(seen.setdefault(row, got), got) == 0, (m, row)


def test_a_plain_product_would_not_pass():
    """The same walk over batches with torch's own gradients, so that the test above can fail."""
    w, x, dy = (tensor(values(s, seed=i)) for i, s in enumerate([(48, 960), (128, 960), (128, 48)]))
    found = set()
    for m in BATCHES:
        tw = w.clone().requires_grad_()
        parts = [torch.autograd.grad(torch.nn.functional.linear(p, tw), tw, q)[0]
                 for p, q in zip(x.split(m), dy.split(m), strict=True)]  # fmt: skip
        found.add(sum(parts).numpy().tobytes())
    assert len(found) > 1


def accumulated(x, dy, w, bias, cuts, order, buffers=None):
    """dW and dbias over micro-batches that end at `cuts`, through the float32 buffers."""
    tw, tb = leaf(w), leaf(bias)
    dw, db = buffers or (torch.zeros(w.shape), torch.zeros(bias.shape))
    for start, stop in itertools.pairwise([0, *cuts]):
        y = iso.linear(tensor(x[start:stop]), tw, tb, grad_order=order, main_grad=dw, bias_main_grad=db)
        y.backward(tensor(dy[start:stop]))
    assert tw.grad is None
    assert tb.grad is None
    return array(dw), array(db)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("pieces", [1, 2, 4, 8])
def test_micro_batches_of_whole_leaves_have_the_bits_of_the_batch(dtype, pieces):
    m, order = 128, "leaf16"
    x, dy = values((m, 40), dtype, seed=1), values((m, 24), dtype, seed=2)
    w, bias = values((24, 40), dtype, seed=3), values((24,), dtype, seed=4)
    dw, db = accumulated(x, dy, w, bias, range(m // pieces, m + 1, m // pieces), order)
    assert_same(dw, product(dy.T, x, f"fma/{order}", out_dtype=F32))
    assert_same(db, product(ones(m, dtype), dy, f"fma/{order}", out_dtype=F32)[0])
    # Uneven micro-batches, of whole leaves still.
    for got, want in zip(accumulated(x, dy, w, bias, (16, 80, 128), order), (dw, db), strict=True):
        assert_same(got, want)


@pytest.mark.parametrize("cuts", [(128,), (1, 128), (5, 6, 77, 128), range(1, 129)])
def test_chain_takes_micro_batches_of_any_size(cuts):
    x, dy, w, bias = values((128, 40), seed=1), values((128, 24), seed=2), values((24, 40)), values((24,))
    dw, db = accumulated(x, dy, w, bias, cuts, "chain")
    assert_same(dw, product(dy.T, x))
    assert_same(db, product(ones(128, F32), dy)[0])


def test_cuts_inside_a_leaf_do_change_bits():
    """What the page on this says has to be so: else the tests above show nothing."""
    x, dy, w, bias = values((128, 40), seed=1), values((128, 24), seed=2), values((24, 40)), values((24,))
    whole, _ = accumulated(x, dy, w, bias, (128,), "leaf16")
    parts = torch.zeros(w.shape)
    for rows in (slice(24), slice(24, None)):  # the second one begins in the middle of a leaf
        products.walk(tensor(dy[rows]).mT, tensor(x[rows]), parts, "fma/leaf16")
    assert compare.differing(whole, array(parts)) > 0
    halves = [leaf(w.astype(BF16)) for _ in range(2)]
    for tw, size in zip(halves, (128, 16), strict=True):
        for p, q in zip(tensor(x.astype(BF16)).split(size), tensor(dy.astype(BF16)).split(size), strict=True):
            iso.linear(p, tw, grad_order="leaf16").backward(q)
    assert not torch.equal(halves[0].grad, halves[1].grad)  # .grad in bfloat16 is rounded by torch at each step


@pytest.mark.parametrize(
    ("order", "contract", "cuts", "nearest"),
    [
        ("leaf16", None, (16, 40, 64), r'got: 40 rows.*grad_order="leaf8".*48, before.*grad_order="chain"'),
        ("leaf16", None, (5, 64), r"got: 5 rows.*leaf5\""),
        (
            "leaf4096",
            None,
            (32, 64),
            r'got: 32 rows.*choice: grad_order="leaf32" of the layer, or of convert; or.*4096, before',
        ),
        ("leaf32", "tensor_core:sm90", (24, 64), r"nearest legal choice: a multiple of 32 rows, such as 32, before"),
        ("chain", "tensor_core:sm90", (16, 24, 64), r"middle of a block.*multiples of 16 rows.*such as 32, before"),
    ],
)
def test_a_micro_batch_that_begins_inside_of_a_leaf_is_refused(order, contract, cuts, nearest):
    dtype = F32 if contract is None else BF16
    x, dy, w = (values(shape, dtype) for shape in ((64, 16), (64, 8), (8, 16)))
    total, tw, *starts = torch.zeros(8, 16), leaf(w), 0, *cuts
    options = {"grad_order": order, "contract": contract, "main_grad": total}
    for start, stop in itertools.pairwise(starts[:-1]):
        iso.linear(tensor(x[start:stop]), tw, **options).backward(tensor(dy[start:stop]))
    kept = total.clone()
    last = iso.linear(tensor(x[starts[-2] :]), tw, **options)
    with pytest.raises(OptionError, match=nearest):
        last.backward(tensor(dy[starts[-2] :]))
    assert torch.equal(total, kept)
    total.zero_()  # a loop of one's own begins its next step
    iso.linear(tensor(x), tw, **options).backward(tensor(dy))
    assert_same(array(total), product(dy.T, x, f"{contract or 'fma'}/{order}", out_dtype=F32))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_rows_of_zeros_change_nothing(dtype):
    x, dy = values((50, 40), dtype, seed=1), values((50, 24), dtype, seed=2)
    w, bias = values((24, 40), dtype, seed=3), values((24,), dtype, seed=4)
    padded = [np.concatenate([t, np.zeros((30, t.shape[1]), dtype)]) for t in (x, dy)]
    for got, want in zip(
        accumulated(*padded, w, bias, (80,), "leaf16"), accumulated(x, dy, w, bias, (50,), "leaf16"), strict=True
    ):
        assert_same(got, want)


@pytest.mark.parametrize("backend", ["aot_eager"])
@pytest.mark.filterwarnings("ignore")  # torch's own, about itself
def test_main_grad_compiled(backend):
    x, dy = tensor(values((64, 40), BF16, seed=1)), tensor(values((64, 24), BF16, seed=2))
    w, bias, found = tensor(values((24, 40), BF16, seed=3)), tensor(values((24,), BF16, seed=4)), []
    torch._dynamo.reset()
    for call in (iso.linear, torch.compile(iso.linear, fullgraph=True, backend=backend)):
        tw, tb, dw, db = w.clone().requires_grad_(), bias.clone().requires_grad_(), torch.zeros(24, 40), torch.zeros(24)
        for p, q in zip(x.split(16), dy.split(16), strict=True):
            call(p, tw, tb, grad_order="leaf16", main_grad=dw, bias_main_grad=db).backward(q)
        assert tw.grad is None
        found.append((array(dw), array(db)))
    for got, want in zip(*found, strict=True):
        assert_same(got, want)


def test_torch_sees_that_a_buffer_was_written():
    x, w, buffer = leaf(values((5, 20))), leaf(values((7, 20))), torch.zeros(7, 20)
    version = buffer._version
    iso.linear(x, w, main_grad=buffer).sum().backward()
    assert buffer._version > version


@pytest.mark.filterwarnings("ignore:Using backward.* with create_graph")
def test_buffers_that_do_not_fit_are_refused():
    x, w, bias = leaf(values((5, 20))), leaf(values((7, 20))), leaf(values((7,)))
    good = torch.zeros(7, 20)
    for error, options in (
        (ShapeError, {"main_grad": torch.zeros(20, 7)}),
        (ShapeError, {"bias_main_grad": torch.zeros(8)}),
        (DTypeError, {"main_grad": good.bfloat16()}),
        (DeviceError, {"main_grad": good.to("meta")}),
        (OptionError, {"main_grad": good.clone().requires_grad_()}),
        (LayoutError, {"main_grad": torch.zeros(20, 7).T}),
        (OptionError, {"main_grad": good, "grad_order": "tree8"}),
        (ContractError, {"main_grad": good, "grad_order": "leaf0"}),
    ):
        with pytest.raises(error, match="nearest legal choice"):
            iso.linear(x, w, bias, **options)
    with pytest.raises(ShapeError):
        iso.linear(x, w, bias_main_grad=torch.zeros(7))
    with pytest.raises(OptionError, match="create_graph"):
        iso.linear(x, w, main_grad=good).sum().backward(create_graph=True)
    with pytest.raises(OptionError, match="vmap"):
        torch.vmap(lambda row: iso.linear(row, w, main_grad=good))(x)
    w.register_hook(print)
    with pytest.raises(OptionError, match="hooks"):
        iso.linear(x, w, main_grad=good)


def test_items_of_a_group_have_gradients_of_their_own_needs():
    a, b = [torch.randn(3, 5), torch.randn(4, 5)], [torch.randn(5, 2), torch.randn(5, 2)]
    a[1].requires_grad_()
    b[1].requires_grad_()
    sum(y.sum() for y in iso.grouped(a, b)).backward()
    assert a[1].grad is not None
    assert b[1].grad is not None


def test_a_c_that_was_not_read_has_a_gradient_of_zero():
    c, a = torch.ones(2, 2, requires_grad=True), torch.full((2, 2), 1e30)
    iso.addmm(c, a, a, beta=0.0).backward(torch.full((2, 2), float("inf")))
    assert torch.equal(c.grad, torch.zeros(2, 2))


def test_a_broadcast_c_has_a_gradient_under_a_contract_of_16_bits():
    a, b = torch.randn(6, 32).bfloat16(), torch.randn(32, 16).bfloat16()
    c = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    iso.addmm(c, a, b, contract="tensor_core:sm90/chain").backward(torch.ones(6, 16, dtype=torch.bfloat16))
    assert c.grad.item() == 96
