"""Adding a kernel for quantized weights, as CONTRIBUTING has it: its file and one row, and it is tried and serves."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tests.quant.draws import blocks

from isogemm.backends.cuda.driver import facts, machine
from isogemm.backends.cuda.quant import family, kernel
from isogemm.backends.cuda.quant.case import QuantCase
from isogemm.contract import reference
from isogemm.formats.blocks import FORMATS
from isogemm.formats.reference import dequantize
from isogemm.planner.admission import Admissions
from isogemm.planner.family import Families
from isogemm.planner.records import Records

torch = pytest.importorskip("torch")

from tests.recipes import toy_quant  # noqa: E402

CASE = QuantCase("fp32", "Q4_0", "float32", "float32", None, 3, 21, 96, "fma")


class Host:
    """The host in a device's place: tensors of trials stay where they are."""

    device = -1

    def stamp(self):
        return {"device": "a toy"}

    def capturing(self):
        return False

    def put(self, flat):
        tensor = torch.from_numpy(np.array(flat).view(f"i{flat.itemsize}"))
        return SimpleNamespace(tensor=tensor, address=tensor.data_ptr(), read=lambda: tensor.numpy().view(flat.dtype))


def unpacked(raw, fmt, n, k):
    """A weight that keeps its rows, which the toy reads."""
    return SimpleNamespace(data=torch.zeros(1), rows=raw.numpy(), format=fmt, n=n, k=k)


@pytest.fixture
def device(monkeypatch, tmp_path):
    found = Admissions(Host(), Records(tmp_path))
    monkeypatch.setattr(machine, "admissions", lambda device: found)
    monkeypatch.setattr(facts, "device", lambda ordinal: SimpleNamespace(multiprocessors=132))
    monkeypatch.setattr(kernel, "lay_out", unpacked)
    return found


def chosen(monkeypatch):
    rows = blocks(FORMATS["Q4_0"], 21, 3)
    monkeypatch.setattr(family, "FAMILIES", Families("tests.recipes", {"toy": "toy_quant:KERNEL"}))  # the row
    return rows, family.choose(CASE, unpacked(torch.from_numpy(rows), "Q4_0", 21, 96), 0)


def test_a_file_and_a_row_serve(monkeypatch, device):
    rows, run = chosen(monkeypatch)
    assert run is not None
    assert run.kernel.name == "toy"
    assert [(known.name, known.admission.state) for known in device.known()] == [("toy", "admitted")]
    x, out = torch.randn(3, 96), torch.full((3, 21), torch.nan)
    run(x, out, None)
    want = reference.evaluate(x.numpy(), np.ascontiguousarray(dequantize(rows, FORMATS["Q4_0"]).T), "fma/chain")
    assert np.array_equal(out.numpy().view(np.uint32), want.view(np.uint32))


def test_a_wrong_one_is_refused(monkeypatch, device):
    monkeypatch.setattr(toy_quant.ToyKernel, "wrong", True)
    assert chosen(monkeypatch)[1] is None
    assert [known.admission.state for known in device.known()] == ["refused"]


def test_the_rows_are_all_that_name_a_kernel():
    """Every row loads, under its own name; and no other file of the package mentions its module."""
    assert not family.FAMILIES.absent
    assert [kernel.name for kernel in family.FAMILIES.found.values()] == list(family.FAMILIES.rows)
    folder = Path(family.__file__).parent
    for row in family.FAMILIES.rows.values():
        module = row.partition(":")[0]
        named = re.compile(rf"from \.{re.escape(module)} import.*\bKERNEL\b|\b{module.rpartition('.')[2]}\.KERNEL")
        assert not [file.name for file in folder.rglob("*.py") if named.search(file.read_text())], row
