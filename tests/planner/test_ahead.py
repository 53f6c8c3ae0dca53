"""What is built for products to come, in which turn and for which variants."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.planner.fakes import FakeFamily, linear

from isogemm.planner.ahead import Ahead, ahead, siblings
from isogemm.planner.tables import Use
from isogemm.planner.trials import variant_of
from isogemm.problem.product import Product, Strides

P = linear(300, 64, 1024)
LAYER = {
    f"tensor_core:sm90/chain bfloat16*bfloat16>bfloat16 {rest}"
    for rest in (
        "NT>N align=128/16",
        "NN>N align=128/16",
        "TN>N align=128/16",
        "NT>N align=128/16 bias=bfloat16:unit",
        "NN>N align=128/16 bias=bfloat16:unit",
    )
}


class Palette(FakeFamily):
    """A family with more kernels for a variant than are built soon; one with a bias has fewer."""

    def palette(self, product: Product) -> tuple[str, ...]:
        return ("a", "b") if product.dtype_bias else ("a", "b", "c", "d", "e")


@pytest.mark.parametrize("rows", [1, 7, 300])
def test_a_layer_has_its_gradients_and_a_bias_beside_a_product(rows: int) -> None:
    product = replace(P, m=rows)
    found = [variant_of(x) for x in siblings(product)]
    assert {*found, variant_of(product)} == LAYER
    assert len(found) == len(LAYER) - 1
    for sibling in siblings(product):  # whichever comes first, all are the same
        assert {variant_of(x) for x in (sibling, *siblings(sibling))} == LAYER


@pytest.mark.parametrize(
    "changes",
    [
        {"alpha": 2.0},
        {"batch": 3},
        {"c": Strides(64, 1), "dtype_c": "bfloat16", "beta": 1.0},
        {"align": 16},
        {"k": 1022, "a": Strides(1022, 1), "b": Strides(1, 1022)},
        {"a": Strides(8192, 8)},
        {"a": Strides(0, 0)},
        {"out": Strides(1, 304)},
    ],
)
def test_products_of_no_plain_layer_have_no_others_beside_them(changes: dict[str, Any]) -> None:
    assert siblings(replace(P, **changes)) == []


def test_three_kernels_come_soon_and_as_many_for_the_layer_before_the_rest() -> None:
    found = list(ahead({"f": Palette("f"), "plain": FakeFamily("plain")}, P))
    assert [(x.rank, x.use.config) for x in found if x.product == P] == [
        (1, "a"), (1, "b"), (1, "c"), (3, "d"), (3, "e"),
    ]  # fmt: skip
    others = [x for x in found if x.product != P]
    assert {x.rank for x in others} == {2}
    for sibling in siblings(P):
        configs = ("a", "b") if sibling.dtype_bias else ("a", "b", "c")
        assert [x for x in others if x.product == sibling] == [Ahead(2, Use("f", c), sibling) for c in configs]
