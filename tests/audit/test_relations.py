"""Each relation has a planted violation that it catches, and no other relation is blamed for it."""

from __future__ import annotations

import collections
import os
from collections.abc import Callable

import numpy as np
import pytest

import isogemm
from isogemm import audit
from isogemm.audit.bench import LinearOperands, ProviderBench, sampled_columns
from isogemm.audit.cases import Case, evaluate
from isogemm.audit.data import ActivationSource, WeightSource, arrange
from isogemm.errors import LimitError, OptionError
from isogemm.lab.models import LinearShape

from . import fakes

SHAPE = LinearShape("fake", fakes.N, fakes.K)
SWEEP = [1, 2, 3, 16]


def changed(provider: audit.Provider | object, sweep: list[int] = SWEEP) -> set[str]:
    relations = list(audit.RELATIONS)
    report = audit.run([provider], [SHAPE], require=[], sweep=sweep, relations=relations, speed=False)
    (result,) = report.providers.values()
    assert not result.reason
    assert {r.status for r in result.relations.values()} <= {"held", "changed", "n/a"}
    return {name for name, r in result.relations.items() if r.status == "changed"}


@pytest.mark.parametrize(
    ("provider", "broken"),
    [
        (fakes.honest, set()),
        (fakes.by_m, {"population", "padding", "schedule", "backward"}),
        (fakes.by_position, {"population", "position", "schedule", "backward"}),
        (fakes.by_neighbours, {"neighbours"}),
        (fakes.by_padding, {"padding"}),
        (fakes.by_schedule, {"schedule"}),
        (fakes.by_threads, {"threads"}),
        (fakes.by_form, {"form"}),
        (fakes.by_layout, {"layout"}),
        (fakes.ByPacking(), {"packing"}),
        (fakes.by_direction, {"backward"}),
        (fakes.ByAccumulation("rounds", rounds=True), {"accumulation"}),
        (fakes.ByAccumulation("goes on", rounds=False), set()),
        (fakes.Elsewhere("by_stream", "streamed"), {"stream"}),
        (fakes.Elsewhere("by_graph", "captured"), {"graph"}),
        (fakes.one_output, {"population", "position"}),  # row 11 of 16; neighbours looks at rows 0, 8 and 15
    ],
    ids=lambda value: getattr(value, "__name__", None) or getattr(value, "name", None),
)
def test_planted_violation_is_caught_by_the_relations_it_breaks(provider: object, broken: set[str]) -> None:
    assert changed(provider) == broken


def test_every_relation_has_a_planted_violation() -> None:
    (marker,) = test_planted_violation_is_caught_by_the_relations_it_breaks.pytestmark
    planted = set().union(*(broken for _, broken in marker.args[1]))
    assert planted | {"rerun"} == set(audit.RELATIONS)


def of(relation: str, function: object, sweep: list[int] = SWEEP) -> audit.RelationResult:
    provider = audit.CallableProvider("mine", function)
    report = audit.run([provider], [SHAPE], require=[], sweep=sweep, relations=[relation], speed=False)
    return report.providers["mine"].relations[relation]


def where(seen: Callable[[np.ndarray, np.ndarray], bool]) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """A product with other bits in the calls that `seen` is true of."""

    def linear(x: np.ndarray, w: np.ndarray) -> np.ndarray:
        y = fakes.honest(x, w)
        return fakes.nudged(y) if seen(x, w) else y

    return linear


@pytest.mark.parametrize(("row", "against"), [(32, 1), (50, 1), (99, 1), (40, 90)])
def test_population_sees_the_first_rows_the_middle_the_last_and_all_that_two_batches_share(
    row: int, against: int
) -> None:
    def off(x: np.ndarray, w: np.ndarray) -> np.ndarray:
        y = fakes.honest(x, w)
        if len(x) == 100:
            y[row, 7] = fakes.nudged(y[row, 7])
        return y

    first = of("population", off, [1, 90, 100]).drifts[0]
    assert (first.row, first.case.params) == (row, {"m": 100, "against": against})


CONTENTS = {
    "zero": lambda x: (x == 0).all(1).any(),
    "large": lambda x: (x == 1e4).all(1).any(),
    "nan": lambda x: np.isnan(x).any(),
    "inf": lambda x: np.isinf(x).any(),
}


@pytest.mark.parametrize("contents", CONTENTS)
def test_neighbours_of_each_contents_stand_beside_a_row_in_every_batch(contents: str) -> None:
    result = of("neighbours", where(lambda x, w: CONTENTS[contents](x)))
    assert (result.changed, result.cases) == (5, 25)


def test_every_case_of_neighbours_has_others_than_the_batch_had() -> None:
    given: dict[int, bytes] = {}
    result = of("neighbours", where(lambda x, w: given.setdefault(len(x), x.tobytes()) != x.tobytes()))
    assert result.changed == result.cases == 25


@pytest.mark.parametrize(
    "seen",
    [
        lambda x, w: not x.flags.c_contiguous,
        lambda x, w: not w.flags.c_contiguous,
        lambda x, w: x.ctypes.data % 64 != 0,
        lambda x, w: w.ctypes.data % 64 != 0,
    ],
    ids=["order of x", "order of w", "alignment of x", "alignment of w"],
)
def test_layouts_of_both_operands_are_tried(seen: Callable[[np.ndarray, np.ndarray], bool]) -> None:
    assert of("layout", where(seen)).status == "changed"


@pytest.mark.parametrize("blocks", [2, 5])
def test_forms_of_few_and_of_many_blocks_are_tried(blocks: int) -> None:
    assert of("form", where(lambda x, w: len(w) == fakes.N // blocks)).changed == 4  # a loop, of each batch


def test_every_number_of_threads_that_a_report_names_was_in_force() -> None:
    seen: list[int] = []
    provider = where(lambda x, w: bool(seen.append(isogemm.get_num_threads())))
    report = audit.run([provider], [SHAPE], require=[], sweep=[1], relations=["threads"], speed=False)
    assert set(report.options["thread_counts"]) == {1, 2, 3, os.cpu_count()} <= set(seen)


def test_a_call_is_run_again_three_times() -> None:
    counts: collections.Counter[int] = collections.Counter()

    def fourth(x: np.ndarray, w: np.ndarray) -> bool:
        counts[len(x)] += 1
        return counts[len(x)] == 4

    assert of("rerun", where(fourth)).changed_outputs == (1 + 5 + 64 + 256) * fakes.N


@pytest.mark.parametrize("provider", [fakes.by_rerun, fakes.reuses_its_buffer], ids=["fresh", "reused buffer"])
def test_a_provider_that_differs_from_itself_is_caught_by_rerun(provider: object) -> None:
    assert "rerun" in changed(provider)


def test_first_mismatch_names_the_output() -> None:
    report = audit.run([fakes.one_output], [SHAPE], require=[], sweep=[1, 16], relations=["position"], speed=False)
    name = "tests.audit.fakes:one_output"
    first, *_ = report.drifts(name)
    assert (first.row, first.column, first.ulps) == (10, 7, 5)  # moved round by 1, row 11 of the call is row 10 of x
    assert first.case.m == 16
    assert int(first.got_bits, 16) - int(first.expected_bits, 16) in (5, -5)
    result = report.providers[name].relations["position"]
    assert (result.changed, result.changed_outputs, result.max_ulp) == (2, 4, 5)
    histogram = {b["ulps"]: b["outputs"] for b in report.providers[name].to_dict()["histogram"]}
    assert {ulps for ulps, outputs in histogram.items() if outputs} == {"5-8"}
    assert histogram["5-8"] == 4


def test_agreement_map_groups_batch_sizes() -> None:
    from isogemm.audit.words import agreement_text

    report = audit.run([fakes.by_m], [SHAPE], require=[], sweep=[1, 2, 3, 16], relations=["population"], speed=False)
    (result,) = report.providers.values()
    assert agreement_text(result.agreement) == "batch sizes fall into 2 groups of equal bits: 1 | 2..16"
    cells = {(c["m"], c["other"]): (c["equal"], c["outputs"]) for c in result.agreement.cells()}
    assert len(cells) == 16
    assert cells[2, 1] == cells[1, 2] == (0, fakes.N)
    assert cells[16, 3] == (3 * fakes.N, 3 * fakes.N)


def test_a_batch_size_agrees_with_every_other_of_its_group() -> None:
    """Of three sizes the smallest may agree with both others, whose second rows differ."""
    from isogemm.audit.results import Agreement
    from isogemm.audit.words import groups_of

    rows = np.zeros((3, 4), np.float32)
    agreement = Agreement([1, 2, 3])
    agreement.add({1: rows[:1], 2: rows[:2] + np.float32([[0], [1]]), 3: rows})
    assert groups_of(agreement) == [[1, 2], [3]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_isogemm_holds(dtype: str) -> None:
    shapes = [LinearShape("odd", 67, 129), LinearShape("wide", 200, 64), LinearShape("one", 1, 1)]
    report = audit.run(["isogemm"], shapes, sweep=[1, 2, 3, 4, 7, 16, 33, 100, 129], dtype=dtype, speed=False)
    result = report.providers["isogemm"]
    assert [str(d) for d in report.drifts("isogemm")] == []
    assert report.held("isogemm"), result.reason or [r.reason for r in result.relations.values()]
    assert report.ok
    assert {r.status for r in result.relations.values()} == {"held"}


def test_numpy_is_reported_whatever_it_does() -> None:
    report = audit.run(["numpy"], [(96, 200)], require=[], sweep=[1, 2, 8, 33], speed=False)
    result = report.providers["numpy"]
    assert result.status in ("held", "changed")  # which of the two depends on the CPU and its BLAS
    assert result.relations["packing"].status == "n/a"
    assert result.relations["population"].outputs > 0


def test_not_applicable_never_counts_as_held() -> None:
    report = audit.run([fakes.honest], [SHAPE], require=[], sweep=[1, 2], relations=["packing"], speed=False)
    (result,) = report.providers.values()
    assert result.relations["packing"].cases == 0
    assert not report.held(result.name)


def test_compared_columns_keep_both_edges() -> None:
    columns = sampled_columns(151936, 4096)
    assert len(columns) <= 4096
    assert len(np.unique(columns)) == len(columns)
    assert set(range(64)) <= set(columns)
    assert set(range(151936 - 64, 151936)) <= set(columns)
    assert np.diff(columns).max() < 64


def test_a_sampled_column_keeps_its_number() -> None:
    """Where only a sample of the columns is compared, the report names the output's own column."""

    def off(x: np.ndarray, w: np.ndarray) -> np.ndarray:
        y = fakes.honest(x, w)
        if len(x) == 2:
            y[1, -1] = fakes.nudged(y[1, -1])
        return y

    w = WeightSource(LinearShape("wide", 500, 8)).load(np.dtype(np.float32), 0)
    activations = ActivationSource()
    operands = LinearOperands(LinearShape("wide", 500, 8), w, activations, 0, sampled_columns(500, 40), 1 << 20)
    case = Case("off", "population", {"m": 2, "against": 1}, WeightSource(operands.linear), activations, "float32", 0)
    outcome = evaluate(ProviderBench(audit.CallableProvider("off", off), operands), case)
    assert outcome.drift is not None
    assert (outcome.drift.row, outcome.drift.column) == (1, 499)
    assert outcome.outputs == 2 * len(operands.columns) < 2 * 500


@pytest.mark.parametrize("layout", ["C", "F", "padded", "rows", "columns", "unaligned"])
def test_layouts_hold_the_same_values_elsewhere(layout: str) -> None:
    a = ActivationSource().rows(5, 7, np.dtype(np.float32), 0)
    b = arrange(a, layout)
    np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))
    assert not np.shares_memory(a, b)
    assert b.flags.c_contiguous == (layout in ("C", "unaligned"))
    assert b.flags.f_contiguous == (layout == "F")
    assert (b.ctypes.data % 64 == 0) == (layout != "unaligned")


def test_activations_do_not_depend_on_how_many_are_drawn() -> None:
    few, many = (ActivationSource().rows(m, 33, np.dtype(np.float32), 5) for m in (3, 700))
    np.testing.assert_array_equal(few, many[:3])
    assert np.abs(many).max() > 30 * np.abs(many).mean()  # tails
    assert not np.array_equal(few, ActivationSource().rows(3, 33, np.dtype(np.float32), 6))


def test_threads_are_put_back() -> None:
    before = isogemm.get_num_threads()
    changed(fakes.by_threads)
    assert isogemm.get_num_threads() == before


def test_large_weights_are_copied_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    from isogemm.audit import bench

    monkeypatch.setattr(bench, "_LARGE_BYTES", 10 * fakes.K * 4)
    report = audit.run(
        [fakes.honest, fakes.ByPacking(), fakes.by_layout],
        [SHAPE],
        require=[],
        sweep=[1, 2],
        relations=["packing", "layout"],
        speed=False,
    )
    assert report.notes == [f"fake: packing and layout used the first 10 of {fakes.N} rows of w"]
    honest, packs, lays = report.providers.values()
    assert honest.relations["layout"].status == "held"
    assert honest.relations["layout"].outputs == 7 * (1 + 5 + 64) * 10
    assert packs.relations["packing"].status == "changed"
    assert lays.relations["layout"].status == "changed"


def test_a_drift_names_the_kernels_of_the_calls_that_disagree() -> None:
    provider = fakes.Elsewhere("by_graph", "captured")
    report = audit.run([provider], [SHAPE], require=[], sweep=[1, 2], relations=["graph", "rerun"], speed=False)
    first, *others = report.drifts("by_graph")
    assert first.kernels == ("M=1: plain", "M=1: split")
    assert [drift.kernels for drift in others] == [()] * len(others)  # the first of a relation tells
    assert str(first).endswith("; M=1: plain; M=1: split")
    assert first.to_dict()["kernels"] == ["M=1: plain", "M=1: split"]
    _, outcome = audit.replay(first.case.text(), provider)
    assert outcome.drift.kernels == first.kernels


@pytest.mark.parametrize(
    ("case", "error", "text"),
    [
        ("relation=form&m=1&form=loop&blocks=0&n=8&k=8", OptionError, "malformed replay"),
        ("relation=accumulation&m=8&parts=0&n=8&k=8", OptionError, "malformed replay"),
        (f"relation=rerun&m=1&times=3&n={10**9}&k={10**9}", LimitError, "weight: limit: the free memory"),
    ],
)
def test_a_line_of_no_case_is_refused(case, error, text) -> None:
    with pytest.raises(error, match=text):
        audit.replay(f"provider=numpy&{case}&dtype=float32&seed=0")


def test_isogemm_keeps_the_bits_of_gradients_and_numpy_is_asked_too() -> None:
    report = audit.run(
        ["isogemm", "numpy"], [(24, 512)], sweep=[1], relations=["backward", "accumulation", "graph"], speed=False
    )
    ours, theirs = (report.providers[name].relations for name in ("isogemm", "numpy"))
    assert ours["backward"].status == ours["accumulation"].status == "held"
    assert theirs["accumulation"].status == "changed"
    assert ours["graph"].status == "n/a"
    assert "captures no graphs" in ours["graph"].inapplicable
