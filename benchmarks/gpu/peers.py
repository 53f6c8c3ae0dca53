"""The libraries beside which isogemm is timed on the GPU, each as its users call it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .cases import PEER

__all__ = ["fastest_torch", "load_peer", "without_split_k"]


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


def load_peer(folder: Path | None) -> tuple[Callable[[Any, Any], Any] | None, str]:
    """batch_invariant_ops' product from a checkout, and where it came from or why it is absent."""
    if folder is None:
        return None, f"{PEER}: absent (no --peer)"
    package = folder / PEER
    if not (package / "__init__.py").is_file():
        return None, f"{PEER}: absent ({folder} holds no {PEER})"
    sys.path.insert(0, str(folder))
    try:
        import importlib

        module = importlib.import_module(f"{PEER}.{PEER}")
    except ImportError as error:
        return None, f"{PEER}: absent ({error})"
    finally:
        sys.path.remove(str(folder))
    return module.matmul_persistent, f"{PEER}: {_revision(folder)}"


def _revision(folder: Path) -> str:
    """What identifies a checkout: its commit, or a hash of the source where there is no repository."""
    import hashlib
    import subprocess

    if (folder / ".git").exists():
        words = ["git", "-C", str(folder), "rev-parse", "HEAD"]
        answer = subprocess.run(words, capture_output=True, text=True, check=False)
        if answer.returncode == 0:
            return f"commit {answer.stdout.strip()}"
    source = (folder / PEER / f"{PEER}.py").read_bytes()
    return f"sha256 of {PEER}.py {hashlib.sha256(source).hexdigest()[:16]}"


def fastest_torch(names: Iterator[str] | list[str]) -> list[str]:
    """The names among candidates that are torch's own ways, as its users call them."""
    return [name for name in names if name.startswith("torch.") and "," not in name]
