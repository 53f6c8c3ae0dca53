"""Shaders without the checks that wgpu puts into them: indices are bounded by our own code, which admission tries.

wgpu clamps every index of private and workgroup arrays and counts the rounds of every loop. wgpu-py has no name for a
module without that; the library below it has.
"""

from __future__ import annotations

from typing import Any

__all__ = ["trusted_module"]


def trusted_module(device: Any, code: str) -> Any:
    """A shader module of WGSL whose indices and loops are not checked.

    Raises
    ------
    RuntimeError
        The code has errors; wgpu's own error where it names them.
    """
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
