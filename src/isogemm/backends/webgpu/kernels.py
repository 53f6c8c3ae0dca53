"""The kernels for products, a row each: the file, the order that it walks K in, and what one workgroup computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache

from ...errors import OptionError
from ...formats.blocks import format_of
from .source import assembled, blocks, element, operand_b, vectors

LANES = 32
FORMATS = ("Q4_0", "Q8_0", "Q4_K", "Q6_K")  # of quantized weights
GUARD = 32  # bytes of two words by which threads tell each other what may be dropped, each filled up to 16
MEMORY = 16384  # bytes of workgroup memory that every adapter has; beyond what it has, a driver was seen to hang


@dataclass(frozen=True)
class WgslKernel:
    """One kernel for out [m, n] = a [m, k] @ b [k, n]."""

    file: str  # in the folder ``wgsl``, without its suffix
    order: str  # {"chain", "lanes", "integers"}: the order over K, and so the contract
    # rows, columns: of out, for one workgroup; 1 in families, of which the constants say them
    rows: int = 1
    columns: int = 1
    workgroup: int = 1  # threads
    lanes: int = 0  # of the 32 lanes, those of one thread; 0 where a thread has all
    constants: Mapping[str, int] = field(default_factory=dict)  # of its file
    words: int = 0  # to a load, 2 or 4, where operands must lie at whole vectors of them; 0 where any strides serve

    def columns_of(self, dtype: str) -> int:
        """Columns of one workgroup for operands of a type: of vectors, it says how many lanes a thread has."""
        if self.words and self.order == "lanes":
            each = self.words * (1 if dtype == "float32" else 2)
            return self.workgroup * each // LANES * self.constants["OUTPUTS"]
        return self.columns

    @property
    def threads(self) -> int:
        """That share one output."""
        return LANES // self.lanes if self.lanes else 1


def _lanes(file: str, lanes: int, workgroup: int, *, rows: int = 1, outputs: int = 1) -> WgslKernel:
    """A kernel whose groups have 32 lanes."""
    constants = ({"ROWS": rows} if rows > 1 else {}) | ({"OUTPUTS": outputs} if outputs > 1 else {})
    return WgslKernel(file, "lanes", rows, workgroup * lanes // LANES * outputs, workgroup, lanes, constants)


KERNELS: Mapping[str, WgslKernel] = {
    kernel.file: kernel
    for kernel in (
        WgslKernel("gemv_naive", "chain", 1, 64, 64),
        WgslKernel("gemv_transposed", "chain", 1, 64, 64),
        _lanes("gemv_simd", 1, 128),
        _lanes("gemv_simd_multi", 4, 64, outputs=4),
        _lanes("gemv_wide", 8, 256, outputs=2),
        _lanes("gemv_batched", 4, 64, rows=8),
        WgslKernel("gemm_simdgroup", "chain", 32, 16, 256),
        WgslKernel("gemm_tiled", "chain", 64, 64, 256),
    )
}


# Found by ``python -m benchmarks.webgpu --sweep`` on an H200 through Vulkan; all fit the least workgroup memory that an
# adapter has.
_BLOCKS = {"ALONG": 128, "DOWN": 1, "OUTPUTS": 4, "ROWS": 1}
_BLOCKS_OF_ROWS = {"ALONG": 32, "DOWN": 4, "OUTPUTS": 2, "ROWS": 4}
_GEMV = {"WORDS": 4, "ROWS": 1, "OUTPUTS": 1, "UNROLL": 4, "WORKGROUP": 256, "AHEAD": 1, "CHUNK": 0}
_ROWS = {"WORDS": 2, "ROWS": 4, "OUTPUTS": 2, "UNROLL": 4, "WORKGROUP": 128, "AHEAD": 1, "CHUNK": 512}
_GEMM = {
    "TILE_M": 64, "TILE_N": 128, "DEPTH": 16, "REG_M": 8, "REG_N": 8, "INNER": 4, "BUFFERS": 1, "SPREAD": 0,
}  # fmt: skip
_NARROW = {"TILE_M": 16, "TILE_N": 32, "DEPTH": 32, "REG_M": 4, "REG_N": 4, "SPREAD": 1}
VECTORS: Mapping[str, WgslKernel] = {
    "gemv_vector": WgslKernel("gemv_vector", "lanes", constants=_GEMV, words=4),
    "gemv_vectors": WgslKernel("gemv_vector", "lanes", constants=_ROWS, words=2),
    "gemm_vector": WgslKernel("gemm_vector", "chain", constants=_GEMM, words=4),
    "gemm_narrow": WgslKernel("gemm_vector", "chain", constants=_GEMM | _NARROW, words=4),
    "gemv_q4_0": WgslKernel("gemv_q4_0", "integers", constants=_BLOCKS),
    "gemm_q4_0": WgslKernel("gemv_q4_0", "integers", constants=_BLOCKS | _BLOCKS_OF_ROWS),
}
"""Kernels for operands at whole vectors of words, as families: `kernel_of` has one of each for any constants."""


@cache
def _of_vectors(name: str) -> WgslKernel:
    family, *words = name.split()
    row = VECTORS[family]
    at = dict(row.constants) | {key: int(value) for key, value in (word.split("=") for word in words)}
    if row.order == "integers":
        columns, threads = at["DOWN"] * at["OUTPUTS"], at["ALONG"] * at["DOWN"]
        return replace(row, rows=at["ROWS"], columns=columns, workgroup=threads, constants=at)
    if row.order == "lanes":
        return replace(row, rows=at["ROWS"], constants=at, words=at["WORDS"], workgroup=at["WORKGROUP"])
    threads = at["TILE_M"] // at["REG_M"] * (at["TILE_N"] // at["REG_N"])
    return replace(row, rows=at["TILE_M"], columns=at["TILE_N"], workgroup=threads, constants=at)


def kernel_of(name: str) -> WgslKernel:
    """The row of a kernel; one for vectors may name constants: ``gemv_vector OUTPUTS=2 UNROLL=4``."""
    return KERNELS[name] if name in KERNELS else _of_vectors(name)


def code_of(name: str, types: tuple[str, str], *, across: bool, subgroup: int, fused: bool, start: bool = False) -> str:
    """The WGSL of a kernel for operands of these types.

    Parameters
    ----------
    types : (str, str)
        Of a and b; quantized weights are ``Q4_0:float16``, rounded to that type, or for integers ``Q4_0``.
    across : bool
        Neighbouring columns of b are neighbours in memory; else neighbouring k are.
    subgroup : int
        The least size of a subgroup; 0 without subgroups.
    start : bool
        For sums that begin with what out holds: kernels of whole vectors look whether `fma` may drop any of it.
    """
    kernel = kernel_of(name)
    if kernel.words:
        return _vector_code(kernel, types, across=across, subgroup=subgroup, fused=fused, start=start)
    if kernel.order == "integers":
        return _block_code(kernel, types[1], fused=fused)
    constants: dict[str, int | bool | str] = dict(kernel.constants)
    if types[1].startswith("Q"):
        constants |= {"WordB": "vec4<u32>", "K_EACH": 1}
    parts = ["params", "integers", element("a", types[0]), "rows", *operand_b(types[1])]
    if kernel.lanes:
        constants |= {"WORKGROUP": kernel.workgroup, "LANES": kernel.lanes, "THREADS": kernel.threads}
        parts.append("meet_subgroup" if subgroup >= kernel.threads else "meet_workgroup")
    if kernel.file == "gemm_tiled":
        constants["ACROSS"] = across
    return assembled(kernel.file, tuple(parts), constants, fused=fused)


def _block_code(kernel: WgslKernel, fmt: str, *, fused: bool) -> str:
    """The code of a kernel for codes of x and blocks of a format."""
    along, runs = kernel.constants["ALONG"], format_of(fmt).block // 32
    factors = 16 * (along // runs) if runs > 1 else 0
    _check_memory(kernel, kernel.rows * kernel.columns * (8 * (along + 1) + factors))
    words = dict.fromkeys(("WordA", "WordB"), "vec4<u32>")
    constants = (
        dict(kernel.constants) | words | {"K_EACH": 4, "WORKGROUP": kernel.workgroup, "AHEAD": 8 if fused else 1}
    )
    parts = ("params", "integers", *blocks(fmt), "runs", f"walk_{format_of(fmt).block}")
    return assembled(kernel.file, parts, constants, fused=fused, trusted=True)


def _vector_code(
    kernel: WgslKernel, types: tuple[str, str], *, across: bool, subgroup: int, fused: bool, start: bool
) -> str:
    """The code of a kernel whose operands lie at whole vectors; both have one type."""
    held = 1 if types[0] == "float32" else 2
    at = dict(kernel.constants)
    each = kernel.words * held
    at |= {"WORDS": kernel.words, "HELD": held, "EACH": each, "WORKGROUP": kernel.workgroup}
    at |= {"GUARDS": int(start or types[0] != "float16")}  # products of float16 are far from small
    constants: dict[str, int | bool | str] = dict.fromkeys(("WordA", "WordB"), f"vec{kernel.words}<u32>")
    parts = ["params", "integers", "rows", "strided", *vectors(types[0], kernel.words), "guard"]
    if kernel.order == "lanes":
        at |= {"LANES": each, "THREADS": LANES // each, "BEHIND": 1 - at["AHEAD"], "TWO": 2, "TWOS": kernel.words // 2}
        at |= {"STAGED": int(at["CHUNK"] > 0), "DIRECT": int(not at["CHUNK"])}
        shuffled = subgroup >= LANES // each
        room = 0 if shuffled else 4 * each * kernel.workgroup
        _check_memory(kernel, 4 * at["ROWS"] * at["CHUNK"] + room + GUARD)
        if at["CHUNK"] % (LANES * at["UNROLL"]):
            raise OptionError(
                "CHUNK of gemv_vector", limit=f"whole steps of {LANES}, {at['UNROLL']} at a time", value=at["CHUNK"],
                nearest="gemv_vectors",
            )  # fmt: skip
        at |= meetings(at["ROWS"] * at["OUTPUTS"], each)
        parts.append("meet_subgroup" if shuffled else "meet_workgroup")
    else:
        _check_memory(kernel, 4 * at["BUFFERS"] * at["DEPTH"] * (at["TILE_M"] + at["TILE_N"]) + 2 * GUARD)
        at |= {"GROUPS": at["REG_M"] // 4, "FOURS": at["REG_N"] // 4, "FOUR": 4, "QUADS": each // 4}
        at |= {f"LOADS_{x}": at[f"TILE_{t}"] * at["DEPTH"] // each // kernel.workgroup for x, t in ("AM", "BN")}
        constants |= {"ACROSS": across, "SPREAD": bool(at.pop("SPREAD"))}
        vectors_of = [at[f"TILE_{t}"] * at["DEPTH"] // each for t in "MN"]
        if any(count % kernel.workgroup for count in vectors_of) or at["DEPTH"] % each or each % at["INNER"]:
            raise OptionError(
                "tiles of gemm_vector", limit=f"whole vectors of {each} for each of {kernel.workgroup} threads",
                value=dict(kernel.constants), nearest="gemm_vector",
            )  # fmt: skip
    return assembled(kernel.file, tuple(parts), constants | at, fused=fused, trusted=True)


def meetings(outputs: int, each: int) -> dict[str, int]:
    """With which masks the threads of a group meet one another, and how many numbers each keeps, halved or all."""
    found: dict[str, int] = {}
    threads, level = LANES // each, 0
    while threads > 1:
        threads, even = threads // 2, outputs % 2 == 0
        outputs //= 1 + even
        found |= {f"MASK_{level}": threads, f"HALVED_{level}": even * outputs * each}
        found[f"KEPT_{level}"] = (not even) * outputs * each
        level += 1
    return found | {"LEVELS": level, "LEFT": outputs}


def _check_memory(kernel: WgslKernel, nbytes: int) -> None:
    if nbytes > MEMORY:
        raise OptionError(
            f"bytes of workgroup memory of {kernel.file}", limit=MEMORY, value=nbytes,
            nearest="fewer outputs to a workgroup",
        )  # fmt: skip
