"""`examine`: a function that can be called, asked by probes of rising cost; no source is needed.

The function runs in a process of its own: it may raise, hang, end the process, write outside its output or into its
operands, and the examination goes on.
"""

from __future__ import annotations

import multiprocessing as mp
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from ..base.dtypes import DTYPES, NUMPY
from ..base.progress import Tell
from ..errors import OptionError
from .case import Array
from .diagnosis import Cause, Diagnosis
from .results import diagnose, host

__all__ = ["SIGNATURES", "examine"]

SIGNATURES = {
    "a, b": "a [m, k] @ b [k, n]",
    "x, w": "x [m, k] @ w [n, k].T, as a linear layer",
    "a, b, out": "the first, written to out [m, n]",
    "x, w, bias": "the second, plus bias [n]",
}
SECONDS = 5.0  # for one call
# Coprime extents first; then multiples, for functions that insist on them.
EXTENTS = (
    (37, 41, 53),
    (33, 65, 97),
    (129, 67, 301),
    (16, 32, 48),
    (32, 48, 80),
    (64, 128, 192),
    (128, 256, 384),
    (64, 64, 64),
)


def _probes() -> Iterator[tuple[str, tuple[int, int, int]]]:
    """Element type and extents; the small ones of every type first."""
    for extents in EXTENTS:
        for kind in DTYPES:
            yield kind.name, extents


def _coded(rng: np.random.Generator, rows: int, columns: int) -> Array:
    """Small whole numbers, exact in every type, no two rows or columns alike."""
    return rng.integers(-4, 5, (rows, columns)).astype(np.float32)


def _operands(kind: str, extents: tuple[int, int, int], signature: str, exact: bool) -> dict[str, Array]:
    m, n, k = extents
    rng = np.random.default_rng([m, n, k, exact])
    draw = (lambda r, c: _coded(rng, r, c)) if exact else (lambda r, c: rng.standard_normal((r, c)).astype(np.float32))
    a, b = draw(m, k), draw(k, n)
    found = {"a": a, "b": b if signature.startswith("a") else np.ascontiguousarray(b.T)}
    if "bias" in signature:
        found["bias"] = draw(1, n)[0]
    return {name: x.astype(NUMPY[kind]) for name, x in found.items()}


def examine(
    function: Callable[..., Any],
    signature: str = "a, b",
    *,
    torch: bool = False,
    seconds: float = SECONDS,
    tell: Tell | None = None,
) -> Diagnosis:
    """Find the mistake in a function that multiplies matrices.

    Parameters
    ----------
    function : callable
    signature : {"a, b", "x, w", "a, b, out", "x, w, bias"}
        What it takes; see `SIGNATURES`.
    torch : bool
        Whether it takes torch tensors; NumPy arrays otherwise.
    seconds : float
        That one call may take.
    tell : callable, optional
        ``tell(done, total, text)``.

    Raises
    ------
    OptionError
        No such signature.

    Returns
    -------
    Diagnosis
        The first that is not right; else right, with what the function refused in ``limits``.
    """
    if signature not in SIGNATURES:
        raise OptionError("signature", limit=", ".join(map(repr, SIGNATURES)), value=repr(signature), nearest="a, b")
    probes, refused, seen, accepted = list(_probes()), [], Diagnosis("right"), 0
    with _Apart(function, torch) as apart:
        for done, (kind, extents) in enumerate(probes):
            for exact in (True, False):
                if tell:
                    tell(done, len(probes), f"{kind} {extents}")
                operands = _operands(kind, extents, signature, exact)
                runs, trouble = apart.call(operands, signature, extents, seconds)
                if trouble.startswith("refused"):
                    refused.append(f"{kind} m, n, k = {extents}: {trouble}")
                    break
                if trouble:
                    mend = "see the words of the guard"
                    return Diagnosis(
                        "wrong",
                        (Cause(trouble.split(":")[0], f"{trouble} ({kind}, m, n, k = {extents})", 0.0, 1.0, mend),),
                    )
                accepted += 1
                found = _looked_at(runs, operands, signature, pairs=max(extents) <= 64)
                if found.verdict != "right":
                    return replace(
                        found,
                        first=(
                            f"{kind}, m, n, k = {extents}, numbers {'exact in every type' if exact else 'random'}",
                            *found.first,
                        ),
                    )
                seen = found
            if accepted >= 12 and done >= 12:
                break
    if not accepted:
        return Diagnosis("undiagnosable", limits=("the function took none of the probes", *refused[:3]))
    words = (f"it refused {len(refused)} of the probes, the first {refused[0]}",) if refused else ()
    return replace(seen, limits=(*words, *(x for x in seen.limits if "not all different" not in x)))


def _looked_at(runs: list[Array], operands: dict[str, Array], signature: str, *, pairs: bool) -> Diagnosis:
    trans = "N" if signature.startswith("a") else "T"
    return diagnose(runs, operands["a"], operands["b"], trans_b=trans, bias=operands.get("bias"), pairs=pairs)


class _Apart:
    """A process that runs the function; a new one where the last was ended."""

    def __init__(self, function: Callable[..., Any], torch: bool) -> None:
        self.function, self.torch = function, torch
        self.process: Any = None

    def __enter__(self) -> _Apart:
        return self

    def __exit__(self, *rest: object) -> None:
        self._end()

    def _end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.pipe.close()
            self.process = None

    def _start(self) -> None:
        context: Any = mp.get_context("fork" if "fork" in mp.get_all_start_methods() else "spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(self.function, self.torch, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def call(
        self, operands: dict[str, Array], signature: str, extents: tuple[int, int, int], seconds: float
    ) -> tuple[list[Array], str]:
        """Two runs' results, or what happened instead."""
        if self.process is None:
            self._start()
        self.pipe.send((operands, signature, extents[:2]))
        if not self.pipe.poll(2 * seconds):
            self._end()
            return [], f"hangs: no result within {seconds:g} s"
        try:
            return self.pipe.recv()  # type: ignore[no-any-return]
        except EOFError:
            code = self.process.exitcode
            self._end()
            return (
                [],
                f"ends the process: {f'signal {-code}' if code is not None and code < 0 else f'exit status {code}'}",
            )


def _serve(function: Callable[..., Any], torch: bool, pipe: Connection) -> None:
    """Answer calls until the pipe closes."""
    if torch:
        import torch as library

        library.set_num_threads(1)  # threads of a parent that forked are not here
    while True:
        try:
            operands, signature, shape = pipe.recv()
        except EOFError:
            return
        pipe.send(_run(function, torch, operands, signature, shape))


def _run(
    function: Callable[..., Any], torch: bool, operands: dict[str, Array], signature: str, shape: tuple[int, int]
) -> tuple[list[Array], str]:
    from .guard import GuardError, guarded_empty

    runs = []
    for _ in range(2):
        given = {name: _tensor(x) if torch else x.copy() for name, x in operands.items()}
        kind = operands["a"].dtype.name
        out = guarded_empty(shape, kind, device="cpu" if torch else None) if "out" in signature else None
        try:
            result = function(*given.values(), *((out.array,) if out else ()))
            found = host(out.array if out else result)
        except Exception as error:  # whatever it raises is what it says to this probe
            return [], f"refused: {type(error).__name__}: {error or traceback.format_exc(limit=1)}"
        if any(host(given[name]).tobytes() != x.tobytes() for name, x in operands.items()):
            return [], "writes into its operands: they have other bytes after the call"
        try:
            if out:
                out.check()
        except GuardError as error:
            return [], f"{error.what}: {error.value}"
        if not isinstance(found, np.ndarray) or found.shape != shape or found.dtype.kind not in "fV":
            got = f"{type(found).__name__} {getattr(found, 'dtype', '')} {list(getattr(found, 'shape', ()))}"
            return [], f"returns something else: {got} where floats {list(shape)} were due"
        runs.append(np.array(found))
    return runs, ""


def _tensor(x: Array) -> Any:
    import torch

    if x.dtype.name == "bfloat16":
        return torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(x.copy())
