"""Operations along rows on torch tensors: the definition's bits, whatever stands beside a row."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.products import BF16, DTYPES, F16, F32, laid, values

import isogemm
from isogemm.contract import rows as define
from isogemm.errors import DeviceError, DTypeError, OptionError, ShapeError
from isogemm.operands.tensors import as_tensor

torch = pytest.importorskip("torch")
reductions = pytest.importorskip("isogemm.torch.reductions")

ROOT = Path(__file__).parents[3]
TORCH = {F32: torch.float32, BF16: torch.bfloat16, F16: torch.float16}
LAID = st.sampled_from(("c", "f", "padded", "stepped", "broadcast"))  # torch has no negative strides
KINDS = ("rms_norm", "layer_norm", "softmax", "log_softmax", "sum", "mean", "silu_mul", "rope", "rope_interleaved")


def tensor(x: np.ndarray) -> Any:
    if not x.flags.writeable:  # a broadcast view
        return tensor(x[:1].copy()).expand(x.shape)
    return as_tensor(x)


def words(x: Any) -> np.ndarray:
    """The bits of a tensor."""
    return x.contiguous().view(torch.int32 if x.dtype is torch.float32 else torch.int16).numpy()


def call(kind: str, x: Any, beside: tuple[Any, ...], **options: Any) -> Any:
    if kind == "rope_interleaved":
        return reductions.rope(x, *beside, interleaved=True, **options)
    if kind in ("sum", "mean"):
        options["keepdim"] = True
    return getattr(reductions, kind)(x, *beside, **options)


def beside(kind: str, shape: tuple[int, ...], dtype: np.dtype, seed: int) -> tuple[np.ndarray, ...]:
    """The other operands: of a row each, or one row for all."""
    n = shape[-1]
    if kind == "rms_norm":
        return (values((n,), dtype, seed=seed),)
    if kind == "layer_norm":
        return values((n,), dtype, seed=seed), values((n,), F32, seed=seed + 1)
    if kind == "silu_mul":
        return (values(shape, dtype, seed=seed, special=True),)
    if kind.startswith("rope"):
        return tuple(values((*shape[:-1], n // 2), F32, seed=seed + i) for i in (0, 1))
    return ()


def defined(kind: str, x: np.ndarray, others: tuple[np.ndarray, ...], dtype: np.dtype) -> np.ndarray:
    """The definition, row by row, of operands [rows, n]."""
    names: dict[str, Callable[..., Any]] = {"sum": define.sum_row, "rope_interleaved": define.rope}
    function = names.get(kind) or getattr(define, kind)
    options = {"interleaved": True} if kind == "rope_interleaved" else {}
    found = []
    for i, row in enumerate(x.astype(np.float32)):
        rest = [(o if o.ndim == 1 else o[i]).astype(np.float32) for o in others]
        found.append(define.rounded(function(row, *rest, **options), dtype))
    return np.array(found, dtype).reshape(len(x), 1 if kind in ("sum", "mean") else x.shape[1])


@settings(deadline=None, max_examples=150)
@given(
    kind=st.sampled_from((*KINDS, "silu", "sigmoid", "exp")),
    dtype=st.sampled_from(DTYPES),
    out_dtype=st.sampled_from(DTYPES),
    m=st.integers(0, 3),
    n=st.one_of(st.integers(0, 9), st.integers(120, 136), st.integers(250, 600)),
    layout=LAID,
    other=LAID,
    special=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_bits_are_those_of_the_definition(kind, dtype, out_dtype, m, n, layout, other, special, seed):
    if kind.startswith("rope"):
        n += n % 2
    x = laid(values((m, n), dtype, seed=seed, special=special), layout)
    others = tuple(
        laid(o, "c" if o.ndim == 1 and other == "broadcast" else other) for o in beside(kind, (m, n), dtype, seed + 1)
    )
    got = call(kind, tensor(x), tuple(map(tensor, others)), out_dtype=TORCH[out_dtype])
    want = defined(kind, x, others, out_dtype)
    assert got.dtype is TORCH[out_dtype]
    np.testing.assert_array_equal(words(got), words(tensor(want)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_the_same_alone_in_a_batch_and_in_chunks(kind, dtype, monkeypatch):
    m, n = 37, 2048  # some chunks for threads to take
    x = tensor(values((m, n), dtype, seed=1, special=True))
    others = tuple(map(tensor, beside(kind, (m, n), dtype, 2)))

    def part(rows: Any) -> np.ndarray:
        return words(call(kind, x[rows], tuple(o if o.dim() == 1 else o[rows] for o in others)))

    isogemm.set_num_threads(3)
    whole = part(slice(None))
    np.testing.assert_array_equal(part(slice(None, None, 5)), whole[::5])
    np.testing.assert_array_equal(np.concatenate([part(slice(0, 20)), part(slice(20, None))]), whole)
    order = torch.randperm(m, generator=torch.Generator().manual_seed(0))
    np.testing.assert_array_equal(part(order), whole[order.numpy()])
    isogemm.set_num_threads(1)
    np.testing.assert_array_equal(part(slice(None)), whole)
    for i in (0, 19, 36):
        np.testing.assert_array_equal(part(slice(i, i + 1)), whole[i : i + 1])


@pytest.mark.parametrize("kind", KINDS)
def test_leading_dimensions_and_transposes(kind):
    x = tensor(values((4, 3, 5, 26), seed=3)).transpose(0, 2)
    others = tuple(map(tensor, beside(kind, tuple(x.shape), F32, 4)))
    got = call(kind, x, others)
    flat = tuple(o if o.dim() == 1 else o.reshape(-1, o.shape[-1]) for o in others)
    want = call(kind, x.reshape(-1, 26), flat)
    assert got.shape[:-1] == x.shape[:-1]
    np.testing.assert_array_equal(words(got.reshape(want.shape)), words(want))


def test_tables_of_a_rotation_broadcast():
    x = tensor(values((2, 3, 7, 16), seed=5))
    cos, sin = reductions.rope_tables(torch.arange(7), 16)
    want = reductions.rope(x, cos.expand(2, 3, 7, 8), sin.expand(2, 3, 7, 8).contiguous())
    np.testing.assert_array_equal(words(reductions.rope(x, cos, sin)), words(want))
    # Transformers' formula, on tables that hold every angle twice.
    rotated = torch.cat([-x[..., 8:], x[..., :8]], -1)
    plain = x * torch.cat([cos, cos], -1) + rotated * torch.cat([sin, sin], -1)
    np.testing.assert_array_equal(words(want), words(plain))


def test_a_position_has_the_same_table_row_alone():
    cos, sin = reductions.rope_tables(torch.tensor([[5, 0, 7000], [7000, 1, 5]]), 64, theta=1e6)
    alone = reductions.rope_tables(torch.tensor(7000), 64, theta=1e6)
    for table, row in zip((cos, sin), alone, strict=True):
        assert table.shape == (2, 3, 32)
        np.testing.assert_array_equal(words(table[0, 2]), words(row))
        np.testing.assert_array_equal(words(table[1, 0]), words(row))
    angles = 7000 * 1e6 ** (-np.arange(32) / 32.0)
    np.testing.assert_allclose(alone[0].numpy(), np.cos(angles), rtol=1e-6, atol=1e-7)


def test_interleaved_pairs_are_neighbours():
    x, cos, sin = (tensor(values(s, seed=i)) for i, s in enumerate(((3, 8), (3, 4), (3, 4))))
    got = reductions.rope(x, cos, sin, interleaved=True)
    turned = reductions.rope(torch.cat([x[:, 0::2], x[:, 1::2]], -1), cos, sin)
    np.testing.assert_array_equal(words(torch.stack([turned[:, :4], turned[:, 4:]], -1).reshape(3, 8)), words(got))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fused_calls_have_the_bits_of_the_operations_apart(dtype):
    x, residual = (tensor(values((2, 3, 7, 16), dtype, seed=i, special=True)) for i in (1, 2))
    w, v = (tensor(values((16,), dtype, seed=i)) for i in (3, 4))
    norm, h = reductions.add_rms_norm(x, residual, w, 1e-3)
    want = tensor(define.rounded((x.float() + residual.float()).numpy(), dtype))
    np.testing.assert_array_equal(words(h), words(want))
    np.testing.assert_array_equal(words(norm), words(reductions.rms_norm(want, w, 1e-3)))
    wide, sums = reductions.add_rms_norm(x, residual.float(), out_dtype=dtype)
    assert (wide.dtype, sums.dtype) == (TORCH[dtype], torch.float32)
    k, (cos, sin) = residual[:, :1], reductions.rope_tables(torch.arange(7), 16)
    for interleaved in (False, True):
        turned = [reductions.rope(t, cos, sin, interleaved=interleaved) for t in (x, k)]
        for got, want in zip(reductions.rope_pair(x, k, cos, sin, interleaved=interleaved), turned, strict=True):
            np.testing.assert_array_equal(words(got), words(want))
        normed = [reductions.rms_norm(t, u, 1e-3) for t, u in ((x, w), (k, v))]
        turned = [reductions.rope(t, cos, sin, interleaved=interleaved) for t in normed]
        found = reductions.norm_rope_pair(x, k, w, v, cos, sin, 1e-3, interleaved=interleaved)
        for got, want in zip(found, turned, strict=True):
            np.testing.assert_array_equal(words(got), words(want))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_embedding_copies_rows(dtype):
    weight = tensor(values((11, 5), dtype, special=True))
    ids = torch.tensor([[3, 10, 0], [3, 3, 7]], dtype=torch.int32)
    np.testing.assert_array_equal(words(reductions.embedding(ids, weight)), words(weight)[ids.numpy()])
    assert reductions.embedding(ids[:0], weight).shape == (0, 3, 5)
    for bad in (11, -1):
        with pytest.raises(OptionError, match=f"got: {bad}"):
            reductions.embedding(torch.tensor([0, bad]), weight)
    with pytest.raises(DTypeError, match="integers"):
        reductions.embedding(torch.tensor([0.0]), weight)
    with pytest.raises(ShapeError, match="shape of weight"):
        reductions.embedding(ids, weight[0])


def test_subnormals_survive_a_flushing_caller():
    x = tensor(np.array([[1e-40, 2e-40, -3e-41]], np.float32))
    want = words(reductions.sum(x))
    assert want[0] != 0
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush")
    try:
        np.testing.assert_array_equal(words(reductions.sum(x)), want)
    finally:
        torch.set_flush_denormal(False)


def test_close_to_plain_torch():
    """For information: the same numbers as torch's own, in another order of rounding."""
    x, y, w, b = (tensor(values(s, seed=i)) for i, s in enumerate(((64, 1536), (64, 1536), (1536,), (1536,))))
    plain = torch.nn.functional
    for got, want in (
        (reductions.rms_norm(x, w, 1e-6), plain.rms_norm(x.double(), (1536,), w.double(), 1e-6)),
        (reductions.layer_norm(x, w, b), plain.layer_norm(x.double(), (1536,), w.double(), b.double())),
        (reductions.softmax(x), x.double().softmax(-1)),
        (reductions.log_softmax(x), x.double().log_softmax(-1)),
        (reductions.silu_mul(x, y), plain.silu(x.double()) * y.double()),
        (reductions.mean(x), x.double().mean(-1)),
        (reductions.sum(x, keepdim=True), x.double().sum(-1, keepdim=True)),
    ):
        assert got.shape == want.shape
        torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=2e-5)


def test_refusals():
    x = torch.ones(3, 4)
    cases: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (DTypeError, "a torch tensor", lambda: reductions.softmax(np.ones((2, 2), np.float32))),
        (DTypeError, "x is torch.float64", lambda: reductions.softmax(x.double())),
        (DTypeError, "out_dtype", lambda: reductions.softmax(x, out_dtype=torch.float64)),
        (ShapeError, "dimensions of x", lambda: reductions.mean(x[0, 0])),
        (ShapeError, "shape of weight", lambda: reductions.rms_norm(x, torch.ones(3))),
        (ShapeError, "shape of bias", lambda: reductions.layer_norm(x, None, torch.ones(1))),
        (ShapeError, "shape of y", lambda: reductions.silu_mul(x, x[:1])),
        (ShapeError, "last dimension of x", lambda: reductions.rope(x[:, :3], x, x)),
        (ShapeError, "shape of sin", lambda: reductions.rope(x, x[:, :2], x)),
        (ShapeError, "limit: an even number", lambda: reductions.rope_tables(torch.arange(3), 5)),
        (OptionError, "eps", lambda: reductions.rms_norm(x, eps=-1.0)),
        (OptionError, "eps", lambda: reductions.layer_norm(x, eps=float("nan"))),
        (OptionError, "cos and sin", lambda: reductions.rope(x, x[:, :2].clone().requires_grad_(), x[:, :2])),
        (DeviceError, "device of x", lambda: reductions.softmax(x.to("meta"))),
    ]
    for error, text, attempt in cases:
        with pytest.raises(error, match=text):
            attempt()
