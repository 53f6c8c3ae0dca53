"""Operands of a quantized case on the GPU, everybody's calls on them, and what isogemm's bits are."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

import isogemm
from isogemm.contract import int32, reference
from isogemm.formats.reference import decode
from isogemm.lab import rotate
from isogemm.operands.tensors import as_tensor, on_host
from isogemm.quant import FORMATS, QuantizedMatrix
from isogemm.study.bits import differing

from ..common import compare_bits, words_of
from ..gpu.bits import Sample
from ..gpu.operands import L2_BYTES, normal, rotated
from ..llama.cuda import LlamaCuda, Products, Weights
from .cases import FP32, OURS, PLAIN, PLAIN_FP32, Q8, RANDOM, ROWS, Case
from .peers import GEMLITE, GemLite

__all__ = ["LLAMA", "TORCH", "Layer", "Peers", "Setup", "Shelf", "blocks", "build"]

TORCH, LLAMA = "torch bf16", "llama.cpp"
SAME, INTEGER, FLOAT = "tensor_core:sm90/chain", "int32/chain", "fma/chain"
ALONE = 17  # rows that the whole batch is compared with
LEAST = 64  # rows of the whole batch
# Scales with which weights are about 1; codes and small integer scales are random bits.
SIZES = {
    "Q4_0": {"d": 2**-2}, "Q4_1": {"d": 2**-2, "m": -7.5 * 2**-2}, "Q5_0": {"d": 2**-3},
    "Q5_1": {"d": 2**-3, "m": -15.5 * 2**-3}, "Q8_0": {"d": 2**-6}, "Q2_K": {"d": 2**-4, "dmin": 1.5 * 2**-4},
    "Q3_K": {"d": 2**-5}, "Q4_K": {"d": 2**-9, "dmin": 7.5 * 2**-9}, "Q5_K": {"d": 2**-10, "dmin": 15.5 * 2**-10},
    "Q6_K": {"d": 2**-10},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Call:
    """One candidate: ``run(i)`` with the i-th of its copies of the weight."""

    run: Callable[[int], Any]
    copies: int


@dataclass(frozen=True, slots=True)
class Setup:
    """A case made ready: everybody's calls, those who cannot and why, and correctness of one call of each."""

    calls: dict[str, Call]
    absent: dict[str, str]
    check: Callable[[], dict[str, Any]]
    free: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Peers:
    """Who is there beside torch."""

    gemlite: GemLite | None = None
    llama: LlamaCuda | None = None


def blocks(format: str, n: int, k: int, device: str, seed: int) -> Any:
    """Random blocks of a format as a uint8 tensor [n, row bytes]."""
    import torch

    fmt = FORMATS[format]
    generator = torch.Generator(device).manual_seed(seed)
    shape = (n, k // fmt.block, fmt.nbytes)
    made = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator, device=device)
    for item in fmt.scales:
        spread = 0.5 + torch.rand((*shape[:2], 1), generator=generator, device=device)
        bits = (spread * SIZES[format][item.name]).to(torch.float16).view(torch.uint8)
        made[..., item.offset : item.offset + item.nbytes] = bits
    return made.view(n, -1)


@dataclass
class Layer:
    """One weight in all forms, and the activations of all its cases."""

    format: str
    n: int
    k: int
    device: str
    seed: int
    rows: tuple[int, ...] = ROWS
    whole: dict[str, Any] = field(default_factory=dict)  # ours, by name, for all rows of x

    def __post_init__(self) -> None:
        self.x = normal((max(*self.rows, LEAST), self.k), "bfloat16", self.device, self.seed + 1)
        self.bytes = blocks(self.format, self.n, self.k, self.device, self.seed)
        self.host = QuantizedMatrix.from_bytes(on_host(self.bytes), shape=(self.n, self.k), format=self.format)
        self.ends = sorted({0, *(m - 1 for m in self.rows)})

    @cached_property
    def ours(self) -> list[QuantizedMatrix]:
        """Copies on the device, past three times its cache."""

        def copy() -> QuantizedMatrix:
            part = self.host[:]
            return part if self.device == "cpu" else part.to(self.device)

        return rotate(copy, self.host.nbytes, cache_bytes=L2_BYTES)

    @cached_property
    def plain(self) -> list[Any]:
        """Copies in bfloat16."""
        return rotated(as_tensor(self.ours[0].dequantize("bfloat16")))

    @cached_property
    def plain_fp32(self) -> list[Any]:
        """Copies in float32."""
        return rotated(as_tensor(self.ours[0].dequantize()))

    @cached_property
    def x_fp32(self) -> Any:
        """The first of the rows that `x` has rounded."""
        return normal(tuple(self.x.shape), "float32", self.device, self.seed + 1)[:LEAST].clone()

    @cached_property
    def sample(self) -> Sample:
        """Where the definition of the product with 16-bit weights is evaluated."""
        return Sample.of(self.x, self.plain[0].T, SAME, self.ends)

    @cached_property
    def sample_fp32(self) -> Sample:
        """Where that of the product in float32 is."""
        return Sample.of(self.x_fp32, self.plain_fp32[0].T, FLOAT, self.ends)

    @cached_property
    def integers(self) -> Any:
        """The definition of the integer product, float32, in the rows and columns of `sample`."""
        x = on_host(self.x[self.ends]).astype(np.float32)
        return int32.evaluate(x, decode(self.host.rows[list(self.sample.columns)], self.host.format))

    def linear(self, name: str, x: Any, copy: int = 0) -> Any:
        """Ours, by its name."""
        options = {"contract": SAME} if self.device == "cpu" else {}  # what a GPU does by default
        if name == PLAIN:
            return isogemm.linear(x, self.plain[copy], **options)
        if name == PLAIN_FP32:
            return isogemm.linear(x, self.plain_fp32[copy], contract=FLOAT)
        if name == FP32:
            return isogemm.linear(x, self.ours[copy], activations="fp32")
        if name == Q8:
            return isogemm.linear(x, self.ours[copy], activations="q8")
        return isogemm.linear(x, self.ours[copy], activations="same", **options)

    def all_rows(self, name: str) -> Any:
        """Ours for every row of x, once."""
        if name not in self.whole:
            self.whole[name] = self.linear(name, self.x_fp32 if name == FP32 else self.x)
        return self.whole[name]


@dataclass
class Shelf:
    """The last layer's operands, and what peers made of them: cases of one layer follow each other."""

    device: str
    seed: int
    peers: Peers = field(default_factory=Peers)
    rows: tuple[int, ...] = ROWS
    _layer: Layer | None = None
    _modules: list[Any] = field(default_factory=list)
    _weights: Weights | None = None

    def layer(self, case: Case) -> Layer:
        """The operands of a case's weight."""
        held = self._layer
        alike = held is not None and (held.format, held.n, held.k) == (case.format, case.n, case.k)
        if held is None or not alike or case.m not in held.rows:
            self.drop()
            rows = (case.m,) if case.suite == RANDOM else self.rows
            held = self._layer = Layer(case.format, case.n, case.k, self.device, self.seed, rows)
        return held

    def drop(self) -> None:
        """Give back gigabytes."""
        if self._weights is not None:
            self._weights.free()
        self._layer, self._modules, self._weights = None, [], None
        gc.collect()

    def modules(self, gemlite: GemLite) -> list[Any]:
        """GemLite's, tuned for all numbers of rows."""
        layer = self._layer
        if not self._modules and layer is not None:
            self._modules = gemlite.layers(layer.format, layer.bytes, layer.plain[0], len(layer.ours))
            gemlite.prepare(self._modules[0], [layer.x[:m] for m in self.rows])
        return self._modules

    def weights(self, llama: LlamaCuda) -> Weights:
        """llama.cpp's."""
        layer = self._layer
        if self._weights is None and layer is not None:
            self._weights = Weights(llama, layer.bytes, layer.format, layer.k, len(layer.ours))
        assert self._weights is not None
        return self._weights


def build(case: Case, shelf: Shelf) -> Setup:
    """Make operands and candidates of a case; who raises at the first call is absent."""
    import torch

    layer = shelf.layer(case)
    x, free = layer.x[: case.m], list[Callable[[], None]]()
    ours, plain = len(layer.ours), len(layer.plain)
    made: dict[str, Callable[[], Call]] = {
        OURS: lambda: Call(lambda i: layer.linear(OURS, x, i % ours), ours),
        Q8: lambda: Call(lambda i: layer.linear(Q8, x, i % ours), ours),
        PLAIN: lambda: Call(lambda i: layer.linear(PLAIN, x, i % plain), plain),
    }
    if case.suite != RANDOM:
        made[TORCH] = lambda: Call(lambda i: torch.nn.functional.linear(x, layer.plain[i % plain]), plain)
    if case.fp32:
        made |= _fp32(layer, case.m)
    results: dict[str, Callable[[], Any]] = {}
    if shelf.peers.gemlite is not None:
        gemlite = shelf.peers.gemlite
        made[GEMLITE] = lambda: _modules(shelf.modules(gemlite), x)
    if shelf.peers.llama is not None:
        llama = shelf.peers.llama
        made[LLAMA] = lambda: _products(llama, shelf.weights(llama), x, results, free)
    calls, absent = _able(made)

    def drop() -> None:
        while free:
            free.pop()()

    return Setup(calls, absent, lambda: _check(case, layer, calls, results), drop)


def _fp32(layer: Layer, m: int) -> dict[str, Callable[[], Call]]:
    """Float32 activations with both weights."""
    x, ours = layer.x_fp32[:m], len(layer.ours)

    def plain() -> Call:
        copies = len(layer.plain_fp32)
        return Call(lambda i: layer.linear(PLAIN_FP32, x, i % copies), copies)

    return {FP32: lambda: Call(lambda i: layer.linear(FP32, x, i % ours), ours), PLAIN_FP32: plain}


def _modules(modules: list[Any], x: Any) -> Call:
    return Call(lambda i: modules[i % len(modules)](x), len(modules))


def _products(
    llama: LlamaCuda, weights: Weights, x: Any, results: dict[str, Any], free: list[Callable[[], None]]
) -> Call:
    products = Products(llama, weights, len(x))
    free.append(products.free)
    products.x.copy_(x)
    results[LLAMA] = lambda: products.y
    return Call(products.run, len(weights.tensors))


def _able(made: dict[str, Callable[[], Call]]) -> tuple[dict[str, Call], dict[str, str]]:
    """Call every candidate once, which compiles and tunes; those that raise, with their words."""
    calls, absent = {}, {}
    for name, make in made.items():
        try:
            call = make()
            call.run(0)
        except Exception as error:
            absent[name] = words_of(error)
        else:
            calls[name] = call
    return calls, absent


def _check(case: Case, layer: Layer, calls: dict[str, Call], results: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """Ours bit for bit; how far the others are from it, in the norm."""
    found: dict[str, Any] = {}
    if OURS in calls:
        got = calls[OURS].run(0)
        found = layer.sample.check(got) | _batch(case, layer, OURS, got)
        if PLAIN in calls:
            found |= {"plain_differing": differing(got, calls[PLAIN].run(0)), "plain_checked": got.numel()}
    if Q8 in calls:
        found["q8"] = _integers(layer, calls[Q8].run(0)) | _batch(case, layer, Q8, calls[Q8].run(0))
    if FP32 in calls:
        got = calls[FP32].run(0)
        found["fp32"] = layer.sample_fp32.check(got) | _batch(case, layer, FP32, got)
        if PLAIN_FP32 in calls:
            found["fp32"] |= {"plain_differing": differing(got, calls[PLAIN_FP32].run(0)), "plain_checked": got.numel()}
    if PLAIN in calls:
        found["apart"] = _apart(calls, results)
    return found


def _batch(case: Case, layer: Layer, name: str, got: Any) -> dict[str, int]:
    """Against the same rows in a batch of another size."""
    if case.m == len(layer.x):
        layer.whole.setdefault(name, got)
        other = layer.linear(name, layer.x[:ALONE])
        return {"batch_differing": differing(got[:ALONE], other), "batch_checked": other.numel()}
    return {"batch_differing": differing(got, layer.all_rows(name)[: case.m]), "batch_checked": got.numel()}


def _integers(layer: Layer, got: Any) -> dict[str, Any]:
    """The sampled elements of the integer product against its definition."""
    rows = [r for r in layer.ends if r < got.shape[0]]
    found = on_host(got[rows][:, list(layer.sample.columns)])
    want = reference.epilogue(layer.integers[: len(rows)], out_dtype=found.dtype)
    return compare_bits(INTEGER, found, want)


def _apart(calls: dict[str, Call], results: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """||result - ours in bfloat16|| / ||ours in bfloat16|| of everybody: what their formats and paths round off."""
    wanted = calls[PLAIN].run(0).float()
    found = {}
    for name, call in calls.items():
        got = call.run(0)
        got = results[name]() if name in results else got
        found[name] = float((got.float() - wanted).norm() / wanted.norm())
    return found
