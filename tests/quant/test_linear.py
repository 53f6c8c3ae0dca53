"""`isogemm.linear` with quantized weights: the definition's bits at every M, form, layout and thread count."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.backends.cpu.guards import Guarded
from tests.formats.test_blocks import same
from tests.products import BF16, F16, F32, laid, layouts, product
from tests.quant.draws import KINDS, WEIGHTS, blocks, values

import isogemm
from isogemm.backends.cpu.quant import launch, loops
from isogemm.cli import warm
from isogemm.contract import int32, reference
from isogemm.errors import AliasError, ContractError, DTypeError, FormatError, LayoutError, OptionError, ShapeError
from isogemm.formats.reference import decode
from isogemm.quant import FORMATS, QuantizedMatrix, quantize

SWEEP = (1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 255, 256, 257)


def weight(fmt, n: int, count: int, seed: int = 0) -> QuantizedMatrix:
    """Random blocks, all bit patterns of codes and scales."""
    return QuantizedMatrix.from_bytes(blocks(fmt, n, count, seed), shape=(n, count * fmt.block), format=fmt)


def defined(
    x: np.ndarray, w: QuantizedMatrix, *, bias=None, out_dtype=None, contract: str = "int32/chain"
) -> np.ndarray:
    acc = int32.evaluate(x, decode(w.rows, w.format), contract)
    return reference.epilogue(acc, bias=bias, out_dtype=x.dtype if out_dtype is None else out_dtype)


@pytest.mark.parametrize("fmt", WEIGHTS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_definition_for_every_format(fmt, kind):
    w = weight(fmt, 37, 3)
    for m in (1, 2, 3, 7, 8, 13, 16):
        x = values(kind, m, w.shape[1], seed=m)
        same(isogemm.linear(x, w), defined(x, w))


@pytest.mark.parametrize("fmt", WEIGHTS, ids=str)
def test_the_sweep_of_m(fmt):
    """A row alone, at any place of a batch of any size; the definition once."""
    w = weight(fmt, 35, 2)
    x = values("normal", max(SWEEP), w.shape[1])
    want = defined(x, w)
    for m in SWEEP:
        same(isogemm.linear(x[:m], w), want[:m])
        same(isogemm.linear(x[-m:], w), want[-m:])
    order = np.random.default_rng(0).permutation(len(x))
    same(isogemm.linear(x[order], w), want[order])


@pytest.mark.parametrize("fmt", WEIGHTS, ids=str)
def test_threads_and_slices_of_columns(fmt):
    w = weight(fmt, 150, 8)
    for m in (1, 5, 40):
        x = values("heavy", m, w.shape[1], seed=m)
        want = defined(x, w)
        for threads in (1, 2, 3):
            isogemm.set_num_threads(threads)
            same(isogemm.linear(x, w), want)
    for part in (slice(0, 16), slice(5, 77), slice(149, None), slice(None, None, -3), slice(9, 9)):
        same(isogemm.linear(x, w[part]), np.ascontiguousarray(want[:, part]))


@pytest.mark.parametrize("n", [1056, 1490])
@pytest.mark.parametrize("threads", [2, 3, 5])
def test_no_panel_is_left_out(n, threads):
    """Threads walk stretches of the panels that chunks do not fill evenly."""
    w, x = weight(FORMATS["Q4_0"], n, 32), values("normal", 1, 1024)
    isogemm.set_num_threads(1)
    want = isogemm.linear(x, w)
    for form in (w, w.in_place()):
        isogemm.set_num_threads(threads)
        out = np.full((1, n), np.nan, F32)
        isogemm.linear(x, form, out=out)
        same(out, want)
    same(want[:, -40:], np.ascontiguousarray(defined(x, w)[:, -40:]))


@settings(max_examples=40)
@given(
    st.sampled_from(WEIGHTS),
    st.integers(0, 20),
    st.integers(0, 40),
    st.integers(0, 3),
    layouts,
    layouts.filter(lambda name: name != "broadcast"),
    st.sampled_from([F32, BF16, F16]),
    st.sampled_from([F32, BF16, F16, None]),
    st.sampled_from([None, F32, BF16]),
    st.integers(0, 99),
)
def test_shapes_layouts_types_and_bias(fmt, m, n, count, lay_x, lay_out, dtype, out_dtype, bias_dtype, seed):
    w = weight(fmt, n, count, seed) if n and count else quantize(np.zeros((n, count * fmt.block), F32), fmt)
    with np.errstate(over="ignore"):
        x = values("normal", m, w.shape[1], seed).astype(dtype)
        bias = None if bias_dtype is None else values("normal", 1, n, seed)[0].astype(bias_dtype)
    if m == 0 and lay_x == "broadcast":
        lay_x = "c"
    x = laid(x, lay_x)
    want = defined(x, w, bias=bias, out_dtype=out_dtype)
    same(isogemm.linear(x, w, bias, activations="q8", out_dtype=out_dtype), want)
    if m and n:
        out = Guarded((m, n), want.dtype, lay_out)
        assert isogemm.linear(x, w, bias, activations="q8", out=out.view, out_dtype=out_dtype) is out.view
        out.check(want)


@pytest.mark.parametrize("fmt", [*WEIGHTS, FORMATS["F32"], FORMATS["F16"], FORMATS["BF16"]], ids=str)
@pytest.mark.parametrize("m", [1, 3, 17, 64])
def test_float_activations_are_the_chain_of_dequantized_weights(fmt, m):
    w = weight(fmt, 70, 2) if fmt.quantized else quantize(values("normal", 70, 96), fmt)
    x, bias = values("normal", m, w.shape[1]), values("normal", 1, 70)[0]
    wide = w.dequantize()
    same(isogemm.linear(x, w, bias, activations="fp32"), product(x, wide.T, bias=bias))
    same(isogemm.linear(x, w, activations="fp32", contract="fma/leaf64"), product(x, wide.T, "fma/leaf64"))
    if not fmt.quantized:
        same(isogemm.linear(x, w), product(x, wide.T))
    for dtype in (BF16, F16):
        with np.errstate(over="ignore"):
            short, narrow = x.astype(dtype), w.dequantize(dtype)
        same(isogemm.linear(short, w), product(short, narrow.T))
        same(isogemm.linear(short, w, activations="same", contract="tensor_core:sm90"),
             product(short, narrow.T, "tensor_core:sm90/chain"))  # fmt: skip
        same(isogemm.linear(short, w, activations="fp32"), product(short, wide.T, out_dtype=dtype))


@pytest.mark.parametrize("fmt", [FORMATS["Q4_0"], FORMATS["Q4_K"]], ids=str)
def test_leading_dimensions_and_orders(fmt):
    w = weight(fmt, 20, 16)
    x = values("normal", 6, w.shape[1])
    want = defined(x, w)
    same(isogemm.linear(x.reshape(2, 3, -1), w), want.reshape(2, 3, -1))
    same(isogemm.linear(x[0], w), want[0])
    swapped = np.ascontiguousarray(x.reshape(2, 3, -1).swapaxes(0, 1)).swapaxes(0, 1)
    same(isogemm.linear(swapped, w), want.reshape(2, 3, -1))
    for order in ("leaf256", "tree2"):
        same(isogemm.linear(x, w, contract=f"int32/{order}"), defined(x, w, contract=f"int32/{order}"))


def test_rows_that_hold_no_numbers_are_theirs_alone():
    w = weight(FORMATS["Q4_K"], 20, 2)
    x = values("normal", 5, 512)
    want = isogemm.linear(x, w)
    x[1, 7], x[3, 300] = np.inf, np.nan
    got = isogemm.linear(x, w)
    same(got[[0, 2, 4]], want[[0, 2, 4]])
    assert (got[[1, 3]].view(np.uint32) == 0x7FFFFFFF).all()


def test_torch_tensors():
    torch = pytest.importorskip("torch")
    w, x = weight(FORMATS["Q5_1"], 20, 2), values("normal", 5, 64)
    got = isogemm.linear(torch.from_numpy(x), w)
    assert isinstance(got, torch.Tensor)
    same(got.numpy(), isogemm.linear(x, w))
    w = quantize(torch.from_numpy(x), "Q8_0")
    same(w.rows, quantize(x, "Q8_0").rows)


def test_calls_from_many_threads_at_once():
    """The first of them make the panels, all at the same time; the pool serves one and the others help themselves."""
    from concurrent.futures import ThreadPoolExecutor

    w, x = weight(FORMATS["Q4_K"], 200, 4), values("normal", 9, 1024)
    want, wide = defined(x, w), product(x, w.dequantize().T)

    def call(i: int) -> np.ndarray:
        return isogemm.linear(x, w, activations=("q8", "fp32")[i % 2])

    with ThreadPoolExecutor(6) as threads:
        for i, got in enumerate(threads.map(call, range(48))):
            same(got, (want, wide)[i % 2])


def test_panels_are_kept_and_dropped():
    w = weight(FORMATS["Q4_0"], 32, 4)
    assert w.panels() is w.panels()
    assert w.panels().nbytes == w.nbytes
    assert w.panels().seconds > 0
    first = w.panels()
    w.forget()
    assert w.panels() is not first
    q4k = weight(FORMATS["Q4_K"], 32, 4)
    assert q4k.panels().nbytes == q4k.nbytes + 32 * 4 * 4


def test_what_is_refused():
    w, x = weight(FORMATS["Q4_0"], 8, 2), values("normal", 3, 64)
    linear = isogemm.linear
    damaged = blocks(FORMATS["Q4_0"], 8, 2)
    damaged[5, 18:20] = 0xFF
    for call, error in (
        (lambda: linear(x[:, :32], w), ShapeError),
        (lambda: linear(np.float32(1), w), DTypeError),
        (lambda: linear(x.astype(np.int8), w), DTypeError),
        (lambda: linear(x, w, np.ones(7, np.float32)), ShapeError),
        (lambda: linear(x, w, activations="int8"), OptionError),
        (lambda: linear(x, x, activations="q8"), OptionError),
        (lambda: linear(x, w, activations="fp32", contract="int32"), OptionError),
        (lambda: linear(x, w, activations="q8", contract="fma"), OptionError),
        (lambda: linear(x, w, contract="tensor_core:sm90"), DTypeError),
        (lambda: linear(x, quantize(x, "F16"), activations="q8"), OptionError),
        (lambda: linear(x, w, contract="int32/leaf32"), ContractError),
        (lambda: linear(x, w, out=np.empty((3, 9), np.float32)), ShapeError),
        (lambda: linear(x[:, :64], quantize(x, "F32"), out=x[:, :3]), AliasError),
        (lambda: linear(x, QuantizedMatrix(damaged, (8, 64), FORMATS["Q4_0"], "blk")), FormatError),
        (lambda: isogemm.matmul(x, x.T, contract="int32"), DTypeError),
    ):
        with pytest.raises(error):
            call()
    with pytest.raises(DTypeError, match="dtype of x"):  # and not that of the result
        linear(x.astype(np.int8), w)


@pytest.mark.parametrize("m", [1, 12, 13, 40])
def test_a_plain_call_has_the_bits_of_the_general_one(m):
    """Contiguous float32 without options takes a shorter way, and up to 12 rows of 1024 a compiled one."""
    w = quantize(values("normal", 37, 1024), "Q4_K")
    x = values("normal", m, 1024, seed=m)
    want = isogemm.linear(x, w, activations="q8")
    out = np.full((m, 37), np.nan, F32)
    assert isogemm.linear(x, w, out=out) is out
    same(out, want)
    same(isogemm.linear(x, w), want)
    same(isogemm.linear(np.repeat(x, 2, axis=1)[:, ::2], w), want)
    whole = np.empty(2048, F32)
    with pytest.raises(AliasError):
        isogemm.linear(whole[:1024].reshape(1, 1024), w, out=whole[7:44].reshape(1, 37))
    for options in ({}, {"activations": "q8"}, {"activations": "fp32"}):
        fixed = np.full((m, 37), np.nan, F32)
        fixed.flags.writeable = False
        with pytest.raises(LayoutError, match="read-only"):
            isogemm.linear(x, w, out=fixed, **options)
        assert np.isnan(fixed).all()


@pytest.mark.parametrize("way", loops.WAYS)
def test_rows_compile_the_passes_that_they_take(monkeypatch, way):
    """Rows are walked 8, 4, 2 and 1 at a time: first calls wait for those that run, and `isogemm warm` makes all."""
    asked: list[int] = []
    of = loops.routine
    monkeypatch.setattr(loops, "routine", lambda way, name, rows, *to: asked.append(rows) or of(way, name, rows, *to))
    w = weight(FORMATS["Q8_0"], 37, 2)
    w = w.in_place() if way == "blocks" else w
    activations = "fp32" if way == "floats" else "q8"
    for m in (1, 2, 5, 8, 15, 24, 64, *warm.QUANTIZED_ROWS[:1]):
        launch.prepared.cache_clear()
        asked.clear()
        isogemm.linear(values("normal", m, w.shape[1]), w, activations=activations)
        assert sorted(asked) == [rows for rows in (1, 2, 4, 8) if rows & m or (rows == 8 and m >= 8)]
    assert len(asked) == 4
