"""Calls in any order: what is remembered of one never answers another.

A call like one before skips what is checked and chosen. The tables that make it so are keyed by some of what a call is,
and a key that leaves something out shows only where two kinds of calls agree in all the rest, and often only behind a
third one. So these differ from one another in a respect or two; sizes of memory agree in all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.products import BF16, F16, F32, assert_same, laid, poisoned, product, values

import isogemm
from isogemm.backends.cpu.emit.target import target
from isogemm.base import seen
from isogemm.contract import int32, reference
from isogemm.errors import AliasError, LayoutError
from isogemm.formats.reference import decode

NR = target().nr  # columns of a panel: weights [n, NR] and their panels are matrices of one shape
LONG = max(2 * NR, 32)  # a whole number of quantized blocks
A_SIZE, B_SIZE = 4 * NR, 3 * NR * NR  # elements of x [m, k] and of w [n, k]
DTYPES = {"float32": F32, "bfloat16": BF16, "float16": F16}
CONTRACTS = ("fma/chain", "fma/leaf8", "fma/tree4", "fma/lanes32", "tensor_core:sm90/chain")


@dataclass(frozen=True)
class Call:
    """One call; the first value of each field is the plainest."""

    form: str = "linear"
    weight: str = "plain"
    k: int = NR
    dtype: str = "float32"
    x: str = "c"
    w: str = "c"
    out: str = "c"
    contract: str = ""
    alpha: str = "1.0"  # as text: 0.0 equals -0.0, and the definition's results are kept by calls
    bias: bool = False
    threads: int = 1
    library: str = "numpy"
    seed: int = 0


CHOICES: dict[str, tuple[Any, ...]] = {
    "form": ("linear", "matmul", "into", "gemm", "walk", "stack", "onto", "locked"),
    "weight": ("plain", "packed", "Q8_0", "Q4_1"),
    "k": (NR, NR // 2, LONG),
    "dtype": tuple(DTYPES),
    "x": ("c", "f", "padded", "stepped", "reversed", "broadcast"),
    "w": ("c", "f", "padded", "stepped", "reversed", "broadcast"),
    "out": ("c", "f", "padded", "reversed"),
    "contract": ("", *CONTRACTS),
    "alpha": ("1.0", "0.0", "-0.0"),
    "bias": (False, True),
    "threads": (1, 2),
    "library": ("numpy", "torch") if find_spec("torch") else ("numpy",),
    "seed": (0, 1),
}
FORMS = ("linear", "linear", "matmul", "into", "gemm", "walk")  # of first calls
KEPT = ("weight", "k", "dtype", "contract")  # of which most tables have keys


def legal(call: Call) -> Call:
    """The nearest call that is not refused for another reason than the one that it is there for."""
    if call.weight.startswith("Q"):
        call = replace(call, form="linear", k=LONG, w="c", contract="", alpha="1.0")
    elif call.weight == "packed":
        call = replace(call, form="linear", w="c")
    if call.form in ("onto", "locked"):
        call = replace(call, contract="", alpha="1.0", library="numpy", out="c")
    if call.form in ("linear", "matmul", "into"):
        call = replace(call, alpha="1.0")
    if call.form not in ("linear", "gemm"):
        call = replace(call, bias=False)
    if call.contract.startswith("tensor") and call.dtype == "float32":
        call = replace(call, contract="")
    if call.form == "walk" and call.contract.endswith(("tree4", "lanes32")):
        call = replace(call, contract="fma/leaf8")
    return call


@st.composite
def sequences(draw: Any) -> list[Call]:
    """Calls near one another: each is the first one but for a field or two, and most are of its form."""
    plainest = {name: draw(st.sampled_from(CHOICES[name][:2])) for name in ("weight", "threads")}
    first = legal(Call(form=draw(st.sampled_from(FORMS)), **plainest))
    names = st.sampled_from(KEPT) | st.sampled_from(tuple(CHOICES))
    calls = [first]
    for _ in range(draw(st.integers(3, 8))):
        changed = {draw(names) for _ in range(draw(st.sampled_from((1, 1, 2))))}
        calls.append(replace(first, **{name: draw(st.sampled_from(others(first, name))) for name in sorted(changed)}))
    return [legal(call) for call in calls]


def others(call: Call, name: str) -> list[Any]:
    """What a field may have instead."""
    return [value for value in CHOICES[name] if value != getattr(call, name)]


@cache
def drawn(rows: int, columns: int, dtype: str, seed: int) -> np.ndarray:
    return values((rows, columns), DTYPES[dtype], seed=seed, special=True)


def sizes(call: Call) -> tuple[int, int, int]:
    """m, n, k."""
    return A_SIZE // call.k, B_SIZE // call.k, call.k


def operands(call: Call) -> tuple[np.ndarray, np.ndarray]:
    """x [m, k], and w [n, k] or [k, n]."""
    (m, n, k), turned = sizes(call), call.form != "linear"
    x, w = drawn(m, k, call.dtype, call.seed), drawn(*((k, n) if turned else (n, k)), call.dtype, 2 + call.seed)
    return laid(np.array(x), call.x), laid(np.array(w), call.w)


@cache
def quantized(fmt: str, seed: int) -> isogemm.QuantizedMatrix:
    return isogemm.quantize(values((B_SIZE // LONG, LONG), seed=4 + seed), fmt)


def bias_of(call: Call) -> np.ndarray | None:
    return values((sizes(call)[1],), seed=6 + call.seed) if call.bias else None


@cache
def expected(call: Call) -> np.ndarray:
    """The result by the definition; threads, libraries and layouts are not arguments of it."""
    (m, n, _), bias = sizes(call), bias_of(call)
    x, w = operands(call)
    if call.weight.startswith("Q") and call.dtype == "float32":
        matrix = quantized(call.weight, call.seed)
        return reference.epilogue(int32.evaluate(x, decode(matrix.rows, matrix.format)), bias=bias, out_dtype=F32)
    if call.weight.startswith("Q"):
        w = quantized(call.weight, call.seed).dequantize(x.dtype)
    b, contract = w.T if call.form == "linear" else w, call.contract or "fma/chain"
    if call.form == "walk":
        return product(x, b, contract, c=start(m, n), alpha=float(call.alpha), out_dtype=F32, accumulate=True)
    return product(x, b, contract, alpha=float(call.alpha), bias=bias)


def start(m: int, n: int) -> np.ndarray:
    return values((m, n), seed=8)


def tensor(x: Any) -> Any:
    """A torch tensor with an array's values, and its strides where torch has them."""
    import torch

    from isogemm.operands.tensors import as_tensor

    once = x[tuple(slice(1) if step == 0 else slice(None) for step in x.strides)]
    steps = [abs(step) // x.itemsize or 1 for step in once.strides]
    values = as_tensor(np.array(once, order="C"))
    return torch.empty_strided(once.shape, steps, dtype=values.dtype).copy_(values).expand(x.shape)


def room(call: Call, dtype: Any) -> np.ndarray:
    m, n, _ = sizes(call)
    return laid(poisoned((m, n), dtype), call.out)


def run(call: Call) -> Any:
    """The result of a call, by the public functions."""
    x, w = operands(call)
    (m, n, _), options = sizes(call), {"contract": call.contract or None}
    bias, given = bias_of(call), np.asarray if call.library == "numpy" else tensor
    x, bias = given(x), None if bias is None else given(bias)
    if call.form == "linear":
        if call.weight == "plain":
            w = given(w)
        else:
            w = isogemm.pack(w) if call.weight == "packed" else quantized(call.weight, call.seed)
        return isogemm.linear(x, w, bias, **options)
    w = given(w)
    if call.form == "matmul":
        return isogemm.matmul(x, w, **options)
    if call.form == "into":
        return isogemm.matmul(x, w, out=given(room(call, DTYPES[call.dtype])), **options)
    if call.form == "walk":
        out = laid(start(m, n), call.out)
        return isogemm.gemm(x, w, alpha=float(call.alpha), out=given(out), accumulate=True, **options)
    if call.form == "gemm":
        return isogemm.gemm(x, w, alpha=float(call.alpha), bias=bias, **options)
    both = isogemm.gemm_strided_batched(x[None], w[None], alpha=float(call.alpha), **options)
    return both[0]


def refused(call: Call) -> None:
    """A result that is to lie over an operand, or in memory that is read-only: an error, and nothing is written."""
    (m, n, k), (x, w) = sizes(call), operands(call)
    whole = np.concatenate([np.array(x).reshape(-1), poisoned((m * n,), x.dtype)])
    over = call.form == "onto"
    x, out = whole[: m * k].reshape(m, k), whole[(m * k - 1 if over else m * k) :][: m * n].reshape(m, n)
    out.flags.writeable = over
    before = whole.tobytes()
    with pytest.raises(AliasError if over else LayoutError):
        isogemm.matmul(x, w, out=out)
    assert whole.tobytes() == before


def follow(calls: list[Call]) -> None:
    """The calls in their order, and once more: each is held to the definition."""
    seen.forget()  # what an example finds is found again from its calls alone
    for call in calls * 2:
        isogemm.set_num_threads(call.threads)
        if call.form in ("onto", "locked"):
            refused(call)
            continue
        got = run(call)
        if call.library == "torch":
            from isogemm.operands.tensors import on_host

            got = on_host(got)
        assert_same(np.asarray(got), expected(replace(call, threads=1, library="numpy", out="c")))


@settings(max_examples=400)
@given(sequences())
def test_no_call_is_answered_by_another_kind(calls: list[Call]) -> None:
    follow(calls)


def test_every_choice_is_a_field() -> None:
    assert list(CHOICES) == [field.name for field in fields(Call)]
