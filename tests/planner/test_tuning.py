"""Tuning on a fake bench: the fastest admitted kernel wins each bucket, and runs go on where they stopped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from tests.planner.fakes import H200, FakeFamily, FakeMachine, flip

from isogemm.contract.spec import Contract
from isogemm.errors import OptionError
from isogemm.lab import tune as lab
from isogemm.lab.models import model
from isogemm.planner.admission import Admissions, golden_digest
from isogemm.planner.products import Chooser
from isogemm.planner.records import Records
from isogemm.planner.tables import Admitted, Bucket, DeviceLimits, Table, Use, dump, load
from isogemm.planner.trials import variant_of
from isogemm.planner.tuning import Job, Wanted, merge, pose, pose_rows, tune
from isogemm.problem.numeric import is_packed, numeric_key
from isogemm.problem.product import Product, Strides

CONTRACT = Contract.parse("tensor_core:sm90/chain")
UP = Wanted("up", 256, 512)


@dataclass
class FakeBench:
    """Times by a rule; a library's wrong algorithms differ from M on."""

    time: Callable[[str, int], float]
    wrong_from: Mapping[str, int] = field(default_factory=dict)
    rough: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)
    precise: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)
    compared: list[int] = field(default_factory=list)

    def seconds(self, product: Product, launches: Mapping[str, Any], *, rough: bool) -> dict[str, float]:
        (self.rough if rough else self.precise).append((product.m, tuple(launches)))
        return {name: self.time(name, product.m) * 1e-6 for name in launches}

    def differing(self, product: Product, one: Any, other: Any) -> int:
        self.compared.append(product.m)
        return int(product.m >= min(self.wrong_from.values(), default=10**9))

    def ceilings(self) -> DeviceLimits:
        return DeviceLimits(3900.0, {"tensor_core": 800.0})


def chooser(*found: FakeFamily, folder: Path | None = None, **stamp: str) -> Chooser:
    machine = FakeMachine({**H200, **stamp})
    return Chooser(Admissions(machine, Records(folder)), {f.name: f for f in found})


def products(*wanted: Wanted) -> list[Product]:
    return [pose(w, contract=CONTRACT) for w in wanted]


SMALL_OR_LARGE = {"f small": lambda m: 1 + m, "f large": lambda m: 10 + m / 4, "f middling": lambda m: 9 + m}


def by_size(name: str, m: int) -> float:
    return SMALL_OR_LARGE[name](m)


def test_the_fastest_admitted_kernel_wins_each_bucket() -> None:
    f = FakeFamily("f", offered=("small", "large", "middling"))
    table, left = tune(products(UP), (1, 2, 8, 64), chooser(f), FakeBench(by_size))
    (row,) = table.rows
    assert left == 0
    assert [(b.m, b.uses[0].config) for b in row.buckets] == [(8, "small"), (64, "large")]
    assert row.us == {1: 2.0, 2: 3.0, 8: 9.0, 64: 26.0}
    assert row.key == numeric_key(products(UP)[0])
    assert table.ceilings.memory_gb_per_second == 3900
    assert (table.arithmetic, table.stamp["driver"]) == ("tensor_core:sm90", H200["driver"])
    (admitted,) = table.admitted
    assert set(admitted.configs) == {"small", "large", "middling"}
    assert (admitted.fingerprint, admitted.variant) == ("f-v1", variant_of(products(UP)[0]))


def test_wrong_bits_do_not_enter_a_table() -> None:
    f = FakeFamily("f", offered=("small", "large", "middling"), faults={"small": flip()})
    table, _ = tune(products(UP), (1, 8), chooser(f), FakeBench(by_size))
    assert {use.config for b in table.rows[0].buckets for use in b.uses} == {"large", "middling"}
    assert all("small" not in a.configs for a in table.admitted)


def test_only_the_best_are_timed_precisely_and_only_if_right() -> None:
    offered = tuple(f"c{i}" for i in range(9))
    f = FakeFamily("f", offered=offered, faults={"c0": flip(), "c2": flip()})
    bench = FakeBench(lambda name, m: float(name[-1]) + 1)
    tune(products(UP), (4,), chooser(f), bench)
    assert [len(names) for _, names in bench.rough] == [9]
    assert bench.precise == [(4, ("f c1", "f c3", "f c4", "f c5", "f c6", "f c7", "f c8"))]


def test_the_fastest_of_ours_stays_behind_a_library() -> None:
    f, library = FakeFamily("f", offered=("small",)), FakeFamily("library", offered=tuple(f"a{i}" for i in range(9)))
    bench = FakeBench(lambda name, m: 50.0 if name == "f small" else float(name[-1]) + 1)
    table, _ = tune(products(UP), (4,), chooser(f, library), bench)
    assert [(u.family, u.config) for u in table.rows[0].buckets[0].uses] == [
        ("library", "a0"), ("library", "a1"), ("library", "a2"), ("library", "a3"), ("f", "small"),
    ]  # fmt: skip


def test_nothing_admitted_is_an_error() -> None:
    f = FakeFamily("f", offered=("small",), faults={"small": flip(lambda p: p.k > 2000)})
    here = chooser(f)
    here.admissions._arithmetic = "tensor_core:sm90"
    with pytest.raises(OptionError, match="one that is admitted"):
        tune(products(UP), (1,), here, FakeBench(by_size))


def test_a_library_is_compared_at_both_ends_of_its_rows_and_in_between() -> None:
    f, library = FakeFamily("f", offered=("small",)), FakeFamily("library", offered=("algo",))
    bench = FakeBench(lambda name, m: 1.0 if "algo" in name else 5.0)
    table, _ = tune(products(UP), (1, 16, 64), chooser(f, library), bench)
    assert bench.compared == [1, 2, 9, 16, 17, 40, 64]
    assert [(x.low, x.high, x.config) for x in table.library] == [(1, 1, "algo"), (2, 16, "algo"), (17, 64, "algo")]
    again = Chooser(Admissions(FakeMachine(), Records(None)), {"f": f, "library": library}, [table])
    assert again.choose(pose_rows(products(UP)[0], 33)).family == "library"
    assert again.choose(pose_rows(products(UP)[0], 65)).family == "f"


def test_a_library_that_differs_anywhere_in_its_rows_is_left_out() -> None:
    f, library = FakeFamily("f", offered=("small",)), FakeFamily("library", offered=("algo",))
    bench = FakeBench(lambda name, m: 1.0 if "algo" in name else 5.0, {"algo": 40})
    table, _ = tune(products(UP), (1, 16, 64), chooser(f, library), bench)
    assert max(x.high for x in table.library) == 16
    assert [(b.m, b.uses[0].family) for b in table.rows[0].buckets] == [(16, "library"), (64, "f")]


def test_a_run_goes_on_where_it_stopped() -> None:
    f, saved = FakeFamily("f", offered=("small", "large")), []
    down = Wanted("down", 512, 256)
    bench = FakeBench(by_size)
    first, left = tune(products(UP, down), (1, 4), chooser(f), bench, budget=-1.0, save=saved.append)
    assert (left, saved, first.rows) == (2, [], ())
    first, _ = tune(products(UP), (1, 4), chooser(f), bench, save=saved.append)
    assert saved == [first]
    bench.rough.clear()
    second, left = tune(products(UP, down), (1, 4), chooser(f), bench, table=first, save=saved.append)
    assert left == 0
    assert len(bench.rough) == 2, "the first product was timed again"
    assert [r.key.n for r in second.rows] == [256, 512]
    third, _ = tune(products(UP), (1, 4, 16), chooser(f), bench, table=second)
    assert set(third.rows[-1].us) == {1, 4, 16}
    assert len(third.rows) == 2


def test_verdicts_of_earlier_runs_stay_while_their_sources_do() -> None:
    first, _ = tune(products(UP), (4,), chooser(FakeFamily("f", offered=("small",))), FakeBench(by_size))
    biased = [replace(p, dtype_out="float32") for p in products(UP)]
    second, _ = tune(biased, (4,), chooser(FakeFamily("f", offered=("small",))), FakeBench(by_size), table=first)
    assert {a.variant for a in second.admitted} == {variant_of(p) for p in (*products(UP), *biased)}
    other = chooser(FakeFamily("f", offered=("small",), source="v2"))
    third, _ = tune(biased, (4, 8), other, FakeBench(by_size), table=first)
    assert {(a.variant, a.fingerprint) for a in third.admitted} == {(variant_of(biased[0]), "f-v2")}


@pytest.mark.parametrize("change", [{"driver": "590"}, {"triton": "9"}, {"cublaslt": "1"}], ids=str)
def test_a_table_of_other_software_starts_anew(change: dict[str, str]) -> None:
    f = FakeFamily("f", offered=("small", "large"))
    old, _ = tune(products(UP, Wanted("down", 512, 256)), (1,), chooser(f), FakeBench(by_size))
    new, _ = tune(products(UP), (1,), chooser(f, **change), FakeBench(by_size), table=old)
    assert len(new.rows) == 1
    assert new.stamp[next(iter(change))] == next(iter(change.values()))


def test_what_was_prepared_is_used() -> None:
    f, library = FakeFamily("f", offered=("small", "large")), FakeFamily("library", offered=("found", "searched"))
    jobs: list[Job] = []

    def prepare(wanted: Any) -> dict[Any, Any]:
        jobs.extend(wanted)
        return {("library", p): ("found",) for name, config, (p, *_) in wanted if not config}

    bench = FakeBench(lambda name, m: 1.0)
    tune(products(UP), (1, 4), chooser(f, library), bench, prepare=prepare)
    assert [(name, config, tuple(p.m for p in ps)) for name, config, ps in jobs] == [
        ("f", "small", (1, 4)),
        ("f", "large", (1, 4)),
        ("library", "", (1,)),
        ("library", "", (4,)),
    ]
    assert bench.rough[0][1] == ("f small", "f large", "library found")


def test_progress_counts_products_and_rows() -> None:
    seen: list[tuple[int, int]] = []
    f = FakeFamily("f", offered=("small",))
    tune(
        products(UP, Wanted("d", 512, 256)),
        (1, 4),
        chooser(f),
        FakeBench(by_size),
        progress=lambda d, t, _: seen.append((d, t)),
    )
    assert seen == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)]


def test_a_kernel_within_the_slack_keeps_its_bucket() -> None:
    a, b = Use("f", "a"), Use("f", "b")
    key = numeric_key(products(UP)[0])
    row = merge(key, {1: {a: 10.0, b: 12.0}, 2: {a: 10.04, b: 10.0}, 4: {a: 11.0, b: 10.0}, 8: {b: 10.0}})
    assert row.buckets == (Bucket(2, (a, b)), Bucket(8, (b,)))
    assert row.us == {1: 10.0, 2: 10.0, 4: 10.0, 8: 10.0}


@pytest.mark.parametrize("trans", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize("batch", [1, 3])
def test_posed_products_are_packed_at_every_m(trans: str, batch: int) -> None:
    product = pose(Wanted("x", 64, 48, trans, batch), m=5, contract=CONTRACT)
    for m in (1, 5, 7):
        moved = pose_rows(product, m)
        assert is_packed(moved)
        assert moved == pose(Wanted("x", 64, 48, trans, batch), m=m, contract=CONTRACT)
        assert m == 1 or numeric_key(moved) == numeric_key(product)
    b = product.b
    assert not is_packed(replace(product, b=Strides(*(x + (x > 1) for x in b[:2]), b.batch)))
    assert batch == 1 or not is_packed(replace(product, b=b._replace(batch=0)))


def test_products_of_a_model_and_of_its_attention() -> None:
    eight = model("Llama-3.1-8B")
    assert [(w.n, w.k) for w in lab.linears(eight)][:2] == [(6144, 4096), (4096, 4096)]
    scores, values = lab.attention(eight, 512)
    assert (scores.batch, scores.n, scores.k, scores.trans, scores.ms) == (32, 512, 128, "NT", (512,))
    assert (values.batch, values.n, values.k, values.trans, values.ms) == (32, 128, 512, "NN", (512,))


def test_products_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "shapes.json"
    path.write_text('[{"n": 8, "k": 4, "batch": 2, "trans": "nn", "m": [3]}, {"n": 5, "k": 6, "name": "up"}]')
    assert lab.read_wanted(str(path)) == [Wanted("8x4", 8, 4, "NN", 2, (3,)), Wanted("up", 5, 6)]
    path.write_text('[{"n": 8, "k": 4, "m": 3}]')  # no list
    assert lab.read_wanted(str(path)) == [Wanted("8x4", 8, 4, ms=(3,))]
    path.write_text('\ufeff[{"n": 8, "k": 4, "batch": 2}]')  # as some editors begin a file
    assert lab.read_wanted(str(path)) == [Wanted("8x4", 8, 4, batch=2)]
    (tmp_path / "shapes.csv").write_text("24,40,fake\n")
    assert lab.read_wanted(str(tmp_path / "shapes.csv")) == [Wanted("fake", 24, 40)]
    for text, word in (
        ('[{"n": 0, "k": 4}]', "product 0, n"),
        ('[{"n": 1, "k": 4, "m": [0]}]', "product 0, m"),
        ('[{"n": 1, "k": 4, "trans": "NX"}]', "product 0, trans"),
        ('[{"n": 1, "k": 4, "width": 3}]', "width"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=word):
            lab.read_wanted(str(path))


def test_one_run_at_a_time_for_a_table(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    with lab._alone(path), pytest.raises(OptionError, match="one run at a time"), lab._alone(path):
        pass
    with lab._alone(path):
        pass


def test_a_tuned_table_survives_its_file(tmp_path: Path) -> None:
    f, library = FakeFamily("f", offered=("small", "large")), FakeFamily("library", offered=("algo",))
    table, _ = tune(products(UP), (1, 64), chooser(f, library), FakeBench(lambda name, m: 1.0), name="t.json")
    (tmp_path / "t.json").write_text(dump(table))
    assert load(tmp_path / "t.json") == table
    assert isinstance(table, Table)


def test_a_library_is_compared_with_a_kernel_of_ours() -> None:
    pairs = set()

    class Bench(FakeBench):
        def differing(self, product: Product, one: Any, other: Any) -> int:
            pairs.add((one.config, other.config))
            return 0

    f, library = FakeFamily("f", offered=("small",)), FakeFamily("library", offered=("algo",))
    tune(products(UP), (1, 8), chooser(f, library), Bench(lambda name, m: 1.0))
    assert pairs == {("algo", "small")}


def test_what_was_refused_for_another_variant_is_not_admitted_by_a_table() -> None:
    f = FakeFamily("f", offered=("fast", "plain"), faults={"fast": flip(lambda p: p.dtype_out == "float32")})
    both = [pose(UP, contract=CONTRACT), pose(UP, contract=CONTRACT, out_dtype="float32")]
    table, _ = tune(both, (8,), chooser(f), FakeBench(lambda name, m: 1.0 if "fast" in name else 2.0))
    found = {(config, x.variant) for x in table.admitted for config in x.configs}
    assert ("fast", variant_of(both[0])) in found
    assert ("fast", variant_of(both[1])) not in found


def test_what_other_sources_had_is_not_admitted_for_these() -> None:
    one, other = pose(UP, contract=CONTRACT), pose(UP, contract=CONTRACT, out_dtype="float32")
    old = Admitted("f", "f-v0", variant_of(other), ("fast",), "2026-01-01")
    stale = Table("old.json", {**H200, "golden": golden_digest()}, "2026-01-01", admitted=(old,))
    here = Chooser(
        Admissions(FakeMachine(dict(H200)), Records(None)), {"f": FakeFamily("f", offered=("fast",))}, [stale]
    )
    table, _ = tune([one], (8,), here, FakeBench(lambda name, m: 1.0))
    assert {x.variant for x in table.admitted} == {variant_of(one)}
