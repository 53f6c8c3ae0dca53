"""Products on a file's own blocks, without a second copy: the bits of the panels, which are the definition's."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from tests.backends.cpu.guards import Guarded
from tests.formats.test_blocks import same
from tests.products import F32, product
from tests.quant.draws import KINDS, WEIGHTS, blocks, values
from tests.quant.test_linear import defined, weight

import isogemm
from isogemm.errors import AliasError
from isogemm.quant import FORMATS, QuantizedMatrix, quantize


@pytest.mark.parametrize("fmt", WEIGHTS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_definition_for_every_format(fmt, kind):
    w = weight(fmt, 37, 3).in_place()
    for m in (1, 2, 3, 7, 8, 13, 16):
        x = values(kind, m, w.shape[1], seed=m)
        same(isogemm.linear(x, w), defined(x, w))
    assert w.panels().nbytes == 0
    assert np.shares_memory(w.panels().data, w.rows)


@pytest.mark.parametrize("fmt", WEIGHTS, ids=str)
@pytest.mark.parametrize("n", [1, 15, 16, 17, 32, 150])
def test_any_number_of_rows_and_threads(fmt, n):
    """Fewer than 16 rows are copied; where 16 does not divide them, the last ones are read with rows before them."""
    w = weight(fmt, n, 8).in_place()
    for m in (1, 5, 40):
        x, bias = values("heavy", m, w.shape[1], seed=m), values("normal", 1, n)[0]
        for threads in (1, 2, 3):
            isogemm.set_num_threads(threads)
            out = Guarded((m, n), np.dtype(F32), "c")
            isogemm.linear(x, w, bias, out=out.view, activations="q8")
            out.check(defined(x, w, bias=bias))


@pytest.mark.parametrize("fmt", WEIGHTS, ids=str)
def test_slices_and_rows_that_lie_apart(fmt):
    w, x = weight(fmt, 70, 3), values("normal", 3, 3 * fmt.block)
    want = defined(x, w)
    for part in (slice(5, 61), slice(None, None, -1), slice(3, None, 2), slice(60, 70), slice(9, 9)):
        cut = w.in_place()[part]
        assert cut.layout == "blocks"
        same(isogemm.linear(x, cut), np.ascontiguousarray(want[:, part]))
    room = np.full((70, w.rows.shape[1] + 7), 0xFF, np.uint8)
    room[:, 7:] = w.rows
    apart = QuantizedMatrix.from_bytes(room[:, 7:], shape=w.shape, format=fmt).in_place()
    same(isogemm.linear(x, apart), want)
    equal = QuantizedMatrix(np.broadcast_to(w.rows[3], w.rows.shape), w.shape, fmt).in_place()
    same(isogemm.linear(x, equal), np.repeat(want[:, 3:4], 70, axis=1))


@pytest.mark.parametrize("fmt", WEIGHTS, ids=str)
@pytest.mark.parametrize("m", [1, 40])
def test_floats(fmt, m):
    """Dequantized in pieces, without panels."""
    w, x = weight(fmt, 70, 2).in_place(), values("normal", m, 2 * fmt.block)
    same(isogemm.linear(x, w, activations="fp32"), product(x, w.dequantize().T))
    short = x.astype(np.float16)
    with np.errstate(over="ignore"):
        same(isogemm.linear(short, w), product(short, w.dequantize("float16").T))
    assert w._kept is None


def test_it_is_another_view_of_the_same_bytes():
    w = weight(FORMATS["Q4_K"], 40, 2)
    native = w.in_place()
    assert (w.layout, native.layout) == ("panels", "blocks")
    assert np.shares_memory(native.rows, w.rows)
    assert repr(native) == repr(w)[:-1] + ", read in place)"
    assert repr(native.panels()) == "Panels(0 bytes, read in place)"
    native.forget()
    assert native.panels().nbytes == 0
    assert w.panels().nbytes > w.nbytes
    for other in (pickle.loads(pickle.dumps(native)), copy.deepcopy(native)):
        assert other.layout == "blocks"
        same(other.rows, native.rows)
    few = w[:5].in_place()
    assert few.panels().nbytes == 16 * w.rows.shape[1]


def test_changed_bytes_are_read():
    """There is no copy that could be stale."""
    fmt = FORMATS["Q4_0"]
    rows, x = blocks(fmt, 32, 2), values("normal", 2, 64)
    w = QuantizedMatrix.from_bytes(rows, shape=(32, 64), format=fmt).in_place()
    first = isogemm.linear(x, w)
    rows[:] = quantize(values("normal", 32, 64, 5), "Q4_0").rows
    assert not np.array_equal(isogemm.linear(x, w), first)
    same(isogemm.linear(x, w), defined(x, w))


@pytest.mark.parametrize("place", ["panels", "in place"])
@pytest.mark.parametrize("activations", [None, "fp32"])
def test_results_are_not_written_over_the_weights(place, activations):
    """The shortest way looks, too: bytes that panels were made of are the weights of the next process."""
    kept = np.ascontiguousarray(quantize(values("normal", 32, 256), "Q8_0").rows)
    before, x = kept.copy(), values("normal", 4, 256, 1)
    w = QuantizedMatrix.from_bytes(kept, shape=(32, 256), format="Q8_0")
    w = w.in_place() if place == "in place" else w
    out = np.frombuffer(kept.data, np.float32)[: 4 * 32].reshape(4, 32)
    with pytest.raises(AliasError, match="out and w: limit: no shared memory"):
        isogemm.linear(x, w, activations=activations, out=out)
    assert np.array_equal(kept, before)
