"""What is counted of results: on tensors as on arrays, whole or in parts, wherever they lie in memory."""

from __future__ import annotations

import numpy as np
import pytest

from isogemm.lab import Work
from isogemm.study import bits
from isogemm.study.bits import differing, judged
from isogemm.study.declare import Way

CONTRACT = "fma/chain"


@pytest.fixture(params=["array", "tensor"])
def made(request):
    """Operands of three products, and what makes an array one of the kind that is tested."""
    rng = np.random.default_rng(0)
    left, right = rng.standard_normal((3, 7, 5), np.float32), rng.standard_normal((3, 5, 6), np.float32)
    if request.param == "array":
        return left, right, np.array
    torch = pytest.importorskip("torch")
    return torch.from_numpy(left), torch.from_numpy(right), lambda x: torch.from_numpy(np.array(x))


def products(left, right):
    """By the contract: a chain along k."""
    total = np.zeros((3, 7, 6), np.float32)
    for k in range(5):
        exact = np.asarray(left)[:, :, k : k + 1].astype(float) * np.asarray(right)[:, k : k + 1, :].astype(float)
        total = (exact + total).astype(np.float32)
    return total


def test_every_element_of_every_product_is_compared(made, monkeypatch):
    monkeypatch.setattr(bits, "AT_ONCE", 50)  # a product at a time
    left, right, of = made
    good = products(left, right)
    other = good.copy()
    other[1, 3, 2], other[2, 6, 5] = np.nextafter(other[1, 3, 2], np.float32(9)), np.nan
    wide = np.ascontiguousarray(good.swapaxes(0, 1))  # side by side: a view of it is the stack
    results = {
        "strided isogemm": lambda: of(good),
        "wide isogemm": lambda: of(wide).swapaxes(0, 1),
        "strided torch": lambda: of(other),
        "loop torch": lambda: of(good),
    }
    ways = {name: Way((), Work(1, 1), name.split()[1]) for name in results}
    found = judged(ways, results, list(zip(left, right, strict=True)), CONTRACT)
    assert [x["from_first"] for x in found.values()] == [0, 0, 2, 0]
    assert [x["from_own"] for x in found.values()] == [0, 0, 0, 2]
    assert [x["differing"] for x in found.values()] == [0, 0, None, None]
    assert [x["outputs"] for x in found.values()] == [126] * 4
    assert found["strided isogemm"]["error"] < 1e-6


@pytest.mark.parametrize("at", [(2, 0, 0), (0, 3, 2), (2, 6, 5)])
def test_a_wrong_bit_in_the_sample_is_seen(made, at):
    """First, middle and last rows and columns of the first and the last product."""
    left, right, of = made
    wrong = products(left, right)
    wrong[at] *= -1
    ways = {"strided isogemm": Way((), Work(1, 1))}
    items = list(zip(left, right, strict=True))
    assert judged(ways, {"strided isogemm": lambda: of(wrong)}, items, CONTRACT)["strided isogemm"]["differing"] == 1


def test_a_way_that_writes_nothing_has_not_what_the_one_before_wrote(made):
    left, right, of = made
    out = of(products(left, right))
    assert np.isnan(np.asarray(bits.poisoned(Way((lambda i: None,), Work(1, 1)), out))).all()


def test_ways_of_whole_attention_are_compared_with_the_first():
    torch = pytest.importorskip("torch")
    from isogemm.study.whole_attention import _judged

    operands = [torch.randn(2, 4, 128, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    right = torch.nn.functional.scaled_dot_product_attention(*operands)
    results = {"right": right, "off": right + 1}
    found = _judged({name: Way((lambda i, x=x: x,), Work(1, 1)) for name, x in results.items()}, operands)
    assert [x["from_first"] for x in found.values()] == [0, right.numel()]
    assert found["right"]["error"] < 1e-5 < 0.1 < found["off"]["error"]


def test_bits_of_bfloat16_are_compared_not_values():
    torch = pytest.importorskip("torch")
    x = torch.tensor([[0.0, float("nan"), 1.0]], dtype=torch.bfloat16)
    y = torch.tensor([[-0.0, float("nan"), 1.0]], dtype=torch.bfloat16)
    assert differing(x, y) == 1


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_an_error_that_is_no_number_is_none_at_all(broken):
    """A row is kept as JSON, which has no NaN; its bits say that the result is wrong."""
    exact = np.ones((2, 3))
    got = exact.astype(np.float32)
    assert bits.apart(got, exact) == 0.0
    got[1, 1] = broken
    assert bits.apart(got, exact) is None
