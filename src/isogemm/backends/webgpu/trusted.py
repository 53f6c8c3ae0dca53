"""Shaders without the checks that wgpu puts into them, for code whose first line says so.

wgpu clamps every index of arrays and counts the rounds of every loop. Kernels of whole vectors are without that: their
indices of arrays are made of constants and of a thread's number, rows and columns of operands are clamped by their own
code, K is a whole number of loads, and every loop ends with K. The chapter's kernels, which anybody may edit and run,
are checked. wgpu-py has no name for a module without checks; the library below it has.
"""

from __future__ import annotations

from typing import Any

TRUSTED = "// Without checks of indices and loops.\n"


def trusted_module(device: Any, code: str) -> Any:
    """A shader module of WGSL whose indices and loops are not checked; for errors wgpu's own, or a RuntimeError."""
    from wgpu.backends.wgpu_native import _api as native

    source = native.new_struct_p("WGPUShaderSourceWGSL *", code=native.to_c_string_view(code))
    source[0].chain.next = native.ffi.NULL
    source[0].chain.sType = native.lib.WGPUSType_ShaderSourceWGSL
    descriptor = native.new_struct_p(
        "WGPUShaderModuleDescriptor *",
        nextInChain=native.ffi.cast("WGPUChainedStruct *", source), label=native.to_c_string_view(""),
    )  # fmt: skip
    made = native.libf.wgpuDeviceCreateShaderModuleTrusted(device._internal, descriptor, 0)
    if made == native.ffi.NULL:
        raise RuntimeError("no shader module")
    return native.GPUShaderModule("", made, device)
