"""Build llama.cpp's CUDA products, without a GPU: ``python -m benchmarks.llama.build SOURCES OUT --cublas DIR``.

SOURCES is llama.cpp, or the vendor/llama.cpp of llama-cpp-python's source distribution. Compiled are ggml's base
library and those files of its CUDA backend that a product with this benchmark's formats reaches, as its own build
compiles them (Release, no CUDA graphs of its own: the benchmark captures its calls). All else of the backend, attention
for one, becomes symbols that name themselves and abort, so the build takes minutes instead of an hour. One function is
added: it tells the backend's stream.

Needed: nvcc, g++, nm, and the headers and library of cuBLAS, as the wheel nvidia-cublas has them (its folder with
``include`` and ``lib``).
"""

from __future__ import annotations

import re
import shlex
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["main", "stubs", "undefined"]

BASE: tuple[str, ...] = (
    "ggml.c",
    "ggml-alloc.c",
    "ggml-quants.c",
    "ggml.cpp",
    "ggml-backend.cpp",
    "ggml-backend-meta.cpp",
)
BASE += ("ggml-opt.cpp", "ggml-threading.cpp", "gguf.cpp")
CUDA = ("ggml-cuda", "mmq", "mmvq", "mmf", "mmvf", "mmid", "quantize", "convert", "fwht")
FORMATS = ("q4_0", "q4_k", "q8_0", "q6_k")
DEFINED = "-DNDEBUG -DGGML_SCHED_MAX_COPIES=4 -D_GNU_SOURCE -D_XOPEN_SOURCE=600 -DGGML_SHARED -DGGML_BACKEND_SHARED"
BACKEND = "-DGGML_BACKEND_BUILD -DGGML_CUDA_NO_FA -DGGML_CUDA_NO_VMM -DGGML_CUDA_PEER_MAX_BATCH_SIZE=128"
STREAM = """#include "common.cuh"
#include "ggml-backend-impl.h"
extern "C" void * ggml_peer_cuda_stream(ggml_backend_t backend) {
    return (void *) ((ggml_backend_cuda_context *) backend->context)->stream();
}
"""
STUB = """#include <cstdio>
#include <cstdlib>
static void left_out(const char * name) { fprintf(stderr, "left out of this build: %s\\n", name); abort(); }
"""


@dataclass(frozen=True, slots=True)
class Paths:
    """Where things lie."""

    ggml: Path
    out: Path
    cuda: Path
    cublas: Path

    @property
    def objects(self) -> Path:
        """Of the compilers."""
        return self.out / "objects"

    def include(self) -> str:
        """The compilers' -I."""
        folders = (self.ggml / "include", self.ggml / "src", self.ggml / "src/ggml-cuda", self.objects)
        return " ".join(f"-I{shlex.quote(str(folder))}" for folder in (*folders, self.cublas / "include"))


def main(
    sources: Annotated[Path, typer.Argument(help="llama.cpp.")],
    out: Annotated[Path, typer.Argument(help="Where the two libraries go.")],
    cublas: Annotated[Path, typer.Option(help="A folder with cuBLAS's include and lib.")],
    cuda: Annotated[Path, typer.Option(help="The CUDA toolkit.")] = Path("/usr/local/cuda"),
    arch: Annotated[str, typer.Option(help="Compute capability, without its point.")] = "90",
    jobs: Annotated[int, typer.Option(help="Compilers at once.", min=1)] = 2,
) -> None:
    """Compile, link and strip libggml-base.so and libggml-cuda.so."""
    paths = Paths(sources / "ggml", out, cuda, cublas)
    paths.objects.mkdir(parents=True, exist_ok=True)
    version = "".join(_number(paths.ggml, part) for part in ("MAJOR", "MINOR", "PATCH"))[:-1]
    lines = (f'#define GGML_VERSION "{version}"', '#define GGML_COMMIT "unknown"', "")
    (paths.objects / "ggml-version.h").write_text("\n".join(lines))
    (paths.objects / "stream.cu").write_text(STREAM)
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(_run, _compilations(paths, arch)))
    _link(paths)


def _number(ggml: Path, part: str) -> str:
    found = re.search(rf"set\(GGML_VERSION_{part} (\d+)\)", (ggml / "CMakeLists.txt").read_text())
    return f"{found[1]}." if found else "0."


def _compilations(paths: Paths, arch: str) -> list[str]:
    """The slowest first."""
    code = f"-gencode arch=compute_{arch},code=sm_{arch} -use_fast_math -extended-lambda -compress-mode=size"
    nvcc = f"{paths.cuda}/bin/nvcc -std=c++17 -O3 {code} -Xcompiler -fPIC {DEFINED} {BACKEND} {paths.include()}"
    folder = paths.ggml / "src/ggml-cuda"
    names = [folder / f"template-instances/mmq-instance-{name}.cu" for name in FORMATS]
    names += [folder / f"{name}.cu" for name in CUDA] + [paths.objects / "stream.cu"]
    found = [f"{nvcc} -c {name} -o {paths.objects / name.stem}.cuda.o" for name in names]
    for name in BASE:
        compiler = "gcc -std=c11" if name.endswith(".c") else "g++ -std=c++17"
        words = f"-O3 -fPIC {DEFINED} -DGGML_BUILD {paths.include()}"
        found.append(f"{compiler} {words} -c {paths.ggml / 'src' / name} -o {paths.objects / name}.base.o")
    return found


def _link(paths: Paths) -> None:
    base, cuda = paths.out / "libggml-base.so", paths.out / "libggml-cuda.so"
    _run(f"g++ -shared -Wl,-soname,{base.name} -o {base} {paths.objects}/*.base.o -lpthread -lm -ldl")
    libraries = f"-L{paths.out} -lggml-base -L{paths.cuda}/lib64 -lcudart {paths.cublas}/lib/libcublas.so.13"
    command = f"g++ -shared -Wl,-soname,{cuda.name} -Wl,-rpath,'$ORIGIN' -Wl,--no-undefined -Wl,--no-demangle"
    command += f" -o {cuda} {paths.objects}/*.cuda.o {libraries}"
    missing = undefined(subprocess.run(command, shell=True, capture_output=True, text=True, check=False).stderr)
    (paths.objects / "stubs.cpp").write_text(stubs(missing))
    _run(f"g++ -O1 -fPIC -c {paths.objects}/stubs.cpp -o {paths.objects}/stubs.o")
    _run(command.replace(" -L", f" {paths.objects}/stubs.o -L", 1))
    _run(f"strip {base} {cuda}")
    typer.echo(f"{cuda}: {cuda.stat().st_size / 1e6:.1f} MB, {len(missing)} symbols left out")


def undefined(messages: str) -> list[str]:
    """The mangled symbols that a linker misses."""
    return sorted(set(re.findall(r"undefined reference to [`'](_Z\w+)'", messages)))


def stubs(names: list[str]) -> str:
    """C++ source that defines symbols which name themselves and abort."""
    lines = [f'extern "C" void s{i}() __asm__("{n}"); void s{i}() {{ left_out("{n}"); }}' for i, n in enumerate(names)]
    return STUB + "\n".join(lines) + "\n"


def _run(command: str) -> None:
    answer = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    if answer.returncode:
        raise typer.Exit(_told(f"{command}\n{answer.stderr[-4000:]}"))


def _told(words: str) -> int:
    typer.echo(words, err=True)
    return 1


if __name__ == "__main__":
    typer.run(main)
