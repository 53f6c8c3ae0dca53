"""A new kernel along rows or of attention is its file and one row; a new operation is a row, a formula and kernels."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from tests.backends.cuda.attention.test_admit import at, first_bit
from tests.backends.cuda.attention.test_compile import pose
from tests.backends.cuda.compiled import H200, Kernels
from tests.backends.cuda.rows.test_admit import Host, norm, one_bit
from tests.planner.fakes import FakeMachine
from tests.recipes import toy_attention, toy_operation, toy_rows

from isogemm.backends.cpu.rows import loops
from isogemm.backends.cuda.attention import choose
from isogemm.backends.cuda.driver import facts, kernel, machine, nvrtc
from isogemm.backends.cuda.rows import build, kernels
from isogemm.backends.cuda.rows.code import Code
from isogemm.backends.cuda.rows.sides import ABSENT, Side
from isogemm.contract.attention import attention
from isogemm.contract.rows import OPERATIONS
from isogemm.planner.admission import Admissions
from isogemm.planner.records import Records
from isogemm.torch.rows import ops, table


@pytest.fixture
def admissions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Admissions:
    """An H200 that runs kernels of the host."""
    found = Admissions(FakeMachine(), Records(tmp_path))
    monkeypatch.setattr(machine, "_admissions", {0: found})
    monkeypatch.setattr(facts, "device", lambda ordinal: H200)
    return found


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, admissions: Admissions) -> Host:
    made = Host()
    monkeypatch.setattr(Code, "load", lambda code, ordinal: made.load(code, ordinal))
    return made


def states(admissions: Admissions) -> dict[str, str]:
    return {known.name: known.admission.state for known in admissions.known()}


def test_a_kernel_along_rows_is_a_file_and_a_row(monkeypatch, host, admissions):
    monkeypatch.setattr(kernels, "KERNELS", [toy_rows.Toy(), *kernels.KERNELS])  # the row
    norm()
    assert states(admissions) == {"rows toy": "admitted"}
    assert host.loaded[-1][0].file == "toy"
    host.faults["toy"] = one_bit
    norm(out=1)  # other code: it is tried, and the next one serves
    assert host.loaded[-1][0].file == "held"


def test_a_kernel_of_attention_is_a_file_and_a_row(monkeypatch, admissions):
    monkeypatch.setitem(choose.KERNELS, "toy", toy_attention.Toy())  # the row
    case = pose(tq=3, tk=70, d=40)
    run = choose.admitted_run(case)
    assert states(admissions) == {"attention toy": "admitted"}
    held = [np.random.default_rng(i).standard_normal(x.shape).astype("bfloat16") for i, x in enumerate(case.operands)]
    y, stop = np.zeros((*held[0].shape[:3], 40), held[0].dtype), np.full(2, 70, np.int32)
    stats = np.zeros((2, *held[0].shape[:3]), np.float32)
    run(0, *(x.ctypes.data for x in held), 0, 0, stop.ctypes.data, y.ctypes.data, stats.ctypes.data)
    want = attention(*held, arithmetic="tensor_core:sm90", causal_offset=0, stop=stop)
    assert (at(y.ctypes.data, y.shape, [s // 2 for s in y.strides], "bfloat16").view("u2") == want[0].view("u2")).all()
    monkeypatch.setitem(toy_attention.HOST.faults, "toy", first_bit)
    assert " differ, first y" in toy_attention.Toy().trial(admissions.bench, case, "")


@pytest.fixture
def cube(monkeypatch: pytest.MonkeyPatch) -> str:
    """The operation, added."""
    monkeypatch.setitem(OPERATIONS, "cube", toy_operation.ROW)
    monkeypatch.setitem(loops.KERNELS, "cube", toy_operation.loop)
    monkeypatch.setitem(table.ROWS, "cube", table.Along(toy_operation.gradient))
    ops.define_row("cube")
    return "cube"


def test_an_operation_is_a_row_a_formula_and_a_kernel(host, admissions, cube):
    x = np.random.default_rng(1).standard_normal((3, 200)).astype(np.float32)
    (want,) = OPERATIONS[cube].results_of(x)
    on_torch = torch.from_numpy(x).requires_grad_()
    y = ops.along(cube, (on_torch,), (None,))  # the CPU's kernel, recorded
    assert (y.detach().numpy().view("u4") == want.view("u4")).all()
    y.sum().backward()
    assert torch.allclose(on_torch.grad, 3 * on_torch.detach() ** 2)
    assert ops.OPERATORS[cube](torch.from_numpy(x).to("meta"), None).shape == (3, 200)
    out = np.zeros_like(x)
    launch = build.each(cube, (3,), 200, (Side(0, (200,)), ABSENT, ABSENT), (0,), 128, 0)
    launch(0, x.ctypes.data, out.ctypes.data)
    assert states(admissions) == {"rows each": "admitted"}
    assert (out.view("u4") == want.view("u4")).all()


def test_the_cuda_kernel_of_an_operation_is_two_lines(monkeypatch, tmp_path, admissions):
    pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed")
    for folder in ("rows", "include"):
        shutil.copytree(nvrtc.KERNELS / folder, tmp_path / folder)
    text = (tmp_path / "rows" / "each.cu").read_text()
    for old, new in toy_operation.EACH.items():
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "rows" / "each.cu").write_text(text)
    made = Kernels()
    monkeypatch.setattr(nvrtc, "KERNELS", tmp_path)
    monkeypatch.setattr(nvrtc, "cache_directory", lambda: tmp_path)
    monkeypatch.setattr(kernel, "load", made.load)
    types = {"TX": 0, "TG": -1, "TD": -1, "TO": 0, "OP": "CUBE", "DIMS": 1}
    for vec in (0, 1):
        Code.of("each", "each", types, VEC=vec).load(0)
    assert [k.name for k in made.loaded] == ["each"] * 2
