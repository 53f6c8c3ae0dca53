"""The text of Hopper's warpgroup products: device functions around one wgmma instruction each.

An instruction multiplies 64 rows of its first operand with `n` columns of its second one over 32 bytes of K, and adds
to float32 accumulators: 16 elements of 2 bytes, or 8 of tf32. Operands lie in shared memory, or the first one in
registers.
"""

from __future__ import annotations


def mma(
    operand: str, n: int, *, name: str = "mma", registers: bool = False, x_across: bool = False, y_across: bool = False
) -> str:
    """A device function ``name(d, x, y, scale)``: d = x @ y, plus what d holds where `scale` is not 0.

    Parameters
    ----------
    operand : {"bf16", "f16", "tf32"}
    n : int
        Columns; a thread holds ``float d[n / 2]``.
    registers : bool
        x is ``const unsigned (&)[4]``; else, as y, the 64 bits that describe a tile in shared memory.
    x_across, y_across : bool
        Rows of x or columns of y, not K, are contiguous; not of tf32.
    """
    count = n // 2
    taken = 4 if registers else 1
    x = "const unsigned (&x)[4]" if registers else "unsigned long long x"
    first = "{" + ", ".join(f"%{count + i}" for i in range(4)) + "}" if registers else f"%{count}"
    inputs = ", ".join(f'"r"(x[{i}])' for i in range(4)) if registers else '"l"(x)'
    across = [y_across] if registers else [x_across, y_across]
    layouts = "" if operand == "tf32" else "".join(f", {int(flag)}" for flag in across)
    d = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    return (
        f"static __device__ __forceinline__ void {name}(float (&d)[{count}], {x}, unsigned long long y, int scale) {{\n"
        f'  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + taken + 1}, 0;\\n'
        f"wgmma.mma_async.sync.aligned.m64n{n}k{8 if operand == 'tf32' else 16}.f32.{operand}.{operand} "
        f'{{{d}}}, {first}, %{count + taken}, p, 1, 1{layouts};\\n}}" : {outputs} : {inputs}, '
        '"l"(y), "r"(scale));\n}\n'
    )
