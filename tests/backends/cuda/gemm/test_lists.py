"""Lists in one launch: what may be one, its table, and the kernel it takes. Bits are compared in test_forms."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from isogemm.backends.cuda.gemm import choose, execute
from isogemm.backends.cuda.gemm.lists import family as grouped
from isogemm.backends.cuda.gemm.tile.family import CHAIN, IEEE, Tile, TileFamily
from isogemm.contract.spec import Contract
from isogemm.errors import ContractError, DeviceError
from isogemm.planner.admission import Admission
from isogemm.planner.fingerprint import fingerprint
from isogemm.problem.product import Addresses, Product, Strides


def product(m: int, n: int, k: int, contract: str = "tensor_core:sm90/chain", dtype: str = "bfloat16") -> Product:
    return Product(
        m, n, k, dtype, dtype, dtype, Contract.parse(contract), Strides(k, 1), Strides(1, k), Strides(n, 1), align=16
    )


P = product(33, 96, 100)


def test_one_launch_takes_equal_types_and_epilogues_of_any_size():
    assert grouped.uniform([P, product(7, 24, 256)])
    assert grouped.uniform([product(3, 4, 5, "fma/leaf128", "float32")])


@pytest.mark.parametrize(
    "other",
    [
        replace(P, dtype_out="float32"),
        replace(P, alpha=2.0),
        replace(P, dtype_bias="float32"),
        replace(P, batch=2),
        replace(P, contract=Contract.parse("tensor_core:sm90/leaf32")),
    ],
)
def test_what_differs_goes_one_by_one(other):
    assert not grouped.uniform([P, other])


@pytest.mark.parametrize("contract", ["tf32:sm90/chain", "tf32x3:sm90/chain", "tf32x3:sm90/leaf256", "fma/tree4"])
def test_contracts_without_a_kernel_for_lists_go_one_by_one(contract):
    one = product(8, 16, 64, contract, "float32")
    assert not grouped.uniform([one, one])
    assert not grouped.FAMILY.supports(one, "x64 w64 k16 s3 n4")
    assert execute.runner([(one, Addresses(1, 2, 3))] * 2) is execute.run_loop


def test_extents_that_the_kernel_cannot_count_go_one_by_one():
    assert grouped.uniform([P, replace(P, m=2**30 - 1)])
    assert not grouped.uniform([P, replace(P, m=2**31 + 5)])


def test_two_strides_of_one_are_not_aligned():
    packed = product(32, 64, 128)
    overlapping = replace(packed, a=Strides(1, 1))  # a Hankel matrix: rows begin an element apart
    assert grouped._aligned(packed)
    assert not grouped._aligned(overlapping)
    assert not grouped._aligned(replace(packed, n=1, b=Strides(1, 1), out=Strides(16, 1)))
    assert grouped._looks(packed) != grouped._looks(overlapping)


def test_a_list_is_refused_before_any_of_it_is_launched(monkeypatch):
    launched = []
    wide = replace(P, a=Strides(1, 40))

    def admitted(products, device):
        if wide in products:
            raise ContractError("kernels", limit="one", value="none", nearest="gemm")
        return "x64 w64 k16 s3 n4"

    monkeypatch.setattr(grouped, "_admitted", admitted)
    monkeypatch.setattr(grouped, "_enqueue", lambda part, *_: launched.extend(part))
    at = Addresses(16, 32, 48)
    grouped.run_items([(P, at), (P, at)], 0, 7)
    assert len(launched) == 2
    with pytest.raises(ContractError):
        grouped.run_items([(P, at), (wide, at)], 0, 7)
    assert len(launched) == 2


@pytest.mark.parametrize(
    ("state", "capturing", "error"),
    [("unknown", True, DeviceError), ("refused", True, ContractError), ("refused", False, ContractError)],
)
def test_a_list_that_no_kernel_serves(state, capturing, error, monkeypatch):
    admissions = SimpleNamespace(
        verdict=lambda *_: Admission(state), machine=SimpleNamespace(capturing=lambda: capturing), stamp={}
    )
    planner = SimpleNamespace(admissions=admissions, check_arithmetic=lambda contract: None)
    monkeypatch.setattr(choose, "chooser", lambda device: planner)
    with pytest.raises(error, match="capturing" if error is DeviceError else "item by item"):
        grouped._admitted([P, P], 0)


def test_verdicts_on_lists_depend_on_what_fills_their_tables():
    assert fingerprint(grouped.FAMILY.home) != fingerprint(CHAIN.home)


def test_launches_are_kept_by_the_sign_of_a_zero_alpha(monkeypatch):
    made = SimpleNamespace(serve=lambda product: str(product.alpha))
    monkeypatch.setattr(choose, "chooser", lambda device: planner)
    planner = type("Planner", (), {"serve": staticmethod(made.serve)})()
    found = [execute.choose(replace(P, alpha=alpha), 0) for alpha in (0.0, -0.0, 2.0, 0.0, -0.0)]
    assert found == ["0.0", "-0.0", "2.0", "0.0", "-0.0"]


def test_the_table_has_a_row_an_item_and_a_word_a_program():
    q = replace(product(7, 24, 256), c=Strides(25, 1), dtype_c="float32", beta=0.5)
    words, programs = grouped.fill([(P, Addresses(10, 20, 30)), (q, Addresses(40, 50, 60, 70))], 16, 64)
    rows = words[: 2 * grouped.FIELDS].reshape(2, -1)
    assert rows[0].tolist() == [10, 20, 30, 0, 33, 96, 100, 100, 1, 1, 100, 96, 1, 0, 0]
    assert rows[1].tolist() == [40, 50, 60, 70, 7, 24, 256, 256, 1, 1, 256, 24, 1, 25, 1]
    pairs = words[2 * grouped.FIELDS :].view(np.int32).reshape(-1, 2)
    assert programs == len(pairs) == 3 * 2 + 1
    assert pairs.tolist() == [[0, i] for i in range(6)] + [[1, 0]]


@pytest.mark.parametrize("config", [*grouped.CONFIGS.values(), *grouped.FMA_CONFIGS.values()])
def test_configurations_of_lists_are_the_tile_s_without_a_dependent_launch(config):
    tile = Tile.parse(config)
    assert tile is not None
    assert tile.lines is None


def test_a_tile_s_text():
    assert Tile.parse("w64 x16 k128 s5 n4 p8 e") == Tile(16, 64, 128, 5, 4, True, 8, True)
    assert Tile.parse("x128 w64 k32 s3 n8") == Tile(128, 64, 32, 3, 8, False, None, False)
    for text in ("", "w64 x16", "w64 w16 k16 s1 n1", "w64 x16 k128 s5 n4 p8 f", "w64 x16 k128 s5 n4 "):
        assert Tile.parse(text) is None


@pytest.mark.parametrize("m", [1, 8, 9, 16, 32, 64, 65, 4096])
def test_there_is_a_plain_kernel_for_everything(m):
    odd = replace(product(m, 33, 7), a=Strides(3, 5), b=Strides(2, 77), align=2)
    for family, given in (
        (CHAIN, odd),
        (CHAIN, replace(odd, contract=Contract.parse("tensor_core:native/tree8"))),
        (IEEE, replace(odd, contract=Contract.parse("fma/chain"))),
        (IEEE, replace(odd, contract=Contract.parse("fma/leaf3"), dtype_a="float32")),
    ):
        listed = family.configs(given)
        assert listed[-1] == family.plain[-1]
        assert all(family.supports(given, config) for config in listed)
    assert not CHAIN.configs(replace(odd, dtype_b="float16"))
    assert not CHAIN.configs(replace(odd, contract=Contract.parse("fma/chain")))
    assert not IEEE.configs(odd)


def test_lines_are_only_prefetched_where_columns_of_b_hold_them():
    config = "w16 x8 k512 s4 n2 p8"
    assert CHAIN.supports(product(1, 64, 512), config)
    assert not CHAIN.supports(product(1, 64, 504), config)
    assert not CHAIN.supports(replace(product(1, 64, 512), b=Strides(64, 1)), config)


def test_lists_under_another_device_s_arithmetic_are_refused_like_single_products(monkeypatch):
    from tests.planner.test_choose import chooser as fake_chooser

    planner = fake_chooser()
    planner._arithmetic = "tensor_core:sm90"
    monkeypatch.setattr(choose, "chooser", lambda device: planner)
    other = replace(P, contract=Contract.parse("tensor_core:native"))
    with pytest.raises(ContractError, match="tensor_core:sm90, the arithmetic of its tensor cores"):
        grouped.run_items([(other, Addresses(1, 2, 3))] * 2, 0, 0)


@pytest.mark.parametrize(
    ("family", "arithmetic", "dtype"), [(CHAIN, "tensor_core:sm90", "bfloat16"), (IEEE, "fma", "float32")]
)
def test_single_products_are_as_large_as_the_kernels_count(family: TileFamily, arithmetic: str, dtype: str) -> None:
    """In 32 bits, up to a tile beyond an edge, and with leaves to where the next one would begin."""
    plain = Product(
        16, 64, 64, dtype, dtype, dtype, Contract.parse(f"{arithmetic}/chain"), Strides(64, 1), Strides(1, 64),
        Strides(64, 1),
    )  # fmt: skip
    config = family.configs(plain)[-1]
    for name in ("m", "n", "k"):
        assert family.supports(replace(plain, **{name: 2**31 - 1024}), config)
        assert not family.supports(replace(plain, **{name: 2**31 - 8}), config)
        assert not family.configs(replace(plain, **{name: 2**31}))
    for order, served in (("leaf1024", True), (f"leaf{2**28}", True), (f"leaf{2**30}", False), (f"leaf{2**40}", False)):
        long = replace(plain, k=3 * 2**29, contract=Contract.parse(f"{arithmetic}/{order}"))
        assert family.supports(long, config) is served
