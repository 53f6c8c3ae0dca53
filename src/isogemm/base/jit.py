"""Numba with a cache that knows every file a kernel is made of.

Numba knows a cached kernel by its own file alone. A kernel here also depends on the vector code that its intrinsics
emit elsewhere, so an upgrade could leave a stale kernel behind, that is: other bits. The cache directory is therefore
named by a hash over the package's kernel sources, and `isogemm.base.kernel_cache` keeps what is in it. Numba's global
configuration is read and never set: other users of Numba in the process have it too.
"""

from __future__ import annotations

import functools
import hashlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .collector import uncollected
from .disk import cache_folder, check_room
from .progress import quiet, say

__all__ = ["cache_directory", "can_keep", "compile_entry", "compile_seconds", "dispatcher", "njit"]

_SOURCES = ("base", "contract", "formats", "backends/cpu")
_seconds = 0.0
_listening = _said = False
ANNOUNCE_AFTER = 0.6
SAID_SECONDS = 300.0
"""So long a word to one process of a command counts for the others."""


@functools.cache
def source_stamp() -> str:
    """Hash over every source file that can reach a compiled kernel."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for file in sorted(file for name in _SOURCES for file in (root / name).rglob("*.py")):
        digest.update(file.relative_to(root).as_posix().encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


@functools.cache
def cache_directory() -> Path | None:
    """Where compiled kernels of this version are kept; None where there is no place for it."""
    from .._version import __version__

    return cache_folder(f"kernels-{__version__}-{source_stamp()}")


def compile_seconds() -> float:
    """Seconds that this process has spent compiling kernels; 0 when all came from the cache."""
    return _seconds


def njit(function: Callable[..., Any] | None = None, *, signature: Any = None, **options: Any) -> Any:
    """``numba.njit`` without the GIL; compiled when called, or now for `signature`, and cached in `cache_directory`.

    Called from another kernel it is compiled as a part of that, each time (`inlined`).
    """
    if function is None:
        return functools.partial(njit, signature=signature, **options)
    from .kernel_cache import KernelCache

    listen()
    made = dispatcher(function, **options)
    made._cache = KernelCache(function, cache_directory())
    if signature is not None:
        made.compile(signature)
        made.disable_compile()
    return made


def dispatcher(function: Callable[..., Any], **options: Any) -> Any:
    """``numba.njit`` without the GIL and without a cache; never `function` itself, as NUMBA_DISABLE_JIT has it.

    That setting is there to step through a user's functions in Python. Kernels are made of instructions, which Python
    has not.
    """
    from .inlined import CpuKernel

    given = {"nopython": True, "boundscheck": None, "nogil": True} | options
    return CpuKernel(py_func=function, locals={}, targetoptions=given)


def compile_entry(signature: Any, function: Callable[..., Any], *, emitted: bool = False) -> Any:
    """``numba.cfunc`` in `cache_directory`: `function` compiled for C callers, with its address.

    `emitted` tells that it only calls code which an intrinsic emits, in vectors.
    """
    from numba.core.sigutils import normalize_signature

    from .inlined import entry
    from .kernel_cache import KernelCache

    global _seconds
    started, before = time.perf_counter(), _seconds
    soon = threading.Timer(ANNOUNCE_AFTER, announce)  # what is compiled sooner needs no word
    soon.daemon = True
    compiled: Any = entry(function, normalize_signature(signature), emitted=emitted)
    compiled._cache = KernelCache(function, cache_directory(), missed=soon.start)
    try:
        with uncollected():
            compiled.compile()
    finally:
        soon.cancel()
    if not compiled.cache_hits:
        _seconds = before + time.perf_counter() - started  # what the listener counted meanwhile is part of it
    return compiled


def announce() -> None:
    """Say that kernels are being compiled: once per process, and once for all processes of one command."""
    global _said
    if not _said and not quiet():
        _said = True
        folder = cache_directory()
        if folder is None or not can_keep():
            say("compiling kernels for this CPU")
        elif _is_first(folder.parent):
            say(
                "compiling kernels for this CPU that are not in the cache yet; they are kept in "
                f"{folder} (isogemm warm does it ahead)"
            )


def _is_first(folder: Path) -> bool:
    """Whether no process of this command has had the word lately: a file says so, named by the group of processes."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return False  # torchrun gives every rank a group of its own
    mark = folder / f".said-{os.getpgrp() if hasattr(os, 'getpgrp') else os.getpid()}"
    try:
        for old in folder.glob(".said-*"):
            if time.time() - old.stat().st_mtime > SAID_SECONDS:
                old.unlink(missing_ok=True)
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    except FileExistsError:
        return False
    except OSError:
        pass  # said twice at worst
    return True


def can_keep() -> bool:
    """Whether a file can be written to the kernels' folder: tried, because rights do not say it of root."""
    folder = cache_directory()
    try:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            check_room(folder / "kernel")
    except OSError:
        return False
    return folder is not None


def listen() -> None:
    """Announce the first compilation of the process, and count the seconds of all of them."""
    global _listening
    if _listening:
        return
    _listening = True
    from numba.core import event
    from numba.core.caching import NullCache

    class Announce(event.Listener):  # type: ignore[misc]
        depth = 0
        started = 0.0

        def on_start(self, record: Any) -> None:
            if _ours(record):
                if not isinstance(record.data["dispatcher"]._cache, NullCache):
                    announce()  # what is not kept, of probes of a machine, takes a second and comes again
                self.started = self.started if self.depth else time.perf_counter()
                self.depth += 1

        def on_end(self, record: Any) -> None:
            global _seconds
            if _ours(record):
                self.depth -= 1
                _seconds += 0.0 if self.depth else time.perf_counter() - self.started

    event.register("numba:compile", Announce())


def _ours(record: Any) -> bool:
    dispatcher = (record.data or {}).get("dispatcher")
    module = getattr(getattr(dispatcher, "py_func", None), "__module__", "") or ""
    return module.split(".")[0] == "isogemm"
