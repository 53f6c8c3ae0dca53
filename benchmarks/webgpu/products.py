"""Products by one kernel after another, and as `isogemm.linear` has them, with the bits of each."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product as combined
from typing import Any, NamedTuple

import numpy as np

import isogemm
from isogemm.backends.webgpu.adapter import ReadyLaunch
from isogemm.backends.webgpu.integers import run_quantize
from isogemm.backends.webgpu.kernels import KERNELS, VECTORS, kernel_of
from isogemm.backends.webgpu.launch import KernelCall, run
from isogemm.contract import int32
from isogemm.contract.compare import differing
from isogemm.contract.reference import evaluate
from isogemm.formats.blocks import format_of
from isogemm.formats.reference import decode
from isogemm.quant.matrix import QuantizedMatrix

from ..common import words_of
from .rounds import Bench, Make, Timed, told

CHECKED = 64  # columns that are compared, and rows
DRAWN = 2**23 + 1  # numbers of a weight, which it repeats
ROTATED = 2**29  # bytes of weights that launches take in turn: more than a cache holds


@dataclass
class Operands:
    """One product's: x, and as many weights [n, k] (or [k, n]) as a cache does not hold.

    Attributes
    ----------
    w : array or None
        None where the weight is quantized: then it is `stored`.
    """

    x: np.ndarray[Any, Any]
    w: np.ndarray[Any, Any] | None
    there: Any
    weights: list[Any]
    across: bool
    nbytes: int
    n: int
    stored: Any = None


def operands(m: int, n: int, k: int, dtype: str, *, across: bool = False) -> Operands:
    """Drawn operands; a format's name instead of a type has blocks of drawn codes and scales."""
    x = np.random.default_rng(m).standard_normal((m, k), np.float32)
    x = x if dtype[0] == "Q" else x.astype(dtype)
    weight = _weight(n, k, dtype, across)
    return Operands(x, weight.w, isogemm.webgpu.array(x), weight.there, across, weight.nbytes, n, weight.stored)


class _Weight(NamedTuple):
    w: np.ndarray[Any, Any] | None
    stored: Any
    nbytes: int
    there: list[Any]


@lru_cache(maxsize=2)
def _weight(n: int, k: int, dtype: str, across: bool) -> _Weight:
    """A weight, and as many copies on the device as a cache does not hold."""
    rng = np.random.default_rng(0)
    w, stored = None, None
    if dtype[0] == "Q":
        form = format_of(dtype)
        rows = rng.integers(0, 256, (n, form.row_bytes(k)), np.uint8)
        for field in form.scales:
            blocks = rows.reshape(n, -1, form.nbytes).view(form.dtype)[..., 0]
            blocks[field.name] = rng.uniform(1e-3, 1e-2, blocks.shape)
        stored = QuantizedMatrix.from_bytes(rows, shape=(n, k), format=form)
        nbytes, make = stored.nbytes, lambda: stored.to("cpu").to("webgpu")
    else:
        w = np.resize(rng.standard_normal(DRAWN, np.float32).astype(dtype), (n, k))
        lying = np.ascontiguousarray(w.T) if across else w
        nbytes, make = w.nbytes, lambda: isogemm.webgpu.array(lying)
    return _Weight(w, stored, nbytes, [make() for _ in range(max(2, min(24, ROTATED // nbytes)))])


def view(x: Any) -> Any:
    """What kernels are told of an array, or of a quantized matrix's copy."""
    return x._packed.native if isinstance(x, QuantizedMatrix) else x.__isogemm_view__("x")


def kernel_make(bench: Bench, row: Timed, held: Operands, code: str, outs: list[Any], own: Any) -> Make:
    """Launches of one kernel; every call has an out of its own (the first one `own`), so that none waits."""
    a, scales = view(held.there), None
    if held.stored is not None:
        block = 32 if held.stored.format.block == 32 else 256
        a, scales = run_quantize(bench.adapter, bench.device.admissions.quantizer("float32", block), a, block)

    def make(i: int) -> list[ReadyLaunch]:
        while len(outs) <= i and (row.m * row.n < 2**20 or len(outs) < len(held.weights)):
            outs.append(bench.device.empty((row.m, row.n), np.dtype(np.float32)))
        b = view(held.weights[i % len(held.weights)])
        with bench.adapter.recording() as found:
            run(bench.adapter, row.kernel, code,
                KernelCall(a, b if held.across else b.T, outs[i % len(outs)] if i else own, False, scales))  # fmt: skip
        return list(found)

    return make


def check(row: Timed, held: Operands, contract: str, out: Any) -> None:
    """Bits of some rows and columns of what was computed."""
    rows, columns = min(row.m, 8), min(row.n, CHECKED)
    if held.w is None:
        want = int32.evaluate(held.x[:rows], decode(held.stored.rows[:columns], held.stored.format))
    else:
        want = evaluate(held.x[:rows], held.w[:columns].T, contract)
    row.differing = differing(out[:rows, :columns].numpy(), want)


def kernels(
    bench: Bench, product: str, held: Operands, names: Sequence[str], dtype: str,
    peers: Sequence[tuple[Timed, Make]] = (),
) -> list[Timed]:  # fmt: skip
    """Kernels of one product by name, in turns with peers."""
    (m, k), n = held.x.shape, held.n
    contract = {"chain": "fma/chain", "lanes": "fma/lanes32", "integers": "int32/chain"}
    types = ("float32" if held.w is None else dtype, dtype)
    found: list[Timed] = []
    outs: list[Any] = []
    asked = list(names)
    for first in range(0, len(asked), 8):  # so many outs and launches at once
        candidates = []
        for name in asked[first : first + 8] if not bench.late() else ():
            row = Timed(product, name, m, n, k, held.nbytes)
            own = bench.device.empty((m, n), np.dtype(np.float32))
            try:
                make = kernel_make(bench, row, held, bench.code(row, types, held.across), outs, own)
                bench.adapter.submit(make(0))
                check(row, held, contract[kernel_of(name).order], isogemm.webgpu.WebGpuArray(own))
            except Exception as error:
                row.error = words_of(error)
                bench.rows.append(row)
                bench.say(f"{product} {name}: {row.error}")
                continue
            found.append(row)
            candidates.append((row, make))
        bench.timed([*candidates, *peers], len(held.weights))
    if bench.late():
        bench.say(f"{product}: {len(asked) - len(found)} of {len(asked)} kernels left out")
    told(bench, product, [*found, *(row for row, _ in peers)], 12 if peers else 6)
    bench.save()
    return sorted((row for row in found if row.seconds and row.fused), key=lambda x: x.best)  # refused ones too


def library(bench: Bench, m: int, n: int, k: int, dtype: str, contract: str) -> Timed | None:
    """What `isogemm.linear` launches, and what one call of it costs with its wait."""
    product = f"linear {dtype} {m}x{n}x{k} {contract}"
    if bench.late():
        return None
    held = operands(m, n, k, dtype)
    row = Timed(product, "isogemm.linear", m, n, k, held.nbytes)
    kept: list[Any] = []

    def call(i: int) -> Any:
        kept.append(isogemm.linear(
            held.there, held.weights[i % len(held.weights)], out_dtype="float32", contract=contract
        ))  # fmt: skip
        return kept[-1]

    def make(i: int) -> list[ReadyLaunch]:
        with bench.adapter.recording() as found:
            call(i)
        return list(found)

    def do() -> None:
        out = call(0)
        check(row, held, contract, out)
        bench.timed([(row, make)], len(held.weights))
        bench.adapter.wait()
        begun = time.perf_counter()
        for i in range(20):
            call(i)
        bench.adapter.wait()
        row.in_turn = (time.perf_counter() - begun) / 20
        if held.stored is not None:  # the kernel alone, without that which quantizes x
            alone = Timed(f"{product}, kernel alone", "isogemm.linear", m, n, k, held.nbytes, differing=row.differing)
            bench.timed([(alone, lambda i: make(i)[-1:])], len(held.weights))
            told(bench, alone.product, [alone])

    bench.tried(product, do)
    told(bench, product, [row])
    bench.save()
    return row


def admissions(bench: Bench) -> None:
    """The verdict of every kernel on this adapter, by type."""
    found: dict[str, str] = {}
    names = [*KERNELS, *VECTORS]
    for name, dtype in combined(names, ("float16", "float32", "bfloat16")):
        integers = kernel_of(name).order == "integers"
        if integers and dtype != "float32":
            continue
        for b in ("Q4_0", "Q8_0", "Q4_K", "Q6_K") if integers else (dtype,):
            row = Timed("", name, 0, 0, 0)
            begun = time.perf_counter()
            bench.tried(f"admission {name} {b}", lambda row=row, types=(dtype, b): bench.code(row, types, False))
            spent = time.perf_counter() - begun
            verdict = row.verdict or ("admitted" if row.fused or integers else "admitted by integers")
            found[f"{name} {b}"] = f"{verdict} ({spent:.2f} s)"
            if row.verdict or spent > 2:
                bench.say(f"{name} {b}: {verdict} ({spent:.1f} s)")
    bench.facts["admission"] = found
    bench.save()
