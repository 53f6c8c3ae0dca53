"""cuBLASLt's algorithms: as text, from the heuristic, by enumeration, and which of them are offered."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
from tests.backends.cuda.gemm.fake_cublaslt import NEW, FakeLt, config, layout_product, patched

from isogemm.backends.cuda.gemm.cublaslt import call as cublaslt_call
from isogemm.backends.cuda.gemm.cublaslt import family as cublaslt
from isogemm.backends.cuda.gemm.cublaslt import search as cublaslt_search
from isogemm.backends.cuda.gemm.cublaslt.call import as_call
from isogemm.backends.cuda.gemm.cublaslt.family import CublasLt
from isogemm.backends.cuda.gemm.cublaslt.search import Algorithm
from isogemm.contract.spec import Contract
from isogemm.errors import LayoutError, OptionError
from isogemm.problem.product import Product


@pytest.fixture(autouse=True)
def lt(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeLt]:
    with patched(monkeypatch) as fake:
        yield fake


def test_text_of_an_algorithm_round_trips() -> None:
    for data in (bytes([66, 0, 0, 0, 10]), bytes(range(64)), bytes(63) + b"\x01"):
        algorithm = Algorithm(data.ljust(64, b"\0"), "66 t64x8")
        again = Algorithm.parse(str(algorithm))
        assert (again.data, again.label) == (algorithm.data, "66 t64x8")
        assert str(again) == str(algorithm)
    assert str(Algorithm(b"\x42".ljust(64, b"\0"), "66 t64x8")) == "66 t64x8 #42"
    assert Algorithm.parse("another label #42") == Algorithm.parse("66 #42")


@pytest.mark.parametrize("text", ["", "66 t64x8", "66 #", "66 #4", "66 #xy", "66 #" + "00" * 65, "66 #42 x", "#AB"])
def test_text_that_is_no_algorithm(text: str) -> None:
    with pytest.raises(OptionError, match="cuBLASLt algorithm"):
        Algorithm.parse(text)
    assert not CublasLt().supports(layout_product(), text)


def test_heuristic_asks_without_reductions_and_drops_what_cuts_k(lt: FakeLt) -> None:
    lt.listed = [NEW | {"SPLITK_NUM": 4}, NEW, NEW | {"REDUCTION_SCHEME": 2}, NEW | {"CUSTOM_OPTION": 1}]
    call = as_call(layout_product())
    assert call is not None
    found = cublaslt_search.heuristic(7, cublaslt_call.Descriptors(call), 16)
    assert [x.algorithm.label for x in found] == [
        "66 t64x64 s64xauto c2x1 o0 z0 i0",
        "66 t64x64 s64xauto c2x1 o1 z0 i0",
    ]
    assert [x["MAX_WORKSPACE_BYTES"] for x in lt.asked] == [0, 4 << 20, 32 << 20]
    assert all(x["REDUCTION_SCHEME_MASK"] == 0 and x["MIN_ALIGNMENT_D_BYTES"] == 16 for x in lt.asked)
    gc.collect()
    assert not lt.alive  # preferences and descriptors are destroyed


def enumerated(product: Product, align: int = 16, **options: Any) -> list[str]:
    call = as_call(product)
    assert call is not None
    found = cublaslt_search.enumerate_algorithms(7, cublaslt_call.Descriptors(call), align, **options)
    return [x.algorithm.label for x in found]


def test_enumeration_finds_every_accepted_configuration_once(lt: FakeLt) -> None:
    labels = enumerated(layout_product())
    new = [x for x in labels if x.startswith("66")]
    expected = {f"66 t64x8 s64xauto c{c} o{o} z0 i0" for c in ("1x1", "2x1", "1x2") for o in (1, 3)}
    expected |= {f"66 t8x64 s64xauto c{c} o{o} z0 i0" for c in ("1x1", "2x1", "1x2") for o in (0, 2)}
    expected |= {f"66 t64x64 s64xauto c{c} o{o} z0 i0" for c in ("1x1", "2x1", "1x2", "4x1") for o in range(4)}
    assert set(new) == expected
    assert len(new) == len(expected)
    # An algorithm that takes every cluster does not look at them: it is listed once, and once swizzled.
    assert [x for x in labels if x.startswith("21")] == [
        "21 tUNDEFINED sundefined cauto o0 z0 i0", "21 tUNDEFINED sundefined c1x1 o0 z1 i0"
    ]  # fmt: skip


def test_enumeration_leaves_out_what_wants_more_alignment(lt: FakeLt) -> None:
    assert {x.split()[0] for x in enumerated(layout_product(), align=8)} == {"21"}
    assert enumerated(layout_product(), align=1) == []


def test_enumeration_stops_in_time_with_the_likeliest_tiles(lt: FakeLt) -> None:
    tiles = [x.split()[1] for x in enumerated(layout_product(m=8), seconds=0.0) if x.startswith("66")]
    assert set(tiles) == {"t64x8"}  # one tile of 64 x 8 covers 64 x 8


def test_enumeration_does_not_look_at_hopeless_tiles(lt: FakeLt) -> None:
    tiles = {x.split()[1] for x in enumerated(layout_product(m=8, n=64000)) if x.startswith("66")}
    assert tiles == {"t64x8", "t64x64"}  # 61 waves of 8 x 64 against 8 of 64 x 8


def test_cost_prefers_tiles_that_cover_in_one_wave() -> None:
    call = as_call(layout_product(m=16, n=8192))
    assert call is not None
    cost = cublaslt_search.cost
    assert cost((64, 16), call) < cost((64, 256), call)  # 128 tiles of either: the wider one loads padding
    assert cost((64, 16), call) < cost((32, 16), call) * 2
    assert cost((32, 16), call) > cost((64, 16), call)  # 256 tiles: a second wave
    assert cost(None, call) == float("inf")


def test_configs_are_the_heuristic_s_first(lt: FakeLt, monkeypatch: pytest.MonkeyPatch) -> None:
    lt.listed = [{"ID": 21}, NEW | {"CUSTOM_OPTION": 2}]
    found = cublaslt._search(layout_product(), 0)
    assert found[0].startswith("66 t64x64 s64xauto c2x1 o2 z0 i0 #")  # id 21 is not one that walks the chain
    assert [x.split()[0] for x in found] == sorted((x.split()[0] for x in found), reverse=True)
    assert found[[x.split()[0] for x in found].index("21")].startswith("21 tUNDEFINED sundefined cauto o0 z0 i0 #")
    assert len(found) == len(set(found))
    assert all(CublasLt().supports(layout_product(), x) for x in found)
    monkeypatch.setattr(cublaslt, "MOST", 5)
    cublaslt._search.cache_clear()
    assert cublaslt._search(layout_product(), 0) == found[:5]


def test_shortlist_takes_the_usual_variants_of_every_tile(lt: FakeLt) -> None:
    call = as_call(layout_product())
    assert call is not None
    more = cublaslt_search.enumerate_algorithms(7, cublaslt_call.Descriptors(call), 16)
    short = [x.algorithm.label for x in cublaslt_search.shortlist([], more, 99) if x.algorithm.label[:2] == "66"]
    tiles = [(x.split()[1], int(x.split()[4][1:]) & 1) for x in short]
    assert {tile: tiles.count(tile) for tile in tiles} == {
        ("t64x64", 0): 4, ("t64x64", 1): 4, ("t64x8", 1): 4, ("t8x64", 0): 4
    }  # fmt: skip
    # 4x1, 1x2 the other way round, 2x1, then 2x1 with what else there is: options are 0 to 3 here
    assert [x.split()[3:5] for x in short if "t64x64" in x and int(x.split()[4][1:]) % 2 == 0] == [
        ["c4x1", "o0"], ["c1x2", "o2"], ["c2x1", "o0"], ["c1x1", "o0"]
    ]  # fmt: skip
    assert cublaslt_search.shortlist(more[:3], more, 3) == sorted(more[:3], key=lambda x: x.algorithm.label[:2] != "66")


def test_configs_of_what_cannot_be_served_are_none() -> None:
    assert CublasLt().configs(layout_product(contract=Contract.parse("fma/chain"))) == ()


@pytest.mark.parametrize("operand", "ABCD")
def test_every_operand_has_to_be_aligned(operand, lt, monkeypatch):
    wants = cublaslt_search._capability

    def capability(lt, at, name):
        if name.startswith("MIN_"):
            return (16,) if name == f"MIN_ALIGNMENT_{operand}_BYTES" else (1,)
        return wants(lt, at, name)

    monkeypatch.setattr(cublaslt_search, "_capability", capability)
    descriptors = cublaslt_call.Descriptors(as_call(layout_product()))
    assert not cublaslt_search.enumerate_algorithms(7, descriptors, 8)


def test_a_state_of_an_algorithm_is_a_refusal(lt, monkeypatch):
    class Unwilling(FakeLt):
        def matmul_algo_check(self, *arguments):
            cublaslt_search._Result.from_address(arguments[-1]).state = 15

    fake = Unwilling()
    fake.alive = lt.alive
    for module in (cublaslt_search, cublaslt_call):
        monkeypatch.setattr(module, "binding", lambda: fake)
    with pytest.raises(LayoutError, match="what the library accepts"):
        CublasLt().bind(layout_product(), config(**NEW), 0)


def test_a_state_of_an_entry_leaves_it_out(lt):
    lt.listed, honest = [NEW], lt.matmul_algo_get_heuristic

    def ask(*arguments):
        honest(*arguments)
        cublaslt_search._Result.from_address(arguments[-2]).state = 15

    lt.matmul_algo_get_heuristic = ask
    assert cublaslt_search.heuristic(7, cublaslt_call.Descriptors(as_call(layout_product())), 16) == []
