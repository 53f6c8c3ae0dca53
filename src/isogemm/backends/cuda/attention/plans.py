"""Which kernel computes an attention, and its launch with everything bound but the addresses.

``hopper``  wgmma fed by the tensor copy engine: many queries, head sizes to 128, rows of 16 bytes
``few``     one leaf and up to 64 rows of a key head to a block; leaves come by the copy engine. Sums go to memory for
            ``meet``, unless there is but one leaf
``split``   one leaf to a program for any strides and numbers of rows, sums to memory, then ``meet``
``leaf``    the same where there is one leaf, without sums
``walk``    all leaves in one program: any strides, head sizes to 256
``fma``     float32 fused multiply-adds
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ....contract.attention import EXP2_TERMS, LEAF
from ....errors import OptionError
from ..driver.kernel import Parameter
from ..driver.workspace import workspace

__all__ = [
    "FMA_ROWS",
    "KERNELS",
    "MAX_HEAD",
    "Case",
    "Operand",
    "bind",
    "bind_fma",
    "blocks_of",
    "code_of",
    "compiled",
    "fma_defines",
    "ints",
    "kernel_of",
    "kernels_of",
    "longs",
    "mask_defines",
    "serves",
    "steps_of",
]

MAX_HEAD = 256
FMA_ROWS = 32  # queries of a block of the kernel of fused multiply-adds
KERNELS = ("hopper", "few", "split", "leaf", "walk", "fma")
KINDS = {"float32": 0, "bfloat16": 1, "float16": 2}
TYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "bool": "i8"}
OPERANDS = {"bfloat16": "bf16", "float16": "f16"}
MOST_SUMS = 2**28  # bytes of leaves' sums
Run = Callable[..., None]  # (stream, q, k, v, mask, start, stop, y, stats)


class Operand(NamedTuple):
    """q, k or v: [batch, heads, tokens, size]."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """An attention but for its addresses.

    Attributes
    ----------
    operands : (q, k, v)
    mask : strides over [b, hq, tq, tk], or None
    dtype, dtype_out, dtype_mask : str
    c : float
    offset : int or None
        Of the causal rule.
    starts, stops : bool
        Whether there are such.
    fma : bool
        The arithmetic; else the device's tensor cores.
    aligned : bool
        Addresses of q, k and v are multiples of 16 bytes.
    stats : bool
        Whether m and l are wanted; without, their address is 0.
    """

    operands: tuple[Operand, ...]
    mask: tuple[int, ...] | None
    dtype: str
    dtype_out: str
    dtype_mask: str | None
    c: float
    offset: int | None
    starts: bool
    stops: bool
    fma: bool
    aligned: bool
    stats: bool = True

    @property
    def batch(self) -> int:
        return self.operands[0].shape[0]

    @property
    def heads(self) -> int:
        return self.operands[0].shape[1]

    @property
    def group(self) -> int:
        """Query heads to a key head."""
        return self.heads // self.operands[1].shape[1]

    @property
    def tq(self) -> int:
        return self.operands[0].shape[2]

    @property
    def tk(self) -> int:
        return self.operands[1].shape[2]

    @property
    def d(self) -> int:
        return self.operands[0].shape[3]

    @property
    def dv(self) -> int:
        return self.operands[2].shape[3]

    @property
    def leaves(self) -> int:
        return -(-self.tk // LEAF)

    @property
    def masks(self) -> int:
        """0 none, 1 bool, 2 added."""
        return 0 if self.dtype_mask is None else 1 if self.dtype_mask == "bool" else 2

    @property
    def y_strides(self) -> tuple[int, int, int]:
        """Of items, heads and tokens of the result."""
        return self.heads * self.tq * self.dv, self.tq * self.dv, self.dv


def serves(case: Case, kernel: str) -> bool:
    """Whether a kernel can compute this."""
    if case.fma or case.dtype == "float32":
        return kernel == "fma" and case.fma
    if kernel in ("hopper", "few"):
        steps = [s * 2 % 16 == 0 and s > 0 for x in case.operands for s in steps_of(x)[:3]]
        sizes = case.d % 8 == 0 and case.dv % 8 == 0 and max(case.d, case.dv) <= 128
        return case.aligned and sizes and all(steps) and case.leaves > 0
    return kernel == "walk" or (kernel == "leaf" and case.leaves == 1) or (kernel == "split" and case.leaves > 0)


def kernel_of(case: Case, device: int) -> str:
    """The kernel that is likely the fastest; every choice has the same bits."""
    from ..driver.facts import device as facts

    if case.fma or not case.leaves:
        return "fma" if case.fma else "walk"
    rows, bundles = case.tq * case.group, case.batch * case.heads // case.group
    programs = case.batch * case.heads * -(-case.tq // 128)
    hopper = facts(device).capability[0] == 9 and serves(case, "hopper")
    sums = 4 * bundles * case.leaves * rows * (case.dv + 2)
    # A block of `few` takes 64 rows: measured on an H200 at 8192 keys and 32 heads, 62 us for that many rows of 8 key
    # heads and 389 us for 512, where `hopper` takes 150 us whatever they are up to 128 queries.
    if sums <= MOST_SUMS and (rows <= 64 or (rows <= (128 if hopper else 1024) and programs < 96 and case.leaves >= 8)):
        return "few" if hopper else "split" if case.leaves > 1 else "leaf"
    return "hopper" if hopper else "leaf" if case.leaves == 1 else "walk"


def kernels_of(case: Case, device: int) -> list[str]:
    """All kernels that can compute this on the device: the fastest first, then those that do with the least memory."""
    from ..driver.facts import device as facts

    first = kernel_of(case, device)
    sums = 4 * case.batch * case.heads * case.leaves * case.tq * (case.dv + 2)
    found = [name for name in ("hopper", "leaf", "walk", "few", "split") if name != first and serves(case, name)]
    if facts(device).capability[0] != 9:
        found = [name for name in found if name not in ("hopper", "few")]
    return [first, *(name for name in found if sums <= MOST_SUMS or name not in ("few", "split"))]


def code_of(case: Case, kernel: str, device: int) -> str:
    """The text of all that selects the compiled code of a kernel: equal texts, equal code."""
    if kernel in ("split", "leaf", "walk"):
        _, constants, hints, options, _ = triton_facts(case, kernel, _rows_of(case), device)
        defines = {key: value for key, value in constants.items() if key not in ("TERMS", "WALK")} | options
        defines |= {"KIND": KINDS[case.dtype], "MASK_KIND": KINDS.get(case.dtype_mask or "", 0)}
        defines |= {"OUT": KINDS[case.dtype_out], "HINTS": ",".join(hints)}
    else:
        from .hopper import few_source, source

        makers: dict[str, Callable[[Case], dict[str, object]]] = {
            "fma": fma_defines, "few": lambda case: few_source(case)[1], "hopper": lambda case: source(case)[1],
        }  # fmt: skip
        defines = makers[kernel](case)
    if kernel == "split" or (kernel == "few" and case.leaves > 1):
        defines = defines | {f"MEET_{key}": value for key, value in _meet_defines(case).items()}
    return " ".join(f"{key}={int(value) if isinstance(value, bool) else value}" for key, value in defines.items())


def bind(case: Case, kernel: str, device: int) -> Run:
    """Compile, or take from a cache, and bind.

    Raises
    ------
    OptionError
        The kernel cannot compute this case.
    """
    if not min(case.batch, case.tq, case.heads):
        return lambda *values: None
    if not serves(case, kernel):
        legal = [name for name in KERNELS if serves(case, name)]
        raise OptionError("kernel of attention", limit=legal, value=kernel, nearest=legal[:1])
    if kernel == "hopper":
        from .hopper import bind_hopper

        return bind_hopper(case, device)
    binders: dict[str, Callable[[Case, int], Run]] = {"fma": bind_fma, "few": _bind_few}
    return binders[kernel](case, device) if kernel in binders else _bind_triton(case, kernel, device)


def steps_of(x: Operand) -> tuple[int, ...]:
    """A step that is never taken gets the one of a contiguous tensor of 8 columns."""
    return tuple(8 if size == 1 else step for size, step in zip(x.shape, x.strides, strict=True))


def terms(dtype: str) -> tuple[float, ...]:
    return tuple(float(x) for x in EXP2_TERMS[dtype])


def compiled(files: tuple[str, ...], device: int, defines: dict[str, object], dtype: str, text: str = "") -> bytes:
    """A cubin of kernels/ with the coefficients of exp2 for results of `dtype`; the same object for the same call."""
    from ..driver import nvrtc
    from ..driver.facts import device as facts

    macros = [f"-D{name}={int(value) if isinstance(value, bool) else value}" for name, value in defines.items()]
    macros.append("-DTERMS=" + ",".join(f"{value.hex()}f" for value in terms(dtype)))
    return _cubin(nvrtc.KERNELS, files, facts(device).arch, tuple(macros), text)


@functools.lru_cache(maxsize=1024)
def _cubin(folder: Path, files: tuple[str, ...], arch: str, macros: tuple[str, ...], text: str) -> bytes:
    """A new length of the cache is a new launch of old code: without files read and hashed, it is bound in no time."""
    from ..driver.nvrtc import compile_text

    text += "".join(f'#include "{name}"\n' for name in files)
    return compile_text(text, name=f"{files[-1][:-3]}_call.cu", arch=arch, options=("-std=c++17", *macros))


def mask_defines(case: Case) -> dict[str, object]:
    kind = KINDS.get(case.dtype_mask or "", 0)
    return {"MASK": case.masks, "MASK_KIND": kind, "CAUSAL": case.offset is not None, "OUT": KINDS[case.dtype_out]}


def longs(*values: int) -> list[Parameter]:
    return [("i64", value) for value in values]


def ints(*values: int) -> list[Parameter]:
    return [("i32", value) for value in values]


def blocks_of(groups: int, device: int) -> int:
    """Blocks of each of so many groups that together fill a device twice."""
    from ..driver.facts import device as facts

    return -(-2 * facts(device).multiprocessors // groups)


def fma_defines(case: Case) -> dict[str, object]:
    return {"D": case.d, "NJ": -(-case.dv // 32), "KIND": KINDS[case.dtype], **mask_defines(case)}


def bind_fma(case: Case, device: int, ranged: tuple[int, ...] = ()) -> Run:
    """`ranged` has strides of ranges and of the order, and its tiles, where queries have their own ranges."""
    from ..driver.kernel import load

    columns = -(-case.dv // 32)
    defines = fma_defines(case) | ({"RANGED": True} if ranged else {})
    kernel = load(compiled(("attention/fma.cu",), device, defines, case.dtype), "attention_fma", device)
    padded = -(-case.d // 32) * 32
    shared = 4 * (32 * padded + 32 * LEAF + max(32 * (LEAF + 1), 32 * 32 * columns))
    steps = [step for x in case.operands for step in x.strides[:3]]
    params: list[Parameter] = [
        *["ptr"] * 8, *longs(*steps, *(case.mask or (0, 0, 0, 0)), *case.y_strides),
        *ints(case.tq, case.tk, case.dv, case.group, case.offset or 0), ("f32", case.c),
        *(["ptr", "ptr", *longs(*ranged[:-1]), *ints(ranged[-1])] if ranged else []),
    ]  # fmt: skip
    tiles = -(-case.tq // FMA_ROWS)
    if ranged:
        tiles = min(ranged[-1], blocks_of(case.heads * case.batch, device))
    grid = (case.heads, tiles, case.batch)
    return kernel.bind(params, grid=grid, block=(256,), shared=shared, pdl=True)


def _meet_defines(case: Case) -> dict[str, object]:
    return {
        "OUT": KINDS[case.dtype_out],
        "CAUSAL": case.offset is not None,
        "THREADS": 128 if case.dv <= 128 else 256,
        "AT_ONCE": 8 if case.leaves <= 8 else 16 if case.leaves <= 16 else 32,
    }


def _bind_meet(case: Case, device: int) -> Run:
    from ..driver.kernel import load

    threads, defines = 128 if case.dv <= 128 else 256, _meet_defines(case)
    kernel = load(compiled(("attention/meet.cu",), device, defines, case.dtype), "attention_meet", device)
    sizes = (case.tq, case.tk, case.dv, case.heads, case.group, case.offset or 0, case.batch)
    grid = (case.tq * case.group, case.heads // case.group, case.batch)
    params: list[Parameter] = [*["ptr"] * 5, *longs(*case.y_strides), *ints(*sizes)]
    return kernel.bind(params, grid=grid, block=(threads,), pdl=True)


def _power_of_two(n: int) -> int:
    return max(16, 1 << (n - 1).bit_length())


def _rows_of(case: Case) -> int:
    """Rows of a Triton tile."""
    return 16 if case.tq * case.group <= 16 else 64  # tiles of 32 rows have not shown their bits on a device


def _bind_triton(case: Case, name: str, device: int) -> Run:
    rows, block = case.tq * case.group, _rows_of(case)
    built, values = triton_kernel(case, name, block, device)
    tiles = -(-rows // block)
    grid = (tiles * (case.leaves if name == "split" else 1), case.heads // case.group, case.batch)
    walk = built.bind(device, grid, values, pdl=True)
    return _met(case, walk, device) if name == "split" else lambda stream, *at: walk(stream, *at, 0)


def _bind_few(case: Case, device: int) -> Run:
    from .hopper import bind_few

    walk = bind_few(case, device)
    return _met(case, walk, device) if case.leaves > 1 else lambda stream, *at: walk(stream, *at, 0)


def _met(case: Case, walk: Run, device: int) -> Run:
    """Sums of leaves in memory of the call's own, then their meeting."""
    meet = _bind_meet(case, device)
    nbytes = 4 * case.batch * case.heads * case.leaves * case.tq * (case.dv + 2)

    def run(stream: int, q: int, k: int, v: int, mask: int, start: int, stop: int, y: int, stats: int) -> None:
        memory = workspace(nbytes, device)
        sums = memory.data_ptr()
        walk(stream, q, k, v, mask, start, stop, y, stats, sums)
        meet(stream, sums, y, stats, start, stop)

    return run


def triton_facts(
    case: Case, name: str, block: int, device: int
) -> tuple[dict[str, str], dict[str, Any], tuple[str, ...], dict[str, object], dict[str, float]]:
    """Types, constants, what is a multiple of 16, options, and the values of parameters that are fixed."""
    from ..driver.facts import device as facts

    q, k, v = case.operands
    axes = ("b", "h", "t")
    steps = {f"{x}_{axis}": s for x, o in zip("qkv", (q, k, v), strict=True)
             for axis, s in zip(axes, steps_of(o)[:3], strict=True)}  # fmt: skip
    steps |= dict(zip(("mask_b", "mask_h", "mask_t", "mask_k"), case.mask or (0, 0, 0, 0), strict=True))
    steps |= dict(zip(("y_b", "y_h", "y_t"), case.y_strides, strict=True))
    sizes = {"tq": case.tq, "tk": case.tk, "d": case.d, "dv": case.dv, "heads": case.heads, "group": case.group,
             "pack": case.group, "offset": case.offset or 0}  # fmt: skip
    dtype = f"*{TYPES[case.dtype]}"
    types = {"q": dtype, "k": dtype, "v": dtype, "mask": f"*{TYPES[case.dtype_mask or 'bool']}", "start": "*i32",
             "stop": "*i32", "y": f"*{TYPES[case.dtype_out]}", "stats": "*fp32", "sums": "*fp32"}  # fmt: skip
    types |= dict.fromkeys(steps, "i64") | dict.fromkeys(sizes, "i32") | {"c": "fp32"}
    d, dv = _power_of_two(case.d), _power_of_two(case.dv)
    constants: dict[str, Any] = {
        "ROWS": block, "D": d, "DV": dv, "TERMS": terms(case.dtype), "MASK": case.masks,
        "CAUSAL": case.offset is not None, "STARTS": case.starts, "STOPS": case.stops,
        "WALK": ("split", "leaf", "walk").index(name), "EVEN_D": d == case.d, "EVEN_DV": dv == case.dv,
        "STATS": case.stats, "PDL": facts(device).capability[0] >= 9,
    }  # fmt: skip
    hints = ["y", "stats", "sums"] + (["q", "k", "v"] if case.aligned else [])
    hints += [key for key, step in steps.items() if step % 16 == 0] + [
        key for key in ("d", "dv") if not sizes[key] % 16
    ]
    options: dict[str, object] = {"num_warps": 8 if max(d, dv) >= 128 else 4, "num_stages": 1}
    return types, constants, tuple(hints), options, {**steps, **sizes, "c": case.c}


@functools.lru_cache(maxsize=256)
def triton_kernel(case: Case, name: str, block: int, device: int) -> tuple[Any, dict[str, float]]:
    """The Triton kernel, and the values of its parameters that are fixed."""
    from ..driver.triton_build import build
    from ..gemm.tile.family import arch
    from .tile import attention

    types, constants, hints, options, values = triton_facts(case, name, block, device)
    built = build(
        attention, types, constants, aligned=hints, capability=arch(device), launch_pdl=constants["PDL"], **options
    )
    return built, values
