"""Any GPU through WebGPU: Vulkan, Metal and Direct3D 12 lie below it, and software where there is none."""
