"""Attention from tiles that the tensor copy engine brings: attention/hopper.cu and attention/few.cu."""

from __future__ import annotations

from collections.abc import Callable

from ..driver.tensormap import Encoder, encoder
from .plans import KINDS, OPERANDS, Case, Operand, Run, compiled, ints, longs, mask_defines, steps_of

__all__ = ["bind_few", "bind_hopper", "few_source", "source"]

CHUNK = 16384
WARPGROUPS = 2


def _instruction(name: str, operand: str, n: int, registers: bool) -> str:
    """One wgmma of 64 x n x 16: both operands in shared memory, K-major; or the first in registers, the second across.

    Scale 0 starts from zero.
    """
    count = n // 2
    d = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    if registers:
        given, inputs = "unsigned a, unsigned b, unsigned c, unsigned e", '"r"(a), "r"(b), "r"(c), "r"(e)'
        first, used, layouts = "{" + ", ".join(f"%{count + i}" for i in range(4)) + "}", 4, "1"
    else:
        given, inputs, first, used, layouts = "u64 x", '"l"(x)', f"%{count}", 1, "0, 0"
    return (
        f"DEVICE void {name}(float (&d)[{count}], {given}, u64 y, int scale) {{\n"
        f'  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + used + 1}, 0;\\n'
        f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{operand}.{operand} {{{d}}}, {first}, %{count + used}, "
        f'p, 1, 1, {layouts};\\n}}" : {outputs} : {inputs}, "l"(y), "r"(scale));\n}}\n'
    )


def chunks_of(case: Case) -> int:
    """Chunks of 64 columns."""
    return 1 if max(case.d, case.dv) <= 64 else 2


def source(case: Case) -> tuple[str, dict[str, object]]:
    """The instructions' text, and the macros."""
    operand, chunks = OPERANDS[case.dtype], chunks_of(case)
    text = '#include "include/hopper_ptx.cu"\n'
    text += _instruction("mma_s", operand, 128, False) + _instruction("mma_o", operand, 64 * chunks + 8, True)
    return text, {"KIND": KINDS[case.dtype], "CHUNKS": chunks, **mask_defines(case)}


def _map(case: Case, x: Operand, rows: int) -> Encoder:
    return encoder(case.dtype, sizes=x.shape, strides=(*steps_of(x)[:3], 1), box=(1, 1, rows, 64), promotion=256)


def bind_hopper(case: Case, device: int) -> Run:
    """Compile and bind."""
    from ..driver.facts import device as facts
    from ..driver.kernel import load

    text, defines = source(case)
    kernel = load(compiled(("attention/hopper.cu",), device, defines, case.dtype, text), "attention_hopper", device)
    chunks = chunks_of(case)
    tiles = -(-case.tq // (64 * WARPGROUPS))
    sizes = ints(case.tq, case.tk, case.dv, case.group, case.offset or 0, case.heads, tiles, case.batch)
    blocks = min(tiles * case.heads * case.batch, facts(device).multiprocessors)
    bound = kernel.bind(
        [
            *["map"] * 3, *["ptr"] * 5, *longs(*(case.mask or (0, 0, 0, 0)), *case.y_strides), *sizes, ("f32", case.c),
        ],
        grid=(blocks,),
        block=(128 * WARPGROUPS + 128,),
        shared=(9 if chunks == 2 else 5) * CHUNK + WARPGROUPS * chunks * 8192 + 1024,
        pdl=True,
    )  # fmt: skip
    q, k, v = case.operands
    map_q, map_k, map_v = _map(case, q, 64), _map(case, k, 128), _map(case, v, 128)

    def run(stream: int, q: int, k: int, v: int, mask: int, start: int, stop: int, y: int, stats: int) -> None:
        bound(stream, map_q(q), map_k(k), map_v(v), mask, start, stop, y, stats)

    return run


def few_source(case: Case) -> tuple[str, dict[str, object]]:
    """The includes, and the macros."""
    rows = case.tq * case.group
    tiles = 1 if rows <= 16 else 2 if rows <= 32 else 4
    only = case.leaves == 1
    defines = {"KIND": KINDS[case.dtype], "CHUNKS": chunks_of(case), "MT": tiles, "ONLY": only, **mask_defines(case)}
    return '#include "include/hopper_ptx.cu"\n', defines


def bind_few(case: Case, device: int) -> Callable[..., None]:
    """Compile and bind: ``launch(stream, q, k, v, mask, start, stop, y, stats, sums)``."""
    from ..driver.kernel import load

    text, defines = few_source(case)
    kernel = load(compiled(("attention/few.cu",), device, defines, case.dtype, text), "attention_few", device)
    q, k, v = case.operands
    rows, chunks = 16 * int(str(defines["MT"])), chunks_of(case)
    sizes = (case.tq, case.tk, case.d, case.dv, case.heads, case.group, case.group, case.offset or 0)
    bound = kernel.bind(
        [
            *["map"] * 2, *["ptr"] * 7, *longs(*steps_of(q)[:3], *(case.mask or (0, 0, 0, 0)), *case.y_strides),
            *ints(*sizes), ("f32", case.c),
        ],
        grid=(case.leaves * -(-case.tq * case.group // rows), case.heads // case.group, case.batch),
        block=(128,),
        shared=2 * chunks * CHUNK + rows * (128 * chunks + 16 + 272 + 16) + 1024,
        pdl=True,
    )  # fmt: skip
    map_k, map_v = _map(case, k, 128), _map(case, v, 128)

    def launch(
        stream: int, q: int, k: int, v: int, mask: int, start: int, stop: int, y: int, stats: int, sums: int
    ) -> None:
        bound(stream, map_k(k), map_v(v), q, mask, start, stop, y, stats, sums)

    return launch
