"""What torch refuses is refused where it is routed too, and nothing is written."""

from __future__ import annotations

import pytest
from tests.torch.routing.routed import SCOPED, clean, randn, same, within  # noqa: F401

from isogemm.errors import OptionError

torch = pytest.importorskip("torch")

F = torch.nn.functional

# A product that torch does not take, by how; self, which some of them write to, is the first operand.
PRODUCTS = {
    "a vector for a matrix": (torch.mm, (4,), (4, 3)),
    "stacks for matrices": (torch.mm, (2, 5, 4), (2, 4, 3)),
    "a matrix for a vector": (torch.mv, (5, 4), (4, 3)),
    "a matrix for the first of two vectors": (torch.dot, (5, 4), (4,)),
    "unequal numbers of items": (torch.bmm, (2, 5, 4), (1, 4, 3)),
    "stacks added to a row": (torch.addmm, (3,), (2, 5, 4), (2, 4, 3)),
    "matrices for stacks": (torch.baddbmm, (3,), (5, 4), (4, 3)),
    "matrices for stacks that are added up": (torch.addbmm, (3,), (5, 4), (4, 3)),
    "items of other lengths to be added up": (torch.addbmm, (5, 3), (2, 5, 4), (4, 2, 3)),
    "more items than the other stack has": (torch.addbmm, (5, 3), (2, 5, 6), (3, 4, 3)),
    "a matrix added to a vector": (torch.addmv, (5,), (5, 4), (4, 3)),
    "a matrix to add to that does not fit": (torch.addmm, (9, 9), (5, 4), (4, 3)),
    "a matrix to add to of too many dimensions": (torch.addmm, (1, 5, 3), (5, 4), (4, 3)),
    "a vector to add to that does not fit": (torch.addmv, (7,), (5, 4), (4,)),
    "a stack to add to that does not fit": (torch.baddbmm, (2, 9, 9), (2, 5, 4), (2, 4, 3)),
    "more rows to write to": (torch.Tensor.addmm_, (7, 3), (1, 4), (4, 3)),
    "a row to write to": (torch.Tensor.addmm_, (1, 3), (5, 4), (4, 3)),
    "more items to write to": (torch.Tensor.baddbmm_, (4, 5, 3), (1, 5, 4), (1, 4, 3)),
    "an item to write to": (torch.Tensor.baddbmm_, (1, 5, 3), (2, 5, 4), (2, 4, 3)),
    "a number to write to": (torch.Tensor.addmv_, (1,), (5, 4), (4,)),
}


@SCOPED
@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("beta", [0, 1])
def test_a_product_of_shapes_that_torch_refuses_is_refused(name, beta, scoped):
    call, *shapes = PRODUCTS[name]
    operands = [randn(*shape) for shape in shapes]
    first = operands[0].clone()
    options = {"beta": beta} if "add" in call.__name__ else {}
    with pytest.raises((RuntimeError, IndexError)) as theirs:
        call(*operands, **options)
    with within(scoped), pytest.raises(type(theirs.value)) as ours:
        call(*operands, **options)
    assert str(ours.value) == str(theirs.value)
    with within(True, strict=True), pytest.raises((RuntimeError, IndexError, OptionError)):
        call(*operands, **options)
    assert same(operands[0], first)


@SCOPED
def test_padding_below_zero_is_refused(scoped):
    with within(scoped), pytest.raises(RuntimeError, match="negative padding"):
        F.conv1d(randn(2, 4, 9), randn(6, 4, 3), padding=-1)


@SCOPED
@pytest.mark.parametrize("name", ["index_put", "index_put_"])
@pytest.mark.parametrize("wrong", [-7, -6, 5])
def test_rows_outside_of_a_table_are_refused(name, wrong, scoped):
    table, rows = torch.zeros(5, 3), torch.ones(2, 3)
    with within(scoped, strict=True), pytest.raises(IndexError, match=f"index {wrong} is out of bounds"):
        getattr(table, name)((torch.tensor([1, wrong]),), rows, accumulate=True)
    assert not table.any()
    with within(scoped, strict=True):
        for last in (-1, 4):
            found = getattr(table.clone(), name)((torch.tensor([-5, last]),), rows, accumulate=True)
            assert found[:, 0].tolist() == [1, 0, 0, 0, 1]


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@SCOPED
def test_bytes_among_indices_are_a_mask(scoped):
    table, mask = torch.zeros(2, 3), torch.tensor([1, 1], dtype=torch.uint8)
    with within(scoped):
        table.index_put_((mask,), torch.ones(2, 3), accumulate=True)
    assert table.tolist() == [[1, 1, 1], [1, 1, 1]]


@SCOPED
def test_fewer_targets_than_rows_are_refused(scoped):
    x, target = randn(7, 5), torch.zeros(6, dtype=torch.int64)
    with within(scoped), pytest.raises(RuntimeError, match="size mismatch"):
        torch.ops.aten.nll_loss_forward(x, target, None, 1, -100)
