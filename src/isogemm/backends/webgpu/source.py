"""WGSL put together: a kernel's file, the parts that it calls, and constants. What was put together is its code.

``multiply_add`` is the device's ``fma`` where that is exact for these operands, else one made of integers; operands are
words of 32 bits, from which elements are taken, so no feature of the adapter's is needed for 16-bit types.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from ...formats.blocks import format_of
from .trusted import TRUSTED

FOLDER = Path(__file__).parent / "wgsl"
Constants = Mapping[str, int | bool | str]  # text: the name of a type

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
# What one word holds, as floats; the conversion of halves is the device's own here, and is admitted by its bits.
_PAIR = """
alias Held = vec2<f32>;
fn multiply_add_held(x: Held, y: Held, z: Held) -> Held {{
  return Held(multiply_add(x.x, y.x, z.x), multiply_add(x.y, y.y, z.y));
}}
fn one_of(x: Held, h: u32) -> f32 {{ return x[h]; }}
fn held(w: u32) -> Held {{ return {held}; }}
alias Two = vec4<f32>;
fn two(x: Held, y: Held) -> Two {{ return Two(x, y); }}
fn one_of_two(x: Two, h: u32) -> Held {{ return Held(x[2u * h], x[2u * h + 1u]); }}
alias Low = vec2<u32>;
fn lower(low: Low, x: Held) -> Low {{ return min(low, (bitcast<Low>(x) << Low(1u)) - Low(1u)); }}
fn least(low: Low) -> u32 {{ return min(low.x, low.y); }}
"""
_ONE = """
alias Held = f32;
fn multiply_add_held(x: Held, y: Held, z: Held) -> Held { return multiply_add(x, y, z); }
fn one_of(x: Held, h: u32) -> f32 { return x; }
fn held(w: u32) -> f32 { return bitcast<f32>(w); }
alias Two = vec2<f32>;
fn two(x: Held, y: Held) -> Two { return Two(x, y); }
fn one_of_two(x: Two, h: u32) -> Held { return x[h]; }
alias Low = u32;
fn lower(low: Low, x: Held) -> Low { return min(low, (bitcast<u32>(x) << 1u) - 1u); }
fn least(low: Low) -> u32 { return low; }
"""
HELD = {
    "float32": _ONE,
    "float16": _PAIR.format(held="unpack2x16float(w)"),
    "bfloat16": _PAIR.format(held="bitcast<vec2<f32>>(vec2<u32>(w << 16u, w & 0xffff0000u))"),
}
# Four neighbours of a vector, and one element, for operands of whole vectors.
_QUADS = {
    1: "fn quad(v: WordB, f: u32) -> vec4<f32> { return bitcast<vec4<f32>>(v); }",
    2: "fn quad(v: WordB, f: u32) -> vec4<f32> { return vec4<f32>(held(v[2u * f]), held(v[2u * f + 1u])); }",
}
_OF_VECTOR = (
    "fn element_{x}(i: u32) -> f32 {{ return one_of(held({x}_words[i / EACH][(i / HELD) % WORDS]), i % HELD); }}"
)
MULTIPLY_ADD = "fn multiply_add(x: f32, y: f32, z: f32) -> f32 {{ return {name}(x, y, z); }}"
# Where the device's own arithmetic is not the definition's, sums and conversions are made of integers, too.
ADDED = {
    True: "fn added(x: f32, y: f32) -> f32 { return x + y; }",
    False: "fn added(x: f32, y: f32) -> f32 { return fused(1.0, x, y); }",
}
HALF_OF = {
    True: "fn half_of(half: u32) -> f32 { return unpack2x16float(half).x; }",
    False: "fn half_of(half: u32) -> f32 { return widened(half); }",
}


@cache
def part(name: str) -> str:
    """A file of the folder ``wgsl``."""
    return (FOLDER / f"{name}.wgsl").read_text(encoding="utf-8")


def vectors(dtype: str, words: int) -> tuple[str, ...]:
    """The parts by which a kernel takes whole vectors of words: the floats of a word, and their multiply-add."""
    quad = _QUADS[1 if dtype == "float32" else 2]
    return HELD[dtype], *([quad] if words == 4 else []), *(_OF_VECTOR.format(x=x) for x in "ab")


def repeated(text: str, constants: Constants) -> str:
    """Lines between ``#for x in N`` and ``#end`` as often as the constant N says, with 0, 1, ... for ``$x``.

    Registers have names and no indices: what a compiler unrolls or not, and which index it checks, is not left to it.
    """
    lines, at = text.split("\n"), 0

    def filled(line: str, values: dict[str, int]) -> str:
        for name, value in values.items():
            line = line.replace(f"${name}", str(value))
        return line

    def block(values: dict[str, int]) -> list[str]:
        nonlocal at
        made: list[str] = []
        while at < len(lines):
            words = lines[at].split()
            if words[:1] == ["#end"]:
                break
            at += 1
            if words[:1] == ["#for"]:
                begun, count = at, int(constants[filled(words[3], values)])
                for value in range(max(count, 1)):
                    at = begun
                    lines_of = block(values | {words[1]: value})
                    made += lines_of if count else []
                at += 1
            else:
                made.append(filled(lines[at - 1], values))
        return made

    return "\n".join(block({}))


def element(operand: str, dtype: str) -> str:
    """The function that takes element i of an operand, ``a`` or ``b``, from its words."""
    return f"fn element_{operand}(i: u32) -> f32 {{ return {LOADS[dtype].format(words=f'{operand}_words')}; }}"


def blocks(fmt: str) -> tuple[str, ...]:
    """The parts that read the blocks of a format."""
    return fmt.lower(), "blocks", *([] if format_of(fmt).offset else ["plain"])


def operand_b(dtype: str) -> tuple[str, ...]:
    """The parts that take b[k, j]: from elements, or from blocks as ``Q4_0:float16``, rounded to that type."""
    fmt, _, rounded = dtype.partition(":")
    if not rounded:
        return element("b", dtype), "strided"
    return *blocks(fmt), f"fn to_type(x: f32) -> f32 {{ return {ROUNDED[rounded]}; }}", "dequantized"


def rounding_store(dtype: str) -> str:
    """The function that writes element i of out from the bits of a float32."""
    halves = "" if dtype == "float32" else WRITE_HALF
    return f"{halves}\nfn write(i: u32, bits: u32) {{ {STORES[dtype]} }}"


def assembled(kernel: str, parts: tuple[str, ...], constants: Constants, *, fused: bool, trusted: bool = False) -> str:
    """A kernel for a product: names of files, and texts that end with a brace.

    `fused`: the device's own ``fma`` serves. `trusted`: it is compiled without wgpu's checks.
    """
    head = [_declared(name, value) for name, value in ({"WordA": "u32", "WordB": "u32"} | dict(constants)).items()]
    body = [text if text.rstrip().endswith("}") else repeated(part(text), constants) for text in parts]
    arithmetic = [MULTIPLY_ADD.format(name="fma" if fused else "fused"), ADDED[fused], HALF_OF[fused]]
    return (TRUSTED if trusted else "") + "\n".join([*head, *body, *arithmetic, repeated(part(kernel), constants)])


def _declared(name: str, value: int | bool | str) -> str:
    if isinstance(value, str):
        return f"alias {name} = {value};"
    return f"const {name} = {str(value).lower() if isinstance(value, bool) else f'{value}u'};"
