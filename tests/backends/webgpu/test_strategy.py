"""Which kernel serves what: the tree, its crossovers as measured, and what each thread does."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import asdict

import numpy as np
import pytest
from tests.products import F16, assert_same, values
from typer.testing import CliRunner

import isogemm
from isogemm.backends.webgpu import measure, source
from isogemm.backends.webgpu.admission import AdapterAdmissions
from isogemm.backends.webgpu.choose import TREE, Crossovers, TreeCase, choices
from isogemm.backends.webgpu.integers import run_quantize
from isogemm.backends.webgpu.kernels import KERNELS, VECTORS, code_of, kernel_of
from isogemm.backends.webgpu.launch import KernelCall, run
from isogemm.backends.webgpu.public import array
from isogemm.backends.webgpu.quant import upload
from isogemm.backends.webgpu.trace import trace
from isogemm.cli.commands import app
from isogemm.errors import ContractError, OptionError, ShapeError

BROKEN = ("gemm_vector", "gemm_tiled")  # files


def test_the_tree():
    at = Crossovers(tiles=20, large=30, batch=2, several=100, wide=1000)

    def choose(order, m, n, *, across=False, whole=False):
        return next(choices(order, TreeCase(m, n, across, whole, at)))

    shapes = {(1, 50): "gemv_simd", (1, 100): "gemv_simd_multi", (1, 1000): "gemv_wide", (2, 50): "gemv_batched"}
    assert {shape: choose("lanes", *shape) for shape in shapes} == shapes
    assert [choose("lanes", m, 50, whole=True) for m in (1, 2)] == ["gemv_vector", "gemv_vectors"]
    assert choose("lanes", 1, 50, whole=True, across=True) == "gemv_simd"
    assert [choose("chain", m, 8, across=m == 19) for m in (18, 19, 20)] == [
        "gemv_naive", "gemv_transposed", "gemm_tiled",
    ]  # fmt: skip
    assert [choose("chain", m, 50, whole=True) for m in (1, 20, 29, 30)] == [
        "gemm_narrow", "gemm_narrow", "gemm_narrow", "gemm_vector",
    ]  # fmt: skip
    assert choose("chain", 1, 8, whole=True, across=True) == "gemm_narrow"
    named = {branch.kernel for branches in TREE.values() for branch in branches}
    assert named | {"gemm_simdgroup"} == {*KERNELS, *VECTORS}


def test_no_branch_changes_a_bit(device, monkeypatch):
    """A row alone, in few and in many, at whole vectors and beside them."""
    for k in (72, 70):
        x, w = values((5, k), F16), values((66, k), F16, seed=1)
        for contract in ("fma/chain", "fma/lanes32"):
            want = isogemm.linear(x, w, contract=contract)
            for at in (
                Crossovers(1, 1),
                Crossovers(1),
                Crossovers(99),
                Crossovers(99, 99, 99, 1),
                Crossovers(99, 99, 99, 1, 1),
            ):
                monkeypatch.setattr(device, "crossovers", at)
                assert_same(isogemm.linear(array(x), array(w), contract=contract).numpy(), want)
                assert_same(isogemm.linear(array(x[:1]), array(w), contract=contract).numpy(), want[:1])


def test_a_kernel_that_is_refused_is_passed_over(device, monkeypatch):
    """float32 where fma rounds twice: made sure of on every adapter."""
    admissions, types = AdapterAdmissions(device.adapter), ("float32", "float32")
    tried = admissions.verdict
    monkeypatch.setattr(admissions, "verdict", lambda name, *x: "no" if kernel_of(name).words else tried(name, *x))
    assert admissions.first(["gemv_vector", "gemv_simd"], types, across=False)[0] == "gemv_simd"
    with pytest.raises(ContractError, match="gemm_vector"):
        admissions.first(["gemm_vector"], types, across=False)


def test_a_kernel_that_a_driver_does_not_compile_is_passed_over(device, monkeypatch):
    admissions, types, read = AdapterAdmissions(device.adapter), ("float16", "float16"), source.part
    monkeypatch.setattr(source, "part", lambda x: read(x).replace("fn main(", "fn main(,") if x in BROKEN else read(x))
    assert admissions.first(["gemm_narrow", "gemm_tiled", "gemv_naive"], types, across=False)[0] == "gemv_naive"
    with pytest.raises(ContractError, match=r"gemm_tiled on (.|\n)*the CPU, which has them"):
        admissions.first(["gemm_tiled"], types, across=False)


def test_a_plan_says_where_a_product_goes(device, monkeypatch):
    monkeypatch.setattr(device, "crossovers", Crossovers(tiles=24))
    plan = isogemm.plan(1, 32000, 4096, dtype="float16", contract="fma/lanes32", device="webgpu")
    assert plan.kernel == "gemv_vector"
    plan = isogemm.plan(1, 32000, 4097, dtype="float16", contract="fma/lanes32", device="webgpu")
    assert plan.kernel == "gemv_wide"
    assert "-> if     N >= 16384: gemv_wide" in str(plan)
    text = str(isogemm.plan(24, 7, 9, device="webgpu"))
    assert "-> if     M >= 24: gemm_tiled" in text
    assert "16 to 64" in text
    assert json.loads(plan.to_json())["crossovers"]["tiles"] == 24
    with pytest.raises(OptionError, match="device='cpu'"):
        isogemm.plan(1, 2, 3, device="webgpu", threads=2)
    printed = CliRunner().invoke(app, ["plan", "1", "2", "3", "--device", "webgpu"])
    assert printed.exit_code == 0
    assert re.search(r"kernel *│ gemv_naive,", printed.stdout)


def test_a_plan_is_of_the_kernel_that_runs(device, monkeypatch):
    ran, first = [], device.admissions.first
    monkeypatch.setattr(device.admissions, "first", lambda *x: (found := first(*x), ran.append(found[0]))[0])
    for m, n, k in ((3, 8, 16), (3, 1, 16), (3, 8, 0), (3, 8, 9), (2, 7, 8), (40, 1, 1)):
        for trans in ("NN", "NT", "TN"):
            a, b = (
                array(np.zeros(x[::-1] if t == "T" else x, F16)) for x, t in zip(((m, k), (k, n)), trans, strict=True)
            )
            isogemm.gemm(a, b, trans_a=trans[0], trans_b=trans[1])
            options = {"trans_a": trans[0], "trans_b": trans[1], "dtype": "float16", "device": "webgpu"}
            assert isogemm.plan(m, n, k, **options).kernel == ran.pop(), (m, n, k, trans)


def test_crossovers_are_measured_and_kept(device, monkeypatch, tmp_path):
    monkeypatch.setattr(measure, "cache_folder", lambda name: tmp_path / name)
    assert measure.recalled(device.adapter.name) == Crossovers()
    speed = {
        "gemm_tiled": 30,
        "gemv_naive": 1,
        "gemm_vector": 60,
        "gemm_narrow": 1,
        "gemv_simd": 1,
        "gemv_simd_multi": 600,
        "gemv_wide": 90000,
    }
    found = measure.measured(
        device.admissions, lambda _, name, m, n: speed[name] + (speed[name] == 1) * (n if m == 1 else m)
    )
    assert (found.tiles, found.large, found.several, found.wide) == (32, 64, 2048, measure.NEVER)
    assert measure.recalled(device.adapter.name) == found
    for damaged in ("{", json.dumps(asdict(found) | {"tiles": "32"})):
        measure.keep(next((tmp_path / "webgpu").iterdir()), damaged.encode())
        assert measure.recalled(device.adapter.name) == Crossovers()
    assert measure.seconds(device.admissions, "gemv_simd", 1, 8) > 0


def test_the_chapters_thread():
    found = trace("gemv_simd", (1, 4096, 4096), (0, 3, 17))
    assert found.outputs == ((0, 3),)
    assert found.walks == (range(17, 4096, 32),)
    assert (found.walks[0][0], found.walks[0][1], found.walks[0][-1], found.steps) == (17, 49, 4081, 128)
    assert found.writes == ()
    assert "bytes    2 at 24610 of w, then every 64" in str(found)
    assert trace("gemv_simd", (1, 4096, 4096), (0, 3, 0)).writes == ((0, 3),)
    printed = CliRunner().invoke(app, ["trace", "gemv_simd", "--shape", "1,4096,4096", "--thread", "0,3,17"])
    assert printed.stdout == f"{found}\n"


def test_the_bytes_of_blocks_are_those_that_the_device_has(device):
    k = 4096
    for dtype, step in (("Q4_0", 2048), ("Q8_0", 4096), ("Q4_K", 2304), ("Q6_K", 2048)):
        w = isogemm.quantize(values((3, k)), dtype)
        row = upload(w, device.place).native.strides[0]
        found = trace("gemv_q4_0", (1, 3, k), (0, 0, 9), dtype)
        assert (found.row_bytes, found.steps) == (row, 32)
        assert f"of w, then every {step}\n" in str(found)
    assert "16 at 144 of w" in str(trace("gemv_q4_0", (1, 3, k), (0, 0, 9)))
    assert "... 29 more" in str(found)


def threads(name, m, n):
    """Every thread that a product launches."""
    kernel = kernel_of(name)
    for row in range(-(-m // kernel.rows)):
        for index in range(-(-n // kernel.columns_of("float16")) * kernel.workgroup):
            yield row, index // 32, index % 32


@pytest.mark.parametrize(
    ("name", "k", "dtype"),
    [(name, 70, "") for name in KERNELS]
    + [(name, 72, "") for name, kernel in VECTORS.items() if kernel.words]
    + [(name, k, dtype) for name in ("gemv_q4_0", "gemm_q4_0") for k, dtype in ((96, "Q4_0"), (1536, "Q4_K"))],
)
def test_every_output_is_written_once_and_every_k_added_once(name, k, dtype):
    m, n = 9, 5
    written, added = Counter(), Counter()
    for thread in threads(name, m, n):
        found = trace(name, (m, n, k), thread, dtype)
        written.update(found.writes)
        added.update((output, step) for output in found.outputs for walk in found.walks for step in walk)
    assert written == Counter({(i, j): 1 for i in range(m) for j in range(n)})
    assert added == Counter({((i, j), step): 1 for i in range(m) for j in range(n) for step in range(k)})


@pytest.mark.parametrize("name", [*KERNELS, *VECTORS])
def test_the_thread_that_writes_is_the_one_that_is_traced(device, monkeypatch, name):
    """The kernel itself, made to store its thread's number instead of the sum."""
    m, n, k, kernel = 9, 70, 32, kernel_of(name)
    read = source.part
    number = (
        "group.x * {0}u + local" if "group" in re.search(r"fn main\((.*?)\{", read(kernel.file), re.S)[1] else "id.x"
    )

    def telling(part: str) -> str:
        text = read(part).replace(
            "out_words[out_index(i, j)] = select", "out_words[out_index(i, j)] = me; let no = select"
        )
        text = text.replace("fn rounded", "var<private> me: u32;\nfn rounded")
        return re.sub(r"(fn main\(.*?\{)", rf"\1 me = {number.format(kernel.workgroup)};", text, count=1, flags=re.S)

    a, out = array(values((m, k), F16)), array(np.zeros((m, n), np.float32))
    x, b, scales = a.__isogemm_view__("a"), array(values((n, k), F16)).T.__isogemm_view__("b"), None
    if kernel.order == "integers":
        x, scales = run_quantize(device.adapter, device.admissions.quantizer("float16", 32), x, 32)
        b = upload(isogemm.quantize(values((n, k)), "Q4_0"), device.place).native.T
    monkeypatch.setattr(source, "part", telling)
    code = code_of(name, ("float16", "Q4_0" if scales is not None else "float16"), across=False, subgroup=0, fused=True)
    run(device.adapter, name, code, KernelCall(x, b, out.__isogemm_view__("out"), scales=scales))
    want = np.empty((m, n), np.uint32)
    for thread in threads(name, m, n):
        for place in trace(name, (m, n, k), thread).writes:
            want[place] = thread[1] * 32 + thread[2]
    np.testing.assert_array_equal(out.numpy().view(np.uint32), want)


def test_what_cannot_be_traced():
    with pytest.raises(OptionError, match=r"gemv_simd, .*gemv_vector, .*gemv_q4_0.*got: 'gemv_q5_0'"):
        trace("gemv_q5_0", (1, 1, 1), (0, 0, 0))
    with pytest.raises(OptionError, match=r"one of Q4_0, .*float16"):
        trace("gemv_q4_0", (1, 1, 32), (0, 0, 0), "float16")
    with pytest.raises(ShapeError, match=r"block, 32; got: 33"):
        trace("gemv_q4_0", (1, 1, 33), (0, 0, 0))
    with pytest.raises(ShapeError, match=r"multiples of 4, its vectors of float32; got: 6; nearest legal choice: 8"):
        trace("gemv_vector", (1, 1, 6), (0, 0, 0), "float32")
    with pytest.raises(OptionError, match=r"float32.*int8.*float16"):
        trace("gemv_simd", (1, 1, 1), (0, 0, 0), "int8")
    with pytest.raises(OptionError, match="0,3,31"):
        trace("gemv_simd", (1, 1, 1), (0, 3, 32))
    with pytest.raises(ShapeError, match="at least 1"):
        trace("gemv_simd", (0, 1, 1), (0, 0, 0))
    refused = CliRunner().invoke(app, ["trace", "gemv_simd", "--shape", "1,2", "--thread", "0,0,0"])
    assert isinstance(refused.exception, OptionError)
