"""Operands of a GPU case, the calls of isogemm and its peers on them, and what their bits are."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import isogemm
from isogemm.base.dtypes import ITEMSIZE
from isogemm.lab import rotate
from isogemm.study.bits import differing

from .bits import Sample, relative_error
from .cases import CHAIN, ROWS, Case
from .peers import PEERS, without_split_k

__all__ = ["Call", "Setup", "Shelf", "build", "few_rows", "normal", "rotated"]

Call = Callable[[int], Any]
Peers = Mapping[str, Callable[[Any, Any], Any]]
Contexts = Mapping[str, Callable[[], AbstractContextManager[None]]]
L2_BYTES = 60 << 20  # of an H200; operands are rotated past three times as much
ERROR_LENGTHS = (4096, 16384, 65536)  # of K, over which an order's error should be flat


@dataclass(frozen=True, slots=True)
class Setup:
    """A case made ready.

    Attributes
    ----------
    calls : dict of str to callable
        ``call(i)`` on the i-th copy of the operands; ours is ``isogemm``.
    copies : int
        Of the operands.
    check : callable
        Correctness of one call of each candidate, JSON-ready.
    under : mapping of str to callable
        Settings that a candidate runs and is captured under.
    spacer : callable or None
        An unrelated elementwise kernel, for the candidates that are also timed with it between their products.
    """

    calls: dict[str, Call]
    copies: int
    check: Callable[[], dict[str, Any]]
    under: Contexts = field(default_factory=dict)
    spacer: Callable[[], Any] | None = None

    def settings(self, name: str) -> AbstractContextManager[None]:
        """The settings of one candidate."""
        return self.under.get(name, nullcontext)()


@dataclass(slots=True)
class Layer:
    """Weights and activations of one linear, shared by its cases."""

    x: Any
    weights: list[Any]
    sample: Sample
    whole: Any = None  # ours, for all rows of x


@dataclass(slots=True)
class Shelf:
    """Keeps the last linear's operands: cases of one shape follow each other, and a shape fills gigabytes."""

    device: str
    seed: int
    _key: tuple[Any, ...] = ()
    _layer: Layer | None = None

    def layer(self, case: Case) -> Layer:
        """The operands of a linear; made once for all its M."""
        key = (case.n, case.k, case.dtype, case.definition, case.m if case.m not in ROWS else 0, case.suite)
        if key != self._key or self._layer is None:
            self._layer = None
            gc.collect()  # what still holds the last one's gigabytes
            self._layer, self._key = _layer(case, self.device, self.seed), key
        return self._layer


def normal(shape: tuple[int, ...], dtype: str, device: str, seed: int) -> Any:
    """Normal values on the device, the same for the same seed."""
    import torch

    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device).to(getattr(torch, dtype))


def rotated(first: Any) -> list[Any]:
    """A tensor and copies of it, past three times the device's cache."""
    unused = [first]
    return rotate(lambda: unused.pop() if unused else first.clone(), first.nbytes, cache_bytes=L2_BYTES)


def _layer(case: Case, device: str, seed: int) -> Layer:
    rows = max(ROWS) if case.m in ROWS else case.m
    x = normal((rows, case.k), case.dtype, device, seed)
    w = normal((case.n, case.k), case.dtype, device, seed + 1)
    # The host's time does not depend on where weights lie.
    weights = [w, *(w.clone() for _ in range(7))] if case.suite == "overhead" else rotated(w)
    ends = [m - 1 for m in ROWS] + [0, rows // 3, rows - 1]
    return Layer(x, weights, Sample.of(x, w.T, case.definition, ends))


def build(case: Case, shelf: Shelf, peers: Peers = MappingProxyType({})) -> Setup:
    """Make operands and candidates of a case."""
    if case.form == "gradient":
        return _gradient(case, shelf)
    if case.form == "batched":
        return _batched(case, shelf)
    if case.form == "drawn":
        return _drawn(case, shelf)
    return _linear(case, shelf, peers)


def _options(case: Case) -> dict[str, Any]:
    return {"contract": case.contract} if case.contract else {}


def _linear(case: Case, shelf: Shelf, peers: Peers) -> Setup:
    import torch

    layer, options = shelf.layer(case), _options(case)
    x, weights, count = layer.x[: case.m], layer.weights, len(layer.weights)
    columns = [w.T for w in weights]
    calls: dict[str, Call] = {
        "isogemm": lambda i: isogemm.linear(x, weights[i % count], **options),
        "torch.mm": lambda i: torch.mm(x, columns[i % count]),
    }
    under: dict[str, Callable[[], AbstractContextManager[None]]] = {}
    if case.form in ("host", "wall"):
        out = torch.empty((case.m, case.n), dtype=x.dtype, device=x.device)
        calls["isogemm out="] = lambda i: isogemm.matmul(x, columns[i % count], out=out)
        calls["torch.linear"] = lambda i: torch.nn.functional.linear(x, weights[i % count])
        calls["mm out="] = lambda i: torch.mm(x, columns[i % count], out=out)
    elif case.suite == "llm":
        calls["cublaslt"], under["cublaslt"] = (lambda i: torch.mm(x, columns[i % count])), without_split_k
    elif case.contract:
        calls[CHAIN] = lambda i: isogemm.linear(x, weights[i % count])
    for name, peer in peers.items():
        if PEERS[name][-1] == case.suite and ITEMSIZE[case.dtype] == 2:
            calls[name] = lambda i, peer=peer: peer(x, columns[i % count])
    scratch = torch.zeros(1024, device=x.device)
    spacer = (lambda: scratch.add_(1.0)) if case.spaced else None
    return Setup(calls, count, lambda: _check_linear(case, layer, calls, under), under, spacer)


def _check_linear(case: Case, layer: Layer, calls: Mapping[str, Call], under: Contexts) -> dict[str, Any]:
    got = calls["isogemm"](0)
    result = layer.sample.check(got)
    if case.suite == "llm":
        if layer.whole is None:
            layer.whole = isogemm.linear(layer.x, layer.weights[0], **_options(case))
        result |= {"batch_differing": differing(got, layer.whole[: case.m]), "batch_checked": got.numel()}
    result["peers"] = _peers(calls, got, under)
    if case.suite == "fp32":
        x, w = layer.x[: case.m], layer.weights[0]
        result["errors"] = {n: relative_error(c(0), x, w.T) for n, c in calls.items()}
    if "leaf" in case.contract:
        result["errors over k"] = _errors_over_k(case, str(got.device))
    return result


def _peers(calls: Mapping[str, Call], got: Any, under: Contexts = MappingProxyType({})) -> dict[str, Any]:
    """How many elements of each peer's result have other bits than ours."""
    found = {}
    for name, call in calls.items():
        if not name.startswith("isogemm"):
            with under.get(name, nullcontext)():
                found[name] = {"differing": differing(call(0), got), "checked": got.numel()}
    return found


def _errors_over_k(case: Case, device: str) -> dict[str, Any]:
    """Relative error of the case's order, and of the chain, as K grows."""
    import torch

    errors: dict[str, Any] = {}
    for contract in (case.contract, case.contract.split("/")[0] + "/chain"):
        errors[contract] = {}
        for k in ERROR_LENGTHS:
            a, b = (normal((64, k), case.dtype, device, s) for s in (k, k + 1))
            got = isogemm.matmul(a, b.T, contract=contract, out_dtype=torch.float32)
            errors[contract][str(k)] = relative_error(got, a, b.T)
    return errors


def _gradient(case: Case, shelf: Shelf) -> Setup:
    """dw += dy.T @ x, into float32: ours, and every way that torch has to say it."""
    import torch

    dy = normal((case.k, case.m), case.dtype, shelf.device, shelf.seed)
    x = normal((case.k, case.n), case.dtype, shelf.device, shelf.seed + 1)
    dw = normal((case.m, case.n), "float32", shelf.device, shelf.seed + 2)
    left, sums, f32 = dy.T, dw.clone(), torch.float32
    ways: dict[str, Callable[[Any], Any]] = {
        "isogemm": lambda c: isogemm.matmul(left, x, out=c, accumulate=True, **_options(case)),
        "torch.addmm": lambda c: torch.addmm(c, left, x, out_dtype=f32, out=c),
        "torch.baddbmm": lambda c: torch.baddbmm(c[None], left[None], x[None], out_dtype=f32, out=c[None]),
        "torch.mm+add_": lambda c: c.add_(torch.mm(left, x, out_dtype=f32)),
        "mm alone": lambda c: torch.mm(left, x, out_dtype=f32),
        "bfloat16 mm, add_": lambda c: c.add_(torch.mm(left, x)),
    }
    calls: dict[str, Call] = {name: (lambda i, way=way: way(sums)) for name, way in ways.items()}

    def check() -> dict[str, Any]:
        results = {}
        for name, way in ways.items():
            if name != "mm alone" and name in calls:
                results[name] = way(dw.clone())
        ours = results["isogemm"]
        rows = [0, 1, case.m // 2, case.m - 1]
        found = Sample.of(left, x, case.definition, rows, dw).check(ours)
        found["peers"] = {
            name: {"differing": differing(y, ours), "checked": ours.numel()}
            for name, y in results.items()
            if name != "isogemm"
        }
        found["errors"] = {name: relative_error(y, left, x, dw) for name, y in results.items()}
        return found

    return Setup(calls, 1, check)


def few_rows(m: int) -> list[int]:
    """Rows of the batches that a drawn product is compared with."""
    return sorted({min(rows, m) for rows in (1, 3, 17, 200)})


def _drawn(case: Case, shelf: Shelf) -> Setup:
    """One product of any layout, with a bias or not; torch's ways are its function and, for NT, its linear layer."""
    import torch

    def stored(rows: int, columns: int, letter: str, seed: int) -> Any:
        if letter == "N":
            return normal((rows, columns), case.dtype, shelf.device, seed)
        return normal((columns, rows), case.dtype, shelf.device, seed).T

    a = stored(case.m, case.k, case.layout[0], shelf.seed)
    b = stored(case.k, case.n, case.layout[1], shelf.seed + 1)
    weights = rotated(b)
    count, bias = len(weights), normal((case.n,), case.dtype, shelf.device, shelf.seed + 2) if case.bias else None
    calls: dict[str, Call] = {"isogemm": lambda i: isogemm.linear(a, weights[i % count].T, bias=bias)}
    if bias is None:
        calls["torch.mm"] = lambda i: torch.mm(a, weights[i % count])
    else:
        calls["torch.addmm"] = lambda i: torch.addmm(bias, a, weights[i % count])
    if case.layout == "NT":
        calls["torch.linear"] = lambda i: torch.nn.functional.linear(a, weights[i % count].T, bias)

    def check() -> dict[str, Any]:
        got = calls["isogemm"](0)
        plain = isogemm.matmul(a, b)
        parts = [isogemm.linear(a[case.m - rows :], b.T, bias=bias) for rows in few_rows(case.m)]
        found = Sample.of(a, b, case.definition, [0, case.m // 2, case.m - 1]).check(plain)
        found["batch_differing"] = sum(differing(x, got[case.m - len(x) :]) for x in parts)
        found["batch_checked"] = sum(x.numel() for x in parts)
        return found | {"peers": _peers(calls, got)}

    return Setup(calls, count, check)


def _batched(case: Case, shelf: Shelf) -> Setup:
    import torch

    def stack(seed: int) -> tuple[Any, Any]:
        a = normal((case.batch, case.m, case.k), case.dtype, shelf.device, seed)
        stored = (case.n, case.k) if case.layout[1] == "T" else (case.k, case.n)
        b = normal((case.batch, *stored), case.dtype, shelf.device, seed + 1)
        return a, b.transpose(1, 2) if case.layout[1] == "T" else b

    copies = max(1, -(-3 * L2_BYTES // case.work.nbytes))
    pairs = [stack(shelf.seed + 2 * i) for i in range(copies)]
    calls: dict[str, Call] = {
        "isogemm": lambda i: isogemm.matmul(*pairs[i % copies], **_options(case)),
        "torch.bmm": lambda i: torch.bmm(*pairs[i % copies]),
    }

    def check() -> dict[str, Any]:
        got, (a, b) = calls["isogemm"](0), pairs[0]
        found: dict[str, Any] = {"contract": case.definition, "checked": 0, "differing": 0, "first": None}
        for item in (0, case.batch - 1):
            part = Sample.of(a[item], b[item], case.definition, [0, 1, case.m // 2, case.m - 1]).check(got[item])
            found |= {key: found[key] + part[key] for key in ("checked", "differing")}
            found["first"] = found["first"] or part["first"]
        return found | {"peers": _peers(calls, got)}

    return Setup(calls, copies, check)
