"""Attention on the GPU: the definition's bits by every kernel, and the relations that hold at real sizes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from tests.backends.cuda.device import DTYPES, download, draw, rounded, same
from tests.backends.cuda.poison import poisoned

from isogemm.backends.cuda.attention.run import forward
from isogemm.contract import attention as definition

__all__ = ["poisoned"]  # the fixture

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

ARITHMETIC = {"bfloat16": "tensor_core:sm90", "float16": "tensor_core:sm90", "float32": "fma"}


def operands(b: int, heads: int, shared: int, tq: int, tk: int, d: int, dtype: str, seed: int, special: bool = False):
    """q, k, v as models lay them out: heads inside tokens."""
    made = [
        draw((b, t, h, d), dtype, seed + i, special).transpose(1, 2)
        for i, (t, h) in enumerate(((tq, heads), (tk, shared), (tk, shared)))
    ]
    return made[0], made[1], made[2]


def run(q: Any, k: Any, v: Any, *, scale: float | None = None, fma: bool = False, **options: Any) -> Any:
    arithmetic = "fma" if fma else ARITHMETIC[str(q.dtype).removeprefix("torch.")]
    return forward(q, k, v, c=float(definition.factor(scale, q.shape[3])), arithmetic=arithmetic, **options)


def check(q: Any, k: Any, v: Any, *, fma: bool = False, out: str | None = None, **options: Any) -> None:
    """Bits of y, m and l against contract/attention.py."""
    options = {key: value for key, value in options.items() if value is not None}
    got = run(q, k, v, fma=fma, out_dtype=None if out is None else DTYPES[out], **options)
    options.pop("kernel", None)
    if options.pop("ranged", False):
        options["start"], options["stop"] = (torch.from_numpy(x) for x in definition.ranges(as_host(options["mask"])))
    host = {key: x if isinstance(x, int | float) else as_host(x) for key, x in options.items()}
    arithmetic = "fma" if fma else ARITHMETIC[str(q.dtype).removeprefix("torch.")]
    given = None if out is None else download(torch.empty(0, dtype=DTYPES[out])).dtype
    want = definition.attention(*map(download, (q, k, v)), arithmetic=arithmetic, out_dtype=given, **host)
    for name, x, y in zip(("y", "m", "l"), got, want, strict=True):
        same(x, y, name)


def as_host(x: Any) -> np.ndarray:
    return download(x) if x.is_floating_point() else x.cpu().numpy()


def ints(*values: int) -> Any:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


SHAPES = [  # b, hq, hkv, tq, tk, d
    (2, 4, 2, 5, 300, 64),
    (1, 4, 1, 1, 513, 128),
    (1, 2, 2, 70, 260, 128),
    (2, 2, 1, 3, 128, 80),
    (1, 2, 1, 130, 257, 72),
]


@pytest.mark.parametrize("kernel", ["hopper", "few", "split", "walk", "leaf", "fma"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_definition(shape, dtype, kernel):
    tq, tk, d = shape[3:]
    if kernel == "leaf":
        tk = 100
    q, k, v = operands(*shape[:3], tq, tk, d, dtype, seed=1)
    offset = tk - tq if tq <= tk else None
    check(q, k, v, causal_offset=offset, kernel=kernel, fma=kernel == "fma")


@pytest.mark.parametrize(("kernel", "tq"), [("hopper", 66), ("few", 7), ("few", 66), ("split", 66), ("walk", 66)])
def test_masks_starts_and_stops(kernel, tq):
    b, heads, tk = 2, 4, 300
    q, k, v = operands(b, heads, 2, tq, tk, 64, "bfloat16", seed=2)
    seen = torch.rand((b, 1, tq, tk), generator=torch.Generator("cuda").manual_seed(3), device="cuda") < 0.5
    seen[0, 0, 5] = False  # no key at all
    added = draw((1, heads, 1, tk), "float32", 4)
    start, stop = ints(37, 0), ints(300, 211)
    check(q, k, v, mask=seen, kernel=kernel)
    check(q, k, v, mask=added, kernel=kernel, out="float32")
    check(q, k, v, mask=added.bfloat16(), kernel=kernel, causal_offset=tk - tq)
    check(q, k, v, start=start, stop=stop, kernel=kernel)
    check(q, k, v, start=start, stop=stop, mask=seen, causal_offset=tk - tq, kernel=kernel, scale=0.3)
    check(q, k, v, start=ints(5, 300), stop=ints(5, 100), kernel=kernel)


@pytest.mark.parametrize("kernel", ["hopper", "few", "split", "walk", "fma"])
def test_what_is_no_number(kernel):
    q, k, v = operands(1, 2, 1, 32, 300, 64, "float16", seed=5, special=True)
    check(q, k, v, kernel=kernel, fma=kernel == "fma")
    check(q * 100, k, v, kernel=kernel, fma=kernel == "fma")
    check(q, k, draw(v.shape, "float16", 6), kernel=kernel, fma=kernel == "fma", causal_offset=268)


SCORES = {  # of keys
    "halves": lambda n: np.arange(n) % 97 / 2,
    "to 124": lambda n: np.arange(n) % 125,
    "halves to 124.5": lambda n: 0.5 + np.arange(n) % 249 / 2,
    "one at 125": lambda n: np.where(np.arange(n) == 77, 125, np.arange(n) % 125),
    "far": lambda n: np.arange(n) % 64 * 2.5,
    "none above zero": lambda n: -1 - np.arange(n) % 50 / 4,
    "zeros": lambda n: np.where(np.arange(n) % 3, 0.0, -0.0),
    "tiny": lambda n: np.arange(n) % 7 * 2.0**-120,
    "a huge one": lambda n: np.where(np.arange(n) == 77, 3e38, np.arange(n) % 9),
    "an infinity": lambda n: np.where(np.arange(n) == 77, np.inf, np.arange(n) % 9),
    "no number": lambda n: np.where(np.arange(n) == 77, np.nan, np.arange(n) % 9),
}


@pytest.mark.parametrize("scale", [math.log(2), -0.25, 1e-33, 0.0])
@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_scores_of_every_kind(dtype, scores, scale):
    """What the short way takes, to its last number, and what it leaves: for all rows of a warp, or for some."""
    rows, keys = 70, 384
    q, k = np.zeros((1, 1, rows, 64), np.float32), np.zeros((1, 1, keys, 64), np.float32)
    q[..., 0] = np.where((np.arange(rows) >= 48) & (np.arange(rows) % 5 == 0), -1, 1)  # a score is a number of k
    with np.errstate(over="ignore"):
        k[..., 0] = SCORES[scores](keys)
    q, k = (torch.from_numpy(x).cuda().to(DTYPES[dtype]) for x in (q, k))
    v = draw((1, 1, keys, 64), dtype, 9)
    check(q, k, v, scale=scale, kernel="hopper")


@pytest.mark.parametrize("d", [64, 33, 160, 256])
def test_float32(d):
    q, k, v = operands(2, 4, 2, 9, 200, d, "float32", seed=7)
    check(q, k, v, causal_offset=191)
    check(q, k, v, start=ints(3, 0), stop=ints(150, 200), mask=draw((2, 1, 9, 200), "float32", 8))


@pytest.mark.parametrize(("d", "kernel"), [(33, "split"), (96, "walk"), (96, "few"), (256, "split")])
def test_other_head_sizes(d, kernel):
    q, k, v = operands(1, 4, 2, 17, 200, d, "bfloat16", seed=9)
    check(q, k, v, causal_offset=183, kernel=kernel)


def test_odd_addresses_and_sizes_of_values():
    q, k, v = operands(1, 4, 2, 17, 200, 64, "bfloat16", seed=9)
    check(q[..., :63], k[..., :63], v[..., 1:])


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 20, 32, 33, 64, 65])
def test_any_number_of_rows_of_any_stride(rows):
    x = draw((3, 1, rows, 300), "bfloat16", seed=24)  # rows start at multiples of 8 bytes
    wide = draw((3, 1, 150, 300), "bfloat16", seed=25)
    q, k, v = x[..., :64], wide[..., :64], wide[..., 64:128]
    for kernel in ("split", "walk", None):
        check(q, k, v, kernel=kernel)
    for kernel in ("leaf", None):
        check(q, k[:, :, :20], v[:, :, :20], kernel=kernel)


def test_without_what_gradients_need():
    q, k, v = operands(2, 4, 2, 70, 300, 128, "bfloat16", seed=23)
    for rows, kernel in ((70, "hopper"), (3, "few"), (3, "split"), (70, "walk")):
        want = run(q[:, :, :rows], k, v, kernel=kernel)
        got = run(q[:, :, :rows], k, v, kernel=kernel, stats=False)
        assert got[1] is got[2] is None
        same(got[0], want[0], kernel)


def test_one_leaf_that_is_partly_behind_stop():
    q, k, v = operands(2, 8, 2, 3, 90, 128, "bfloat16", seed=15)
    v[1, :, 70:] = float("nan")
    for kernel in ("few", "leaf", "hopper", "walk"):
        check(q, k, v, stop=ints(90, 70), causal_offset=87, kernel=kernel)


def test_no_keys_give_zeros():
    q, k, v = operands(1, 2, 1, 3, 0, 64, "bfloat16", seed=10)
    y, m, total = run(q, k, v)
    assert not y.any()
    assert not total.any()
    assert torch.isneginf(m).all()


REAL = [(2, 16, 8, 1000, 128, "bfloat16"), (3, 8, 2, 777, 64, "float16")]


@pytest.mark.parametrize(("b", "heads", "shared", "t", "d", "dtype"), REAL)
def test_kernels_agree(b, heads, shared, t, d, dtype):
    q, k, v = operands(b, heads, shared, t, t, d, dtype, seed=11)
    for offset in (0, None, -40):
        want = run(q, k, v, causal_offset=offset, kernel="walk")
        for kernel in ("hopper", "few", "split"):
            for x, y in zip(run(q, k, v, causal_offset=offset, kernel=kernel), want, strict=True):
                same(x, y, (kernel, offset))


@pytest.mark.parametrize(
    ("b", "tq", "tk", "d"),
    [
        (71, 1, 1500, 128),
        (50, 20, 1400, 64),
        (40, 40, 1000, 128),
        (71, 3, 100, 128),
        (5, 2, 2900, 128),
        (4, 40, 9000, 64),
    ],
)
def test_blocks_walk_several_leaves(b, tq, tk, d):
    """Entries of any length, some without keys."""
    shared = 24 if b > 9 else 2
    q, k, v = operands(b, 2 * shared, shared, tq, tk, d, "bfloat16", seed=41)
    random = np.random.default_rng(42)
    start, stop = random.integers(-5, tk // 2, b), random.integers(0, tk + 9, b)
    stop[[1, b - 1]] = 0
    bounds = {"start": ints(*start.tolist()), "stop": ints(*stop.tolist())}
    for given in ({}, bounds, {"causal_offset": tk - tq}, {"causal_offset": tk - 15, **bounds}):
        for x, y in zip(run(q, k, v, kernel="few", **given), run(q, k, v, kernel="walk", **given), strict=True):
            same(x, y, given)


@pytest.mark.parametrize(("b", "heads", "shared", "t", "d", "dtype"), REAL)
def test_a_query_is_the_same_in_any_company(b, heads, shared, t, d, dtype):
    q, k, v = operands(b, heads, shared, t, t, d, dtype, seed=12)
    whole, _, _ = run(q, k, v, causal_offset=0)
    for size in (1, 7, 64, 300):  # decode and chunks, over caches that are just long enough
        for first in (0, 129, t - size):
            part = slice(first, first + size)
            end = first + size
            got, _, _ = run(q[:, :, part], k[:, :, :end], v[:, :, :end], causal_offset=first)
            same(got, whole[:, :, part], (size, first))
            longer, _, _ = run(q[:, :, part], k, v, causal_offset=first, stop=torch.full_like(ints(*range(b)), end))
            same(longer, whole[:, :, part], (size, first, "longer cache"))
    alone, _, _ = run(q[1:2], k[1:2], v[1:2], causal_offset=0)
    same(alone, whole[1:2], "alone")
    last, _, _ = run(q[:, -2:], k[:, -1:], v[:, -1:], causal_offset=0)
    same(last, whole[:, -2:], "two heads")


@pytest.mark.parametrize(("kernel", "tq"), [("hopper", 200), ("few", 16), ("few", 200), ("split", 200), ("walk", 200)])
def test_padding_and_what_lies_behind_is_not_read(kernel, tq):
    q, k, v = operands(2, 8, 2, tq, 400, 128, "bfloat16", seed=13)
    nan, pad = float("nan"), 77
    want, _, _ = run(q, k, v, causal_offset=400 - tq, kernel=kernel)
    wide = torch.full((2, 2, 600, 128), nan, dtype=q.dtype, device="cuda")
    wider = wide.clone()
    wide[:, :, pad : pad + 400], wider[:, :, pad : pad + 400] = k, v
    bounds = {"start": ints(pad, pad), "stop": ints(pad + 400, pad + 400)}
    got, _, _ = run(q, wide, wider, causal_offset=400 - tq + pad, kernel=kernel, **bounds)
    same(got, want, "left padding and a longer cache")


def test_a_captured_call_replays_with_longer_caches():
    q, k, v = operands(2, 8, 2, 1, 512, 128, "bfloat16", seed=14)
    stop = ints(100, 300)
    run(q, k, v, stop=stop)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, _, _ = run(q, k, v, stop=stop)
    for lengths in ((100, 300), (511, 128), (129, 512)):
        stop.copy_(ints(*lengths))
        graph.replay()
        same(y, run(q, k, v, stop=ints(*lengths))[0], lengths)


def shown(b: int, heads: int, tq: int, tk: int, seed: int, window: int = 0) -> Any:
    """A mask whose queries have ranges of their own, with holes; or a causal window."""
    i, j = torch.arange(tq, device="cuda").view(tq, 1), torch.arange(tk, device="cuda")
    if window:
        return ((j <= i + tk - tq) & (j > i + tk - tq - window)).expand(b, heads, tq, tk)
    random = torch.Generator("cuda").manual_seed(seed)
    start, length = (torch.randint(tk, (b, heads, tq, 1), generator=random, device="cuda") for _ in range(2))
    holes = torch.rand((b, heads, tq, tk), generator=random, device="cuda") < 0.9
    return (j >= start) & (j < start + length) & (holes | (j == start))


@pytest.mark.parametrize(
    ("dtype", "fma"), [("bfloat16", False), ("float16", False), ("float32", True), ("bfloat16", True)]
)
@pytest.mark.parametrize("d", [128, 33, 256])
@pytest.mark.parametrize("heads", [1, 4])
def test_queries_with_ranges_of_their_own(dtype, fma, d, heads):
    """Batch entries that are apart beside others that are not, whatever lines of the mask are shared."""
    b, hq, tq, tk = 3, 4, 21, 300
    q, k, v = operands(b, hq, 2, tq, tk, d, dtype, seed=31)
    mask = shown(b, heads, tq, tk, 32)
    mask[1] = torch.arange(tk, device="cuda") >= 37  # one range
    mask[0, :, 5] = False
    check(q, k, v, mask=mask, ranged=True, fma=fma)
    check(q, k, v, mask=mask[:1], ranged=True, fma=fma, out="float32")
    added = torch.randn(mask.shape, device="cuda").masked_fill(~mask, torch.finfo(torch.float32).min)
    check(q, k, v, mask=added, ranged=True, fma=fma)
    check(q[:, :, :1], k, v, mask=mask[:, :, :1], ranged=True, fma=fma)
    check(q, k, v, mask=mask[:, :, :1], ranged=True, fma=fma)
    check(q, k, v, mask=shown(b, heads, tq, tk, 0, window=100), ranged=True, fma=fma)


@pytest.mark.parametrize(
    ("heads", "shared", "t", "d", "dtype"), [(8, 2, 1500, 128, "bfloat16"), (4, 4, 700, 64, "float32")]
)
@pytest.mark.parametrize("window", [0, 300])
def test_a_query_knows_nothing_of_masks_of_others(heads, shared, t, d, dtype, window):
    q, k, v = operands(2, heads, shared, t, t, d, dtype, seed=33)
    mask = shown(2, 1 if window else heads, t, t, 34, window)
    whole, _, _ = run(q, k, v, mask=mask, ranged=True)
    for i in (0, 1, 128, 299, 300, 301, 640, t - 1):
        rows = mask[:, :, i : i + 1]
        alone, _, _ = run(q[:, :, i : i + 1], k, v, mask=rows, ranged=True)
        same(alone, whole[:, :, i : i + 1], i)
        first = max(i - window + 1, 0) if window else 0
        end = i + 1 if window else t
        cropped, _, _ = run(
            q[:, :, i : i + 1], k[:, :, first:end], v[:, :, first:end], mask=rows[..., first:end], ranged=True
        )
        same(cropped, whole[:, :, i : i + 1], (i, "cropped"))
    part, _, _ = run(q[1:, :, 600:650], k[1:], v[1:], mask=mask[1:, :, 600:650], ranged=True)
    same(part, whole[1:, :, 600:650], "a chunk")
    if not window:
        kv = slice(1 // (heads // shared), 1 // (heads // shared) + 1)
        one, _, _ = run(q[:, 1:2], k[:, kv], v[:, kv], mask=mask[:, 1:2], ranged=True)
        same(one, whole[:, 1:2], "one head")


def test_a_captured_call_finds_its_ranges():
    q, k, v = operands(2, 8, 2, 200, 512, 128, "bfloat16", seed=35)
    mask = shown(2, 1, 200, 512, 36).contiguous()
    others = [shown(2, 1, 200, 512, 0, window=90), shown(2, 1, 200, 512, 0, window=512), shown(2, 1, 200, 512, 37)]
    run(q, k, v, mask=mask, ranged=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, _, _ = run(q, k, v, mask=mask, ranged=True)
    for other in others:
        mask.copy_(other)
        graph.replay()
        same(y, run(q, k, v, mask=other.contiguous(), ranged=True)[0], "replayed")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_steps_of_gradients_are_those_of_torch(dtype):
    from isogemm.backends.cuda.attention.steps import steps

    n, rows, keys = 6, 40, 1300
    s, dp = draw((n, rows, keys), "float32", 16, True) * 30, draw((n, rows, keys), "float32", 17)
    m, total, delta = (draw((n, rows, 1), "float32", 18 + i) for i in range(3))
    m, total = torch.ceil(m * 20 + 60), total.abs()
    m[0, 0], total[0, 0] = float("-inf"), 0
    hidden, added = draw((1, rows, keys), "float32", 21) > 1, draw((n, 1, keys), "float32", 22)
    c = float(definition.factor(None, 128))
    p, ds = steps(s, m, total, c=c, dtype=DTYPES[dtype], hidden=hidden, added=added, dp=dp, delta=delta)
    t = (s * c + added).masked_fill(hidden, float("-inf"))
    x = (t - torch.where(m == float("-inf"), 0.0, m)).clamp(min=-127.0)
    k = x + float(definition.EXP2_SHIFT)
    r = x - (k - float(definition.EXP2_SHIFT))
    first, *terms = (float(term) for term in definition.EXP2_TERMS["float32"])
    y = torch.full_like(r, first)
    for term in terms:
        y = (y * r).add_(term)
    y = y * ((k.view(torch.int32) & 0xFF) << 23).view(torch.float32)
    want = y * torch.where(total == 0, 0.0, 1 / total)
    same(p, rounded(want, dtype), "p")
    same(ds, rounded((dp - delta) * want, dtype), "ds")


@pytest.mark.parametrize("tk", [640, 649])
def test_a_causal_mask_is_the_causal_rule(tk):
    q, k, v = operands(2, 8, 2, 512, tk, 128, "bfloat16", seed=24)
    query, key = (torch.arange(n, device="cuda") for n in (512, tk))
    mask = (key <= query[:, None] + 100).expand(2, 1, 512, tk).contiguous()
    want = run(q, k, v, causal_offset=100, kernel="hopper")
    for x, y in zip(run(q, k, v, mask=mask, kernel="hopper"), want, strict=True):
        same(x, y, "causal")
    mask[1, 0, 400, 3] = False  # one hole in a leaf that all see
    want = run(q, k, v, mask=mask, kernel="walk")
    for x, y in zip(run(q, k, v, mask=mask, kernel="hopper"), want, strict=True):
        same(x, y, "with a hole")


def test_memory_that_a_call_allocates_is_poisoned():
    from isogemm.backends.cuda.attention import meet
    from isogemm.backends.cuda.attention import run as attention
    from isogemm.backends.cuda.rows import run as rows

    like = torch.zeros(5, 7, dtype=torch.bfloat16, device="cuda")
    for x in (
        torch.empty(9, device="cuda"), attention._empty((2, 3), (3, 1), device="cuda"), rows._like(like),
        rows._strided((4,), (1,), dtype=torch.float16, device="cuda"),
    ):  # fmt: skip
        assert x.isnan().all()
    assert (meet.workspace(100, 0) == 255).all()


def test_an_offset_beyond_all_keys_hides_none():
    q, k, v = operands(1, 2, 1, 40, 300, 64, "bfloat16", 1)
    for want, got in zip(run(q, k, v), run(q, k, v, causal_offset=2**31 - 1), strict=True):
        same(got, want)
