"""Compiled kernels along rows: what selects one, and its launch once places and sizes are known."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ....planner.fingerprint import fingerprint
from ....planner.kernel_admission import Candidate

if TYPE_CHECKING:
    from ..driver.kernel import Kernel, Parameter

__all__ = [
    "EACH",
    "REDUCE",
    "Code",
    "Launch",
    "bind_columns",
    "bind_each",
    "bind_reduce",
    "bind_rope",
    "bind_table",
    "serve",
]

Launch = Callable[..., None]

REDUCE = {
    "rms_norm": 0, "layer_norm": 1, "softmax": 2, "log_softmax": 3, "sum": 4, "mean": 5, "add_rms_norm": 6,
    "rms_norm_back": 7, "layer_norm_back": 8, "softmax_back": 9, "log_softmax_back": 10,
}  # fmt: skip
EACH = {"silu_mul": 0, "silu": 1, "sigmoid": 2, "exp": 3, "add": 4, "silu_mul_back": 5}


class Code(NamedTuple):
    """A file of kernels/ without its suffix, the kernel in it, and the macros that it is compiled with."""

    file: str
    function: str
    defines: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, file: str, function: str, defines: Mapping[str, Any], **more: Any) -> Code:
        """With macros as a mapping."""
        return cls(file, function, tuple((key, int(value)) for key, value in {**defines, **more}.items()))

    def __getattr__(self, name: str) -> int:
        """The value of a macro, in small letters."""
        found = dict(self.defines).get(name.upper())
        if found is None:
            raise AttributeError(name)
        return found

    @property
    def name(self) -> str:
        """The kernel's name in reports."""
        kinds = {"rows": REDUCE, "each": EACH}.get(self.function, {})
        named = [name for name, number in kinds.items() if ("OP", number) in self.defines]
        return " ".join(["rows", self.file, *named])

    @property
    def text(self) -> str:
        """The macros."""
        return " ".join(f"{key}={value}" for key, value in self.defines)

    def load(self, device: int) -> Kernel:
        """Compile, or take from a cache, and load."""
        from ..driver import nvrtc
        from ..driver.facts import device as facts
        from ..driver.kernel import load

        return load(_cubin(nvrtc.KERNELS, self, facts(device).arch), self.function, device)


@lru_cache(maxsize=1024)
def _cubin(folder: Path, code: Code, arch: str) -> bytes:
    """The same object for the same code of the same folder, so that new sizes read and hash no file."""
    from ..driver.nvrtc import compile_files

    return compile_files([f"rows/{code.file}.cu"], arch=arch, defines=dict(code.defines), options=("-std=c++17",))


def serve(codes: Sequence[Code], bind: Callable[[Code], Launch], device: int) -> Launch:
    """The launch of the first code whose bits were right on this device and software.

    Raises
    ------
    ContractError
        None of them has the bits of the definition here.
    DeviceError
        While a graph is captured, of code that has not been tried.
    """
    from ..admitted import first_admitted

    return first_admitted(f"{codes[0].name} along rows", _candidates(codes, bind), device)


def _candidates(codes: Sequence[Code], bind: Callable[[Code], Launch]) -> Iterator[Candidate[Launch]]:
    from .trial import try_code

    source = sources()
    for code in dict.fromkeys(codes):
        yield Candidate(code.name, code.text, source, partial(try_code, code=code), partial(bind, code))


def sources() -> str:
    """Hash of all that reaches the bits of kernels along rows, their definition included."""

    return fingerprint("backends/cuda/rows")


def given(kinds: Sequence[int]) -> list[Parameter]:
    """Pointers of a launch: those that are absent are null for good."""
    return ["ptr" if kind >= 0 else ("ptr", 0) for kind in kinds]


def bind_reduce(
    code: Code, kinds: Sequence[int], count: int, place: bytes, columns: Sequence[int], n: int, eps: float, device: int
) -> Launch:
    """``launch(stream, x, other, weight, bias, out, second)`` without those whose kind is negative.

    Parameters
    ----------
    code : Code
        Of rows_held, rows_long or rows_cluster.
    kinds : sequence of 6 int
        Element codes of the pointers.
    count, n : int
        Rows and their elements.
    place : bytes
        Where rows of x and other lie.
    columns : sequence of 4 int
        Steps along a row of x, other, weight and bias.
    """
    made, cluster = code.load(device), 1
    if code.file == "held":
        w, each = code.w, code.teams * code.r
        grid, block = -(-count // each), 32 * w * code.teams
        shared = 4 * 128 * (w * code.h + 1) if w > 1 else 0
    elif code.file == "long":
        grid, block, shared = count, 1024, 4 * (2 * 16384 + 128)
    else:
        grid, block, shared, cluster = 8 * count, 512, cluster_bytes(code, n), 8
    steps: list[Parameter] = [("i64", step) for step in columns]
    return made.bind(
        [*given(kinds), ("map", place), *steps, ("i32", n), ("f32", eps)],
        grid=(grid,), block=(block,), shared=shared, cluster=(cluster,), pdl=True,
    )  # fmt: skip


def cluster_bytes(code: Code, n: int) -> int:
    """Shared memory of a block that holds an eighth of a row."""
    return 64 * -(-n // 128) * (2 if code.tg >= 0 or code.op == REDUCE["log_softmax"] else 1) + 4 * 128 * 4


def bind_each(
    code: Code, outs: Sequence[int], count: int, place: bytes, columns: Sequence[int], n: int,
    every: Callable[[int], int], device: int,
) -> Launch:  # fmt: skip
    """``launch(stream, x, y, dy, out, second)`` of operations of elements; `every` checks the number of threads."""
    groups = -(-n // (8 if code.vec else 1))
    threads = every(count * groups)
    steps: list[Parameter] = [("i64", step) for step in columns]
    numbers: list[Parameter] = [("i32", n), ("u32", groups), ("u32", threads)]
    pointers = given([code.tx, code.tg, code.td, *outs, -1][:5])
    return code.load(device).bind(
        [*pointers, ("map", place), *steps, *numbers], grid=(-(-threads // 256),), block=(256,), pdl=True
    )


def bind_rope(
    code: Code, tensors: int, rows: int, places: Sequence[bytes], columns: Sequence[int], half: int, eps: float,
    device: int,
) -> Launch:  # fmt: skip
    """``launch(stream, x0, x1, cos, sin, w0, w1, out0, out1)`` of one or two tensors.

    `rows` is the larger number of them, `columns` are steps along rows of x0, x1, cos, sin, w0 and w1.
    """
    if code.norm:
        grid, block = -(-rows // (code.r * code.teams)), 32 * code.teams
    else:
        grid, block = -(-rows * half // ((8 if code.vec else 1) * 256)), 256
    second, weight = tensors - 2, code.tw
    numbers: list[Parameter] = [*(("i64", c) for c in columns), ("i32", half), ("f32", eps)]
    pointers = given([0, second, 0, 0, weight, weight if tensors > 1 else -1, 0, second])
    return code.load(device).bind(
        [*pointers, ("map", places[0]), ("map", places[-1]), *numbers],
        grid=(grid if half else 0, tensors), block=(block,), pdl=True,
    )  # fmt: skip


def bind_columns(code: Code, place: bytes, columns: Sequence[int], n: int, start: bool, device: int) -> Launch:
    """``launch(stream, x, d, stats, out)`` of sums over rows; `columns` are steps of x, d and out."""
    numbers: list[Parameter] = [*(("i64", c) for c in columns), ("i32", n), ("i32", int(start))]
    return code.load(device).bind(
        [*["ptr"] * 4, ("map", place), *numbers],
        grid=(-(-n // 32),), block=(544,), shared=2 * 256 * 32 * 4, pdl=True,
    )  # fmt: skip


def bind_table(code: Code, rows: int, place: bytes, columns: Sequence[int], n: int, start: bool, device: int) -> Launch:
    """``launch(stream, ids, order, d, out)``; `columns` are steps of d, and of out from row to row and along one."""
    numbers: list[Parameter] = [*(("i64", c) for c in columns), ("i32", n), ("i32", int(start))]
    return code.load(device).bind(
        [*["ptr"] * 4, ("map", place), *numbers], grid=(rows, -(-n // 128)), block=(128,), pdl=True
    )
