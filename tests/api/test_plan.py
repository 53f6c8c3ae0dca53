"""Plans: values that print, hash, survive JSON and replay; schedules within their limits; errors that name a choice."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import sys
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.products import BF16, F32, assert_same, product, values

import isogemm
from isogemm.backends.cpu.emit.target import target
from isogemm.backends.cpu.gemm.facts import facts
from isogemm.backends.cpu.gemm.plan import SCHEMA
from isogemm.backends.cpu.gemm.schedule import Problem, Schedule, schedule
from isogemm.errors import ContractError, DTypeError, LayoutError, LimitError, OptionError, ShapeError
from isogemm.problem.numeric import NumericPlan, default_contract, numeric_plan

CPU = target()
NAMES = ("float32", "bfloat16", "float16")
plans = st.builds(
    isogemm.plan,
    st.integers(0, 5000),
    st.integers(0, 20000),
    st.integers(0, 20000),
    dtype=st.sampled_from(NAMES),
    weight_dtype=st.sampled_from((None, "float32")),
    out_dtype=st.sampled_from((None, *NAMES)),
    trans_a=st.sampled_from("NTC"),
    trans_b=st.sampled_from("NTC"),
    packed=st.booleans(),
    contract=st.sampled_from((None, "fma/leaf4096", "fma/tree8")),
    threads=st.none() | st.integers(1, 70),
)


@settings(max_examples=150)
@given(plans)
def test_a_plan_is_a_value(p: isogemm.Plan) -> None:
    again = isogemm.Plan.from_json(p.to_json())
    assert again == p
    assert hash(again) == hash(p)
    assert again.digest == p.digest
    assert str(again) == str(p)
    assert json.loads(p.to_json())["schema"] == SCHEMA
    for line in (f"C[{p.m}, {p.n}]", str(p.contract), p.strategy, p.digest, p.bound):
        assert line in str(p)


def test_a_plan_is_frozen() -> None:
    p = isogemm.plan(3, 4, 5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        p.m = 4
    with pytest.raises(dataclasses.FrozenInstanceError):
        p.schedule.kc = 1


def test_a_plan_prints_as_a_table() -> None:
    from rich.console import Console

    console = Console(width=120)
    with console.capture() as printed:
        console.print(isogemm.plan(64, 100, 200))
    assert "plan 64 x 100 x 200" in printed.get()
    assert "fma/chain" in printed.get()


def test_digest_depends_on_everything() -> None:
    p = isogemm.plan(64, 1000, 200, threads=2)
    others = [dataclasses.replace(p, **{name: getattr(p, name) + 1}) for name in ("m", "n", "k")]
    others += [dataclasses.replace(p, trans_a="T"), dataclasses.replace(p, swapped=True)]
    others += [dataclasses.replace(p, packed=True), dataclasses.replace(p, target="another")]
    for name in ("mr", "mc", "nc", "kc", "grid_m", "grid_n", "threads"):
        s = dataclasses.replace(p.schedule, **{name: getattr(p.schedule, name) + 1})
        others.append(dataclasses.replace(p, schedule=s))
    for name, value in (("dtype_a", "float16"), ("leaves", 2), ("contract", isogemm.Contract.parse("fma/leaf8"))):
        others.append(dataclasses.replace(p, numeric=dataclasses.replace(p.numeric, **{name: value})))
    digests = {x.digest for x in (p, *others)}
    assert len(digests) == len(others) + 1
    assert len(set(others)) == len(others)


def test_the_numeric_part_cannot_see_m() -> None:
    assert "m" not in inspect.signature(numeric_plan).parameters
    assert "m" not in {x.name for x in dataclasses.fields(NumericPlan)}
    seen = {isogemm.plan(m, 300, 700, threads=t).numeric for m in (1, 2, 16, 17, 192, 193, 5000) for t in (1, 2, 8)}
    assert len(seen) == 1
    (numeric,) = seen
    assert numeric.contract == default_contract() == isogemm.Contract.parse("fma/chain")
    assert (
        numeric_plan(9000, dtype_a="float32", dtype_b="float32", out_dtype="float32", contract="fma/leaf4096").leaves
        == 3
    )


ERRORS: tuple[tuple[dict[str, Any], type[Exception], str], ...] = (
    ({"m": -1}, ShapeError, "m: .*at least 0; got: -1; nearest legal choice: 0"),
    ({"n": 2.5}, ShapeError, "n: "),
    ({"k": True}, ShapeError, "k: "),
    ({"dtype": "float64"}, DTypeError, "bfloat16, float16, int8; got: 'float64'; nearest legal choice: float32"),
    ({"dtype": "blfoat16"}, DTypeError, "got: 'blfoat16'; nearest legal choice: bfloat16"),
    ({"dtype": np.int16}, DTypeError, "got: 'int16'; nearest legal choice: float32"),
    ({"dtype": "int8", "weight_dtype": "float32"}, DTypeError, "weight_dtype: limit: int8; got: 'float32'"),
    ({"dtype": "int8", "out_dtype": "float32"}, DTypeError, "out_dtype: limit: int32; got: 'float32'"),
    ({"dtype": "int8", "batch": 2}, DTypeError, "int8 for one product, on a CPU; got: int8"),
    ({"dtype": "int8", "device": "h200"}, DTypeError, "int8 for one product, on a CPU; got: int8"),
    ({"dtype": "int8", "packed": True}, OptionError, "packed: limit: False with int8"),
    ({"dtype": "int8", "contract": "fma/chain"}, ContractError, "float32, bfloat16, float16; got: int8"),
    ({"dtype": "int8", "k": 131072}, LimitError, "131071"),
    ({"dtype": None}, DTypeError, "got: None; nearest legal choice: float32"),
    ({"weight_dtype": "int8"}, DTypeError, "weight_dtype: .*'int8'"),
    ({"out_dtype": "float8"}, DTypeError, "out_dtype: .*'float8'"),
    ({"dtype": "bf16", "weight_dtype": "f16"}, DTypeError, "one of them float32; got: bfloat16 and float16"),
    ({"dtype": "bf16", "weight_dtype": "f16", "batch": 2}, DTypeError, "got: bfloat16 and float16"),
    ({"trans_a": "X"}, OptionError, "trans_a: .*'N', 'T' or 'C'"),
    ({"trans_b": None}, OptionError, "trans_b"),
    ({"threads": 0}, OptionError, "threads: .*at least 1; got: 0; nearest legal choice: 1"),
    ({"threads": True}, OptionError, "threads"),
    ({"contract": "fma/tree3"}, ContractError, "nearest legal choice: tree2"),
    ({"contract": "tensor_core:sm90/chain"}, ContractError, "bfloat16, float16; got: float32"),
    ({"contract": 7}, ContractError, "int"),
    ({"k": 32, "format": "Q4_0", "trans_a": "T"}, OptionError, "quantized products: .*'T' and 'T'; .*'N' and 'T'"),
    ({"heads": (2, 2), "trans_b": "N"}, OptionError, "attention products: .*'N' and 'N'; .*'N' and 'T'"),
    ({"k": 32, "format": "Q4_0", "weight_dtype": "float16"}, OptionError, "weight_dtype=None: .*Q4_0; got: float16"),
    ({"heads": (2, 2), "weight_dtype": "float16"}, OptionError, "weight_dtype=None: attention.*; got: float16"),
)


@pytest.mark.parametrize(("wrong", "error", "words"), ERRORS, ids=lambda v: str(v) if isinstance(v, dict) else "")
def test_errors_name_the_nearest_choice(wrong: dict[str, Any], error: type[Exception], words: str) -> None:
    given = {"m": 3, "n": 4, "k": 5} | wrong
    with pytest.raises(error, match=words):
        isogemm.plan(given.pop("m"), given.pop("n"), given.pop("k"), **given)


@pytest.mark.parametrize(
    ("heads", "nearest"),
    [((7, 2 * 10**9), r"\(7, 7\)"), ((12, 8), r"\(12, 6\)"), ({1, 2}, r"\(8, 8\)"), (1.5, r"\(8, 8\)")],
)
def test_heads_that_cannot_be_are_told_the_nearest_at_once(heads: Any, nearest: str) -> None:
    with pytest.raises(ShapeError, match=f"heads: .*nearest legal choice: {nearest}"):
        isogemm.plan(4, 8, 16, heads=heads)


def test_sizes_may_be_of_another_library() -> None:
    """As `np.arange` gives them; what is planned is text of Python's own numbers."""
    m, n, k = np.int64(512), np.array(2048), np.int32(2048)
    for more in ({}, {"batch": np.int64(2)}, {"threads": np.uint8(2)}):
        found, want = isogemm.plan(m, n, k, **more), isogemm.plan(512, 2048, 2048, **{x: int(more[x]) for x in more})
        assert found.to_json() == want.to_json()
    with pytest.raises(ShapeError, match="m: limit: a whole number of at least 0"):
        isogemm.plan(np.float64(4), 64, 128)


def test_groups_may_be_an_array() -> None:
    assert isogemm.plan(5, 8, 16, groups=np.array([2, 3])).digest == isogemm.plan(5, 8, 16, groups=(2, 3)).digest
    for wrong in (3.0, np.ones(5)):
        with pytest.raises(ShapeError, match="groups: limit: whole numbers"):
            isogemm.plan(5, 8, 16, groups=wrong)


def test_a_plan_is_of_packed_weights_or_not() -> None:
    for true in (np.True_, np.float32(2), 1):
        made = isogemm.plan(5, 8, 16, packed=true)
        assert isogemm.Plan.from_json(made.to_json()) == made == isogemm.plan(5, 8, 16, packed=True)
    with pytest.raises(DTypeError, match="packed: limit: True or False"):
        isogemm.plan(5, 8, 16, packed=np.ones(2))


def test_a_batch_of_an_array_is_no_number() -> None:
    with pytest.raises(ShapeError, match="batch: limit"):
        isogemm.plan(5, 8, 16, batch=np.ones(2), format="Q8_0")


@pytest.mark.parametrize("text", ["x", "[]", "3", None])
def test_what_is_no_plan_is_refused(text: Any) -> None:
    with pytest.raises(OptionError, match="plan: limit"):
        isogemm.Plan.from_json(text)


def test_a_replay_takes_what_a_product_takes() -> None:
    a, plan = np.arange(4, dtype=np.float32).reshape(2, 2), isogemm.plan(2, 2, 2, trans_b="N")
    assert_same(plan.run(a, a), isogemm.matmul(a, a))
    unaligned = np.zeros(17, np.uint8)[1:].view(np.float32).reshape(2, 2)
    for wrong in (a.astype(">f4"), np.ma.masked_less(a, 1), unaligned, a.tolist(), None):
        for pair in ((wrong, a), (a, wrong)):
            with pytest.raises((DTypeError, LayoutError)):
                plan.run(*pair)


def test_a_type_has_one_name_however_it_is_given() -> None:
    short = isogemm.plan(3, 4, 5, dtype=ml_dtypes.bfloat16, weight_dtype=np.float32, out_dtype="fp16")
    assert short.digest == isogemm.plan(3, 4, 5, dtype="bfloat16", weight_dtype="float32", out_dtype="float16").digest
    assert short.numeric.out_dtype == "float16"


def test_another_schema_is_refused() -> None:
    data = isogemm.plan(3, 4, 5).to_dict()
    for schema in ("isogemm.plan.v0", None):
        with pytest.raises(OptionError, match=re.escape(SCHEMA)):
            isogemm.Plan.from_dict(data | {"schema": schema})


def _places(data: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in data.items():
        yield from _places(value, (*path, name)) if isinstance(value, dict) else [(*path, name)]


DERIVED = ("strategy", "split_axis", "flops", "bytes", "bound")
READ = [place for place in _places(isogemm.plan(3, 4, 5).to_dict()) if place[0] not in DERIVED]


@pytest.mark.parametrize("place", READ, ids=".".join)
def test_a_damaged_plan_is_refused_and_told_where(place: tuple[str, ...]) -> None:
    for value in (None, -1, 10**15, 1.5, [], {}):
        data = json.loads(isogemm.plan(3, 4, 5).to_json())
        *sections, name = place
        part = data
        for section in sections:
            part = part[section]
        part[name] = value
        with pytest.raises((OptionError, ContractError)) as caught:
            isogemm.Plan.from_dict(data)
        assert name in str(caught.value)
        del part[name]
        with pytest.raises((OptionError, ContractError)):
            isogemm.Plan.from_dict(data)


@pytest.mark.parametrize(("name", "value"), [("grid_m", 0), ("grid_n", 5), ("grid_m", 2**31 - 1)])
def test_a_plan_has_no_more_chunks_than_rows_or_columns(name: str, value: int) -> None:
    data = isogemm.plan(3, 4, 5).to_dict()
    data["schedule"][name] = value
    with pytest.raises(OptionError, match=rf"{name} of a plan.*1 to 4"):
        isogemm.Plan.from_dict(data)


def stored(p: isogemm.Plan, w: np.ndarray) -> Any:
    """The weight w [n, k] as the plan has it."""
    return isogemm.pack(w) if p.packed else w.T if p.trans_b == "T" else np.ascontiguousarray(w.T)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("trans_b", ["N", "T"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=lambda d: d.name)
@pytest.mark.parametrize("m", [1, 5, 20, 200])
def test_replay_has_the_bits_of_matmul(m: int, dtype: np.dtype[Any], trans_b: str, packed: bool) -> None:
    n, k = 70, 130
    a, w = values((m, k), dtype, special=True), values((n, k), dtype, seed=1, special=True)
    p = isogemm.plan(m, n, k, dtype=dtype.name, trans_b=trans_b, packed=packed)
    got = isogemm.Plan.from_json(p.to_json()).run(a, stored(p, w))
    assert_same(got, product(a, w.T))
    assert_same(got, isogemm.matmul(a, w.T))


def test_replay_by_the_schedule_of_another_machine() -> None:
    """Threads, cuts and blocks of elsewhere: the same bits."""
    m, n, k = 50, 300, 130
    a, w = values((m, k), special=True), values((n, k), seed=1, special=True)
    p = isogemm.plan(m, n, k)
    foreign = {isogemm.plan(m, n, k, threads=t).schedule for t in (1, 2, 3, 8, 64)}
    foreign |= {dataclasses.replace(s, mr=1 + i, kc=7 * i + 1, grid_m=1 + i) for i, s in enumerate(foreign) if i < 4}
    assert len(foreign) >= 5
    for s in foreign:
        assert_same(dataclasses.replace(p, schedule=s).run(a, w.T), product(a, w.T))


def test_replay_refuses_other_operands() -> None:
    p = isogemm.plan(3, 4, 5)
    a, w = values((3, 5)), values((4, 5))
    with pytest.raises(ShapeError, match="nearest legal choice: plan these operands anew"):
        p.run(a[:2], w.T)
    with pytest.raises(ShapeError, match=r"nearest legal choice: w\.T, where w is a weight \[n, k\]; or plan"):
        p.run(a, w)
    with pytest.raises(ShapeError, match="replay"):
        p.run(a, isogemm.pack(w))
    with pytest.raises(DTypeError, match="replay"):
        p.run(a.astype(np.float16), w.T)


@pytest.mark.parametrize("trans_b", ["N", "T"])
def test_replay_of_operands_that_are_stored_otherwise(trans_b: str) -> None:
    """The planned bits, or a typed error."""
    a, w = values((1, 64)), values((40, 64), seed=1)
    other = w.T if trans_b == "N" else np.ascontiguousarray(w.T)
    try:
        got = isogemm.plan(1, 40, 64, trans_b=trans_b).run(a, other)
    except isogemm.errors.IsogemmError:
        return
    assert_same(got, product(a, w.T))


def test_replay_of_a_schedule_that_this_target_cannot_run() -> None:
    """The planned bits, or a typed error."""
    p = isogemm.plan(64, 64, 300)
    wide = dataclasses.replace(p, schedule=dataclasses.replace(p.schedule, mr=CPU.mr + 2, mc=64))
    a, w = values((64, 300)), values((64, 300), seed=1)
    try:
        got = wide.run(a, w.T)
    except isogemm.errors.IsogemmError:
        return
    assert_same(got, product(a, w.T))


problems = st.builds(
    Problem,
    m=st.integers(0, 5000),
    n=st.integers(0, 20000),
    k=st.integers(0, 20000),
    a_place=st.booleans(),
    b_lines=st.booleans(),
    b_rows=st.booleans(),
    b_bytes=st.sampled_from([2, 4]),
    prepared=st.booleans(),
    plain=st.booleans(),
)


@settings(max_examples=400)
@given(problems, st.integers(1, 1100))
def test_schedules_keep_the_kernels_limits(p: Problem, threads: int) -> None:
    s = schedule(p, threads, CPU)
    few = s.strategy in ("gemv", "stream") and s.b_mode == "in place"
    direct = s.a_mode == "in place" or (s.b_mode == "prepared" and p.b_bytes == 2)
    assert s.mr >= 1
    assert few or min(p.m, s.mr) <= (CPU.mr_direct if direct else CPU.mr)  # rows of a tile
    assert 1 <= s.threads <= threads
    assert (s.b_mode == "prepared") == p.prepared
    if p.m == 0 or p.n == 0:
        return
    assert 1 <= s.grid_m <= -(-p.m // s.mr)
    assert 1 <= s.grid_n <= -(-p.n // CPU.nr)
    assert s.mc >= 1
    assert s.nc >= 1
    assert s.kc >= min(1, p.k)
    assert s.a_mode != "in place" or few or p.a_place
    assert s.a_mode != "all" or s.mc >= p.m
    assert s.b_mode != "in place" or few or (p.b_rows and p.b_bytes == 4)
    assert few or s.grid_n == 1 or s.nc % CPU.nr == 0 or s.nc == p.n
    if few:
        assert p.m <= (facts().gemv_rows if s.strategy == "gemv" else 4)
        assert p.b_lines if s.strategy == "gemv" else p.b_rows


@pytest.mark.parametrize(
    ("shape", "options", "strategy", "split"),
    [
        ((1, 4096, 2560), {"dtype": "int8"}, "gemv", "n"),
        ((4096, 4096, 2560), {"dtype": "int8"}, "tiled", "n"),
        ((1, 4096, 2560), {}, "gemv", "n"),
        ((8, 4096, 2560), {}, "gemv", "n"),
        ((1, 4096, 2560), {"trans_b": "N"}, "stream", "n"),
        ((40, 400, 40), {"trans_b": "N"}, "small", "n"),
        ((72, 40, 40), {}, "small", "m"),
        ((96, 4096, 2560), {}, "skinny", "n"),
        ((4096, 4096, 2560), {}, "tiled", "n"),
        ((4096, 2, 2560), {}, "gemv", "m"),
        ((4096, 2, 2560), {"trans_a": "T"}, "stream", "m"),
        ((1, 4096, 2560), {"packed": True}, "gemv", "n"),
        ((4096, 33, 2560), {}, "tiled", "m"),
        ((4, 4, 4), {"contract": "tf32:sm90/chain"}, "definition", "none"),
    ],
)
def test_strategy_by_shape(shape: tuple[int, int, int], options: dict[str, Any], strategy: str, split: str) -> None:
    p = isogemm.plan(*shape, threads=2, **options)
    assert (p.strategy, p.split_axis) == (strategy, split if p.threads > 1 else "none")


def test_bounds_and_traffic() -> None:
    p = isogemm.plan(2, 3, 5, dtype="bfloat16", weight_dtype="float32", out_dtype="float16")
    assert p.flops == 60
    assert p.bytes == 2 * 5 * 2 + 3 * 5 * 4 + 2 * 3 * 2
    assert p.bound == "call"
    assert isogemm.plan(1, 4096, 4096).bound == "memory"
    large = isogemm.plan(2048, 2048, 2048)
    assert large.bound == "compute"
    assert large.expected_seconds(gflops=100, gbytes=10) == pytest.approx(2 * 2048**3 / 100e9)
    assert large.expected_seconds(gflops=1e9, gbytes=10) == pytest.approx(3 * 2048**2 * 4 / 10e9)


def test_schedule_is_hashable() -> None:
    assert len({isogemm.plan(64, 64, 64, threads=1).schedule, isogemm.plan(64, 64, 64, threads=1).schedule}) == 1
    assert {x.name for x in dataclasses.fields(Schedule)} >= {"strategy", "a_mode", "b_mode"}


def test_a_plan_s_result_is_as_wide_as_its_operands():
    assert isogemm.plan(4, 5, 6, dtype="bfloat16", weight_dtype="float32").numeric.out_dtype == "float32"
    assert isogemm.plan(4, 5, 6, dtype="float32", weight_dtype="bfloat16").numeric.out_dtype == "float32"
    assert isogemm.plan(4, 5, 6, dtype="bfloat16").numeric.out_dtype == "bfloat16"


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("m", [1, 4, 12, 192])
def test_scratch_has_a_limit_whatever_k_is(m, prepared):
    """Operands of step 0 have no memory of their own, and a K beyond what a copy of theirs could hold."""
    from isogemm.backends.cpu.gemm.schedule import check_legal
    from isogemm.backends.cpu.gemm.tasks import _scratch

    for a_place, b_lines, b_rows in ((True, False, False), (False, True, False), (False, False, True)):
        for k in (2**20, 2**23, 2**24, 2**27, 2**31 + 3, 2**40):
            deep = Problem(m, 5, k, a_place, b_lines, b_rows, 4, prepared, True)
            chosen = schedule(deep, 2, CPU)
            check_legal(deep, chosen, CPU)
            assert _scratch(deep, chosen, CPU.nr) < 2**31


def test_blocks_of_a_deep_product_have_its_bits(monkeypatch):
    from isogemm.backends.cpu.gemm import tasks

    module = sys.modules[schedule.__module__]
    a, b, w = values((3, 2000), seed=1), values((2000, 5), seed=2), values((5, 2000), seed=3)
    wide = np.broadcast_to(a[:, :1], a.shape)
    calls = [lambda: isogemm.matmul(a, b), lambda: isogemm.linear(a, w), lambda: isogemm.matmul(wide, b)]
    calls.append(lambda: isogemm.linear(a, isogemm.pack(w)))
    want = [call() for call in calls]
    tasks._tasks.clear()
    monkeypatch.setattr(module, "DEEP", 1000)
    try:
        for call, before in zip(calls, want, strict=True):
            assert_same(call(), before)
    finally:
        tasks._tasks.clear()


@pytest.mark.parametrize("packed", [False, True])
def test_each_thread_has_a_share_of_weights_that_a_cache_may_hold(packed):
    for threads in (1, 2, 3):
        assert isogemm.plan(1, 4096, 1024, packed=packed, threads=threads).schedule.grid_n == threads
    assert isogemm.plan(1, 8, 1024, packed=packed, threads=3).schedule.grid_n == 1  # one panel
    assert isogemm.plan(1, 4096, 1040, packed=packed, threads=2).schedule.grid_n > 16
    assert isogemm.plan(1, 4096, 1040, packed=packed, threads=1).schedule.grid_n == 1
