"""cuBLASLt's family: the column-major call that a product becomes, what is supported, and launches."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided
from tests.backends.cuda.gemm.fake_cublaslt import (
    NEW,
    FakeLt,
    LtError,
    config,
    layout_product,
    patched,
    product_of,
    stored,
)

from isogemm.backends.cuda.gemm.cublaslt import call as cublaslt_call
from isogemm.backends.cuda.gemm.cublaslt import family as cublaslt
from isogemm.backends.cuda.gemm.cublaslt.call import CublasCall, as_call
from isogemm.backends.cuda.gemm.cublaslt.family import CublasLt
from isogemm.backends.cuda.gemm.cublaslt.search import Algorithm
from isogemm.blas import describe
from isogemm.contract.spec import Contract
from isogemm.errors import ContractError, DeviceError, LayoutError, OptionError
from isogemm.problem.product import Addresses, Strides

LAYOUTS = ("NN", "NT", "TN", "TT")
BINDING, HANDLE = cublaslt_call.binding, cublaslt_call.handle  # those that the fixture replaces


@pytest.fixture(autouse=True)
def lt(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeLt]:
    with patched(monkeypatch) as fake:
        yield fake


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


def _interpret(call: CublasCall, memory: dict[str, np.ndarray[Any, Any]]) -> None:
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
        ({"contract": Contract.parse("tensor_core:sm90/leaf64")}, False),  # two leaves, whose sum is rounded once
        ({"contract": Contract.parse("tensor_core:sm90/leaf64"), "dtype_out": "float32"}, True),
        ({"contract": Contract.parse("tensor_core:sm90/leaf64"), "dtype_out": "float32", "alpha": 2.0}, False),
        (
            {"contract": Contract.parse("tensor_core:sm90/leaf64"), "dtype_out": "float32", "dtype_bias": "float32"},
            False,
        ),
        ({"contract": Contract.parse("tensor_core:sm90/tree2")}, False),
        ({"contract": Contract.parse("tensor_core:sm90/tree2"), "k": 16}, True),  # one block, one leaf
        ({"alpha": 0.5}, True),
        ({"alpha": 0.0}, False),  # the library would not look at A and B, nor at their NaN
        ({"dtype_bias": "bfloat16"}, True),
        ({"dtype_bias": "bfloat16", "align": 16}, True),
        (
            {"dtype_bias": "bfloat16", "align": 8},
            False,
        ),  # it is read 16 bytes at a time, whatever alignment is asked for
        ({"align": 8}, True),
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
    ("order", "alpha", "legal"),
    [
        ("leaf96", 1.0, True),
        ("leaf64", 1.0, True),
        ("leaf96", 2.0, False),
        ("leaf64", 2.0, False),
        ("chain", 1.0, False),
    ],
)
def test_accumulation_is_addition_with_leaves_only(order: str, alpha: float, legal: bool) -> None:
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


def test_build_refuses_what_cuts_k(lt: FakeLt) -> None:
    for wrong in ({"SPLITK_NUM": 2}, {"REDUCTION_SCHEME": 1}):
        with pytest.raises(ContractError, match="K in one piece"):
            CublasLt().bind(layout_product(), config(**(NEW | wrong)), 0)


def test_build_has_the_library_check_the_algorithm(lt: FakeLt) -> None:
    with pytest.raises(LayoutError, match="what the library accepts"):
        CublasLt().bind(layout_product(), config(**(NEW | {"CLUSTER_SHAPE_ID": 0})), 0)
    with pytest.raises(LayoutError):
        CublasLt().bind(layout_product(k=0), config(**NEW), 0)
    with pytest.raises(OptionError):
        CublasLt().bind(layout_product(), "w64 x16", 0)


def test_launch_passes_operands_in_the_order_of_the_call(lt: FakeLt) -> None:
    at = Addresses(a=0xA0, b=0xB0, out=0xD0)
    row = CublasLt().bind(layout_product(), config(**NEW), 0)
    column = CublasLt().bind(layout_product(out="T"), config(**NEW), 1)
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
    launch = CublasLt().bind(product, config(**NEW), 0)
    launch(Addresses(1, 2, 3, c=4), 5)
    (call,) = lt.calls
    assert (call[8], call[10]) == (4, 3)
    assert (lt.alive[call[9]]["ld"], lt.alive[call[11]]["ld"]) == (72, 64)
    scalars = [ctypes.c_float.from_address(call[i]).value for i in (2, 7)]
    assert scalars == [1.0, 1.0 if accumulate else 0.25]


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(("order", "lengths"), [("leaf32", [32, 32, 32]), ("leaf64", [64, 32])])
def test_leaves_are_launched_in_turn_onto_the_output(
    lt: FakeLt, order: str, lengths: list[int], accumulate: bool
) -> None:
    product = layout_product(dtype_out="float32", contract=Contract.parse(f"tensor_core:sm90/{order}"))
    if accumulate:
        product = replace(product, accumulate=True, c=Strides(72, 1), dtype_c="float32")
    launch = CublasLt().bind(product, config(**NEW), 0)
    launch(Addresses(0x1000, 0x2000, 3, c=4 * accumulate), 5)
    later = len(lengths) - 1
    begins = [2 * lengths[0] * i for i in range(later + 1)]
    assert [(call[5] - 0x1000, call[3] - 0x2000) for call in lt.calls] == [(begin, begin) for begin in begins]
    assert [lt.alive[call[4]]["rows"] for call in lt.calls] == lengths  # weights, transposed
    assert [(call[8], call[10]) for call in lt.calls] == [(4 if accumulate else 3, 3), *[(3, 3)] * later]
    assert [lt.alive[call[9]]["ld"] for call in lt.calls] == [72 if accumulate else 64, *[64] * later]
    betas = [ctypes.c_float.from_address(call[7]).value for call in lt.calls]
    assert betas == [float(accumulate), *[1.0] * later]


def test_leaves_are_looked_up_by_a_whole_one() -> None:
    one = layout_product(dtype_out="float32", contract=Contract.parse("tensor_core:sm90/leaf32"))
    two = replace(one, contract=Contract.parse("tensor_core:sm90/leaf64"))
    assert [(walk.k, walk.accumulate) for walk in cublaslt.walks(one)] == [(32, False), (32, True), (32, True)]
    assert [(walk.k, walk.accumulate) for walk in cublaslt.walks(two)] == [(64, False), (32, True)]
    assert cublaslt._longest(one) is cublaslt.walks(one)[2]
    assert cublaslt._longest(two) is cublaslt.walks(two)[0]
    assert [walk.align for walk in cublaslt.walks(one)] == [64] * 3  # leaves begin 64 bytes apart


def test_leaves_are_not_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    product = layout_product(dtype_out="float32", contract=Contract.parse("tensor_core:sm90/leaf32"))
    monkeypatch.setattr(cublaslt, "MOST_LEAVES", 3)
    assert len(cublaslt.walks.__wrapped__(product)) == 3
    monkeypatch.setattr(cublaslt, "MOST_LEAVES", 2)
    assert cublaslt.walks.__wrapped__(product) == ()


def test_launch_keeps_a_descriptor_for_each_bias(lt: FakeLt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublaslt, "BIASES", 2)
    launch = CublasLt().bind(layout_product(dtype_bias="bfloat16"), config(**NEW), 0)
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
    launch = CublasLt().bind(product, config(**NEW), 0)
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
    launch = CublasLt().bind(layout_product(), config(**(NEW | {"TILE_ID": 3})), 2)
    launch(Addresses(1, 2, 3), 5)
    launch(Addresses(1, 2, 3), 5)
    assert taken == [(1024, 2), (1024, 2)]
    assert lt.calls[-1][13:] == (0xCAFE, 1024, 5)


def test_launch_enters_its_device_where_there_are_several(lt: FakeLt, monkeypatch: pytest.MonkeyPatch) -> None:
    inside: list[int] = []

    @contextlib.contextmanager
    def context(device: int) -> Iterator[None]:
        inside.append(device)
        yield
        inside.append(len(lt.calls))

    monkeypatch.setattr(cublaslt, "count", lambda: 2)
    monkeypatch.setattr(cublaslt, "context", context)
    CublasLt().bind(layout_product(), config(**NEW), 1)(Addresses(1, 2, 3), 5)
    assert inside == [1, 1]  # the call was made between entering device 1 and leaving it


def test_a_refused_launch_is_a_typed_error(lt: FakeLt) -> None:
    launch = CublasLt().bind(layout_product(), config(**NEW), 0)
    lt.fail = True
    with pytest.raises(DeviceError, match="an unsupported value"):
        launch(Addresses(1, 2, 3), 5)
    assert not lt.calls


def test_descriptors_live_as_long_as_their_launch(lt: FakeLt) -> None:
    launch = CublasLt().bind(layout_product(), config(**NEW), 0)
    gc.collect()
    assert len(lt.alive) == 4
    launch(Addresses(1, 2, 3), 5)
    del launch
    gc.collect()
    assert not lt.alive


def test_without_the_binding_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(cublaslt_call.importlib, "import_module", missing)
    with pytest.raises(DeviceError, match="nvmath"):
        BINDING.__wrapped__()


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
    with pytest.raises(DeviceError, match="NOT_INITIALIZED"):
        HANDLE.__wrapped__(0)


@pytest.mark.parametrize("beta", [0.5, 1.0])
def test_c_is_added_behind_all_leaves(lt, beta):
    p = layout_product(dtype_out="float32", contract=Contract.parse("tensor_core:sm90/leaf64"))
    assert CublasLt().supports(p, "66 #42")
    assert not CublasLt().supports(replace(p, beta=beta, c=Strides(64, 1), dtype_c="float32"), "66 #42")


@pytest.mark.parametrize("step", [48 * 96, 2**33])
def test_two_items_are_a_batch_however_far_apart(lt, step):
    a, b, c = (stored(*of, 0, 2) for of in ((48, 96, "N"), (96, 64, "T"), (48, 64, "N")))
    p = replace(product_of(a, b, c), b=Strides(1, 96, step))
    launch = CublasLt().bind(p, config(**NEW), 0)  # which keeps the descriptors
    launch(Addresses(1, 2, 3), 5)
    (call,) = lt.calls
    assert [lt.alive[call[i]]["BATCH_COUNT"] for i in (4, 6, 11)] == [2] * 3
    assert lt.alive[call[4]]["STRIDED_BATCH_OFFSET"] == step


def test_a_bias_has_its_own_type(lt):
    p = layout_product(dtype_out="float32", dtype_bias="float32")
    launch = CublasLt().bind(p, config(**NEW), 0)
    launch(Addresses(1, 2, 3, bias=16), 5)
    assert lt.alive[lt.calls[-1][1]]["BIAS_DATA_TYPE"] == cublaslt_call.DATA_TYPE["float32"]


def test_extents_beyond_an_int_are_for_others(lt):
    far = 2**31
    for change in (
        {"m": far}, {"n": far, "out": Strides(far, 1)}, {"k": far, "a": Strides(far, 1), "b": Strides(1, far)},
    ):  # fmt: skip
        assert as_call(replace(layout_product(), **change)) is None
