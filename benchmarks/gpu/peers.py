"""The libraries beside which isogemm is timed on the GPU, each as its users call it."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from .cases import PEER, SGLANG, TBIK

__all__ = ["PEERS", "fastest_torch", "load_peers", "without_split_k"]

PEERS = {
    PEER: (PEER, "matmul_persistent", "llm"),
    TBIK: ("tree_based_matmul", "matmul_tp_persistent", "trees"),
    SGLANG: (SGLANG, "matmul_tp_persistent", "trees"),
}
"""Packages with products of 16 bits: the module, its function of a and b, and the suite that times it."""


@contextmanager
def without_split_k() -> Iterator[None]:
    """torch's products through cuBLASLt, with split-K and reduced-precision reductions excluded, for a while.

    Calls that a CUDA graph captures under it keep that choice.
    """
    import torch

    matmul, library = torch.backends.cuda.matmul, torch.backends.cuda.preferred_blas_library
    names = [f"allow_{dtype}_reduced_precision_reduction" for dtype in ("bf16", "fp16")]
    before = {n: (getattr(matmul, n), getattr(matmul, f"{n}_split_k", True)) for n in names}
    chosen = library()
    try:
        library("cublaslt")
        for name in names:
            setattr(matmul, name, (False, False))
        yield
    finally:
        for name, value in before.items():
            setattr(matmul, name, value)
        library(chosen)


def load_peers(folder: Path | None) -> tuple[dict[str, Callable[[Any, Any], Any]], str]:
    """The products of the packages of `PEERS` that lie in a folder, and what each is or why it is absent."""
    found, words = {}, []
    for name in PEERS:
        try:
            found[name] = _product(folder, name)
            words.append(f"{name}: {_revision(cast(Path, folder), name)}")
        except ImportError as error:
            words.append(f"{name}: absent ({error})")
    return found, "; ".join(words)


def _product(folder: Path | None, name: str) -> Callable[[Any, Any], Any]:
    if folder is None:
        raise ImportError("no --peers")
    if not (folder / name / "__init__.py").is_file():
        raise ImportError(f"{folder} holds no {name}")
    module, function, _ = PEERS[name]
    sys.path.insert(0, str(folder))
    try:
        return cast("Callable[[Any, Any], Any]", getattr(import_module(f"{name}.{module}"), function))
    finally:
        sys.path.remove(str(folder))


def _revision(folder: Path, name: str) -> str:
    """What identifies a package: the commit of its checkout, or a hash of its source where there is no repository."""
    if (folder / ".git").exists():
        words = ["git", "-C", str(folder), "rev-parse", "HEAD"]
        answer = subprocess.run(words, capture_output=True, text=True, check=False)
        if answer.returncode == 0:
            return f"commit {answer.stdout.strip()}"
    source = folder / name / f"{PEERS[name][0]}.py"
    return f"sha256 of {source.name} {hashlib.sha256(source.read_bytes()).hexdigest()[:16]}"


def fastest_torch(names: Iterable[str]) -> list[str]:
    """The names among candidates that are torch's own ways, as its users call them."""
    return [name for name in names if name.startswith("torch.") and "," not in name]
