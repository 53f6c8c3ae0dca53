"""Where compiled kernels are kept: a file for each, named by everything that it was made of.

Numba's own cache has an index for each function: two processes that write to it at once lose an entry, or give one the
other's code. It raises when a file is damaged or the disk is full, and it looks for folders beside the sources, which
have no stamp. Here an entry serves where it is whole and made of just what is asked for; what is damaged, of another
user or missing is compiled, and what cannot be written is said once.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba.core import config
from numba.core.caching import FunctionCache
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps

from ..errors import OptionError
from .disk import keep, kept, say_not_kept


@functools.lru_cache(maxsize=256)
def _digest(path: str, mtime: int, size: int) -> str:
    del mtime, size
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


class KernelCache(FunctionCache):  # type: ignore[misc]
    """The compiled forms of one function, for a dispatcher or a C callback in the place of Numba's `FunctionCache`.

    Without a folder nothing is kept. `missed` is called when a form is not found, before it is compiled.
    """

    def __init__(
        self, function: Callable[..., Any], folder: Path | None, missed: Callable[[], None] | None = None
    ) -> None:
        # Numba's own __init__ looks for a folder through its global configuration.
        self._py_func, self._name, self._folder, self._missed = function, repr(function), folder, missed
        self._source, self._why_not = "", "" if folder else "no home folder is known"
        self.enable()
        try:
            # When it is decorated: a file that changes later is not what was compiled.
            file = function.__code__.co_filename
            status = os.stat(file)
            self._source = _digest(file, status.st_mtime_ns, status.st_size)
        except OSError as error:
            self._folder, self._why_not = None, f"no source to know them by: {error}"

    @property
    def cache_path(self) -> str:
        """The folder, as Numba's statistics want it."""
        return str(self._folder or "")

    def flush(self) -> None:
        """Nothing: entries that are written again are replaced."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The compiled form for a signature; None where there is none that can be used.

        Raises OptionError: there is none, and Numba is set not to compile.
        """
        target_context.refresh()
        if self._enabled and self._folder:
            words, path = self._named(sig, target_context.codegen())
            data = kept(path)
            try:
                if data is not None:
                    found, payload = pickle.loads(data)
                    if found == (words, sig):
                        return CompileResult._rebuild(target_context, *payload)
            except Exception:
                pass  # whole, and yet not what this Numba reads
        if config.DISABLE_JIT:
            # What Numba's own functions are made of is not compiled then, and kernels use some.
            raise OptionError(
                "NUMBA_DISABLE_JIT",
                limit="0, or kernels that were compiled and kept before",
                value=f"{config.DISABLE_JIT}, and {self._py_func.__name__} has to be compiled",
                nearest="the same calls once without it",
            )
        if self._missed is not None:
            self._missed()
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep a compiled form, or say why not; either way the form can be used."""
        if not self._enabled:
            return
        if self._folder is None:
            say_not_kept("kernels", self._why_not)
            return
        words, path = self._named(sig, data.codegen)
        try:
            keep(path, dumps(((words, sig), data._reduce())))
        except OSError as error:
            say_not_kept("kernels", f"cannot write {self._folder}: {error}")

    def _named(self, sig: Any, codegen: Any) -> tuple[str, Path]:
        """Everything that decides about the code, in words that are the same in every process, and the file."""
        assert self._folder is not None
        function = self._py_func
        key = self._index_key(sig, codegen)[1:]
        # Settings of Numba's that change the code and are in no key of its own.
        loops = (config.LOOP_VECTORIZE, config.SLP_VECTORIZE, config.BOUNDSCHECK)
        versions = (numba.__version__, llvmlite.__version__, sys.implementation.cache_tag, sys.abiflags)
        name = (function.__module__, function.__qualname__, function.__code__.co_firstlineno, self._source)
        words = repr((*name, str(sig), key, str(config.OPT), config.DEBUGINFO_DEFAULT, loops, versions))
        digest = hashlib.sha256(words.encode()).hexdigest()[:32]
        return words, self._folder / f"{function.__name__[:60]}-{digest}.kernel"
