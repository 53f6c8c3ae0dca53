"""Numba with a cache that knows every file a kernel is made of.

Numba stamps a cached kernel with its own file's time and size alone. A kernel here also depends on the vector code that
its intrinsics emit elsewhere, and reproducible wheels give every file the same time, so an upgrade could leave a stale
kernel behind, that is: other bits. The cache directory is therefore named by a hash over the package's kernel sources.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["cache_directory", "compile_entry", "compile_seconds", "njit"]

_SOURCES = ("jit.py", "floating.py", "contract", "backends/cpu")
_seconds = 0.0
_listening = _said = False
ANNOUNCE_AFTER = 0.6


@functools.cache
def source_stamp() -> str:
    """Hash over every source file that can reach a compiled kernel."""
    root = Path(__file__).parent
    digest = hashlib.sha256()
    for name in _SOURCES:
        path = root / name
        for file in [path] if path.is_file() else sorted(path.glob("*.py")):
            digest.update(file.name.encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


@functools.cache
def cache_directory() -> Path:
    """Where compiled kernels of this version are kept."""
    import platformdirs

    from ._version import __version__

    return Path(platformdirs.user_cache_dir("isogemm", appauthor=False)) / f"kernels-{__version__}-{source_stamp()}"


def compile_seconds() -> float:
    """Seconds that this process has spent compiling kernels; 0 when all came from the cache."""
    return _seconds


def njit(function: Callable[..., Any] | None = None, *, signature: Any = None, **options: Any) -> Any:
    """``numba.njit`` without the GIL, cached in `cache_directory`; compiled when called, or now for `signature`."""
    if function is None:
        return functools.partial(njit, signature=signature, **options)
    import numba

    listen()
    options.setdefault("nogil", True)
    dispatcher = numba.njit(**options)(function)
    with_cache(dispatcher.enable_caching)
    if signature is not None:
        dispatcher.compile(signature)
        dispatcher.disable_compile()
    return dispatcher


def with_cache(enable: Callable[[], Any]) -> Any:
    """Call `enable` with Numba's cache pointed at `cache_directory`; without a writable one, uncached and said so."""
    from numba.core import config

    folder = cache_directory()
    if not _can_keep(folder):
        # Numba would fall back to a folder beside the source, where the stamp does not reach.
        _say_uncached(str(folder))
        return None
    before = config.CACHE_DIR
    config.CACHE_DIR = str(folder)
    try:
        return enable()
    except RuntimeError as error:  # no locator: the directory cannot be written after all
        _say_uncached(str(error))
        return None
    finally:
        config.CACHE_DIR = before


@functools.cache
def _say_uncached(why: str) -> None:
    say(f"kernels are not cached, every process compiles them anew: cannot write {why}")


def say(text: str) -> None:
    """One line to standard error, where a user waits and should know why."""
    print(f"isogemm: {text}", file=sys.stderr, flush=True)


def compile_entry(signature: Any, function: Callable[..., Any]) -> Any:
    """``numba.cfunc`` in `cache_directory`: `function` compiled for C callers, with its address."""
    import numba

    global _seconds
    started, before = time.perf_counter(), _seconds
    soon = threading.Timer(ANNOUNCE_AFTER, announce)  # a cached entry loads sooner than that
    soon.daemon = True
    soon.start()
    try:
        compiled = with_cache(lambda: numba.cfunc(signature, cache=True)(function)) or numba.cfunc(signature)(function)
    finally:
        soon.cancel()
    if not compiled.cache_hits:
        _seconds = before + time.perf_counter() - started  # what the listener counted meanwhile is part of it
    return compiled


def announce() -> None:
    """Say, once per process, that kernels are being compiled."""
    global _said
    if not _said:
        _said = True
        folder = cache_directory()
        say(f"compiling kernels for this CPU{f', once; they are kept in {folder}' if _can_keep(folder) else ''}")


def _can_keep(folder: Path) -> bool:
    """Whether files can be written to `folder`, or it can be made."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def listen() -> None:
    """Announce the first compilation of the process, and count the seconds of all of them."""
    global _listening
    if _listening:
        return
    _listening = True
    from numba.core import event

    class Announce(event.Listener):  # type: ignore[misc]
        depth = 0
        started = 0.0

        def on_start(self, record: Any) -> None:
            if _ours(record):
                announce()
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
