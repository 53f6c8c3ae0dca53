"""Processors told to flush subnormals (``torch.set_flush_denormal``), in the caller and in torch's own threads.

torch's threads keep the mode in which they were started. In a process of its own, they start in the wrong one.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.process import python

from isogemm.backends.cpu.gemm.tasks import float32_bits
from isogemm.contract.int32 import quantize_activations
from isogemm.formats import reference
from isogemm.formats.blocks import FORMATS
from isogemm.problem.settings import _scalar

SCRIPT = """
import numpy as np, torch, isogemm, isogemm.torch
from isogemm.errors import OptionError
from isogemm.torch import reductions as r

def values(*shape, seed, exponent=0):
    x = np.random.default_rng(seed).standard_normal(shape) * 2.0**exponent
    return x.astype(np.float32)

x, w, tiny, small = (values(*s, seed=i, exponent=e) for i, (s, e) in enumerate(
    (((64, 2048), 0), ((2048,), 0), ((64, 2048), -130), ((64, 2048), -70))))
few, a, b = values(8, 8, seed=5, exponent=-127), values(8, 16, seed=6), values(16, 8, seed=7)
of_rows = values(64, seed=8, exponent=-127)
assert torch.set_flush_denormal(True)
torch.set_num_threads(2)
x, w, tiny, small, few, of_rows = map(torch.from_numpy, (x, w, tiny, small, few, of_rows))
assert ((tiny * x) == 0).any(1)[[0, -1]].all()  # all threads flush

def grads(function, dy, *operands):
    operands = [t.clone().requires_grad_() for t in operands]
    function(*operands).backward(dy)
    return [t.grad for t in operands]

def found():
    for module in (torch.nn.GELU(), torch.nn.GELU(approximate="tanh"), torch.nn.SiLU(), torch.nn.Mish()):
        model = torch.nn.Sequential(module)
        isogemm.torch.convert(model)
        with torch.no_grad():
            yield model(tiny)
    yield from grads(lambda x, w: r.rms_norm(x, w, eps=1e-6), tiny, x, w)
    yield from grads(r.layer_norm, tiny, x, w, w)
    yield from grads(r.softmax, tiny, x)
    yield from grads(r.log_softmax, tiny, x)
    yield from grads(r.silu, tiny, x)
    yield from grads(r.silu_mul, small, x, small)
    yield from grads(r.sigmoid, tiny, x)
    yield from grads(r.mean, of_rows, x)
    yield from grads(lambda w: r.embedding(torch.arange(64) % 7, w), tiny, x)
    yield from grads(lambda *t: isogemm.torch.addmm(*t, beta=0.5, alpha=0.25), few, few, *map(torch.from_numpy, (a, b)))
    yield r.rms_norm(small * 0, eps=1e-41)
    yield from r.add_rms_norm(tiny, tiny, eps=1e-41)
    yield torch.from_numpy(isogemm.gemm(a, b, alpha=1e-41))
    yield torch.from_numpy(isogemm.gemm(a * 0, b, beta=1e-41, c=np.full((8, 8), 100, np.float32)))

def refused():
    gelu = torch.nn.Sequential(torch.nn.GELU())
    isogemm.torch.convert(gelu)
    recorded = tiny.clone().requires_grad_()
    for call in (isogemm.torch.enable, isogemm.torch.invariant().__enter__, lambda: gelu(recorded)):
        try:
            call()
        except OptionError as error:
            assert "torch.set_flush_denormal(False)" in str(error)
        else:
            raise AssertionError(call)

torch.set_flush_denormal(False)
torch.set_num_threads(1)
want = list(found())
torch.set_num_threads(2)
assert sum(bool(((t != 0) & (t.abs() < 2.0**-126)).any()) for t in want) > 15
for caller in (False, True):  # then in the caller, too
    torch.set_flush_denormal(caller)
    refused()
    got = list(found())
    torch.set_flush_denormal(False)
    print([torch.equal(x.view(torch.int32), y.view(torch.int32)) for x, y in zip(want, got, strict=True)])
    assert torch.get_num_threads() == 2
"""


def test_subnormals_survive_in_every_thread() -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush")
    torch.set_flush_denormal(False)
    said = python("-W", "error", "-c", SCRIPT)
    assert "True" in said
    assert "False" not in said, said


@pytest.mark.parametrize("flush", [False, True])
def test_scalars_are_rounded_in_any_mode(flush: bool) -> None:
    """Against NumPy, which rounds them in the processor's mode; ties to even, and the step to the normal numbers."""
    least = 2.0**-149
    cases = [x * least for x in (0.0, 0.5, 0.75, 1.0, 1.5, 2.5, 7.0, 2.0**23 - 0.5, 2.0**23, 12345.5)]
    cases += [1e-41, 1e-50, 1e-310, 5e-324, 0.1, 3.0, 1e30]
    cases += [-x for x in cases]
    want = np.array(cases, np.float64).astype(np.float32)
    if flush and not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush")
    try:
        rounded = [_scalar("alpha", x) for x in cases]
        bits = [float32_bits(x) for x in cases]
    finally:
        torch.set_flush_denormal(False)
    assert bits == want.view(np.uint32).tolist()
    assert rounded == want.astype(np.float64).tolist()


def test_definitions_of_quantized_numbers_keep_subnormals() -> None:
    """Scales of Q8_K are float32, and so are an activation's."""
    fmt, draw = FORMATS["Q8_K"], np.random.default_rng(0)
    rows = draw.integers(0, 256, (4, fmt.nbytes), dtype=np.uint8)
    rows[:, :4] = np.full(4, 1e-40, np.float32).view(np.uint8).reshape(4, 4)
    x = draw.standard_normal((4, 256)).astype(np.float64) * 2.0**-120
    x = x.astype(np.float32)

    def found() -> list[bytes]:
        a = quantize_activations(x, 256)
        return [reference.dequantize(rows, fmt).tobytes(), a.q.tobytes(), a.d.tobytes()]

    want = found()
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush")
    try:
        assert found() == want
    finally:
        torch.set_flush_denormal(False)
    assert np.frombuffer(want[0], np.float32).any()
    assert np.frombuffer(want[2], np.float32).any()
