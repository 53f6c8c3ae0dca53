"""What the compiler will emit for: vector width, half-precision conversion, register tile.

The compiler is asked, not the processor: NUMBA_CPU_NAME and NUMBA_CPU_FEATURES may say otherwise than the host, and an
instruction that the target lacks is a fatal error or a slow library call.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

_PROBE = """
declare <16 x float> @llvm.fma.v16f32(<16 x float>, <16 x float>, <16 x float>)
define void @fma(ptr %a, ptr %b) {
  %x = load <16 x float>, ptr %a
  %y = load <16 x float>, ptr %b
  %z = call <16 x float> @llvm.fma.v16f32(<16 x float> %x, <16 x float> %y, <16 x float> %x)
  store <16 x float> %z, ptr %a
  ret void
}
define void @half(ptr %a, ptr %b) {
  %x = load <8 x half>, ptr %a
  %y = fpext <8 x half> %x to <8 x float>
  store <8 x float> %y, ptr %b
  ret void
}
"""


@dataclass(frozen=True, slots=True)
class Target:
    """Shape of the vector code."""

    name: str  # processor as the compiler names it
    isa: str  # {"avx512", "avx2", "generic"}
    width: int  # fp32 lanes of a vector
    # mr, nr: most rows, and columns, of the register tile
    mr: int
    nr: int
    mr_direct: int  # most rows when A is walked in place: each row wants an address register
    half: bool  # the target converts fp16 in hardware
    x86: bool


@functools.cache
def target() -> Target:
    """The target that Numba compiles for in this process."""
    import llvmlite.binding as llvm
    from numba.core.registry import cpu_target

    triple, name, features = cpu_target.target_context.codegen().magic_tuple()[:3]
    module = llvm.parse_assembly(_PROBE)
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=name, features=features, opt=2)
    fma, half = machine.emit_assembly(module).split("half:", 1)
    x86 = triple.startswith(("x86_64", "i386", "i686"))
    converts = "vcvtph2ps" in half or not x86
    if "zmm" in fma:
        # In place 8 rows spill an address into the loop, at up to 40% (Zen 4, bimodal from process to process).
        # 12 x 32: 24 accumulators, 2 vectors of B, broadcasts folded in; 14 rows were 5% slower (Zen 4).
        return Target(name, "avx512", 16, 12, 32, 7, converts, x86)
    if "vfmadd" in fma and "ymm" in fma:
        # 6 x 16: 12 accumulators, 2 vectors of B, 1 broadcast of 16 registers.
        return Target(name, "avx2", 8, 6, 16, 6, converts, x86)
    return Target(name, "generic", 4, 4, 8, 4, converts, x86)
