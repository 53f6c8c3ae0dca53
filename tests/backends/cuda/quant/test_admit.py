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

from isogemm.backends.cuda.driver import machine  # noqa: E402
from isogemm.backends.cuda.quant import family  # noqa: E402
from isogemm.backends.cuda.quant import trial as quant_trial  # noqa: E402
from isogemm.backends.cuda.quant.case import QuantCase  # noqa: E402
from isogemm.backends.cuda.quant.kernel import QuantKernel  # noqa: E402
from isogemm.backends.cuda.quant.layout import pack as packed_by_host  # noqa: E402
from isogemm.base.dtypes import NUMPY  # noqa: E402
from isogemm.errors import DeviceError  # noqa: E402
from isogemm.planner import admission  # noqa: E402
from isogemm.planner.admission import Admissions  # noqa: E402
from isogemm.planner.bench import Bench  # noqa: E402
from isogemm.planner.records import Records  # noqa: E402

CASES = [
    QuantCase("same", "Q4_K", "bfloat16", "bfloat16", None, 5, 4000, 512, "tensor_core:sm90"),
    QuantCase("same", "Q5_0", "float16", "float32", "float32", 1, 24, 96, "tensor_core:sm90"),
    QuantCase("same", "Q8_0", "bfloat16", "bfloat16", "bfloat16", 70, 77, 160, "tensor_core:sm90"),
    QuantCase("q8", "Q6_K", "float32", "float32", None, 17, 40, 768, "int32"),
    QuantCase("fp32", "Q2_K", "bfloat16", "bfloat16", "float32", 33, 37, 256, "fma"),
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

    def put(self, flat):
        tensor = torch.from_numpy(np.array(flat).view(f"i{flat.itemsize}"))
        return SimpleNamespace(tensor=tensor, address=tensor.data_ptr(), read=lambda: tensor.numpy().view(flat.dtype))


class Aligned(Machine):
    """Memory begins at multiples of 16 bytes, as a GPU's does."""

    def put(self, flat):
        room = torch.zeros(flat.nbytes + 16, dtype=torch.uint8)
        tensor = room[-room.data_ptr() % 16 :][: flat.nbytes].view(getattr(torch, f"int{8 * flat.itemsize}"))
        tensor.copy_(torch.from_numpy(np.array(flat).view(f"i{flat.itemsize}")))
        return SimpleNamespace(tensor=tensor, address=tensor.data_ptr(), read=lambda: tensor.numpy().view(flat.dtype))


def pack(raw, fmt, n, k):
    """Packed bytes that remember their rows, for a kernel that unpacks nothing."""
    data = torch.from_numpy(packed_by_host(raw.numpy()[:1], fmt))
    return SimpleNamespace(data=data, rows=raw.numpy(), format=fmt, n=n, k=k)


def words(x) -> np.ndarray:
    """A tensor's numbers, by way of its bits."""
    name = str(x.dtype).removeprefix("torch.")
    return x.view(torch.int16 if x.element_size() == 2 else torch.int32).numpy().view(NUMPY[name])


class Fake(QuantKernel):
    """A kernel on the host, right or broken in one of several ways."""

    def __init__(self, path: str, broken: str = "", name: str = "fake"):
        self.name, self.path, self.broken, self.calls = name, path, broken, []

    def configure(self, case, multiprocessors):
        return "c"

    def build(self, case, config, device):
        return None

    def trial(self, bench, case, config):
        return quant_trial.try_product(bench, case, 8, self.run, pack)

    def run(self, x, packed, out, bias=None, config=None):
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
    assert fake.trial(Bench(Machine()), case, "c") == ""
    assert {m for m, _ in fake.calls} <= set(range(1, 80))
    assert (1 in {m for m, _ in fake.calls}) is (case.m == 1)
    assert any(n == min(case.n, 37) or case.wide for _, n in fake.calls)


WAYS = ("order", "tile", "bit", "stray", "unwritten")


@pytest.mark.parametrize(
    ("case", "broken"), [*((CASES[2], way) for way in (*WAYS, "bias")), *((CASES[3], way) for way in WAYS)], ids=str
)
def test_a_broken_kernel_is_found_out(case, broken):
    said = Fake(case.path, broken).trial(Bench(Machine()), case, "c")
    assert ("beside out" if broken == "stray" else "differ, first out") in said


def test_operands_tell_the_paths_apart():
    """A kernel of one path does not pass for another: other weights, another order, another rounding."""
    for path, other, arithmetic in (
        ("same", "fp32", "tensor_core:sm90"), ("fp32", "q8", "fma"), ("q8", "fp32", "int32"),
    ):  # fmt: skip
        case = QuantCase(path, "Q5_1", "bfloat16", "float32", None, 9, 37, 512, arithmetic)
        assert Fake(other).trial(Bench(Machine()), case, "c")


@pytest.fixture
def device(monkeypatch, tmp_path):
    """The verdicts of a fake device, in a folder of their own, and kernels that a test chooses."""
    found = Admissions(Machine(), Records(tmp_path))
    monkeypatch.setattr(machine, "admissions", lambda device: found)
    monkeypatch.setattr(
        "isogemm.backends.cuda.driver.facts.device", lambda ordinal: SimpleNamespace(multiprocessors=132)
    )
    return found


def chosen(monkeypatch, *kernels, case=CASES[3]):
    monkeypatch.setattr(family, "FAMILIES", SimpleNamespace(found={kernel.name: kernel for kernel in kernels}))
    return family.choose(case, SimpleNamespace(), 0)


def test_a_refused_kernel_serves_no_call(monkeypatch, device):
    broken, right = Fake("q8", "bit", "broken"), Fake("q8", name="right")
    said = []
    monkeypatch.setattr(admission, "notice", said.append)  # whatever other tests did to the logger
    run = chosen(monkeypatch, broken, right)
    assert run is not None
    count = len(broken.calls)
    assert len(said) == 1
    assert "broken" in said[0]
    assert "is not used" in said[0]
    before = len(right.calls)
    x, out = torch.zeros(2, 768), torch.empty(2, 40)
    rows = quant_trial.weights(FORMATS["Q6_K"], 768)[np.arange(40) % 37]
    run.packed.rows, run.packed.format = rows, "Q6_K"
    run(x, out, None)
    assert torch.isfinite(out).all()
    assert len(broken.calls) == count
    assert len(right.calls) == before + 1
    assert run.launch is None


def test_where_all_are_refused_there_is_none(monkeypatch, device):
    assert chosen(monkeypatch, Fake("q8", "order")) is None
    assert chosen(monkeypatch, Fake("fp32")) is None  # another path's
    assert chosen(monkeypatch) is None


def test_verdicts_are_kept(monkeypatch, device, tmp_path):
    first = Fake("q8")
    chosen(monkeypatch, first)
    count = len(first.calls)
    chosen(monkeypatch, first)
    assert len(first.calls) == count
    again = Admissions(Machine(), Records(tmp_path))
    monkeypatch.setattr(machine, "admissions", lambda device: again)
    assert chosen(monkeypatch, first) is not None
    assert len(first.calls) == count
    first.configure = lambda case, multiprocessors: "another configuration"
    chosen(monkeypatch, first)
    assert len(first.calls) > count


def test_nothing_is_tried_in_a_capture(monkeypatch, device):
    device.machine.busy = True
    with pytest.raises(DeviceError, match="capture"):
        chosen(monkeypatch, Fake("q8"))


def test_a_kernel_that_cannot_run_is_passed_over(monkeypatch, device):
    fails = Fake("q8", name="fails")
    fails.run = lambda *_: 1 / 0
    assert chosen(monkeypatch, fails, Fake("q8")).kernel.name == "fake"


def test_packing_and_dequantizing_are_compared_too():
    def right(raw, data, lay, n, k):
        data.copy_(torch.from_numpy(packed_by_host(raw.numpy(), lay.format)))

    def wrong(raw, data, lay, n, k):
        right(raw, data, lay, n, k)
        data[-1] ^= 1

    def stray(raw, data, lay, n, k):
        right(raw, data, lay, n, k)
        data.as_strided((1,), (1,), data.storage_offset() + data.numel()).zero_()

    def laid_out(raw, fmt, n, k):
        return SimpleNamespace(rows=raw.numpy(), format=fmt)

    def floats(packed, out, minus=True):
        w = dequantize(packed.rows, FORMATS[packed.format])
        words(out)[...] = w if minus else w + np.float32(0)

    bench = Bench(Machine())
    for fmt in ("Q4_0", "Q3_K"):
        assert quant_trial.try_pack(bench, fmt, right) == ""
        assert "packed" in quant_trial.try_pack(bench, fmt, wrong)
        assert "beside packed" in quant_trial.try_pack(bench, fmt, stray)
        for dtype in ("float32", "bfloat16", "float16"):
            assert quant_trial.try_dequantize(bench, fmt, dtype, floats, laid_out) == ""
            said = quant_trial.try_dequantize(bench, fmt, dtype, lambda p, o: floats(p, o, minus=False), laid_out)
            assert "0x80" in said  # the sign of a zero


@pytest.mark.parametrize("align", [16, 8, 4])
def test_results_of_a_trial_begin_as_the_case_s(align):
    """A kernel that writes 16 bytes at once is other code than one that does not, whatever the number of columns."""
    begun = []

    class Noted(Fake):
        def run(self, x, packed, out, bias=None, config=None):
            begun.append(out.data_ptr() % 16 == 0)
            super().run(x, packed, out, bias, config)

    case = QuantCase("fp32", "Q4_0", "float32", "float32", None, 3, 16, 64, "fma", out_align=align)
    assert Noted("fp32").trial(Bench(Aligned()), case, "c") == ""
    assert set(begun) == {align == 16}
