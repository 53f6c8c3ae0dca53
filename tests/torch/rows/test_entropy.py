"""Cross entropy: the bits of a picked log_softmax and of its gradient, for any rows, dtype and cut of a batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isogemm.contract import rows as define
from isogemm.contract.reference import canonical
from isogemm.errors import DeviceError, DTypeError, LayoutError, LimitError, OptionError, ShapeError

torch = pytest.importorskip("torch")
reductions = pytest.importorskip("isogemm.torch.reductions")
from isogemm.torch.rows import entropy  # noqa: E402

F32 = torch.float32
DTYPES = (F32, torch.bfloat16, torch.float16)


def drawn(*shape: int, seed: int, dtype: Any = F32, scale: float = 4.0) -> Any:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def classes(*shape: int, n: int, seed: int) -> Any:
    """Targets, the first class and the last among them, and rows without one."""
    target = torch.randint(n, shape, generator=torch.Generator().manual_seed(seed))
    flat = target.view(-1)
    flat[0], flat[-1], flat[1::5] = 0, n - 1, -100
    return target


def parts(x: Any, target: Any, out_dtype: Any = None) -> Any:
    log_p = reductions.log_softmax(x, out_dtype=F32)
    found = -log_p.gather(-1, target.clamp(0)[..., None])[..., 0]
    return torch.where(target >= 0, found, 0.0).to(out_dtype or x.dtype)


def gradient(function: Any, x: Any, target: Any, dy: Any) -> Any:
    leaf = x.detach().clone().requires_grad_()
    (found,) = torch.autograd.grad(function(leaf, target), leaf, dy)
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(7, 3), (2, 5, 130), (1, 1025), (40, 257)], ids=str)
def test_the_bits_are_those_of_the_parts(shape, dtype):
    x, target = drawn(*shape, seed=1, dtype=dtype), classes(*shape[:-1], n=shape[-1], seed=2)
    for out_dtype in (None, F32):
        got, want = (f(x, target, out_dtype=out_dtype) for f in (reductions.cross_entropy, parts))
        assert got.dtype is want.dtype
        assert torch.equal(got, want)
    dy = drawn(*shape[:-1], seed=3, dtype=dtype)
    assert torch.equal(gradient(reductions.cross_entropy, x, target, dy), gradient(parts, x, target, dy))


def test_it_is_torchs_in_float64():
    x, target, dy = drawn(30, 100, seed=1), classes(30, n=100, seed=2), drawn(30, seed=3)

    def exact(x: Any, target: Any) -> Any:
        return torch.nn.functional.cross_entropy(x, target, reduction="none")

    want = gradient(exact, x.double(), target, dy.double())
    torch.testing.assert_close(
        reductions.cross_entropy(x, target).double(), exact(x.double(), target), rtol=0, atol=4e-6
    )
    torch.testing.assert_close(gradient(reductions.cross_entropy, x, target, dy).double(), want, rtol=0, atol=3e-6)


@pytest.mark.parametrize("n", [4, 130, 1026])
def test_every_step_is_that_of_the_contract(n):
    x, dy = drawn(7, n, seed=n), drawn(7, seed=9)
    x[1], x[2, 1], x[3, n - 1] = -3.5, float("nan"), float("inf")
    x[4], x[4, :2], x[5] = -float("inf"), torch.tensor([-0.0, 0.0]), x[5] * 1e-40
    x[0] = -x[0].abs()
    x[0, n // 2] = -0.0
    x = torch.cat([x, drawn(6, n, seed=n + 1, scale=9.0)])
    dy = torch.cat([dy, drawn(6, seed=10)])
    target = torch.tensor([n // 2, 0, n - 1, 2, 1, 3, -7, 0, 1, 2, 3, n - 1, n // 2])
    loss, sums = entropy._forward(x, target, -7, F32)
    dx = entropy._backward(dy, x, target, sums, -7)
    for i, row in enumerate(x.numpy()):
        t = int(target[i])
        want = (
            *define.cross_entropy(row, t, -7),
            define.cross_entropy_back(row, dy[i : i + 1].numpy(), t, sums[i].numpy(), -7),
        )
        for got, exact in zip((loss[i : i + 1], sums[i], dx[i]), want, strict=True):
            assert (canonical(got.numpy()).view(np.uint32) == canonical(exact).view(np.uint32)).all()


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 9), st.integers(1, 300), st.sampled_from(DTYPES), st.booleans(), st.integers(0, 2**20))
def test_a_row_is_the_same_in_any_batch_and_layout(rows, n, dtype, across, seed):
    whole, target = drawn(rows, n, seed=seed, dtype=dtype), classes(rows, n=n, seed=seed)
    x = whole.mT.contiguous().mT if across else whole
    dy = drawn(rows, seed=seed + 1, dtype=dtype)
    y, dx = reductions.cross_entropy(x, target), gradient(reductions.cross_entropy, x, target, dy)
    for i in range(rows):
        one = slice(i, i + 1)
        assert torch.equal(reductions.cross_entropy(whole[one], target[one]), y[one])
        assert torch.equal(gradient(reductions.cross_entropy, whole[one], target[one], dy[one]), dx[one])


def test_a_single_row_and_other_integers():
    x = drawn(50, seed=1)
    for dtype in (torch.int32, torch.uint8):
        target = torch.tensor(49, dtype=dtype)
        assert torch.equal(reductions.cross_entropy(x, target), parts(x[None], torch.tensor([49]))[0])
    assert reductions.cross_entropy(x[None], torch.tensor([3]), ignore_index=3).tolist() == [0.0]


def test_classes_of_few_bits_are_what_they_say():
    """-100 is no uint8, and 156 is none of them, though both are one byte."""
    x = drawn(3, 200, seed=1)
    target = torch.tensor([7, 156, 199], dtype=torch.uint8)
    assert torch.equal(reductions.cross_entropy(x, target), parts(x, target.long()))
    got = reductions.cross_entropy(x, target, ignore_index=7)
    assert got[0] == 0
    assert torch.equal(got[1:], parts(x, target.long())[1:])
    with pytest.raises(OptionError, match="got: -100"):
        reductions.cross_entropy(x, torch.tensor([-100, 0, 0], dtype=torch.int8), ignore_index=156)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_what_is_ignored_has_no_gradient_whatever_it_is_called(backend):
    x, target, dy = drawn(4, 20, seed=1), torch.tensor([3, 5, 3, 19]), drawn(4, seed=2)

    def loss(x: Any, target: Any) -> Any:
        return reductions.cross_entropy(x, target, ignore_index=3)

    found = gradient(loss if backend is None else torch.compile(loss, backend=backend), x, target, dy)
    assert not found[0::2].any()
    assert torch.equal(found[1::2], gradient(parts, x[1::2], target[1::2], dy[1::2]))


def test_every_nan_is_the_canonical_one_and_ignored_rows_have_none():
    x = drawn(4, 20, seed=1)
    x[0, 3], x[1, 5], x[2] = float("nan"), float("inf"), -float("inf")
    x[3] = float("nan")
    target = torch.tensor([1, 5, 0, -100])
    for dtype, nan in ((F32, 0x7FFFFFFF), (torch.bfloat16, 0x7FFF), (torch.float16, 0x7FFF)):
        loss = reductions.cross_entropy(x, target, out_dtype=dtype)
        words = loss.view(torch.int32 if dtype is F32 else torch.int16)
        assert words.tolist() == [nan, nan, nan, 0]


def test_no_gradient_of_x_is_written_twice_and_none_of_the_target():
    x = drawn(5, 40, seed=1).requires_grad_()
    loss = reductions.cross_entropy(x, torch.tensor([1, 2, 3, -100, 39]))
    loss.sum().backward()
    first = x.grad.clone()
    assert not first[3].any()
    reductions.cross_entropy(x, torch.tensor([1, 2, 3, -100, 39])).sum().backward()
    assert torch.equal(x.grad, 2 * first)


def test_what_does_not_fit_is_refused():
    x, target = drawn(4, 20, seed=1), torch.tensor([1, 5, 0, -100])
    for bad, nearest in ((20, 19), (-1, 0), (-99, 0)):
        wrong = torch.tensor([1, bad, 0, 3])
        with pytest.raises(
            OptionError, match=f"target: limit: 0 to 19, or ignore_index, -100; got: {bad}.*: {nearest}"
        ):
            reductions.cross_entropy(x, wrong)
    with pytest.raises(DTypeError, match="a tensor of integers"):
        reductions.cross_entropy(x, target.float())
    with pytest.raises(DTypeError, match="x: limit: a torch tensor"):
        reductions.cross_entropy(x.numpy(), target)
    with pytest.raises(ShapeError, match="shape of target"):
        reductions.cross_entropy(x, target[:3])
    with pytest.raises(ShapeError, match="dimensions of x"):
        reductions.cross_entropy(x[0, 0], target[0])
    with pytest.raises(DeviceError):
        reductions.cross_entropy(x, target.to("meta"))
    with pytest.raises(DTypeError):
        reductions.cross_entropy(x.double(), target)
    with pytest.raises(DTypeError, match="ignore_index: limit: a whole number"):
        reductions.cross_entropy(x, target, ignore_index=0.5)
    for bad, nearest in ((2**63, 2**63 - 1), (-(2**70), -(2**63))):
        with pytest.raises(OptionError, match=f"ignore_index: limit: .*; got: {bad}; nearest legal choice: {nearest}"):
            reductions.cross_entropy(x, target, ignore_index=bad)
    for shape in ((2, 2), (4, 1)):
        with pytest.raises(ShapeError, match="shape of target"):
            reductions.cross_entropy(x, target.view(shape))
    with pytest.raises(LayoutError, match="target: limit: a dense tensor"):
        reductions.cross_entropy(x, target.to_sparse())
    with pytest.raises(OptionError, match="target: limit: ignore_index, -100; got: 0; nearest legal choice: -100"):
        reductions.cross_entropy(torch.zeros(1, 0), torch.tensor([0]))
    with pytest.raises(OptionError, match="under a transform"):
        torch.func.vmap(lambda t: reductions.cross_entropy(x[0], t))(torch.arange(3))
    loss = reductions.cross_entropy(x.clone().requires_grad_(), target)
    with pytest.raises(LayoutError, match="dy"):
        torch.autograd.grad(loss, loss.grad_fn.next_functions[0][0].variable, torch.eye(4), is_grads_batched=True)


def test_rows_that_float32_cannot_number_are_refused_on_a_cpu():
    with pytest.raises(LimitError, match=f"at most {2**24}"):
        reductions.cross_entropy(torch.zeros(1).expand(1, 2**24 + 1), torch.tensor([0]))
    entropy.check_classes(torch.tensor([2**24 - 1]), 2**24, -100)


def test_a_second_derivative_is_refused():
    x = drawn(4, 20, seed=1).requires_grad_()
    (dx,) = torch.autograd.grad(reductions.cross_entropy(x, torch.arange(4)).sum(), x, create_graph=True)
    with pytest.raises(OptionError, match="one derivative"):
        dx.sum().backward()


@pytest.mark.parametrize(
    "call", [reductions.softmax, reductions.silu, lambda x: reductions.cross_entropy(x, torch.arange(4))]
)
def test_a_second_derivative_of_compiled_code_is_refused(call):
    """By the operator itself, where a backend has torch's own backward pass."""
    torch._dynamo.reset()
    x = drawn(4, 20, seed=1).requires_grad_()
    y = torch.compile(call, backend="eager")(x)
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(OptionError, match="one derivative"):
        dx.sum().backward()


def test_the_operators_keep_the_rules():
    x, target = drawn(4, 20, seed=1), torch.tensor([1, 5, 0, -100])
    for out_dtype in (None, torch.bfloat16):
        torch.library.opcheck(torch.ops.isogemm.cross_entropy_forward.default, (x, target, -100, out_dtype))
        torch.library.opcheck(
            torch.ops.isogemm.cross_entropy.default, (x.clone().requires_grad_(), target, -100, out_dtype)
        )
    _, sums = entropy._forward(x, target, -100, None)
    back = torch.ops.isogemm.cross_entropy_backward.default
    torch.library.opcheck(back, (torch.ones(4), x, target, sums, -100))
    torch.library.opcheck(back, (torch.ones(4), x.mT.contiguous().mT, target, sums, -100))
    torch.library.opcheck(back, (torch.ones(4), x.bfloat16(), target, sums, -100))


def test_micro_batches_have_the_loss_and_the_gradient_of_one_batch():
    """A loss of a step is one row of its tokens' losses, by one number for all."""
    x, target = drawn(24, 60, seed=1, dtype=torch.bfloat16), classes(24, n=60, seed=2)
    tokens = int((target >= 0).sum())

    def step(cuts: int) -> tuple[Any, Any]:
        found = [], []
        for part, named in zip(x.split(cuts), target.split(cuts), strict=True):
            leaf = part.clone().requires_grad_()
            losses = reductions.cross_entropy(leaf, named, out_dtype=F32)
            (reductions.sum(losses) / tokens).backward()
            found[0].append(losses.detach())
            found[1].append(leaf.grad)
        return reductions.sum(torch.cat(found[0])) / tokens, torch.cat(found[1])

    want = step(24)
    for cuts in (1, 5, 12):
        assert all(torch.equal(a, b) for a, b in zip(step(cuts), want, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gradient_that_torch_negates_lazily(dtype):
    x = torch.randn(4, 9, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    loss, dy = reductions.cross_entropy(x, torch.tensor([1, 8, -100, 0])), torch.tensor([1, 2, 3, -0.5]).to(dtype)
    (want,) = torch.autograd.grad(loss, x, -dy, retain_graph=True)
    (got,) = torch.autograd.grad(loss, x, torch._neg_view(dy))
    assert torch.equal(got, want)


@pytest.mark.parametrize("out_dtype", [None, torch.float32], ids=str)
def test_a_fake_kernel_has_results_like_those_of_the_kernel(out_dtype):
    x, target = torch.zeros(2, 3, 9, dtype=torch.bfloat16), torch.zeros(2, 3, dtype=torch.int64)
    call = torch.ops.isogemm.cross_entropy.default
    found = [call(x.to(place), target.to(place), -100, out_dtype) for place in ("cpu", "meta")]
    for real, fake in zip(*found, strict=True):
        assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())
