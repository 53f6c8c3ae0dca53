"""CUDA C++ to cubin through NVRTC, once per source, options and compiler: later processes read it from disk.

    kernel = function_of("FOLDER/FILE.cu", "function", device, {"BM": 128, "STAGES": 4})

Sources lie in the folders of this backend and include one another by name. No directory of headers is searched:
NVRTC comes without cuda_bf16.h and stdint.h, and kernels that need nothing of them compile wherever it is installed.
Kernels are declared extern "C", so that their names are plain.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ....base.disk import cache_folder, keep, kept, say_not_kept
from ....base.seen import Seen
from ....errors import DeviceError
from ....planner.family import NotCompiledError
from . import facts, kernel
from .waiting import waits

KERNELS = Path(__file__).parents[1]
# Products and sums stay two operations, with two roundings, unless a kernel says fma.
ALWAYS = ("--fmad=false",)
_cubins: Seen[bytes] = Seen(1024)
_compiling: dict[Any, threading.Lock] = {}


class CompileError(DeviceError):
    """A kernel does not compile.

    Attributes
    ----------
    log : str
        What the compiler says.
    """

    def __init__(self, name: str, options: Sequence[str], log: str) -> None:
        self.log = log
        super().__init__(
            f"kernel {name} does not compile: {log.strip()}",
            limit="source that this compiler takes",
            value=" ".join(options),
            nearest="another configuration",
        )


def function_of(
    file: str, name: str, device: int, defines: Mapping[str, object] | None = None, *, before: str = ""
) -> kernel.Kernel:
    """A function of a file, compiled for a device or taken from a cache, and loaded.

    Parameters
    ----------
    file, name : str
    defines : mapping
        Macros; True is 1 and False is 0.
    before : str
        Text that the file is compiled after: instructions of `wgmma`, say.
    """
    macros = tuple(f"-D{key}={int(v) if isinstance(v, bool) else v}" for key, v in (defines or {}).items())
    return kernel.load(_cubin(KERNELS, file, before, facts.device(device).arch, macros), name, device)


def _cubin(*key: Any) -> bytes:
    """The same object for the same code of the same folder; what another thread compiles is not compiled twice."""
    found = _cubins.get(key)
    if found is not None:
        return found
    compiling = _compiling.setdefault(key, threading.Lock())
    if not compiling.acquire(blocking=waits()):
        raise NotCompiledError(key[1])
    try:
        return _cubins.get(key) or _cubins.keep(key, _compiled(*key))
    finally:
        compiling.release()


def _compiled(folder: Path, file: str, before: str, arch: str, macros: tuple[str, ...]) -> bytes:
    text = f'{before}#include "{file}"\n'
    return compile_text(text, name=f"{Path(file).stem}_call.cu", arch=arch, options=("-std=c++17", *macros))


def compile_text(text: str, *, name: str, arch: str, options: Sequence[str] = ()) -> bytes:
    """Compile a source to a cubin; files that it includes are those of this backend.

    Parameters
    ----------
    text, name : str
        The source, and what the compiler's log calls it.
    arch : str
        As `facts.DeviceFacts.arch` gives it: "sm_90a".
    options : sequence of str
        Further options of NVRTC's.

    Raises
    ------
    CompileError
        With the compiler's log.
    DeviceError
        Where NVRTC is not installed.
    """
    headers = _included(text)
    every = (f"--gpu-architecture={arch}", *ALWAYS, *options)
    path = _cached_at(text, headers, every)
    cubin = None if path is None else kept(path)
    if cubin is None:
        if not waits():
            raise NotCompiledError(name)
        cubin = _compile(text, name, headers, every)
        try:
            if path is None:
                raise FileNotFoundError("no home folder is known")
            keep(path, cubin)
        except OSError as error:
            say_not_kept("CUDA kernels", error)
    return cubin


def _included(text: str, found: dict[str, str] | None = None) -> dict[str, str]:
    """Names and texts of the files of this backend that a source includes, directly or not."""
    found = {} if found is None else found
    for name in re.findall(r'^\s*#\s*include\s*"([^"]+)"', text, re.MULTILINE):
        path = KERNELS / name
        if name not in found and path.is_file():
            found[name] = path.read_text()
            _included(found[name], found)
    return found


def _compile(text: str, name: str, headers: Mapping[str, str], options: Sequence[str]) -> bytes:
    nvrtc = _nvrtc()
    encoded = [option.encode() for option in options]
    contents, names = [v.encode() for v in headers.values()], [k.encode() for k in headers]
    status, program = nvrtc.nvrtcCreateProgram(text.encode(), name.encode(), len(names), contents, names)
    _checked(nvrtc, status)
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(
                name, options, _filled(nvrtc, program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            )
        return _filled(nvrtc, program, "CUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()  # loads the library itself
    except (ImportError, RuntimeError) as error:  # cuda.pathfinder's own error is a RuntimeError
        raise DeviceError(
            "NVRTC is not installed",
            limit="cuda-bindings and nvidia-cuda-nvrtc",
            value=str(error),
            nearest="isogemm[cuda]",
        ) from error
    return nvrtc


def _filled(nvrtc: Any, program: Any, what: str) -> bytes:
    """What nvrtcGet... writes into a buffer of the size that it asks for."""
    status, size = getattr(nvrtc, f"nvrtcGet{what}Size")(program)
    _checked(nvrtc, status)
    buffer = bytes(bytearray(size))  # of its own: the compiler writes into it
    (status,) = getattr(nvrtc, f"nvrtcGet{what}")(program, buffer)
    _checked(nvrtc, status)
    return buffer


def _checked(nvrtc: Any, status: Any) -> None:
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise DeviceError("NVRTC failed", limit="NVRTC_SUCCESS", value=status.name, nearest="a working NVRTC")


def cache_directory() -> Path | None:
    """Where cubins are kept; names of files cover everything that reaches them. None where there is no place for it."""
    return cache_folder("cubins")


def _cached_at(text: str, headers: Mapping[str, str], options: Sequence[str]) -> Path | None:
    digest = hashlib.sha256()
    for part in (text, *(x for item in sorted(headers.items()) for x in item), *options, str(facts.nvrtc_version())):
        digest.update(f"{len(part)}:".encode())
        digest.update(part.encode())
    folder = cache_directory()
    return folder and folder / f"{digest.hexdigest()[:40]}.cubin"
