"""Attention's kernels are admitted by their bits: a trial's operands, on kernels of the host, right and wrong ones."""

from __future__ import annotations

import ctypes
import itertools
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.backends.cuda.attention.test_compile import masked, pose
from tests.backends.cuda.compiled import H200
from tests.planner.fakes import FakeMachine

from isogemm.backends.cuda.attention import ranged as attention_ranged
from isogemm.backends.cuda.attention import steps as attention_backward
from isogemm.backends.cuda.attention.case import AttentionCase, Strided
from isogemm.backends.cuda.attention.choose import KERNELS, admitted_run, ranged_run, ranked
from isogemm.backends.cuda.attention.few import _each
from isogemm.backends.cuda.attention.trial import _mask, contents, posed
from isogemm.backends.cuda.driver import facts as device
from isogemm.backends.cuda.driver import machine
from isogemm.contract.attention import LEAF, attention, factor, gradient_steps, ranges
from isogemm.errors import ContractError, DeviceError
from isogemm.planner.admission import Admissions
from isogemm.planner.records import Records

TYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32, "bool": bool, "int32": np.int32}


def at(address: int, shape: Any, strides: Any, dtype: str) -> np.ndarray:
    kind = np.dtype(TYPES[dtype])
    count = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    flat = np.frombuffer((ctypes.c_char * (count * kind.itemsize)).from_address(address), kind)
    return np.lib.stride_tricks.as_strided(flat, shape, [s * kind.itemsize for s in strides])


_heads: dict[Any, tuple[np.ndarray, ...]] = {}


def computed(case: AttentionCase, operands: list[np.ndarray], mask: Any, ends: list[Any]) -> list[np.ndarray]:
    """[y, m, l] by the definition, head after head; what was computed once is kept."""
    q, k, v = operands
    out, stats = np.empty((*q.shape[:3], case.dv), TYPES[case.dtype_out]), np.empty((2, *q.shape[:3]), np.float32)
    for i, h in np.ndindex(case.batch, case.heads):
        one = [x[i : i + 1, n : n + 1] for x, n in ((q, h), (k, h // case.group), (v, h // case.group))]
        seen, bounds = None if mask is None else mask[i, h], [None if x is None else x[i : i + 1] for x in ends]
        parts = [None if x is None else x.tobytes() for x in (*one, seen, *bounds)]
        key = (*parts, case.fma, case.offset, case.dtype, case.dtype_out)
        if key not in _heads:
            _heads[key] = attention(
                *one, arithmetic="fma" if case.fma else "tensor_core:sm90", mask=seen, causal_offset=case.offset,
                start=bounds[0], stop=bounds[1], out_dtype=TYPES[case.dtype_out],
            )  # fmt: skip
        y, m, total = _heads[key]
        out[i, h], stats[0, i, h], stats[1, i, h] = y[0, 0], m[0, 0], total[0, 0]
    return [out, stats[0], stats[1]]


class Host:
    """Kernels that are the definition, on this process's memory; `faults` change their results."""

    def __init__(self) -> None:
        self.faults: dict[str, Any] = {}
        self.order: Any = None
        self.runs: list[tuple[str, AttentionCase]] = []
        self.admissions: Any = None

    def bind(self, case: AttentionCase, kernel: str) -> Any:
        def run(stream: int, q: int, k: int, v: int, mask: int, start: int, stop: int, y: int, stats: int) -> None:
            self.runs.append((kernel, case))
            assert bool(stats) == case.stats
            assert case.c == float(factor(None, case.d))
            operands = [at(a, x.shape, x.strides, case.dtype) for a, x in zip((q, k, v), case.operands, strict=True)]
            b, heads, tq, tk = case.batch, case.heads, case.tq, case.tk
            seen = None if not mask else at(mask, (b, heads, tq, tk), case.mask, case.dtype_mask or "")
            ends = [np.frombuffer((ctypes.c_int32 * b).from_address(p), np.int32) if p else None for p in (start, stop)]
            if self.order is not None and kernel in self.faults:
                operands = self.order(*operands)
            made = computed(case, operands, seen, ends)
            if kernel in self.faults:
                self.faults[kernel](case, made)
            out = at(y, made[0].shape, [s // made[0].itemsize for s in made[0].strides], case.dtype_out)
            out[...] = made[0]
            if stats:
                at(stats, (2, b, heads, tq), (b * heads * tq, heads * tq, tq, 1), "float32")[...] = np.stack(made[1:])

        return run


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Host:
    found = Host()
    found.admissions = Admissions(FakeMachine(), Records(tmp_path))
    monkeypatch.setattr(device, "device", lambda ordinal: H200)
    for name, kernel in KERNELS.items():
        monkeypatch.setattr(type(kernel), "bind", lambda self, case, config, ordinal, n=name: found.bind(case, n))
    monkeypatch.setattr(machine, "_admissions", {0: found.admissions})
    return found


CASES = {
    "hopper": (pose(tq=300), "hopper"),
    "hopper 64 bool": (masked(pose(tq=300, d=64, dtype="float16", offset=None), "bool"), "hopper"),
    "few": (pose(tq=1, tk=4096), "few"),
    "few of many heads": (pose(tq=1, tk=2048, b=40), "few"),
    "few of one leaf": (pose(tq=8, tk=100, group=4, starts=True), "few"),
    "few added": (masked(pose(tq=5, tk=1200, d=64, offset=None), "float32"), "few"),
    "split": (pose(tq=3, tk=2500, aligned=False), "split"),
    "leaf": (masked(pose(tq=1, tk=100, d=80, aligned=False), "bfloat16"), "leaf"),
    "walk": (pose(tq=129, tk=300, d=100, aligned=False, starts=True, stats=False), "walk"),
    "walk of 256": (pose(tq=700, d=256, dtype_out="float32"), "walk"),
    "no key": (pose(tq=3, tk=0), "walk"),
    "one key": (pose(tq=1, tk=1, d=33), "leaf"),
    "fma": (pose(dtype="float32"), "fma"),
    "fma of 33": (pose(d=33, arithmetic="fma", starts=True), "fma"),
}


def text(case: AttentionCase, kernel: str) -> str:
    """Of a kernel's code."""
    return KERNELS[kernel].configs(case)[0]


def tried_now(host: Host, kernel: str, case: AttentionCase) -> str:
    return KERNELS[kernel].trial(host.admissions.bench, case, text(case, kernel))


@pytest.mark.parametrize("name", CASES)
def test_right_kernels_are_admitted_on_operands_of_their_code(host, name):
    case, kernel = CASES[name]
    assert ranked(case)[0] == kernel
    assert tried_now(host, kernel, case) == ""
    tried = [c for _, c in host.runs]
    assert {text(c, kernel) for c in tried} == {text(case, kernel)}
    assert sum(c.batch * c.heads * c.tq * c.tk for c in tried) < 20_000_000
    if kernel in ("hopper", "few", "fma"):
        assert {c.starts for c in tried} == {c.stats for c in tried} == {False, True}
        assert {c.group for c in tried} >= {2, 3} or kernel == "few"
        assert any(c.tk % LEAF for c in tried)
        assert any(c.leaves > 1 for c in tried)
        whole = "WHOLE=1" in text(case, kernel)
        assert any(c.leaves == 1 for c in tried) == whole
    if kernel == "hopper" and not case.masks:
        assert any(c.batch * c.heads * -(-c.tq // 128) > H200.multiprocessors for c in tried)
    if kernel == "few":
        assert any(1 < _each(c) <= c.leaves for c in tried)
    if kernel == "few" and case.leaves > 16:
        assert any(c.leaves > 64 for c in tried)  # the meeting takes 64 at once


@pytest.mark.parametrize("name", ["hopper", "hopper 64 bool"])
def test_a_trial_reaches_both_ways_to_powers(host, name):
    """A leaf of 128 keys and 16 rows, a warp's, all of it seen: powers less than 2**124 apart take the short way."""
    case, kernel = CASES[name]
    short = long = 0
    for each in posed(KERNELS[kernel], case):
        held = contents(each, _mask)
        for item, head in np.ndindex(each.batch, each.heads):
            q, k = (x.astype(np.float64) for x in (held.q[item, head], held.k[item, head // each.group]))
            begin = 0 if held.start is None else int(held.start[item])
            end = each.tk if held.stop is None else min(int(held.stop[item]), each.tk)
            for row, first in itertools.product(range(0, each.tq - 15, 16), range(begin, end - LEAF + 1, LEAF)):
                block = row // 64 * 64  # of a warpgroup
                whole = end if each.offset is None else min(end, block + each.offset + 1)
                seen = held.mask is None or held.mask[item, head, row : row + 16, first : first + LEAF].all()
                if first + LEAF > whole or not seen:
                    continue
                with np.errstate(all="ignore"):
                    t = q[row : row + 16] @ k[first : first + LEAF].T * each.c
                    fits = (t.max(1) >= 0).all() and (np.ceil(t.max(1)) - t.min(1) <= 124).all()
                short, long = short + fits, long + (not fits)
    assert short >= 4
    assert long >= 4


def first_bit(case: AttentionCase, made: list[np.ndarray]) -> None:
    words = made[0].view(f"u{made[0].itemsize}")
    words[-1, -1, -1, -1] ^= 1


def last_columns(case: AttentionCase, made: list[np.ndarray]) -> None:
    made[0][..., 72:] = made[0][..., :1]  # a tail of the head that is not computed


def other_head(case: AttentionCase, made: list[np.ndarray]) -> None:
    if case.heads > 60:
        made[0][1, 50] = made[0][1, 49]


def second_leaf(case: AttentionCase, made: list[np.ndarray]) -> None:
    made[2][...] = np.nextafter(made[2], np.float32(0)) if case.leaves > 1 else made[2]


def another_nan(case: AttentionCase, made: list[np.ndarray]) -> None:
    words = made[0].view(f"u{made[0].itemsize}")
    words[np.isnan(made[0].astype(np.float32))] = 0x7FC0


def unwritten(case: AttentionCase, made: list[np.ndarray]) -> None:
    if case.tq > 64:
        made[0].view(f"u{made[0].itemsize}")[..., 64:, :] = 0x7FC1


FAULTS = [first_bit, last_columns, other_head, second_leaf, another_nan, unwritten]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_a_wrong_kernel_is_not_used_and_the_next_one_serves(host, fault):
    case = pose(tq=300)
    host.faults["hopper"] = fault
    admitted_run(case)
    verdicts = {k.name: (k.admission.state, k.admission.detail) for k in host.admissions.known()}
    assert verdicts["attention hopper"][0] == "refused"
    assert " differ, first " in verdicts["attention hopper"][1]
    assert verdicts["attention walk"] == ("admitted", "")
    assert ranked(case)[1] == "walk"


def other_blocks(q: Any, k: Any, v: Any) -> list[Any]:
    return [q[..., ::-1], k[..., ::-1], v]


def two_blocks(q: Any, k: Any, v: Any) -> list[Any]:
    at = np.r_[0:16, 32:48, 16:32, 48 : q.shape[-1]]
    return [q[..., at], k[..., at], v]


def other_keys(q: Any, k: Any, v: Any) -> list[Any]:
    at = np.r_[112:128, 0:112, 128 : k.shape[2]]
    return [q, k[:, :, at], v[:, :, at]]


def other_leaves(q: Any, k: Any, v: Any) -> list[Any]:
    at = np.r_[0:256, 384:512, 256:384, 512 : k.shape[2]]
    return [q, k[:, :, at], v[:, :, at]]


def last_keys(q: Any, k: Any, v: Any) -> list[Any]:
    at = np.r_[0:256, 272:288, 256:272, 288 : k.shape[2]]
    return [q, k[:, :, at], v[:, :, at]]


@pytest.mark.parametrize("stats", [True, False])
@pytest.mark.parametrize(
    "order", [other_blocks, two_blocks, other_keys, other_leaves, last_keys], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_another_order_is_found(host, dtype, order, stats):
    """By sums that lose bits: results of 16 bits alone would show few of them."""
    tk, kernel = (1100, "split") if order is other_leaves else (300, "walk")
    case = pose(tq=30, tk=tk, dtype=dtype, offset=None, stats=stats, stops=False, d=100, aligned=False)
    host.faults[kernel], host.order = (lambda case, made: None), order
    found = tried_now(host, kernel, case)
    assert " differ, first y" in found
    assert int(re.search(r"(\d+) of", found).group(1)) > 20


def quads(q: Any, k: Any, v: Any) -> list[Any]:
    """Four keys in a row to a thread: those of two blocks of 16 take turns."""
    at = np.arange(k.shape[2])
    for first in range(0, len(at) - 31, 32):
        keys = at[first : first + 32].reshape(8, 2, 2)
        at[first : first + 32] = keys.transpose(1, 0, 2).ravel()
    return [q, k[:, :, at], v[:, :, at]]


@pytest.mark.parametrize(("tq", "group"), [(1, 1), (1, 8), (4, 2), (7, 2)])
def test_another_order_is_found_in_few_rows(host, tq, group):
    case = pose(tq=tq, tk=300, group=group, offset=None, stats=False, stops=False, d=100, aligned=False)
    host.faults["walk"], host.order = (lambda case, made: None), quads
    found = tried_now(host, "walk", case)
    assert " differ, first y" in found


def ranged(**changes: Any) -> AttentionCase:
    """A call whose mask has lines of its own for each query, but not for each head."""
    return masked(pose(offset=None, stops=False, **changes), "bool")


@pytest.fixture
def host_ranged(host: Host, monkeypatch: pytest.MonkeyPatch) -> Host:
    """Kernels for ranges that are the definition; entries of one range are computed by `main`."""

    def bind(case: AttentionCase, main: Any) -> Any:
        def run(stream: int, q: int, k: int, v: int, mask: int, start: int, stop: int, y: int, stats: int) -> None:
            operands = [at(a, x.shape, x.strides, case.dtype) for a, x in zip((q, k, v), case.operands, strict=True)]
            seen = at(mask, (case.batch, case.heads, case.tq, case.tk), case.mask, "bool")
            ends = host.ranges(seen)
            made = list(attention(
                *operands, arithmetic="fma" if case.fma else "tensor_core:sm90", mask=seen, start=ends[0], stop=ends[1],
                out_dtype=TYPES[case.dtype_out],
            ))  # fmt: skip
            if "ranged" in host.faults:
                host.faults["ranged"](case, made)
            at(y, made[0].shape, [s // made[0].itemsize for s in made[0].strides], case.dtype_out)[...] = made[0]
            b, heads, tq = made[1].shape
            if stats:
                at(stats, (2, b, heads, tq), (b * heads * tq, heads * tq, tq, 1), "float32")[...] = np.stack(made[1:])

        return run

    host.ranges = ranges
    monkeypatch.setattr(attention_ranged.RangedAttention, "launch", lambda self, case: bind(case, self.main))
    return host


@pytest.mark.parametrize(
    "case", [ranged(tq=30, tk=300, d=100), ranged(tq=1, tk=300, d=33, arithmetic="fma", group=1)], ids=str
)
def test_ranges_of_masks_are_tried(host_ranged, case):
    bench, kernel = host_ranged.admissions.bench, attention_ranged.RangedAttention()
    assert kernel.trial(bench, case, "") == ""
    for fault in (first_bit, second_leaf):
        host_ranged.faults["ranged"] = fault
        assert " differ, first " in kernel.trial(bench, case, "")
    host_ranged.faults.clear()
    host_ranged.ranges = (
        lambda seen: tuple(  # of each batch entry, as the first and the last key that any query sees
            np.broadcast_to(x, seen.shape[:3])
            for x in (ranges(seen)[0].min((1, 2), keepdims=True), ranges(seen)[1].max((1, 2), keepdims=True))
        )
    )
    if case.tq > 1:
        assert " differ, first y" in kernel.trial(bench, case, "")


def test_a_call_with_ranges_is_admitted_or_refused(host_ranged):
    ranged_run(ranged(tq=300))
    assert {k.name for k in host_ranged.admissions.known()} >= {"attention ranged"}
    host_ranged.faults["ranged"] = first_bit
    with pytest.raises(ContractError, match=r"attention ranged .*: refused"):
        ranged_run(ranged(tq=300, d=64))


def test_where_no_kernel_is_right_the_error_names_all_of_them(host):
    for kernel in ("hopper", "walk", "split", "few"):
        host.faults[kernel] = first_bit
    with pytest.raises(
        ContractError, match=r"NVIDIA H200.*attention hopper .*: refused .*differ, first y\[1, 7, 75, 127\] 0x.* for 0x"
    ):
        admitted_run(pose(tq=300))
    with pytest.raises(ContractError, match="attention walk"):
        admitted_run(pose(tq=300), "walk")


def test_a_verdict_serves_all_sizes_and_later_processes(host):
    admitted_run(pose(tq=300))
    count = len(host.runs)
    for tq, tk in ((129, 4000), (4096, 8192), (300, 301)):
        admitted_run(pose(tq=tq, tk=tk))
    later = Admissions(FakeMachine(captures=True), host.admissions.records)
    machine._admissions[0] = later  # a capture needs no trial of what is on record
    admitted_run(pose(tq=300))
    assert len(host.runs) == count
    assert {k.admission.source for k in later.known()} == {"this user's records"}
    other = {**FakeMachine().parts, "driver": "999"}
    machine._admissions[0] = Admissions(FakeMachine(parts=other), host.admissions.records)
    admitted_run(pose(tq=300))
    assert len(host.runs) == 2 * count


def test_other_sources_void_a_verdict(host, monkeypatch):
    admitted_run(pose(tq=300))
    count = len(host.runs)
    monkeypatch.setattr("isogemm.planner.admission.fingerprint", lambda home: f"other {home}")
    admitted_run(pose(tq=300))
    assert len(host.runs) == 2 * count


def test_a_first_use_while_a_graph_is_captured_says_what_to_do(host):
    host.admissions.machine.captures = True
    with pytest.raises(DeviceError, match="call once with these shapes before capturing"):
        admitted_run(pose(tq=300))
    host.admissions.machine.captures = False
    admitted_run(pose(tq=300))


def test_a_kernel_that_cannot_run_is_left_out_and_not_recorded(host):
    def broken(case: AttentionCase, made: list[np.ndarray]) -> None:
        raise RuntimeError("no room")

    host.faults["hopper"] = broken
    admitted_run(pose(tq=300))
    assert "no room" in next(k.admission.detail for k in host.admissions.known() if k.name == "attention hopper")
    machine._admissions[0] = Admissions(FakeMachine(), host.admissions.records)
    host.faults.clear()
    admitted_run(pose(tq=300))
    assert [k.name for k in machine._admissions[0].known()] == ["attention hopper"]


def test_without_a_model_of_the_tensor_cores_kernels_are_compared_with_the_plain_one(host):
    case = pose(tq=300, arithmetic="tensor_core:native")
    assert tried_now(host, "walk", case) == tried_now(host, "hopper", case) == ""
    host.faults["hopper"] = first_bit
    found = tried_now(host, "hopper", case)
    assert "1 of" in found


STRIDES = st.sampled_from([0, 8, 24, 64, 96, 128, 136, 33, 4096, 4100, 1 << 20])


@settings(max_examples=150)
@given(
    st.integers(1, 5), st.integers(1, 9), st.sampled_from([1, 2, 3, 8, 16]), st.integers(1, 300), st.integers(1, 5000),
    st.sampled_from([1, 8, 33, 64, 80, 100, 128, 192, 256]), st.lists(STRIDES, min_size=9, max_size=9),
    st.none() | st.lists(STRIDES, min_size=4, max_size=4), st.booleans(), st.booleans(),
)  # fmt: skip
def test_every_call_has_operands_of_its_code(b, shared, group, tq, tk, d, steps, mask, aligned, causal):
    shapes = (b, shared * group, tq, d), (b, shared, tk, d), (b, shared, tk, d)
    made = tuple(Strided(s, (*steps[3 * i : 3 * i + 3], 1)) for i, s in enumerate(shapes))
    case = AttentionCase(
        operands=made, mask=None if mask is None else tuple(mask), dtype="bfloat16", dtype_out="bfloat16",
        dtype_mask=None if mask is None else "bool", c=0.1, offset=3 if causal else None, starts=False, stops=True,
        arithmetic="tensor_core:sm90", aligned=aligned,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "device", lambda ordinal: H200)
        for kernel in ranked(case):
            assert list(posed(KERNELS[kernel], case)), kernel


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_steps_of_gradients_are_tried(host, monkeypatch, dtype):
    def bind(self: Any, case: Any, config: str, ordinal: int) -> Any:
        shape, hidden, added, c, dtype, _ = case

        def run(stream: int, *places: int) -> None:
            n, rows, keys = shape
            shapes = (
                *[(shape, (rows * keys, keys, 1))] * 2,
                *[((n, rows), (rows, 1))] * 3,
                (shape, hidden),
                (shape, added),
            )
            kinds = ["float32"] * 5 + ["bool", "float32"]
            values = [at(p, *s, k) if p else None for p, s, k in zip(places, shapes, kinds, strict=False)]
            held = dict(zip(("s", "dp", "m", "total", "delta", "hidden", "added"), values, strict=True))
            for place, x in zip(places[7:], gradient_steps(**held, c=c, dtype=TYPES[dtype]), strict=True):
                if place and x is not None:
                    if "backward" in host.faults:
                        x.reshape(-1)[-1] = 3
                    at(place, shape, (rows * keys, keys, 1), dtype)[...] = x
                    if "beside" in host.faults:
                        at(place, (x.size + 1,), (1,), dtype)[-1] = 1

        return run

    monkeypatch.setattr(attention_backward.Steps, "bind", bind)
    attention_backward.launch.cache_clear()
    call = attention_backward.StepsCase((4, 5, 6), (0, 0, 0), (0, 0, 0), 0.5, dtype, 0)
    attention_backward.launch(call)
    assert [(k.name, k.admission.state) for k in host.admissions.known()] == [("attention backward", "admitted")]
    attention_backward.launch.cache_clear()
    machine._admissions[0] = Admissions(FakeMachine(), Records(None))
    host.faults["backward"] = 1
    with pytest.raises(ContractError, match=r"attention backward .*: .* first p\[1, 2, 0\]"):
        attention_backward.launch(call)
    attention_backward.launch.cache_clear()
    machine._admissions[0] = Admissions(FakeMachine(), Records(None))
    host.faults = {"beside": 1}  # a stray write of one word
    with pytest.raises(ContractError, match=r"attention backward .*: refused .* words beside the results were written"):
        attention_backward.launch(call)
    attention_backward.launch.cache_clear()
