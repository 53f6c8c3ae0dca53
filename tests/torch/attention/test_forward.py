"""Attention: the definition's bits, and a query's result that knows of nothing but the keys it sees."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.products import BF16, assert_same

import isogemm
from isogemm.contract import attention as define
from isogemm.errors import IsogemmError, OptionError

torch = pytest.importorskip("torch")
calls = pytest.importorskip("isogemm.torch.attention.calls")
attention, sdpa = calls.attention, calls.scaled_dot_product_attention
plain = torch.nn.functional.scaled_dot_product_attention
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def drawn(*shape: int, seed: int = 0, dtype: Any = torch.float32) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def operands(b: int, hq: int, hkv: int, tq: int, tk: int, d: int, dtype: Any = torch.float32, dv: int = 0) -> list[Any]:
    shapes = ((b, hq, tq, d), (b, hkv, tk, d), (b, hkv, tk, dv or d))
    return [drawn(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes)]


def as_array(x: Any) -> Any:
    if x is None or isinstance(x, np.ndarray):
        return x
    return x.view(torch.uint16).numpy().view(BF16) if x.dtype is torch.bfloat16 else x.numpy()


def same(got: Any, want: Any) -> None:
    assert_same(as_array(got.contiguous()), as_array(want.contiguous()))


def defined(q: Any, k: Any, v: Any, contract: str = "fma/chain", **options: Any) -> Any:
    given = {name: as_array(x) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    arrays = (as_array(x) for x in (q, k, v))
    return define.attention(*arrays, arithmetic=contract.split("/")[0], **given)[0]


MASKS = ["none", "bool", "keys", "added", "added for heads"]


def masked(kind: str, b: int, hq: int, tq: int, tk: int, dtype: Any) -> Any:
    """Masks of every kind, with steps of 0 in different places."""
    seed = torch.Generator().manual_seed(7)
    if kind == "bool":
        return torch.rand(b, 1, tq, tk, generator=seed) < 0.7
    if kind == "keys":
        return (torch.rand(tk, generator=seed) < 0.8).expand(tq, tk)
    if kind == "added":
        return torch.randn(tk, tq, generator=seed).to(dtype).T
    if kind == "added for heads":
        found = torch.randn(1, hq, 1, tk, generator=seed)
        return found.masked_fill(torch.rand(1, hq, 1, tk, generator=seed) < 0.2, -math.inf)
    return None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("ranges", [False, True], ids=["all keys", "ranges"])
@pytest.mark.parametrize("offset", [None, 0, 170])
def test_the_bits_are_the_definitions(dtype, kind, ranges, offset):
    b, hq, tq, tk = 2, 4, 9, 270
    q, k, v = operands(b, hq, 2, tq, tk, 16, dtype, dv=11)
    mask = masked(kind, b, hq, tq, tk, dtype)
    start, stop = (torch.tensor([3, 131]), torch.tensor([201, 270])) if ranges else (None, None)
    got = attention(q, k, v, mask=mask, causal=offset is not None, offset=offset, start=start, stop=stop)
    want = defined(q, k, v, mask=mask, causal_offset=offset, start=start, stop=stop)
    assert_same(as_array(got), want)


@pytest.mark.parametrize("d", [1, 64, 80, 96, 128, 256])
def test_heads_of_any_size(d):
    q, k, v = operands(1, 2, 1, 5, 140, d)
    assert_same(as_array(attention(q, k, v)), defined(q, k, v))
    q, k, v = (x.bfloat16() for x in (q, k, v))
    assert_same(as_array(attention(q, k, v)), defined(q, k, v))


@pytest.mark.parametrize(("contract", "dtype"), [
    ("tensor_core:sm90/chain", torch.bfloat16), ("tensor_core:sm80/chain", torch.float16), ("tf32:sm90", torch.float32),
])  # fmt: skip
def test_other_arithmetics_by_name(contract, dtype):
    q, k, v = operands(1, 4, 2, 3, 135, 24, dtype)
    got = attention(q, k, v, contract=contract, causal=True)
    assert_same(as_array(got), defined(q, k, v, contract, causal_offset=132))


@settings(max_examples=40)
@given(
    b=st.integers(1, 3), groups=st.integers(1, 3), heads=st.integers(1, 3), tq=st.integers(0, 20),
    tk=st.integers(0, 280), d=st.integers(1, 20), dv=st.integers(0, 20), dtype=st.sampled_from(DTYPES),
    offset=st.none() | st.integers(-5, 290), bounds=st.booleans(), scale=st.none() | st.floats(0.01, 4),
)  # fmt: skip
def test_any_shape_has_the_definitions_bits(b, groups, heads, tq, tk, d, dv, dtype, offset, bounds, scale):
    q, k, v = (drawn(b, t, h, n, seed=t + n, dtype=dtype).transpose(1, 2) for h, t, n in (
        (groups * heads, tq, d), (heads, tk, d), (heads, tk, dv),
    ))  # fmt: skip
    start = torch.arange(b) % (tk + 1) if bounds else None
    stop = tk - torch.arange(b) % (tk // 2 + 1) if bounds else None
    options = {"start": start, "stop": stop, "scale": scale}
    got = attention(q, k, v, causal=offset is not None, offset=offset, out_dtype=torch.float32, **options)
    assert_same(as_array(got), defined(q, k, v, causal_offset=offset, out_dtype=np.float32, **options))


def test_special_values_have_the_definitions_bits():
    q, k, v = operands(2, 2, 1, 6, 140, 8)
    q[0, 0, 0, 0], q[1, 1, 3] = math.nan, math.inf
    k[0, 0, 5, 1], k[1, 0, 130] = math.inf, 1e38
    v[0, 0, 7, 2], v[1, 0, 139, 0], v[1, 0, 2, 3] = -math.inf, math.nan, 1e-40
    for dtype in DTYPES:
        cast = [x.to(dtype) for x in (q, k, v)]
        assert_same(as_array(attention(*cast)), defined(*cast))


# What a query's result does not depend on.


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return request.param


def test_batch_position_and_neighbours(dtype):
    q, k, v = operands(7, 4, 2, 5, 200, 16, dtype)
    whole = attention(q, k, v, causal=True)
    for i in (0, 3, 6):
        same(attention(q[i : i + 1], k[i : i + 1], v[i : i + 1], causal=True), whole[i : i + 1])
    order = torch.tensor([4, 0, 6, 2, 1, 5, 3])
    same(attention(q[order], k[order], v[order], causal=True), whole[order])
    others = [x.clone() for x in (q, k, v)]
    for x in others:
        x[:3] = math.nan
        x[4:] *= 50
    same(attention(*others, causal=True)[3], whole[3])


def test_heads_do_not_meet(dtype):
    q, k, v = operands(2, 6, 3, 5, 200, 16, dtype)
    whole = attention(q, k, v)
    for h in range(3):
        one = attention(q[:, 2 * h : 2 * h + 2], k[:, h : h + 1], v[:, h : h + 1])
        same(one, whole[:, 2 * h : 2 * h + 2])


@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_prefill_in_chunks_is_prefill(dtype, chunk):
    """The cache holds what came before, as in a server that cuts prompts."""
    q, k, v = operands(2, 4, 2, 140, 140, 16, dtype)
    whole = attention(q, k, v, causal=True)
    parts = []
    for first in range(0, 140, chunk):
        last = min(first + chunk, 140)
        parts.append(attention(q[:, :, first:last], k[:, :, :last], v[:, :, :last], causal=True))
    same(torch.cat(parts, 2), whole)


def test_decoding_is_prefill(dtype):
    q, k, v = operands(1, 4, 2, 133, 133, 16, dtype)
    whole = attention(q, k, v, causal=True)
    for i in (*range(3), *range(125, 133)):
        same(attention(q[:, :, i : i + 1], k[:, :, : i + 1], v[:, :, : i + 1]), whole[:, :, i : i + 1])


def test_a_longer_cache_changes_nothing(dtype):
    q, k, v = operands(3, 4, 2, 2, 150, 16, dtype)
    longer = [torch.cat([x, torch.full((3, 2, 200, 16), math.nan, dtype=dtype)], 2) for x in (k, v)]
    held = torch.tensor([150, 129, 3])
    got = attention(q, *longer, stop=held)
    for i, n in enumerate(held.tolist()):
        same(got[i], attention(q[i : i + 1], k[i : i + 1, :, :n], v[i : i + 1, :, :n])[0])
    finite = [x.nan_to_num(3.0) for x in longer]
    mask = torch.arange(350) < held.view(3, 1, 1, 1)
    same(attention(q, *finite, mask=mask), got)
    same(sdpa(q, *longer, mask, enable_gqa=True), got)


@pytest.mark.parametrize("how", ["start", "mask", "least number", "minus infinity"])
def test_padding_on_the_left_changes_nothing(dtype, how):
    """A prompt of n tokens behind padding of any length; what the padding holds is never read."""
    n = 139
    alone = operands(1, 4, 2, n, n, 16, dtype)
    want = attention(*alone, causal=True)
    for pads in ([161], [0, 1, 130], [128, 17]):
        b, room, first = len(pads), max(pads) + n, torch.tensor(pads)
        q, k, v = (torch.full((b, x.shape[1], room, 16), math.nan, dtype=dtype) for x in alone)
        for i, at in enumerate(first.tolist()):
            for x, y in zip((q, k, v), alone, strict=True):
                x[i, :, at : at + n] = y[0]
        key, query = torch.arange(room), torch.arange(room).view(-1, 1)
        shown = (key >= first.view(b, 1, 1, 1)) & (key <= query)
        last = first + n
        shown &= key < last.view(b, 1, 1, 1)
        if how == "start":
            got = attention(q, k, v, causal=True, start=first, stop=last)
        elif how == "mask":
            got = sdpa(q, k, v, shown, enable_gqa=True)
        else:
            least = -math.inf if how == "minus infinity" else torch.finfo(dtype).min
            got = sdpa(q, k, v, torch.zeros(shown.shape, dtype=dtype).masked_fill(~shown, least), enable_gqa=True)
        for i, at in enumerate(first.tolist()):
            same(got[i, :, at : at + n], want[0])


def drawn_mask(kind: str, b: int, heads: int, tq: int, tk: int, seed: int, dtype: Any) -> Any:
    """Each query of each head sees keys of a range of its own, with holes; some see none."""
    random = torch.Generator().manual_seed(seed)
    start = torch.randint(tk, (b, heads, tq, 1), generator=random)
    length = torch.randint(tk + 1, (b, heads, tq, 1), generator=random)
    if kind == "window":
        start = (torch.arange(tq).view(tq, 1) + tk - tq - tk // 2).clamp(0).expand(b, heads, tq, 1)
        length = torch.full_like(start, tk // 2)
    key = torch.arange(tk)
    seen = (key >= start) & (key < start + length)
    seen &= (torch.rand(b, heads, tq, tk, generator=random) < 0.9) | (key == start)
    if kind != "added":
        return seen
    return torch.randn(b, heads, tq, tk, generator=random).to(dtype).masked_fill(~seen, torch.finfo(dtype).min)


@settings(max_examples=20)
@given(
    b=st.integers(1, 2), groups=st.integers(1, 2), heads=st.integers(1, 2), tq=st.integers(1, 5),
    tk=st.integers(1, 300), kind=st.sampled_from(["window", "bool", "added"]), shared=st.booleans(),
    seed=st.integers(0, 99), dtype=st.sampled_from(DTYPES),
)  # fmt: skip
def test_a_query_knows_nothing_of_masks_of_others(b, groups, heads, tq, tk, kind, shared, seed, dtype):
    """Not of those of other queries, other heads and other batch entries; nor of keys outside of its range."""
    tq = min(tq, tk)
    q, k, v = operands(b, groups * heads, heads, tq, tk, 8, dtype, dv=5)
    mask = drawn_mask(kind, b, 1 if shared else groups * heads, tq, tk, seed, dtype)
    together = sdpa(q, k, v, mask, enable_gqa=True)
    start, stop = (torch.from_numpy(x) for x in define.ranges(as_array(mask)))
    assert_same(as_array(together), defined(q, k, v, mask=mask, start=start, stop=stop))
    for i, h, t in itertools.product(range(b), range(groups * heads), range(tq)):
        row = mask[i, 0 if shared else h, t]
        first, last = (int(x[i, 0 if shared else h, t]) for x in (start, stop))
        query, keys, values = q[i, h, t : t + 1], k[i, h // groups], v[i, h // groups]
        same(sdpa(query, keys, values, row), together[i, h, t : t + 1])
        cropped = attention(
            *(x[None, None] for x in (query, keys[first:last], values[first:last])), mask=row[first:last]
        )
        same(cropped[0, 0], together[i, h, t : t + 1])


def test_a_hidden_key_of_a_huge_score_does_not_show_through():
    """float16's least number is no infinity: beside others that see the key, a score may be larger than it."""
    q, k, v = (torch.ones(1, 1, t, 4).half() for t in (2, 130, 130))
    q, k = q * 1000, k * torch.where(torch.arange(130) == 0, 1000.0, -1000.0).half().view(130, 1)
    v = v * torch.arange(130).half().view(130, 1)
    mask = torch.zeros(2, 130).half()
    mask[1, 0] = torch.finfo(torch.float16).min  # the second query begins at key 1, or at 128 with the first's place
    mask[1, 1:128] = torch.finfo(torch.float16).min
    together = sdpa(q, k, v, mask)
    same(together[:, :, 1:], sdpa(q[:, :, 1:], k, v, mask[1:]))
    assert together[0, 0, 1, 0] == 128.5


def test_gradients_behind_masks_are_those_of_float64():
    q, k, v = operands(2, 2, 2, 9, 300, 16, torch.float32)
    mask = drawn_mask("bool", 2, 2, 9, 300, 1, torch.float32)
    mask[0, :, 3], mask[1, 1, 4] = False, True
    found = []
    for call, kind in ((sdpa, torch.float32), (plain, torch.float64)):
        leaves = [x.to(kind).requires_grad_() for x in (q, k, v)]
        found.append(torch.autograd.grad(call(*leaves, attn_mask=mask).square().sum(), leaves))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got.double(), want.nan_to_num(), rtol=1e-4, atol=1e-5)


def test_grouped_heads_are_repeated_heads(dtype):
    q, k, v = operands(2, 6, 2, 9, 150, 16, dtype)
    repeated = [x.repeat_interleave(3, 1) for x in (k, v)]
    same(attention(q, k, v, causal=True), attention(q, *repeated, causal=True))
    same(sdpa(q, k, v, enable_gqa=True), sdpa(q, *repeated))


def test_threads_do_not_reach_the_bits(dtype):
    q, k, v = operands(2, 4, 2, 90, 300, 32, dtype)
    found = []
    for count in (1, 2, 5):
        isogemm.set_num_threads(count)
        found.append(attention(q, k, v, causal=True))
    for other in found[1:]:
        same(other, found[0])


def test_blocks_of_queries_do_not_reach_the_bits(dtype, monkeypatch):
    from isogemm.backends.cpu.attention import run as cpu

    q, k, v = operands(2, 4, 2, 50, 200, 16, dtype)
    whole = attention(q, k, v, causal=True)
    for block, tokens in ((1, 1), (2**10, 7), (2**13, 16)):
        monkeypatch.setattr(cpu, "BLOCK", block)
        monkeypatch.setattr(cpu, "TOKENS", tokens)
        same(attention(q, k, v, causal=True), whole)


def test_strides_do_not_reach_the_bits(dtype):
    q, k, v = operands(2, 4, 2, 9, 150, 16, dtype)
    want = attention(q, k, v, causal=True)

    def tokens_first(x: Any) -> Any:
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    def in_a_cache(x: Any) -> Any:
        return torch.cat([x, x + 1], 2)[:, :, : x.shape[2]]

    def columns_first(x: Any) -> Any:
        return x.mT.contiguous().mT

    def every_second(x: Any) -> Any:
        return x.repeat_interleave(2, 3)[..., ::2]

    for layouts in itertools.product((tokens_first, in_a_cache, columns_first, every_second), repeat=3):
        same(attention(*(f(x) for f, x in zip(layouts, (q, k, v), strict=True)), causal=True), want)
    shared = [x[:1].expand(2, -1, -1, -1) for x in (k, v)]
    same(attention(q, *shared), attention(q, *(x.contiguous() for x in shared)))


def test_no_token_and_no_key(dtype):
    q, k, v = operands(2, 4, 2, 3, 5, 8, dtype)
    assert attention(q[:, :, :0], k, v).shape == (2, 4, 0, 8)
    same(attention(q, k[:, :, :0], v[:, :, :0]), torch.zeros_like(q))
    same(attention(q, k, v, mask=torch.zeros(3, 5, dtype=torch.bool)), torch.zeros_like(q))
    same(attention(q, k, v, start=5), torch.zeros_like(q))
    same(attention(q, k, v, causal=True, offset=-3), torch.zeros_like(q))
    assert attention(q[:0], k[:0], v[:0]).shape == (0, 4, 3, 8)


@pytest.mark.parametrize("kind", ["plain", "causal", "mask", "added", "scaled"])
def test_torchs_signature_means_the_same(dtype, kind):
    q, k, v = operands(2, 4, 4, 20, 30, 16, dtype)
    options: dict[str, Any] = {
        "plain": {},
        "causal": {"is_causal": True},
        "mask": {"attn_mask": torch.ones(20, 30, dtype=torch.bool).tril(7)},
        "added": {"attn_mask": drawn(2, 1, 20, 30, seed=3, dtype=dtype)},
        "scaled": {"scale": 0.4},
    }[kind]
    near = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(sdpa(q, k, v, **options), plain(q, k, v, **options), atol=near, rtol=near)
    for i in (1, 2):  # fewer dimensions
        fewer = [x[(0,) * i] for x in (q, k, v)]
        mask = {n: x[0, 0] if n == "attn_mask" and x.dim() == 4 else x for n, x in options.items()}
        same(sdpa(*fewer, **mask), sdpa(q, k, v, **options)[(0,) * i])


@pytest.mark.parametrize("tk", [40, 700])
def test_errors_are_those_of_torchs_fused_kernel(dtype, tk):
    """Root of the mean square error against float64, over that of the kernel that rounds where this one does."""
    q, k, v = operands(4, 8, 8, 64, tk, 64, dtype)
    want = plain(*(x.double() for x in (q, k, v)))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        theirs = plain(q, k, v)
    ours, theirs = ((x.double() - want).square().mean().sqrt() for x in (sdpa(q, k, v), theirs))
    assert ours <= {torch.float32: 1.25, torch.bfloat16: 1.1, torch.float16: 1.1}[dtype] * theirs


MORE: dict[str, dict[str, Any]] = {
    "plain": {}, "capped": {"softcap": 5.0}, "dropped": {"dropout": 0.3, "seeds": torch.tensor([1, 2])},
    "sinks": {"sinks": torch.zeros(4)},
}  # fmt: skip
WRONG: list[dict[str, Any]] = [
    {"start": -5}, {"stop": 20}, {"start": torch.tensor([0, 10])}, {"stop": torch.tensor([-1, 9])}, {"start": True},
    {"causal": True, "offset": True}, {"causal": True, "offset": 2**70}, {"scale": 1e300}, {"scale": 1e-300},
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG, ids=str)
@pytest.mark.parametrize("name", MORE)
def test_what_is_out_of_range_is_refused_whatever_else_is_asked(name, wrong):
    q, k, v = operands(2, 4, 2, 6, 9, 16)
    with pytest.raises(IsogemmError, match=next(reversed(wrong))):
        attention(q, k, v, **wrong, **MORE[name])
    with pytest.raises(OptionError, match="softcap"):
        attention(q, k, v, **MORE[name] | {"softcap": 1e300})


@pytest.mark.parametrize("name", MORE)
def test_values_may_have_no_elements(name):
    q, k, _ = operands(2, 4, 2, 6, 9, 16)
    assert attention(q, k, torch.empty(2, 2, 9, 0), **MORE[name]).shape == (2, 4, 6, 0)
