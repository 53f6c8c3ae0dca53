"""Functions that can be called: what is wrong with them, whatever they insist on and however they end."""

from __future__ import annotations

import importlib
import itertools
import os
import threading
import time

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import isogemm
from isogemm import doctor
from isogemm.doctor import MISTAKES, GuardError, guard, guarded_empty
from isogemm.doctor.faulty import examined
from isogemm.doctor.probes import Probe
from isogemm.errors import DeviceError, DTypeError, LimitError, OptionError, ShapeError
from isogemm.formats.blocks import format_of
from isogemm.formats.reference import dequantize

RUNS = itertools.count()
PATIENCE = 300.0  # seconds of a call: a machine that is busy, or compiles for the first one, is no function that hangs


def examine(function, *words, seconds=PATIENCE, **more):
    return doctor.examine(function, *words, seconds=seconds, **more)


def wide(x):
    return x.astype(np.float32)


def only_multiples(a, b):
    if any(x % 16 for x in (*a.shape, *b.shape)):
        raise ValueError("multiples of 16, please")
    return (a @ b).T.reshape(len(a), -1)


def only_half(a, b):
    if a.dtype != np.float16:
        raise TypeError("float16 only")
    acc = np.zeros((len(a), b.shape[1]), np.float16)
    for k in range(a.shape[1]):
        acc += a[:, k : k + 1] * b[k]
    return acc


def writes(a, b):
    out = a @ b
    a[0, 0] += 1
    return out


def writes_the_last(x, w, bias):
    out = x @ w.T + bias
    bias[-1] += 1
    return out


def outside(a, b, out):
    longer = as_strided(out.reshape(-1), (out.size + 2,))
    longer[: out.size] = (a @ b).astype(out.dtype).reshape(-1)
    longer[out.size] = 0


def unwritten(a, b, out):
    out[: len(out) // 32 * 32] = (a @ b)[: len(out) // 32 * 32]


def racy(a, b):
    out = a @ b
    out[next(RUNS) % len(out), 0] += 99
    return out


@pytest.mark.parametrize(
    ("function", "name", "signature"),
    [
        (only_multiples, "row-column-major", "a, b"),
        (only_half, "half-accumulator", "a, b"),
        (lambda x, w: x[:, : x.shape[1] // 16 * 16] @ w[:, : w.shape[1] // 16 * 16].T, "k-tail", "x, w"),
        (lambda x, w, bias: x @ w.T + bias + bias, "bias-twice", "x, w, bias"),
        (lambda a, b: time.sleep(60), "hangs", "a, b"),
        (lambda a, b: "junk", "returns something else", "a, b"),
        (lambda a, b: os._exit(3), "ends the process", "a, b"),
        (writes, "writes into its operands", "a, b"),
        (writes_the_last, "writes into its operands", "x, w, bias"),
        (outside, "out was written outside", "a, b, out"),
        (unwritten, "out was not written everywhere", "a, b, out"),
        (racy, "race", "a, b"),
    ],
)
def test_what_is_wrong_with_it(function, name, signature):
    found = examine(function, signature, seconds=0.1 if name == "hangs" else PATIENCE)
    assert found.verdict == "wrong"
    assert name in (found.causes[0].name, *found.causes[0].indistinguishable_from)


def test_a_process_that_ends_between_two_calls_is_said_to_have_ended():
    def ends_later(a, b):
        threading.Timer(0.1, os._exit, (3,)).start()
        return a @ b

    found = examine(ends_later, tell=lambda *progress: time.sleep(0.4))
    assert (found.verdict, found.causes[0].name) == ("wrong", "ends the process")
    assert "exit status 3" in found.causes[0].parameter


PARTS = {"nothing": slice(0, None, 2), "multiples of 16": slice(1, None, 4), "float16": slice(3, None, 8),
         "n of 256": slice(7, None, 8)}  # fmt: skip


@pytest.mark.parametrize("insists", PARTS)
def test_every_mistake_of_the_bank_is_found_in_a_function(insists, monkeypatch):
    """Each once; in functions that insist on all of those by ``isogemm doctor --selftest``."""
    monkeypatch.setattr("isogemm.doctor.faulty.examine", examine)
    found = examined(list(MISTAKES)[PARTS[insists]], insists=insists)
    assert len(found) >= 4
    assert {x.name: x.said for x in found if not x.found} == {}


def test_extents_that_a_function_insists_on():
    def only(a, b):
        if b.shape != (72, 136):
            raise ValueError("72 x 136")
        return a[:, :64] @ b[:64]

    assert examine(only).verdict == "undiagnosable"
    found = examine(only, n=136, k=72)
    assert (found.verdict, found.causes[0].name) == ("wrong", "k-tail")
    for wrong in (0, 2.5):
        with pytest.raises(ShapeError, match="k: limit"):
            examine(only, n=136, k=wrong)


@pytest.mark.parametrize("takes", [lambda m, n, k: n != k == 16, lambda m, n, k: n == k == 16], ids=["k", "n and k"])
def test_sizes_that_functions_are_written_for_are_tried(takes):
    def only(a, b):
        if not takes(len(a), *b.shape[::-1]):
            raise ValueError("another size, please")
        return 1.875 * (a @ b)

    assert examine(only).causes[0].name == "alpha-type"


@pytest.mark.parametrize(
    ("takes", "cut"),
    [
        (lambda m, n, k: n == 64, "k"),
        (lambda m, n, k: k == 64, "n"),
        (lambda m, n, k: n == k == 64, "m"),
        (lambda m, n, k: m == 64 and n < 100, "k"),
    ],
    ids=["n", "k", "n and k", "m"],
)
def test_a_function_that_takes_one_size_is_asked_for_others_beside_it(takes, cut):
    """Of those that are tried first it takes 64 x 64 x 64, where its tiles of 16 have no tail."""

    def only(a, b):
        (m, k), n = a.shape, b.shape[1]
        if not takes(m, n, k):
            raise ValueError("another size, please")
        m, n, k = (x // 16 * 16 if name == cut else x for name, x in zip("mnk", (m, n, k), strict=True))
        out = np.full((len(a), b.shape[1]), np.nan, a.dtype)
        out[:m, :n] = a[:m, :k] @ b[:k, :n]
        return out

    assert examine(only).causes[0].name == f"{cut}-tail"


def test_an_order_of_chance_is_named_whatever_is_asked_behind_it():
    def chancy(a, b):
        first = len(a) == 37 and a.flags.c_contiguous
        return a[:, ::-1] @ b[::-1] if first and next(RUNS) % 2 else a @ b

    found = examine(chancy)
    assert (found.verdict, found.causes[0].name) == ("right", "other-order")


@pytest.mark.parametrize("multiple", [1, 16])
def test_padded_views_are_asked_too(multiple):
    """A function that takes the memory behind a view for contiguous."""

    def contiguous(a, b):
        if any(x % multiple for x in (*a.shape, *b.shape)):
            raise ValueError("multiples, please")
        return as_strided(a, a.shape, (a.shape[1] * a.itemsize, a.itemsize)) @ b

    found = examine(contiguous)
    assert found.causes[0].name == "lda"
    assert "padded" in found.first[0]


@pytest.mark.parametrize(
    ("signature", "function"),
    [
        ("x, w", lambda x, w: isogemm.linear(x, w)),
        ("a, b, out", lambda a, b, out: np.copyto(out, a @ b)),
        ("x, w, bias", lambda x, w, bias: (wide(x) @ wide(w).T + wide(bias)).astype(x.dtype)),
        ("a, b, c, alpha, beta", lambda a, b, c, alpha, beta: (
            alpha * (wide(a) @ wide(b)) + beta * wide(c)).astype(a.dtype)),
        ("a[i], b[i]", np.matmul),
        ("a[h], b[h // group]", lambda a, b: a @ np.repeat(b, len(a) // len(b), 0)),
        ("x, blocks", lambda x, rows: wide(x) @ dequantize(rows, format_of("Q4_K")).T),
    ],
)  # fmt: skip
def test_right_functions_of_every_signature(signature, function):
    found = examine(function, signature, format="Q4_K" if signature == "x, blocks" else "")
    assert found.verdict == "right", str(found)


def test_a_right_function_is_right():
    assert examine(lambda a, b: a @ b).verdict == "right"
    with pytest.raises(OptionError, match="signature"):
        examine(np.matmul, "b, a")
    with pytest.raises(OptionError, match="signature"):
        examine(np.matmul, ["a, b"])
    with pytest.raises(DTypeError, match=r"function: limit: a function of arrays; got: 'numpy.matmul'"):
        examine("numpy.matmul")
    with pytest.raises(OptionError, match=r"seconds: limit: more than 0; got: -1"):
        examine(np.matmul, seconds=-1)
    with pytest.raises(OptionError, match=r"seconds: limit: at most 1e\+06; got: inf"):
        examine(np.matmul, seconds=float("inf"))
    with pytest.raises(DTypeError, match=r"seconds: limit: a number; got: '5'"):
        examine(np.matmul, seconds="5")
    refused = examine(lambda a, b: (_ for _ in ()).throw(RuntimeError("no")))
    assert (refused.verdict, refused.exit_status) == ("undiagnosable", 1)
    assert str(refused).startswith("undiagnosable: there is no result to look at\n")
    assert "RuntimeError: no" in str(refused)


def adds(a, b, out):
    out += a @ b


def test_guards():
    out = guarded_empty((5, 7), "bfloat16")
    out.array[:4] = 0
    with pytest.raises(GuardError, match="7 elements left, the first at 28"):
        out.check()
    out.array[4:] = 0
    out.check()
    as_strided(out.array.reshape(-1), (36,))[35] = 1
    with pytest.raises(GuardError, match="1 elements behind it"):
        out.check()

    out = guarded_empty((5, 7), "bfloat16")
    out.array[:] = as_strided(out.array, (36,), (-2,))[[1, 3]] = 0
    with pytest.raises(GuardError, match="1 elements before it"):
        out.check()

    a, b = np.ones((3, 4), np.float32), np.ones((4, 5), np.float32)
    assert (guard(np.matmul)(a, b) == 4).all()
    with pytest.raises(GuardError, match="operand 0 was changed"):
        guard(writes)(a.copy(), b)
    with pytest.raises(GuardError, match="a was changed"):
        guard(writes)(b=b, a=a.copy())
    with pytest.raises(GuardError, match="other bits in a second run"):
        guard(lambda a, b: a @ b + np.float32(np.random.default_rng().random()))(a, b)
    with pytest.raises(GuardError, match="outside"):
        guard(outside)(a, b, out=guarded_empty((3, 5)))
    with pytest.raises(GuardError, match="other bits in a second run"):
        guard(lambda a, b, out: out.fill(next(RUNS)))(a, b, out=guarded_empty((3, 5)))
    total = np.ones((3, 5), np.float32)
    assert guard(adds)(a, b, out=total) is None
    assert (total == 5).all()
    with pytest.raises(DTypeError, match=r"result of <lambda>.*list"):
        guard(lambda a, b: [a @ b])(a, b)
    with pytest.raises(DTypeError, match=r"function: limit: a function of arrays or tensors; got: 3"):
        guard(3)
    with pytest.raises(DTypeError, match=r"elements that are compared: limit: .* got: complex128"):
        guard(lambda a, b: (a @ b).astype(np.complex128))(a, b)
    lengths = iter((3, 4))
    with pytest.raises(GuardError, match=r"another shape in a second run: limit: \[3\]; got: \[4\]"):
        guard(lambda a, b: np.ones(next(lengths)))(a, b)


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        (((2, 3), "bf17"), DTypeError, "dtype: limit: .* got: 'bf17'"),
        (((2, 3), "int32"), DTypeError, "which have a NaN; got: int32"),
        ((-2,), ShapeError, "shape: limit: a whole number of at least 0; got: -2"),
        (("2, 3",), ShapeError, "shape: .* got: '2, 3'"),
        ((2.5,), ShapeError, "shape: .* got: 2.5; nearest legal choice: 2"),
    ],
)
def test_outputs_that_cannot_be_guarded_are_refused(given, error, said):
    with pytest.raises(error, match=said):
        guarded_empty(*given)


def test_guards_of_tensors():
    torch = pytest.importorskip("torch")
    assert guarded_empty(np.int64(3), "bf16", device="cpu").array.dtype is torch.bfloat16
    with pytest.raises(DeviceError, match="device: limit: one that torch can use here; got: gpu"):
        guarded_empty(3, device="gpu")
    out = guarded_empty((3, 5), torch.float16)
    with pytest.raises(GuardError, match="15 elements left"):
        out.check()
    torch.mm(torch.ones(3, 4).half(), torch.ones(4, 5).half(), out=out.array)
    out.check()
    assert examine(lambda a, b: a @ b.mul(1), torch=True).verdict == "right"


def test_probes_beyond_memory_are_refused_and_their_function_is_not_accused(monkeypatch):
    with pytest.raises(LimitError, match=r"m, n, k: limit: .*got: m = 10{12}; nearest legal choice: m = ") as refused:
        examine(np.matmul, m=10**12)
    assert 1 <= int(str(refused.value).rpartition("= ")[2]) < 10**12

    def operands(probe):
        raise MemoryError

    monkeypatch.setattr("isogemm.doctor.probes.Probe.operands", operands)
    with pytest.raises(LimitError, match="operands of a probe: limit: the free memory"):
        examine(np.matmul)


def test_a_probe_that_takes_too_long_to_draw_is_no_result(monkeypatch):
    drawn = Probe.operands
    monkeypatch.setattr(Probe, "operands", lambda probe: time.sleep(0.5) or drawn(probe))
    monkeypatch.setattr(importlib.import_module("isogemm.doctor.examine"), "DRAWS", 0.1)
    with pytest.raises(LimitError, match=r"operands of a probe: limit: the free memory, filled within 0\.1 s"):
        examine(np.matmul)


def test_the_time_in_which_probes_are_drawn_is_not_that_of_the_function(monkeypatch):
    """Drawing takes longer than a call may; on a busy machine, which may hold up a call, all is tried slower."""
    drawn = Probe.operands

    def verdict(slower):
        def operands(probe):
            time.sleep(0.4 * slower)
            return drawn(probe)

        monkeypatch.setattr(Probe, "operands", operands)
        return examine(np.matmul, seconds=0.5 * slower).verdict

    monkeypatch.setattr(importlib.import_module("isogemm.doctor.examine"), "ENOUGH", 1)
    assert "right" in map(verdict, (1, 4, 16))


def test_an_error_without_words_is_a_refusal():
    class WordlessError(Exception):
        def __str__(self):
            raise RuntimeError("no words")

    def refuses(a, b):
        raise WordlessError

    found = examine(refuses)
    assert found.verdict == "undiagnosable"
    assert "refused: WordlessError: <exception str() failed>" in found.limits[1]
