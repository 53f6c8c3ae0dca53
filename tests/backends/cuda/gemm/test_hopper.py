"""The Hopper kernels: what their configurations mean and which are legal; on a GPU, their bits in every corner."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from itertools import product as pairs
from typing import Any

import pytest

from isogemm.backends.cuda.gemm.hopper.config import SHARED, HopperConfig, geometry, group_of, late, resident
from isogemm.backends.cuda.gemm.hopper.family import Hopper, source
from isogemm.backends.cuda.gemm.hopper.model import ranked
from isogemm.contract.spec import Contract
from isogemm.problem.product import Addresses, Product, Strides

HOPPER = Hopper()
CHAIN, LEAF = Contract.parse("tensor_core:sm90/chain"), Contract.parse("tensor_core:sm90/leaf256")
PLAIN = Product(
    512, 768, 1024, "bfloat16", "bfloat16", "bfloat16", CHAIN, Strides(1024, 1), Strides(1, 1024), Strides(768, 1)
)
TEXTS = (
    "128x256x64 s4",
    "w64x16x128 s8",
    "128x192x64 s5 c2x1",
    "64x48x128 s4 c1x2 g4",
    "128x128x64 s4 pp",
    "64x32x256 s2 o2 e",
    "16x16x256 s8",
    "w32x48x256 s5 c2x4 e",
)


@pytest.mark.parametrize("text", TEXTS)
def test_a_configuration_is_its_text(text):
    assert str(HopperConfig.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["", "128x256", "128x256x64", "128x256x64 s4 ", "128x256x64 pp s4", "x128x256x64 s4", "w64x16x128 s8 c2"]
)
def test_other_texts_are_none(text):
    assert HopperConfig.parse(text) is None
    assert not HOPPER.supports(PLAIN, text)


@pytest.mark.parametrize("text", TEXTS)
def test_configurations_of_the_text_are_legal(text):
    assert HOPPER.supports(PLAIN, text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("128x256x64 s5", "shared memory"),
        ("128x260x64 s2", "columns in eights"),
        ("128x264x64 s2", "columns of an instruction"),
        ("256x256x64 s2", "registers"),
        ("192x256x64 s2", "registers of three consumers"),
        ("96x64x64 s4", "rows in blocks of 64"),
        ("8x64x64 s4", "a tile of eight rows"),
        ("16x64x64 s4 pp", "alternate tiles of 16 rows"),
        ("128x64x96 s4", "K in lines of 128 bytes"),
        ("128x64x64 s1", "one stage"),
        ("128x64x64 s4 c3x1", "clusters of three"),
        ("128x64x64 s4 o2", "two blocks of three warpgroups"),
        ("256x128x64 s4 pp", "alternate tiles of 256 rows"),
    ],
)
def test_what_the_machine_cannot_do_is_refused(text, why):
    assert not HOPPER.supports(PLAIN, text), why


@pytest.mark.parametrize(
    "change",
    [
        {"contract": Contract.parse("fma/chain")},
        {"contract": Contract.parse("tensor_core:sm80/chain")},
        {"contract": Contract.parse("tensor_core:sm90/tree4"), "k": 1008},
        {"dtype_a": "float32", "dtype_b": "float32"},
        {"dtype_b": "float16"},
        {"align": 8},
        {"a": Strides(1028, 1)},
        {"a": Strides(2048, 2)},
        {"b": Strides(1, 1020)},
        {"out": Strides(1536, 2)},
        {"k": 0},
        {"m": 0},
        {"accumulate": True, "c": Strides(768, 1), "dtype_c": "bfloat16"},
        {"batch": 3, "a": Strides(1024, 1, 1028)},
    ],
    ids=str,
)
def test_products_that_the_kernels_cannot_read_are_refused(change):
    assert HOPPER.supports(PLAIN, "128x64x64 s4")
    product = replace(PLAIN, **change)
    assert not HOPPER.supports(product, "128x64x64 s4")
    assert HOPPER.configs(product) == ()


def test_more_tiles_than_the_kernel_counts_are_refused():
    items = replace(PLAIN, m=1, n=9, k=64, a=Strides(64, 1), b=Strides(1, 64), out=Strides(16, 1, 16), batch=2**29)
    assert HOPPER.supports(items, "w64x8x64 s4")
    assert not HOPPER.supports(items, "64x8x64 s4")  # two tiles for each item
    assert not HOPPER.supports(replace(items, batch=2**30), "w64x8x64 s4")


@pytest.mark.parametrize("text", ["128x72x64 s4 c2x1", "w64x136x64 s8 c4x1", "64x8x64 s4 c8x1", "16x64x64 s4 c1x8"])
def test_blocks_of_a_cluster_share_any_number_of_rows(text):
    """36, 34, 1 and 2 rows: where 128 bytes lie in shared memory says how they are swizzled, whoever brings them."""
    assert HOPPER.supports(PLAIN, text)


@pytest.mark.parametrize(
    ("m", "n", "k", "text", "walked"),
    [
        (388, 2112, 13952, "w64x136x64 s8", 1),  # three tiles of tokens beside one another, for 33 of weights
        (388, 2112, 13952, "w64x136x64 s8 c4x1", 3),  # blocks of a cluster share lines anyway
        (388, 2112, 13952, "64x136x64 s9", 7),  # the tokens first again: seven tiles of them
        (1200, 1536, 20000, "w128x120x64 s7", 8),  # ten tiles of tokens are too many, and twelve of weights
        (1200, 1536, 20000, "w128x120x64 s7 c2x1", 4),
        (64, 28672, 4096, "w64x64x64 s9", 1),  # one tile of tokens
        (700, 904, 4096, "64x136x64 s9", 11),  # few tiles of weights, but more of them than tokens
        (904, 904, 4096, "64x136x64 s9", 1),
        (3000, 6144, 2048, "128x192x64 s5", 24),  # all of the tokens are 12 MB
        (8192, 28672, 2048, "128x192x64 s5", 48),
        (8192, 8192, 8192, "256x128x64 s4", 8),
        (388, 2112, 13952, "w64x136x64 s8 g5", 5),
    ],
)
def test_blocks_side_by_side_share_what_comes_from_memory(m, n, k, text, walked):
    """A few tiles of tokens are walked for each of the weights; else as many as stay in L2, or eight."""
    product = _narrow(m, n, k, Strides(1, k))
    config = HopperConfig.parse(text)
    assert group_of(product, geometry(product, config)) == walked


@pytest.mark.parametrize(
    ("text", "more"),
    [
        ("w64x24x64 s4", 2048),
        ("w128x128x64 s4 pp", 8192),
        ("w192x40x64 s4", 12288),
        ("w32x24x64 s4", 0),  # behind a short operand there is room that nobody needs
        ("128x128x64 s4 pp", 0),
    ],
)
def test_results_whose_rows_are_contiguous_have_room_to_be_turned(text, more):
    """Of 16 bits; those of float32 are stored as they are."""
    seen = geometry(PLAIN, HopperConfig.parse(text))
    assert seen.shared(PLAIN) - seen.shared(replace(PLAIN, dtype_out="float32")) == more


def test_short_tiles_across_k_have_lines_of_their_own_length():
    """Lines of 16 or 32 rows, which the instruction's other rows repeat: nothing is read behind the ring."""
    across = replace(PLAIN, a=Strides(1, 512))
    for text, line in (("16x64x64 s4", 16), ("32x64x64 s4", 32), ("64x64x64 s4", 64), ("128x64x64 s4", 64)):
        found = geometry(across, HopperConfig.parse(text))
        assert HOPPER.supports(across, text)
        assert (found.x_line, found.beside_the_ring(across)) == (line, 1024)
    along = geometry(PLAIN, HopperConfig.parse("16x64x64 s4"))
    assert along.beside_the_ring(PLAIN) == 1024 + 48 * 128


def _narrow(m: int, n: int, k: int, b: Strides) -> Product:
    return replace(PLAIN, m=m, n=n, k=k, a=Strides(k, 1), b=b, out=Strides(n, 1))


def test_few_tiles_are_offered_short_ones_and_clusters():
    for b in (Strides(1, 25472), Strides(512, 1)):
        listed = [HopperConfig.parse(text) for text in HOPPER.configs(_narrow(56, 512, 25472, b))]
        assert min(c.rows for c in listed) < 64
        assert any(c.cluster > 2 for c in listed)
    both = ranked(_narrow(158, 768, 10432, Strides(1, 10432)))
    assert any(c.cm > 1 and c.cn > 1 for c in both[:12])
    many = ranked(_narrow(2000, 8192, 8192, Strides(1, 8192)))
    assert min(c.rows for c in many) >= 64
    assert all(c.cluster <= 2 for c in many)


def test_tiles_of_128_rows_and_more_are_offered_clusters_in_a_row_where_there_are_few():
    """As cuBLASLt has them: tiles of weights that share 72 or 96 tokens; not where tiles fill more waves."""
    found = {str(c) for c in ranked(_narrow(276, 8192, 8000, Strides(1, 8000)))}
    found |= {str(c) for c in ranked(_narrow(275, 4288, 24896, Strides(1, 24896)))}
    clusters = {c.rows for c in map(HopperConfig.parse, found) if c.cluster in (4, 8)}
    assert clusters >= {128, 192}
    many = ranked(_narrow(2000, 8192, 8192, Strides(1, 8192)))
    assert all(c.cluster <= 2 for c in many)


@pytest.mark.parametrize(("m", "n", "k"), [(200, 2240, 896), (256, 2304, 640), (100, 1024, 4096), (300, 20000, 6144)])
def test_turns_are_offered_where_a_tile_has_another_to_hide_behind(m, n, k):
    """Neighbours of a tile by 8 columns too, of which there may be few enough for one wave."""
    product = _narrow(m, n, k, Strides(1, k))
    waves = {math.prod(geometry(product, c).tiles()) > 132 for c in ranked(product) if c.pingpong}
    assert waves <= {True}
    assert waves or m < 300


@pytest.mark.parametrize(
    ("m", "n", "k", "tile", "offered"),
    [
        (8, 3744, 4096, "w32x8", False),  # 117 blocks: the next launch waits, and there is little to share
        (61, 832, 20672, "w32x16", True),  # 104 blocks, of more rows than 16
        (12, 960, 20672, "w32x8", True),  # 60 blocks
    ],
)
def test_few_rows_are_not_shared_where_the_next_launch_is_to_wait(m, n, k, tile, offered):
    found = [c for c in ranked(_narrow(m, n, k, Strides(1, k))) if str(c).startswith(f"{tile}x")]
    assert found
    assert any(c.cluster > 1 for c in found) == offered


def test_leaves_need_whole_stages_and_room_for_their_totals():
    leaf = replace(PLAIN, contract=LEAF)
    assert HOPPER.supports(leaf, "128x256x64 s3")
    assert not HOPPER.supports(leaf, "128x256x64 s4")
    assert HOPPER.supports(leaf, "64x32x256 s4")
    assert not HOPPER.supports(replace(leaf, contract=Contract.parse("tensor_core:sm90/leaf48")), "64x32x64 s4")


SHAPES = [(m, n, k) for m in (1, 16, 100, 512, 4096) for n, k in ((2560, 9728), (4096, 4096), (28672, 4096))]


# Leaves of the last two are not all whole stages of 128 or of 256 of K.
LISTED = (CHAIN, LEAF, *map(Contract.parse, ("tensor_core:sm90/leaf320", "tensor_core:sm90/tree4")))


@pytest.mark.parametrize("size", SHAPES)
@pytest.mark.parametrize("contract", LISTED, ids=str)
def test_listed_configurations_are_legal_and_fit(size, contract):
    m, n, k = size
    product = replace(PLAIN, m=m, n=n, k=k, a=Strides(k, 1), b=Strides(1, k), out=Strides(n, 1), contract=contract)
    listed = HOPPER.configs(product)
    assert 4 <= len(listed) <= 12
    assert len(set(listed)) == len(listed)
    for text in listed:
        config = HopperConfig.parse(text)
        assert HOPPER.supports(product, text)
        assert str(config) == text
        seen = geometry(product, config)
        assert seen.shared(product) <= SHARED
        tiles_x, tiles_y = seen.tiles()
        assert tiles_x * config.rows * config.cm >= seen.x.size
        assert tiles_y * config.cols * config.cn >= seen.y.size


def test_clusters_stay_inside_their_group_of_multiprocessors():
    assert resident(HopperConfig.parse("128x256x64 s4"), 132) == 132
    assert resident(HopperConfig.parse("128x256x64 s4 c2x1"), 132) == 66
    assert resident(HopperConfig.parse("64x64x64 s4 c2x2"), 132) == 30
    assert resident(HopperConfig.parse("64x64x64 s4 c2x4"), 132) == 15
    assert resident(HopperConfig.parse("64x32x64 s4 o2"), 132) == 264


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("w64x8x128 s12 e", range(67, 118)), ("64x160x64 s8", range(67, 118)), ("w256x8x64 s6", range(67, 118)),
        ("128x128x64 s7", ()), ("64x24x128 s10 c1x4 e", ()), ("64x32x64 s4 o2", ()),
    ],
)  # fmt: skip
def test_the_next_launch_waits_where_its_blocks_would_lie_unevenly(text, blocks):
    """Neither where two launches fit side by side, nor where one leaves nothing free; of 132 multiprocessors."""
    config = HopperConfig.parse(text)
    assert [n for n in range(1, 133) if late(config, n, 132)] == list(blocks)


def test_what_reaches_the_kernel_reaches_its_source():
    config = HopperConfig.parse("128x64x64 s4")
    base = source(PLAIN, geometry(PLAIN, config))
    for change in ({"m": 513}, {"n": 760}, {"k": 1000}):
        other = replace(PLAIN, **change)
        assert source(other, geometry(other, config)) == base
    for change in (
        {"alpha": 2.0},
        {"dtype_bias": "float32"},
        {"dtype_out": "float32"},
        {"contract": LEAF},
        {"a": Strides(1, 512)},
        {"b": Strides(768, 1)},
        {"out": Strides(1, 512)},
        {"out": Strides(770, 1)},
        {"c": Strides(768, 1), "dtype_c": "float32", "beta": 1.0},
        {"c": Strides(768, 1), "dtype_c": "float32", "accumulate": True},
    ):
        other = replace(PLAIN, **change)
        assert source(other, geometry(other, config)) != base, change


# On a GPU. Every family's configurations run elsewhere over plain products; here are this kernel's own corners.
CONFIGS = (
    "128x256x64 s3",
    "128x192x64 s4 c2x1",
    "256x128x64 s3 c1x2",
    "64x24x128 s8",
    "128x128x64 s4 pp",
    "64x64x64 s4 c2x2",
    "w64x16x128 s8 e",
    "w128x160x64 s4 c1x2",
    "64x32x128 s4 o2",
    "192x96x64 s4",
    "16x24x256 s6 c1x2",
    "32x48x128 s4 c2x4",
    "w32x64x256 s2 e",
    "w64x24x128 s6 c1x8",
    "64x72x64 s5 c8x1",  # and shares that are no eights of rows
    "w64x136x64 s4 c4x1",
    "16x64x64 s4 c1x4",
    "w16x64x128 s4 c1x8",
)
# Without room for columns of the second operand that are contiguous, which come in lines of 64.
NARROW = ("64x24x128 s8", "w64x16x128 s8 e", "64x32x128 s4 o2", "16x24x256 s6 c1x2")


def _matrix(rows: int, cols: int, dtype: str, letter: str, seed: int) -> Any:
    """Values on the GPU whose lines start at multiples of 16 bytes."""
    from tests.backends.cuda.device import draw

    shape = (rows, -(-cols // 8) * 8) if letter == "N" else (cols, -(-rows // 8) * 8)
    x = draw(shape, dtype, seed, special=True)
    return x[:, :cols] if letter == "N" else x[:, :rows].T


def _launch(config: str, product: Product, at: Addresses) -> None:
    from tests.backends.cuda.device import torch

    HOPPER.bind(product, config, torch.cuda.current_device())(at, torch.cuda.current_stream().cuda_stream)


def _run(config: str, a: Any, b: Any, out_dtype: str, contract: Contract, **extra: Any) -> Any:
    """a @ b by one configuration, into an output full of NaN, or into the C that it starts from."""
    from tests.backends.cuda.device import DTYPES, NAMES, torch
    from tests.backends.cuda.forced import strides

    c, bias = extra.pop("c", None), extra.pop("bias", None)
    out = torch.full((a.shape[0], b.shape[1]), float("nan"), dtype=DTYPES[out_dtype], device="cuda")
    if extra.pop("in_place", False):
        out = c
    if extra.pop("transposed", False):
        out = torch.full(out.shape[::-1], float("nan"), dtype=out.dtype, device="cuda").T
    product = Product(
        *out.shape, a.shape[1], NAMES[a.dtype], NAMES[b.dtype], out_dtype, contract, strides(a), strides(b),
        strides(out),
        c=None if c is None else strides(c), dtype_c=None if c is None else NAMES[c.dtype],
        dtype_bias=None if bias is None else NAMES[bias.dtype], align=16, **extra,
    )  # fmt: skip
    if not HOPPER.supports(product, config):
        return None
    addresses = (0 if x is None else x.data_ptr() for x in (a, b, out, c, bias))
    _launch(config, product, Addresses(*addresses))
    return out


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("contract", [CHAIN, LEAF], ids=str)
def test_layouts_and_outputs(config, contract):
    from tests.backends.cuda.device import expected, same

    ran = 0
    for (la, lb), (m, n, k), dtype in pairs(
        pairs("NT", "NT"), ((70, 205, 600), (131, 264, 333)), ("bfloat16", "float16")
    ):
        a, b = _matrix(m, k, dtype, la, m), _matrix(k, n, dtype, lb, n)
        for out, transposed in ((dtype, False), ("float32", True), (dtype, True)):
            got = _run(config, a, b, out, contract, transposed=transposed)
            if got is not None:
                same(
                    got,
                    expected(a, b, str(contract), out_dtype=out),
                    f"{config} {la}{lb} {m}x{n}x{k} {out} {transposed}",
                )
                ran += 1
    assert ran


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("contract", [CHAIN, LEAF], ids=str)
def test_epilogues(config, contract):
    from tests.backends.cuda.device import draw, expected, same

    a, b = _matrix(70, 600, "bfloat16", "N", 1), _matrix(600, 205, "bfloat16", "T", 2)
    ran = 0
    for c_dtype, bias_dtype, alpha, beta in (
        ("float32", "bfloat16", 1.0, 1.0),
        ("bfloat16", None, -1.3, 0.3),
        (None, "float32", 2.5, 0.0),
    ):
        c = None if c_dtype is None else draw((205, 70), c_dtype, 3, special=True).T
        bias = None if bias_dtype is None else draw((205,), bias_dtype, 4, special=True)
        for out in ("float32", "bfloat16", "float16"):
            got = _run(config, a, b, out, contract, c=c, bias=bias, alpha=alpha, beta=beta)
            if got is not None:
                want = expected(a, b, str(contract), out_dtype=out, added=c, bias=bias, alpha=alpha, beta=beta)
                same(got, want, f"{config} {out} {c_dtype} {bias_dtype}")
                ran += 1
    assert ran


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("contract", [CHAIN, LEAF], ids=str)
def test_walks_that_start_from_c(config, contract):
    from tests.backends.cuda.device import draw, expected, same

    a, b = _matrix(70, 600, "bfloat16", "T", 1), _matrix(600, 205, "bfloat16", "N", 2)
    c = draw((70, 205), "float32", 3, special=True)
    ran = 0
    for given in (c, c.T.contiguous().T):
        got = _run(config, a, b, "float32", contract, c=given, accumulate=True)
        if got is not None:
            same(got, expected(a, b, str(contract), c=c, out_dtype="float32"), config)
            ran += 1
    assert bool(ran) != (config in NARROW)


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("size", [(205, 333), (264, 456)])
def test_what_tiles_at_the_end_have_in_common_is_added_once(config, size, monkeypatch):
    """Those that would reach beyond it are walked further back, and blocks of a cluster that have nothing are as well.

    Into C, where what one tile stores another may not have read: by a single cluster, whose tiles follow one another.
    """
    from tests.backends.cuda.device import draw, expected, same

    monkeypatch.setattr("isogemm.backends.cuda.gemm.hopper.family.resident", lambda *_: 1)
    m, n = size
    a, b = _matrix(m, 600, "bfloat16", "N", 1), _matrix(600, n, "bfloat16", "T", 2)
    bias = draw((n,), "float32", 4, special=True)
    for dtype, accumulate in (("float32", True), ("float32", False), ("bfloat16", False)):
        added = {} if accumulate else {"alpha": 2.0, "beta": 1.0, "bias": bias}
        for c in (draw((m, n), dtype, 3, special=True), draw((n, m), dtype, 3, special=True).T):
            want = expected(a, b, str(CHAIN), out_dtype=dtype, **({"c": c} if accumulate else {"added": c}), **added)
            got = _run(config, a, b, dtype, CHAIN, c=c.clone(), accumulate=accumulate, in_place=True, **added)
            same(got, want, f"{config} {dtype} {accumulate} {c.stride()}")


@pytest.mark.gpu
@pytest.mark.parametrize("config", ["w64x8x128 s12 e", "w64x8x256 s6", "w64x8x128 s12 pp e", "w64x32x64 s3"])
def test_launches_that_wait_for_one_another_have_what_the_one_before_left(config):
    """Of 72 and 80 blocks, each reading what the last one wrote; of more K than a ring holds, and of less.

    The other kernel never waits so. One that waits too long never ends; too short, and it only takes longer.
    """
    from tests.backends.cuda.device import draw, same, torch
    from tests.backends.cuda.forced import strides

    widths = (264, 4608, 5120, 4608, 40, 5120)
    weights = [draw((n, k), "bfloat16", n + k) / k**0.5 for k, n in pairwise(widths)]
    rows = [torch.empty((8, n), dtype=torch.bfloat16, device="cuda") for n in widths[1:]]
    found = []
    for text in ("128x128x64 s7", config):
        for out in rows:
            out.fill_(float("nan"))
        x, calls = draw((8, widths[0]), "bfloat16", 1), []
        for w, out in zip(weights, rows, strict=True):
            product = replace(
                PLAIN, m=8, n=w.shape[0], k=w.shape[1], a=strides(x), b=strides(w.T), out=strides(out), align=16
            )
            calls.append((HOPPER.bind(product, text, torch.cuda.current_device()), x, w, out))
            x = out
        for launch, a, w, out in calls:
            launch(Addresses(a.data_ptr(), w.data_ptr(), out.data_ptr()), torch.cuda.current_stream().cuda_stream)
        found.append([out.clone() for out in rows])
    for one, other in zip(*found, strict=True):
        assert not torch.isnan(one).any()
        same(other, one, config)


@pytest.mark.gpu
@pytest.mark.parametrize("contract", [CHAIN, LEAF], ids=str)
@pytest.mark.parametrize(
    "config", ["192x32x64 s8 c1x8 e", "w64x96x64 s7 c4x1", "64x24x128 s8 c1x8", "128x72x64 s5 c2x1 pp"]
)
def test_blocks_of_a_cluster_leave_when_nobody_arrives_there_any_more(config, contract):
    """A hundred launches in a row. Blocks that only met before they left were gone when arrivals came: the first of
    these configurations ended the program, each time.
    """
    from tests.backends.cuda.device import draw, same, torch
    from tests.backends.cuda.forced import strides

    x, w = draw((179, 4608), "bfloat16", 1), draw((3584, 4608), "bfloat16", 2)
    outs = [torch.full((179, 3584), float("nan"), dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    product = replace(
        PLAIN, m=179, n=3584, k=4608, a=strides(x), b=strides(w.T), out=strides(outs[0]), align=16, contract=contract
    )  # fmt: skip
    for text, out, times in (("128x128x64 s4", outs[0], 1), (config, outs[1], 100)):
        launch = HOPPER.bind(product, text, torch.cuda.current_device())
        for _ in range(times):
            launch(Addresses(x.data_ptr(), w.data_ptr(), out.data_ptr()), torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    assert not torch.isnan(outs[0]).any()
    same(outs[1], outs[0], config)
