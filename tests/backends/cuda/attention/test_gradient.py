"""Attention's gradients without scores in memory: compiled for an H200 that is not there, and their trial on a host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.backends.cuda.attention.test_admit import TYPES, at
from tests.backends.cuda.compiled import H200, Kernels, kernels
from tests.planner.fakes import FakeMachine

from isogemm.backends.cuda.attention.case import Strided
from isogemm.backends.cuda.attention.gradient import run
from isogemm.backends.cuda.attention.gradient.run import KERNEL, PAIRS, Back, BackCase
from isogemm.backends.cuda.attention.gradient.trial import by_definition
from isogemm.backends.cuda.driver import facts
from isogemm.backends.cuda.gemm.tile import family
from isogemm.base.seen import Seen
from isogemm.contract.attention import factor, gradient_steps
from isogemm.contract.reference import epilogue, evaluate
from isogemm.contract.rows import lane_sum
from isogemm.planner.bench import Bench

__all__ = ["kernels"]  # the fixture


def laid(*shape: int) -> Strided:
    _, heads, tokens, size = shape
    return Strided(shape, (heads * tokens * size, tokens * size, size, 1))


def pose(d: int = 128, group: int = 2, dtype: str = "bfloat16", **rest: Any) -> BackCase:
    q, k = laid(2, 2 * group, 512, d), laid(2, 2, 512, d)
    chosen: dict[str, Any] = {"offset": 0, "starts": False, "stops": False, "arithmetic": "tensor_core:sm90"}
    c, scale = float(factor(None, d)), d**-0.5
    return BackCase(q, k, k, *[q.strides[:3]] * 3, *[dtype] * 3, c, scale, **(chosen | rest), device=0)


@pytest.mark.parametrize("case", [pose(), pose(64, 1, "float16"), pose(80, 3, offset=None, starts=True, stops=True)])
def test_kernels_take_blocks_of_16_and_round_each_step(kernels: Kernels, case: BackCase):
    for pair in KERNEL.configs(case):
        kernels.loaded.clear()
        KERNEL.bind(case, pair, 0)
        stats, keys, rows = kernels.loaded
        assert [k.name.rsplit("_", 1)[1] for k in (stats, keys, rows)] == ["stats", "keys", "rows"]
        kind = {"bfloat16": "bf16", "float16": "f16"}[case.dtype]
        for kernel in (keys, rows):
            products = kernel.count(r"wgmma\.mma_async\.sync|\bmma\.sync")
            assert products == kernel.count(rf"wgmma\.mma_async\.sync\S*k16\.f32\.{kind}\.{kind}") > 0
            assert kernel.count(r"fma\.\S*f32|ex2\.approx|\.ftz\b|div\.full") == 0
            assert kernel.count(r"max\.NaN\.f32") > 0
        assert stats.spilled == rows.spilled == 0
        assert keys.spilled <= 512


def test_a_gpu_before_hopper_gets_kernels_without_its_instructions(kernels: Kernels, monkeypatch):
    ampere = replace(H200, name="NVIDIA A100", capability=(8, 0))
    monkeypatch.setattr(facts, "device", lambda _: ampere)
    monkeypatch.setattr(family, "facts", lambda _: ampere)
    case = pose(64, 1, arithmetic="tensor_core:sm80")
    KERNEL.bind(case, PAIRS[False][0], 0)
    assert all(kernel.count("griddepcontrol|wgmma") == 0 for kernel in kernels.loaded)
    assert len(kernels.loaded) == 3


@pytest.mark.parametrize(
    ("case", "served"),
    [
        (pose(), True),
        (pose(16, 5), True),
        (pose(100), False),
        (pose(256), False),
        (pose(arithmetic="fma"), False),
        (pose(arithmetic="tensor_core:native"), False),
    ],
)
def test_what_is_served(case: BackCase, served: bool):
    assert bool(KERNEL.configs(case)) is served


def test_code_tells_apart_what_is_compiled_in(kernels: Kernels):
    one = pose()
    pair = PAIRS[True][0]
    others = [
        pose(64), pose(group=1), pose(dtype="float16"), pose(offset=None), pose(starts=True), pose(stops=True),
        pose(112), one._replace(dtype_wide="float32"), one._replace(dtype_y="float32"),
    ]  # fmt: skip
    texts = [KERNEL.code(case, pair) for case in (one, *others)]
    texts.append(KERNEL.code(one, pair._replace(keys=pair.keys._replace(stages=7))))
    assert len(set(texts)) == len(texts)
    assert KERNEL.code(pose(offset=3), pair) == texts[0]


class Host:
    """The kernels' work in NumPy, from addresses; a fault changes what they find, an order what they add first."""

    def __init__(self, fault: Any = None, keys: Any = None, rows: Any = None) -> None:
        self.fault, self.keys, self.rows = fault, keys, rows

    def bind(self, case: BackCase, *_: Any) -> Any:
        return lambda stream, *places: self.run(case, *places)

    def run(self, case: BackCase, *places: int) -> None:
        b, heads, tq = case.q.shape[:3]
        tk, group, hkv = case.k.shape[2], case.group, case.k.shape[1]
        shaped = (
            case.q,
            case.k,
            case.v,
            *[Strided((b, heads, tq, case.dv), (*x, 1)) for x in (case.dy, case.wide, case.y)],
        )
        kinds = (*[case.dtype] * 4, case.dtype_wide, case.dtype_y)
        q, k, v, dy, wide, y = (at(p, *x, t) for p, x, t in zip(places, shaped, kinds, strict=False))
        line = (b, heads, tq), (heads * tq, tq, 1)
        m, total = (at(p, *line, "float32") for p in places[6:8])
        start, stop = (at(p, (b,), (1,), "int32") if p else None for p in places[8:10])
        outs = [at(p, *x, case.dtype) for p, x in zip(places[11:], (case.q, case.k, case.v), strict=True)]
        for i, h in np.ndindex(b, hkv):
            mine = slice(h * group, h * group + group)
            q1, dy1, wide1, y1, m1, l1 = (
                np.moveaxis(x[i, mine], 0, 1).reshape(tq * group, *x.shape[3:]) for x in (q, dy, wide, y, m, total)
            )
            key, row = np.arange(tk), np.arange(tq * group)[:, None]
            far = np.zeros(tk, bool)
            if start is not None:
                far |= key < start[i]
            if stop is not None:
                far |= key >= stop[i]
            hidden = far | (row < 0) if case.offset is None else far | (key > row // group + case.offset)
            k1, v1 = (np.where(far[:, None], 0, x[i, h]).astype(x.dtype) for x in (k, v))
            self.one(case, (q1, k1, v1, dy1), (wide1, y1, m1, l1), hidden, outs, (i, h, mine))
        if self.fault:
            self.fault(outs)

    def one(self, case: BackCase, operands: Any, row: Any, hidden: Any, outs: Any, where: Any) -> None:
        (q, k, v, dy), (wide, y, m, total), (i, h, mine) = operands, row, where
        chain = f"{case.arithmetic}/chain"
        with np.errstate(all="ignore"):
            delta = np.array([lane_sum(x) for x in wide.astype(np.float32) * y.astype(np.float32)])
        p, ds = gradient_steps(
            evaluate(q, k.T, chain)[None], m[None], total[None], c=case.c, dtype=TYPES[case.dtype], hidden=hidden,
            dp=evaluate(dy, v.T, chain)[None], delta=delta[None],
        )  # fmt: skip
        assert ds is not None
        keys, rows = (np.arange(n) if f is None else f(n) for f, n in ((self.keys, len(k)), (self.rows, len(q))))
        found = (
            epilogue(evaluate(ds[0][:, keys], k[keys], chain), alpha=case.scale, out_dtype=q.dtype),
            epilogue(evaluate(ds[0][rows].T, q[rows], chain), alpha=case.scale, out_dtype=q.dtype),
            epilogue(evaluate(p[0][rows].T, dy[rows], chain), out_dtype=q.dtype),
        )
        outs[0][i, mine] = np.moveaxis(found[0].reshape(-1, case.group, case.d), 1, 0)
        outs[1][i, h], outs[2][i, h] = found[1:]


def defined(case: Any, held: dict[str, np.ndarray], arithmetic: str) -> Any:
    """The definition's gradients of a trial's operands, which are drawn from the case: computed once for all hosts."""
    key = case, held["q"].dtype, arithmetic
    if key not in _defined:
        _defined[key] = by_definition(case, held, arithmetic)
    return _defined[key]


_defined: dict[Any, Any] = {}


def tried(monkeypatch: pytest.MonkeyPatch, case: BackCase, host: Host) -> str:
    monkeypatch.setattr(run, "by_definition", defined)
    monkeypatch.setattr(Back, "bind", lambda self, case, config, device: host.bind(case))
    return KERNEL.trial(Bench(FakeMachine()), case, PAIRS[case.d > 64][0])


CASES = [
    pose(),
    pose(64, 1, "float16", offset=None),
    pose(16, 3, starts=True, stops=True),
    pose(48, 4, offset=None, stops=True)._replace(dtype_wide="float32", dtype_y="float32"),
]


@pytest.mark.parametrize("case", CASES)
def test_right_kernels_pass(monkeypatch, case):
    assert tried(monkeypatch, case, Host()) == ""


def swapped(n: int) -> Any:
    """The second block of 16 and the third have traded places."""
    return np.r_[0:16, 32:48, 16:32, 48:n]


def quads(n: int) -> Any:
    """Four in a row to a thread: those of two blocks of 16 take turns."""
    order = np.arange(n)
    for first in range(0, n - 31, 32):
        order[first : first + 32] = order[first : first + 32].reshape(8, 2, 2).transpose(1, 0, 2).ravel()
    return order


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("order", [swapped, quads])
@pytest.mark.parametrize("walk", ["keys", "rows"])
def test_another_order_is_found(monkeypatch, case, order, walk):
    found = tried(monkeypatch, case, Host(**{walk: order}))
    assert f" differ, first {'dq' if walk == 'keys' else 'dk'}" in found


def test_orders_of_dv_are_found(monkeypatch):
    def right_dk(outs: Any) -> None:
        outs[1][...] = kept[-1]

    case, kept = CASES[1], []
    plain = Host(lambda outs: kept.append(outs[1].copy()))
    host = Host(right_dk, rows=swapped)

    def bind(self: Any, each: Any, *_: Any) -> Any:
        def run(*places: Any) -> None:
            plain.bind(each)(*places)
            host.bind(each)(*places)

        return run

    monkeypatch.setattr(Back, "bind", bind)
    assert " differ, first dv" in KERNEL.trial(Bench(FakeMachine()), case, PAIRS[False][0])


@pytest.mark.parametrize("which", [0, 1, 2])
def test_one_wrong_bit_is_found(monkeypatch, which):
    def fault(outs: Any) -> None:
        outs[which].view(np.uint16)[-1, -1, -1, -1] ^= 1

    assert " differ, first d" in tried(monkeypatch, CASES[1], Host(fault))


@pytest.fixture
def launches(monkeypatch):
    """`gradients` of tensors of the host: what it was asked for, and the addresses of each launch."""
    torch = pytest.importorskip("torch")
    asked, launched = [], []

    def found(case: BackCase):
        asked.append(case)
        return (lambda stream, *places: launched.append(places)), case.width

    monkeypatch.setattr(run, "_planned", found)
    monkeypatch.setattr(run, "_plans", Seen(4))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    return torch, asked, launched


def test_a_call_like_one_before_is_a_look_up(launches):
    torch, asked, launched = launches
    room = torch.zeros(2 * 4 * 32 * 64 + 8, dtype=torch.bfloat16)
    whole, moved = (room[at:][: 2 * 4 * 32 * 64].view(2, 4, 32, 64) for at in (0, 4))
    k, y, m = torch.zeros_like(whole), torch.zeros_like(whole), torch.zeros(2, 4, 32)
    options = {"c": 0.25, "scale": 0.125, "arithmetic": "tensor_core:sm90"}

    def called(q, **more):
        assert run.gradients(y, q, k, k, y, m, m, **(options | more)) is not None
        return launched[-1]

    first, again = called(whole), called(whole)
    assert len(asked) == 1
    assert first[:8] == again[:8] == tuple(x.data_ptr() for x in (whole, k, k, y, y, y, m, m))
    assert called(moved)[0] % 16 == 0  # a copy
    assert launched[-1][0] != moved.data_ptr()
    assert called(whole.mT.contiguous().mT)[0] % 16 == 0
    assert len(asked) == 1
    for more in ({"causal_offset": 0}, {"c": 0.5}, {"scale": 0.5}, {"start": m[:, 0, 0].int()}, {"arithmetic": "x"}):
        called(whole, **more)
    assert len(asked) == 6
    assert [case.offset for case in asked[:2]] == [None, 0]


def test_rows_that_lie_too_far_apart_for_32_bits_are_copied():
    """The kernel adds steps of heads and tokens in a tile as 32-bit numbers."""
    torch = pytest.importorskip("torch")
    for steps in ((64, 2**30, 64, 1), (64, 64, 2**26, 1)):
        far = torch.empty_strided((2, 6, 50, 64), steps, dtype=torch.bfloat16, device="meta")
        near = run._near(far, 3)
        assert near.shape == far.shape
        assert near.stride() == (6 * 50 * 64, 64, 6 * 64, 1)
        assert run._near(near, 3) is near
    heads = torch.empty_strided((2, 6, 50, 64), (64, 2**30, 64, 1), dtype=torch.bfloat16, device="meta")
    assert run._near(heads, 1) is heads  # each head of q has keys of its own


def test_offsets_and_lazy_negations(launches):
    torch, asked, launched = launches
    q, m = torch.zeros(2, 4, 32, 64, dtype=torch.bfloat16), torch.zeros(2, 4, 32)
    wide = torch.ones(2, 4, 32, 64)
    options = {"c": 0.25, "scale": 0.125, "arithmetic": "tensor_core:sm90"}
    run.gradients(wide, q, q, q, q, m, m, causal_offset=2**31 - 1, **options)
    assert asked[0].offset == 32  # a number of 32 bits, to which a query's is added
    run.gradients(wide, q, q, q, q, m, m, causal_offset=2**31 - 1, **options)
    assert launched[-1][4] == wide.data_ptr()
    run.gradients(torch._neg_view(wide), q, q, q, q, m, m, causal_offset=2**31 - 1, **options)
    assert launched[-1][4] != wide.data_ptr()  # memory that holds the opposite
    assert len(asked) == 1
