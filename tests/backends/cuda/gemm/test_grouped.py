"""Products of groups whose lengths the device reads: compiled for a GPU that is not there, and tried on the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.backends.cuda.compiled import Kernels, kernels
from tests.planner.fakes import FakeMachine, view

from isogemm.backends.cuda.gemm.grouped import run
from isogemm.backends.cuda.gemm.grouped.case import ENDS, GroupedCase
from isogemm.backends.cuda.gemm.grouped.family import CONTINUED, OUTER, ROWS, Grouped
from isogemm.backends.cuda.gemm.hopper.config import HopperConfig, HopperSide
from isogemm.base.seen import Seen
from isogemm.contract.reference import epilogue, evaluate
from isogemm.contract.spec import Contract
from isogemm.planner.bench import Bench
from isogemm.problem.product import Strides

__all__ = ["kernels"]  # the fixture

FAMILY = Grouped()
CHAIN, LEAF = (Contract.parse(f"tensor_core:sm90/{order}") for order in ("chain", "leaf4096"))
K, N, G, M = 2048, 768, 16, 1000

FORWARD = GroupedCase(
    G, M, K, HopperSide(N, K, N * K, False), HopperSide(M, K, 0, False), "bfloat16", "bfloat16", CHAIN, N
)
BIASED = replace(FORWARD, dtype_bias="bfloat16", bias_batch=N, lengths=0)
BACK = replace(FORWARD, depth=N, x=HopperSide(K, K, N * K, True), y=HopperSide(M, N, 0, False), out_step=K)
WEIGHTS = GroupedCase(
    G, M, 0, HopperSide(N, N, 0, True), HopperSide(K, K, 0, True), "bfloat16", "bfloat16", LEAF, K, N * K, False
)
BUFFERS = replace(WEIGHTS, dtype_out="float32", accumulate=True)
CASES = {
    "forward": FORWARD, "bias": BIASED, "dx": BACK, "dw": WEIGHTS, "buffers": BUFFERS,
    "chain": replace(BUFFERS, contract=CHAIN), "columns": replace(BUFFERS, columns=True, out_step=N),
    "ends": replace(FORWARD, dtype="float16", dtype_out="float32", lengths=ENDS),
}  # fmt: skip


# Biases and ends cost each tile as much as others: half of the tiles have the ones, half the others.
HALVES = {"bias": slice(0, 2), "ends": slice(2, 4)}


def test_every_kernel_compiles_without_spills_or_waits(kernels: Kernels):
    asked = [
        (name, case, config)
        for name, case in CASES.items()
        for config in FAMILY.configs(case)[HALVES.get(name, slice(None))]
    ]
    assert {config for *_, config in asked} == {*ROWS.values(), *OUTER.values(), *CONTINUED.values()}
    for _, case, config in asked:
        FAMILY.bind(case, config, 0)  # and its parameters are those of the code
    for (name, case, config), kernel in zip(asked, kernels.loaded, strict=True):
        c, where = HopperConfig.parse(config), f"{name} {config}"
        assert c is not None
        totals = 4 * c.accumulators if case.accumulate or case.contract.order.kind == "leaf" else 0
        assert kernel.resources["REG"] * c.threads <= 65536, where
        assert kernel.resources["STACK"] <= totals, where
        assert kernel.machine_counts("HGMMA") == (4 * c.depth // 64 * c.blocks,), where
        # One wait a stage and one a walk: a compiler that copies sums in flight adds others, and a last stage is lost.
        assert sum(line.startswith("WARPGROUP.DEPBAR") for line in kernel.machine_code) == 2, where


@pytest.mark.parametrize("mean", [1, 12, 13, 100, 300, 5000])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_tile_is_chosen_by_the_mean_of_rows(case, mean):
    each = replace(case, rows=mean * G, y=case.y if case.outer else replace(case.y, size=mean * G))
    configs = FAMILY.configs(each)
    table = CONTINUED if case.accumulate else OUTER if case.outer else ROWS
    assert configs[0] == next(config for limit, config in table.items() if mean <= limit)
    assert set(configs) == set(table.values())
    assert all(FAMILY.supports(each, config) for config in configs)


def test_a_weight_s_gradient_is_not_cut_beside_its_matrix():
    few = replace(WEIGHTS, rows=G)
    wide = replace(few, y=HopperSide(2880, 2880, 0, True), out_step=2880, out_batch=2880 * N)
    assert [FAMILY.configs(case)[0] for case in (few, wide)] == [*OUTER.values()]


@pytest.mark.parametrize(
    "wrong",
    [
        replace(FORWARD, contract=LEAF), replace(FORWARD, contract=Contract.parse("fma/chain")),
        replace(FORWARD, contract=Contract.parse("tensor_core:sm90/tree4")), replace(FORWARD, dtype="float32"),
        replace(FORWARD, y=HopperSide(M, K + 1, 0, False)), replace(FORWARD, x=HopperSide(N, K, N * K + 4, False)),
        replace(FORWARD, groups=1025), replace(FORWARD, rows=0), replace(BUFFERS, dtype_out="bfloat16"),
        replace(FORWARD, accumulate=True, dtype_out="float32"), replace(WEIGHTS, y=HopperSide(K, K, 0, False)),
    ],
)  # fmt: skip
def test_what_is_not_served(wrong):
    assert not FAMILY.configs(wrong)
    assert not FAMILY.supports(wrong, "128x128x64 s6")


@pytest.mark.parametrize(
    "config", ["w128x64x64 s4", "128x64x64 s1", "128x64x96 s4", "128x64x64 s4 c2x1", "32x64x64 s4", "128x60x64 s4"]
)
def test_configurations_that_no_group_has(config):
    """Weights in the other place, one stage, K in parts of a line, clusters, short tiles, columns in fours."""
    assert FAMILY.supports(FORWARD, "128x64x64 s4")
    assert not FAMILY.supports(FORWARD, config)


class OnHost(Grouped):
    """The family, its kernels computed by the definition, or with a fault."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault

    def bind(self, case: GroupedCase, config: str, device: int, blocks: int = 2**30) -> Any:
        def launch(stream: int, x: int, y: int, counts: int, out: int, bias: int) -> None:
            compute(case, x, y, counts, out, bias, self.fault if blocks < 2**30 or self.fault != "few" else "")

        return launch


def compute(case: GroupedCase, x: int, y: int, counts: int, out: int, bias: int, fault: str) -> None:
    """Groups one by one, in the memory that a launch is given."""
    g, item = case.groups, np.int64 if case.lengths == 1 else np.int32
    lengths = view(counts, Strides(0, 1), (1, 1, g), "float32")[0, 0]
    if item is np.int64:
        lengths = view(counts, Strides(0, 1), (1, 1, 2 * g), "float32")[0, 0]
    sizes = np.ascontiguousarray(lengths).view(item)
    ends = sizes if case.lengths == ENDS else np.cumsum(sizes)
    high, wide, rows = case.x.size, case.y.size, case.rows
    b = matrix(y, case.y, 1, case.depth or rows, case.dtype)[0]
    a = matrix(x, case.x, 1 if case.outer else g, case.depth or rows, case.dtype)
    inner = (1, case.out_step) if case.columns and case.outer else (case.out_step, 1)
    d = view(out, Strides(*inner, case.out_batch), (g, high, wide) if case.outer else (1, rows, high), case.dtype_out)
    biases = view(bias, Strides(case.bias_batch, 1), (1, g, high), case.dtype_bias)[0] if case.dtype_bias else None
    for i, (begin, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        upto = min(-(-end // 16) * 16, rows) if fault == "neighbours" else end
        start = np.array(d[i]) if case.accumulate else None
        if not case.outer:
            acc = evaluate(np.array(b[begin:end]), np.array(a[i].T), case.contract)
            d[0, begin:end] = epilogue(acc, bias=None if biases is None else biases[i], out_dtype=d.dtype)
        elif upto > begin:
            shift = begin % 16 if fault == "blocks" else 0
            left, right = (np.pad(v[begin:upto], ((shift, 0), (0, 0))) for v in (a[0].T, b.T))
            acc = evaluate(np.ascontiguousarray(left.T), np.ascontiguousarray(right), case.contract, start)
            d[i] = epilogue(acc, out_dtype=d.dtype)
        elif not case.accumulate and fault != "empty":
            d[i] = 0
    if not case.outer and fault != "behind":
        d[0, end:] = 0
    if fault == "few":
        d[-1, -1, -1] = 7


def matrix(address: int, side: HopperSide, items: int, depth: int, dtype: str) -> np.ndarray:
    """[items, rows, K] of a side."""
    steps = Strides(1, side.step, side.batch) if side.across else Strides(side.step, 1, side.batch)
    return view(address, steps, (items, side.size, depth), dtype)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_definition_passes_a_trial(case):
    bench, family = Bench(FakeMachine()), OnHost()
    for config in dict.fromkeys([*family.configs(case)[:1], *family.configs(case)[-1:]]):
        assert not family.trial(bench, case, config)


@pytest.mark.parametrize(
    ("fault", "case"),
    [("neighbours", "dw"), ("blocks", "dw"), ("blocks", "buffers"), ("empty", "dw"), ("behind", "forward"),
     ("few", "dx"), ("few", "chain")],
)  # fmt: skip
def test_a_trial_refuses(fault, case):
    posed: Callable[..., str] = OnHost(fault).trial
    found = posed(Bench(FakeMachine()), CASES[case], OnHost().configs(CASES[case])[0])
    assert "differ" in found


def test_lazy_negations_are_other_calls(monkeypatch):
    """What memory holds the opposite of is not served, though a call of its shapes, strides and types was before."""
    torch = pytest.importorskip("torch")
    served, launched = [], []

    def ready(case: Any, x: Any, dtype: Any) -> Any:
        served.append(case)
        options = {"dtype": dtype, "device": x.device}
        return case and run.GroupedReady(lambda *at: launched.append(at), 0, (case.rows, case.x.size), options)

    monkeypatch.setattr(run, "_calls", Seen(8))
    monkeypatch.setattr(run, "_ready", ready)
    monkeypatch.setattr(run, "_memory", torch.empty)
    monkeypatch.setattr(run, "_stream", lambda device: 7)
    room = torch.zeros(4096, dtype=torch.bfloat16)[8:]
    first = -room.data_ptr() % 16 // 2
    x, w = room[first:][:128].view(4, 32), room[first + 128 :][: 2 * 8 * 32].view(2, 8, 32)
    counts, bias = torch.tensor([2, 2]), torch.zeros(2, 8, dtype=torch.complex64).conj()

    def called(x: Any, bias: Any) -> Any:
        return run.multiplied(x, w, bias, counts, "", None, lambda: CHAIN)

    for _ in range(2):
        assert called(x, None) is not None
        assert called(x, bias.real) is not None
        assert called(torch._neg_view(x), None) is None
        assert called(x, bias.imag) is None
        assert run.recalled(torch._neg_view(x), w, None, counts, "", None) is None
    assert [case is not None for case in served] == [True, True, False, False]
    assert len(launched) == 4


def test_lengths_in_page_locked_memory_are_copied_before_the_call_returns(monkeypatch):
    """The device reads them later, and their owner may write the next ones meanwhile."""
    torch = pytest.importorskip("torch")
    from isogemm.torch.gemm import grouped_linear

    class Remote:
        is_cuda, dtype, device = True, torch.bfloat16, torch.device("meta")

        def __len__(self) -> int:
            return 4

    class Locked(torch.Tensor):
        def is_pinned(self, device: Any = None) -> bool:
            return True

        def to(self, *where: Any, **how: Any) -> Any:
            sent.append(self.data_ptr())
            return torch.Tensor.to(self, *where, **how)

    sent: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    counts = torch.tensor([1, 3]).as_subclass(Locked)
    assert grouped_linear.on_device(counts, Remote()) is not None
    assert len(sent) == 1
    assert sent[0] != counts.data_ptr()
