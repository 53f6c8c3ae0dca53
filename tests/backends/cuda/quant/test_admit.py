"""Admission of kernels for quantized weights: wrong bits, stray words and shifted tiles are seen; fakes on the CPU."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from tests.products import F32

from isogemm.contract import int32, reference
from isogemm.formats.reference import decode, dequantize
from isogemm.quant import FORMATS

torch = pytest.importorskip("torch")

from isogemm.backends.cuda import admitted  # noqa: E402
from isogemm.backends.cuda.quant import family as quant_choose  # noqa: E402
from isogemm.backends.cuda.quant import layout as quant_layout  # noqa: E402
from isogemm.backends.cuda.quant import trial as quant_trial  # noqa: E402
from isogemm.backends.cuda.quant.family import Case, Kernel  # noqa: E402
from isogemm.errors import DeviceError  # noqa: E402
from isogemm.planner import kernel_admission  # noqa: E402
from isogemm.planner.kernel_admission import KernelAdmissions  # noqa: E402
from isogemm.planner.records import Records  # noqa: E402

CASES = [
    Case("same", "Q4_K", "bfloat16", "bfloat16", None, 5, 4000, 512),
    Case("same", "Q5_0", "float16", "float32", "float32", 1, 24, 96),
    Case("same", "Q8_0", "bfloat16", "bfloat16", "bfloat16", 70, 77, 160),
    Case("q8", "Q6_K", "float32", "float32", None, 17, 40, 768),
    Case("fp32", "Q2_K", "bfloat16", "bfloat16", "float32", 33, 37, 256),
]


class Machine:
    """No GPU: tensors of trials stay on the host."""

    device = -1

    def __init__(self, capturing=False):
        self.busy = capturing

    def stamp(self):
        return {"device": "a fake"}

    def capturing(self):
        return self.busy


def pack(raw, fmt, n, k):
    """Packed bytes that remember their rows, for a kernel that unpacks nothing."""
    data = torch.from_numpy(quant_layout.pack(raw.numpy()[:1], fmt))
    return SimpleNamespace(data=data, rows=raw.numpy(), format=fmt, n=n, k=k)


def words(x) -> np.ndarray:
    """A tensor's numbers, by way of its bits."""
    name = str(x.dtype).removeprefix("torch.")
    return x.view(torch.int16 if x.element_size() == 2 else torch.int32).numpy().view(quant_trial.TYPES[name])


class Fake:
    """A kernel on the host, right or broken in one of several ways."""

    def __init__(self, path: str, broken: str = ""):
        self.path, self.broken, self.calls = path, broken, []

    def __call__(self, x, packed, out, bias, config):
        self.calls.append(tuple(out.shape))
        given, rows, fmt = words(x), packed.rows, FORMATS[packed.format]
        distinct, at = np.unique(rows, axis=0, return_inverse=True)
        if self.broken == "order":
            distinct = np.ascontiguousarray(distinct.reshape(len(distinct), -1, fmt.nbytes)[:, ::-1]).reshape(
                distinct.shape
            )
            given = np.ascontiguousarray(given.reshape(len(given), -1, fmt.block)[:, ::-1]).reshape(given.shape)
        if self.path == "q8":
            acc = int32.evaluate(given, decode(distinct, fmt))
        else:
            dtype = given.dtype if self.path == "same" else F32
            with np.errstate(over="ignore"):
                w = dequantize(distinct, fmt).astype(dtype)
            arithmetic = "tensor_core:sm90" if self.path == "same" else "fma"
            acc = reference.evaluate(given.astype(dtype), np.ascontiguousarray(w.T), f"{arithmetic}/chain")
        acc = acc[:, at.reshape(-1)]
        if self.broken == "tile" and acc.shape[1] > 16:
            acc = np.roll(acc, 16, axis=1)
        added = None if bias is None or self.broken == "bias" else words(bias)
        words(out)[...] = reference.epilogue(acc, bias=added, out_dtype=words(out).dtype)
        if self.broken == "bit":
            words(out).view(f"u{out.element_size()}")[-1, -1] ^= 1
        if self.broken == "stray":
            out.as_strided((1,), (1,), out.storage_offset() + out.numel()).zero_()
        if self.broken == "unwritten":
            out[-1] = torch.nan


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_right_kernel_is_found_right(case):
    fake = Fake(case.path)
    assert quant_trial.try_kernel(Machine(), Kernel("fake", "c", fake, 8), case, arithmetic(case), pack) == ""
    assert {m for m, _ in fake.calls} <= set(range(1, 80))
    assert (1 in {m for m, _ in fake.calls}) is (case.m == 1)
    assert any(n == min(case.n, 37) or case.wide for _, n in fake.calls)


def arithmetic(case: Case) -> str:
    return {"same": "tensor_core:sm90", "q8": "int32", "fp32": "fma"}[case.path]


WAYS = ("order", "tile", "bit", "stray", "unwritten")


@pytest.mark.parametrize(
    ("case", "broken"), [*((CASES[2], way) for way in (*WAYS, "bias")), *((CASES[3], way) for way in WAYS)], ids=str
)
def test_a_broken_kernel_is_found_out(case, broken):
    said = quant_trial.try_kernel(
        Machine(), Kernel("fake", "c", Fake(case.path, broken), 8), case, arithmetic(case), pack
    )
    assert ("beside the result" if broken == "stray" else "differ, first out") in said


def test_operands_tell_the_paths_apart():
    """A kernel of one path does not pass for another: other weights, another order, another rounding."""
    for path, other in (("same", "fp32"), ("fp32", "q8"), ("q8", "fp32")):
        case = Case(path, "Q5_1", "bfloat16", "float32", None, 9, 37, 512)
        assert quant_trial.try_kernel(Machine(), Kernel("fake", "c", Fake(other), 8), case, arithmetic(case), pack)


@pytest.fixture
def device(monkeypatch, tmp_path):
    """The verdicts of a fake device, in a folder of their own, and kernels that a test chooses."""
    found = KernelAdmissions(Machine(), Records(tmp_path))
    monkeypatch.setattr(admitted, "admissions", lambda device: found)
    monkeypatch.setattr(quant_trial, "try_kernel", lambda *a, **b: TRY(*a, **b, pack=pack))
    monkeypatch.setattr(
        "isogemm.backends.cuda.driver.facts.device", lambda ordinal: SimpleNamespace(multiprocessors=132)
    )
    return found


TRY = quant_trial.try_kernel


def chosen(monkeypatch, *kernels):
    monkeypatch.setattr(quant_choose, "kernels", lambda case, multiprocessors: iter(kernels))
    return quant_choose.choose(CASES[3], SimpleNamespace(), "int32", 0)


def test_a_refused_kernel_serves_no_call(monkeypatch, device):
    broken, right = Fake("q8", "bit"), Fake("q8")
    kernels = [Kernel("broken", "c", broken, 8), Kernel("right", "c", right, 8)]
    said = []
    monkeypatch.setattr(kernel_admission, "notice", said.append)  # whatever other tests did to the logger
    run = chosen(monkeypatch, *kernels)
    assert run is not None
    count = len(broken.calls)
    assert len(said) == 1
    assert "kernel broken" in said[0]
    assert "is not used" in said[0]
    before = len(right.calls)
    x, out = torch.zeros(2, 768), torch.empty(2, 40)
    rows = quant_trial.weights(FORMATS["Q6_K"], 768)[np.arange(40) % 37]
    run.packed.rows, run.packed.format = rows, "Q6_K"
    run(x, out, None)
    assert torch.isfinite(out).all()
    assert len(broken.calls) == count
    assert len(right.calls) == before + 1
    assert run.bind(x, out, None) is None


def test_where_all_are_refused_there_is_none(monkeypatch, device):
    assert chosen(monkeypatch, Kernel("broken", "c", Fake("q8", "order"), 8)) is None
    assert chosen(monkeypatch) is None


def test_verdicts_are_kept(monkeypatch, device, tmp_path):
    first = Fake("q8")
    chosen(monkeypatch, Kernel("k", "c", first, 8))
    count = len(first.calls)
    chosen(monkeypatch, Kernel("k", "c", first, 8))
    assert len(first.calls) == count
    again = KernelAdmissions(Machine(), Records(tmp_path))
    monkeypatch.setattr(admitted, "admissions", lambda device: again)
    assert chosen(monkeypatch, Kernel("k", "c", first, 8)) is not None
    assert len(first.calls) == count
    chosen(monkeypatch, Kernel("k", "another configuration", first, 8))
    assert len(first.calls) > count


def test_nothing_is_tried_in_a_capture(monkeypatch, device):
    device.machine.busy = True
    with pytest.raises(DeviceError, match="capture"):
        chosen(monkeypatch, Kernel("k", "c", Fake("q8"), 8))


def test_a_kernel_that_cannot_run_is_passed_over(monkeypatch, device):
    def fails(*_):
        raise RuntimeError("no such device")

    assert chosen(monkeypatch, Kernel("fails", "c", fails, 8), Kernel("k", "c", Fake("q8"), 8)) is not None


def test_packing_and_dequantizing_are_compared_too():
    def right(raw, fmt, n, k):
        return SimpleNamespace(data=torch.from_numpy(quant_layout.pack(raw.numpy(), fmt)), rows=raw.numpy(), format=fmt)

    def wrong(raw, fmt, n, k):
        made = right(raw, fmt, n, k)
        made.data[-1] ^= 1
        return made

    def floats(packed, out, minus=True):
        w = dequantize(packed.rows, FORMATS[packed.format])
        words(out)[...] = w if minus else w + np.float32(0)

    for fmt in ("Q4_0", "Q3_K"):
        assert quant_trial.try_pack(Machine(), fmt, right) == ""
        assert "packed" in quant_trial.try_pack(Machine(), fmt, wrong)
        for dtype in ("float32", "bfloat16", "float16"):
            assert quant_trial.try_dequantize(Machine(), fmt, dtype, floats, right) == ""
            said = quant_trial.try_dequantize(Machine(), fmt, dtype, lambda p, o: floats(p, o, minus=False), right)
            assert "0x80" in said  # the sign of a zero
