"""Arguments that make no sense, in every place of the public functions: an error of ours, which names what it takes."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided
from tests.program.small import MODEL, program, weights
from tests.quant.draws import encoded

import isogemm
from isogemm import blas
from isogemm.base.arguments import extent, flag, number
from isogemm.errors import AliasError, DTypeError, IsogemmError, LayoutError, OptionError, ShapeError
from isogemm.lab import Candidate, interleave
from isogemm.quant import QuantizedMatrix, load, quantize

torch = pytest.importorskip("torch")

import isogemm.audit  # noqa: E402
import isogemm.torch as iso  # noqa: E402

W, X = np.ones((4, 64), np.float32), np.ones((3, 64), np.float32)
TW, TX = torch.ones(4, 64), torch.ones(3, 64)
FLAT = np.ones(16, np.float32)
QUANTIZED = encoded(W, "Q4_0")
from_bytes = isogemm.QuantizedMatrix.from_bytes


class Other:
    """An object of another library."""


def nested():
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


ABSURD: dict[str, Any] = {
    "None": None,
    "a number": 3,
    "a negative number": -1,
    "NaN": float("nan"),
    "a number that no machine has": 2**70,
    "text": "x",
    "text with a zero": "a\0b",
    "bytes": b"abc",
    "a list": [1, 2],
    "a list of lists": [[1.0, 2.0]],
    "a tuple": (),
    "a set": {1},
    "a dict": {},
    "a slice": slice(0, 2),
    "an object": Other(),
    "a type": int,
    "a dtype": torch.float32,
    "a device": torch.device("cpu"),
    "a module": torch.nn.ReLU(),
    "complex": torch.ones(3, 64, dtype=torch.complex64),
    "complex array": np.ones((3, 64), complex),
    "sparse": torch.eye(64).to_sparse(),
    "meta": torch.ones(3, 64, device="meta"),
    "0-d": torch.tensor(1.0),
    "0-d array": np.array(1.0, np.float32),
    "integers": torch.ones(3, 64, dtype=torch.int32),
    "float64": torch.ones(3, 64, dtype=torch.float64),
    "float8": torch.ones(3, 64).to(torch.float8_e4m3fn),
    "words": np.array(["a"]),
    "objects": np.array([None], object),
    "masked": np.ma.ones((3, 64), np.float32),
    "quantized": QUANTIZED,
}


def model():
    return torch.nn.Sequential(torch.nn.Linear(64, 4))


def audit(providers: Any = ("numpy",), shapes: Any = ((4, 64),), **options: Any) -> Any:
    return isogemm.audit.run(providers, shapes, **{"sweep": [1, 2], "relations": ["rerun"], "speed": False, **options})


def strided(count: Any) -> Any:
    return blas.gemm_strided_batched("N", "N", 2, 2, 2, 1.0, FLAT, 2, FLAT, 2, 0.0, FLAT.copy(), 2, 0, 0, 4, count)


def pointed(first: Any, last: Any) -> Any:
    return blas.gemm_batched("N", "N", 2, 2, 2, 1.0, FLAT, 2, FLAT, 2, 0.0, FLAT.copy(), 2, first, [0], last)


@cache
def made() -> Any:
    return program(phase="prefill")


heads = torch.ones(1, 2, 3, 16)
CALLS: dict[str, Callable[[Any], Any]] = {
    "load": load,
    "quantize": lambda a: isogemm.quantize(a, "Q4_0"),
    "quantize format": lambda a: isogemm.quantize(W, a),
    "linear x": lambda a: isogemm.linear(a, W),
    "linear w": lambda a: isogemm.linear(X, a),
    "linear out_dtype": lambda a: isogemm.linear(X, W, out_dtype=a),
    "linear of tensors out_dtype": lambda a: isogemm.linear(TX, TW, out_dtype=a),
    "linear activations": lambda a: isogemm.linear(X, QUANTIZED, activations=a),
    "linear contract": lambda a: isogemm.linear(X, QUANTIZED, contract=a),
    "plan dtype": lambda a: isogemm.plan(3, 4, 64, dtype=a),
    "plan device": lambda a: isogemm.plan(3, 4, 64, device=a),
    "from_bytes data": lambda a: from_bytes(a, shape=(4, 64), format="Q4_0"),
    "from_bytes shape": lambda a: from_bytes(bytes(144), shape=a, format="Q4_0"),
    "from_bytes n": lambda a: from_bytes(bytes(144), shape=(a, 64), format="Q4_0"),
    "from_bytes format": lambda a: from_bytes(bytes(144), shape=(4, 64), format=a),
    "from_bytes row_stride": lambda a: from_bytes(bytes(144), shape=(4, 64), format="Q4_0", row_stride=a),
    "adopt": lambda a: isogemm.QuantizedMatrix.adopt(a, shape=(4, 64), format="Q4_0"),
    "to": QUANTIZED.to,
    "row_offset": QUANTIZED.row_offset,
    "row_bytes": lambda a: QUANTIZED.format.row_bytes(a),
    "dequantize": QUANTIZED.dequantize,
    "dequantize_into": QUANTIZED.dequantize_into,
    "slice": lambda a: QUANTIZED[a],
    "slice from": lambda a: QUANTIZED[a:],
    "torch linear x": lambda a: iso.linear(a, TW),
    "torch linear w": lambda a: iso.linear(TX, a),
    "torch linear contract": lambda a: iso.linear(TX, TW, contract=a),
    "torch linear out_dtype": lambda a: iso.linear(TX, TW, out_dtype=a),
    "torch linear out_dtype, recorded": lambda a: iso.linear(TX.clone().requires_grad_(), TW, out_dtype=a),
    "torch linear grad_order": lambda a: iso.linear(TX.clone().requires_grad_(), TW, grad_order=a),
    "torch linear of blocks grad_order": lambda a: iso.linear(TX.clone().requires_grad_(), QUANTIZED, grad_order=a),
    "torch linear of blocks activations": lambda a: iso.linear(TX, QUANTIZED, activations=a),
    "torch linear main_grad": lambda a: iso.linear(TX, TW, main_grad=a),
    "addmm c": lambda a: iso.addmm(a, TX, TW.T),
    "addmm alpha": lambda a: iso.addmm(torch.zeros(3, 4), TX, TW.T, alpha=a),
    "baddbmm c": lambda a: iso.baddbmm(a, TX[None], TW.T[None]),
    "grouped a": lambda a: iso.grouped(a, [TW.T]),
    "grouped b": lambda a: iso.grouped([TX], a),
    "QuantizedLinear weight": iso.QuantizedLinear,
    "QuantizedLinear bias": lambda a: iso.QuantizedLinear(QUANTIZED, a),
    "QuantizedLinear out_dtype": lambda a: iso.QuantizedLinear(QUANTIZED, out_dtype=a),
    "convert": iso.convert,
    "convert parts": lambda a: iso.convert(model(), parts=a),
    "convert grad_order": lambda a: iso.convert(model(), grad_order=a),
    "convert leave": lambda a: iso.convert(model(), leave=a),
    "convert fuse": lambda a: iso.convert(model(), fuse=a),
    "convert quantize": lambda a: iso.convert(model(), quantize=a),
    "convert fallback": lambda a: iso.convert(model(), quantize="Q4_K", fallback=a),
    "convert activations": lambda a: iso.convert(model(), quantize="Q4_0", activations=a),
    "use_main_grad": iso.use_main_grad,
    "collect_main_grad": iso.collect_main_grad,
    "main_grads": lambda a: list(iso.main_grads(a)),
    "attention query": lambda a: iso.scaled_dot_product_attention(a, heads, heads),
    "attention mask": lambda a: iso.scaled_dot_product_attention(heads, heads, heads, a),
    "attention scale": lambda a: iso.scaled_dot_product_attention(heads, heads, heads, scale=a),
    "attention causal": lambda a: iso.attention(heads, heads, heads, causal=a),
    "attention start": lambda a: iso.attention(heads, heads, heads, start=a),
    "grouped_linear counts": lambda a: iso.grouped_linear(TX, TW[None], a),
    "grouped_linear count": lambda a: iso.grouped_linear(TX, TW[None], [a]),
    "main_grad's grad_order": lambda a: iso.linear(TX, TW, main_grad=torch.zeros(4, 64), grad_order=a),
    "rope_tables n": lambda a: iso.reductions.rope_tables(torch.arange(3), a),
    "rope_tables theta": lambda a: iso.reductions.rope_tables(torch.arange(3), 8, a),
    "interleave blocks": lambda a: interleave([Candidate("one", lambda n: None)], blocks=a),
    "interleave block_seconds": lambda a: interleave([Candidate("one", lambda n: None)], block_seconds=a),
    "interleave pause": lambda a: interleave([Candidate("one", lambda n: None)], pause=a),
    "blas m": lambda a: blas.gemm("N", "N", a, 1, 1, 1.0, FLAT, 1, FLAT, 1, 0.0, FLAT.copy(), 1),
    "blas lda": lambda a: blas.gemm("N", "N", 2, 2, 1, 1.0, FLAT, 2, FLAT, 2, 0.0, FLAT.copy(), a),
    "blas batch_count": lambda a: strided(a),
    "blas offsets_a": lambda a: pointed(a, [0]),
    "blas offsets_c": lambda a: pointed([0], a),
    "tensor_cores m": lambda a: blas.tensor_cores(a, 4, 4),
    "program load": isogemm.program.load,
    "program model": lambda a: isogemm.program.lower(a, batch=1, tokens=2),
    "program quantize": lambda a: program(quantize=a),
    "program choices": lambda a: program(choices=a),
    "program weights": lambda a: made().start(a),
    "program weight": lambda a: made().start(weights(MODEL) | {"L0.wq": a}),
    "audit providers": lambda a: audit(providers=a),
    "audit shapes": lambda a: audit(shapes=a),
    "audit sweep": lambda a: audit(sweep=a),
    "audit dtype": lambda a: audit(dtype=a),
    "audit relations": lambda a: audit(relations=a),
    "audit inputs": lambda a: audit(inputs=a),
    "audit.load": isogemm.audit.load,
    "audit.read_shapes": isogemm.audit.read_shapes,
    "audit.weights_of_file": isogemm.audit.weights_of_file,
    "audit.replay": isogemm.audit.replay,
}
WORDS = re.compile(r"limit: .+; got: .*; nearest legal choice: ", re.DOTALL)
# What means something there.
SENSE = {
    "rope_tables n": ("a number that no machine has",),
    "rope_tables theta": ("a number", "a number that no machine has", "0-d", "0-d array"),
    "audit shapes": ("None",),
    "audit sweep": ("None",),
    "interleave blocks": ("a number", "a number that no machine has"),
    "interleave block_seconds": ("a number", "a number that no machine has", "0-d", "0-d array"),
    "interleave pause": ("a number", "a number that no machine has", "0-d", "0-d array"),
    "program quantize": ("None", "a dict"),
    "program choices": ("None",),
}


@pytest.mark.filterwarnings("ignore")  # torch's, about tensors of every kind
@pytest.mark.parametrize("name", CALLS)
def test_absurd_arguments_are_refused_by_name(name):
    for kind, argument in ABSURD.items():
        if kind in SENSE.get(name, ()):
            continue
        found = ""
        try:
            CALLS[name](argument)
        except IsogemmError as error:
            found = "" if WORDS.search(str(error)) else f"words: {error}"
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
        assert not found, f"{name} with {kind}: {found}"


@pytest.mark.filterwarnings("ignore")  # torch's, about nested tensors
@pytest.mark.parametrize(
    "name", ["addmm c", "grouped a", "torch linear main_grad", "attention query", "attention mask"]
)
def test_nested_tensors_are_refused(name):
    with pytest.raises(IsogemmError, match=r"nested|list|dense"):
        CALLS[name](nested())


def test_what_is_no_module_is_named():
    for call in (iso.convert, iso.use_main_grad, iso.collect_main_grad, isogemm.audit.model):
        with pytest.raises(DTypeError, match=r"limit: a torch\.nn\.Module; got: int; nearest legal choice: "):
            call(3)
    with pytest.raises(TypeError, match="model_or_function: limit: a module, or a function; got: 3"):
        iso.coverage(3)
    with pytest.raises(OptionError, match="ReLU without parameters"):
        isogemm.audit.model(torch.nn.ReLU())


def test_one_name_is_a_list_of_one():
    found = torch.nn.Sequential(torch.nn.Linear(64, 4), torch.nn.Linear(4, 4))
    assert iso.convert(found, leave="1").left == {"1": "in leave"}
    assert set(audit("numpy").providers) == {"numpy", "isogemm"}


def test_an_addend_that_does_not_broadcast_is_named():
    for c in (torch.zeros(3, 5), torch.zeros(2, 4), torch.zeros(1, 1, 3, 4)):
        with pytest.raises(ShapeError, match=r"shape of c of addmm: limit: one that broadcasts to \[3, 4\]"):
            iso.addmm(c, TX, TW.T)
    for shape in ((), (1,), (4,), (1, 4), (3, 1), (3, 4)):
        assert torch.equal(iso.addmm(torch.ones(shape), TX, TW.T), torch.full((3, 4), 65.0))


def test_dequantize_into_shares_no_memory():
    rows = np.random.default_rng(0).standard_normal((16, 256), np.float32)
    blocks = quantize(rows, "Q8_0").rows
    memory = np.zeros(blocks.size + 32 * 256 * 4, np.uint8)
    memory[: blocks.size] = blocks.reshape(-1)
    given = QuantizedMatrix.from_bytes(memory[: blocks.size], shape=(16, 256), format="Q8_0")
    before = memory.copy()
    for out in (
        memory[: 16 * 1024].view(np.float32).reshape(16, 256),
        as_strided(np.zeros(256, np.float32), (16, 256), (0, 4)),
    ):
        with pytest.raises(AliasError):
            given.dequantize_into(out)
    assert (memory == before).all()


def test_arrays_that_dequantize_into_cannot_fill():
    for out, error in (
        (np.empty((4, 63), np.float32), LayoutError),
        (np.empty((64, 4), np.float32).T, LayoutError),
        (np.broadcast_to(np.float32(0), (4, 64)), LayoutError),
        (np.empty((4, 64)), DTypeError),
    ):
        with pytest.raises(error, match=r"^(out|dtype)"):
            QUANTIZED.dequantize_into(out)
    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
        out = np.full((4, 66), np.nan, dtype)[:, 1:65]
        QUANTIZED.dequantize_into(out)
        np.testing.assert_array_equal(out, QUANTIZED.dequantize(dtype))


def test_progress_of_names_that_look_like_markup(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes that for a terminal
    found = torch.nn.Sequential()
    found.add_module("[/x]", torch.nn.Linear(64, 4))
    iso.convert(found, quantize="Q4_0", progress=True)
    assert "[/x]" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["no", "False", b"0", ""], ids=repr)
def test_text_is_no_flag(text):
    """bool() would take it for true, or for false."""
    for call in (
        lambda: iso.convert(torch.nn.Linear(4, 4), strict=text),
        lambda: iso.invariant(rows=text),
        lambda: iso.enable(attention=text),
        lambda: flag("recompute", text),
    ):
        with pytest.raises(DTypeError, match=r"limit: True or False; got: b?'"):
            call()
    assert not iso.enabled()


@pytest.mark.parametrize("text", ["2", " 1.5 ", b"2", bytearray(b"2"), "inf", "1_0"], ids=repr)
def test_text_that_reads_like_a_number_is_none(text):
    """float() would take it."""
    with pytest.raises(OptionError, match="a finite real number"):
        isogemm.gemm(W, W.T, alpha=text)
    for call in (lambda: iso.addmm(TX @ TW.T, TX, TW.T, beta=text), lambda: number("scale", text)):
        with pytest.raises(DTypeError, match="a number"):
            call()


class Index:
    """What says that it is a whole number, or cannot."""

    def __init__(self, said: Any) -> None:
        self.said = said

    def __index__(self) -> int:
        if isinstance(self.said, int):
            return self.said
        raise self.said


@pytest.mark.parametrize("size", [3, np.int16(3), np.uint64(3), np.array(3), torch.tensor(3), Index(3)])
def test_a_size_is_a_whole_number_of_any_library(size: Any) -> None:
    found = extent("m", size)
    assert (type(found), found) == (int, 3)


@pytest.mark.parametrize("size", [
    True, np.True_, np.array(True), torch.tensor(True), np.array([3]), torch.tensor([[3]]), "3", 3.0, np.float32(3),
    torch.tensor(3.0), None, Index(TypeError()), Index(ValueError()), Index(RuntimeError()), -1, np.int8(-1),
])  # fmt: skip
def test_a_size_is_nothing_else(size: Any) -> None:
    with pytest.raises(ShapeError, match="m: limit: a whole number of at least 1"):
        extent("m", size)
