"""Where operands of quantized products begin, and calls like one before, on tensors that say they are on a device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.backends.cuda.pretend import FIRST, aligned, at_home, pretended
from tests.backends.cuda.pretend_tensors import on_device

from isogemm.backends.cuda.quant import products
from isogemm.backends.cuda.quant.copy import DeviceCopy
from isogemm.contract.spec import Contract

__all__ = ["on_device", "pretended"]  # fixtures
torch = pytest.importorskip("torch")


@pytest.mark.parametrize(("first", "step", "kept"), [(0, 1, True), (4, 1, True), (1, 1, False), (0, 2, False)])
def test_operands_begin_at_multiples_of_16_bytes(first: int, step: int, kept: bool) -> None:
    x = torch.from_numpy(aligned((64,), np.float32)).fill_(3.0)[first::step][:16]
    found = products._placed(x)
    assert (found is x) == kept
    assert found.is_contiguous()
    assert found.data_ptr() % 16 == 0
    assert torch.equal(found, x)


def test_a_bias_that_begins_amid_16_bytes_is_no_call_like_one_before(on_device: Any) -> None:
    """It is copied first: a product's kernel may be a library's, which reads biases 16 bytes at a time."""
    launched: list[Any] = []
    run: Any = SimpleNamespace(packed=SimpleNamespace(data=SimpleNamespace(data_ptr=lambda: 4096)))
    run.launch = lambda *at: launched.append(at)
    copy = DeviceCopy(FIRST, None, "Q4_K", (16, 256), None, None)
    x, result = (on_device(aligned(shape, np.float32)) for shape in ((2, 256), (2, 16)))
    room = aligned((32,), np.float32)
    first, later, amid = (on_device(room[at : at + 16]) for at in (0, 4, 1))
    copy.remember(x, first, (None, None, None), result, run)
    assert copy.known(x, later, None, (None, None, None)) is not None
    assert copy.known(x, amid, None, (None, None, None)) is None
    assert [at[-1] for at in launched] == [later.data_ptr()]


@pytest.mark.parametrize(("first", "columns", "align"), [(0, 16, 16), (1, 16, 4), (2, 16, 8), (1, 8, 16)])
def test_kernels_are_judged_for_where_a_result_begins(
    monkeypatch: pytest.MonkeyPatch, first: int, columns: int, align: int
) -> None:
    """One that begins amid 16 bytes is written as it is; one whose rows lie apart is written beside, and copied."""
    cases: list[Any] = []
    monkeypatch.setattr(products.family, "choose", lambda case, packed, device: cases.append(case))
    copy: Any = SimpleNamespace(packed=object(), format="Q4_K", shape=(columns, 256), place=FIRST)
    out = at_home(aligned((64,), np.float32))[first:][:32].reshape(2, 16)[:, :columns]
    products._kernel("q8", at_home(aligned((2, 256), np.float32)), out, copy, None, Contract("int32"))
    assert cases[0].out_align == align
