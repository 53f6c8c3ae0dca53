"""WGSL put together: a kernel's file, the parts that it calls, and constants. What was put together is its code.

``multiply_add`` is the device's ``fma`` where that is exact for these operands, else one made of integers; operands are
words of 32 bits, from which elements are taken, so no feature of the adapter's is needed for 16-bit types.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

__all__ = ["Constants", "assembled", "element", "operand_b", "part", "rounding_store"]

FOLDER = Path(__file__).parent / "wgsl"
Constants = Mapping[str, int | bool]

_HALF = "({words}[i >> 1u] >> ((i & 1u) << 4u))"
LOADS = {
    "float32": "bitcast<f32>({words}[i])",
    "float16": f"widened({_HALF} & 0xffffu)",
    "bfloat16": f"bitcast<f32>({_HALF} << 16u)",
}
STORES = {
    "float32": "out_words[i] = select(bits, 0x7fffffffu, (bits & 0x7fffffffu) > 0x7f800000u);",
    "float16": "write_half(i, narrowed(bits));",
    "bfloat16": "write_half(i, select((bits + 0x7fffu + ((bits >> 16u) & 1u)) >> 16u, 0x7fffu, "
    "(bits & 0x7fffffffu) > 0x7f800000u));",
}
ROUNDED = {
    "float32": "x",
    "float16": "widened(narrowed(bitcast<u32>(x)))",
    "bfloat16": "bitcast<f32>((bitcast<u32>(x) + 0x7fffu + ((bitcast<u32>(x) >> 16u) & 1u)) & 0xffff0000u)",
}
# Two threads may own the halves of a word: each changes its own alone.
WRITE_HALF = """
fn write_half(i: u32, half: u32) {
  let up = (i & 1u) << 4u;
  atomicAnd(&out_words[i >> 1u], ~(0xffffu << up));
  atomicOr(&out_words[i >> 1u], half << up);
}
"""
MULTIPLY_ADD = "fn multiply_add(x: f32, y: f32, z: f32) -> f32 {{ return {name}(x, y, z); }}"


@cache
def part(name: str) -> str:
    """A file of the folder ``wgsl``."""
    return (FOLDER / f"{name}.wgsl").read_text(encoding="utf-8")


def element(operand: str, dtype: str) -> str:
    """The function that takes element i of an operand, ``a`` or ``b``, from its words."""
    return f"fn element_{operand}(i: u32) -> f32 {{ return {LOADS[dtype].format(words=f'{operand}_words')}; }}"


def operand_b(dtype: str) -> tuple[str, ...]:
    """The parts that take b[k, j]: from elements, or from blocks as ``Q4_0:float16``, rounded to that type."""
    fmt, _, rounded = dtype.partition(":")
    if not rounded:
        return element("b", dtype), "strided"
    return "blocks", fmt.lower(), f"fn to_type(x: f32) -> f32 {{ return {ROUNDED[rounded]}; }}", "dequantized"


def rounding_store(dtype: str) -> str:
    """The function that writes element i of out from the bits of a float32."""
    halves = "" if dtype == "float32" else WRITE_HALF
    return f"{halves}\nfn write(i: u32, bits: u32) {{ {STORES[dtype]} }}"


def assembled(kernel: str, parts: tuple[str, ...], constants: Constants, *, fused: bool) -> str:
    """A kernel for a product.

    Parameters
    ----------
    parts : tuple of str
        Names of files, and texts that end with a brace.
    fused : bool
        The device's own ``fma`` serves.
    """
    head = [f"const {name} = {str(value).lower() if isinstance(value, bool) else f'{value}u'};" for name, value in
            constants.items()]  # fmt: skip
    body = [text if text.endswith("}") else part(text) for text in parts]
    return "\n".join([*head, *body, MULTIPLY_ADD.format(name="fma" if fused else "fused"), part(kernel)])
