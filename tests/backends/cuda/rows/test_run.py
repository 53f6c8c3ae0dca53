"""Operations along rows on CUDA: the bits of the CPU's, for any length, number, place and dtype of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.backends.cuda.poison import poisoned

__all__ = ["poisoned"]  # the fixture

torch = pytest.importorskip("torch")
reductions = pytest.importorskip("isogemm.torch.reductions")
rows = pytest.importorskip("isogemm.backends.cuda.rows.run")

pytestmark = pytest.mark.gpu

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = (F32, BF16, F16)
LENGTHS = (*range(1, 18), 127, 128, 129, 1000, 1024, 4096, 5000, 8192, 16385)
ALONE = ("softmax", "log_softmax", "silu", "sigmoid", "exp", "sum", "mean")


def drawn(*shape: int, dtype: Any = F32, seed: int = 0, special: bool = False) -> Any:
    """Random numbers; `special`: among them NaN with payloads, infinities, zeros of both signs, subnormals."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * 3
    if special and x.numel():
        kinds = [0x7FC12345, 0xFFC00001, 0x7F800000, 0xFF800000, 0, 0x80000000, 5, 0x807FFFFF, 0x7F7FFFFF]
        words = torch.tensor([k - 2**32 if k >= 2**31 else k for k in kinds]).to(torch.int32).view(F32)
        flat = x.view(-1)
        places = torch.randperm(flat.numel(), generator=generator)[: max(1, flat.numel() // 97)]
        flat[places] = words[torch.randint(len(words), places.shape, generator=generator)]
    return x.to(dtype)


def bits(x: Any) -> Any:
    return x.detach().cpu().contiguous().view(torch.int32 if x.dtype is F32 else torch.int16)


def same(got: Any, want: Any) -> None:
    if isinstance(want, tuple | list):
        for g, w in zip(got, want, strict=True):
            same(g, w)
        return
    assert got.is_cuda
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    wrong = bits(got) != bits(want)
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} differ, first at {wrong.nonzero()[0].tolist()}"


def check(function: Callable[..., Any], *operands: Any) -> None:
    """The same call on both; twice on CUDA, where the second one takes the short path."""
    want = function(*operands)
    there = [t.cuda() if t.is_contiguous() else like(t) for t in operands]
    for _ in range(2):
        same(function(*there), want)


def like(t: Any) -> Any:
    """On CUDA with the same strides."""
    extent = 1 + sum((d - 1) * s for d, s in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0
    memory = torch.as_strided(t, (extent,), (1,)).cuda()
    return memory.as_strided(t.shape, t.stride())


def calls(n: int, dtype: Any, count: int, special: bool) -> list[tuple[Callable[..., Any], list[Any]]]:
    x, y = (drawn(count, n, dtype=dtype, seed=i, special=special) for i in (1, 2))
    w, b = drawn(n, dtype=dtype, seed=3), drawn(n, seed=4)
    found: list[tuple[Callable[..., Any], list[Any]]] = [(getattr(reductions, kind), [x]) for kind in ALONE]
    found += [
        (reductions.rms_norm, [x]),
        (reductions.rms_norm, [x, w]),
        (lambda x, b: reductions.rms_norm(x, b, 1e-3, out_dtype=F32), [x, b]),
        (reductions.layer_norm, [x]),
        (reductions.layer_norm, [x, w, b]),
        (lambda x, b: reductions.layer_norm(x, None, b, out_dtype=F16), [x, b]),
        (reductions.silu_mul, [x, y]),
        (lambda x, y: reductions.silu_mul(x, y.float(), out_dtype=BF16), [x, y]),
        (reductions.add_rms_norm, [x, y, w]),
        (lambda x, y: reductions.add_rms_norm(x, y.float()), [x, y]),
    ]
    return found


@pytest.mark.parametrize("special", [False, True], ids=["plain", "special"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lengths(dtype, special):
    for n in LENGTHS:
        for function, operands in calls(n, dtype, 3, special):
            check(function, *operands)


@pytest.mark.parametrize("count", [0, 1, 2, 5, 64, 131, 700, 2500, 9000])
@pytest.mark.parametrize("n", [0, 8, 128, 1024])
def test_numbers_of_rows(n, count):
    for function, operands in calls(n, BF16, count, False):
        check(function, *operands)


def test_vocabularies():
    for dtype, n in ((F32, 151936), (BF16, 151936), (BF16, 32001), (F32, 240001), (BF16, 470004)):
        x = drawn(3, n, dtype=dtype)
        x[1, 5], x[2, 1000] = float("-inf"), float("nan")
        for kind in ("log_softmax", "softmax", "sum", "rms_norm", "layer_norm"):
            check(getattr(reductions, kind), x)
        check(lambda x, y: reductions.add_rms_norm(x, y.float()), x, x.flip(0))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("n", [16, 130, 1024, 17000])
def test_strides(n, dtype):
    base = drawn(3, 4, 5, 2 * n + 8, dtype=dtype)
    views = [
        base[..., :n], base[..., 1 : n + 1], base[..., : 2 * n : 2], base.transpose(0, 2)[..., 8 : n + 8],
        base[:1, :1, :1, :n].expand(3, 2, 5, n), base[0].transpose(0, 1)[..., :n], base[1:2, ..., :n],
    ]  # fmt: skip
    if n < 1000:
        views += [
            drawn(n, 6, dtype=dtype).t(),
            drawn(2, 3, 2, 2, 3, 2 * n, dtype=dtype).permute(4, 2, 0, 3, 1, 5)[..., :n],
        ]
    for x in views:
        y = drawn(*x.shape, dtype=dtype, seed=5)
        w = drawn(2 * n, dtype=dtype, seed=6)[::2]
        for function, operands in (
            (reductions.rms_norm, [x, w]),
            (reductions.layer_norm, [x, w, w]),
            (reductions.softmax, [x]),
            (reductions.sum, [x]),
            (reductions.silu_mul, [x, y]),
            (reductions.silu_mul, [y, x]),
            (reductions.sigmoid, [x]),
            (reductions.add_rms_norm, [y, x, w]),
        ):
            check(function, *operands)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize("n", [2, 6, 8, 16, 64, 96, 128, 256, 300, 1024, 1100])
def test_rotations(n, interleaved, dtype):
    cos, sin = reductions.rope_tables(torch.arange(7), n)
    twice = torch.cat([cos, cos], -1)[..., : n // 2]
    x = drawn(2, 7, 4, n, dtype=dtype).transpose(1, 2)
    k = drawn(2, 7, 1, n, dtype=dtype, seed=1).transpose(1, 2)
    w, v = drawn(n, dtype=dtype, seed=2), drawn(n, dtype=dtype, seed=3)
    check(lambda x, c, s: reductions.rope(x, c, s, interleaved=interleaved), x, twice, sin)
    check(lambda x, c, s: reductions.rope(x, c, s, interleaved=interleaved, out_dtype=F32), x, cos.bfloat16(), sin)
    check(lambda q, k, c, s: reductions.rope_pair(q, k, c, s, interleaved=interleaved), x, k, cos[None, None], sin)
    check(
        lambda q, k, w, v, c, s: reductions.norm_rope_pair(q, k, w, v, c, s, 1e-6, interleaved=interleaved),
        x, k, w, v, cos, sin,
    )  # fmt: skip
    check(lambda q, k, w, c, s: reductions.norm_rope_pair(q, k, w, None, c, s), x, k, w, cos, sin)
    many = drawn(40, 7, 32, n, dtype=dtype).transpose(1, 2) if n <= 128 else x
    check(lambda q, k, c, s: reductions.norm_rope_pair(q, k, None, None, c, s), many, k, cos, sin)


def test_embedding_copies_rows():
    weight = drawn(50, 24, dtype=BF16, special=True)
    for kind in (torch.int64, torch.int32, torch.int16):
        ids = torch.tensor([[3, 49, 0], [3, 3, 7]], dtype=kind)
        same(reductions.embedding(ids.cuda(), weight.cuda()), reductions.embedding(ids, weight))


def test_every_exponential():
    """exp and its kin on every bfloat16, and on float32 all over."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(BF16)[None]
    wide = torch.arange(-(2**31), 2**31, 997, dtype=torch.int64).to(torch.int32).view(F32)[None]
    near = torch.cat([torch.linspace(-105, -85, 200001), torch.linspace(80, 90, 200001)])[None]
    for x in (every, wide, near):
        for kind in ("exp", "sigmoid", "silu"):
            check(lambda x, kind=kind: getattr(reductions, kind)(x, out_dtype=F32), x)


def test_quotients_by_one_divisor():
    """Softmax of rows whose numerators reach from 1 down to subnormals."""
    x = torch.cat([torch.linspace(-104, 0, 4000), torch.linspace(-90, -60, 4096)])[torch.randperm(8096)]
    for rows_ in (x[None], x.view(8, 1012), drawn(500, 1000) * 20):
        check(reductions.softmax, rows_)
    check(reductions.softmax, torch.zeros(2, 30000))
    check(reductions.softmax, torch.full((2, 9), float("-inf")))


def test_graphs_and_streams():
    x, y, w = (drawn(*s, dtype=BF16, seed=i).cuda() for i, s in enumerate(((64, 4096), (64, 4096), (4096,))))

    def step() -> list[Any]:
        norm, h = reductions.add_rms_norm(x, y, w)
        return [norm, h, reductions.softmax(norm), reductions.silu_mul(norm, h), reductions.log_softmax(h)]

    want = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for t in captured:
        t.fill_(float("nan"))
    graph.replay()
    for got, expected in zip(captured, want, strict=True):
        assert torch.equal(bits(got), bits(expected))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        other = step()
    torch.cuda.current_stream().wait_stream(side)
    for got, expected in zip(other, want, strict=True):
        assert torch.equal(bits(got), bits(expected))


def test_a_row_does_not_see_the_others():
    x, w = drawn(300, 4096, dtype=BF16, special=True).cuda(), drawn(4096).cuda()
    for function in (lambda x: reductions.rms_norm(x, w), reductions.softmax, reductions.sum):
        whole = function(x)
        for cut in (slice(7, 8), slice(0, 64), slice(100, 299)):
            assert torch.equal(bits(function(x[cut])), bits(whole[cut]))


def test_refusals():
    from isogemm.errors import DeviceError, DTypeError, LayoutError, OptionError, ShapeError

    x = torch.ones(3, 4, device="cuda")
    cases: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (DTypeError, "x is torch.float64", lambda: reductions.softmax(x.double())),
        (DTypeError, "out_dtype", lambda: reductions.softmax(x, out_dtype=torch.float64)),
        (ShapeError, "dimensions of x", lambda: reductions.mean(x[0, 0])),
        (ShapeError, "shape of weight", lambda: reductions.rms_norm(x, x[0, :3])),
        (DeviceError, "device of weight", lambda: reductions.rms_norm(x, torch.ones(4))),
        (ShapeError, "shape of y", lambda: reductions.silu_mul(x, x[:1])),
        (ShapeError, "last dimension of x", lambda: reductions.rope(x[:, :3], x, x)),
        (ShapeError, "shape of sin", lambda: reductions.rope(x, x[:, :2], x)),
        (OptionError, "eps", lambda: reductions.rms_norm(x, eps=-1.0)),
        (LayoutError, "dense", lambda: reductions.softmax(x.to_sparse())),
        (LayoutError, "lazy negation", lambda: reductions.softmax(torch._neg_view(x))),
    ]
    for error, text, attempt in cases:
        with pytest.raises(error, match=text):
            attempt()
