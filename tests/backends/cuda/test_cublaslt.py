"""cuBLASLt's family: the column-major call that a product becomes, algorithms as text, the search, and launches."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided
from tests.backends.cuda.fake_cublaslt import FakeLt, LtError

from isogemm.backends.cuda import cublaslt, cublaslt_call, cublaslt_search
from isogemm.backends.cuda.cublaslt import CublasLt
from isogemm.backends.cuda.cublaslt_call import Call, as_call
from isogemm.backends.cuda.cublaslt_search import Algorithm
from isogemm.backends.cuda.product import Addresses, Product, Strides
from isogemm.blas import describe
from isogemm.contract.spec import Contract
from isogemm.errors import ContractError, DeviceError, LayoutError, OptionError

CHAIN = Contract.parse("tensor_core:sm90/chain")
LAYOUTS = ("NN", "NT", "TN", "TT")


def stored(rows: int, columns: int, letter: str, pad: int = 0, items: int = 1) -> np.ndarray[Any, Any]:
    """A view [rows, columns] (or [items, ...]) with rows ("N") or columns ("T") contiguous and `pad` more between."""
    shape = (rows, columns + pad) if letter == "N" else (columns, rows + pad)
    base = np.arange(items * shape[0] * shape[1], dtype=np.float32).reshape(items, *shape)
    view = base[:, :, :columns] if letter == "N" else base[:, :, :rows].transpose(0, 2, 1)
    return view if items > 1 else view[0]


def strides(x: np.ndarray[Any, Any]) -> Strides:
    steps = [s // x.itemsize for s in x.strides]
    return Strides(steps[-2], steps[-1], steps[0] if x.ndim == 3 else 0)


def product_of(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any], out: np.ndarray[Any, Any], **more: Any) -> Product:
    m, k = a.shape[-2:]
    n, items = b.shape[-1], a.shape[0] if a.ndim == 3 else 1
    types = {"dtype_a": "bfloat16", "dtype_b": "bfloat16", "dtype_out": "bfloat16", "contract": CHAIN} | more
    return Product(m, n, k, a=strides(a), b=strides(b), out=strides(out), batch=items, **types)


def layout_product(m: int = 48, n: int = 64, k: int = 96, layout: str = "NT", **more: Any) -> Product:
    return product_of(stored(m, k, layout[0]), stored(k, n, layout[1]), stored(m, n, more.pop("out", "N")), **more)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("out", "NT")
@pytest.mark.parametrize("pad", [0, 3])
@pytest.mark.parametrize("items", [1, 3])
@pytest.mark.parametrize("sizes", [(5, 7, 9), (1, 7, 9), (5, 1, 9), (5, 7, 1), (1, 1, 1)])
def test_call_is_the_blas_translation(layout: str, out: str, pad: int, items: int, sizes: tuple[int, int, int]) -> None:
    m, n, k = sizes
    a, b, c = stored(m, k, layout[0], pad, items), stored(k, n, layout[1], pad, items), stored(m, n, out, pad, items)
    said, call = describe(a, b, c), as_call(product_of(a, b, c))
    assert not said.copies
    assert call is not None
    got = (call.swapped, call.out.rows, call.out.columns, call.batch)
    assert got == (said.swapped, said.m, said.n, said.batch_count)
    for place, trans, matrix in (
        (said.first, call.trans_first, call.first),
        (said.second, call.trans_second, call.second),
        (said.out, "N", call.out),
    ):
        assert (trans, matrix.ld, matrix.stride) == (place.trans, place.ld, place.stride)
        assert matrix.ld >= matrix.rows


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("out", "NT")
@pytest.mark.parametrize("items", [1, 2])
def test_call_on_flat_memory_is_the_product(layout: str, out: str, items: int) -> None:
    a, b, c = stored(5, 9, layout[0], 2, items), stored(9, 7, layout[1], 1, items), stored(5, 7, out, 4, items)
    call = as_call(product_of(a, b, c))
    assert call is not None
    expected = a @ b
    c[...] = np.nan
    _interpret(call, {"a": a, "b": b, "out": c})
    assert np.array_equal(c, expected)


def _interpret(call: Call, memory: dict[str, np.ndarray[Any, Any]]) -> None:
    """What a column-major BLAS does with a call, on NumPy's memory."""

    def view(x: np.ndarray[Any, Any], matrix: cublaslt_call.Matrix) -> np.ndarray[Any, Any]:
        shape = (call.batch, matrix.rows, matrix.columns)
        return as_strided(x, shape, tuple(4 * s for s in (matrix.stride, 1, matrix.ld)))

    first, second = (memory["b"], memory["a"]) if call.swapped else (memory["a"], memory["b"])
    x, y, z = view(first, call.first), view(second, call.second), view(memory["out"], call.out)
    x = x.transpose(0, 2, 1) if call.trans_first == "T" else x
    y = y.transpose(0, 2, 1) if call.trans_second == "T" else y
    z[...] = x @ y


@pytest.mark.parametrize(
    "change",
    [
        {"a": Strides(0, 1)},  # rows repeat: a leading dimension of 0
        {"a": Strides(95, 1)},  # rows overlap
        {"b": Strides(2, 192)},  # nothing is contiguous
        {"b": Strides(-1, 96)},
        {"out": Strides(63, 1)},
        {"m": 0},
        {"k": 0},
        {"batch": 2},  # both items of out in one place
        {"batch": 70000, "out": Strides(64, 1, 48 * 64)},
        {"n": 2**31},
    ],
)
def test_what_no_leading_dimension_describes(change: dict[str, Any]) -> None:
    product = layout_product()
    assert as_call(product) is not None
    assert as_call(replace(product, **change)) is None
    assert not CublasLt().supports(replace(product, **change), "x #01")


def test_c_has_its_own_leading_dimension_but_out_s_direction() -> None:
    product = replace(layout_product(dtype_out="float32"), beta=1.0, dtype_c="float32", c=Strides(80, 1))
    call = as_call(product)
    assert call is not None
    assert (call.c.ld, call.out.ld) == (80, 64)
    assert as_call(replace(product, c=Strides(1, 48))) is None


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


@pytest.mark.parametrize(
    ("change", "legal"),
    [
        ({}, True),
        ({"dtype_out": "float32"}, True),
        ({"dtype_a": "float16", "dtype_b": "float16", "dtype_out": "float16"}, True),
        ({"dtype_a": "float16"}, False),
        ({"dtype_out": "float16"}, False),
        ({"dtype_a": "float32", "dtype_b": "float32", "dtype_out": "float32"}, False),
        ({"contract": Contract.parse("fma/chain")}, False),
        ({"contract": Contract.parse("tensor_core:sm90/leaf96")}, True),
        ({"contract": Contract.parse("tensor_core:sm90/leaf64")}, False),  # two leaves
        ({"contract": Contract.parse("tensor_core:sm90/tree2")}, False),
        ({"contract": Contract.parse("tensor_core:sm90/tree2"), "k": 16}, True),  # one block, one leaf
        ({"alpha": 0.5}, True),
        ({"alpha": 0.0}, False),  # the library would not look at A and B, nor at their NaN
        ({"dtype_bias": "bfloat16"}, True),
        ({"dtype_bias": "float32"}, False),
        ({"dtype_bias": "bfloat16", "bias_stride": 2}, False),
        ({"dtype_bias": "bfloat16", "out": Strides(1, 48)}, False),  # its bias would run along our rows
        ({"beta": 0.3, "c": Strides(64, 1), "dtype_c": "bfloat16"}, True),
        ({"beta": 1.0, "alpha": 0.5, "c": Strides(64, 1), "dtype_c": "bfloat16"}, False),  # a fused multiply-add
        ({"beta": 1.0, "c": Strides(64, 1), "dtype_c": "float32"}, False),
    ],
)
def test_what_the_family_supports(change: dict[str, Any], legal: bool) -> None:
    assert CublasLt().supports(replace(layout_product(), **change), "66 #42") is legal


@pytest.mark.parametrize(
    ("order", "alpha", "legal"), [("leaf96", 1.0, True), ("leaf96", 2.0, False), ("chain", 1.0, False)]
)
def test_accumulation_is_addition_with_one_leaf_only(order: str, alpha: float, legal: bool) -> None:
    contract = Contract.parse(f"tensor_core:sm90/{order}")
    product = layout_product(dtype_out="float32", contract=contract)
    product = replace(product, c=Strides(64, 1), dtype_c="float32", accumulate=True, alpha=alpha)
    assert CublasLt().supports(product, "66 #42") is legal


def test_alignment_counts_the_items_of_a_batch() -> None:
    a, b, c = stored(8, 12, "N", 0, 3), stored(12, 8, "T", 0, 3), stored(8, 8, "N", 0, 3)
    product = product_of(a, b, c)  # items are 192, 192 and 128 bytes apart
    call = as_call(product)
    assert call is not None
    assert cublaslt._alignment(product, call) == 64
    assert cublaslt._alignment(replace(product, align=8), call) == 8
    one = replace(product, batch=1)
    single = as_call(one)
    assert single is not None
    assert cublaslt._alignment(one, single) == 128


@pytest.fixture(autouse=True)
def _binding_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublaslt, "_installed", lambda: True)


@pytest.fixture
def lt(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeLt]:
    fake = FakeLt()
    for module in (cublaslt, cublaslt_call, cublaslt_search):
        monkeypatch.setattr(module, "binding", lambda: fake)
    for module in (cublaslt, cublaslt_call):
        monkeypatch.setattr(module, "handle", lambda device: 7 + device)
    cublaslt_search.capabilities.cache_clear()
    cublaslt_search.extents.cache_clear()
    cublaslt._search.cache_clear()
    cublaslt._around.cache_clear()
    yield fake
    cublaslt_search.capabilities.cache_clear()
    cublaslt_search.extents.cache_clear()
    cublaslt._search.cache_clear()
    cublaslt._around.cache_clear()


def config(**chosen: int) -> str:
    values = [chosen.get(name, 1 if name == "SPLITK_NUM" else 0) for name in cublaslt_search.SETTINGS]
    return f"x #{np.array(values, np.int32).tobytes().rstrip(bytes(1)).hex()}"


NEW = {"ID": 66, "TILE_ID": 1, "STAGES_ID": 35, "CLUSTER_SHAPE_ID": 3}


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


def test_around_is_every_configuration_of_a_tile(lt: FakeLt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublaslt, "_current_device", lambda: 0)
    found = CublasLt().around(layout_product(), config(**(NEW | {"TILE_ID": 2})))
    assert {x.split(" #")[0] for x in found} == {
        f"66 t64x8 s64xauto c{c} o{o} z0 i0" for c in ("1x1", "2x1", "1x2") for o in (1, 3)
    }


def test_configs_of_what_cannot_be_served_are_none() -> None:
    assert CublasLt().configs(layout_product(contract=Contract.parse("fma/chain"))) == ()


def test_build_refuses_what_cuts_k(lt: FakeLt) -> None:
    for wrong in ({"SPLITK_NUM": 2}, {"REDUCTION_SCHEME": 1}):
        with pytest.raises(ContractError, match="K in one piece"):
            CublasLt().build(layout_product(), config(**(NEW | wrong)), 0)


def test_build_has_the_library_check_the_algorithm(lt: FakeLt) -> None:
    with pytest.raises(LayoutError, match="what the library accepts"):
        CublasLt().build(layout_product(), config(**(NEW | {"CLUSTER_SHAPE_ID": 0})), 0)
    with pytest.raises(LayoutError):
        CublasLt().build(layout_product(k=0), config(**NEW), 0)
    with pytest.raises(OptionError):
        CublasLt().build(layout_product(), "w64 x16", 0)


def test_launch_passes_operands_in_the_order_of_the_call(lt: FakeLt) -> None:
    at = Addresses(a=0xA0, b=0xB0, out=0xD0)
    row = CublasLt().build(layout_product(), config(**NEW), 0)
    column = CublasLt().build(layout_product(out="T"), config(**NEW), 1)
    row(at, 5)
    column(at, 6)
    for call, first, second, on, stream in ((lt.calls[0], 0xB0, 0xA0, 7, 5), (lt.calls[1], 0xA0, 0xB0, 8, 6)):
        assert (call[0], call[3], call[5], call[8], call[10]) == (on, first, second, 0xD0, 0xD0)
        assert call[9] == call[11]  # no C: its layout is out's
        assert call[13:] == (0, 0, stream)
        assert [ctypes.c_float.from_address(call[i]).value for i in (2, 7)] == [1.0, 0.0]
        assert ctypes.string_at(call[12], 64) == Algorithm.parse(config(**NEW)).data
    assert lt.alive[lt.calls[0][1]]["TRANSA"] == 1  # weights [n, k] are a k x n matrix for the library: transposed
    assert lt.alive[lt.calls[0][1]]["TRANSB"] == 0


@pytest.mark.parametrize("accumulate", [False, True])
def test_launch_adds_c(lt: FakeLt, accumulate: bool) -> None:
    order = "leaf96" if accumulate else "chain"
    product = layout_product(dtype_out="float32", contract=Contract.parse(f"tensor_core:sm90/{order}"))
    product = replace(
        product, beta=0.0 if accumulate else 0.25, accumulate=accumulate, c=Strides(72, 1), dtype_c="float32"
    )
    launch = CublasLt().build(product, config(**NEW), 0)
    launch(Addresses(1, 2, 3, c=4), 5)
    (call,) = lt.calls
    assert (call[8], call[10]) == (4, 3)
    assert (lt.alive[call[9]]["ld"], lt.alive[call[11]]["ld"]) == (72, 64)
    scalars = [ctypes.c_float.from_address(call[i]).value for i in (2, 7)]
    assert scalars == [1.0, 1.0 if accumulate else 0.25]


def test_launch_keeps_a_descriptor_for_each_bias(lt: FakeLt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublaslt, "BIASES", 2)
    launch = CublasLt().build(layout_product(dtype_bias="bfloat16"), config(**NEW), 0)
    for bias in (0x10, 0x20, 0x10, 0x20, 0x30, 0x10):
        launch(Addresses(1, 2, 3, bias=bias), 5)
        assert lt.alive[lt.calls[-1][1]]["BIAS_POINTER"] == bias
        assert lt.alive[lt.calls[-1][1]]["EPILOGUE"] == 4
        assert lt.alive[lt.calls[-1][1]]["BIAS_DATA_TYPE"] == cublaslt_call.DATA_TYPE["bfloat16"]
    descriptors = [call[1] for call in lt.calls]
    assert descriptors[:2] == descriptors[2:4]
    assert descriptors[5] not in descriptors[:2]  # the third bias cleared what was kept
    gc.collect()
    assert len(lt.alive) == 4 * 2  # two biases, a product and three layouts each


def test_launch_describes_a_batch(lt: FakeLt) -> None:
    a, b, c = stored(48, 96, "N", 0, 3), stored(96, 64, "T", 0, 3), stored(48, 64, "N", 0, 3)
    product = replace(product_of(a, b, c), b=Strides(1, 96, 0))  # one B for all items
    launch = CublasLt().build(product, config(**NEW), 0)
    launch(Addresses(1, 2, 3), 5)
    (call,) = lt.calls
    assert [lt.alive[call[i]]["STRIDED_BATCH_OFFSET"] for i in (4, 6, 11)] == [0, 48 * 96, 48 * 64]
    assert all(lt.alive[call[i]]["BATCH_COUNT"] == 3 for i in (4, 6, 11))


def test_launch_with_a_workspace_takes_it_from_the_allocator(lt: FakeLt, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[int, int]] = []

    class Room:
        def data_ptr(self) -> int:
            return 0xCAFE

    def workspace(nbytes: int, device: int) -> Room:
        taken.append((nbytes, device))
        return Room()

    monkeypatch.setattr(cublaslt, "workspace", workspace)
    launch = CublasLt().build(layout_product(), config(**(NEW | {"TILE_ID": 3})), 2)
    launch(Addresses(1, 2, 3), 5)
    launch(Addresses(1, 2, 3), 5)
    assert taken == [(1024, 2), (1024, 2)]
    assert lt.calls[-1][13:] == (0xCAFE, 1024, 5)


def test_a_refused_launch_is_a_typed_error(lt: FakeLt) -> None:
    launch = CublasLt().build(layout_product(), config(**NEW), 0)
    lt.fail = True
    with pytest.raises(DeviceError, match="an unsupported value"):
        launch(Addresses(1, 2, 3), 5)
    assert not lt.calls


def test_descriptors_live_as_long_as_their_launch(lt: FakeLt) -> None:
    launch = CublasLt().build(layout_product(), config(**NEW), 0)
    gc.collect()
    assert len(lt.alive) == 4
    launch(Addresses(1, 2, 3), 5)
    del launch
    gc.collect()
    assert not lt.alive


def test_without_the_binding_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    cublaslt_call.binding.cache_clear()
    monkeypatch.setattr(cublaslt_call.importlib, "import_module", missing)
    with pytest.raises(DeviceError, match="nvmath"):
        cublaslt_call.binding()


def test_without_the_binding_there_is_no_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublaslt, "_installed", lambda: False)
    with pytest.raises(ImportError, match="nvmath"):
        CublasLt()


def test_a_library_that_cannot_be_used_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(FakeLt):
        def create(self) -> int:
            raise LtError("CUBLAS_STATUS_NOT_INITIALIZED")

    broken = Broken()
    for name in ("context", "relaxed"):
        monkeypatch.setattr(cublaslt_call, name, lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(cublaslt_call, "binding", lambda: broken)
    cublaslt_call.handle.cache_clear()
    with pytest.raises(DeviceError, match="NOT_INITIALIZED"):
        cublaslt_call.handle(0)


def test_fingerprint_is_of_sources_that_reach_the_bits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole = cublaslt._fingerprint.__wrapped__()
    changed = tmp_path / "cublaslt_call.py"
    changed.write_text(Path(cublaslt_call.__file__).read_text() + "\n# changed\n")
    monkeypatch.setattr(cublaslt_call, "__file__", str(changed))
    assert cublaslt._fingerprint.__wrapped__() != whole
    assert len(whole) == 16
